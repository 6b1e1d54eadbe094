"""Parts of P and dS in a thread's registers: rows are keys, in the order of MMA accumulators."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .. import scores
from ..fragment import Fragment
from ..launch_params import LaunchParams
from ..rounding import round_to

LANES = 4
"""Neighbouring lanes that share a row."""


@cute.jit
def find_dtanh(S: cute.Tensor, dtanh: cute.Tensor, params: LaunchParams, features: cutlass.Constexpr) -> None:
    """Derivatives of the capped scores S, rounded to 16 bits."""
    inverse = 1.0 / (params.softcap * scores.unit(features))
    for j in cutlass.range_constexpr(cute.size(S) // 4):
        values = cute.make_rmem_tensor(4, Float32)
        for i in cutlass.range_constexpr(4):
            tanh = S[4 * j + i] * inverse
            values[i] = 1.0 - tanh * tanh
        round_to(values, four_of(dtanh, j))


def four_of(registers: cute.Tensor, j: int) -> cute.Tensor:
    """A thread's two rows of the j-th two columns."""
    return cute.make_tensor(registers.iterator + 4 * j, cute.make_layout(4))


@cute.jit
def mask_rows_beyond_end(fragment: Fragment, Sk: Int32) -> None:
    for r in cutlass.range_constexpr(len(fragment.rows)):
        hidden = fragment.rows[r] >= Sk
        for c in cutlass.range_constexpr(len(fragment.offsets)):
            fragment.values[r, c] = -Float32.inf if hidden else fragment.values[r, c]


@cute.jit
def columns_of(numbers: cute.Tensor, lane: Int32) -> cute.Tensor:
    """The lane's own part of one number per column of a block: (2, C / 2) in shared memory."""
    start = (numbers.iterator + 2 * (lane % LANES)).toint()
    pairs = cute.make_ptr(Float32, start, cute.AddressSpace.smem, assumed_align=8)
    return cute.make_tensor(pairs, cute.make_layout((2, cute.size(numbers) // 8), stride=(1, 8)))


@cute.jit
def pair_of(columns: cute.Tensor, j: cutlass.Constexpr) -> cute.Tensor:
    """The j-th two columns, loaded where they are needed.

    All at once would take registers that MMAs in flight hold (ptxas.md, P18).
    """
    loaded = cute.make_rmem_tensor(2, Float32)
    cute.autovec_copy(columns[None, j], loaded)
    return loaded
