"""A block mask's lists as tables by which kernels visit blocks of keys: see `kernels.common.mask_tables`."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import ShapeError
from ...reference.flex import FULL, PARTIAL
from .. import tile_counters
from ..compiled.targets import BLOCK_TABLES, Find

T = TypeVar("T")

Lists = tuple[Tensor | None, ...]
"""The lists of a block mask."""

_MOST_BLOCKS = 1 << 22
"""Blocks of a mask up to which its tables are kept: 13 bytes each."""
_MOST_CALLS = 64
"""Kinds of calls with one mask, by their lengths and tiles, whose tables are kept; the oldest go first."""


class Tables(NamedTuple):
    """Arguments of a kernel: `kernels.common.mods.BlockArgs` documents the same fields."""

    visible: Tensor
    rank: Tensor
    states: Tensor
    rows: int
    columns: int


class TileSize(NamedTuple):
    """What a kernel's tile holds of a mask."""

    rows: int
    columns: int
    heads: int = 1
    """Heads side by side, which divide those of the mask."""


def tables(
    lists: Lists,
    block: Sequence[int],
    lengths: Sequence[int],
    tile: TileSize,
    find: Find,
    *,
    is_decided: bool,
    is_transposed: bool,
) -> Tables:
    """The tables of a block mask's lists for tiles of this size; the mask's own blocks may be any.

    block, lengths: queries and keys of a block, and of the call. is_decided: whether a listed block is seen
    whole, as without mask_mod. is_transposed: whether the tile's rows are keys. A captured launch makes the
    tables in each replay. Raises ShapeError if there are not lists for all queries.
    """
    own = new_states(lists, block, lengths)
    states = own.states
    if is_transposed:
        states, block, lengths = states.transpose(2, 3), block[::-1], lengths[::-1]
    B, H = states.shape[:2]
    heads = min(tile.heads, H)
    visible = states.new_empty(B, H // heads, *map(_ceil, lengths, tile[:2]), dtype=torch.int32)
    rank = visible.new_empty(*visible.shape[:3], visible.shape[3] + 1)
    make = find(BLOCK_TABLES, (own.full is not None,))
    state = FULL if is_decided else PARTIAL
    make(*own.lists, state, own.states, states, visible, rank, (*lengths, *block, *tile[:2], heads))
    return Tables(visible, rank, states, *block)


class NewStates(NamedTuple):
    """A block mask's lists as kernels read them, and memory for the states of its blocks."""

    listed: tuple[Tensor, Tensor]
    full: tuple[Tensor, Tensor] | None
    states: Tensor
    """(B or 1, Hq or 1, rows, columns) uint8: nothing yet."""

    @property
    def lists(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
        return self.listed, self.full


def new_states(lists: Lists, block: Sequence[int], lengths: Sequence[int]) -> NewStates:
    """What a kernel needs that writes the states of a block mask. block, lengths: queries and keys."""
    listed, full = _pair(lists[:2]), _pair(lists[2:])
    assert listed is not None
    every = (*listed, *(full or ()))
    rows, given = _ceil(lengths[0], block[0]), min(x.shape[2] for x in every)
    if given < rows:
        limit = f"they must have {rows} for {lengths[0]} queries"
        raise ShapeError("block_mask", f"lists of {given} rows of {block[0]} queries", limit)
    states = listed[0].new_empty((*outer_of(lists), rows, _ceil(lengths[1], block[1])), dtype=torch.uint8)
    return NewStates(listed, full, states)


def outer_of(lists: Lists) -> tuple[int, int]:
    """Batch entries and heads of a block mask, or 1."""
    B, H = (max(x.shape[dim] for x in lists if x is not None) for dim in (0, 1))
    return B, H


def _pair(lists: Lists) -> tuple[Tensor, Tensor] | None:
    """The numbers and the columns of listed blocks, in the type that kernels read; None if there are none."""
    counts, columns = lists
    if counts is None or columns is None:
        return None
    return counts.to(torch.int32), columns.to(torch.int32)


def _ceil(length: int, size: int) -> int:
    return -(-length // size)


Versions = tuple["tuple[weakref.ref[Tensor], int] | None", ...]
"""Tensors, and their versions at some time."""


class _Kept(NamedTuple):
    """Tables of one mask, and what its lists were when they were made."""

    lists: Versions
    tables: dict[Hashable, Tables]


_of_mask: WeakIdKeyDictionary = WeakIdKeyDictionary()


def kept(lists: Lists, key: Hashable, make: Callable[[], Tables]) -> Tables:
    """The tables that `make` makes of these lists, made once for each key and stream while the lists live.

    lists: the first one is a tensor. Changed lists are other ones; a captured launch makes its own tables.
    """
    first = lists[0]
    assert first is not None
    stream = tile_counters.current_stream(first.get_device()) if first.is_cuda else None
    if not all(map(may_be_kept, lists)) or (stream and tile_counters.is_capturing(first.get_device())):
        return make()
    found = _of_mask.get(first)
    if found is None or not are_same(found.lists, lists):
        found = _of_mask[first] = _Kept(versions(lists), {})
    key = key, stream
    if key not in found.tables:
        if len(found.tables) >= _MOST_CALLS:
            found.tables.pop(next(iter(found.tables)), None)  # another thread may have done so
        found.tables[key] = apart(first.device, make)
    return found.tables[key]


def may_be_kept(x: Tensor | None) -> bool:
    """Whether what is made of a tensor may be kept: it has a version, and is not large."""
    return x is None or (type(x) is Tensor and not x.is_inference() and x.numel() <= _MOST_BLOCKS)


def versions(tensors: Lists) -> Versions:
    return tuple(None if x is None else (weakref.ref(x), x._version) for x in tensors)


def are_same(known: Versions, tensors: Lists) -> bool:
    """Whether tensors are those known, and unchanged."""
    return all(map(_is_same, known, tensors))


def _is_same(known: tuple[weakref.ref[Tensor], int] | None, x: Tensor | None) -> bool:
    if known is None or x is None:
        return known is None and x is None
    tensor, version = known
    return tensor() is x and x._version == version


def apart(device: torch.device, make: Callable[[], T]) -> T:
    """What `make` makes, by another thread on this one's stream.

    While torch.compile prepares a CUDA graph, this thread's allocations come from the graph's memory, where
    nothing may stay; another thread's allocations do not. It is not in inference mode either, whose tensors
    may not be used outside of it. It takes the host half a millisecond: there is none where neither can be.
    """
    if device.type != "cuda":
        return make()
    if "torch._inductor.cudagraph_trees" not in sys.modules and not torch.is_inference_mode_enabled():
        return make()
    stream = torch.cuda.current_stream(device)

    def run() -> T:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(max_workers=1) as other_thread:
        return other_thread.submit(run).result()
