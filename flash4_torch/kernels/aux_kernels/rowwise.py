"""Attention with one thread per row, in a form to be read: bands, softcap, groups of heads, all gradients.

It has no attn_mask, no dropout and no packed sequences. A block of `THREADS` threads takes `THREADS` rows.
The rows they are matched with come in tiles of `TILE` through shared memory, and each thread goes through the
tile row by row, all in float32:

    forward   thread = query row; keys and values are staged; the running maximum and sum are its own
    backward  thread = query row; keys and values are staged; writes delta and dq
              thread = key row; the query heads that share it and their rows are staged; writes dk and dv

So threads wait for each other only at the tile's edges, nothing is added atomically, and the results do not
depend on the order in which blocks run. It is slow on purpose, and serves where no tuned kernel does yet.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.memory import SmemAllocator

from ..common.host import NUMERIC
from ..common.scores import tanh_near_zero

LOG2E = math.log2(math.e)
THREADS = 64
TILE = 32
# Rows live in registers. Asked for one block per SM, ptxas gives each thread as many as it can.
LAUNCH = {"block": (THREADS, 1, 1), "min_blocks_per_mp": 1}


class Plan(NamedTuple):
    """What the kernels are compiled for: head sizes up to 128, and which parts of `RowwiseParams` matter."""

    D: int
    Dv: int
    left: bool = False
    right: bool = False
    softcap: bool = False


class RowwiseParams(NamedTuple):
    """How scores are made and which keys a row sees; fields that the plan leaves out are not read.

    Row i sees key j if `-left <= j - i - (Sk - Sq) <= right`; bounds of either sign, at most 2**30.
    """

    scale: Float32
    softcap: Float32
    left: Int32
    right: Int32


class Sizes(NamedTuple):
    """Sizes of one launch: `shift` is Sk - Sq, `group` is Hq // Hk."""

    Sq: Int32
    Sk: Int32
    shift: Int32
    group: Int32


class Score(NamedTuple):
    """A score in base-2 units, and its derivative with respect to the rows' dot product, in natural units."""

    value: Float32
    slope: Float32


@cute.jit
def forward(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    params: RowwiseParams,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch the forward: out = softmax(scores) v, lse = logsumexp(scores).

    q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), out (B, Sq, Hq, Dv) in one dtype of bfloat16,
    float16 and float32; any strides, the last one 1. lse (B, Hq, Sq) float32. B, Sq, Hq and Hk are at
    least 1, Sk may be 0. A row that sees no key gives 0 and -inf.
    """
    grid = (cute.ceil_div(q.shape[1], THREADS), q.shape[2], q.shape[0])
    forward_kernel(q, k, v, out, lse, params, plan).launch(grid=grid, stream=stream, **LAUNCH)


@cute.jit
def backward(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    dout: cute.Tensor,
    dlse: cute.Tensor | None,
    delta: cute.Tensor,
    dq: cute.Tensor,
    dk: cute.Tensor,
    dv: cute.Tensor,
    params: RowwiseParams,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch both backward kernels, shapes and dtypes as in `forward`; all sizes are at least 1.

    dout is shaped like out, dlse like lse or None for no gradient of lse, dq, dk, dv like q, k, v. delta
    (B, Hq, Sq) float32 is scratch: it passes rowsum(dout * out) - dlse from the first kernel to the second.
    """
    rows = (cute.ceil_div(q.shape[1], THREADS), q.shape[2], q.shape[0])
    query_gradient_kernel(q, k, v, out, lse, dout, dlse, delta, dq, params, plan).launch(
        grid=rows, stream=stream, **LAUNCH
    )
    keys = (cute.ceil_div(k.shape[1], THREADS), k.shape[2], k.shape[0])
    key_gradient_kernel(q, k, v, lse, dout, delta, dk, dv, params, plan).launch(
        grid=keys, stream=stream, **LAUNCH
    )


def compile_forward(dtype: str, plan: Plan) -> Any:
    """`forward` compiled for any sizes and strides; call it as (q, k, v, out, lse, params, stream).

    dtype: as torch and the DSL name it: "bfloat16", "float16", "float32". Tensors are passed by DLPack,
    params as a tuple of numbers, the stream as its handle.
    """
    q, k, v, out = (_rows(dtype, D) for D in (plan.D, plan.D, plan.Dv, plan.Dv))
    return cute.compile(forward, q, k, v, out, _per_row(), _params(), plan, _stream(), options=_OPTIONS)


def compile_backward(dtype: str, plan: Plan, *, dlse: bool = False) -> Any:
    """`backward` compiled like the forward; call it with all of its arguments except `plan`."""
    q, k, v, out, dout, dq, dk, dv = (
        _rows(dtype, D) for D in (plan.D, plan.D, plan.Dv, plan.Dv, plan.Dv, plan.D, plan.D, plan.Dv)
    )
    lse, delta, gradient = _per_row(), _per_row(), _per_row() if dlse else None
    tensors = (q, k, v, out, lse, dout, gradient, delta, dq, dk, dv)
    return cute.compile(backward, *tensors, _params(), plan, _stream(), options=_OPTIONS)


_OPTIONS = "--enable-tvm-ffi"


def _rows(dtype: str, D: int) -> cute.Tensor:
    """A stand-in for any (B, S, H, D) tensor with unit last stride."""
    numeric = NUMERIC[dtype]
    shape = (cute.sym_int(), cute.sym_int(), cute.sym_int(), D)
    stride = (cute.sym_int64(), cute.sym_int64(), cute.sym_int64(), 1)
    return cute.runtime.make_fake_tensor(numeric, shape, stride, assumed_align=numeric.width // 8)


def _per_row() -> cute.Tensor:
    """A stand-in for any contiguous (B, H, S) tensor in float32."""
    shape = (cute.sym_int(), cute.sym_int(), cute.sym_int())
    return cute.runtime.make_fake_compact_tensor(Float32, shape, stride_order=(2, 1, 0), assumed_align=4)


def _params() -> RowwiseParams:
    return RowwiseParams(Float32(1.0), Float32(0.0), Int32(0), Int32(0))


def _stream() -> Any:
    return cute.runtime.make_fake_stream()


@cute.kernel
def forward_kernel(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    params: RowwiseParams,
    plan: cutlass.Constexpr,
) -> None:
    first_row, row, head, batch = _place()
    size = _sizes(q, k)
    keys, values = _staging(plan)

    query = _load_row(q, batch, row, head, plan.D, size.Sq)
    total, top = Float32(0.0), -Float32.inf
    result = _zeros(plan.Dv)

    first, last = _keys_seen_by(first_row, size, params, plan)
    for start in cutlass.range(first, last, TILE):
        cute.arch.sync_threads()
        _stage(keys, k, batch, start, head // size.group, plan.D, size.Sk)
        _stage(values, v, batch, start, head // size.group, plan.Dv, size.Sk)
        cute.arch.sync_threads()
        for j in range(TILE):
            if _visible(row, start + j, size, params, plan):
                score = _score(_dot(query, keys, j, plan.D), params, plan).value
                if score > top:
                    shrink = cute.math.exp2(top - score, fastmath=True)
                    total = total * shrink
                    _scale(result, shrink, plan.Dv)
                    top = score
                weight = cute.math.exp2(score - top, fastmath=True)
                total = total + weight
                _add(result, weight, values, j, plan.Dv)

    if row < size.Sq:
        inverse, log_sum = Float32(0.0), -Float32.inf
        if total > 0.0:
            inverse = 1.0 / total
            log_sum = (top + cute.math.log2(total, fastmath=True)) / LOG2E
        _store_row(out, batch, row, head, result, inverse, plan.Dv)
        lse[batch, head, row] = log_sum


@cute.kernel
def query_gradient_kernel(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    dout: cute.Tensor,
    dlse: cute.Tensor | None,
    delta: cute.Tensor,
    dq: cute.Tensor,
    params: RowwiseParams,
    plan: cutlass.Constexpr,
) -> None:
    first_row, row, head, batch = _place()
    size = _sizes(q, k)
    keys, values = _staging(plan)

    query = _load_row(q, batch, row, head, plan.D, size.Sq)
    gradient = _load_row(dout, batch, row, head, plan.Dv, size.Sq)
    row_delta, row_lse = Float32(0.0), Float32(0.0)
    if row < size.Sq:
        row_lse = lse[batch, head, row] * LOG2E
        for d in cutlass.range_constexpr(plan.Dv):
            row_delta = row_delta + gradient[d] * out[batch, row, head, d].to(Float32)
        if cutlass.const_expr(dlse is not None):
            row_delta = row_delta - dlse[batch, head, row]
        delta[batch, head, row] = row_delta
    result = _zeros(plan.D)

    first, last = _keys_seen_by(first_row, size, params, plan)
    for start in cutlass.range(first, last, TILE):
        cute.arch.sync_threads()
        _stage(keys, k, batch, start, head // size.group, plan.D, size.Sk)
        _stage(values, v, batch, start, head // size.group, plan.Dv, size.Sk)
        cute.arch.sync_threads()
        for j in range(TILE):
            if _visible(row, start + j, size, params, plan):
                score = _score(_dot(query, keys, j, plan.D), params, plan)
                weight = cute.math.exp2(score.value - row_lse, fastmath=True)
                dweight = _dot(gradient, values, j, plan.Dv)
                _add(result, weight * (dweight - row_delta) * score.slope, keys, j, plan.D)

    if row < size.Sq:
        _store_row(dq, batch, row, head, result, Float32(1.0), plan.D)


@cute.kernel
def key_gradient_kernel(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    lse: cute.Tensor,
    dout: cute.Tensor,
    delta: cute.Tensor,
    dk: cute.Tensor,
    dv: cute.Tensor,
    params: RowwiseParams,
    plan: cutlass.Constexpr,
) -> None:
    first_key, key, head, batch = _place()
    size = _sizes(q, k)
    queries, gradients = _staging(plan)
    lses, deltas = _staging_per_row(), _staging_per_row()

    own_key = _load_row(k, batch, key, head, plan.D, size.Sk)
    own_value = _load_row(v, batch, key, head, plan.Dv, size.Sk)
    key_result, value_result = _zeros(plan.D), _zeros(plan.Dv)

    first, last = _rows_that_see(first_key, size, params, plan)
    for query_head in cutlass.range(head * size.group, (head + 1) * size.group):
        for start in cutlass.range(first, last, TILE):
            cute.arch.sync_threads()
            _stage(queries, q, batch, start, query_head, plan.D, size.Sq)
            _stage(gradients, dout, batch, start, query_head, plan.Dv, size.Sq)
            _stage_per_row(lses, lse, batch, start, query_head, size.Sq)
            _stage_per_row(deltas, delta, batch, start, query_head, size.Sq)
            cute.arch.sync_threads()
            for j in range(TILE):
                if _visible(start + j, key, size, params, plan):
                    score = _score(_dot(own_key, queries, j, plan.D), params, plan)
                    weight = cute.math.exp2(score.value - lses[j] * LOG2E, fastmath=True)
                    _add(value_result, weight, gradients, j, plan.Dv)
                    dweight = _dot(own_value, gradients, j, plan.Dv)
                    _add(key_result, weight * (dweight - deltas[j]) * score.slope, queries, j, plan.D)

    if key < size.Sk:
        _store_row(dk, batch, key, head, key_result, Float32(1.0), plan.D)
        _store_row(dv, batch, key, head, value_result, Float32(1.0), plan.Dv)


def _place() -> tuple[Int32, Int32, Int32, Int32]:
    """The block's first row, this thread's, the head, the batch entry."""
    block, head, batch = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    return block * THREADS, block * THREADS + thread, head, batch


def _sizes(q: cute.Tensor, k: cute.Tensor) -> Sizes:
    return Sizes(q.shape[1], k.shape[1], k.shape[1] - q.shape[1], q.shape[2] // k.shape[2])


def _staging(plan: Plan) -> tuple[cute.Tensor, cute.Tensor]:
    """Room in shared memory for a tile of rows of D and of Dv numbers."""
    memory = SmemAllocator()
    first, second = (
        memory.allocate_tensor(Float32, cute.make_layout((TILE, D), stride=(D, 1)), byte_alignment=16)
        for D in (plan.D, plan.Dv)
    )
    return first, second


def _staging_per_row() -> cute.Tensor:
    return SmemAllocator().allocate_tensor(Float32, cute.make_layout(TILE), byte_alignment=16)


@cute.jit
def _stage(tile, source, batch, start, head, D: cutlass.Constexpr, S) -> None:
    """Copy rows `start` to `start + TILE` of `source` into `tile`, neighbouring threads side by side."""
    thread, _, _ = cute.arch.thread_idx()
    for i in cutlass.range(thread, TILE * D, THREADS):
        row, d = i // D, i % D
        x = Float32(0.0)
        if start + row < S:
            x = source[batch, start + row, head, d].to(Float32)
        tile[row, d] = x


@cute.jit
def _stage_per_row(tile, source, batch, start, head, S) -> None:
    thread, _, _ = cute.arch.thread_idx()
    if thread < TILE:
        x = Float32(0.0)
        if start + thread < S:
            x = source[batch, head, start + thread]
        tile[thread] = x


@cute.jit
def _load_row(source, batch, row, head, D: cutlass.Constexpr, S) -> cute.Tensor:
    """Row `row` in registers; zeros beyond the end, where no result is stored."""
    x = _zeros(D)
    if row < S:
        for d in cutlass.range_constexpr(D):
            x[d] = source[batch, row, head, d].to(Float32)
    return x


def _store_row(target, batch, row, head, x, factor, D: int) -> None:
    for d in range(D):
        target[batch, row, head, d] = (x[d] * factor).to(target.element_type)


def _zeros(D: int) -> cute.Tensor:
    x = cute.make_rmem_tensor(D, Float32)
    x.fill(0.0)
    return x


def _dot(x, tile, j, D: int) -> Float32:
    """The dot product of the thread's row and row `j` of a tile."""
    total = Float32(0.0)
    for d in range(D):
        total = total + x[d] * tile[j, d]
    return total


def _add(x, factor, tile, j, D: int) -> None:
    """x += factor * row `j` of a tile."""
    for d in range(D):
        x[d] = x[d] + factor * tile[j, d]


def _scale(x, factor, D: int) -> None:
    for d in range(D):
        x[d] = x[d] * factor


def _score(product: Float32, params: RowwiseParams, plan: Plan) -> Score:
    if not plan.softcap:
        return Score(product * (params.scale * LOG2E), params.scale)
    # tanh(y) = 1 - 2 / (exp(2 y) + 1): right at both ends, where exp gives 0 and inf.
    scaled, y = product * params.scale, product * (params.scale / params.softcap)
    e = cute.math.exp2(y * (2.0 * LOG2E), fastmath=True)
    near, excess = tanh_near_zero(y)
    tanh = cutlass.select_(near, y + y * excess, 1.0 - 2.0 / (e + 1.0))
    score = cutlass.select_(near, scaled + scaled * excess, tanh * params.softcap)
    return Score(score * LOG2E, params.scale * (1.0 - tanh * tanh))


def _visible(row: Int32, key: Int32, size: Sizes, params: RowwiseParams, plan: Plan) -> Boolean:
    """Whether both exist and the row sees the key."""
    seen = (row < size.Sq) & (key < size.Sk)
    if plan.left:
        seen = seen & (key - row - size.shift >= -params.left)
    if plan.right:
        seen = seen & (key - row - size.shift <= params.right)
    return seen


def _keys_seen_by(first_row: Int32, size: Sizes, params: RowwiseParams, plan: Plan) -> tuple[Int32, Int32]:
    """Bounds `first <= j < last` of the keys that some row of the block may see."""
    first, last = Int32(0), size.Sk
    if plan.left:
        first = cutlass.max(first, first_row + size.shift - params.left)
    if plan.right:
        last = cutlass.min(last, first_row + THREADS + size.shift + params.right)
    return first, last


def _rows_that_see(first_key: Int32, size: Sizes, params: RowwiseParams, plan: Plan) -> tuple[Int32, Int32]:
    """Bounds `first <= i < last` of the rows that may see some key of the block."""
    first, last = Int32(0), size.Sq
    if plan.right:
        first = cutlass.max(first, first_key - size.shift - params.right)
    if plan.left:
        last = cutlass.min(last, first_key + THREADS - size.shift + params.left)
    return first, last
