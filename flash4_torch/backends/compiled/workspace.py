"""Workspace that small launches find instead of allocating it, which takes a third as long as a launch.

Launches of one thread on one stream run one after another, so they share memory, whose contents nobody relies
on. A captured launch may be replayed at any time, and allocates what it needs in the graph's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from threading import get_ident

import torch
from torch import Tensor

from .. import tile_counters
from .tensors import Allocator

Need = tuple[tuple[int, ...], torch.dtype]
"""The shape of a contiguous tensor, and its dtype, of 32 bits."""
Workspace = Callable[[], tuple[Tensor, ...]]
"""Function that finds tensors for one launch, which nobody reads after it."""

_WORDS = 1 << 18
"""Words of 32 bits that a thread has on a stream: 1 MiB. What needs more is bound by the GPU's time."""
_MOST = 64
"""Threads and streams that have some. It is never freed: launches under way may use it."""
_APART = 64
"""Tensors begin at multiples of so many words."""

_words: dict[tuple[int, int, int], Tensor] = {}
"""Memory of each device, thread and stream."""


def shared(index: int, needs: tuple[Need, ...], allocator: Allocator) -> Workspace:
    """What finds these tensors for launches on the current stream of device `index`, one call's at a time."""
    new = allocated(needs, allocator)
    if sum(map(_room, needs)) > _WORDS:
        return new
    found: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def find() -> tuple[Tensor, ...]:
        stream = tile_counters.current_stream(index)
        if stream != tile_counters.DEFAULT_STREAM and tile_counters.is_capturing(index):
            return new()
        key = get_ident(), stream
        tensors = found.get(key)
        if tensors is None:
            words = _words_of(index, *key)
            if words is None:
                return new()
            found[key] = tensors = _laid_out(words, needs)
        return tensors

    return find


def allocated(needs: tuple[Need, ...], allocator: Allocator) -> Workspace:
    """What allocates these tensors."""
    new = tuple(allocator(*need) for need in needs)
    return lambda: tuple(allocate() for allocate in new)


def _room(need: Need) -> int:
    return -(-math.prod(need[0]) // _APART) * _APART


def _words_of(index: int, thread: int, stream: int) -> Tensor | None:
    key = index, thread, stream
    if key not in _words and len(_words) < _MOST:
        _words[key] = tile_counters.fresh(index, _WORDS)
    return _words.get(key)


def _laid_out(words: Tensor, needs: tuple[Need, ...]) -> tuple[Tensor, ...]:
    tensors, start = [], 0
    for need in needs:
        shape, dtype = need
        tensors.append(words[start : start + math.prod(shape)].view(dtype).view(shape))
        start += _room(need)
    return tuple(tensors)
