"""Warp-level MMAs, mma.sync of 16 x 8 x 16: what a warp multiplies is read from SMEM by ldmatrix.

A warp has `len(S)` or `len(O)` blocks of 16 rows side by side: K and V are read once for them all.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp as warp_ops

from .fragment import mma_fragment

ROWS = 16
"""Rows of an MMA."""
LANES = 4
"""Lanes that share a row of an accumulator."""


def mma_of(dtype: type) -> cute.TiledMma:
    """The MMA of one warp: 16 rows, and 16 columns, as many as an ldmatrix brings."""
    op = warp_ops.MmaF16BF16Op(dtype, Float32, (16, 8, 16))
    return cute.make_tiled_mma(op, (1, 1, 1), permutation_mnk=(16, 16, 16))


def make_accumulators(dtype: type, count: int, columns: int) -> tuple[cute.Tensor, ...]:
    """Registers of `count` accumulators of 16 rows."""
    shape = mma_of(dtype).partition_shape_C((ROWS, columns))
    return tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(count))


def rows_of(accumulator: cute.Tensor) -> cute.Tensor:
    """A (rows, columns) view of an accumulator: rows lane // 4 and 8 more."""
    return mma_fragment(accumulator, (), Int32(0), Int32(0)).values


def operand_of(rounded: cute.Tensor, columns: int) -> cute.Tensor:
    """An accumulator's rounded numbers as the left operand: registers have the same order in both."""
    layout = cute.make_layout(mma_of(rounded.element_type).partition_shape_A((ROWS, columns)))
    assert cute.size(layout) == cute.size(rounded)
    return cute.make_tensor(rounded.iterator, layout)


@cute.jit
def scores(S: tuple[cute.Tensor, ...], own_q: cute.Tensor, own_k: cute.Tensor, lane: Int32) -> None:
    """S = Q K^T, for own_q (16 * len(S), D) and own_k (keys, D) in SMEM."""
    dtype = own_q.element_type
    mma = mma_of(dtype)
    lanes = mma.get_slice(lane)
    atom = cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(False, 4), dtype)
    load_a = cute.make_tiled_copy_A(atom, mma).get_slice(lane)
    load_b = cute.make_tiled_copy_B(atom, mma).get_slice(lane)
    a, b = lanes.make_fragment_A(lanes.partition_A(own_q)), lanes.make_fragment_B(lanes.partition_B(own_k))
    from_a, from_b = load_a.partition_S(own_q), load_b.partition_S(own_k)
    to_a, to_b = load_a.retile(a), load_b.retile(b)
    for accumulator in S:
        accumulator.fill(0.0)
    for k in cutlass.range_constexpr(cute.size(own_q, mode=[1]) // 16):
        cute.copy(atom, from_a[None, None, k], to_a[None, None, k])
        for n in cutlass.range_constexpr(cute.size(from_b, mode=[1])):
            cute.copy(atom, from_b[None, n, k], to_b[None, n, k])
            for m in cutlass.range_constexpr(len(S)):
                one = cute.local_tile(a[None, None, k], (cute.size(a, mode=[0]), 1), (0, m))
                _multiply(mma, S[m], one, b[None, None, k], n)


@cute.jit
def accumulate(
    O: tuple[cute.Tensor, ...], P: tuple[cute.Tensor, ...], own_v: cute.Tensor, lane: Int32
) -> None:
    """O += P V, for operands P and own_v (Dv, keys) in SMEM, contiguous along Dv."""
    dtype = own_v.element_type
    mma = mma_of(dtype)
    lanes = mma.get_slice(lane)
    atom = cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(True, 4), dtype)
    load_b = cute.make_tiled_copy_B(atom, mma).get_slice(lane)
    b = lanes.make_fragment_B(lanes.partition_B(own_v))
    from_b, to_b = load_b.partition_S(own_v), load_b.retile(b)
    for k in cutlass.range_constexpr(cute.size(own_v, mode=[1]) // 16):
        for n in cutlass.range_constexpr(cute.size(from_b, mode=[1])):
            cute.copy(atom, from_b[None, n, k], to_b[None, n, k])
            for m in cutlass.range_constexpr(len(O)):
                _multiply(mma, O[m], P[m][None, None, k], b[None, None, k], n)


@cute.jit
def accumulate_from_smem(
    sums: cute.Tensor, own_a: cute.Tensor, own_b: cute.Tensor, lane: Int32, a_turned: cutlass.Constexpr
) -> None:
    """sums += A B^T, for own_a (16, K) and own_b (N, K) in SMEM, the latter contiguous along N.

    a_turned: own_a is contiguous along its rows, otherwise along K.
    """
    dtype = own_a.element_type
    mma = mma_of(dtype)
    lanes = mma.get_slice(lane)
    load = cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(a_turned, 4), dtype)
    load_turned = cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(True, 4), dtype)
    load_a = cute.make_tiled_copy_A(load, mma).get_slice(lane)
    load_b = cute.make_tiled_copy_B(load_turned, mma).get_slice(lane)
    a, b = lanes.make_fragment_A(lanes.partition_A(own_a)), lanes.make_fragment_B(lanes.partition_B(own_b))
    from_a, from_b = load_a.partition_S(own_a), load_b.partition_S(own_b)
    to_a, to_b = load_a.retile(a), load_b.retile(b)
    for k in cutlass.range_constexpr(cute.size(own_a, mode=[1]) // 16):
        cute.copy(load, from_a[None, None, k], to_a[None, None, k])
        for n in cutlass.range_constexpr(cute.size(from_b, mode=[1])):
            cute.copy(load_turned, from_b[None, n, k], to_b[None, n, k])
            _multiply(mma, sums, a[None, None, k], b[None, None, k], n)


def _multiply(mma: cute.TiledMma, sums: cute.Tensor, a: cute.Tensor, b: cute.Tensor, n: int) -> None:
    """Add the product with the n-th 16 columns of b, as many as an ldmatrix brings."""
    own_sums = cute.local_tile(sums, (cute.size(sums, mode=[0]), 1, 2), (0, 0, n))
    own_b = cute.local_tile(b, (cute.size(b, mode=[0]), 2), (0, n))
    cute.gemm(mma, own_sums, a, own_b, own_sums)


@cute.jit
def store_to_smem(rounded: cute.Tensor, target: cute.Tensor, lane: Int32) -> None:
    """Store 16-bit numbers in an accumulator's order to target (16, columns) in SMEM, two at a time."""
    dtype = target.element_type
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=32)
    copy = cute.make_tiled_copy_C(atom, mma_of(dtype)).get_slice(lane)
    cute.copy(atom, copy.retile(rounded), copy.partition_D(target))
