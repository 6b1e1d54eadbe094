"""Caches of FP8 numbers (e4m3): bytes stay bytes in shared memory, and warps widen them to float16.

float16 holds every e4m3 number, and one instruction widens two of them; so all MMAs of such a kernel take
float16, whatever the dtype of Q. Rows of bfloat16 are scaled by powers of two to fit, and scores by their
inverses.

What ldmatrix takes for a 16-bit number is two neighbouring bytes of a row here:

    QK^T  a lane gets columns 4 t to 4 t + 3 of a key, where an operand has 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
          A sum may be in any order: Q is stored in an order that fits.
    PV    a lane gets columns 2 c and 2 c + 1 of keys 2 t and 2 t + 1. Even columns make one operand, odd ones
          another, and of each 16 columns of O the lane has 4 t to 4 t + 3.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp as warp_ops

from ...configs.decode import MMA_ROWS
from ..common.attn_mask import vector_at
from ..common.rounding import round_to, widened
from ..common.warps import WARP
from .context import Context
from .plan import DecodePlan

_UNIT_OF_INTEGERS = 256.0
"""What numbers of float16 stand for where integers widen the cache's."""
STEP = 16
"""Columns of a step of an MMA: 16 bytes of a key, 32 of a row of Q."""
_LANES = 8
"""Lanes that load a row of Q."""
_WORDS = 8
"""32-bit words of so many columns of Q."""
_LARGEST_LOG2 = 14
"""Numbers of a row of Q are scaled to less than twice 2 to this power."""
_BIAS, _MANTISSA = 127, 7
"""The bias of a bfloat16's exponent, and its bits of mantissa."""


def unit(plan: DecodePlan) -> float:
    """What a number of the cache stands for as the MMAs have it, but for the scales."""
    return 1.0 if plan.form.gpu.converts_fp8 else _UNIT_OF_INTEGERS


@cute.jit
def fetch_q(ctx: Context) -> cute.Tensor:
    """Start to load the thread's part (words, steps, passes) of the tile's rows of Q into registers."""
    plan, tile, q = ctx.plan, ctx.tile, ctx.tensors.q
    steps = -(-plan.D // (STEP * _LANES))
    words = cute.make_rmem_tensor((_WORDS, steps, plan.rows // MMA_ROWS), Uint32)
    words.fill(0)
    for i in cutlass.range_constexpr(plan.rows // MMA_ROWS):
        row = tile.first_row + _row(ctx, i)
        if row < tile.num_rows:
            token, head = ctx.place_of(row)
            start = q[token, head, None].iterator
            for j in cutlass.range_constexpr(steps):
                step = ctx.lane % _LANES + j * _LANES
                if step < plan.D // STEP:
                    for half in cutlass.range_constexpr(2):
                        source = vector_at(start + (step * STEP + half * 8), 4, Uint32)
                        own = cute.make_rmem_tensor(4, Uint32)
                        cute.autovec_copy(source, own)
                        for w in cutlass.range_constexpr(4):
                            words[4 * half + w, j, i] = own[w]
    return words


@cute.jit
def store_q(ctx: Context, words: cute.Tensor) -> None:
    """Store these parts in the order that K asks for, as float16, with the factors of the rows' scores."""
    plan, sQ, sFactor = ctx.plan, ctx.sQ, ctx.sFactor
    steps = cute.size(words, mode=[1])
    for i in cutlass.range_constexpr(plan.rows // MMA_ROWS):
        row = _row(ctx, i)
        if cutlass.const_expr(plan.scales_q):
            shrink, grow = _factors(words[None, None, i])
            for j in cutlass.range_constexpr(steps):
                _to_float16(words[None, j, i], shrink)
            if ctx.lane % _LANES == 0:
                sFactor[row] = grow * ctx.tile.k_scale
        for j in cutlass.range_constexpr(steps):
            step = ctx.lane % _LANES + j * _LANES
            if step < plan.D // STEP:
                for half in cutlass.range_constexpr(2):
                    # Even pairs of columns come first, then odd ones.
                    vector = cute.make_rmem_tensor(8, Float16)
                    pairs = cute.recast_tensor(vector, Uint32)
                    for w in cutlass.range_constexpr(4):
                        pairs[w] = words[half + 2 * w, j, i]
                    target = cute.local_tile(sQ, (1, 8), (row, 2 * step + half))
                    cute.autovec_copy(vector, cute.group_modes(target, 0, 2))


def _row(ctx: Context, i: int) -> Int32:
    """The i-th row of the tile that the thread loads a part of."""
    return i * MMA_ROWS + ctx.warp * (WARP // _LANES) + ctx.lane // _LANES


@cute.jit
def _factors(words: cute.Tensor) -> tuple[Float32, Float32]:
    """A power of two that makes a row of bfloat16 fit into float16, and its inverse, the same in all lanes.

    A row whose numbers are all below 2**-112 is scaled by the largest power there is.
    """
    largest = Uint32(0)
    for i in cutlass.range_constexpr(cute.size(words)):
        largest = cutlass.max(largest, cutlass.max(words[i] & 0x7FFF, words[i] >> 16 & 0x7FFF))
    for step in cutlass.range_constexpr(_LANES.bit_length() - 1):
        largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, 1 << step))
    exponent = cutlass.max(largest >> _MANTISSA, Uint32(_LARGEST_LOG2 + 1))
    shrink = (2 * _BIAS + _LARGEST_LOG2 - exponent) << 23
    return _float(shrink), _float((exponent - _LARGEST_LOG2) << 23)


@cute.jit
def _to_float16(words: cute.Tensor, factor: Float32) -> None:
    """Scale pairs of bfloat16 in place, which become float16."""
    count = cute.size(words)
    pairs = cute.make_rmem_tensor(count, Uint32)
    for i in cutlass.range_constexpr(count):
        pairs[i] = words[i]
    wide = widened(cute.recast_tensor(pairs, BFloat16))
    for i in cutlass.range_constexpr(2 * count):
        wide[i] = wide[i] * factor
    round_to(wide, cute.recast_tensor(pairs, Float16))
    for i in cutlass.range_constexpr(count):
        words[i] = pairs[i]


def _float(bits: Uint32) -> Float32:
    """The float32 of these bits."""
    register = cute.make_rmem_tensor(1, Uint32)
    register[0] = bits
    return cute.recast_tensor(register, Float32)[0]


@cute.jit
def scores(ctx: Context, S: cute.Tensor, mma: cute.TiledMma, stage: Int32) -> None:
    """S = Q K^T of the warp's rows and keys, but for the rows' factors."""
    plan = ctx.plan
    own_q = cute.local_tile(ctx.sQ, (MMA_ROWS, plan.D), (ctx.row_warp, 0))
    own_k = cute.local_tile(ctx.sK[None, None, stage], (plan.warp_keys, plan.k_columns), (ctx.key_warp, 0))
    S.fill(0.0)
    lanes = mma.get_slice(ctx.lane)
    atom = cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(False, 4), Float16)
    load_a = cute.make_tiled_copy_A(atom, mma).get_slice(ctx.lane)
    load_b = cute.make_tiled_copy_B(atom, mma).get_slice(ctx.lane)
    a, bytes_ = (
        lanes.make_fragment_A(lanes.partition_A(own_q)),
        lanes.make_fragment_B(lanes.partition_B(own_k)),
    )
    b = cute.make_rmem_tensor(mma.partition_shape_B((plan.warp_keys, STEP)), Float16)
    wide, narrow = cute.recast_tensor(b, Uint32), cute.recast_tensor(bytes_, Uint32)
    from_a, from_b, to_a, to_b = (
        load_a.partition_S(own_q),
        load_b.partition_S(own_k),
        load_a.retile(a),
        load_b.retile(bytes_),
    )
    for k in cutlass.range_constexpr(plan.D // STEP):
        if cutlass.const_expr(k % 2 == 0):
            cute.copy(atom, from_b[None, None, k // 2], to_b[None, None, k // 2])
        cute.copy(atom, from_a[None, None, k], to_a[None, None, k])
        for n in cutlass.range_constexpr(cute.size(wide, mode=[1])):
            wide[0, n, 0], wide[1, n, 0] = _widened(narrow[k % 2, n, k // 2], plan)
        cute.gemm(mma, S, a[None, None, k], b[None, None, 0], S)


@cute.jit
def apply_factors(ctx: Context, values: cute.Tensor) -> None:
    """Multiply scores (R, C) by their rows' factors."""
    row = ctx.row_warp * MMA_ROWS + ctx.lane // 4
    for r in cutlass.range_constexpr(cute.size(values, mode=[0])):
        factor = ctx.tile.k_scale
        if cutlass.const_expr(ctx.plan.scales_q):
            factor = ctx.sFactor[row + 8 * r]
        for c in cutlass.range_constexpr(cute.size(values, mode=[1])):
            values[r, c] = values[r, c] * factor


@cute.jit
def add_pv(ctx: Context, O: cute.Tensor, weights: cute.Tensor, mma: cute.TiledMma, stage: Int32) -> None:
    """O += P V of the warp's rows and columns, for weights (an operand) of all keys of the block."""
    plan = ctx.plan
    # An ldmatrix brings 16 bytes of 32 keys.
    tall = cute.make_tiled_mma(mma.op, (1, 1, 1), permutation_mnk=(MMA_ROWS, 8, 32))
    lanes = tall.get_slice(ctx.lane)
    atom = cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(True, 4), Float16)
    load_b = cute.make_tiled_copy_B(atom, tall).get_slice(ctx.lane)
    shape = cute.make_layout(mma.partition_shape_C((MMA_ROWS, STEP)))
    b = cute.make_rmem_tensor(mma.partition_shape_B((STEP, STEP)), Float16)
    wide = cute.recast_tensor(b, Uint32)
    for i in cutlass.range_constexpr(plan.strips):
        first = (ctx.key_warp + i * plan.key_warps) * (plan.strip // STEP)
        for j in cutlass.range_constexpr(plan.strip // STEP):
            own_v = cute.local_tile(ctx.sV[None, None, stage], (STEP // 2, plan.form.keys), (first + j, 0))
            sums = cute.make_tensor(O.iterator + (i * plan.strip // STEP + j) * cute.size(shape), shape)
            bytes_ = lanes.make_fragment_B(lanes.partition_B(own_v))
            narrow = cute.recast_tensor(bytes_, Uint32)
            from_b, to_b = load_b.partition_S(own_v), load_b.retile(bytes_)
            for k in cutlass.range_constexpr(plan.form.keys // STEP):
                if cutlass.const_expr(k % 2 == 0):
                    cute.copy(atom, from_b[None, None, k // 2], to_b[None, None, k // 2])
                for half in cutlass.range_constexpr(2):
                    wide[half, 0, 0], wide[half, 1, 0] = _widened(_columns_apart(narrow[half, 0, k]), plan)
                cute.gemm(mma, sums, weights[None, None, k], b[None, None, 0], sums)


def _columns_apart(word: Uint32) -> Uint32:
    """Two keys' numbers of an even column, then those of an odd one."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, 0, 0x3120;", write_only_types=[Uint32], read_only_args=[word]
    )


def _widened(word: Uint32, plan: DecodePlan) -> tuple[Uint32, Uint32]:
    """Four numbers of e4m3 as two pairs of float16, which stand for `unit` times as much."""
    if not plan.form.gpu.converts_fp8:
        return _widened_by_integers(word)
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0};"
        " cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
        write_only_types=[Uint32, Uint32],
        read_only_args=[word],
    )


def _widened_by_integers(word: Uint32) -> tuple[Uint32, Uint32]:
    """Four numbers of e4m3 as two pairs of float16, 2**-8 as large: a float16's exponent has a bias of 15.

    A byte's sign comes to bit 15, its other bits to bits 13 to 7, of subnormal numbers too. NaN, whose seven
    bits are all 1, carries to bit 15 if 1 is added, which then fills the exponent.
    """
    pairs = []
    for selector in (0x1404, 0x3424):
        own = cute.arch.inline_ptx(
            f"prmt.b32 {{$w0}}, {{$r0}}, 0, {selector:#x};",
            write_only_types=[Uint32],
            read_only_args=[word],
        )
        number, signs = own & 0x7F007F00, Uint32(0x80008000)
        is_nan = (number + 0x01000100) & signs
        pairs.append((number >> 1) | (own & signs) | (is_nan - (is_nan >> 7)))
    return pairs[0], pairs[1]
