"""Packed keys as a paged cache, for sequences whose lengths the device knows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ShapeError
from ..ops import check as common
from . import check


class Pages(NamedTuple):
    """A paged cache, and where in it the sequences are."""

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seqused_k: Tensor


def packed_as_pages(
    k: Tensor, v: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int | Tensor | None, seqused_k: Tensor | None
) -> Pages:
    """Packed k (Tk, Hk, D) and v as caches of pages of one key: no copies.

    Sequence b has the rows from cu_seqlens_k[b] on, as many as seqused_k[b] says, and at most its own.
    """
    most = min(common.max_seqlen("max_seqlen_k", max_seqlen_k, k.shape[0]), k.shape[0])
    key = torch.arange(max(most, 1), dtype=torch.int32, device=k.device)
    ends = cu_seqlens_k.to(torch.int32)
    lengths = ends.diff()
    if seqused_k is not None:
        B = cu_seqlens_k.shape[0] - 1
        check.integers("seqused_k", seqused_k, k)
        if tuple(seqused_k.shape) != (B,):
            raise ShapeError("seqused_k", tuple(seqused_k.shape), f"it must be (B,), with B = {B}")
        lengths = torch.minimum(lengths, seqused_k)
    return Pages(k[:, None], v[:, None], ends[:-1, None] + key, lengths)
