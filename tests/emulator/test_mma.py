"""mma.sync against torch. PTX ISA: Warp Level Matrix Multiply-Accumulate Instructions, mma."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash4_torch.emulator.engine import run_ptx
from flash4_torch.emulator.errors import PtxError, UnsupportedInstruction
from flash4_torch.emulator.report import Report

LANES = 32
M, N = 16, 8
TYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "f32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
FP8 = ("e4m3", "e5m2")


@dataclass(frozen=True)
class Case:
    """The types and K of one mma.sync."""

    a: str = "bf16"
    b: str = "bf16"
    k: int = 16
    accumulator: str = "f32"

    @property
    def opcode(self) -> str:
        return (
            f"mma.sync.aligned.m16n8k{self.k}.row.col.{self.accumulator}.{self.a}.{self.b}.{self.accumulator}"
        )

    @property
    def a_registers(self) -> int:
        return M * self.k * TYPES[self.a].itemsize // LANES // 4

    @property
    def accumulator_registers(self) -> int:
        return M * N * TYPES[self.accumulator].itemsize // LANES // 4


CASES = [
    *(Case(t, t, k) for t in ("f16", "bf16") for k in (8, 16)),
    *(Case("tf32", "tf32", k) for k in (4, 8)),
    *(Case("f16", "f16", k, "f16") for k in (8, 16)),
    *(Case(a, b, k, d) for a in FP8 for b in FP8 for k in (16, 32) for d in ("f32", "f16")),
]


def numbered(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(count)) + "}"


def kernel(
    case: Case, *, to: str = "", addend: str = "", guard: str = "", before: str = "", arch: str = "sm_90a"
) -> str:
    """Loads every lane's registers of A, B and C, multiplies, and writes those named as D.

    to, addend: the operands D and C, if others than the registers of D and C.
    """
    counts = {"a": case.a_registers, "b": case.a_registers // 2, "c": case.accumulator_registers}
    loads = "\n".join(
        f"""
        ld.param.u64 %p, [{name}];
        mad.wide.u32 %p, %lane, {4 * count}, %p;
        {" ".join(f"ld.global.b32 %{name}{i}, [%p+{4 * i}];" for i in range(count))}"""
        for name, count in counts.items()
    )
    to = to or numbered("d", counts["c"])
    results = to.strip("{}").split(", ")
    return f"""
.version 8.8
.target {arch}
.address_size 64
.visible .entry product(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d)
{{
    .reg .b32 %lane, %a<4>, %b<4>, %c<4>, %d<4>;
    .reg .b64 %p;
    .reg .pred %low;
    mov.u32 %lane, %laneid;
    setp.lt.u32 %low, %lane, 16;
    {loads}
    {before}
    {guard} {case.opcode} {to}, {numbered("a", counts["a"])}, {numbered("b", counts["b"])},
        {addend or numbered("c", counts["c"])};
    ld.param.u64 %p, [d];
    mad.wide.u32 %p, %lane, {4 * len(results)}, %p;
    {" ".join(f"st.global.b32 [%p+{4 * i}], {r};" for i, r in enumerate(results))}
    ret;
}}
"""


# --- The figures of the PTX ISA: where element i of a lane's fragment lies.


def lanes_and(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """groupID, threadID_in_group and i, each [32, count]."""
    lane, i = np.meshgrid(np.arange(LANES), np.arange(count), indexing="ij")
    return lane // 4, lane % 4, i


def places_of_a(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of each element of A."""
    group, thread, i = lanes_and(M * case.k // LANES)
    each = 4 // TYPES[case.a].itemsize  # in a register, of neighbouring columns
    lower = i // each % 2 == 1
    right = i // (2 * each)
    return group + 8 * lower, thread * each + i % each + right * 4 * each


def places_of_b(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of each element of B."""
    group, thread, i = lanes_and(case.k * N // LANES)
    each = 4 // TYPES[case.b].itemsize
    return thread * each + i % each + i // each * 4 * each, group


def places_of_c() -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of each element of C and D."""
    group, thread, i = lanes_and(M * N // LANES)
    return group + 8 * (i // 2), thread * 2 + i % 2


def registers(matrix: torch.Tensor, places: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The matrix's elements at the places, as every lane's registers."""
    row, column = map(torch.from_numpy, places)
    return matrix[row, column].contiguous().view(torch.uint8).numpy().view(np.uint32)


def run(
    case: Case, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, **changes: str
) -> tuple[torch.Tensor, Report]:
    """(D, the report) for A [16, K], B [K, 8] and C [16, 8]."""
    kind = TYPES[case.accumulator]
    parts = np.zeros((LANES, 4 * case.accumulator_registers), np.uint8)
    report = run_ptx(
        kernel(case, **changes),
        [
            registers(a.to(TYPES[case.a]), places_of_a(case)),
            registers(b.to(TYPES[case.b]), places_of_b(case)),
            registers(c.to(kind), places_of_c()),
            parts,
        ],
    )
    d = torch.empty(M, N, dtype=kind)
    d[tuple(map(torch.from_numpy, places_of_c()))] = torch.from_numpy(parts).view(kind)
    return d, report


def integers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Numbers of which all formats hold every one, and every sum of 32 products."""
    return torch.randint(-4, 5, shape, generator=generator).double()


seeds = st.integers(0, 2**32 - 1).map(lambda seed: torch.Generator().manual_seed(seed))


@settings(max_examples=60)
@given(st.sampled_from(CASES), seeds, st.sampled_from(["sm_90a", "sm_100a"]), st.integers(-6, 2))
def test_exact_products(case: Case, generator: torch.Generator, arch: str, exponent: int) -> None:
    """A product is exact, bit for bit, where every sum is."""
    a, b, c = (integers(generator, *shape) for shape in ((M, case.k), (case.k, N), (M, N)))
    a, c = a * 2.0**exponent, c * 2.0**exponent
    d, report = run(case, a, b, c, arch=arch)
    assert torch.equal(d, (a @ b + c).to(d.dtype))
    assert report.counters.mma == 1
    assert report.counters.mma_flops == 2 * M * N * case.k


@settings(max_examples=30)
@given(st.sampled_from(CASES), seeds)
def test_rounded_products(case: Case, generator: torch.Generator) -> None:
    """Sums are those of fp32; accumulators of fp16 are rounded once more, at the end."""
    a, b, c = (
        torch.randn(shape, generator=generator).to(TYPES[name])
        for name, shape in ((case.a, (M, case.k)), (case.b, (case.k, N)), (case.accumulator, (M, N)))
    )
    d, _ = run(case, a, b, c)
    a, b = (truncated(x) if case.a == "tf32" else x.double() for x in (a, b))
    exact, size = a @ b + c.double(), a.abs() @ b.abs() + c.double().abs()
    bound = (case.k + 1) * 2.0**-24 * size
    if case.accumulator == "f16":
        bound += 2.0**-11 * (exact.abs() + bound) + 2.0**-25
    assert torch.all((d.double() - exact).abs() <= bound)


def truncated(x: torch.Tensor) -> torch.Tensor:
    """The numbers of tf32, of whose registers the low 13 bits do not matter."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32).double()


@given(seeds, st.permutations(range(4)))
def test_d_may_be_registers_of_the_operands(generator: torch.Generator, order: list[int]) -> None:
    """A, B and C are read before D is written, whichever of their registers D names."""
    case = Case()
    a, b, c = (integers(generator, *shape) for shape in ((M, 16), (16, N), (M, N)))
    for registers_of in ("a", "c"):
        names = "{" + ", ".join(f"%{registers_of}{i}" for i in order) + "}"
        assert torch.equal(run(case, a, b, c, to=names)[0], (a @ b + c).float())


def test_zeros_may_stand_for_c() -> None:
    """A register may be named more than once among the sources, and a number may stand for one."""
    generator = torch.Generator().manual_seed(0)
    a, b = integers(generator, M, 16), integers(generator, 16, N)
    expected = (a @ b).float()
    zeros = torch.zeros(M, N)
    assert torch.equal(run(Case(), a, b, zeros, addend="{%c0, %c0, %c0, %c0}")[0], expected)
    assert torch.equal(run(Case(), a, b, zeros + 1, addend="{0, 0, 0, 0}")[0], expected)


@pytest.mark.parametrize("element", ["f16", "bf16", "e5m2"])
def test_infinities_and_nan(element: str) -> None:
    """Infinities and NaN reach the elements of D that they belong to, and no others."""
    case = Case(element, element, 32 if element == "e5m2" else 16)
    a, b, c = torch.ones(M, case.k), torch.ones(case.k, N), torch.zeros(M, N)
    a[3, 1], b[2, 5], c[7, 7] = float("inf"), float("nan"), float("-inf")
    a[9, 0], a[9, 4] = float("inf"), float("-inf")
    d, _ = run(case, a, b, c)
    torch.testing.assert_close(d, a @ b + c, rtol=0, atol=0, equal_nan=True)


# --- what is refused


def outcome(text: str, threads: int = LANES) -> Report:
    return run_ptx(text, [np.zeros(512, np.uint8) for _ in range(4)], block=(threads, 1, 1), check=False)


@pytest.mark.parametrize(
    ("changes", "threads"),
    [({"guard": "@%low"}, LANES), ({"before": "@%low bra HALF; bra END; HALF:"}, LANES), ({}, 20)],
)
def test_part_of_a_warp_is_found(changes: dict[str, str], threads: int) -> None:
    """The instruction is an aligned one: all lanes of the warp execute it."""
    text = kernel(Case(), **changes).replace("ret;", "END: ret;")
    (finding,) = outcome(text, threads).findings
    assert finding.kind == "divergence" and finding.message == "mma.sync by a part of the warp only"


def test_whole_warps_of_a_block_multiply() -> None:
    report = outcome(kernel(Case()).replace("%lane, %laneid", "%lane, 0"), 96)
    assert not report.findings and report.counters.mma == 3


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("{%a0, %a1, %a2, %a3}", "{%a0, %a1}", "2 registers of A where the opcode says 4"),
        ("{%b0, %b1}", "{%b0}", "1 registers of B where the opcode says 2"),
        ("{%b0, %b1}", "%b0", "1 registers of B where the opcode says 2"),
        ("{%c0, %c1, %c2, %c3}", "{%c0, %c1}", "2 registers of C where the opcode says 4"),
        ("{%d0, %d1, %d2, %d3}", "{%d0, %d1, %d2}", "3 registers of D where the opcode says 4"),
        ("{%d0, %d1, %d2, %d3}", "{0, 0, 0, 0}", "operand 1 must be registers to write"),
        ("{%b0, %b1}", "[%b0]", "operand 3 must be registers or numbers"),
        ("{%b0, %b1}", "{%b0, %p}", r"%p is \.b64 where a register of up to 32 bits is needed"),
        ("{%b0, %b1},", "", "3 operands where the instruction takes 4"),
        ("m16n8k16", "m16n8k32", r"K is 32; for \.bf16 8 and 16 are possible"),
        ("m16n8k16", "m16n8k4", r"K is 4; for \.bf16 8 and 16 are possible"),
        ("bf16.bf16", "bf16.f16", r"A is \.bf16 and B is \.f16"),
        ("bf16.bf16", "tf32.e4m3", r"A is \.tf32 and B is \.e4m3"),
    ],
)
def test_malformed_forms(old: str, new: str, says: str) -> None:
    text = kernel(Case())
    assert old in text
    with pytest.raises(PtxError, match=says):
        run_ptx(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("f32.bf16.bf16.f32", "f16.bf16.bf16.f16", "these types"),
        ("f32.bf16.bf16.f32", "f32.bf16.bf16.f16", "these types"),
        ("f32.bf16.bf16.f32", "s32.s8.s8.s32", "these types"),
        ("m16n8k16", "m8n8k16", "this form"),
        ("row.col", "row.row", "this form"),
        ("row.col", "row.col.satfinite", "this form"),
        (".aligned", "", "this form"),
        ("mma.sync", "mma.sp.sync", "does not know"),
    ],
)
def test_what_the_engine_lacks_is_refused(old: str, new: str, says: str) -> None:
    text = kernel(Case())
    assert old in text
    with pytest.raises(UnsupportedInstruction, match=rf"mma\..*{says}"):
        run_ptx(text.replace(old, new))
