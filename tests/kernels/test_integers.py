"""Integers divided by multipliers, and what is left of divisions in programs, against Python and torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32

import program_kernel
from everything import examples, one_of
from flash4_torch.bench import flex_cases
from flash4_torch.compile import jit
from flash4_torch.flex.trace import MASK, SCORE, trace
from flash4_torch.kernels.common import host, integers
from flash4_torch.kernels.common.lowering import Layout, Level, lower
from flash4_torch.testing import emulate
from program_kernel import ROWS, Case, expected, on_device

PAIRS = 64
LEAST, MOST = -(1 << 31), (1 << 31) - 1
EDGES = sorted({
    sign * ((1 << power) + near)
    for sign in (1, -1) for power in (0, 1, 2, 5, 15, 16, 30, 31) for near in (-1, 0, 1)
})  # fmt: skip
WHOLE = st.integers(LEAST, MOST) | st.sampled_from([x for x in EDGES if LEAST <= x <= MOST])
DIVISORS = WHOLE.filter(bool) | st.integers(1, 300)
CONSTANTS = (1, 2, 3, 7, 64, 641, 1 << 30, MOST, -1, -3, -64, LEAST)
PYTHONS: dict[str, Any] = {  # in the order of integers.DIVISIONS
    "div_floor_by": lambda x, y: x // y,
    "div_trunc_by": lambda x, y: abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1),
    "remainder_by": lambda x, y: x % y,
    "fmod_by": lambda x, y: abs(x) % abs(y) * (-1 if x < 0 else 1),
    "down": lambda x, y: (x & MOST) // abs(y),
    "up": lambda x, y: -((x & MOST) // -abs(y)),
}


@cute.jit
def division(x: cute.Tensor, y: cute.Tensor, results: cute.Tensor, stream: cuda.CUstream) -> None:
    division_kernel(x, y, results).launch(grid=(1, 1, 1), block=(PAIRS, 1, 1), stream=stream)


@cute.kernel
def division_kernel(x: cute.Tensor, y: cute.Tensor, results: cute.Tensor) -> None:
    """results (operations, 1 + constants, PAIRS): by y, and by each constant."""
    thread, _, _ = cute.arch.thread_idx()
    _divide_all(Int32(x[thread]), Int32(y[thread]), results, thread)


def _divide_all(x: Int32, y: Int32, results: Any, thread: Any) -> None:
    for i, known in enumerate((None, *CONSTANTS)):
        divisor = y if known is None else Int32(known)
        down, up = (integers.divider(divisor, Int32(sign), known) for sign in (1, -1))
        position = Int32(x & MOST)
        found = [divide(x, divisor, down) for divide in integers.DIVISIONS.values()]
        found += [integers.size_by(position, by) for by in (down, up)]
        for o, number in enumerate(found):
            results[o, i, thread] = number


@functools.cache
def _compiled(arch: str) -> Any:
    pairs = [host.compact(Int32, (PAIRS,)) for _ in range(2)]
    results = host.compact(Int32, (len(PYTHONS), 1 + len(CONSTANTS), PAIRS))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    with jit.quiet():
        return cute.compile(division, *pairs, results, stream, options="--enable-tvm-ffi")


def _wrapped(x: int) -> int:
    return (x - LEAST) % (1 << 32) + LEAST


@settings(max_examples=examples(20, 400), phases=[Phase.generate])
@given(st.lists(st.tuples(WHOLE, DIVISORS), min_size=PAIRS, max_size=PAIRS))
def test_divisions_are_exact(pairs: list[tuple[int, int]]) -> None:
    """All numbers of 32 bits are divided, of all signs, by any and constants; -2^31 // -1 wraps around."""
    x, y = (torch.tensor(numbers, dtype=torch.int64).to(torch.int32) for numbers in zip(*pairs, strict=True))
    results = torch.full((len(PYTHONS), 1 + len(CONSTANTS), PAIRS), 77, dtype=torch.int32)
    with emulate.device("sm_90a") as device:
        kernel = _compiled("sm_90a")
        with device.touching(x, y, results):
            kernel(x, y, results)
    for (op, right), of_op in zip(PYTHONS.items(), results.tolist(), strict=True):
        for place, found in enumerate(of_op):
            for (dividend, drawn), number in zip(pairs, found, strict=True):
                divisor = CONSTANTS[place - 1] if place else drawn
                wanted = _wrapped(right(dividend, divisor))
                assert number == wanted, f"{op} of {dividend} and {divisor}: {number} instead of {wanted}"


def test_the_operations_are_those_that_are_tested() -> None:
    assert [*PYTHONS][: len(integers.DIVISIONS)] == [*integers.DIVISIONS]


Function = Callable[..., Any]


def functions(n: int, m: int, r: int) -> dict[str, Function]:
    """Score mods and masks that divide by n and m, and compare with r, all of which are arguments."""
    return {
        "quotients": lambda s, b, h, i, j: s + j // n // m + i // n // m,
        "remainders": lambda s, b, h, i, j: s + j // n % m + i % m,
        "of remainders": lambda s, b, h, i, j: s + j % n // m % n,
        "of scores": lambda s, b, h, i, j: s + (j - i) // n + (i - j) % m,
        "towards 0": lambda s, b, h, i, j: (
            s + torch.div(j - i, n, rounding_mode="trunc") + torch.fmod(i - j, m)
        ),
        "by row": lambda s, b, h, i, j: s + j // (i + 1) + j % (-1 - i),
        "by column": lambda s, b, h, i, j: s + i // (j + 1),
        "neighbours": lambda b, h, i, j: ((j % n - i % n).abs() <= r) & ((i // m - j // m).abs() < r),
        "far": lambda b, h, i, j: ((i - j).abs() > r) | (r >= (j - 2 * i).abs()),
        "not near": lambda b, h, i, j: ((j - i).abs() >= r) & ~(r > (i - j // n).abs()),
        "dilated": lambda b, h, i, j: (i - j) % n == r,
        "dilated, keys first": lambda b, h, i, j: r != (j - i) % n,
        "dilated by distance": lambda b, h, i, j: (i - j).abs() % n == r,
        "not of positions": lambda b, h, i, j: (i - 2 * j) % n == r,
    }


SMALL = st.integers(-9, 9)
NUMBERS = SMALL | st.sampled_from([LEAST + 1, MOST, 1 << 30])


@pytest.mark.parametrize(
    "packed", one_of(2, [True, False]), ids=lambda x: "packed heads" if x else "one head"
)
@settings(max_examples=examples(10, 200), phases=[Phase.generate])
@given(n=NUMBERS.filter(bool), m=NUMBERS.filter(bool), r=NUMBERS)
def test_programs_divide_and_compare_as_torch(packed: bool, n: int, m: int, r: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_kernel, "COLUMNS", 5)
        patch.setattr(program_kernel, "FIRST_KEY", 6)
        cases = {}
        for name, function in functions(n, m, r).items():
            kind = SCORE if function.__code__.co_argcount == 5 else MASK
            made = trace(function, kind, torch.device("cpu"), torch.float32, ())
            cases[name] = Case(made.program, tuple(made.tensors), tuple(made.scalars))
        scores = torch.zeros(ROWS, 5)
        found = on_device([*cases.values()], scores, "sm_90a", packed)
        for (name, case), x in zip(cases.items(), found, strict=True):
            assert torch.equal(x, expected(case, scores, packed)), name


@pytest.mark.parametrize("rows_are_keys", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("make", "most"), [
    (flex_cases.natten, 3), (flex_cases.sliding_tile, 3), (flex_cases.dilated, 3),
], ids=lambda x: getattr(x, "__name__", ""))  # fmt: skip
def test_masks_of_pictures_cost_comparisons_a_score(make: Function, most: int, rows_are_keys: bool) -> None:
    """No division is left in a block, and for each score a distance or a remainder is compared once."""
    mask = make(flex_cases.Sizes(8192))
    lowering = lower(
        trace(mask, MASK, torch.device("cpu"), torch.float32, ()).program.text(),
        Layout(rows_are_keys=rows_are_keys),
    )
    first, nodes = lowering.program.first_node, lowering.program.nodes
    of_scores = [nodes[n - first].op for n in lowering.nodes(Level.SCORE)]
    of_columns = [nodes[n - first].op for n in lowering.nodes(Level.COLUMN)]
    assert len(of_scores) <= most
    assert {*of_scores} <= {"within", "eq", "bitwise_and"}
    assert not {"div_floor", "remainder"} & {*of_scores, *of_columns}
