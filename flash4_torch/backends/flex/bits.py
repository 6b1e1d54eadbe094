"""Block masks as bits: attn_mask's tables (`kernels.common.mask_tables`) of what blocks and mask_mod show.

Kernels read a bit for each score of a partial block then, where they would compute mask_mod: one instruction
and an eighth, whatever the function is. One kernel serves all masks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...flex_problem import FlexInputs, FlexProblem
from ...kernels.common.mask_tables import MaskPlan
from ...reference.flex import FULL
from ..compiled.masks import MaskArgs, reader, transposed
from ..compiled.targets import Find
from ..compiled.tensors import allocator_like
from .partial_blocks import Mask, mask_of, parts
from .tables import apart

_MOST = 1 << 28
"""Scores of a mask up to which tables of bits are made: a byte each meanwhile, and a bit each afterwards."""

Made = dict[tuple[MaskPlan, bool], MaskArgs]
"""A mask's tables, by the kernel's tiles, and whether rows are keys."""
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
        return made[key]

    return found


@torch.no_grad()
def _tables(
    inputs: FlexInputs, problem: FlexProblem, plan: MaskPlan, find: Find, is_transposed: bool
) -> MaskArgs:
    mask = mask_of(inputs, problem)
    assert mask is not None
    shown = shown_by(mask)
    if is_transposed:
        shown = transposed(mask.Sq)(shown)
    args = reader(find, plan, shown, lambda x: x, allocator_like(shown))(shown)
    assert args is not None
    # Kernels read the bits, and of the mask itself the sizes alone.
    return shown.new_zeros(1).expand(shown.shape), args[1]


def shown_by(mask: Mask) -> Tensor:
    """What a mask shows, bool (B or 1, Hq or 1, Sq, Sk)."""
    state, (q_block, kv_block) = mask.blocks.state, mask.blocks.size
    B, H, down, across = state.shape
    whole = torch.empty(B, H, down, q_block, across, kv_block, dtype=torch.bool, device=state.device)
    by_block = whole.transpose(3, 4)
    by_block.copy_((state == FULL)[..., None, None])
    partial = parts(mask)
    assert partial is not None
    for part in partial:
        by_block[tuple(x.flatten().long() for x in (part.b, part.h, part.row, part.column))] = part.seen
    return whole.view(B, H, down * q_block, across * kv_block)[:, :, : mask.Sq, : mask.Sk]
