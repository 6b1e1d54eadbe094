"""Masks that show each row one interval of keys, found by evaluating mask_mod where blocks are partial.

What counts is what blocks and mask_mod show together, so results do not depend on how a mask is written, nor
on whether its blocks are those of its function. Where all rows' intervals lie like a window's, the kernels of
plain attention serve the call: neither a table nor a test for each score is left. Where bounds never decrease
from row to row, as for documents, kernels read them in the place of a window's: keys see intervals, too.

What shows anything else becomes bits, a table that stands for mask_mod (`bits`).

The host waits for the device once for a mask; what was found is kept while its tensors stay as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from ...flex_problem import FlexInputs, FlexProblem
from ...masks import Band
from ...problem import Extent
from ...reference.flex import FULL
from .. import tile_counters
from . import bits, tables
from .bits import Made, TablesOf
from .partial_blocks import Mask, mask_of, parts
from .tiled import mods_of

_MOST_CALLS = 8
"""Kinds of calls with one mask, by their sizes and scalars, for which results are kept."""


class Segments(NamedTuple):
    """Documents: parts of batch entries that see themselves alone, all of them or what is causal."""

    ends: Tensor
    """(n + 1,) int32: where each begins, and the end, in rows of all batch entries one after another."""
    longest: int
    is_causal: bool

    @property
    def band(self) -> Band:
        """What is seen within one."""
        return Band(None, 0 if self.is_causal else None)


class Bounds(NamedTuple):
    """Intervals that keep their order."""

    of_rows: Tensor
    """(B or 1, Sq, 2) int32: the first and the last key that each query sees; neither ever decreases."""
    of_keys: Tensor
    """(B or 1, Sk + 1, 2) int32: the first and the last query that sees each key, and then for all keys
    beyond the end, which no query sees."""
    left: bool
    right: bool
    """Whether they hide anything on that side."""
    most: int
    """Keys that a row sees, at most."""
    segments: Segments | None = None
    """What they are besides, if kernels are faster with that."""

    def band(self, Sq: int, Sk: int) -> Band:
        """A band that is bounded on the same sides, and whose rows see as much, if it can be."""
        return Band(min(self.most - 1, Sk - 2) if self.left else None, min(0, Sq - 2) if self.right else None)


class Intervals(NamedTuple):
    """What a mask and the band of a call show."""

    band: Band | None = None
    """The band that shows the same, None if none does."""
    bounds: Bounds | None = None
    """If no band does: the bounds of rows and keys, None if these are not intervals."""
    made: Made | None = None
    """The mask's bits, for kernels that asked; None if it was not evaluated."""


NONE = Intervals()


class Reduced(NamedTuple):
    """A call whose block mask is gone, or as it was."""

    inputs: FlexInputs
    problem: FlexProblem
    bounds: Bounds | None = None
    """What its kernels need instead of a band."""
    bits: TablesOf | None = None
    """What its kernels need instead of blocks and mask_mod, if these are gone and show no intervals."""


def reduced(
    inputs: FlexInputs, problem: FlexProblem, has_bounds: bool = True, has_bits: bool = False
) -> Reduced:
    """The call with intervals instead of its block mask, if that shows intervals, or with bits.

    has_bounds: whether kernels read intervals that are no band. has_bits: whether they read bits; they do
    not next to a score_mod.
    """
    spec = problem.spec
    if spec.block is None or not _has_one_diagonal(inputs, problem):
        return Reduced(inputs, problem)
    found = of_call(inputs, problem)
    bounds, band = found.bounds, found.band
    # Keep bits are made for the blocks that a band or a mask leaves; shorter sequences have keys that bounds
    # show, and that lie beyond their ends.
    if bounds is not None and has_bounds and not (spec.dropout or spec.varlen):
        band = bounds.band(problem.extent.Sq, problem.extent.Sk)
    if band is not None:
        left, right = (x is not None for x in band)
        own = spec._replace(left=left, right=right, bounds=bounds is not None)
        return Reduced(*_without_mask(inputs, problem._replace(spec=own, band=band)), bounds)
    if not has_bits or spec.score_mod or spec.varlen or not bits.may_be_made(inputs, problem):
        return Reduced(inputs, problem)
    given = _without_mask(inputs, problem._replace(spec=spec._replace(bits=spec.block[0])))
    return Reduced(*given, None, bits.tables_of(inputs, problem, found.made))


def _without_mask(inputs: FlexInputs, problem: FlexProblem) -> tuple[FlexInputs, FlexProblem]:
    """The call without its block mask and mask_mod."""
    score_mod, _ = mods_of(inputs)
    tensors, scalars = (0, 0) if score_mod is None else (len(score_mod.tensors), len(score_mod.scalars))
    mods = inputs.mods._replace(
        captured=list(inputs.mods.captured)[:tensors],
        scalars=list(inputs.mods.scalars)[:scalars],
        kv_num_blocks=None,
        kv_indices=None,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        mask_mod="",
        q_block=1,
        kv_block=1,
    )
    spec = problem.spec._replace(mask_mod="", block=None, full_blocks=False)
    return inputs._replace(mods=mods), problem._replace(spec=spec)


def _has_one_diagonal(inputs: FlexInputs, problem: FlexProblem) -> bool:
    """Whether a band, which ends at the last query and the last key, has one place in all sequences.

    Of packed ones that is known without their lengths only if one tensor has those of queries and of keys.
    """
    of_queries, of_keys = inputs.mods.cu_seqlens_q, inputs.mods.cu_seqlens_k
    if of_queries is None or of_keys is None or problem.extent.Sq != problem.extent.Sk:
        return of_queries is None
    are_one = of_queries.data_ptr() == of_keys.data_ptr() and of_queries.stride() == of_keys.stride()
    return are_one and of_queries.dtype == of_keys.dtype


class Data(NamedTuple):
    """What a captured tensor held at some time; the tensor itself may be an alias made for one call."""

    storage: StorageWeakRef
    place: tuple[object, ...]
    version: int

    @classmethod
    def of(cls, x: Tensor) -> Data:
        place = x.storage_offset(), x.shape, x.stride(), x.dtype
        return cls(StorageWeakRef(x.untyped_storage()), place, x._version)

    def is_still(self, x: Tensor) -> bool:
        """Whether a tensor of the same sizes, strides and dtype has this data."""
        return (
            not x.is_inference()
            and x._version == self.version
            and x.untyped_storage()._cdata == self.storage.cdata
            and x.storage_offset() == self.place[0]
        )

    def same_tensor(self, other: Data) -> bool:
        return self.storage == other.storage and self.place == other.place


class _Found(NamedTuple):
    captured: list[Data]
    intervals: Intervals


class _Known(NamedTuple):
    """What was found for one mask."""

    lists: tables.Versions
    found: dict[tuple[object, ...], _Found]
    """Results, by what else is in a call."""


_of_mask: WeakIdKeyDictionary = WeakIdKeyDictionary()


def of_call(inputs: FlexInputs, problem: FlexProblem) -> Intervals:
    """What is known of a call's mask, or is now found.

    A mask whose captured tensors are others than before is not evaluated again: they may be made for each
    call, and the host would wait each time. Nor is one evaluated whose tensors have no versions, or in a
    CUDA graph, where tensors may change before it is replayed.
    """
    mods, (_, mask_mod) = inputs.mods, mods_of(inputs)
    lists = mods.kv_num_blocks, mods.kv_indices, mods.full_kv_num_blocks, mods.full_kv_indices
    first, captured = lists[0], () if mask_mod is None else tuple(mask_mod.tensors)
    assert first is not None
    if not all(map(tables.may_be_kept, (*lists, *captured))):
        return NONE
    if first.is_cuda and tile_counters.is_capturing(first.get_device()):
        return NONE
    known = _of_mask.get(first)
    if known is None or not tables.are_same(known.lists, lists):
        known = _of_mask[first] = _Known(tables.versions(lists), {})
    scalars = () if mask_mod is None else tuple(mask_mod.scalars)
    stream = tile_counters.current_stream(first.get_device()) if first.is_cuda else None
    key = problem.extent, problem.band, mods.mask_mod, mods.q_block, mods.kv_block, scalars, stream
    before, data = known.found.get(key), [Data.of(x) for x in captured]
    if before is not None and before.captured == data:
        return before.intervals
    is_new = before is None or all(map(Data.same_tensor, before.captured, data))
    found = NONE
    if is_new and len(known.found) < _MOST_CALLS:
        found = tables.apart(first.device, lambda: _found(inputs, problem))
    known.found[key] = _Found(data, found)
    return found


@torch.no_grad()
def _found(inputs: FlexInputs, problem: FlexProblem) -> Intervals:
    mask = mask_of(inputs, problem)
    rows = None if mask is None else _rows(mask)
    if mask is None or rows is None:
        return NONE
    return _intervals(rows, problem.band, problem.extent)._replace(made={})


class _Rows(NamedTuple):
    """What each row sees, (B or 1, Hq or 1, Sq) each: the number of keys, the first one and the last one."""

    keys: Tensor
    first: Tensor
    """Sk or more for a row that sees nothing."""
    last: Tensor
    """-1 for a row that sees nothing."""


def _rows(mask: Mask) -> _Rows | None:
    """None if too many scores would have to be evaluated."""
    state, (q_block, kv_block), Sq, Sk = mask.blocks.state, mask.blocks.size, mask.Sq, mask.Sk
    starts = torch.arange(0, Sk, kv_block, device=state.device)
    ends = (starts + kv_block).clamp(max=Sk)
    is_full = state == FULL

    def of_rows(x: Tensor) -> Tensor:
        return x.repeat_interleave(q_block, -1)[..., :Sq].flatten()

    count = of_rows(torch.where(is_full, ends - starts, 0).sum(-1))
    first = of_rows(torch.where(is_full, starts, Sk).amin(-1))
    last = of_rows(torch.where(is_full, ends, 0).amax(-1) - 1)
    partial = parts(mask)
    if partial is None:
        return None
    for b, h, _, _, i, j, seen in partial:
        at = ((b.long() * state.shape[1] + h) * Sq + i).flatten()
        count.index_add_(0, at, seen.sum(-1).flatten())
        first.scatter_reduce_(0, at, torch.where(seen, j, Sk).amin(-1).flatten().long(), "amin")
        last.scatter_reduce_(0, at, torch.where(seen, j, -1).amax(-1).flatten().long(), "amax")
    shape = *state.shape[:2], Sq
    return _Rows(count.view(shape), first.view(shape), last.view(shape))


def _intervals(rows: _Rows, band: Band, extent: Extent) -> Intervals:
    """What rows see within a band, for which the host waits."""
    B, Sq, Sk = extent[:3]
    i = torch.arange(Sq, device=rows.keys.device)
    are_intervals = rows.keys == (rows.last - rows.first + 1).clamp(min=0)
    first, last = rows.first, rows.last
    if band.left is not None:
        first = torch.maximum(first, i + (Sk - Sq - band.left))
    if band.right is not None:
        last = torch.minimum(last, i + (Sk - Sq + band.right))
    number = (last - first + 1).clamp(min=0)
    is_empty = number == 0
    left = torch.where(is_empty, -Sk, i - first).amax()
    right = torch.where(is_empty, -Sq, last - i).amax()
    parallel = (i - left).clamp(min=0), (i + right).clamp(max=Sk - 1)
    lies_so = is_empty | ((first == parallel[0]) & (last == parallel[1]))
    is_band = (lies_so & (number == (parallel[1] - parallel[0] + 1).clamp(min=0))).all()
    # A row that sees nothing is where the rows before it end.
    ends = torch.where(is_empty, -1, last).cummax(-1).values
    first = torch.where(is_empty, ends + 1, first)
    is_ordered = (first.diff(dim=-1) >= 0).all() & (is_empty | (ends == last)).all()
    last = ends
    by_key = _of_keys(first, last, Sk)
    hides_left = (first > 0).any() | (by_key[..., 1] < Sq - 1).any()
    hides_right = (last < Sk - 1).any() | (by_key[..., 0] > 0).any()
    flags = are_intervals.all(), is_band, is_ordered, hides_left, hides_right
    numbers = [x.long() for x in (*flags, left, right, number.amax())]
    intervals, has_band, ordered, on_left, on_right, before, after, most = torch.stack(numbers).tolist()
    if not intervals or not most:
        return NONE
    if has_band and before + after >= 0:
        # Positions of a program have one origin; a band's diagonal ends at the last query and the last key.
        before, after = before + Sk - Sq, after - (Sk - Sq)
        return Intervals(Band(None if before >= Sk - 1 else before, None if after >= Sq - 1 else after))
    if not ordered or first.shape[1] > 1:
        return NONE
    by_row = torch.stack([first, last], -1)
    beyond = by_key.new_tensor([Sq, Sq - 1]).expand(*by_key.shape[:2], 1, 2)
    by_key = torch.cat([by_key, beyond], 2)
    of_rows, of_keys = (x[:, 0].to(torch.int32).contiguous() for x in (by_row, by_key))
    segments = _segments(first[:, 0].expand(B, Sq), last[:, 0].expand(B, Sq)) if Sq == Sk else None
    return Intervals(bounds=Bounds(of_rows, of_keys, bool(on_left), bool(on_right), most, segments))


_TILE_ROWS = 256
_MOST_PADDED = 1.15
"""The most rows of tiles that begin where a segment does, for each row of the call: tiles that lie across
segments load a tenth more blocks, and mask twice as many."""


def _segments(first: Tensor, last: Tensor) -> Segments | None:
    """The segments whose rows (B, S) see from `first` to `last`, which never decrease.

    None if that is something else, or if segments are so short that rows of tiles would be empty too often.
    """
    S = first.shape[1]
    i = torch.arange(S, device=first.device).expand_as(first)
    begins = first == i
    start = torch.where(begins, i, -1).cummax(-1).values
    # The last row before the next one that begins.
    before_next = torch.where(begins, i - 1, S - 1)[:, 1:].flip(-1).cummin(-1).values.flip(-1)
    end = torch.nn.functional.pad(before_next, (0, 1), value=S - 1)
    are_segments, is_causal = (first == start).all(), (last == i).all()
    flags = are_segments & (is_causal | (last == end).all()), is_causal
    exist, causal = torch.stack(flags).tolist()
    if not exist:
        return None
    starts = begins.flatten().nonzero()[:, 0]
    ends = torch.cat([starts, starts.new_tensor([begins.numel()])])
    lengths = ends.diff()
    tiles = (lengths + (_TILE_ROWS - 1)) // _TILE_ROWS
    longest, number = torch.stack([lengths.amax(), tiles.sum()]).tolist()
    if number * _TILE_ROWS > _MOST_PADDED * begins.numel():
        return None
    return Segments(ends.to(torch.int32), longest, causal)


def _of_keys(first: Tensor, last: Tensor, Sk: int) -> Tensor:
    """The first and the last query that see each key, (B, H, Sk, 2), if bounds never decrease."""
    keys = torch.arange(Sk, device=first.device).expand(*first.shape[:2], Sk).contiguous()
    # Queries whose last key comes before the key are left of them; so many queries begin up to the key.
    lowest = torch.searchsorted(last.contiguous(), keys)
    highest = torch.searchsorted(first.contiguous(), keys, right=True) - 1
    return torch.stack([lowest, highest], -1)
