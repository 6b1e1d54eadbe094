"""A block mask's states and its mask_mod, which is evaluated where blocks are partial: what a call shows.

Whatever a mask's function is, and whether its blocks are those of its function, is of no matter here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...flex_problem import FlexInputs, FlexProblem
from ...reference.flex import FULL, PARTIAL, Blocks, Mod
from .tiled import blocks_of, mods_of

_MOST_SCORES = 1 << 28
"""Scores of partial blocks up to which a mask is evaluated: those of 16k blocks of 128 x 128."""
_SCORES = 1 << 23
"""Scores whose mask is held at once."""


class Mask(NamedTuple):
    """A call's block mask, for each of what it depends on: batch entries and heads."""

    blocks: Blocks
    """States (B or 1, Hq or 1, rows, columns) of what lies inside of the call; no block is longer than it."""
    mod: Mod | None
    """mask_mod; without one no block is partial."""
    Sq: int
    Sk: int


class Part(NamedTuple):
    """Some partial blocks, n of them."""

    b: Tensor
    h: Tensor
    row: Tensor
    column: Tensor
    """(n, 1, 1) int32: where each block is, among blocks."""
    i: Tensor
    """(n, q_block, 1) int32: queries, those beyond the end as the last one."""
    j: Tensor
    seen: Tensor
    """(n, q_block, kv_block): what is shown; nothing beyond the end."""


def mask_of(inputs: FlexInputs, problem: FlexProblem) -> Mask | None:
    """The mask of a call that has blocks; None if they do not cover the call."""
    blocks, (_, mask_mod), extent = blocks_of(inputs), mods_of(inputs), problem.extent
    assert blocks is not None
    if 0 in extent:
        return None
    size = min(blocks.size[0], extent.Sq), min(blocks.size[1], extent.Sk)
    down, across = -(-extent.Sq // size[0]), -(-extent.Sk // size[1])
    state = blocks.state[:, :, :down, :across]
    if state.shape[2:] != (down, across):
        return None
    if mask_mod is None:
        state = torch.where(state == PARTIAL, FULL, state)
    else:
        b, h = (n if mask_mod.program.reads(lane) else -1 for lane, n in enumerate((extent.B, extent.Hq)))
        state = state.expand(b, h, -1, -1)
    return Mask(Blocks(state, size), mask_mod, extent.Sq, extent.Sk)


def parts(mask: Mask) -> Iterator[Part] | None:
    """All partial blocks, some at a time; None if too many scores would have to be evaluated.

    The host waits for their number.
    """
    if mask.mod is None:
        return iter(())
    places, area = (mask.blocks.state == PARTIAL).nonzero(), mask.blocks.size[0] * mask.blocks.size[1]
    if len(places) * area > _MOST_SCORES or (len(places) and area > _SCORES):
        return None
    return _parts(mask, mask.mod, places)


def _parts(mask: Mask, mod: Mod, places: Tensor) -> Iterator[Part]:
    (q_block, kv_block), Sq, Sk = mask.blocks.size, mask.Sq, mask.Sk
    within = [torch.arange(n, dtype=torch.int32, device=places.device) for n in (q_block, kv_block)]
    for part in places.split(max(1, _SCORES // (q_block * kv_block))):
        b, h, row, column = part.to(torch.int32)[:, :, None, None].unbind(1)
        i, j = row * q_block + within[0][:, None], column * kv_block + within[1]
        is_there = (i < Sq) & (j < Sk)
        i, j = i.clamp(max=Sq - 1), j.clamp(max=Sk - 1)
        # Functions get four dimensions, as in `reference.flex`.
        shown = mod.result([x[:, None] for x in (b, h, i, j)], clamps=True)
        seen = shown.expand(len(part), 1, q_block, kv_block)[:, 0] & is_there
        yield Part(b, h, row, column, i, j, seen)
