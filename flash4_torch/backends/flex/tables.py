"""A block mask's lists as tables by which kernels visit blocks of keys: see `kernels.common.mask_tables`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...reference.flex import EMPTY, FULL, Blocks
from .. import tile_counters

T = TypeVar("T")

_MOST_BLOCKS = 1 << 22
"""Blocks of a mask up to which its tables are kept: 13 bytes each."""


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


def tables(blocks: Blocks, rows: int, columns: int, tile: TileSize) -> Tables:
    """The tables for tiles of this size; the mask's own blocks may be any.

    A captured launch makes them in each replay, where every operation is a launch.
    """
    find = _found_in_blocks if _lie_in_blocks(blocks, rows, columns, tile) else _counted
    is_visible, is_partial = find(blocks, rows, columns, tile)
    if tile.heads > 1 and blocks.state.shape[1] > 1:
        is_visible, is_partial = (x.unflatten(1, (-1, tile.heads)).any(2) for x in (is_visible, is_partial))
    rank = torch.nn.functional.pad(is_visible.cumsum(-1, dtype=torch.int32), (1, 0))
    NB = rank.shape[-1] - 1
    # What is not visible goes to one more column.
    places = torch.where(is_visible, rank[..., :-1], NB).long()
    entries = torch.arange(0, 2 * NB, 2, dtype=torch.int32, device=rank.device) + is_partial
    listed = rank.new_zeros(*places.shape[:-1], NB + 1).scatter_(-1, places, entries)
    return Tables(listed[..., :NB].contiguous(), rank, blocks.state, *blocks.size)


def _lie_in_blocks(blocks: Blocks, rows: int, columns: int, tile: TileSize) -> bool:
    """Whether each of a tile's blocks of keys lies in one of the mask's."""
    pairs = zip(blocks.size, (rows, columns), tile[:2], strict=True)
    return all(size % own == 0 or size >= length for size, length, own in pairs)


def _found_in_blocks(blocks: Blocks, rows: int, columns: int, tile: TileSize) -> tuple[Tensor, Tensor]:
    """Whether each tile's blocks are visible, and whether partial, by the mask's block around each."""
    state = blocks.state
    for dim, size, length, own in zip((-2, -1), blocks.size, (rows, columns), tile[:2], strict=True):
        if own != size:
            starts = torch.arange(0, length, own, device=state.device)
            state = state.index_select(dim, starts // size)
    return state != EMPTY, state != FULL


def _counted(blocks: Blocks, rows: int, columns: int, tile: TileSize) -> tuple[Tensor, Tensor]:
    """The same by counting the mask's blocks that each overlaps."""
    device = blocks.state.device
    down = _Spans.of(rows, tile.rows, blocks.size[0], device)
    across = _Spans.of(columns, tile.columns, blocks.size[1], device)
    shown = _count(blocks.state != EMPTY, down, across)
    full = _count(blocks.state == FULL, down, across)
    area = (down.last - down.first)[:, None] * (across.last - across.first)
    return shown > 0, full < area


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


Lists = tuple[Tensor | None, ...]
"""The lists of a block mask."""


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
    nothing may stay; another thread's allocations do not.
    """
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def run() -> T:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(max_workers=1) as other_thread:
        return other_thread.submit(run).result()
