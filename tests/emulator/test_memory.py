"""Loads, stores, atomics, matrix moves and addresses, against NumPy.

PTX ISA: Data Movement and Conversion Instructions; atom, red.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash4_torch.emulator.engine import Options, run_ptx
from flash4_torch.emulator.errors import UnsupportedInstruction
from flash4_torch.emulator.report import Report
from tensor_map import aligned_bytes, random_bytes

LANES = 32
SCHEDULES = (Options(schedule="eager"), Options(schedule="late"), Options(schedule="fuzz", seed=3))


def kernel(body: str, params: str = "in, out", declarations: str = "", arch: str = "sm_100a") -> str:
    """A kernel with 64-bit parameters; %<name> holds each, and %lane the thread's number in the warp."""
    names = params.split(", ")
    declared = ", ".join(f".param .u64 {name}" for name in names)
    loads = "\n".join(f".reg .b64 %{name};\n ld.param.u64 %{name}, [{name}];" for name in names)
    return f"""
.version 8.8
.target {arch}
.address_size 64
.visible .entry k({declared})
{{
    .shared .align 1024 .b8 buffer[8192];
    .reg .b32 %lane, %thread, %buffer, %x, %y;
    .reg .b64 %wide, %generic, %p, %q;
    {declarations}
    {loads}
    mov.u32 %lane, %laneid;
    mov.u32 %thread, %tid.x;
    mov.u32 %buffer, buffer;
    {body}
    ret;
}}
"""


def run(
    body: str, *arrays: np.ndarray, params: str = "in, out", declarations: str = "", **options: object
) -> Report:
    return run_ptx(kernel(body, params, declarations), arrays, **options)


def findings(body: str, *arrays: np.ndarray, **options: object) -> list[str]:
    report = run(body, *arrays, check=False, **options)
    return [f"{finding.kind}: {finding.message}" for finding in report.findings]


# --- ld, st

VECTORS = {1: "", 2: ".v2", 4: ".v4", 8: ".v8"}
ACCESSES = [
    (bits, n) for bits in (8, 16, 32, 64) for n in VECTORS if bits * n <= 256 and not (n == 8 and bits < 32)
]


@functools.cache
def copying_kernel(bits: int, count: int, space: str) -> str:
    """A kernel in which each lane moves a vector to `out` through shared memory.

    The places come from `write` and `read`.
    """
    vector, size = VECTORS[count], bits * count // 8
    names = [f"%v{i}" for i in range(count)]
    registers = names[0] if count == 1 else "{" + ", ".join(names) + "}"
    shared, base = (".shared", "%x") if space == "shared" else ("", "%generic")
    to_generic = "cvt.u64.u32 %generic, %x; cvta.shared.u64 %generic, %generic;"
    declarations = f".reg .b{max(bits, 16)} {', '.join(names)};"
    body = f"""
    mad.wide.u32 %p, %lane, {size}, %in;
    ld.global{vector}.b{bits} {registers}, [%p];
    mad.wide.u32 %q, %lane, 4, %write;
    ld.global.u32 %x, [%q];
    mad.lo.u32 %x, %x, {size}, %buffer;
    {to_generic}
    st{shared}{vector}.b{bits} [{base}], {registers};
    bar.warp.sync -1;
    mad.wide.u32 %q, %lane, 4, %read;
    ld.global.u32 %x, [%q];
    mad.lo.u32 %x, %x, {size}, %buffer;
    {to_generic}
    ld{shared}{vector}.b{bits} {registers}, [{base}];
    mad.wide.u32 %p, %lane, {size}, %out;
    st.global{vector}.b{bits} [%p], {registers};
    """
    return kernel(body, "in, out, write, read", declarations)


@pytest.mark.parametrize("space", ["shared", "generic"])
@pytest.mark.parametrize("bits, count", [a for a in ACCESSES if a[0] * a[1] <= 128])
@settings(max_examples=5)
@given(data=st.data())
def test_shared_memory_holds_what_lanes_store(bits: int, count: int, space: str, data: st.DataObject) -> None:
    write = np.array(data.draw(st.permutations(range(LANES))), np.uint32)
    read = np.array(data.draw(st.lists(st.integers(0, LANES - 1), min_size=LANES, max_size=LANES)), np.uint32)
    source = random_bytes(LANES * bits * count // 8, seed=bits + count).reshape(LANES, -1)
    out = aligned_bytes(source.size).reshape(LANES, -1)
    run_ptx(copying_kernel(bits, count, space), [source, out, write, read])
    stored = np.empty_like(source)
    stored[write] = source
    np.testing.assert_array_equal(out, stored[read])


@pytest.mark.parametrize("bits, count", [a for a in ACCESSES if a[0] * a[1] == 256])
def test_loads_of_256_bits(bits: int, count: int) -> None:
    names = ", ".join(f"%v{i}" for i in range(count))
    source, out = random_bytes(LANES * 32, seed=bits), aligned_bytes(LANES * 32)
    run(
        f"""
        mad.wide.u32 %p, %lane, 32, %in;
        ld.global.nc.L1::no_allocate.L2::256B.v{count}.b{bits} {{{names}}}, [%p];
        mad.wide.u32 %p, %lane, 32, %out;
        st.global.v{count}.b{bits} [%p], {{{names}}};
        """,
        source,
        out,
        declarations=f".reg .b{bits} {names};",
    )
    np.testing.assert_array_equal(out, source)


NUMPY_TYPES = {"s": "int", "u": "uint", "f": "float"}


def numpy_type(ptx_type: str) -> np.dtype:
    return np.dtype(NUMPY_TYPES[ptx_type[0]] + ptx_type[1:])


@pytest.mark.parametrize("space", ["global", "param"])
@pytest.mark.parametrize(
    "element, register",
    [(f"{sign}{bits}", r) for sign in "su" for bits in (8, 16, 32) for r in (16, 32, 64) if bits <= r],
)
def test_narrow_elements_are_extended(element: str, register: int, space: str) -> None:
    """PTX ISA, "Operand Size Exceeding Instruction-Type Size": extended by sign if signed, else by zeros."""
    source = np.array([-5]).astype(numpy_type(element))
    out = np.zeros(1, np.uint64)
    place = "[%in]" if space == "global" else "[value]"
    text = kernel(
        f"""
        ld.{space}.{element} %v, {place};
        {"mov.b64 %wide, %v;" if register == 64 else f"cvt.u64.u{register} %wide, %v;"}
        st.global.b64 [%out], %wide;
        """,
        "in, out, value",
        f".reg .b{register} %v;",
    )
    run_ptx(text, [source, out, source.tobytes().ljust(8, b"\0")])
    extended = source.astype(f"int{register}" if element[0] == "s" else f"uint{register}")
    assert out[0] == extended.view(f"uint{register}")[0]


def test_shared_addresses_may_have_64_bits() -> None:
    source, out = np.array([11], np.uint32), np.zeros(1, np.uint32)
    run(
        """
        cvt.u64.u32 %wide, %buffer;
        ld.global.u32 %x, [%in];
        st.shared.u32 [%wide+8], %x;
        ld.shared.u32 %y, [%buffer+8];
        st.global.u32 [%out], %y;
        """,
        source,
        out,
    )
    assert out[0] == 11


def test_a_guard_keeps_the_other_lanes_out() -> None:
    source, out = np.arange(LANES, dtype=np.uint32), np.full(LANES, 7, np.uint32)
    run(
        """
        mad.wide.u32 %p, %lane, 4, %in;
        setp.lt.u32 %some, %lane, 5;
        mov.u32 %x, 99;
        @%some ld.global.u32 %x, [%p];
        mad.wide.u32 %p, %lane, 4, %out;
        setp.lt.u32 %some, %lane, 9;
        @%some st.global.u32 [%p], %x;
        """,
        source,
        out,
        declarations=".reg .pred %some;",
    )
    np.testing.assert_array_equal(out, [0, 1, 2, 3, 4, 99, 99, 99, 99] + [7] * 23)


def test_vectors_of_parameters() -> None:
    out = np.zeros(4, np.uint32)
    text = kernel(
        """
        ld.param.v4.b32 {%a, %b, _, %d}, [value];
        st.global.v4.b32 [%out], {%d, %b, %a, 17};
        """,
        "out",
        ".reg .b32 %a, %b, %d;",
    ).replace(".param .u64 out", ".param .u64 out, .param .align 16 .b8 value[16]")
    run_ptx(text, [out, np.array([1, 2, 3, 4], np.uint32).tobytes()])
    np.testing.assert_array_equal(out, [4, 2, 1, 17])


def test_bulk_zeros() -> None:
    out = np.ones(64, np.uint32)
    run(
        """
        mov.b64 %wide, 128;
        setp.eq.u32 %first, %lane, 0;
        @%first st.bulk.weak.shared::cta [%buffer+16], %wide, 0;
        bar.warp.sync -1;
        mad.lo.u32 %x, %lane, 4, %buffer;
        ld.shared.u32 %y, [%x+16];
        mad.wide.u32 %p, %lane, 4, %out;
        st.global.u32 [%p], %y;
        """,
        out,
        out,
        declarations=".reg .pred %first;",
    )
    np.testing.assert_array_equal(out, [0] * 32 + [1] * 32)


# --- checks


@pytest.mark.parametrize(
    "body, kind",
    [
        ("ld.global.u32 %x, [%in+128];", "out-of-bounds"),
        ("ld.global.u32 %x, [%in+-4];", "out-of-bounds"),
        ("ld.global.v4.u32 {%x, %x, %x, %x}, [%in+120];", "out-of-bounds"),
        ("st.global.u32 [%in+4096], %lane;", "out-of-bounds"),
        ("red.global.add.u32 [%in+128], 1;", "out-of-bounds"),
        ("ld.global.u32 %x, [%in+2];", "misaligned"),
        ("ld.global.v2.u32 {%x, %y}, [%in+4];", "misaligned"),
        ("red.global.add.v2.f32 [%in+4], {%x, %y};", "misaligned"),
        ("red.global.add.v4.f32 [%in+8], {%x, %y, %x, %y};", "misaligned"),
        ("red.global.add.v4.f32 [%in+120], {%x, %y, %x, %y};", "out-of-bounds"),
        ("mad.wide.u32 %p, %lane, 8, %in; ld.global.u32 %x, [%p];", "out-of-bounds"),
        ("ld.shared.u32 %x, [%buffer+8192];", "out-of-bounds"),
        ("ld.shared.u32 %x, [4];", "out-of-bounds"),
        ("st.shared.b64 [%buffer+4], %in;", "misaligned"),
        ("mapa.shared::cluster.u32 %x, %buffer, 1; st.shared::cluster.u32 [%x], %lane;", "out-of-bounds"),
        ("mov.b64 %wide, 12; st.bulk.weak.shared::cta [%buffer], %wide, 0;", "misaligned"),
        (
            "mad.lo.u32 %x, %lane, 8, %buffer; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%y}, [%x];",
            "misaligned",
        ),
    ],
)
def test_wrong_addresses_are_named(body: str, kind: str) -> None:
    (found,) = findings(body, np.zeros(32, np.uint32), np.zeros(32, np.uint32))
    assert found.startswith(kind)


def test_a_wrong_address_is_described() -> None:
    array = np.zeros(32, np.uint32)
    begin = array.ctypes.data
    (found,) = findings("ld.global.u32 %x, [%in+128];", array, params="in")
    assert f"4 bytes at global {begin + 128:#x}" in found
    assert f"[{begin:#x}, {begin + 128:#x})" in found


@pytest.mark.parametrize(
    "instruction",
    [
        "ld.global.frobnicated.u32 %x, [%in];",
        "ld.global.b128 %x, [%in];",
        "ld.global.u32 %x, [%buffer];",
        "atom.global.add.f8 %x, [%in], 1;",
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%x, %y}, [%buffer];",
    ],
)
def test_what_the_engine_lacks_is_refused(instruction: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=instruction.split()[0].replace(".", r"\.")):
        run(instruction, np.zeros(32, np.uint32), params="in")


# --- atom, red

REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
INTEGER_ATOMICS = [
    (op, t)
    for op in REDUCTIONS
    for t in ("u32", "s32", "u64", "s64")
    if (op, t) != ("add", "s64") and (op in ("add", "min", "max") or t[0] == "u")
]


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("operation, element", INTEGER_ATOMICS)
@settings(max_examples=4)
@given(data=st.data())
def test_integer_atomics(operation: str, element: str, space: str, data: st.DataObject) -> None:
    """All lanes act on one place, one after the other: the old values are the steps of a fold."""
    kind = numpy_type(element)
    info = np.iinfo(kind)
    values = data.draw(st.lists(st.integers(int(info.min), int(info.max)), min_size=LANES, max_size=LANES))
    source = np.array(values, kind)
    ptx = element if operation in ("add", "min", "max") else f"b{element[1:]}"
    size = kind.itemsize
    place = "%out" if space == "global" else "%buffer"
    out = np.zeros(1 + LANES, kind)
    run(
        f"""
        mad.wide.u32 %p, %lane, {size}, %in;
        ld.global.b{8 * size} %v, [%p];
        ld.global.b{8 * size} %old, [%out];
        st.{space}.b{8 * size} [{place}], %old;
        bar.warp.sync -1;
        atom.{space}.{operation}.{ptx} %old, [{place}], %v;
        bar.warp.sync -1;
        mad.wide.u32 %p, %lane, {size}, %out;
        st.global.b{8 * size} [%p+{size}], %old;
        ld.{space}.b{8 * size} %v, [{place}];
        st.global.b{8 * size} [%out], %v;
        """,
        source,
        out,
        declarations=f".reg .b{8 * size} %v, %old;",
    )
    with np.errstate(over="ignore"):
        steps = [np.zeros((), kind)]
        for value in source:
            steps.append(REDUCTIONS[operation](steps[-1], value))
    np.testing.assert_array_equal(out, [steps[-1], *steps[:-1]])


@pytest.mark.parametrize("operation, bound", [("inc", 10), ("dec", 10)])
def test_counters_wrap_around(operation: str, bound: int) -> None:
    """PTX ISA, atom: inc counts up to the bound and then from 0; dec down to 0 and then from the bound."""
    out = np.zeros(1 + LANES, np.uint32)
    run(
        f"""
        atom.global.{operation}.u32 %x, [%out], {bound};
        mad.wide.u32 %p, %lane, 4, %out;
        st.global.u32 [%p+4], %x;
        """,
        out,
        params="out",
    )
    up = [i % (bound + 1) for i in range(LANES + 1)]
    expected = up if operation == "inc" else [-i % (bound + 1) for i in up]
    assert [*out[1:], out[0]] == expected


def test_exchange_and_compare_and_swap() -> None:
    out = np.array([3, 5, 0, 0, 0], np.uint32)
    run(
        """
        setp.eq.u32 %first, %lane, 0;
        @!%first bra done;
        atom.global.exch.b32 %x, [%out], 8;
        st.global.u32 [%out+8], %x;
        atom.acq_rel.gpu.global.cas.b32 %x, [%out+4], 5, 6;
        st.global.u32 [%out+12], %x;
        atom.global.cas.b32 %x, [%out+4], 5, 7;
        st.global.u32 [%out+16], %x;
        done:
        """,
        out,
        params="out",
        declarations=".reg .pred %first;",
    )
    np.testing.assert_array_equal(out, [8, 6, 3, 5, 6])


@pytest.mark.parametrize("element", ["f32", "f64", "f16", "f16x2"])
def test_floating_point_sums(element: str) -> None:
    kind = np.dtype({"f32": "f4", "f64": "f8"}.get(element, "f2"))
    each = 2 if element == "f16x2" else 1
    source = np.random.default_rng(1).standard_normal((LANES, each)).astype(kind)
    out = np.zeros(each, kind)
    bits, size = kind.itemsize * 8 * each, kind.itemsize * each
    noftz = ".noftz" if kind.itemsize == 2 else ""
    run(
        f"""
        mad.wide.u32 %p, %lane, {size}, %in;
        ld.global.b{bits} %v, [%p];
        red.relaxed.gpu.global.add{noftz}.{element} [%out], %v;
        """,
        source,
        out,
        declarations=f".reg .b{bits} %v;",
    )
    expected = np.zeros(each, kind)
    for row in source:
        expected = expected + row
    np.testing.assert_array_equal(out, expected)


def test_bfloat16_sums_round_to_nearest_even() -> None:
    """Pairs of bf16: 1 + 2^-8 ties to even, 1 + 3 * 2^-8 rounds up."""
    out = np.array([0x3F80, 0x3F81], np.uint16)  # 1, 1 + 2^-7
    run(
        """
        setp.eq.u32 %first, %lane, 0;
        mov.b32 %x, 0x3B803B80;
        @%first red.global.add.noftz.bf16x2 [%out], %x;
        """,
        out,
        params="out",
        declarations=".reg .pred %first;",
    )
    np.testing.assert_array_equal(out, [0x3F80, 0x3F82])


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    "opcode",
    [
        "red.global.add.v{}.f32",
        "red.relaxed.gpu.global.add.v{}.f32",
        "red.relaxed.gpu.global.add.L2::cache_hint.v{}.f32",
        "red.global.v{}.f32.add",
    ],
)
def test_vector_sums(opcode: str, count: int) -> None:
    """Each element is an atomic of its own; the last spelling is that of the ISA's examples."""
    source = np.random.default_rng(2).standard_normal((LANES, count)).astype(np.float32)
    out = aligned_bytes(16).view(np.float32)
    names = ", ".join(["%a", "%b", "%c", "%d"][:count])
    policy = ", %policy" if "cache_hint" in opcode else ""
    run(
        f"""
        createpolicy.fractional.L2::evict_last.b64 %policy, 1.0;
        mad.wide.u32 %p, %lane, {4 * count}, %in;
        ld.global.v{count}.f32 {{{names}}}, [%p];
        {opcode.format(count)} [%out], {{{names}}}{policy};
        """,
        source,
        out,
        declarations=".reg .f32 %a, %b, %c, %d; .reg .b64 %policy;",
    )
    expected = np.zeros(4, np.float32)
    for row in source:
        expected[:count] = expected[:count] + row
    np.testing.assert_array_equal(out, expected)


def test_global_f32_sums_flush_subnormal_numbers() -> None:
    """PTX ISA, red: atomic f32 addition flushes subnormals in global memory but not in shared memory."""
    tiny = np.float32(1e-40)
    source, out = np.array([tiny], np.float32), np.zeros(2, np.float32)
    run(
        """
        setp.eq.u32 %first, %lane, 0;
        @!%first bra done;
        ld.global.f32 %v, [%in];
        red.global.add.f32 [%out], %v;
        st.shared.f32 [%buffer], 0f00000000;
        red.shared.add.f32 [%buffer], %v;
        ld.shared.f32 %v, [%buffer];
        st.global.f32 [%out+4], %v;
        done:
        """,
        source,
        out,
        declarations=".reg .f32 %v; .reg .pred %first;",
    )
    np.testing.assert_array_equal(out, [0, tiny])


# --- ldmatrix, stmatrix, movmatrix


def fragment(matrix: np.ndarray, transposed: bool) -> np.ndarray:
    """The register of each lane: elements (r, 2c) and (r, 2c+1) in lane 4r+c (PTX ISA, ldmatrix)."""
    return np.ascontiguousarray(matrix.T if transposed else matrix).view(np.uint32).reshape(LANES)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_go_to_registers_and_back(count: int, transposed: bool) -> None:
    rng = np.random.default_rng(count)
    matrices = rng.integers(0, 1 << 16, (count, 8, 8), np.uint16)
    rows = rng.permutation(32)[: 8 * count]  # rows of 16 bytes each, where lane i's address points
    names = ", ".join(f"%m{i}" for i in range(count))
    trans = ".trans" if transposed else ""
    places = np.resize(rows, LANES).astype(np.uint32) * 16
    buffer = np.zeros((32, 8), np.uint16)
    buffer[rows] = matrices.reshape(-1, 8)
    registers = np.zeros((count, LANES), np.uint32)
    back = np.zeros_like(buffer)
    stores = "\n".join(f"st.global.u32 [%p+{128 * i}], %m{i};" for i in range(count))
    run(
        f"""
        mad.wide.u32 %p, %lane, 4, %places;
        ld.global.u32 %x, [%p];
        add.u32 %x, %x, %buffer;
        mad.wide.u32 %p, %lane, 16, %in;
        mad.lo.u32 %y, %lane, 16, %buffer;
        ld.global.v4.u32 {{%a, %b, %c, %d}}, [%p];
        st.shared.v4.u32 [%y], {{%a, %b, %c, %d}};
        bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{names}}}, [%x];
        mad.wide.u32 %p, %lane, 4, %registers;
        {stores}
        st.shared.v4.u32 [%y+1024], {{0, 0, 0, 0}};
        bar.warp.sync -1;
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%x+1024], {{{names}}};
        bar.warp.sync -1;
        ld.shared.v4.u32 {{%a, %b, %c, %d}}, [%y+1024];
        mad.wide.u32 %p, %lane, 16, %back;
        st.global.v4.u32 [%p], {{%a, %b, %c, %d}};
        """,
        buffer,
        places,
        registers,
        back,
        params="in, places, registers, back",
        declarations=f".reg .b32 {names}, %a, %b, %c, %d;",
    )
    np.testing.assert_array_equal(registers, [fragment(m, transposed) for m in matrices])
    np.testing.assert_array_equal(back, buffer)


@pytest.mark.parametrize("instruction", ["ldmatrix", "stmatrix"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_only_the_lanes_of_rows_give_addresses(count: int, instruction: str) -> None:
    """Lanes from 8 times the number of matrices on may hold anything; all others must name rows."""
    names = "{" + ", ".join("%x" for _ in range(count)) + "}"
    operands = f"{names}, [%y]" if instruction == "ldmatrix" else f"[%y], {names}"
    for rows, expected in ((8 * count, []), (8 * count - 1, ["out-of-bounds"])):
        body = f"""
            setp.lt.u32 %row, %lane, {rows};
            selp.b32 %y, %buffer, 1, %row;
            {instruction}.sync.aligned.m8n8.x{count}.shared.b16 {operands};
        """
        found = findings(body, np.zeros(1, np.uint32), params="in", declarations=".reg .pred %row;")
        assert [finding.partition(":")[0] for finding in found] == expected


@pytest.mark.parametrize(
    "instruction",
    [
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%x}, [%buffer];",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%buffer], {%x};",
        "movmatrix.sync.aligned.m8n8.trans.b16 %x, %y;",
    ],
)
def test_part_of_a_warp_moves_no_matrix(instruction: str) -> None:
    """These instructions are aligned ones: all lanes of the warp execute them."""
    body = f"setp.lt.u32 %low, %lane, 31; @%low {instruction}"
    (found,) = findings(body, np.zeros(1, np.uint32), params="in", declarations=".reg .pred %low;")
    assert found == f"divergence: {instruction.partition('.')[0]} by a part of the warp only"


def test_a_matrix_is_transposed_across_lanes() -> None:
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8)
    out = np.zeros_like(matrix)
    run(
        """
        mad.wide.u32 %p, %lane, 4, %in;
        ld.global.u32 %x, [%p];
        movmatrix.sync.aligned.m8n8.trans.b16 %y, %x;
        mad.wide.u32 %p, %lane, 4, %out;
        st.global.u32 [%p], %y;
        """,
        matrix,
        out,
    )
    np.testing.assert_array_equal(out, matrix.T)


# --- addresses, clusters, and order between warps

CLUSTER_BARRIER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


@pytest.mark.parametrize("generic", [False, True])
def test_shared_memory_of_another_cta(generic: bool) -> None:
    """Each CTA of a cluster reads what its neighbour stored: mapa, getctarank, isspacep."""
    out = np.zeros((4, 4), np.uint32)
    to_neighbour = """
        cvt.u64.u32 %generic, %buffer; cvta.shared.u64 %generic, %generic;
        mapa.u64 %generic, %generic, %y; ld.u32 %x, [%generic];
        getctarank.u64 %z, %generic;
    """
    if not generic:
        to_neighbour = """
        mapa.shared::cluster.u32 %x, %buffer, %y; getctarank.shared::cluster.u32 %z, %x;
        cvt.u64.u32 %generic, %x; cvta.shared::cluster.u64 %generic, %generic;
        ld.shared::cluster.u32 %x, [%x];
        """
    run(
        f"""
        mov.u32 %rank, %cluster_ctarank;
        add.u32 %x, %rank, 40;
        st.shared.u32 [%buffer], %x;
        {CLUSTER_BARRIER}
        add.u32 %y, %rank, 1;
        and.b32 %y, %y, 3;
        {to_neighbour}
        isspacep.shared::cluster %cluster, %generic;
        isspacep.shared::cta %cta, %generic;
        selp.u32 %y, 2, 0, %cluster;
        selp.u32 %w, 1, 0, %cta;
        add.u32 %y, %y, %w;
        isspacep.global %cta, %out;
        selp.u32 %w, 1, 0, %cta;
        mad.wide.u32 %p, %rank, 16, %out;
        st.global.v4.u32 [%p], {{%x, %z, %y, %w}};
        {CLUSTER_BARRIER}
        """,
        out,
        params="out",
        grid=(4, 1, 1),
        cluster=(4, 1, 1),
        declarations=".reg .b32 %rank, %z, %w; .reg .pred %cta, %cluster;",
    )
    expected = [[40 + (r + 1) % 4, (r + 1) % 4, 2, 1] for r in range(4)]
    np.testing.assert_array_equal(out, expected)


def test_memory_of_a_cta_that_has_exited_is_refused() -> None:
    body = f"""
    mov.u32 %x, %cluster_ctarank;
    {CLUSTER_BARRIER}
    setp.eq.u32 %first, %x, 0;
    @%first bra done;
    wait:
    ld.relaxed.gpu.global.u32 %x, [%out];
    setp.eq.u32 %first, %x, 0;
    @%first bra wait;
    mapa.shared::cluster.u32 %y, %buffer, 0;
    st.shared::cluster.u32 [%y], %x;
    bra end;
    done:
    st.relaxed.gpu.global.u32 [%out], 1;
    end:
    """
    declarations = ".reg .pred %first;"
    found = findings(
        body,
        np.zeros(1, np.uint32),
        params="out",
        grid=(2, 1, 1),
        cluster=(2, 1, 1),
        declarations=declarations,
    )
    assert [f.split(":")[0] for f in found] == ["exited"]


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: o.schedule)
def test_a_flag_in_global_memory_orders_two_clusters(options: Options) -> None:
    """A later CTA publishes what an earlier one polls for: both are resident, and polls let others run."""
    out = np.zeros(3, np.uint32)
    run(
        """
        mov.u32 %x, %ctaid.x;
        setp.eq.u32 %first, %x, 0;
        @!%first bra producer;
        wait:
        ld.acquire.gpu.global.u32 %x, [%out];
        setp.eq.u32 %ready, %x, 0;
        @%ready bra wait;
        ld.global.u32 %y, [%out+4];
        st.global.u32 [%out+8], %y;
        bra end;
        producer:
        st.global.u32 [%out+4], 77;
        st.release.gpu.global.u32 [%out], 1;
        end:
        """,
        out,
        params="out",
        grid=(2, 1, 1),
        declarations=".reg .pred %first, %ready;",
        options=options,
    )
    np.testing.assert_array_equal(out, [1, 77, 77])


FLAG_BETWEEN_WARPS = """
    setp.lt.u32 %first, %thread, 32;
    @!%first bra consumer;
    st.shared.u32 [%buffer], 5;
    {publish}
    bra end;
    consumer:
    {poll}
    setp.eq.u32 %ready, %x, 0;
    @%ready bra consumer;
    ld.shared.u32 %y, [%buffer];
    st.global.u32 [%out+8], %y;
    end:
"""
FLAGS = [
    ("st.release.cta.global.u32 [%out], 1;", "ld.acquire.cta.global.u32 %x, [%out];"),
    ("red.release.gpu.global.add.u32 [%out], 1;", "ld.acquire.gpu.global.u32 %x, [%out];"),
    ("fence.acq_rel.cta; st.volatile.global.u32 [%out], 1;", "ld.volatile.global.u32 %x, [%out];"),
    ("atom.global.exch.b32 %x, [%out], 1;", "atom.global.or.b32 %x, [%out], 0;"),
]


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: o.schedule)
@pytest.mark.parametrize("publish, poll", FLAGS)
def test_a_flag_orders_shared_memory(publish: str, poll: str, options: Options) -> None:
    out = np.zeros(3, np.uint32)
    run(
        FLAG_BETWEEN_WARPS.format(publish=publish, poll=poll),
        out,
        params="out",
        block=(64, 1, 1),
        declarations=".reg .pred %first, %ready;",
        options=options,
    )
    assert out[2] == 5


def test_a_weak_store_is_no_flag() -> None:
    found = findings(
        FLAG_BETWEEN_WARPS.format(
            publish="st.global.u32 [%out], 1;", poll="ld.relaxed.gpu.global.u32 %x, [%out];"
        ),
        np.zeros(3, np.uint32),
        params="out",
        block=(64, 1, 1),
        declarations=".reg .pred %first, %ready;",
    )
    assert [f.split(":")[0] for f in found] == ["race"]


def test_polling_for_what_never_comes_is_a_deadlock() -> None:
    body = """
    wait:
    ld.acquire.gpu.global.u32 %x, [%out];
    setp.eq.u32 %ready, %x, 0;
    @%ready bra wait;
    """
    (found,) = findings(body, np.zeros(1, np.uint32), params="out", declarations=".reg .pred %ready;")
    assert found.startswith("deadlock")


def test_bytes_are_counted() -> None:
    report = run(
        """
        mad.wide.u32 %p, %lane, 8, %in;
        ld.global.b64 %wide, [%p];
        mad.lo.u32 %x, %lane, 8, %buffer;
        st.shared.b64 [%x], %wide;
        ld.shared.u16 %h, [%x];
        mad.wide.u32 %p, %lane, 2, %out;
        st.global.u16 [%p], %h;
        """,
        np.zeros(32, np.uint64),
        np.zeros(32, np.uint16),
        declarations=".reg .b16 %h;",
    )
    counters = report.counters
    assert (counters.global_read, counters.shared_written) == (256, 256)
    assert (counters.shared_read, counters.global_written) == (64, 64)
