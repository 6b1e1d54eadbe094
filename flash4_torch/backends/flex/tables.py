"""A block mask's lists as tables by which kernels visit blocks of keys: see `kernels.common.mask_tables`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...reference.flex import EMPTY, FULL, Blocks


class Tables(NamedTuple):
    """Arguments of a kernel: `kernels.common.mods.BlockArgs` documents the same fields."""

    visible: Tensor
    rank: Tensor
    states: Tensor
    q_block: int
    kv_block: int


def tables(blocks: Blocks, Sq: int, Sk: int, queries: int, keys: int) -> Tables:
    """The tables for tiles of `queries` rows and blocks of `keys` keys; the mask's own may be any."""
    rows, columns = _spans(Sq, queries, blocks.size[0]), _spans(Sk, keys, blocks.size[1])
    shown = _count(blocks.state != EMPTY, rows, columns)
    full = _count(blocks.state == FULL, rows, columns)
    heights, widths = (torch.tensor([b - a for a, b in spans]) for spans in (rows, columns))
    area = (heights[:, None] * widths).to(shown)
    is_visible = shown > 0
    rank = torch.nn.functional.pad(is_visible.cumsum(-1, dtype=torch.int32), (1, 0))
    NB = len(columns)
    # What is not visible goes to one more column.
    places = torch.where(is_visible, rank[..., :-1], NB).long()
    entries = 2 * torch.arange(NB, dtype=torch.int32, device=shown.device) + (full < area)
    listed = rank.new_zeros(*places.shape[:-1], NB + 1).scatter_(-1, places, entries.to(torch.int32))
    return Tables(listed[..., :NB].contiguous(), rank, blocks.state, *blocks.size)


def _spans(size: int, tile: int, block: int) -> list[tuple[int, int]]:
    """The mask's blocks that each tile overlaps, first and last + 1."""
    return [(start // block, (min(start + tile, size) - 1) // block + 1) for start in range(0, size, tile)]


def _count(of: Tensor, rows: list[tuple[int, int]], columns: list[tuple[int, int]]) -> Tensor:
    """How many blocks of each tile are True, int32."""
    for dim, spans in ((-2, rows), (-1, columns)):
        sums = of.cumsum(dim, dtype=torch.int32)
        before = torch.cat([torch.zeros_like(sums.narrow(dim, 0, 1)), sums], dim)
        first, last = (torch.tensor(x, device=of.device) for x in zip(*spans, strict=True))
        of = before.index_select(dim, last) - before.index_select(dim, first)
    return of
