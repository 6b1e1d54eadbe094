"""Warp-level MMAs, mma.sync of 16 x 8 x 16: what a warp multiplies is read from SMEM by ldmatrix.

A warp has `len(S)` or `len(O)` blocks of 16 rows side by side: K and V are read once for them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp as warp_ops

from .fragment import mma_fragment
from .smem_layouts import chunk_of, vector_address

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
    if columns == 8:
        return tuple(cute.make_rmem_tensor(4, Float32) for _ in range(count))
    shape = mma_of(dtype).partition_shape_C((ROWS, columns))
    return tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(count))


def rows_of(accumulator: cute.Tensor, count: int = 2) -> cute.Tensor:
    """A (rows, columns) view of an accumulator: rows lane // 4 and 8 more, or `count` = 1 of them."""
    values = mma_fragment(accumulator, (), Int32(0), Int32(0)).values
    layout = cute.make_layout((count, values.shape[1]), stride=values.stride)
    return cute.make_tensor(values.iterator, layout)


def operand_of(rounded: cute.Tensor, columns: int) -> cute.Tensor:
    """An accumulator's rounded numbers as the left operand: registers have the same order in both."""
    layout = cute.make_layout(mma_of(rounded.element_type).partition_shape_A((ROWS, columns)))
    assert cute.size(layout) == cute.size(rounded)
    return cute.make_tensor(rounded.iterator, layout)


class Share(NamedTuple):
    """A warp's columns of a matrix: of every chunk the index-th of `count` equal ranges.

    Whole rows so lie in the widest chunks, and each warp reads all of its columns by one address.
    """

    index: Int32
    count: int


class Matrix(NamedTuple):
    """A matrix of 16-bit numbers in SMEM, of which a warp reads 16 x 16 at a time.

    A lane computes one address. A swizzle flips bits of it for other columns of a chunk, and all else is
    constants.
    """

    address: Int32
    """Address of the lane's vector of the first 16 x 16."""
    rows: int
    """Rows of a chunk."""
    chunk: int
    """Columns of a chunk."""
    transposed: bool
    dtype: type
    own: int
    """Columns of a chunk that are the warp's; its next ones are in the next chunk."""

    def below(self, row: Int32 | int) -> Matrix:
        """The matrix from a row on, a multiple of 16."""
        return self._replace(address=self.address + row * (2 * self.chunk))

    def read(self, row: int, column: int) -> tuple[Uint32, ...]:
        """The lane's words of 16 rows and columns as they lie in SMEM, from these multiples of 16 on; or of
        32 rows and 8 columns, if the share has no more of a chunk, or 8 rows and 32 columns of `eight`.
        """
        chunk, inside = divmod(column, self.own)
        offset = (chunk * self.rows + row) * 2 * self.chunk
        turn = ".trans" if self.transposed else ""
        return cute.arch.inline_ptx(
            f"ldmatrix.sync.aligned.m8n8.x4{turn}.shared.b16 "
            f"{{ {{$w0}}, {{$w1}}, {{$w2}}, {{$w3}} }}, [{{$r0}}+{offset}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[self.address ^ (2 * inside) if inside else self.address],
        )


def operand(
    stage: cute.Tensor,
    row: Int32,
    lane: Int32,
    *,
    is_left: bool,
    column: Int32 | int = 0,
    share: Share | None = None,
    part: int | None = None,
    transposed: bool = False,
    eight: bool = False,
) -> Matrix:
    """An operand in a stage (rows, columns), from a row and a column on; both are multiples of 16.

    The rows of a left operand are those of the product, those of a right one its columns.

    share: the columns that the operand has, all if None; 8 of a chunk only if it is a transposed right one.
    part: columns that are an operand of their own in the stage's layout.
    transposed: the operand's rows are the stage's columns.
    eight: the operand has eight rows, of which 32 columns are read at a time; it is a right one.
    """
    rows, columns = (cute.size(stage, mode=[i]) for i in range(2))
    chunk = own = chunk_of(part or columns)
    if share is not None:
        own = chunk // share.count
        column = share.index * own
    if own % 16:
        place = lane, 0
    elif eight:
        place = lane % 8, lane // 8
    else:
        # The second matrix of an ldmatrix is 8 rows on and the third one 8 columns, or the other way round.
        eight, further = lane // 8 % 2, lane // 16
        down, across = (eight, further) if is_left != transposed else (further, eight)
        place = lane % 8 + down * 8, across
    address = vector_address(stage, row + place[0], column // 8 + place[1], part)
    return Matrix(address, rows, chunk, transposed, stage.element_type, own)


left, right = (partial(operand, is_left=is_left) for is_left in (True, False))


def words_of(rounded: cute.Tensor, k: int) -> tuple[Uint32, ...]:
    """Words of the k-th 16 columns of an accumulator's rounded numbers, as a left operand."""
    words = cute.recast_tensor(
        cute.make_tensor(rounded.iterator, cute.make_layout(cute.size(rounded))), Uint32
    )
    return tuple(words[4 * k + i] for i in range(4))


def columns_from(x: Matrix, i: Int32, columns: int) -> Matrix:
    """The operand from its i-th so many columns on: whole chunks, or a part of one, a power of 2."""
    if columns % x.own:
        return _from_half(x, i, columns)
    return _from_part(x, i, columns // x.own * x.chunk)


def scores(S: tuple[cute.Tensor, ...], q: Matrix, k: Matrix, D: int) -> None:
    """S = Q K^T, for Q (16 * len(S), D) and K (keys, D)."""
    for accumulator in S:
        accumulator.fill(0.0)
    _add_scores(S, q, k, D)


@cute.jit
def scores_by_parts(S: tuple[cute.Tensor, ...], q: Matrix, k: Matrix, D: cutlass.Constexpr) -> None:
    """`scores` in a loop over parts of D, whole chunks each: ptxas reads nothing ahead of an iteration."""
    for accumulator in S:
        accumulator.fill(0.0)
    chunks = D // q.chunk
    parts = next((n for n in range(2, chunks) if chunks % n == 0), chunks)
    for i in cutlass.range(parts, unroll=1):
        _add_scores(S, _from_part(q, i, D // parts), _from_part(k, i, D // parts), D // parts)


@cute.jit
def scores_by_halves(S: tuple[cute.Tensor, ...], q: Matrix, k: Matrix, D: cutlass.Constexpr) -> None:
    """`scores_by_parts` also where D is one chunk: its halves, if each has whole MMAs."""
    if cutlass.const_expr(D > q.chunk or D % (2 * ROWS)):
        scores_by_parts(S, q, k, D)
    else:
        for accumulator in S:
            accumulator.fill(0.0)
        for i in cutlass.range(2, unroll=1):
            _add_scores(S, _from_half(q, i, D // 2), _from_half(k, i, D // 2), D // 2)


def _from_half(x: Matrix, i: Int32, columns: int) -> Matrix:
    """The operand from the i-th half of its chunk on: a bit of addresses, which a swizzle may have set."""
    return x._replace(address=x.address ^ (i * (2 * columns)))


def _from_part(x: Matrix, i: Int32, columns: int) -> Matrix:
    """The operand from its i-th part on, of so many columns each, whole chunks."""
    return x._replace(address=x.address + i * (columns * x.rows * 2))


def _add_scores(S: tuple[cute.Tensor, ...], q: Matrix, k: Matrix, D: int) -> None:
    if _columns_of(S[0]) == 8:
        _add_scores_of_eight(S, q, k, D)
        return
    for d in range(0, D, 16):
        a = [q.read(ROWS * m, d) for m in range(len(S))]
        for n in range(_columns_of(S[0]) // 16):
            _multiply_pair(S, a, k.read(16 * n, d), n, k.dtype)


def _add_scores_of_eight(S: tuple[cute.Tensor, ...], q: Matrix, k: Matrix, D: int) -> None:
    """`_add_scores` for eight keys."""
    for d in range(0, D, 32):
        b = k.read(0, d)
        for i in range(2):
            a = [q.read(ROWS * m, d + 16 * i) for m in range(len(S))]
            _multiply(S, a, b[2 * i : 2 * i + 2], 0, k.dtype)


def accumulate(sums: tuple[cute.Tensor, ...], P: Callable[[int], Sequence], v: Matrix, keys: int) -> None:
    """sums += P V, for V (keys, columns), transposed; P(k) are the words of 16 keys for each of the sums."""
    if v.own % 16:
        _accumulate_eights(sums, P, v, keys)
        return
    for k in range(keys // 16):
        a = P(k)
        for n in range(_columns_of(sums[0]) // 16):
            _multiply_pair(sums, a, v.read(16 * k, 16 * n), n, v.dtype)


def _accumulate_eights(
    sums: tuple[cute.Tensor, ...], P: Callable[[int], Sequence], v: Matrix, keys: int
) -> None:
    """`accumulate` for a share of eight columns of each chunk: an ldmatrix brings those of 32 keys."""
    for k in range(0, keys // 16, 2):
        a = P(k), P(k + 1)
        for n in range(_columns_of(sums[0]) // 8):
            b = v.read(16 * k, 8 * n)
            for i in range(2):
                _multiply(sums, a[i], b[2 * i : 2 * i + 2], n, v.dtype)


def from_smem(a: Matrix, count: int) -> Callable[[int], Sequence]:
    """Words of `count` times 16 rows of a left operand, for `accumulate`."""

    def words(k: int) -> Sequence:
        return [a.read(16 * k, ROWS * m) if a.transposed else a.read(ROWS * m, 16 * k) for m in range(count)]

    return words


def from_registers(rounded: Sequence[cute.Tensor]) -> Callable[[int], Sequence]:
    """Words of accumulators' rounded numbers, for `accumulate`."""
    return lambda k: [words_of(numbers, k) for numbers in rounded]


def _columns_of(accumulator: cute.Tensor) -> int:
    return cute.size(accumulator) * 32 // ROWS


def _multiply_pair(
    sums: tuple[cute.Tensor, ...], a: Sequence, b: tuple[Uint32, ...], n: int, dtype: type
) -> None:
    """Add the products with the n-th 16 columns, as many as an ldmatrix brings."""
    for i in range(2):
        _multiply(sums, a, b[2 * i : 2 * i + 2], 2 * n + i, dtype)


def _multiply(sums: tuple[cute.Tensor, ...], a: Sequence, b: tuple[Uint32, ...], n: int, dtype: type) -> None:
    """Add the products with the n-th 8 columns."""
    kind = "bf16" if dtype is cutlass.BFloat16 else "f16"
    for accumulator, words in zip(sums, a, strict=True):
        own = cute.make_tensor(accumulator.iterator + 4 * n, cute.make_layout(4))
        added = cute.arch.inline_ptx(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
            " { {$w0}, {$w1}, {$w2}, {$w3} }, { {$r0}, {$r1}, {$r2}, {$r3} },"
            " { {$r4}, {$r5} }, { {$r6}, {$r7}, {$r8}, {$r9} };",
            write_only_types=[Float32] * 4,
            read_only_args=[*words, *b, *(own[j] for j in range(4))],
        )
        for j in range(4):
            own[j] = added[j]


class Target(NamedTuple):
    """A matrix of 16-bit numbers in SMEM to which a warp writes accumulators' rounded numbers.

    A lane computes one address, as it does for `Matrix`.
    """

    address: Int32
    """Address of the lane's first two numbers."""
    rows: int
    """Rows of a chunk."""
    chunk: int
    """Columns of a chunk."""
    own: int
    """Columns of a chunk that are the warp's."""

    def write(self, rounded: cute.Tensor, row: int) -> None:
        """Store 16 rows, from a row on, a multiple of 16."""
        words = cute.recast_tensor(
            cute.make_tensor(rounded.iterator, cute.make_layout(cute.size(rounded))), Uint32
        )
        for i in range(cute.size(words)):
            chunk, inside = divmod(i // 2 * 8, self.own)
            offset = (chunk * self.rows + row + i % 2 * 8) * 2 * self.chunk
            cute.arch.inline_ptx(
                f"st.shared.b32 [{{$r0}}+{offset}], {{$r1}};",
                read_only_args=[self.address ^ (2 * inside) if inside else self.address, words[i]],
            )


def target(
    stage: cute.Tensor,
    row: Int32,
    lane: Int32,
    *,
    column: Int32 | int = 0,
    share: Share | None = None,
    part: int | None = None,
) -> Target:
    """A stage (rows, columns) from a row on, a multiple of 16, and a column on that a chunk begins with.

    share: the columns that are written, all if None.
    part: columns that are an operand of their own in the stage's layout.
    """
    rows, columns = (cute.size(stage, mode=[i]) for i in range(2))
    chunk = own = chunk_of(part or columns)
    if share is not None:
        own = chunk // share.count
        column = share.index * own
    address = vector_address(stage, row + lane // LANES, column // 8, part) + 4 * (lane % LANES)
    return Target(address, rows, chunk, own)


@cute.jit
def store_to_smem(rounded: cute.Tensor, target: cute.Tensor, lane: Int32) -> None:
    """Store 16-bit numbers in an accumulator's order to target (16, columns) in SMEM, two at a time."""
    dtype = target.element_type
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=32)
    copy = cute.make_tiled_copy_C(atom, mma_of(dtype)).get_slice(lane)
    cute.copy(atom, copy.retile(rounded), copy.partition_D(target))
