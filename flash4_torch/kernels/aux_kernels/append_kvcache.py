"""New keys and values, appended to a KV cache; rotary embedding of K and Q on the way.

A CTA has a token, and its rows of K, of V, or of Q: a row is what a head has of the token. A thread has the
same columns of every so many rows, 16 bytes at a time, so that it reads cos and sin of the token once. Where
columns i and i + columns / 2 are a pair it has 16 bytes of each half.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, Uint64

from ..common import host
from ..common.kvcache import AppendPlan, RotaryPlan
from ..common.rounding import bits_of, float_of, round_to, widened
from ..common.sequences import TokenPlaces, sequence_of

THREADS = 128
VECTOR = 8
"""Elements of 16 bits that a thread loads at a time, 16 bytes."""
_BYTES = 2
"""Bytes of an element of K, V and Q."""
_DROPPED_BITS, _HALF_OF_PLACE = 20, 1 << 19
"""Bits of a float32's mantissa that float8_e4m3fn has no room for, and half of what stays last."""
_BIAS_BITS = (127 - 7) << 3
"""The difference of the two exponents' biases, in places of float8_e4m3fn."""
_LARGEST_BITS, _SMALLEST_NORMAL_BITS, _INFINITY_BITS = 0x43E00000, 0x3C800000, 0x7F800000
"""448, 2**-6 and infinity, as float32."""
_SUBNORMAL_ADDEND, _SUBNORMAL_ADDEND_BITS = 16384.0, 0x46800000


class Tensors(NamedTuple):
    """The tensors of a launch; see `append`."""

    k: cute.Tensor
    v: cute.Tensor
    k_cache: cute.Tensor
    v_cache: cute.Tensor
    slot_mapping: cute.Tensor | None
    block_table: cute.Tensor | None
    seqused_k: cute.Tensor | None
    cu_seqlens: cute.Tensor | None
    positions: cute.Tensor | None
    cos: cute.Tensor | None
    sin: cute.Tensor | None
    k_scale: cute.Tensor | None
    v_scale: cute.Tensor | None
    q: cute.Tensor | None
    q_out: cute.Tensor | None


class Token(NamedTuple):
    """A token, and the row of the cache that its key and value belong in."""

    number: Int32
    """Index among all tokens."""
    entry: Int32
    """The batch entry of K, V and Q that holds it, and its index there."""
    index: Int32
    sequence: Int32
    key: Int64
    """Its index among the keys of its sequence; any number if slots say where it goes."""
    page: Int64
    row: Int64
    is_stored: Boolean
    """Whether there is such a row."""


class Rows(NamedTuple):
    """Rows of a token, one for each head: addresses of the first one, and bytes from one to the next."""

    count: Int32
    source: Int64
    source_step: Int64
    target: Int64
    target_step: Int64
    scale: cute.Tensor | None
    """(heads,), what rows are divided by."""


class RowPlan(NamedTuple):
    """What happens to rows of K, of V or of Q."""

    dtype: str
    D: int
    rotary: RotaryPlan | None
    float8: bool
    """Whether they become numbers of 8 bits."""
    converts_fp8: bool
    """Whether one instruction rounds two of them."""

    @property
    def columns(self) -> int:
        """Columns that are rotated."""
        return self.rotary.columns if self.rotary else 0

    @property
    def halves(self) -> bool:
        return self.rotary is not None and not self.rotary.interleaved

    @property
    def pairs(self) -> int:
        """Threads that rotate a row."""
        return self.columns // (2 * VECTOR if self.halves else VECTOR)

    @property
    def threads(self) -> int:
        """Threads that share a row."""
        return self.pairs + (self.D - self.columns) // VECTOR

    @property
    def at_once(self) -> int:
        """Rows of a CTA at a time."""
        return THREADS // self.threads


class Angles(NamedTuple):
    """Cosines and sines of a thread's pairs of columns."""

    cos: cute.Tensor
    sin: cute.Tensor


@cute.jit
def append(
    k: cute.Tensor,
    v: cute.Tensor,
    k_cache: cute.Tensor,
    v_cache: cute.Tensor,
    slot_mapping: cute.Tensor | None,
    block_table: cute.Tensor | None,
    seqused_k: cute.Tensor | None,
    cu_seqlens: cute.Tensor | None,
    positions: cute.Tensor | None,
    cos: cute.Tensor | None,
    sin: cute.Tensor | None,
    k_scale: cute.Tensor | None,
    v_scale: cute.Tensor | None,
    q: cute.Tensor | None,
    q_out: cute.Tensor | None,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch k_cache, v_cache = rotated k, v where new keys belong; q_out = rotated q.

    k (n, S, Hk, D), v (n, S, Hk, Dv), q and q_out (n, S, Hq, D) have T = n * S tokens, in this order; q_out
    may be q. k_cache (pages, page_size, Hk, D), v_cache (pages, page_size, Hk, Dv): uint8 for 8-bit caches.
    Of all these the last stride is 1, the others are multiples of 8 elements, and bases are aligned to 16
    bytes, of 8-bit caches to 8.

    slot_mapping (T,): token t goes to row slot % page_size of page slot // page_size. Without it seqused_k
    (B,) has the keys that sequences had before: token i of sequence b becomes key seqused_k[b] + i, which is
    row key % page_size of page block_table[b, key // page_size]; without a block_table (B, blocks), row key
    of page b. Sequence b has tokens cu_seqlens[b] to cu_seqlens[b + 1] - 1, where n is 1; without cu_seqlens,
    those of entry b. These are int32, but slot_mapping and positions may be int64. A token whose slot, key or
    page does not exist is skipped: nothing is written.

    positions (T,), by default the keys' places in their sequences, are clamped to the rows of cos and sin
    (positions, columns / 2), whose last stride is 1; the other and bases are multiples of rotary.vector.
    k_scale and v_scale (sequences, Hk), float32, any strides: numbers of 8-bit caches are to be multiplied by
    them; with slots all tokens count as those of sequence 0. Numbers beyond +-448 become that.

    T is below 2**31; none of n, S, Hk, Hq and of the caches' sizes, cu_seqlens' B and positions is 0.
    """
    tensors = Tensors(
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        block_table,
        seqused_k,
        cu_seqlens,
        positions,
        cos,
        sin,
        k_scale,
        v_scale,
        q,
        q_out,
    )
    kinds = 2 if cutlass.const_expr(q_out is None) else 3
    append_kernel(tensors, plan).launch(
        grid=(k.shape[0] * k.shape[1], kinds, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.kernel
def append_kernel(tensors: Tensors, plan: cutlass.Constexpr) -> None:
    thread, _, _ = cute.arch.thread_idx()
    _, kind, _ = cute.arch.block_idx()
    token = _own_token(tensors, plan)
    rotary = plan.rotary
    if kind == 0:
        if token.is_stored:
            rows = _stored(tensors.k, tensors.k_cache, tensors.k_scale, token)
            own = RowPlan(plan.dtype, plan.D, rotary, plan.float8, plan.converts_fp8)
            _move(rows, tensors, token, thread, own)
    elif kind == 1:
        if token.is_stored:
            rows = _stored(tensors.v, tensors.v_cache, tensors.v_scale, token)
            own = RowPlan(plan.dtype, plan.Dv, None, plan.float8, plan.converts_fp8)
            _move(rows, tensors, token, thread, own)
    else:
        if cutlass.const_expr(tensors.q_out is not None):
            q, q_out = tensors.q, tensors.q_out
            source, target = (_address(x, token.entry, token.index) for x in (q, q_out))
            rows = Rows(q.shape[2], source, _step(q), target, _step(q_out), None)
            _move(rows, tensors, token, thread, RowPlan(plan.dtype, plan.D, rotary, False, True))


@cute.jit
def _own_token(tensors: Tensors, plan: cutlass.Constexpr) -> Token:
    number, _, _ = cute.arch.block_idx()
    S, cache = tensors.k.shape[1], tensors.k_cache
    entry = number // S
    index, sequence, key = number - entry * S, entry, Int64(0)
    pages, page_size = Int64(cache.shape[0]), Int64(cache.shape[1])
    if cutlass.const_expr(plan.slots):
        sequence = Int32(0)
        slot = Int64(tensors.slot_mapping[number])
        is_stored = (slot >= 0) & (slot < pages * page_size)
        page, row = _divided(slot, page_size)
    else:
        i, is_stored = index, Boolean(True)
        if cutlass.const_expr(plan.packed):
            cu_seqlens = tensors.cu_seqlens
            sequence = sequence_of(number, cu_seqlens, TokenPlaces())
            i = number - cu_seqlens[sequence]
            is_stored = (i >= 0) & (number < cu_seqlens[sequence + 1])
        key = Int64(tensors.seqused_k[sequence]) + i
        page, row, room = Int64(sequence), key, page_size
        if cutlass.const_expr(plan.paged):
            table = tensors.block_table
            room = page_size * Int64(table.shape[1])
            is_stored = is_stored & (key >= 0) & (key < room)
            block, row = _divided(key, page_size)
            page = Int64(-1)
            if is_stored:
                page = Int64(table[sequence, block])
            is_stored = (page >= 0) & (page < pages)
        else:
            is_stored = is_stored & (key >= 0) & (key < room) & (page < pages)
    return Token(number, entry, index, sequence, key, page, row, is_stored)


def _divided(number: Int64, size: Int64) -> tuple[Int64, Int64]:
    """Quotient and remainder; any numbers if `number` is negative."""
    quotient = Int64(Uint64(number) // Uint64(size))
    return quotient, number - quotient * size


def _stored(x: cute.Tensor, cache: cute.Tensor, scale: cute.Tensor | None, token: Token) -> Rows:
    """The token's rows of K or V, and their places in the cache."""
    own = None if scale is None else scale[token.sequence, None]
    source, target = _address(x, token.entry, token.index), _address(cache, token.page, token.row)
    return Rows(x.shape[2], source, _step(x), target, _step(cache), own)


def _address(x: cute.Tensor, *place: Any) -> Int64:
    """Address of the first head at a place, which may be more than 2**31 elements away."""
    offset = Int64(0)
    for i, stride in zip(place, x.stride, strict=False):
        offset += Int64(i) * Int64(stride)
    return Int64(x.iterator.toint()) + offset * (x.element_type.width // 8)


def _step(x: cute.Tensor) -> Int64:
    """Bytes from one head to the next."""
    return Int64(x.stride[2]) * (x.element_type.width // 8)


@cute.jit
def _move(rows: Rows, tensors: Tensors, token: Token, thread: Int32, plan: cutlass.Constexpr) -> None:
    """Rotate rows and store them."""
    first, own = thread // plan.threads, thread % plan.threads
    if first < plan.at_once:
        if cutlass.const_expr(plan.pairs > 0):
            if own < plan.pairs:
                angles = _angles(tensors, token, own, plan.rotary)
                for row in cutlass.range(first, rows.count, plan.at_once, unroll=1):
                    if cutlass.const_expr(plan.halves):
                        _rotate_halves(rows, row, own, angles, plan)
                    else:
                        _rotate_neighbours(rows, row, own, angles, plan)
        if own >= plan.pairs:
            vector = own - plan.pairs + plan.columns // VECTOR
            for row in cutlass.range(first, rows.count, plan.at_once, unroll=1):
                _keep(rows, row, vector, plan)


@cute.jit
def _angles(tensors: Tensors, token: Token, own: Int32, rotary: cutlass.Constexpr) -> Angles:
    position = token.key
    if cutlass.const_expr(rotary.positions):
        position = Int64(tensors.positions[token.number])
    position = cutlass.max(cutlass.min(position, Int64(tensors.cos.shape[0]) - 1), Int64(0))
    count = VECTOR // 2 if rotary.interleaved else VECTOR
    at = position, own * count, count, rotary
    return Angles(*(_load_angles(x, *at) for x in (tensors.cos, tensors.sin)))


@cute.jit
def _load_angles(
    x: cute.Tensor, position: Int64, column: Int32, count: cutlass.Constexpr, rotary: cutlass.Constexpr
) -> cute.Tensor:
    """Neighbouring numbers of a row, as float32."""
    dtype, each, vector = x.element_type, x.element_type.width // 8, rotary.vector
    start = Int64(x.iterator.toint()) + (position * Int64(x.stride[0]) + column) * each
    loaded = cute.make_rmem_tensor((vector, count // vector), dtype)
    for i in cutlass.range_constexpr(count // vector):
        cute.autovec_copy(_vector(start + i * (vector * each), dtype, vector), loaded[None, i])
    if cutlass.const_expr(dtype is Float32):
        return cute.make_tensor(loaded.iterator, cute.make_layout(count))
    return widened(loaded)


def _vector(address: Int64, numeric: Any, size: int) -> cute.Tensor:
    """A view of neighbours in global memory, which one instruction loads or stores."""
    align = size * numeric.width // 8
    pointer = cute.make_ptr(numeric, address, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(size))


@cute.jit
def _rotate_halves(rows: Rows, row: Int32, own: Int32, angles: Angles, plan: cutlass.Constexpr) -> None:
    second = own + plan.pairs
    x, y = (widened(_load(rows, row, vector, plan)) for vector in (own, second))
    for i in cutlass.range_constexpr(VECTOR):
        x[i], y[i] = _rotated(x[i], y[i], angles.cos[i], angles.sin[i])
    _store_values(rows, row, own, x, plan)
    _store_values(rows, row, second, y, plan)


@cute.jit
def _rotate_neighbours(rows: Rows, row: Int32, own: Int32, angles: Angles, plan: cutlass.Constexpr) -> None:
    x = widened(_load(rows, row, own, plan))
    for i in cutlass.range_constexpr(VECTOR // 2):
        x[2 * i], x[2 * i + 1] = _rotated(x[2 * i], x[2 * i + 1], angles.cos[i], angles.sin[i])
    _store_values(rows, row, own, x, plan)


def _rotated(x: Float32, y: Float32, cos: Float32, sin: Float32) -> tuple[Float32, Float32]:
    return x * cos - y * sin, y * cos + x * sin


@cute.jit
def _keep(rows: Rows, row: Int32, vector: Int32, plan: cutlass.Constexpr) -> None:
    """Copy a vector; a 16-bit one keeps its bits."""
    numbers = _load(rows, row, vector, plan)
    if cutlass.const_expr(plan.float8):
        _store_values(rows, row, vector, widened(numbers), plan)
    else:
        cute.autovec_copy(numbers, _place(rows, row, vector, plan))


@cute.jit
def _load(rows: Rows, row: Int32, vector: Int32, plan: cutlass.Constexpr) -> cute.Tensor:
    dtype = host.NUMERIC[plan.dtype]
    numbers = cute.make_rmem_tensor(VECTOR, dtype)
    start = rows.source + Int64(row) * rows.source_step + vector * (VECTOR * _BYTES)
    cute.autovec_copy(_vector(start, dtype, VECTOR), numbers)
    return numbers


def _place(rows: Rows, row: Int32, vector: Int32, plan: RowPlan) -> cute.Tensor:
    """The place of a vector in the cache or in q_out, numbers of 8 bits as words."""
    each = 1 if plan.float8 else _BYTES
    start = rows.target + Int64(row) * rows.target_step + vector * (VECTOR * each)
    return (
        _vector(start, Uint32, VECTOR // 4)
        if plan.float8
        else _vector(start, host.NUMERIC[plan.dtype], VECTOR)
    )


@cute.jit
def _store_values(
    rows: Rows, row: Int32, vector: Int32, values: cute.Tensor, plan: cutlass.Constexpr
) -> None:
    """Round float32 registers once, to what is stored."""
    target = _place(rows, row, vector, plan)
    stored = cute.make_rmem_tensor(cute.size(target), target.element_type)
    if cutlass.const_expr(plan.float8):
        if cutlass.const_expr(rows.scale is not None):
            scale = rows.scale[row]
            for i in cutlass.range_constexpr(VECTOR):
                values[i] = values[i] / scale
        for i in cutlass.range_constexpr(VECTOR // 4):
            four = tuple(values[4 * i + j] for j in range(4))
            stored[i] = (_four_of_8_bits if plan.converts_fp8 else _four_by_integers)(*four)
    else:
        round_to(values, stored)
    cute.autovec_copy(stored, target)


def _four_of_8_bits(*values: Float32) -> Uint32:
    """Four numbers in a word, rounded to float8_e4m3fn; those beyond its range become its largest."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high;"
        " cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2};"
        " mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Uint32],
        read_only_args=list(values),
    )


def _four_by_integers(*values: Float32) -> Uint32:
    """The same without an instruction for it."""
    word = Uint32(0)
    for i, value in enumerate(values):
        word = word | (_rounded_to_8_bits(value) << 8 * i)
    return word


def _rounded_to_8_bits(value: Float32) -> Uint32:
    """A number rounded to float8_e4m3fn, to nearest even; NaN is all ones but for the sign."""
    bits = bits_of(value)
    size = bits & 0x7FFFFFFF
    kept = cutlass.min(size, Uint32(_LARGEST_BITS))
    # Half of the last place that stays, less 1 if what stays is even, carries into it.
    normal = (kept + (_HALF_OF_PLACE - 1) + (kept >> _DROPPED_BITS & 1) >> _DROPPED_BITS) - _BIAS_BITS
    # The sum's last place is that of the smallest subnormal number.
    subnormal = bits_of(float_of(kept) + _SUBNORMAL_ADDEND) - _SUBNORMAL_ADDEND_BITS
    rounded = cutlass.select_(kept < _SMALLEST_NORMAL_BITS, subnormal, normal)
    rounded = cutlass.select_(size > _INFINITY_BITS, Uint32(0x7F), rounded)
    return rounded | (bits >> 24 & 0x80)


_INDEX = {"int32": Int32, "int64": Int64}


def compile_append(plan: AppendPlan) -> Any:
    """`append` compiled for any sizes; call it with its arguments except `plan` and `stream`."""
    dtype = host.NUMERIC[plan.dtype]
    n, S, Hk, Hq = host.any_sizes(4)
    k, v = (host.rows(dtype, (n, S, Hk, D)) for D in (plan.D, plan.Dv))
    pages, page_size = host.any_sizes(2)
    k_cache, v_cache = (_cache(plan, (pages, page_size, Hk, D)) for D in (plan.D, plan.Dv))
    place = [None, None, None, None]
    if plan.slots:
        place[0] = host.strided(_INDEX[plan.slots], 1)
    else:
        place[1] = host.strided(Int32, 2) if plan.paged else None
        place[2] = host.strided(Int32, 1)
        place[3] = host.strided(Int32, 1) if plan.packed else None
    scales = [host.strided(Float32, 2) if scaled else None for scaled in (plan.k_scaled, plan.v_scaled)]
    tensors = (k, v, k_cache, v_cache, *place, *_rotary(plan.rotary), *scales)
    q = [host.rows(dtype, (n, S, Hq, plan.D)) if plan.rotary and plan.rotary.q else None for _ in range(2)]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(append, *tensors, *q, plan, stream, options="--enable-tvm-ffi")


def _cache(plan: AppendPlan, shape: tuple[Any, ...]) -> cute.Tensor:
    if not plan.float8:
        return host.rows(host.NUMERIC[plan.dtype], shape)
    stride = (*(cute.sym_int64(divisibility=VECTOR) for _ in shape[1:]), 1)
    return cute.runtime.make_fake_tensor(Uint8, shape, stride, assumed_align=VECTOR)


def _rotary(plan: RotaryPlan | None) -> tuple[cute.Tensor | None, ...]:
    """Stand-ins for positions, cos and sin."""
    if plan is None:
        return None, None, None
    dtype, rows = host.NUMERIC[plan.dtype], cute.sym_int()
    positions = host.strided(_INDEX[plan.positions], 1) if plan.positions else None
    tables = []
    for _ in range(2):
        shape, stride = (rows, plan.columns // 2), (cute.sym_int64(divisibility=plan.vector), 1)
        align = plan.vector * dtype.width // 8
        tables.append(cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=align))
    return (positions, *tables)
