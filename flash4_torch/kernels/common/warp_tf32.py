"""Warp-level MMAs of float32 numbers by TF32, mma.sync of 16 x 8 x 8.

A matrix in SMEM is a stage (rows, 2 * columns) of 16-bit halves, in chunks of 128 bytes, 32 columns. A warp
has `len(S)` or `len(O)` blocks of 16 rows side by side.

Where `exact`, a number is the sum of two TF32 numbers, big and small, and a product is that of the big ones
and those of one's big and the other's small part. The latter have sums of their own, lest a sum of products
be truncated more often. What is infinite, or larger than TF32 has numbers, makes NaN.

ldmatrix brings neighbours of a row to the lanes that share it, as Q and K of S = Q K^T need them. But the
left operand of P V has the order of an accumulator: of every eight keys a lane has 2 t and 2 t + 1, t = lane
% 4, which stand for t and t + 4. So the lane reads the same two keys of V, of each 16 bytes: columns for four
MMAs. Of 32 columns of O it then has eight neighbours, from 8 t on. The swizzle of 128 bytes spreads the
vectors of eight lanes over all banks.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from .attn_mask import vector_at
from .smem_layouts import vector_address

ROWS = 16
"""Rows of an MMA."""
LANES = 4
"""Lanes that share a row of an accumulator."""
STEP = 8
"""Columns of an MMA's sums, and of its left operand."""
CHUNK = 32
"""Columns whose sums a lane has neighbours of."""
_ROW = 128
"""Bytes of a row in a chunk."""
_VECTOR = 16
_TOGETHER = CHUNK // STEP
"""MMAs for which a lane reads at once."""
_UNROLLED = 64
"""Columns up to which there is no loop over chunks."""
_OWN = CHUNK // LANES
"""Neighbouring columns of a lane."""

Words = tuple[Uint32, ...]


class Method(NamedTuple):
    """How matrices are multiplied."""

    exact: bool
    """Whether a product is three, as exact as float32."""
    steady: bool
    """Whether the warp meets at every step, which keeps ptxas from reading so far ahead that it spills."""
    ahead: bool = False
    """Whether operands in SMEM are read while the step before is multiplied."""
    chunks: int = 1
    """Chunks of columns that a loop over scores takes together where it reads ahead."""
    steps: int = 2
    """Steps that a loop over left operands in SMEM takes together."""
    chunks_apart: bool = False
    """Whether every second chunk of O is in a branch, so that not all sums live at once (ptxas.md, P31)."""


class Split(NamedTuple):
    """Words of an operand. `small` is empty where one product is enough."""

    big: Words
    small: Words


def make_accumulators(count: int, columns: int) -> tuple[cute.Tensor, ...]:
    """Registers of `count` accumulators of 16 rows, flat."""
    return tuple(cute.make_rmem_tensor(ROWS * columns // 32, Float32) for _ in range(count))


_ROUND = "cvt.rna.tf32.f32 {$w0}, {$r0};"
_ROUND_BY_INTEGERS = (
    "{ .reg .b32 word; mov.b32 word, {$r0}; add.u32 word, word, 0x1000; and.b32 {$w0}, word, 0xffffe000; }"
)
"""The same bits in half as many instructions, but 0 of a NaN whose mantissa has ones alone."""


def split(words: tuple, exact: bool) -> Split:
    """Round float32 numbers to TF32; `exact`: and the rest of each, which is NaN where the number is."""
    big = tuple(
        cute.arch.inline_ptx(
            _ROUND_BY_INTEGERS if exact else _ROUND, write_only_types=[Uint32], read_only_args=[word]
        )
        for word in words
    )
    if not exact:
        return Split(big, ())
    small = tuple(
        cute.arch.inline_ptx(
            "sub.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[word, of_big]
        )
        for word, of_big in zip(words, big, strict=True)
    )
    return Split(big, small)


@cute.jit
def split_rows(
    stage: cute.Tensor, rest: cutlass.Constexpr, thread: Int32, threads: cutlass.Constexpr
) -> None:
    """Split all numbers of a stage: the small parts go `rest` bytes behind the big ones, which stay.

    Each thread splits some vectors, in the order of memory, whatever the swizzle.
    """
    vectors = 2 * cute.size(stage) // _VECTOR
    first = vector_address(stage, Int32(0), Int32(0)) + thread * _VECTOR
    for i in cutlass.range(vectors // threads, unroll=2):
        at = first + i * (threads * _VECTOR)
        words = split(_load(at, 0), exact=True)
        _store(at, 0, words.big)
        _store(at, rest, words.small)


class Rows(NamedTuple):
    """The rows of a stage from the first one on."""

    stage: cute.Tensor
    first: Int32
    rest: int = 0
    """Bytes from a number to its small part, as `split_rows` left them; 0 if it is split when it is read."""


class Columns(NamedTuple):
    """The columns of a stage from the first one on, a multiple of `CHUNK`."""

    stage: cute.Tensor
    first: Int32


@cute.jit
def scores(
    S: tuple[cute.Tensor, ...],
    own_q: Rows,
    own_k: Rows,
    lane: Int32,
    method: cutlass.Constexpr,
    begun: cutlass.Constexpr = False,
) -> None:
    """S = Q K^T, for as many rows of Q and of K as S has rows and columns; `begun`: added to what S has."""
    chunks, count = cute.size(own_q.stage, mode=[1]) // 2 // CHUNK, _mmas(S[0])
    at_q, at_k = _first_matrices(own_q, own_k, lane, count)
    to_q, to_k = (cute.size(own.stage, mode=[0]) * _ROW for own in (own_q, own_k))
    shape = _Shape(len(S), count, own_q.rest)
    rests = make_accumulators(len(S) if method.exact else 0, count * STEP)
    for accumulator in rests if cutlass.const_expr(begun) else (*S, *rests):
        accumulator.fill(0.0)
    if cutlass.const_expr(method.ahead):
        ahead = _read_columns(at_q, at_k, 0, shape)
        for _ in cutlass.range(chunks - 1, unroll=method.chunks):
            ahead = _add_chunk(S, rests, (at_q, at_k), (at_q + to_q, at_k + to_k), ahead, shape, method)
            at_q, at_k = at_q + to_q, at_k + to_k
        _add_chunk(S, rests, (at_q, at_k), None, ahead, shape, method)
    else:
        # A loop over chunks keeps ptxas from reading so far ahead that it spills.
        for _ in cutlass.range(chunks, unroll=chunks if chunks * CHUNK <= _UNROLLED else 1):
            for k in cutlass.range_constexpr(shape.steps):
                _meet(method)
                _multiply_columns(S, rests, _read_columns(at_q, at_k, k, shape), shape, method)
            at_q, at_k = at_q + to_q, at_k + to_k
    _add(S, rests)


@cute.jit
def add_scores(
    S: tuple[cute.Tensor, ...], queries: Rows, keys: Rows, lane: Int32, method: cutlass.Constexpr
) -> None:
    """S += Q K^T of stages of one chunk of columns."""
    at_q, at_k = _first_matrices(queries, keys, lane, _mmas(S[0]))
    rests = make_accumulators(len(S) if method.exact else 0, _mmas(S[0]) * STEP)
    for accumulator in rests:
        accumulator.fill(0.0)
    # Unrolled, ptxas would read so far ahead that it spills.
    shape = _Shape(len(S), _mmas(S[0]), queries.rest)
    for k in cutlass.range(shape.steps, unroll=1):
        _meet(method)
        _multiply_columns(S, rests, _read_columns(at_q, at_k, k, shape), shape, method)
    _add(S, rests)


def _mmas(accumulator: cute.Tensor) -> int:
    """MMAs side by side whose sums an accumulator has."""
    return cute.size(accumulator) * 32 // ROWS // STEP


def _first_matrices(own_q: Rows, own_k: Rows, lane: Int32, count: int) -> tuple[Int32, Int32]:
    """Addresses of an ldmatrix: of Q 8 rows and 8 further ones, then further columns; of K the other way
    round, or 8 rows alone for one MMA.
    """
    at_q = vector_address(own_q.stage, own_q.first + lane % 16, lane // 16)
    if count == 1:
        return at_q, vector_address(own_k.stage, own_k.first + lane % 8, lane // 8)
    return at_q, vector_address(own_k.stage, own_k.first + lane % 8 + lane // 16 * 8, lane // 8 % 2)


def _add(S: tuple, rests: tuple) -> None:
    """Add the sums of small parts."""
    for m, rest in enumerate(rests):
        for i in range(cute.size(rest)):
            S[m][i] = S[m][i] + rest[i]


def _meet(method: Method) -> None:
    """The beginning of a step."""
    if method.steady:
        cute.arch.sync_warp()


class _Shape(NamedTuple):
    """What a step of scores multiplies."""

    rows: int
    """Blocks of 16 rows of Q."""
    count: int
    """Eights of rows of K."""
    rest: int
    """Bytes from a number of Q to its small part; 0 if it is split when it is read."""

    @property
    def eights(self) -> int:
        """Eights of columns of a step: an ldmatrix brings 16 columns of eight rows of K."""
        return 2 if self.count == 1 else 1

    @property
    def steps(self) -> int:
        """Steps of a chunk."""
        return _TOGETHER // self.eights


class _Operands(NamedTuple):
    """A step's operands as they are in SMEM."""

    left: tuple[Words, ...]
    small: tuple[Words, ...]
    """Small parts of the left ones, where these have been split."""
    right: tuple[Words, ...]


def _read_columns(at_q: Int32, at_k: Int32, k: int | Int32, shape: _Shape) -> _Operands:
    """The k-th step's operands of a chunk."""
    step = 2 * shape.eights * _VECTOR
    places = [
        (at_q ^ (k * step + 2 * e * _VECTOR), m) for e in range(shape.eights) for m in range(shape.rows)
    ]
    left = tuple(_matrices(at, m * ROWS * _ROW) for at, m in places)
    small = tuple(_matrices(at, m * ROWS * _ROW + shape.rest) for at, m in places) if shape.rest else ()
    right = tuple(_matrices(at_k ^ (k * step), n * STEP * _ROW) for n in range(0, shape.count, 2))
    return _Operands(left, small, right)


def _add_chunk(
    S: tuple, rests: tuple, at: tuple, after: tuple | None, ahead: _Operands, shape: _Shape, method: Method
) -> _Operands | None:
    """Add the products of a chunk of columns, of which the first operands have been read; return those of the
    chunk at `after`.
    """
    for k in range(shape.steps):
        _meet(method)
        operands, ahead = ahead, None
        if k + 1 < shape.steps:
            ahead = _read_columns(*at, k + 1, shape)
        elif after is not None:
            ahead = _read_columns(*after, 0, shape)
        _multiply_columns(S, rests, operands, shape, method)
    return ahead


def _multiply_columns(S: tuple, rests: tuple, operands: _Operands, shape: _Shape, method: Method) -> None:
    """Add the products of what `_read_columns` returned."""
    for e in range(shape.eights):
        own = range(e * shape.rows, (e + 1) * shape.rows)
        if shape.rest:
            a = [Split(operands.left[i], operands.small[i]) for i in own]
        else:
            a = [split(operands.left[i], method.exact) for i in own]
        for n in range(shape.count):
            first = 2 * (n % 2 + e)
            b = split(operands.right[n // 2][first : first + 2], method.exact)
            _multiply_rows(S, rests, a, b, n)


def _multiply_rows(S: tuple, rests: tuple, a: list[Split], b: Split, n: int) -> None:
    """Add the products of eight columns with the n-th eight rows of K."""
    for m, accumulator in enumerate(S):
        own = _own(accumulator, n)
        _set(own, _multiply(_numbers(own), a[m].big, b.big))
    for m, accumulator in enumerate(rests):
        own = _own(accumulator, n)
        _set(own, _rest(_numbers(own), a[m], b))


def _own(accumulator: cute.Tensor, n: int) -> cute.Tensor:
    """The sums of an MMA's columns."""
    return cute.make_tensor(accumulator.iterator + 4 * n, cute.make_layout(4))


def _numbers(own: cute.Tensor) -> tuple[Float32, ...]:
    return tuple(own[i] for i in range(4))


def _set(own: cute.Tensor, numbers: tuple) -> None:
    for i in range(4):
        own[i] = numbers[i]


class InRegisters(NamedTuple):
    """An accumulator as the left operand."""

    values: cute.Tensor

    def words(self, k: int) -> tuple[Float32, ...]:
        """Words of the k-th eight of what is summed over, of both rows; the lane's first of them first."""
        P = self.values
        return P[4 * k], P[4 * k + 2], P[4 * k + 1], P[4 * k + 3]


class InRows(NamedTuple):
    """Sixteen rows in SMEM as the left operand, whose columns lie as `place_of` says."""

    at: Int32
    rows: int
    """Rows of the stage."""

    def words(self, k: Int32) -> Words:
        chunk, inside = k // _TOGETHER, k % _TOGETHER
        return _matrices((self.at ^ inside * (2 * _VECTOR)) + chunk * (self.rows * _ROW), 0)


class InColumns(NamedTuple):
    """Sixteen columns in SMEM as the rows of the left operand; they lie as `place_of` says."""

    at: tuple[Int32, Int32, Int32, Int32]

    def words(self, k: Int32) -> Words:
        return tuple(_word(at + k * (STEP * _ROW)) for at in self.at)


Left = InRegisters | InRows | InColumns


def place_of(column: int) -> int:
    """Place in SMEM, among eight, of a column of a left operand: a lane's two are those of an MMA."""
    return column // 2 + 4 * (column % 2)


def from_rows(own: Rows, lane: Int32) -> InRows:
    at = vector_address(own.stage, own.first + lane % 16, lane // 16)
    return InRows(at, cute.size(own.stage, mode=[0]))


def from_columns(stage: cute.Tensor, first: Int32, lane: Int32) -> InColumns:
    """Columns from `first` on, a multiple of eight."""
    return InColumns(
        tuple(
            _word_address(stage, 2 * (lane % LANES) + e, first + 8 * half, lane // LANES)
            for e in range(2)
            for half in range(2)
        )
    )


def store_columns(values: cute.Tensor, stage: cute.Tensor, row: Int32, first: Int32, lane: Int32) -> None:
    """Store an accumulator as columns of a stage: its rows from column `first` on, and its columns from a row
    on that is a multiple of eight.
    """
    for half in range(2):
        for e in range(2):
            at = _word_address(stage, row + 2 * (lane % LANES) + e, first + 8 * half, lane // LANES)
            for n in range(cute.size(values) // 4):
                cute.arch.inline_ptx(
                    f"st.shared.f32 [{{$r0}}+{n * STEP * _ROW}], {{$r1}};",
                    read_only_args=[at, values[4 * n + 2 * half + e]],
                )


def store_rows(values: cute.Tensor, stage: cute.Tensor, row: Int32, first: Int32, lane: Int32) -> None:
    """Store an accumulator to 16 rows of a stage, its columns from column `first` on, a multiple of eight."""
    for half in range(2):
        own_row = row + lane // LANES + 8 * half
        for n in range(cute.size(values) // 4):
            for e in range(2):
                at = _word_address(stage, own_row, first + n * STEP, 2 * (lane % LANES) + e)
                cute.arch.inline_ptx(
                    "st.shared.f32 [{$r0}], {$r1};", read_only_args=[at, values[4 * n + 2 * half + e]]
                )


def _word_address(stage: cute.Tensor, row: Int32, first: Int32, column: Int32) -> Int32:
    """Address of a column of eight, of which the first is a multiple of eight."""
    return vector_address(stage, row, first // 4 + column % 2) + column // 2 * 4


@cute.jit
def accumulate(
    O: tuple[cute.Tensor, ...],
    factors: tuple,
    P: tuple[Left, ...],
    own_v: Columns,
    lane: Int32,
    method: cutlass.Constexpr,
) -> None:
    """O = O * factors + P V, with an order of columns of its own.

    factors: (2,) for each block of 16 rows; none if O is not multiplied. The block's products are summed up
    by themselves: tensor cores truncate sums.
    """
    keys = cute.size(own_v.stage, mode=[0])
    skipped = own_v.first // CHUNK * (keys * _ROW)
    at = tuple(vector_address(own_v.stage, 2 * (lane % LANES) + e, lane // LANES) + skipped for e in range(2))
    # True, but ptxas does not know that.
    is_lane = cute.arch.shuffle_sync(lane, lane) >= 0 if method.chunks_apart else True
    for chunk in cutlass.range_constexpr(cute.size(O[0]) // (ROWS * CHUNK // 32)):
        if cutlass.const_expr(method.chunks_apart and chunk % 2 == 1):
            if is_lane:
                _accumulate_chunk(O, factors, P, at, chunk, keys, method)
        else:
            _accumulate_chunk(O, factors, P, at, chunk, keys, method)


@cute.jit
def _accumulate_chunk(
    O: tuple[cute.Tensor, ...],
    factors: tuple,
    P: tuple[Left, ...],
    at: tuple,
    chunk: cutlass.Constexpr,
    keys: cutlass.Constexpr,
    method: cutlass.Constexpr,
) -> None:
    """The same for a chunk of O's columns."""
    sums = make_accumulators(len(O), CHUNK)
    rests = make_accumulators(len(O) if method.exact else 0, CHUNK)
    for accumulator in (*sums, *rests):
        accumulator.fill(0.0)
    steps, offset = keys // STEP, chunk * keys * _ROW
    if cutlass.const_expr(isinstance(P[0], InRegisters)):
        for k in cutlass.range_constexpr(steps):
            _meet(method)
            _multiply_keys(sums, rests, _read_keys(P, at, k, offset), method)
    elif cutlass.const_expr(method.ahead):
        ahead = _read_keys(P, at, Int32(0), offset)
        for k in cutlass.range(steps - 1, unroll=method.steps):
            _meet(method)
            operands, ahead = ahead, _read_keys(P, at, k + 1, offset)
            _multiply_keys(sums, rests, operands, method)
        _meet(method)
        _multiply_keys(sums, rests, ahead, method)
    else:
        # In a loop ptxas does not keep what is read again for the next chunk.
        for k in cutlass.range(steps, unroll=method.steps):
            _meet(method)
            _multiply_keys(sums, rests, _read_keys(P, at, k, offset), method)
    _join(O, factors, sums, rests, chunk)


def _join(O: tuple, factors: tuple, sums: tuple, rests: tuple, chunk: int) -> None:
    """O = O * factors + sums, for a chunk of columns."""
    for m, accumulator in enumerate(O):
        count = cute.size(sums[m])
        for i in range(count):
            r = chunk * count + i
            share = sums[m][i] + rests[m][i] if rests else sums[m][i]
            before = accumulator[r] * factors[m][i % 4 // 2] if factors else accumulator[r]
            accumulator[r] = before + share


def _read_keys(P: tuple[Left, ...], at: tuple, k: int | Int32, offset: int) -> _Operands:
    """The operands of eight keys and a chunk of columns."""
    if isinstance(k, int):
        right = tuple(_load(address, offset + k * STEP * _ROW) for address in at)
    else:
        right = tuple(_load(address + k * (STEP * _ROW), offset) for address in at)
    return _Operands(tuple(own.words(k) for own in P), (), right)


def _multiply_keys(sums: tuple, rests: tuple, operands: _Operands, method: Method) -> None:
    """Add the products of what `_read_keys` returned."""
    rows, a = ([split(words, method.exact) for words in side] for side in (operands.right, operands.left))
    for i in range(_TOGETHER):
        b = Split(*(tuple(half[i] for half in halves if half) for halves in zip(*rows, strict=True)))
        for m, left in enumerate(a):
            own = _own(sums[m], i)
            _set(own, _multiply(_numbers(own), left.big, b.big))
            if method.exact:
                own = _own(rests[m], i)
                _set(own, _rest(_numbers(own), left, b))


@cute.jit
def store_row(
    accumulator: cute.Tensor,
    half: cutlass.Constexpr,
    target: cute.Tensor,
    columns: cutlass.Constexpr,
    lane: Int32,
    first_column: Int32 = 0,
    factor: Float32 | None = None,
) -> None:
    """Store one of the lane's rows to memory, 16 bytes at a time, or add it to `factor` times what is there.

    columns: those that the row in memory has, a multiple of eight. first_column: the accumulator's first one.
    """
    for chunk in cutlass.range_constexpr(cute.size(accumulator) // (ROWS * CHUNK // 32)):
        first = first_column + chunk * CHUNK + lane % LANES * _OWN
        if first < columns:
            numbers = cute.make_rmem_tensor(_OWN, Float32)
            own = neighbours(accumulator, chunk, half)
            for i in cutlass.range_constexpr(_OWN):
                numbers[i] = own[i]
            for i in cutlass.range_constexpr(0, _OWN, 4):
                four = cute.make_tensor(numbers.iterator + i, cute.make_layout(4))
                if cutlass.const_expr(factor is not None):
                    before = cute.make_rmem_tensor(4, Float32)
                    cute.autovec_copy(vector_at(target.iterator + (first + i), 4), before)
                    for j in cutlass.range_constexpr(4):
                        four[j] = four[j] + before[j] * factor
                cute.autovec_copy(four, vector_at(target.iterator + (first + i), 4))


def neighbours(accumulator: cute.Tensor, chunk: int, half: int) -> list[Float32]:
    """Eight neighbouring columns of one of the lane's two rows, from 8 t on among the chunk's 32."""
    first = chunk * _TOGETHER * 4 + 2 * half
    return [accumulator[first + i * 4 + e] for e in range(2) for i in range(_TOGETHER)]


def _rest(sums: tuple, a: Split, b: Split) -> tuple:
    return _multiply(_multiply(sums, a.small, b.big), a.big, b.small)


def _multiply(sums: tuple, a: Words, b: Words) -> tuple:
    """Add the product of a (16, 8) and b (8, 8)."""
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 { {$w0}, {$w1}, {$w2}, {$w3} },"
        " { {$r0}, {$r1}, {$r2}, {$r3} }, { {$r4}, {$r5} }, { {$r6}, {$r7}, {$r8}, {$r9} };",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *sums],
    )


def _matrices(address: Int32, offset: int) -> Words:
    """Four matrices of eight rows and four columns."""
    return _four("ldmatrix.sync.aligned.m8n8.x4.shared.b16", address, offset)


def _word(address: Int32) -> Uint32:
    return cute.arch.inline_ptx(
        "ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address]
    )


def _load(address: Int32, offset: int) -> Words:
    return _four("ld.shared.v4.b32", address, offset)


def _store(address: Int32, offset: int, words: Words) -> None:
    cute.arch.inline_ptx(
        f"st.shared.v4.b32 [{{$r0}}+{offset}], {{ {{$r1}}, {{$r2}}, {{$r3}}, {{$r4}} }};",
        read_only_args=[address, *words],
    )


def _four(load: str, address: Int32, offset: int) -> Words:
    return cute.arch.inline_ptx(
        f"{load} {{ {{$w0}}, {{$w1}}, {{$w2}}, {{$w3}} }}, [{{$r0}}+{offset}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )
