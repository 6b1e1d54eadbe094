"""Gradients of captured tensors: what each score gives to them, added to totals in global memory.

What a gather took for several scores gets one addition for them all: for a warp's whole part of a block, for
a row or for a column of it, as few as the gather's indices tell apart. Nothing branches, so that wgmmas stay
in flight: where nothing is to be added, a predicate leaves the addition out. CTAs add to one place in any
order, so that deterministic calls take exact sums (`exact_sums`), which have none.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int64

from ...flex.program import Gather, Ref
from . import exact_sums
from .fragment import Mates
from .lowering import Level, Lowering
from .programs import Known, coordinates

Sums = dict[int, list[Any]]


class Additions:
    """Additions of one gather's gradients, for the scores of a fragment, one column after the other."""

    def __init__(
        self, lowering: Lowering, gather: Gather, output: Ref, total: cute.Tensor, rows: int, mates: Mates
    ) -> None:
        self._node, self._output, self._total = gather.node, output, total
        self._rank = lowering.program.tensors[gather.tensor].rank
        self._level, self._rows, self._mates = lowering.level_of(gather.node), rows, mates
        self._sums: Sums = {}
        """Sums of what is to be added, by the row that they are of; 0 where there is one for all rows."""
        self._known: dict[int, Known] = {}

    def take(self, r: int, known: Known, keeps: Boolean) -> None:
        """Take one score's gradient, from all values of the derivative; none unless `keeps`."""
        zero, level = Float32(0.0), self._level
        values = [cutlass.select_(keeps, x.to(Float32), zero) for x in known[self._output.value]]
        if level == Level.SCORE:
            self._add(values, known)
            return
        of = r if level == Level.ROW else 0
        before = self._sums.get(of)
        self._sums[of] = values if before is None else [x + y for x, y in zip(before, values, strict=True)]
        self._known[of] = known
        if level == Level.COLUMN and r == self._rows - 1:
            self._flush(self._mates.of_column)

    def finish(self) -> None:
        """Add what is summed up over columns."""
        self._flush(self._mates.of_row if self._level == Level.ROW else self._mates.all)

    def _flush(self, mates: tuple[int, ...]) -> None:
        for of, values in self._sums.items():
            for distance in mates:
                values = [x + cute.arch.shuffle_sync_bfly(x, distance) for x in values]
            if mates:
                is_first = (cute.arch.lane_idx() & sum(mates)) == 0
                values = [cutlass.select_(is_first, x, Float32(0.0)) for x in values]
            self._add(values, self._known[of])
        self._sums = {}

    def _add(self, values: list[Any], known: Known) -> None:
        total, is_exact = self._total, self._total.element_type == Int64
        places = coordinates(self._node, self._rank, total.shape, known)
        for x, coordinate in zip(values, places, strict=True):
            # An exact sum has its fields in the last dimension.
            steps = zip(coordinate, total.stride[: len(coordinate)], strict=True)
            place = total.iterator + sum((Int64(i) * step for i, step in steps), Int64(0))
            (add_exactly if is_exact else _add)(place, x)


def _add(place: cute.Pointer, value: Float32) -> None:
    """Add a number unless it is 0."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.neu.f32 p, {$r1}, 0f00000000;"
        " @p red.relaxed.gpu.global.add.f32 [{$r0}], {$r1}; }",
        read_only_args=[place.toint(), value],
    )


def add_exactly(place: cute.Pointer, value: Float32) -> None:
    """Add a number to the exact sum at `place` unless it is 0.

    The mantissa shifted to the number's exponent, of less than 2 `WORD_BITS` bits, goes to two words, with
    the sign.
    """
    last, bits = 8 * exact_sums.WORDS, exact_sums.WORD_BITS
    # A product and a shift divide every exponent by the bits of a word.
    inverse = -(-(1 << 14) // bits)
    cute.arch.inline_ptx(
        "{ .reg .pred adds, special, p; .reg .b32 bits, e, m, w, flag; .reg .b64 wide, low, high, at;"
        " mov.b32 bits, {$r1};"
        " and.b32 m, bits, 0x7fffff;"
        " bfe.u32 e, bits, 23, 8;"
        " setp.eq.u32 special, e, 255;"
        " setp.neu.f32 p, {$r1}, 0f00000000;"
        " setp.ne.and.u32 adds, e, 255, p;"
        # Subnormal numbers have no hidden bit, and the exponent 1.
        " setp.ne.u32 p, e, 0;"
        " @p or.b32 m, m, 0x800000;"
        " @p sub.u32 e, e, 1;"
        f" mul.lo.u32 w, e, {inverse};"
        " shr.u32 w, w, 14;"
        f" mad.lo.s32 e, w, -{bits}, e;"
        " cvt.u64.u32 wide, m;"
        " shl.b64 wide, wide, e;"
        f" and.b64 low, wide, {(1 << bits) - 1:#x};"
        f" shr.u64 high, wide, {bits};"
        " setp.lt.s32 p, bits, 0;"
        f" selp.b32 flag, {exact_sums.MINUS_INFINITE}, {exact_sums.INFINITE}, p;"
        " @p neg.s64 low, low;"
        " @p neg.s64 high, high;"
        " mad.wide.u32 at, w, 8, {$r0};"
        " @adds red.relaxed.gpu.global.add.u64 [at], low;"
        " setp.ne.and.s64 p, high, 0, adds;"
        " @p red.relaxed.gpu.global.add.u64 [at+8], high;"
        " setp.nan.f32 p, {$r1}, {$r1};"
        f" @p mov.b32 flag, {exact_sums.NAN};"
        " cvt.u64.u32 wide, flag;"
        f" @special red.relaxed.gpu.global.or.b64 [{{$r0}}+{last}], wide; }}",
        read_only_args=[place.toint(), value],
    )
