"""A ramp, like ALiBi, as one more step of S = Q K^T: tensor cores add it.

Columns 0 to 2 of a further operand A hold the parts, of 8 bits each, of what a row's ramp adds from column to
column; those of B hold each key's place in the block, which bfloat16 has exactly. So S arrives with its ramp:
an FMA less for each score, for a sixteenth of the steps of a block's wgmmas at D 128, an eighth at D 64.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.memory import SmemAllocator

from ...common import mods, smem_layouts
from ...common.rounding import round_to
from .. import wgmma
from ..warps import LANES

PARTS = 3
"""Numbers of 8 bits that make one of float32."""


def allocate(memory: SmemAllocator, keys: int) -> cute.Tensor:
    """(keys, 16) in shared memory."""
    layout = smem_layouts.row_major_layout(BFloat16, keys, wgmma.DEPTH, 1)
    return smem_layouts.allocate(memory, BFloat16, layout)[None, None, 0]


@cute.jit
def write_places(sRamp: cute.Tensor, thread: Int32) -> None:
    """Write B, by as many threads as a block has keys."""
    if thread < cute.size(sRamp, mode=[0]):
        for c in cutlass.range_constexpr(wgmma.DEPTH):
            sRamp[thread, c] = BFloat16(Float32(thread if c < PARTS else 0))
    cute.arch.fence_view_async_shared()


@cute.jit
def load_steps(A: cute.Tensor, own: mods.Rows, scale: Float32, lane: Int32) -> None:
    """Fill A for a thread's two rows.

    scale: the factor by which scores are multiplied to have them in base 2.
    """
    pair, numbers = lane % LANES, cute.make_rmem_tensor(cute.size(A), Float32)
    for r in cutlass.range_constexpr(2):
        step = mods.step_of(own, scale, r)
        high = Float32(BFloat16(step))
        middle = Float32(BFloat16(step - high))
        low, none = step - high - middle, Float32(0.0)
        first = cutlass.select_(pair == 0, high, cutlass.select_(pair == 1, low, none))
        second = cutlass.select_(pair == 0, middle, none)
        # Two neighbouring columns, and those eight further on, for which B has zeros.
        for half in cutlass.range_constexpr(2):
            numbers[4 * half + 2 * r], numbers[4 * half + 2 * r + 1] = first, second
    # By pairs: single halves would be put together right before a wgmma, behind the fence that has to follow.
    round_to(numbers, A)
