"""tcgen05 against NumPy. PTX ISA: TensorCore 5th Generation Family Instructions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash4_torch.emulator.engine import Options, run_ptx
from flash4_torch.emulator.errors import UnsupportedInstruction
from flash4_torch.emulator.report import Report
from tensor_cores import (
    COPY_IMAGE,
    FORMATS,
    SHARED_BYTES,
    SWIZZLED_K,
    SWIZZLES,
    Layout,
    random_operand,
    steps,
)

THREADS = LANES = 128
COLUMNS = 272  # TMEM columns that the kernels fill and read back
A_COLUMN = 256  # the column of A when it is in TMEM
NO_IMAGE = np.zeros((1, SHARED_BYTES), np.uint8)
SCHEDULES = st.sampled_from(["eager", "late", "fuzz"])
WAIT_LOAD = "tcgen05.wait::ld.sync.aligned;"
WAIT_STORE = "tcgen05.wait::st.sync.aligned;"


def kernel(body: str, *, ctas: int = 1, columns: int = 512, free: bool = True) -> str:
    """Fills shared memory and TMEM from parameters, runs `body`, and writes TMEM back.

    In the body %t is the TMEM address, %lane that of the warp's first lane, %elected holds in one thread of
    the cluster, %a and %b are the descriptors, %e the number `enable`, %mask0... the masks, `done` an
    mbarrier for one arrival.
    """
    group = f"cta_group::{ctas}"
    sync = (
        "barrier.cluster.arrive.aligned;\n    barrier.cluster.wait.aligned;" if ctas == 2 else "bar.sync 0;"
    )
    loads = [f"ld.global.b32 %v{i}, [%row+{4 * i}];" for i in range(16)]
    registers = "{" + ", ".join(f"%v{i}" for i in range(16)) + "}"

    def each(lines: list[str]) -> str:
        """The lines repeated for every 16 columns, with %row at the first of them."""
        pieces = []
        for column in range(0, COLUMNS, 16):
            pieces += [line.replace("COLUMN", str(column)) for line in lines]
            pieces.append("add.s64 %row, %row, 64;")
        return "\n    ".join(pieces)

    fill = each([*loads, f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%lane+COLUMN], {registers};"])
    stores = [f"st.global.b32 [%row+{4 * i}], %v{i};" for i in range(16)]
    drain = each(
        [
            f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {registers}, [%lane+COLUMN];",
            "tcgen05.wait::ld.sync.aligned;",
            *stores,
        ]
    )
    dealloc = f"@%first tcgen05.dealloc.{group}.sync.aligned.b32 %t, {columns};" if free else ""
    return f"""
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry product(.param .u64 image, .param .u64 tensor, .param .u64 a_descriptor,
    .param .u64 b_descriptor, .param .u32 instruction, .param .u32 enable, .param .align 4 .b8 masks[32])
{{
    .shared .align 8 .b64 done;
    .shared .align 4 .b32 slot;
    .reg .b32 %v<16>, %w<128>, %t, %lane, %rank, %i, %e, %number, %shifted, %mask<8>, %peer;
    .reg .b64 %a, %b, %start, %row, %skip;
    .reg .b16 %both;
    .reg .pred %first, %zero, %elected, %enable, %ok;
    mov.u32 %rank, %cluster_ctarank;
    ld.param.u64 %source, [image];
    mul.wide.u32 %skip, %rank, {SHARED_BYTES};
    add.s64 %source, %source, %skip;
    {COPY_IMAGE}
    setp.lt.u32 %first, %tid, 32;
    setp.eq.u32 %zero, %tid, 0;
    setp.eq.and.u32 %elected, %rank, 0, %zero;
    @%zero mbarrier.init.shared::cta.b64 [done], 1;
    fence.mbarrier_init.release.cluster;
    @%first tcgen05.alloc.{group}.sync.aligned.shared::cta.b32 [slot], {columns};
    @%first tcgen05.relinquish_alloc_permit.{group}.sync.aligned;
    {sync}
    ld.shared.b32 %t, [slot];
    and.b32 %lane, %tid, 96;
    shl.b32 %lane, %lane, 16;
    add.u32 %lane, %lane, %t;
    mad.lo.u32 %number, %rank, {LANES}, %tid;
    ld.param.u64 %row, [tensor];
    mad.wide.u32 %row, %number, {4 * COLUMNS}, %row;
    {fill}
    tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync;
    {sync}
    tcgen05.fence::after_thread_sync;
    shr.u32 %shifted, %base, 4;
    cvt.u64.u32 %start, %shifted;
    ld.param.u64 %a, [a_descriptor];
    add.s64 %a, %a, %start;
    ld.param.u64 %b, [b_descriptor];
    add.s64 %b, %b, %start;
    ld.param.u32 %i, [instruction];
    ld.param.u32 %e, [enable];
    setp.ne.u32 %enable, %e, 0;
    mov.b16 %both, 3;
    {"".join(f"ld.param.b32 %mask{i}, [masks+{4 * i}];" for i in range(8))}
    {body}
    add.s64 %row, %row, {-4 * COLUMNS};
    {drain}
    tcgen05.fence::before_thread_sync;
    {sync}
    {dealloc}
    ret;
}}
"""


def committed(instruction: str, ctas: int) -> str:
    """One thread issues the instruction; all threads of the cluster wait for it."""
    multicast, mask = (".multicast::cluster", ", %both") if ctas == 2 else ("", "")
    kind = f"cta_group::{ctas}.mbarrier::arrive::one.shared::cluster{multicast}.b64"
    commit = f"tcgen05.commit.{kind} [done]{mask};"
    return f"""
    @%elected {instruction}
    @%elected {commit}
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %ok, [done], 0;
    @!%ok bra WAIT;
    tcgen05.fence::after_thread_sync;
"""


def launch(
    text: str,
    tensor: np.ndarray,
    image: np.ndarray,
    *,
    descriptors: tuple[int, int] = (0, 0),
    instruction: int = 0,
    enable: bool = False,
    masks: np.ndarray | None = None,
    options: Options | None = None,
    check: bool = True,
) -> Report:
    """Runs a kernel; `tensor` [CTAs, 128, COLUMNS] holds the contents of TMEM, before and after."""
    ctas = tensor.shape[0]
    return run_ptx(
        text,
        [
            image,
            tensor,
            np.uint64(descriptors[0]),
            np.uint64(descriptors[1]),
            np.uint32(instruction),
            np.uint32(enable),
            (np.zeros(8, np.uint32) if masks is None else masks).tobytes(),
        ],
        grid=(ctas, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(ctas, 1, 1),
        dynamic_shared=SHARED_BYTES,
        options=options,
        check=check,
    )


def random_tensor(ctas: int, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((ctas, LANES, COLUMNS)).astype(np.float32)
    return values.view(np.uint32)


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.findings}


# --- MMAs

TYPES = {"f16": ("f16", "bf16"), "tf32": ("tf32",), "f8f6f4": ("e4m3", "e5m2"), "i8": ("u8", "s8")}
CODES = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "u8": 0, "s8": 1}
OUTPUTS = {"f16": 0, "f32": 1, "s32": 2}
OUTPUT_TYPES = {"f16": np.float16, "f32": np.float32, "s32": np.int32}


@dataclass(frozen=True)
class Case:
    """One MMA; `a_layout` None puts A into TMEM."""

    m: int = 128
    n: int = 64
    ctas: int = 1
    kind: str = "f16"
    a: str = "bf16"
    b: str = "bf16"
    d: str = "f32"
    a_layout: Layout | None = SWIZZLED_K
    b_layout: Layout = SWIZZLED_K
    negate: tuple[bool, bool] = (False, False)
    enable: bool = True
    scale: int = 0
    disabled: bool = False
    seed: int = 0

    @property
    def instruction(self) -> int:
        """PTX ISA, Instruction Descriptor."""
        majors = (self.a_layout is not None and self.a_layout.mn_major, self.b_layout.mn_major)
        return (
            OUTPUTS[self.d] << 4
            | CODES[self.a] << 7
            | CODES[self.b] << 10
            | self.negate[0] << 13
            | self.negate[1] << 14
            | majors[0] << 15
            | majors[1] << 16
            | self.n // 8 << 17
            | self.m // 16 << 24
        )

    @property
    def text(self) -> str:
        a = "%a" if self.a_layout else f"[%t+{A_COLUMN}]"
        masks = "".join(f"%mask{i}, " for i in range(4 * self.ctas))
        masks = f"{{{masks[:-2]}}}, " if self.disabled else ""
        scale = f", {self.scale}" if self.scale else ""
        return (
            f"tcgen05.mma.cta_group::{self.ctas}.kind::{self.kind} [%t], {a}, %b, %i, {masks}%enable{scale};"
        )


def places(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(CTA, lane, column) of D's elements [M, N]: Data Path Layouts A, B, D and F."""
    row, column = np.meshgrid(np.arange(case.m), np.arange(case.n), indexing="ij")
    if case.ctas == 2 and case.m == 256:
        return row // 128, row % 128, column
    if case.ctas == 2:
        return row // 64, row % 64 + 64 * (column >= case.n // 2), column % (case.n // 2)
    if case.m == 64:
        return 0 * row, row // 16 * 32 + row % 16, column
    return 0 * row, row, column


def operands(case: Case, tensor: np.ndarray) -> tuple[np.ndarray, tuple[int, int], np.ndarray]:
    """Places A and B; returns (shared memory [CTAs, bytes], descriptors, A B^T in f64)."""
    a_bits, a = random_operand(case.a, case.m, case.seed)
    b_bits, b = random_operand(case.b, case.n, case.seed + 1)
    image = np.zeros((case.ctas, SHARED_BYTES), np.uint8)
    a_descriptor = 0
    for cta, (a_part, b_part) in enumerate(
        zip(np.split(a_bits, case.ctas), np.split(b_bits, case.ctas), strict=True)
    ):
        end = case.b_layout.place(image[cta], 0, b_part)
        if case.a_layout:
            case.a_layout.place(image[cta], end, a_part)
            a_descriptor = case.a_layout.tcgen05_descriptor(end, a_part.shape[0], a_bits.itemsize)
        else:
            words = np.ascontiguousarray(a_part).view(np.uint32)
            _, lanes, _ = places(case)
            own = np.unique(lanes[: a_part.shape[0]].T, axis=0)  # both halves of the lanes need A
            for lane in own:
                tensor[cta, lane, A_COLUMN : A_COLUMN + 8] = words
    b_descriptor = case.b_layout.tcgen05_descriptor(0, case.n // case.ctas, b_bits.itemsize)
    return image, (a_descriptor, b_descriptor), a @ b.T


def run(
    case: Case, options: Options | None = None, check: bool = True, body: str = ""
) -> tuple[Report, np.ndarray]:
    """Runs the MMA and compares all of TMEM with NumPy's result."""
    tensor = random_tensor(case.ctas, case.seed)
    image, descriptors, product = operands(case, tensor)
    at = places(case)
    kind = OUTPUT_TYPES[case.d]
    initial = (np.random.default_rng(case.seed).standard_normal((case.m, case.n)) * 100).astype(kind)
    tensor[at] = initial.view(f"u{initial.itemsize}")
    masks = np.random.default_rng(case.seed).integers(0, 1 << 32, 8, dtype=np.uint32) * np.uint32(
        case.disabled
    )
    before = tensor.copy()
    report = launch(
        kernel(body or committed(case.text, case.ctas), ctas=case.ctas),
        tensor,
        image,
        descriptors=descriptors,
        instruction=case.instruction,
        enable=case.enable,
        masks=masks,
        options=options,
        check=check,
    )
    if not check:
        return report, tensor
    sign = (-1) ** (case.negate[0] + case.negate[1])
    expected = sign * product + case.enable * initial.astype(np.float64) * 2.0**-case.scale
    on = ~(masks[at[0] * 4 + at[1] // 32] >> (at[1] % 32).astype(np.uint32)) & 1 == 1
    expected = np.where(on, expected, initial)
    result = tensor[at].astype(f"u{initial.itemsize}").view(kind)
    if case.d == "s32":
        np.testing.assert_array_equal(result, expected)
    else:
        tolerance = 1e-5 if case.d == "f32" else 1e-3
        assert np.all(np.abs(result - expected) <= tolerance * np.maximum(np.abs(expected), 300))
    before[at] = tensor[at] = 0
    np.testing.assert_array_equal(tensor, before)
    return report, tensor


@st.composite
def layouts(draw: st.DrawFn, element: str, rows: int) -> Layout:
    swizzle = draw(st.sampled_from(sorted(SWIZZLES)))
    fits = rows * FORMATS[element].size % SWIZZLES[swizzle][0] == 0
    mn_major = fits and (swizzle == "128B_32B" or draw(st.booleans()))
    if swizzle == "128B_32B" and not mn_major:
        swizzle = "128B"
    step = 0 if mn_major else draw(st.integers(0, steps(swizzle) - 1))
    return Layout(swizzle, mn_major, draw(st.sampled_from([0, 1024])), step)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ctas = draw(st.sampled_from([1, 2]))
    m = draw(st.sampled_from([64, 128])) * ctas
    n = draw(st.sampled_from([32, 64, 96, 128, 256] + [8, 24] * (m == 64) + [16, 48] * (ctas == 1)))
    kind = draw(st.sampled_from(sorted(TYPES)))
    a, b = draw(st.sampled_from(TYPES[kind])), draw(st.sampled_from(TYPES[kind]))
    d = {"tf32": "f32", "i8": "s32"}.get(kind) or draw(st.sampled_from(["f32", "f16"]))
    return Case(
        m=m,
        n=n,
        ctas=ctas,
        kind=kind,
        a=a,
        b=b,
        d=d,
        a_layout=draw(st.none() | layouts(a, m // ctas)),
        b_layout=draw(layouts(b, n // ctas)),
        negate=(kind != "i8" and draw(st.booleans()), kind != "i8" and draw(st.booleans())),
        enable=draw(st.booleans()),
        scale=draw(st.integers(0, 15)) if kind in ("f16", "tf32") else 0,
        disabled=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=60)
@given(cases(), SCHEDULES)
def test_product(case: Case, schedule: str) -> None:
    run(case, Options(schedule=schedule))


def test_counters() -> None:
    report, _ = run(Case(m=256, n=128, ctas=2))
    assert report.counters.mma == 1
    assert report.counters.mma_flops == 2 * 256 * 128 * 16


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (Case(n=24), "descriptor"),  # M = 128 takes multiples of 16
        (Case(kind="tf32"), "descriptor"),  # multiple of bf16's
        (Case(a_layout=Layout("128B", False, gap=1 << 17)), "out-of-bounds"),
    ],
)
def test_wrong_products_are_refused(case: Case, kind: str) -> None:
    tensor = random_tensor(1, 0)
    a = (case.a_layout or case.b_layout).tcgen05_descriptor(0, 128, 2)
    report = launch(
        kernel(committed(case.text, 1)),
        tensor,
        NO_IMAGE,
        descriptors=(a, case.b_layout.tcgen05_descriptor(0, 64, 2)),
        instruction=case.instruction,
        check=False,
    )
    assert kinds(report) == {kind}


def test_unused_bits_of_the_descriptor_are_checked() -> None:
    tensor = random_tensor(1, 0)
    report = launch(
        kernel(committed(Case().text, 1)), tensor, NO_IMAGE, instruction=Case().instruction, check=False
    )
    assert kinds(report) == {"descriptor"}


@pytest.mark.parametrize(
    "instruction",
    [
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%t], %a, %b, %i, [%t], [%t], %enable;",
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%t], %a, %b, %i, %enable;",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%t], %a, %b, [%t], %i, %enable;",
        "tcgen05.shift.cta_group::1.down [%t];",
        "tcgen05.cp.cta_group::1.4x256b [%t], %a;",
        "tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64 [%t], %a;",
    ],
)
def test_what_is_not_implemented_is_refused_by_name(instruction: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=instruction.split()[0]):
        found(instruction)


# --- tcgen05.ld and st

# How the bits of a thread's and a register's number move through (lanes, columns): Data Movement Shape.
PATTERNS = {
    "32x32b": ([(1, 0), (2, 0), (4, 0), (8, 0), (16, 0)], []),
    "16x64b": ([(8, 0), (0, 1), (1, 0), (2, 0), (4, 0)], [(0, 2)]),
    "16x128b": ([(0, 1), (0, 2), (1, 0), (2, 0), (4, 0)], [(8, 0), (0, 4)]),
    "16x256b": ([(0, 2), (0, 4), (1, 0), (2, 0), (4, 0)], [(0, 1), (8, 0), (0, 8)]),
    "16x32bx2": ([(1, 0), (2, 0), (4, 0), (8, 0), (0, -1)], []),
}
REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}


def pattern(shape: str, repeat: int, halves: bool, split: int) -> tuple[np.ndarray, np.ndarray]:
    """(lane in the warp, column) of each thread's registers, [128, registers].

    If a register holds two 16-bit halves, this is the place of the lower one.
    """
    thread_bits, register_bits = PATTERNS[shape]
    registers = REGISTERS[shape] * repeat
    register_bits = list(register_bits) or [(0, 1)]
    while len(register_bits) < 8:
        register_bits.append((0, 2 * register_bits[-1][1]))
    thread, register = np.meshgrid(np.arange(THREADS) % 32, np.arange(registers), indexing="ij")
    lane, column, apart = 0 * thread, 0 * thread, 0 * thread
    for number, bits in ((thread, thread_bits), (register, register_bits)):
        for i, (down, right) in enumerate(bits):
            lane += (number >> i & 1) * down
            if right < 0:
                apart += number >> i & 1
            else:
                column += (number >> i & 1) * right
    return lane, column * (2 if halves else 1) + apart * split


@st.composite
def moves(draw: st.DrawFn) -> tuple[str, int, bool, int, int, int]:
    """A random move: (shape, repeat, halves, split, first lane of the warp's, column)."""
    shape = draw(st.sampled_from(sorted(PATTERNS)))
    halves = draw(st.booleans())
    width = {"16x64b": 2, "16x128b": 4, "16x256b": 8}.get(shape, 1) * (2 if halves else 1)
    half = shape == "16x32bx2"
    most = min(128 // REGISTERS[shape], 256 // width // (2 if half else 1))
    repeat = draw(st.sampled_from([1 << i for i in range(8) if 1 << i <= most]))
    split = repeat * width + draw(st.integers(0, 3)) if half else 0
    lane = 0 if shape == "32x32b" else draw(st.sampled_from([0, 16]))
    return shape, repeat, halves, split, lane, draw(st.integers(0, COLUMNS - repeat * width - split))


def move_body(move: tuple[str, int, bool, int, int, int], loads: bool) -> str:
    """Loads: what is loaded goes to columns 0, 1, ...; stores: what those columns hold is stored."""
    shape, repeat, halves, split, lane, column = move
    count = REGISTERS[shape] * repeat
    registers = ", ".join(f"%w{i}" for i in range(count))
    address = f"[%lane+{(lane << 16) + column}]" + (f", {split}" if split else "")
    shape = f"{shape}.x{repeat}"
    if loads:
        halving = ".pack::16b" if halves else ""
        first = [f"tcgen05.ld.sync.aligned.{shape}{halving}.b32 {{{registers}}}, {address};"]
        second = [f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%lane+{i}], {{%w{i}}};" for i in range(count)]
    else:
        halving = ".unpack::16b" if halves else ""
        first = [f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%w{i}}}, [%lane+{i}];" for i in range(count)]
        second = [f"tcgen05.st.sync.aligned.{shape}{halving}.b32 {address}, {{{registers}}};"]
    return "\n".join([*first, WAIT_LOAD, *second, WAIT_STORE])


def where(move: tuple[str, int, bool, int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    shape, repeat, halves, split, first_lane, first_column = move
    lane, column = pattern(shape, repeat, halves, split)
    return lane + first_lane + np.arange(THREADS)[:, None] // 32 * 32, column + first_column


@settings(max_examples=40)
@given(moves(), SCHEDULES)
def test_loads(move: tuple[str, int, bool, int, int, int], schedule: str) -> None:
    tensor = random_tensor(1, 0)
    expected = tensor[0].copy()
    lane, column = where(move)
    values = expected[lane, column]
    if move[2]:
        values = values & 0xFFFF | expected[lane, column + 1] << 16
    expected[:, : values.shape[1]] = values
    launch(kernel(move_body(move, True)), tensor, NO_IMAGE, options=Options(schedule=schedule))
    np.testing.assert_array_equal(tensor[0], expected)


@settings(max_examples=40)
@given(moves(), SCHEDULES)
def test_stores(move: tuple[str, int, bool, int, int, int], schedule: str) -> None:
    tensor = random_tensor(1, 0)
    expected = tensor[0].copy()
    lane, column = where(move)
    values = expected[:, : lane.shape[1]].copy()
    if move[2]:
        expected[lane, column + 1] = values >> 16
        values &= 0xFFFF
    expected[lane, column] = values
    launch(kernel(move_body(move, False)), tensor, NO_IMAGE, options=Options(schedule=schedule))
    np.testing.assert_array_equal(tensor[0], expected)


SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32).view(np.uint32)


@settings(max_examples=20)
@given(
    st.sampled_from(["32x32b", "16x32bx2"]),
    st.sampled_from([2, 8, 64]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    SCHEDULES,
)
def test_loads_that_reduce(
    shape: str, repeat: int, maximum: bool, absolute: bool, nan: bool, schedule: str
) -> None:
    """TMEM of sm_103a: the loaded values, and in the column after them their minimum or maximum."""
    split = repeat + 3 if shape == "16x32bx2" else 0
    tensor = random_tensor(1, 0)
    tensor[0, ::3, ::5] = np.random.default_rng(1).choice(SPECIAL, tensor[0, ::3, ::5].shape)
    expected = tensor[0].copy()
    values = expected[where((shape, repeat, False, split, 0, 7))]
    floats = values.view(np.float32)
    floats = np.abs(floats) if absolute else floats
    # +0 is more than -0; all values must be NaN for a NaN result or, if .NaN is given, one of them.
    order = np.where(floats == 0, np.where(np.signbit(floats), -1e-45, 1e-45).astype(np.float32), floats)
    lost = np.nan if nan else (-np.inf if maximum else np.inf)
    order = np.where(np.isnan(order), lost, order)
    best = order.max(1) if maximum else order.min(1)
    best = np.where(np.isnan(floats).all(1), np.nan, best).astype(np.float32)
    best = np.where(np.abs(best) < 1e-44, np.copysign(0, best), best).astype(np.float32)
    expected[:, :repeat] = values
    expected[:, repeat] = np.where(np.isnan(best), 0x7FFFFFFF, best.view(np.uint32))
    operation = ("max" if maximum else "min") + ".abs" * absolute + ".NaN" * nan
    registers = ", ".join(f"%w{i}" for i in range(repeat))
    stores = [
        f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%lane+{i}], {{%w{i if i < repeat else 100}}};"
        for i in range(repeat + 1)
    ]
    load = (
        f"tcgen05.ld.red.sync.aligned.{shape}.x{repeat}.{operation}.f32 {{{registers}}}, %w100, "
        f"[%lane+7]{f', {split}' if split else ''};"
    )
    text = kernel("\n".join([load, WAIT_LOAD, *stores, WAIT_STORE])).replace("sm_100a", "sm_103a")
    launch(text, tensor, NO_IMAGE, options=Options(schedule=schedule))
    np.testing.assert_array_equal(tensor[0], expected)


def test_loads_that_reduce_are_no_part_of_sm_100a() -> None:
    load = "tcgen05.ld.red.sync.aligned.32x32b.x2.max.f32 {%w0, %w1}, %w2, [%lane];"
    assert kinds(found(load)) == {"unsupported"}


# --- tcgen05.cp

COPIES = {
    "128x256b": (128, 8, np.arange(128)),
    "128x128b": (128, 4, np.arange(128)),
    "64x128b.warpx2::02_13": (64, 4, np.arange(128) % 64),
    "64x128b.warpx2::01_23": (64, 4, np.arange(128) // 64 * 32 + np.arange(128) % 32),
    "32x128b.warpx4": (32, 4, np.arange(128) % 32),
}


@settings(max_examples=20)
@given(st.sampled_from(sorted(COPIES)), st.sampled_from([1, 2]), st.sampled_from(["none", "128B"]), SCHEDULES)
def test_copies(shape: str, ctas: int, swizzle: str, schedule: str) -> None:
    rows, words, source = COPIES[shape]
    layout = Layout(swizzle, False)
    tensor = random_tensor(ctas, 0)
    image = np.zeros((ctas, SHARED_BYTES), np.uint8)
    expected = tensor.copy()
    for cta in range(ctas):
        values = np.random.default_rng(cta).integers(0, 1 << 32, (rows, 8), dtype=np.uint32)
        layout.place(image[cta], 0, values)
        expected[cta, :, 32 : 32 + words] = values[source, :words]
    launch(
        kernel(committed(f"tcgen05.cp.cta_group::{ctas}.{shape} [%t+32], %a;", ctas), ctas=ctas),
        tensor,
        image,
        descriptors=(layout.tcgen05_descriptor(0, rows, 4), 0),
        options=Options(schedule=schedule),
    )
    np.testing.assert_array_equal(tensor, expected)


# --- allocation


def found(body: str = "", **options: object) -> Report:
    return launch(kernel(body, **options), random_tensor(1, 0), NO_IMAGE, check=False)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (
            "@%first tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 32;",
            "tmem",
        ),  # relinquished
        ("@%first tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t, 256;", "tmem"),  # only a part
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%w0}, [%t];", "tmem"),  # another warp's lanes
        ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%w0, %w1}, [%lane+511];", "tmem"),
        ("@%elected tcgen05.ld.sync.aligned.32x32b.x1.b32 {%w0}, [%lane];", "tcgen05"),  # not the whole warp
        ("@%elected tcgen05.cp.cta_group::2.128x128b [%t], %a;", "tcgen05"),  # no pair
    ],
)
def test_misuse_is_found(body: str, kind: str) -> None:
    assert kinds(found(body)) == {kind}


@pytest.mark.parametrize("columns", [16, 48, 1024])
def test_wrong_sizes_are_found(columns: int) -> None:
    assert kinds(found(columns=columns)) == {"tmem"}


def test_memory_not_allocated_is_found() -> None:
    assert kinds(found(columns=256)) == {"tmem"}


def test_memory_not_freed_is_found() -> None:
    assert kinds(found(free=False)) == {"tmem-leak"}


BLOCKING = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry blocking(.param .u64 out)
{
    .shared .align 4 .b32 slots[2];
    .reg .b32 %tid, %warp, %slot, %t;
    .reg .b64 %out;
    .reg .pred %zero;
    mov.u32 %tid, %tid.x;
    shr.u32 %warp, %tid, 5;
    mov.u32 %slot, slots;
    mad.lo.u32 %slot, %warp, 4, %slot;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%slot], 512;
    ld.shared.b32 %t, [%slot];
    DEALLOC
    ld.param.u64 %out, [out];
    mad.wide.u32 %out, %warp, 4, %out;
    and.b32 %tid, %tid, 31;
    setp.eq.u32 %zero, %tid, 0;
    @%zero st.global.b32 [%out], %t;
    ret;
}
"""


@pytest.mark.parametrize("schedule", ["eager", "late", "fuzz"])
def test_allocation_waits_for_room(schedule: str) -> None:
    out = np.full(2, 99, np.uint32)
    text = BLOCKING.replace("DEALLOC", "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t, 512;")
    run_ptx(text, [out], block=(64, 1, 1), options=Options(schedule=schedule))
    assert out.tolist() == [0, 0]


def test_allocation_that_never_gets_room_is_a_deadlock() -> None:
    report = run_ptx(BLOCKING.replace("DEALLOC", ""), [np.zeros(2, np.uint32)], block=(64, 1, 1), check=False)
    assert "deadlock" in kinds(report)


# --- order

READ = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%w0}, [%lane];"
OVERWRITE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%lane], {%w2};"
STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%lane], {%w0};"
USE = "add.u32 %w1, %w0, %w0;"
MOVE = "mov.b32 %w1, %w0;"


@pytest.mark.parametrize("schedule", ["eager", "late", "fuzz"])
@pytest.mark.parametrize(
    ("body", "racy"),
    [
        ([READ, WAIT_LOAD, STORE, WAIT_STORE], False),
        ([READ, OVERWRITE, WAIT_LOAD, WAIT_STORE], True),
        ([READ, USE, OVERWRITE, WAIT_STORE], False),
        ([READ, MOVE, OVERWRITE, WAIT_STORE], True),
        ([READ, MOVE, "add.u32 %w3, %w1, %w1;", OVERWRITE, WAIT_STORE], False),
        ([READ, "mov.b32 %w0, 0;", "add.u32 %w1, %w0, %w0;", OVERWRITE, WAIT_STORE], True),
        (["mov.b32 %w0, 0;", STORE, READ, WAIT_LOAD, WAIT_STORE], True),
        (["mov.b32 %w0, 0;", STORE, WAIT_STORE, READ, WAIT_LOAD], False),
    ],
)
def test_loads_and_stores_of_a_warp_are_ordered_by_waits(body: list[str], racy: bool, schedule: str) -> None:
    lines = ["mov.b32 %w2, 0;", *body]
    report = launch(
        kernel("\n".join(lines)),
        random_tensor(1, 0),
        NO_IMAGE,
        options=Options(schedule=schedule),
        check=False,
    )
    assert kinds(report) == ({"race"} if racy else set())


def test_use_before_the_wait_is_found_on_request() -> None:
    def strict(body: str) -> set[str]:
        options = Options(strict=frozenset({"wait_ld"}))
        return kinds(launch(kernel(body), random_tensor(1, 0), NO_IMAGE, options=options, check=False))

    assert strict(READ + USE) == {"wait-ld"}
    assert strict(READ + MOVE + WAIT_LOAD + USE) == set()


@pytest.mark.parametrize("schedule", ["eager", "late", "fuzz"])
def test_product_read_without_waiting_is_found(schedule: str) -> None:
    """A race if the MMA was done in time; otherwise the CTA exits before it is done."""
    issue, _ = committed(Case().text, 1).split("WAIT:")
    report, _ = run(Case(), Options(schedule=schedule), check=False, body=issue)
    assert kinds(report) & {"race", "exit-pending"}


@pytest.mark.parametrize("schedule", ["eager", "late", "fuzz"])
def test_store_not_waited_for_before_a_product_is_found(schedule: str) -> None:
    case = replace(Case(), a_layout=None)
    store = f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%lane+{A_COLUMN}], {{%e}};"
    for wait in ("", WAIT_STORE):
        body = f"{store}\n{wait}\nbar.sync 0;\n{committed(case.text, 1)}"
        report, _ = run(case, Options(schedule=schedule), check=False, body=body)
        assert bool(kinds(report) & {"race", "exit-pending"}) == (not wait)
