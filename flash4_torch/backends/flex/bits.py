"""Block masks as bits: attn_mask's tables (`kernels.common.mask_tables`) of what blocks and mask_mod show.

Kernels read a bit for each score of a partial block then, where they would compute mask_mod: one instruction
and an eighth, whatever the function is, which is computed once for all heads that share the mask. One kernel
for attention serves all masks; a small one evaluates each function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...flex_problem import FlexInputs, FlexProblem
from ...kernels.common import mask_tables
from ...kernels.common.mask_tables import MaskPlan
from ...reference.flex import EMPTY, FULL, Blocks
from .. import constants
from ..compiled.masks import MaskArgs
from ..compiled.targets import BLOCK_BITS, Find
from .captured import captured_of
from .partial_blocks import Mask, parts
from .tables import apart, new_states, outer_of
from .tiled import mods_of, program_of

_MOST = 1 << 30
"""Scores of a mask up to which tables of bits are made, a bit each: 32k x 32k in 128 MiB."""

_LEAST = 1 << 26
"""Scores of all heads from which tables are worth their kernels if they serve one call only."""
_FEW_QUERIES = 16
"""Queries for which they are, too: rows of a tile that are not there would be computed with them."""

Made = dict[Hashable, Any]
"""What was made of a mask: tables, by the kernel's tiles and whether rows are keys; or the whole mask."""
TablesOf = Callable[[MaskPlan, Find, bool], MaskArgs]
"""Function that gives a call's tables; True: rows are keys."""


def may_be_made(inputs: FlexInputs, problem: FlexProblem) -> bool:
    """Whether there is room for the bits of a call's mask."""
    return math.prod(outer(inputs, problem)) * problem.extent.Sq * problem.extent.Sk <= _MOST


def are_worth_while(problem: FlexProblem) -> bool:
    """Whether a mask that is evaluated for one call should be: kernels may compute mask_mod themselves."""
    B, Sq, Sk, Hq, _ = problem.extent
    return Sq <= _FEW_QUERIES or B * Hq * Sq * Sk >= _LEAST


def tables_of(inputs: FlexInputs, problem: FlexProblem, made: Made | None) -> TablesOf:
    """The tables of a call's mask: those in `made`, or new ones, which are put there; without it new ones in
    each call, as in a CUDA graph, whose replays make them again.
    """

    def found(plan: MaskPlan, find: Find, is_transposed: bool) -> MaskArgs:
        if made is None:
            return _tables(inputs, problem, plan, find, is_transposed)
        key = plan, is_transposed
        if key not in made:
            made[key] = apart(inputs.q.device, lambda: _tables(inputs, problem, plan, find, is_transposed))
        tables: MaskArgs = made[key]
        return tables

    return found


def _tables(
    inputs: FlexInputs, problem: FlexProblem, plan: MaskPlan, find: Find, is_transposed: bool
) -> MaskArgs:
    mods, lengths, (_, mask_mod) = inputs.mods, problem.extent[1:3], mods_of(inputs)
    lists = mods.lists
    block: tuple[int, ...] = mods.q_block, mods.kv_block
    own = new_states(lists, block, lengths)
    states = own.states
    if is_transposed:
        states, block, lengths = states.transpose(2, 3), block[::-1], lengths[::-1]
    shape = *outer(inputs, problem), *lengths
    tables = inputs.q.new_empty(mask_tables.place(plan, *shape).words, dtype=torch.int32)
    # Kernels read the bits, and of the mask itself the sizes alone.
    mask = constants.false(inputs.q.device).expand(shape)
    make = find(BLOCK_BITS, (plan, mods.mask_mod, is_transposed, own.full is not None))
    make(*own.lists, own.states, states, captured_of(mask_mod), block, mask, tables)
    return mask, tables


def outer(inputs: FlexInputs, problem: FlexProblem) -> tuple[int, int]:
    """Batch entries and heads of a call's mask, or 1."""
    mods, extent = inputs.mods, problem.extent
    B, H = outer_of(mods.lists)
    reads_entry, reads_head = _reads(mods.mask_mod) if mods.mask_mod else (False, False)
    return extent.B if reads_entry else B, extent.Hq if reads_head else H


@lru_cache(maxsize=1024)
def _reads(mask_mod: str) -> tuple[bool, bool]:
    """Whether a function depends on the batch entry, and on the head."""
    program = program_of(mask_mod)
    return program.reads(0), program.reads(1)


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
