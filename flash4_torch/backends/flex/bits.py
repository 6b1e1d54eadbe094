"""Block masks as bits: attn_mask's tables (`kernels.common.mask_tables`) of what blocks and mask_mod show.

Kernels read a bit for each score of a partial block then, where they would compute mask_mod: one instruction
and an eighth, whatever the function is. One kernel serves all masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...flex_problem import FlexInputs, FlexProblem
from ...kernels.common import mask_tables
from ...kernels.common.mask_tables import MaskPlan
from ...reference.flex import EMPTY, FULL, Blocks
from ..compiled.masks import MaskArgs, reader, transposed_reader
from ..compiled.targets import Find
from ..compiled.tensors import allocator_like
from .partial_blocks import Mask, mask_of, parts
from .tables import apart

_MOST = 1 << 30
"""Scores of a mask up to which tables of bits are made, a bit each: 32k x 32k in 128 MiB."""
_AT_ONCE = 1 << 27
"""Scores of which a byte each is held meanwhile."""

Made = dict[Hashable, Any]
"""What was made of a mask: tables, by the kernel's tiles and whether rows are keys; or the whole mask."""
TablesOf = Callable[[MaskPlan, Find, bool], MaskArgs]
"""Function that gives a call's tables, made once for each kernel; True: rows are keys."""


def may_be_made(mask: Mask) -> bool:
    """Whether there is room for a mask's bits."""
    B, H, down, across = mask.blocks.state.shape
    return B * H * down * mask.blocks.size[0] * across * mask.blocks.size[1] <= _MOST


def tables_of(inputs: FlexInputs, problem: FlexProblem, made: Made) -> TablesOf:
    """The tables of a call's mask: those in `made`, or new ones, which are put there."""

    def found(plan: MaskPlan, find: Find, is_transposed: bool) -> MaskArgs:
        key = plan, is_transposed
        if key not in made:
            made[key] = apart(inputs.q.device, lambda: _tables(inputs, problem, plan, find, is_transposed))
        tables: MaskArgs = made[key]
        return tables

    return found


@torch.no_grad()
def _tables(
    inputs: FlexInputs, problem: FlexProblem, plan: MaskPlan, find: Find, is_transposed: bool
) -> MaskArgs:
    mask = mask_of(inputs, problem)
    assert mask is not None
    B, H = mask.blocks.state.shape[:2]
    rows, columns = (mask.Sk, mask.Sq) if is_transposed else (mask.Sq, mask.Sk)
    shape, block = (B, H, rows, columns), mask.blocks.size[is_transposed]
    tables = inputs.q.new_empty(mask_tables.place(plan, *shape).words, dtype=torch.int32)
    # Strips are whole blocks of the mask, and whole tiles.
    least = math.lcm(block, plan.rows)
    step = least * max(1, _AT_ONCE // (B * H * least * columns))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        shown = shown_by(mask, int(is_transposed), first // block, -(-last // block))
        allocator = allocator_like(shown)
        if is_transposed:
            found = transposed_reader(find, plan, shown, columns, allocator)(shown)
        else:
            found = reader(find, plan, shown, lambda x: x, allocator)(shown)
        assert found is not None
        own, whole = _parts_of(plan, found[1], found[0].shape), _parts_of(plan, tables, shape)
        for part, all_rows, each in zip(own, whole, (1, plan.rows, plan.rows), strict=True):
            all_rows.narrow(2, first // each, part.shape[2]).copy_(part)
    # Kernels read the bits, and of the mask itself the sizes alone.
    return inputs.q.new_zeros(1, dtype=torch.bool).expand(shape), tables


def _parts_of(plan: MaskPlan, tables: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Bits, blocks and rank, whose dimension 2 is one of rows."""
    at = mask_tables.place(plan, *shape)
    bits, blocks, rank, _ = tables.tensor_split([at.blocks, at.rank, at.words])
    lists = shape[0], at.HB, at.MB
    return bits.view(*shape[:3], -1), blocks.view(*lists, at.NB), rank.view(*lists, at.NB + 1)


def shown_by(mask: Mask, dim: int, first: int, last: int) -> Tensor:
    """What a mask shows in its rows (dim 0) or columns of blocks from `first` to before `last`, bool (B or 1,
    Hq or 1, queries, keys).
    """
    (q_block, kv_block), ends = mask.blocks.size, [mask.Sq, mask.Sk]
    own = mask.blocks.state.narrow(2 + dim, first, last - first)
    B, H, down, across = own.shape
    whole = torch.empty(B, H, down, q_block, across, kv_block, dtype=torch.bool, device=own.device)
    by_block = whole.transpose(3, 4)
    by_block.copy_((own == FULL)[..., None, None])
    state = torch.full_like(mask.blocks.state, EMPTY, memory_format=torch.contiguous_format)
    state.narrow(2 + dim, first, last - first).copy_(own)
    partial = parts(mask._replace(blocks=Blocks(state, mask.blocks.size)))
    assert partial is not None
    for part in partial:
        at = [x.flatten().long() for x in (part.b, part.h, part.row, part.column)]
        at[2 + dim] -= first
        by_block[tuple(at)] = part.seen
    ends[dim] -= first * mask.blocks.size[dim]
    return whole.view(B, H, down * q_block, across * kv_block)[:, :, : ends[0], : ends[1]]
