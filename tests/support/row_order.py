"""The backward's workspaces, described once more: each query row's place, and the order of its dQ sums."""

from __future__ import annotations

import torch
from torch import Tensor

from flash4_torch.kernels.common.bwd.dq_blocks import DqBlocks, DqLanes
from flash4_torch.kernels.common.bwd.row_blocks import RowBlocks


def blocks_of(D: int, queries: int, tmem_order: bool = False, by_register: bool = False) -> RowBlocks:
    return RowBlocks.of(DqLanes(D, queries) if tmem_order else DqBlocks(D, queries, 2, by_register))


def ends_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def places(blocks: RowBlocks, lengths: list[int], varlen: bool) -> tuple[int, Tensor]:
    """The number of a head's rows in blocks, and the place of each row among them; dense: of one sequence."""
    if not varlen:
        return blocks.count(lengths[0]) * blocks.queries, torch.arange(lengths[0])
    ends = ends_of(lengths).tolist()
    count = blocks.packed_count(ends[-1], len(lengths)) * blocks.queries
    starts = [blocks.first(start, b) * blocks.queries for b, start in enumerate(ends[:-1])]
    rows = [start + torch.arange(n) for start, n in zip(starts, lengths, strict=True)]
    return count, torch.cat(rows)


def in_blocks(blocks: RowBlocks, x: Tensor) -> Tensor:
    """(..., n * m, columns) in the order of the main kernel's sums, (..., n, m * columns)."""
    if blocks.tmem_order:
        # block, band, row, vector, column
        lanes = x.unflatten(-2, (-1, blocks.queries // 32, 32)).unflatten(-1, (-1, 4))
        return lanes.transpose(-3, -2).flatten(-4).contiguous()
    split = x.unflatten(-2, (-1, blocks.bands, blocks.threads // 32, 2, 8)).unflatten(
        -1, (blocks.chunks, 4, 2)
    )
    # block, band, warp, upper or lower, row, chunk, lane's pair, column
    batch = range(split.dim() - 8)
    # A thread's numbers, of both rows and columns, lie last, or first of a chunk.
    places = (-5, -1, -6, -4, -2) if blocks.by_register else (-6, -4, -2, -5, -1)
    order = (split.dim() + d for d in (-8, -7, -3, *places))
    return split.permute(*batch, *order).flatten(-7).contiguous()


def out_of_blocks(blocks: RowBlocks, sums: Tensor) -> Tensor:
    """The inverse of `in_blocks`."""
    (order,) = in_blocks(blocks, torch.arange(blocks.floats).view(blocks.queries, blocks.columns))
    x = torch.empty_like(sums)
    x[..., order] = sums
    return x.unflatten(-1, (blocks.queries, blocks.columns)).flatten(-3, -2)
