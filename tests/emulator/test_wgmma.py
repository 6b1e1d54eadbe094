"""wgmma against NumPy. PTX ISA: Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash4_torch.emulator.engine import Options, run_ptx
from flash4_torch.emulator.report import Report
from tensor_cores import COPY_IMAGE, FORMATS, SHARED_BYTES, SWIZZLED_K, Layout, random_operand, steps

M = 64
THREADS = 128
PAIRS = {
    "f32": ("f16", "bf16", "tf32", "e4m3", "e5m2"),
    "f16": ("f16", "e4m3", "e5m2"),
    "s32": ("s8", "u8"),
}


@dataclass(frozen=True)
class Case:
    """One wgmma; `repeats` issues it that many times into the same accumulators."""

    n: int
    accumulator: str = "f32"
    a: str = "bf16"
    b: str = "bf16"
    a_layout: Layout | None = SWIZZLED_K
    b_layout: Layout = SWIZZLED_K
    scale_d: bool = True
    signs: tuple[int, int] = (1, 1)
    seed: int = 0
    repeats: int = 1

    @property
    def registers(self) -> int:
        return self.n // (4 if self.accumulator == "f16" else 2)

    @property
    def immediates(self) -> str:
        signs = list(self.signs) if self.accumulator != "s32" else []
        majors = []
        if self.a in ("f16", "bf16"):
            majors = [int(layout.mn_major) for layout in (self.a_layout, self.b_layout) if layout]
        return "".join(f", {value}" for value in signs + majors)


def kernel(
    case: Case, *, fence: str = "wgmma.fence.sync.aligned;", after_issue: str = "", after_mma: str = ""
) -> str:
    """Copies the operands to shared memory, issues the wgmma, and writes every thread's accumulators out."""
    accumulators = [f"%d{i}" for i in range(case.registers)]
    a = "%a" if case.a_layout else "{%f0, %f1, %f2, %f3}"
    shape = f"m64n{case.n}k{FORMATS[case.a].k}.{case.accumulator}.{case.a}.{case.b}"
    mma = f"""
    wgmma.mma_async.sync.aligned.{shape} {{{", ".join(accumulators)}}}, {a}, %b, %scale{case.immediates};"""
    lines = "\n".join
    return f"""
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry product(.param .u64 image, .param .u64 fragments, .param .u64 sums, .param .u64 a_descriptor,
    .param .u64 b_descriptor, .param .u32 scale_d)
{{
    .reg .b32 %d<{case.registers}>, %f<4>, %number, %shifted;
    .reg .b64 %a, %b, %start, %address, %fragment;
    .reg .pred %scale;
    ld.param.u64 %source, [image];
    {COPY_IMAGE}
    bar.sync 0;
    shr.u32 %shifted, %base, 4;
    cvt.u64.u32 %start, %shifted;
    ld.param.u64 %a, [a_descriptor];
    add.s64 %a, %a, %start;
    ld.param.u64 %b, [b_descriptor];
    add.s64 %b, %b, %start;
    ld.param.u32 %number, [scale_d];
    setp.ne.u32 %scale, %number, 0;
    ld.param.u64 %fragment, [fragments];
    mad.wide.u32 %fragment, %tid, 16, %fragment;
    ld.global.v4.b32 {{%f0, %f1, %f2, %f3}}, [%fragment];
    ld.param.u64 %address, [sums];
    mad.wide.u32 %address, %tid, {4 * case.registers}, %address;
    {lines(f"ld.global.b32 {d}, [%address+{4 * i}];" for i, d in enumerate(accumulators))}
    {fence}
    {mma * case.repeats}
    {after_mma}
    wgmma.commit_group.sync.aligned;
    {after_issue}
    wgmma.wait_group.sync.aligned 0;
    {lines(f"st.global.b32 [%address+{4 * i}], {d};" for i, d in enumerate(accumulators))}
    ret;
}}
"""


def fragment_places(n: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of element i of each thread's part of D, [128, N/2]: figure "Matrix fragment D"."""
    thread, i = np.meshgrid(np.arange(THREADS), np.arange(n // 2), indexing="ij")
    return thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + thread % 4 * 2 + i % 2


def a_fragments(bits: np.ndarray) -> np.ndarray:
    """A's bits [64, K] as each thread's four registers, [128, 4]; a register is 4 bytes of one row."""
    words = np.ascontiguousarray(bits).view(np.uint32)
    thread, j = np.meshgrid(np.arange(THREADS), np.arange(4), indexing="ij")
    return words[thread // 32 * 16 + thread % 32 // 4 + j % 2 * 8, thread % 4 + j // 2 * 4]


def run(
    case: Case, options: Options | None = None, check: bool = True, **changes: str
) -> tuple[np.ndarray, np.ndarray, Report]:
    """(D [64, N], NumPy's result, the report)."""
    a_bits, a = random_operand(case.a, M, case.seed)
    b_bits, b = random_operand(case.b, case.n, case.seed + 1)
    image = np.zeros(SHARED_BYTES, np.uint8)
    end = case.b_layout.place(image, 0, b_bits)
    a_descriptor = 0
    if case.a_layout:
        case.a_layout.place(image, end, a_bits)
        a_descriptor = case.a_layout.wgmma_descriptor(end, M, FORMATS[case.a].size)
    b_descriptor = case.b_layout.wgmma_descriptor(0, case.n, FORMATS[case.b].size)
    kind = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[case.accumulator]
    initial = (np.random.default_rng(case.seed).standard_normal((M, case.n)) * 100).astype(kind)
    rows, columns = fragment_places(case.n)
    sums = np.ascontiguousarray(initial[rows, columns])
    report = run_ptx(
        kernel(case, **changes),
        [
            image,
            np.ascontiguousarray(a_fragments(a_bits)),
            sums,
            np.uint64(a_descriptor),
            np.uint64(b_descriptor),
            np.uint32(case.scale_d),
        ],
        block=(THREADS, 1, 1),
        dynamic_shared=SHARED_BYTES,
        options=options,
        check=check,
    )
    result = np.zeros((M, case.n), kind)
    result[rows, columns] = sums
    product = case.repeats * case.signs[0] * case.signs[1] * (a @ b.T)
    return result, product + (initial.astype(np.float64) if case.scale_d else 0), report


def assert_matches(case: Case, result: np.ndarray, expected: np.ndarray) -> None:
    if case.accumulator == "s32":
        np.testing.assert_array_equal(result, expected)
    else:
        tolerance = 1e-5 if case.accumulator == "f32" else 1e-3
        size = np.maximum(np.abs(expected), 300)
        assert np.all(np.abs(result - expected) <= tolerance * size)


@st.composite
def layouts(draw: st.DrawFn, element: str, rows: int) -> Layout:
    swizzle = draw(st.sampled_from(["none", "32B", "64B", "128B"]))
    size = FORMATS[element].size
    fits = rows * size % max({"none": 16, "32B": 32, "64B": 64, "128B": 128}[swizzle], 16) == 0
    mn_major = size == 2 and fits and draw(st.booleans())
    gap = draw(st.sampled_from([0, 1024]))
    return Layout(swizzle, mn_major, gap, 0 if mn_major else draw(st.integers(0, steps(swizzle) - 1)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    accumulator = draw(st.sampled_from(sorted(PAIRS)))
    a = draw(st.sampled_from(PAIRS[accumulator]))
    b = draw(st.sampled_from(["e4m3", "e5m2"])) if a in ("e4m3", "e5m2") else a
    b = draw(st.sampled_from(["s8", "u8"])) if a in ("s8", "u8") else b
    n = 8 * draw(st.sampled_from([1, 2, 3, 10, 16, 32]))
    sign = st.sampled_from([1, -1]) if accumulator != "s32" else st.just(1)
    return Case(
        n=n,
        accumulator=accumulator,
        a=a,
        b=b,
        a_layout=draw(st.none() | layouts(a, M)),
        b_layout=draw(layouts(b, n)),
        scale_d=draw(st.booleans()),
        signs=(draw(sign), draw(sign)),
        seed=draw(st.integers(0, 1000)),
        repeats=draw(st.integers(1, 2)) if draw(st.booleans()) else 1,
    )


@settings(max_examples=60)
@given(cases(), st.sampled_from(["eager", "late", "fuzz"]))
def test_product(case: Case, schedule: str) -> None:
    if not case.scale_d:
        case = Case(**{**case.__dict__, "repeats": 1})
    result, expected, _ = run(case, Options(schedule=schedule))
    assert_matches(case, result, expected)


def test_counters() -> None:
    _, _, report = run(Case(n=64))
    assert report.counters.mma == 1
    assert report.counters.mma_flops == 2 * M * 64 * 16


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.findings}


def test_reading_an_accumulator_in_flight_is_found() -> None:
    report = run(Case(n=64), check=False, after_issue="add.f32 %d3, %d3, %d3;")[2]
    assert kinds(report) == {"wgmma-register"}


@pytest.mark.parametrize(
    ("instruction", "found"), [("mov.b32 %f1, 0;", True), ("add.u32 %x1, %f1, %x0;", False)]
)
def test_fragment_of_a_in_flight_may_be_read_but_not_written(instruction: str, found: bool) -> None:
    report = run(Case(n=64, a_layout=None), check=False, after_issue=instruction)[2]
    assert kinds(report) == ({"wgmma-register"} if found else set())


def test_another_shape_on_the_same_accumulators_is_found() -> None:
    registers = ", ".join(f"%d{i}" for i in range(16))
    other = (
        f"wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {{{registers}}}, %a, %b, %scale, 1, 1, 0, 0;"
    )
    assert kinds(run(Case(n=64), check=False, after_mma=other)[2]) == {"wgmma-register"}


def test_missing_first_fence_is_found() -> None:
    assert kinds(run(Case(n=64), check=False, fence="")[2]) == {"wgmma-fence"}


@pytest.mark.parametrize(
    ("instruction", "found"),
    [
        ("add.f32 %d5, %d5, %d5;", True),
        ("add.u32 %x1, %d5, %d5;", False),  # not a register of any wgmma
        ("mov.b32 %d5, %d6;", False),  # a copy of a fenced register
        ("add.u32 %x1, %x0, %x0; mov.b32 %d5, %x1;", True),
    ],
)
def test_writing_an_accumulator_after_the_fence_is_found(instruction: str, found: bool) -> None:
    fence = "wgmma.fence.sync.aligned;"
    report = run(Case(n=64), check=False, fence=f"{fence}\n{instruction}")[2]
    assert kinds(report) == ({"wgmma-fence"} if found else set())
    assert kinds(run(Case(n=64), check=False, fence=f"{fence}\n{instruction}\n{fence}")[2]) == set()


def test_late_products_land_at_the_wait() -> None:
    """A value that the program writes to an accumulator in between is lost."""
    case = Case(n=8, scale_d=False)
    result, expected, report = run(case, Options(schedule="late"), check=False, after_issue="mov.b32 %d0, 0;")
    assert kinds(report) == {"wgmma-register"}
    assert_matches(case, result, expected)


def launch_anyhow(text: str, b_descriptor: int) -> Report:
    """Runs a kernel on zeros."""
    arguments = [np.zeros(SHARED_BYTES, np.uint8), *(np.zeros(1 << 14, np.uint8) for _ in range(2))]
    return run_ptx(
        text,
        [*arguments, np.uint64(0), np.uint64(b_descriptor), np.uint32(0)],
        block=(THREADS, 1, 1),
        dynamic_shared=SHARED_BYTES,
        check=False,
    )


def test_descriptor_beyond_shared_memory_is_found() -> None:
    descriptor = Layout("128B", False).wgmma_descriptor(SHARED_BYTES - 1024, 64, 2)
    assert kinds(launch_anyhow(kernel(Case(n=64)), descriptor)) == {"out-of-bounds"}


def test_wgmma_is_refused_on_blackwell() -> None:
    text = kernel(Case(n=8)).replace("sm_90a", "sm_100a")
    assert kinds(launch_anyhow(text, 0)) == {"unsupported"}
