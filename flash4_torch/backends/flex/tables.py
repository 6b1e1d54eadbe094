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
    rows: int
    columns: int


def tables(blocks: Blocks, rows: int, columns: int, tile_rows: int, tile_columns: int) -> Tables:
    """The tables for tiles of these sizes; the mask's own blocks may be any."""
    device = blocks.state.device
    down = _Spans.of(rows, tile_rows, blocks.size[0], device)
    across = _Spans.of(columns, tile_columns, blocks.size[1], device)
    shown = _count(blocks.state != EMPTY, down, across)
    full = _count(blocks.state == FULL, down, across)
    area = (down.last - down.first)[:, None] * (across.last - across.first)
    is_visible = shown > 0
    rank = torch.nn.functional.pad(is_visible.cumsum(-1, dtype=torch.int32), (1, 0))
    NB = rank.shape[-1] - 1
    # What is not visible goes to one more column.
    places = torch.where(is_visible, rank[..., :-1], NB).long()
    entries = 2 * torch.arange(NB, dtype=torch.int32, device=device) + (full < area)
    listed = rank.new_zeros(*places.shape[:-1], NB + 1).scatter_(-1, places, entries.to(torch.int32))
    return Tables(listed[..., :NB].contiguous(), rank, blocks.state, *blocks.size)


class _Spans(NamedTuple):
    """The mask's blocks that each tile overlaps, `first <= n < last`, made on the device: nothing waits."""

    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, size: int, tile: int, block: int, device: torch.device) -> _Spans:
        starts = torch.arange(0, size, tile, device=device)
        return cls(starts // block, ((starts + tile).clamp(max=size) - 1) // block + 1)


def _count(of: Tensor, rows: _Spans, columns: _Spans) -> Tensor:
    """The number of True blocks that each tile overlaps, int32."""
    for dim, spans in ((-2, rows), (-1, columns)):
        sums = of.cumsum(dim, dtype=torch.int32)
        before = torch.cat([torch.zeros_like(sums.narrow(dim, 0, 1)), sums], dim)
        of = before.index_select(dim, spans.last) - before.index_select(dim, spans.first)
    return of
