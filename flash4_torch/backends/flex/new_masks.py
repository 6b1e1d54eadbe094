"""Block masks and what their rows see, by kernels that evaluate mask_mod: for masks that are made again.

A kernel takes its time to compile, once for a function: the first mask of each is left to torch's operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack

from ...kernels.common import lowering
from ...reference.flex import Mod
from ..compiled.served import missing_packages
from ..compiled.targets import BLOCK_LISTS, BLOCK_ROWS, Find
from .captured import captured_of
from .tables import Lists, new_states
from .tiled import program_of

_MOST = 1 << 28
"""Scores up to which all are evaluated; bounds of blocks tell most of larger masks (`flex.block_mask`)."""
_MOST_OF_ROWS = 1 << 30
"""Scores up to which rows are looked at; those in partial blocks are evaluated, and the host does not know
how many these are."""
_MOST_FUNCTIONS = 1 << 10
_DEVICES = ("cuda",)
_known: set[tuple[object, ...]] = set()


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


def may_be_evaluated(text: str, mod: Mod, purpose: str) -> bool:
    """Whether kernels should evaluate a function for some purpose: not the first time.

    text: the program's.
    """
    if not are_evaluated_on(mod.device) or not is_known(text, purpose, mod.device):
        return False
    if any(type(x) is not Tensor or x.device != mod.device for x in mod.tensors):
        return False
    if _len_torch_dispatch_stack() or _are_functorch_transforms_active():
        return False
    return _is_served(text) and not missing_packages(exported=False)


def are_evaluated_on(device: torch.device) -> bool:
    """Whether kernels are faster there than torch's operators, one after another."""
    return device.type in _DEVICES


@lru_cache(maxsize=_MOST_FUNCTIONS)
def _is_served(text: str) -> bool:
    """Whether kernels can evaluate a program."""
    return not lowering.limits("mask_mod", program_of(text))


def is_known(*key: object) -> bool:
    """Whether this was asked before; it counts from now on. Two threads may both be the first."""
    found = key in _known
    if not found and len(_known) >= _MOST_FUNCTIONS:
        _known.clear()
    _known.add(key)
    return found


def may_be_looked_at(text: str, mod: Mod, sizes: Sequence[int]) -> bool:
    """Whether kernels should look at the rows of a mask (B, H, Sq, Sk)."""
    return math.prod(sizes) <= _MOST_OF_ROWS and may_be_evaluated(text, mod, "rows")


def may_be_made(text: str, mod: Mod, sizes: Sequence[int]) -> bool:
    """Whether kernels should make the lists of a mask (B, H, Sq, Sk)."""
    return math.prod(sizes) <= _MOST and may_be_evaluated(text, mod, "lists")


def lists(
    text: str, mod: Mod, sizes: Sequence[int], block: Sequence[int], find: Find, *, has_full: bool
) -> BlockLists:
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
    make = find(BLOCK_LISTS, (text, has_full))
    make(captured_of(mod), (*lengths, *block), states, partial, full)
    kv, q = partial
    full_kv, full_q = ((None, None), (None, None)) if full is None else full
    return BlockLists(kv[0], kv[1], full_kv[0], full_kv[1], q[0], q[1], full_q[0], full_q[1])


def rows(
    text: str,
    mod: Mod,
    lists: Lists,
    block: Sequence[int],
    outer: Sequence[int],
    lengths: Sequence[int],
    find: Find,
) -> Tensor:
    """What each query sees of a block mask, (3, B or 1, Hq or 1, Sq) int32: the number of keys, the first one
    and the last one; Sk and -1 if there are none.

    block, lengths: queries and keys of a block, and of the call. outer: the result's batch entries and heads.
    """
    own = new_states(lists, block, lengths)
    seen = own.states.new_empty(3, *outer, lengths[0], dtype=torch.int32)
    make = find(BLOCK_ROWS, (text, own.full is not None))
    make(*own.lists, own.states, captured_of(mod), (lengths[1], *block), seen)
    return seen
