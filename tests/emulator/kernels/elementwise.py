"""What a thread computes by itself and with its warp: no shared memory, no barrier."""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float8E4M3FN, Float8E5M2, Float16, Float32, Int32, Uint32
from torch import Tensor

from . import Case, poison

THREADS = 128


@cute.jit
def scale_add(a: Float32, x: cute.Tensor, y: cute.Tensor) -> None:
    """y += a x in 16-byte pieces, and element by element where the last piece is not whole."""
    pieces = cute.ceil_div(cute.size(x), 128 // x.element_type.width)
    scale_add_kernel(a, x, y).launch(grid=(cute.ceil_div(pieces, THREADS), 1, 1), block=(THREADS, 1, 1))


@cute.kernel
def scale_add_kernel(a: Float32, x: cute.Tensor, y: cute.Tensor) -> None:
    piece = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    width = 128 // x.element_type.width
    n = cute.size(x)
    if (piece + 1) * width <= n:
        xs, ys = (cute.local_tile(t, (width,), (piece,)) for t in (x, y))
        ys.store((ys.load().to(Float32) + a * xs.load().to(Float32)).to(y.element_type))
    else:
        for i in cutlass.range(piece * width, n):
            y[i] = (y[i].to(Float32) + a * x[i].to(Float32)).to(y.element_type)


@cute.jit
def diverge(x: cute.Tensor, y: cute.Tensor) -> None:
    """y (2, n): Collatz's rule on x[i], positive int32. y starts as 0.

    y[0] counts the steps that take x[i] to 1, y[1] those that tripled; for odd i the second is negated.
    """
    diverge_kernel(x, y).launch(grid=(1, 1, 1), block=(cute.size(x), 1, 1))


@cute.kernel
def diverge_kernel(x: cute.Tensor, y: cute.Tensor) -> None:
    i = cute.arch.thread_idx()[0]
    value, steps = x[i], Int32(0)
    while value != 1:
        if value % 2 == 0:
            value = value // 2
        else:
            value = 3 * value + 1
            # The update is in memory, so that the compiler keeps the branch.
            y[1, i] = y[1, i] + 1
        steps += 1
    y[0, i] = steps
    if i % 2 == 1:
        y[1, i] = -y[1, i]


def collatz(x: Tensor, y: Tensor) -> tuple[Tensor]:
    def steps(n: int) -> tuple[int, int]:
        whole = tripled = 0
        while n != 1:
            whole, tripled = whole + 1, tripled + n % 2
            n = n // 2 if n % 2 == 0 else 3 * n + 1
        return whole, tripled

    counts = torch.tensor([steps(n) for n in x.tolist()]).t().clone()
    counts[1, 1::2] *= -1
    return (counts,)


@cute.jit
def across_lanes(x: cute.Tensor, y: cute.Tensor) -> None:
    """Rows of y (9, 32) int32: what the lanes of one warp learn of each other's x (32) int32."""
    across_lanes_kernel(x, y).launch(grid=(1, 1, 1), block=(32, 1, 1))


@cute.kernel
def across_lanes_kernel(x: cute.Tensor, y: cute.Tensor) -> None:
    lane = cute.arch.lane_idx()
    value = x[lane]
    y[0, lane] = cute.arch.warp_reduction_sum(value)
    prefix = value
    for k in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(prefix, 1 << k, mask_and_clamp=0)
        if lane >= 1 << k:
            prefix += below
    y[1, lane] = prefix
    y[2, lane] = cute.arch.shuffle_sync_down(value, 3)
    y[3, lane] = cute.arch.shuffle_sync(value, 31 - lane)
    y[4, lane] = cute.arch.vote_ballot_sync(value > 0)
    y[5, lane] = Int32(cute.arch.vote_any_sync(value == 8)) + 2 * Int32(cute.arch.vote_all_sync(value < 9))
    y[6, lane] = cute.arch.warp_redux_sync(value, "min")
    elected = Int32(0)
    with cute.arch.elect_one():
        elected = value + 100
        y[7, lane] = elected
    y[8, lane] = -1
    if value > 0:
        # Only these lanes take part.
        y[8, lane] = cute.arch.popc(cute.arch.activemask())


def across_lanes_expected(x: Tensor, y: Tensor) -> tuple[Tensor]:
    lanes, positive = torch.arange(32), x > 0
    ballot = sum(1 << i for i, on in enumerate(positive.tolist()) if on)
    rows = y.clone()
    rows[0] = x.sum()
    rows[1] = x.cumsum(0)
    rows[2] = x[torch.where(lanes < 29, lanes + 3, lanes)]
    rows[3] = x.flip(0)
    rows[4] = ballot - (1 << 32 if ballot >= 1 << 31 else 0)
    rows[5] = int((x == 8).any()) + 2 * int((x < 9).all())
    rows[6] = x.min()
    rows[7, 0] = x[0] + 100
    rows[8] = torch.where(positive, positive.sum(), -1)
    return (rows,)


@cute.jit
def integers(a: cute.Tensor, b: cute.Tensor, y: cute.Tensor) -> None:
    """Rows of y (20, n) int32: integer operations on a (n), and on b (n), which is never 0.

    The DSL rounds quotients down, but its remainders have the sign of the dividend.
    """
    integers_kernel(a, b, y).launch(grid=(1, 1, 1), block=(cute.size(a), 1, 1))


@cute.kernel
def integers_kernel(a: cute.Tensor, b: cute.Tensor, y: cute.Tensor) -> None:
    i = cute.arch.thread_idx()[0]
    p, q = a[i], b[i]
    u, v = Uint32(p), Uint32(q)
    low = q & 7
    y[0, i] = p // q
    y[1, i] = p % q
    y[2, i] = Int32(u // v)
    y[3, i] = Int32(u % v)
    y[4, i] = p * q
    y[5, i] = cute.arch.mul_hi(p, q)
    y[6, i] = Int32(cutlass.Int64(p) * cutlass.Int64(q) >> 20)
    y[7, i] = p << low
    y[8, i] = p >> low
    y[9, i] = Int32(u >> Uint32(low))
    y[10, i] = cutlass.min(p, q)
    y[11, i] = Int32(cutlass.max(u, v))
    y[12, i] = cute.arch.popc(p)
    y[13, i] = cute.arch.clz(p)
    y[14, i] = Int32(cute.arch.brev(u))
    y[15, i] = Int32(cute.arch.prmt(u, v, Uint32(0x7250)))
    y[16, i] = Int32(cute.arch.bfe(u, Uint32(low), Uint32(9)))
    y[17, i] = Int32(cute.arch.bfi(u, v, Uint32(5), Uint32(low)))
    y[18, i] = (p & q) ^ (p << 3 | ~q)
    y[19, i] = cute.arch.inline_ptx(
        "lop3.b32 {$w0}, {$r0}, {$r1}, {$r2}, 0xE8;", write_only_types=[Int32], read_only_args=[p, q, p << 3]
    )


def integers_expected(a: Tensor, b: Tensor, y: Tensor) -> tuple[Tensor]:
    wide = [integer_results(p, q) for p, q in zip(a.tolist(), b.tolist(), strict=True)]
    return (torch.tensor(wide).to(torch.int32).t(),)


def integer_results(p: int, q: int) -> list[int]:
    """The expected results in Python's integers, each taken modulo 2**32 at the end."""
    u, v, low = p % 2**32, q % 2**32, q & 7
    operand_bytes = u.to_bytes(4, "little") + v.to_bytes(4, "little")
    x, field = (p << 3) % 2**32, (1 << low) - 1
    results = [
        p // q,
        int(math.fmod(p, q)),
        u // v,
        u % v,
        p * q,
        p * q >> 32,
        p * q >> 20,
        p << low,
        p >> low,
        u >> low,
        min(p, q),
        max(u, v),
        u.bit_count(),
        32 - u.bit_length(),
        int(f"{u:032b}"[::-1], 2),
        int.from_bytes(bytes(operand_bytes[k] for k in (0, 5, 2, 7)), "little"),
        u >> low & 0x1FF,
        v & ~(field << 5) | (u & field) << 5,
        (p & q) ^ (x | ~q),
        u & v | u & x | v & x,
    ]
    return [(r + 2**31) % 2**32 - 2**31 for r in results]


def nonzero_integers(n: int) -> Tensor:
    """Integers of all magnitudes and both signs, none of them 0."""
    x = torch.randint(-(2**31), 2**31, (n,)) >> torch.randint(0, 31, (n,))
    return torch.where(x == 0, 1, x).to(torch.int32)


@cute.jit
def approximations(x: cute.Tensor, y: cute.Tensor) -> None:
    """Rows of y (9, n): approximate functions of x (n) float32, positive, as the MUFU computes them."""
    approximations_kernel(x, y).launch(grid=(1, 1, 1), block=(cute.size(x), 1, 1))


@cute.kernel
def approximations_kernel(x: cute.Tensor, y: cute.Tensor) -> None:
    i = cute.arch.thread_idx()[0]
    value = x[i]
    y[0, i] = cute.math.exp2(value, fastmath=True)
    y[1, i] = cute.math.log2(value, fastmath=True)
    y[2, i] = cute.arch.rcp_approx(value)
    y[3, i] = cute.math.sqrt(value, fastmath=True)
    y[4, i] = cute.math.rsqrt(value, fastmath=True)
    y[5, i] = cute.math.tanh(value, fastmath=True)
    y[6, i] = cute.math.sin(value, fastmath=True)
    y[7, i] = cute.math.cos(value, fastmath=True)
    y[8, i] = cute.math.exp(-value, fastmath=True)


def approximations_expected(x: Tensor, y: Tensor) -> tuple[Tensor]:
    z = x.double()
    rows = [z.exp2(), z.log2(), 1 / z, z.sqrt(), z.rsqrt(), z.tanh(), z.sin(), z.cos(), (-z).exp()]
    return (torch.stack(rows),)


@cute.jit
def rounded_functions(x: cute.Tensor, y: cute.Tensor) -> None:
    """Rows of y (5, n): functions of x (n) float32, rounded as IEEE 754 says."""
    rounded_functions_kernel(x, y).launch(grid=(1, 1, 1), block=(cute.size(x), 1, 1))


@cute.kernel
def rounded_functions_kernel(x: cute.Tensor, y: cute.Tensor) -> None:
    i = cute.arch.thread_idx()[0]
    value = x[i]
    y[0, i] = 1.0 / value
    y[1, i] = cute.math.sqrt(value)
    y[2, i] = value / 3.1
    y[3, i] = cute.math.floor(value) - cute.math.ceil(value * 2.5)
    y[4, i] = abs(0.5 - value)


def rounded_functions_expected(x: Tensor, y: Tensor) -> tuple[Tensor]:
    # torch's square root in float32 is not correctly rounded on every CPU.
    rows = [
        1 / x,
        x.double().sqrt().float(),
        x / torch.tensor(3.1),
        x.floor() - (2.5 * x).ceil(),
        (0.5 - x).abs(),
    ]
    return (torch.stack(rows),)


@cute.jit
def extremes(x: cute.Tensor, y: cute.Tensor) -> None:
    """Rows of y (6, n): largest, smallest and selected of x (3, n) float32 with NaN and infinities."""
    extremes_kernel(x, y).launch(grid=(1, 1, 1), block=(x.shape[1], 1, 1))


@cute.kernel
def extremes_kernel(x: cute.Tensor, y: cute.Tensor) -> None:
    i = cute.arch.thread_idx()[0]
    p, q, r = x[0, i], x[1, i], x[2, i]
    y[0, i] = cute.arch.fmax(p, q)
    y[1, i] = cute.arch.fmin(p, q)
    y[2, i] = cute.arch.fmax(cute.arch.fmax(p, q), r)
    y[3, i] = p if q < r else q
    y[4, i] = Float32(1.0) if p == p and q != r else Float32(0.0)
    y[5, i] = cute.arch.inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[p, q]
    )


def extremes_expected(x: Tensor, y: Tensor) -> tuple[Tensor]:
    p, q, r = x
    rows = [
        torch.fmax(p, q),
        torch.fmin(p, q),
        torch.fmax(torch.fmax(p, q), r),
        torch.where(q < r, p, q),
        ((p == p) & (q != r)).float(),
        torch.maximum(p, q),
    ]
    return (torch.stack(rows),)


@cute.jit
def conversions(x: cute.Tensor, integral: cute.Tensor, y: cute.Tensor) -> None:
    """Each row of y (n) float32: x (n) float32 converted to another type and back.

    integral (4, n) int32: x rounded towards 0, to nearest, up, and as an unsigned number.
    """
    conversions_kernel(x, integral, y).launch(grid=(1, 1, 1), block=(cute.size(x) // 4, 1, 1))


@cute.kernel
def conversions_kernel(x: cute.Tensor, integral: cute.Tensor, y: cute.Tensor) -> None:
    i = cute.arch.thread_idx()[0]
    four = cute.local_tile(x, (4,), (i,)).load()
    for row, dtype in enumerate([BFloat16, Float16, Float8E4M3FN, Float8E5M2]):
        cute.local_tile(y[row, None], (4,), (i,)).store(four.to(dtype).to(Float32))
    for k in cutlass.range_constexpr(4):
        value = x[4 * i + k]
        integral[0, 4 * i + k] = value.to(Int32)
        for row, mode in enumerate(["rni", "rpi"]):
            integral[row + 1, 4 * i + k] = cute.arch.inline_ptx(
                f"cvt.{mode}.s32.f32 {{$w0}}, {{$r0}};", write_only_types=[Int32], read_only_args=[value]
            )
        integral[3, 4 * i + k] = Int32(abs(value).to(Uint32))


def conversions_expected(x: Tensor, integral: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    through = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
    rows = [x.trunc(), x.round(), x.ceil(), x.abs().trunc()]
    return torch.stack(rows), torch.stack([x.to(dtype).float() for dtype in through])


@cute.jit
def packed(x: cute.Tensor, y: cute.Tensor) -> None:
    """Rows of y (4, n, 2) from x (3, n, 2) float32: two numbers a register pair, as sm_100 computes them."""
    packed_kernel(x, y).launch(grid=(1, 1, 1), block=(x.shape[1], 1, 1))


@cute.kernel
def packed_kernel(x: cute.Tensor, y: cute.Tensor) -> None:
    i = cute.arch.thread_idx()[0]
    p, q, r = ((x[row, i, 0], x[row, i, 1]) for row in range(3))
    results = (
        cute.arch.add_packed_f32x2(p, q),
        cute.arch.mul_packed_f32x2(p, q),
        cute.arch.fma_packed_f32x2(p, q, r),
        cute.arch.add_packed_f32x2(p, q, rnd="rm"),
    )
    for row, (low, high) in enumerate(results):
        y[row, i, 0] = low
        y[row, i, 1] = high


def packed_expected(x: Tensor, y: Tensor) -> tuple[Tensor]:
    p, q, r = x
    exact = p.double() + q.double()
    down = exact.float()
    down = torch.where(down.double() > exact, torch.nextafter(down, torch.tensor(-torch.inf)), down)
    return (torch.stack([p + q, p * q, (p.double() * q.double() + r.double()).float(), down]),)


@cute.jit
def atomics(x: cute.Tensor, counts: cute.Tensor, sums: cute.Tensor) -> None:
    """All threads change the same numbers: counts (8) int32 by x (n) int32, sums (3) float32 by x."""
    atomics_kernel(x, counts, sums).launch(grid=(cute.size(x) // THREADS, 1, 1), block=(THREADS, 1, 1))


@cute.kernel
def atomics_kernel(x: cute.Tensor, counts: cute.Tensor, sums: cute.Tensor) -> None:
    value = x[cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]]
    place = counts.iterator
    cute.arch.atomic_add(place, value)
    cute.arch.atomic_max(place + 1, value)
    cute.arch.atomic_min(place + 2, value)
    cute.arch.atomic_xor(place + 3, value)
    cute.arch.atomic_or(place + 4, value)
    cute.arch.red(place + 5, Int32(1), op="add", dtype=Int32, sem="relaxed", scope="gpu")
    # A counter made of compare-and-swap: every thread succeeds eventually.
    expected, done = Int32(0), False
    while not done:
        found = cute.arch.atomic_cas(place + 6, cmp=expected, val=expected + 2)
        done = found == expected
        expected = found
    cute.arch.atomic_exch(place + 7, Int32(5))
    cute.arch.atomic_add(sums.iterator, value.to(Float32))
    cute.arch.atomic_fmax(sums.iterator + 1, value.to(Float32))
    cute.arch.red(sums.iterator + 2, Float32(0.5), op="add", dtype=Float32, sem="relaxed", scope="gpu")


def atomics_expected(x: Tensor, counts: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    n, z = x.numel(), x.tolist()
    xor = either = 0
    for value in z:
        xor ^= value
        either |= value
    return torch.tensor([sum(z), max(z), min(z), xor, either, n, 2 * n, 5]), torch.tensor(
        [sum(z), max(z), n / 2]
    )


def special(*shape: int) -> Tensor:
    """Numbers that include NaN, infinities, zeros and equal ones."""
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 1.0, -1.5, 1e30, -3e-20])
    return values[torch.randint(0, len(values), shape)]


def scale_add_case(n: int, dtype: torch.dtype) -> Case:
    def expected(a: float, x: Tensor, y: Tensor) -> tuple[Tensor]:
        return ((y.double() + a * x.double()).to(dtype),)

    return Case(
        f"scale_add_{str(dtype).removeprefix('torch.')}_{n}",
        scale_add,
        lambda: (0.75, torch.randint(-64, 64, (n,)).to(dtype), torch.randint(-64, 64, (n,)).to(dtype)),
        expected,
    )


def case(host: Any, make: Any, reference: Any, **more: Any) -> Case:
    return Case(host.__name__, host, make, reference, **more)


CASES = (
    scale_add_case(3000, torch.float32),
    scale_add_case(1003, torch.bfloat16),
    scale_add_case(517, torch.float16),
    case(
        diverge,
        lambda: (torch.randint(1, 60, (96,), dtype=torch.int32), torch.zeros(2, 96, dtype=torch.int32)),
        collatz,
    ),
    case(
        across_lanes,
        lambda: (torch.randint(-9, 9, (32,), dtype=torch.int32), poison(9, 32, dtype=torch.int32)),
        across_lanes_expected,
    ),
    case(
        integers,
        lambda: (nonzero_integers(256), nonzero_integers(256), poison(20, 256, dtype=torch.int32)),
        integers_expected,
    ),
    case(
        approximations,
        lambda: (torch.rand(64) * 3 + 0.01, poison(9, 64)),
        approximations_expected,
        rtol=2**-10,  # for tanh; the others are far better
        atol=1e-6,
    ),
    case(
        rounded_functions,
        lambda: (torch.rand(256) * 40 + 0.01, poison(5, 256)),
        rounded_functions_expected,
    ),
    case(extremes, lambda: (special(3, 256), poison(6, 256)), extremes_expected),
    case(
        conversions,
        lambda: (torch.randn(256) * 60, poison(4, 256, dtype=torch.int32), poison(4, 256)),
        conversions_expected,
    ),
    case(packed, lambda: (torch.randn(3, 64, 2), poison(4, 64, 2)), packed_expected, archs=("sm_100a",)),
    case(
        atomics,
        lambda: (
            torch.randint(-99, 99, (3 * THREADS,), dtype=torch.int32),
            torch.zeros(8, dtype=torch.int32),
            torch.zeros(3),
        ),
        atomics_expected,
    ),
)
