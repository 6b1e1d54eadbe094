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
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary

from ...flex_problem import FlexInputs, FlexProblem
from ...kernels.common.row_verdicts import TILE_ROWS
from ...masks import Band
from ...problem import Extent
from .. import tile_counters
from ..compiled.targets import Find
from . import bits, new_masks, seen_rows, tables
from .bits import Made, TablesOf
from .partial_blocks import mask_of
from .seen_rows import Judged
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
    inputs: FlexInputs,
    problem: FlexProblem,
    has_bounds: bool = True,
    has_bits: bool = False,
    find: Find | None = None,
) -> Reduced:
    """The call with intervals instead of its block mask, if that shows intervals, or with bits.

    has_bounds: whether kernels read intervals that are no band. has_bits: whether they read bits; they do
    not next to a score_mod. find: see `of_call`.
    """
    spec = problem.spec
    if spec.block is None or not _has_one_diagonal(inputs, problem):
        return Reduced(inputs, problem)
    found = of_call(inputs, problem, find)
    bounds, band = found.bounds, found.band
    # Keep bits are made for the blocks that a band or a mask leaves; shorter sequences have keys that bounds
    # show, and that lie beyond their ends.
    if bounds is not None and has_bounds and not (spec.dropout or spec.varlen):
        band = bounds.band(problem.extent.Sq, problem.extent.Sk)
    if band is not None:
        left, right = (x is not None for x in band)
        own = spec._replace(left=left, right=right, bounds=bounds is not None)
        return Reduced(*_without_mask(inputs, problem._replace(spec=own, band=band)), bounds)
    may_be_bits = has_bits and not (spec.score_mod or spec.varlen) and bits.may_be_made(inputs, problem)
    if may_be_bits and found.made is None:
        # Blocks that are seen whole need none, unless these are made once for many calls.
        may_be_bits = bool(spec.mask_mod) and bits.are_worth_while(problem)
    if not may_be_bits:
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


def of_call(inputs: FlexInputs, problem: FlexProblem, find: Find | None = None) -> Intervals:
    """What is known of a call's mask, or is now found.

    find: what finds kernels that evaluate the mask, None if torch's operators do.

    A mask whose captured tensors are others than before is not evaluated again: they may be made for each
    call, and the host would wait each time. Nor is one evaluated whose tensors have no versions, or in a
    CUDA graph, where tensors may change before it is replayed.
    """
    mods, (_, mask_mod) = inputs.mods, mods_of(inputs)
    lists = mods.lists
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
    has_room = before is not None or len(known.found) < _MOST_CALLS
    if is_new and has_room:
        found = tables.apart(first.device, lambda: _found(inputs, problem, find))
    if has_room:
        known.found[key] = _Found(data, found)
    return found


@torch.no_grad()
def _found(inputs: FlexInputs, problem: FlexProblem, find: Find | None) -> Intervals:
    seen = _seen(inputs, problem, find)
    if seen is None:
        return NONE
    extent, band = problem.extent, problem.band
    if find is not None and new_masks.are_evaluated_on(seen.device):
        own = seen_rows.judged_by_kernel(seen.to(torch.int32), band, extent, find)
    else:
        own = seen_rows.judged(seen, band, extent)
    return _decided(own, extent)._replace(made={})


def _seen(inputs: FlexInputs, problem: FlexProblem, find: Find | None) -> Tensor | None:
    """What each row sees, None if that is not evaluated."""
    mods, (_, mask_mod), device = inputs.mods, mods_of(inputs), inputs.q.device
    if find is not None and mask_mod is None and new_masks.is_known("", "rows", device):
        # Lists that come again and again: what they show is not worth its evaluation.
        return None
    if find is not None and mask_mod is not None:
        text, outer, lengths = mods.mask_mod, bits.outer(inputs, problem), problem.extent[1:3]
        if new_masks.may_be_looked_at(text, mask_mod, (*outer, *lengths)):
            lists = mods.lists
            return new_masks.rows(text, mask_mod, lists, (mods.q_block, mods.kv_block), outer, lengths, find)
    mask = mask_of(inputs, problem)
    return None if mask is None else seen_rows.seen_by(mask)


_MOST_PADDED = 1.15
"""The most rows of tiles that begin where a segment does, for each row of the call: tiles that lie across
segments load a tenth more blocks, and mask twice as many."""


def _decided(own: Judged, extent: Extent) -> Intervals:
    """What serves rows best."""
    (B, Sq, Sk), verdict = extent[:3], own.verdict
    if verdict.has_gaps or not verdict.most:
        return NONE
    left, right = verdict.left, verdict.right
    if not verdict.is_no_band and left + right >= 0:
        # Positions of a program have one origin; a band's diagonal ends at the last query and the last key.
        left, right = left + Sk - Sq, right - (Sk - Sq)
        return Intervals(Band(None if left >= Sk - 1 else left, None if right >= Sq - 1 else right))
    if verdict.decreases or own.bounds.shape[1] > 1:
        return NONE
    of_rows = own.bounds[:, 0]
    by_key = _of_keys(of_rows[..., 0], of_rows[..., 1], Sk)
    beyond = by_key.new_tensor([Sq, Sq - 1]).expand(len(by_key), 1, 2)
    of_keys = torch.cat([by_key, beyond], 1)
    of_rows, of_keys = (x.to(torch.int32).contiguous() for x in (of_rows, of_keys))
    sides = bool(verdict.hides_left), bool(verdict.hides_right)
    segments = _segments(own, B, Sq) if Sq == Sk else None
    return Intervals(bounds=Bounds(of_rows, of_keys, *sides, verdict.most, segments))


def _segments(own: Judged, B: int, S: int) -> Segments | None:
    """The documents that rows are, None if they are something else, or so short that rows of tiles would be
    empty too often.
    """
    verdict, entries = own.verdict, B // len(own.bounds)
    if verdict.no_documents or (verdict.not_causal and verdict.not_whole):
        return None
    if entries * verdict.tiles * TILE_ROWS > _MOST_PADDED * B * S:
        return None
    starts = own.starts.to(torch.int32)
    if entries > 1:
        first_rows = torch.arange(0, B * S, S, dtype=torch.int32, device=starts.device)
        starts = (first_rows[:, None] + starts).flatten()
    return Segments(pad(starts, (0, 1), value=B * S), verdict.longest, not verdict.not_causal)


def _of_keys(first: Tensor, last: Tensor, Sk: int) -> Tensor:
    """The first and the last query that see each key, (B, Sk, 2), if bounds never decrease."""
    keys = torch.arange(Sk, dtype=first.dtype, device=first.device).expand(len(first), Sk).contiguous()
    # Queries whose last key comes before the key are left of them; so many queries begin up to the key.
    lowest = torch.searchsorted(last.contiguous(), keys)
    highest = torch.searchsorted(first.contiguous(), keys, right=True) - 1
    return torch.stack([lowest, highest], -1)
