"""A block mask's lists by kernels that evaluate mask_mod, where masks of one function are made again and again.

A kernel takes its time to compile, once for a function, so the first mask of each is left to torch's operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ... import forks
from ...kernels.common import lowering
from ...reference.flex import Mod
from ..compiled.targets import BLOCK_LISTS, Find
from . import dispatch
from .captured import captured_of

_MOST = 1 << 28
"""Scores up to which all are evaluated; bounds of blocks tell most of larger masks (`flex.block_mask`)."""
_MOST_FUNCTIONS = 1 << 10
_repeated: dict[tuple[str, torch.device], bool] = {}
_counting = forks.Lock()


class BlockLists(NamedTuple):
    """Lists of a BlockMask, in its order; those of full blocks are None if there are none apart."""

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor | None
    full_q_indices: Tensor | None


def find_for(mod: Mod, sizes: Sequence[int], device: torch.device) -> Find | None:
    """What finds kernels that evaluate a function, if they should: not for its first mask.

    sizes: B, H, Sq and Sk of the mask.
    """
    text = mod.program.text()
    if device.type != "cuda" or math.prod(sizes) > _MOST or not is_repeated(text, device):
        return None
    if lowering.limits("mask_mod", mod.program):
        return None
    return dispatch.find_on(device)


def is_repeated(text: str, device: torch.device) -> bool:
    """Whether a function has been asked for before; it counts from now on."""
    key = text, device
    with _counting.held():
        found = key in _repeated
        if not found:
            if len(_repeated) >= _MOST_FUNCTIONS:
                _repeated.clear()
            _repeated[key] = True
        return found


def lists(mod: Mod, sizes: Sequence[int], block: Sequence[int], find: Find, *, has_full: bool) -> BlockLists:
    """The lists of a mask (B, H, Sq, Sk) by blocks of queries and keys; equal to what torch makes.

    has_full: whether full blocks have lists of their own.
    """
    B, H, *lengths = sizes
    rows, columns = (-(-n // own) for n, own in zip(lengths, block, strict=True))
    states = torch.empty(B, H, rows, columns, dtype=torch.uint8, device=mod.device)

    def new(down: int, across: int) -> tuple[Tensor, Tensor]:
        counts = states.new_empty(B, H, down, dtype=torch.int32)
        return counts, counts.new_empty(B, H, down, across)

    made = [(new(rows, columns), new(columns, rows)) for _ in range(1 + has_full)]
    partial, full = made[0], made[1] if has_full else None
    make = find(BLOCK_LISTS, (mod.program.text(), has_full))
    make(captured_of(mod), (*lengths, *block), states, partial, full)
    of_rows, of_columns = full or ((None, None), (None, None))
    return BlockLists(*partial[0], *of_rows, *partial[1], *of_columns)
