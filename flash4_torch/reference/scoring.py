"""The scores of a call: scale, softcap, mask and band, always in this order, for any tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import Band
from .dropout import Dropout


class Scoring(NamedTuple):
    """How a call turns q k^T into attention weights::

        x = scale * q k^T
        x = softcap * tanh(x / softcap)
        x = x + attn_mask
        x = -inf outside band

    `attn_mask`, bool (True attends) or floating, is 4-D and broadcasts to (B, Hq, Sq, Sk); softcap 0 is off.
    """

    scale: float
    band: Band = Band()
    softcap: float = 0.0
    attn_mask: Tensor | None = None
    dropout: Dropout | None = None

    def cap(self, x: Tensor) -> Tensor:
        """Applies softcap to scaled q k^T; the derivative is 1 - (result / softcap)^2."""
        return x if self.softcap == 0.0 else torch.tanh(x / self.softcap) * self.softcap

    def biases(
        self, like: Tensor, Sq: int, Sk: int, batch: range, rows: range, keys: range
    ) -> Iterator[Tensor]:
        """Terms to add to the capped scores (b, Hq, rows, keys) of one rectangle, in the dtype of `like`.

        These are the mask and the band, each left broadcastable: converting booleans to zeros and -inf is
        then cheap, and adding is several times faster than filling.
        """
        if self.attn_mask is not None:
            mask = mask_tile(self.attn_mask, batch, rows, keys)
            yield _zero_where(mask, like) if mask.dtype == torch.bool else mask.to(like.dtype)
        if not self.band.covers(rows, keys, Sq, Sk):
            i = torch.arange(rows.start, rows.stop, device=like.device)[:, None]
            j = torch.arange(keys.start, keys.stop, device=like.device)
            yield _zero_where(torch.as_tensor(self.band.visible(i, j, Sq, Sk)), like)


def _zero_where(seen: Tensor, like: Tensor) -> Tensor:
    """0 where True, -inf where False."""
    return like.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)


def mask_tile(mask: Tensor, batch: range, rows: range, keys: range) -> Tensor:
    """The part of a broadcastable mask that a tile sees; dimensions of size 1 stay 1."""
    for dim, span in ((0, batch), (2, rows), (3, keys)):
        if mask.shape[dim] != 1:
            mask = mask.narrow(dim, span.start, len(span))
    return mask


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of lse: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
