"""The PTX parser: each construct by a small text, numbers by general laws."""

from __future__ import annotations

import re
import struct
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash4_torch.emulator import ptx
from flash4_torch.emulator.errors import EmulatorError, PtxError, UnsupportedInstruction
from flash4_torch.emulator.ptx import Address, Guard, Immediate, Negated, Pair, Register, Symbol, Vector

HEADER = ".version 8.8\n.target sm_90a\n.address_size 64\n"
DECLARED = ".reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %rd<8>;\n"

R1, R2, R3 = (Register(f"%r{i}", "b32") for i in (1, 2, 3))
RD1 = Register("%rd1", "b64")
P1, P2 = (Register(f"%p{i}", "pred") for i in (1, 2))

laws = settings(derandomize=True, deadline=None, max_examples=100)


def parse_body(body: str, params: str = "", before: str = "", limits: str = "") -> ptx.Kernel:
    text = f"{HEADER}{before}.visible .entry kernel({params})\n{limits}{{\n{DECLARED}{body}\n}}\n"
    (kernel,) = ptx.parse(text).kernels
    return kernel


def parse_operands(statement: str, **context: str) -> tuple[ptx.Operand, ...]:
    return parse_body(statement + " ret;", **context).instructions[0].operands


# --- modules and kernels


def test_module() -> None:
    module = ptx.parse(HEADER + ".entry a() { ret; }\n.visible .entry b { ret; }")
    assert (module.version, module.target, module.arch) == ("8.8", "sm_90a", 90)
    assert [kernel.name for kernel in module.kernels] == ["a", "b"]
    assert ptx.parse(".version 8.7\n.target sm_100a, debug\n").arch == 100


@pytest.mark.parametrize("missing", ["version", "target"])
def test_header_is_required(missing: str) -> None:
    with pytest.raises(PtxError, match=rf"no \.{missing}"):
        ptx.parse("".join(line for line in HEADER.splitlines(keepends=True) if missing not in line))


def test_parameters_are_packed_by_alignment() -> None:
    kernel = parse_body(
        "ret;",
        params=""".param .u8 flag, .param .align 8 .b8 view[20],
            .param .u64 .ptr .global .align 16 data, .param .f32 scale,
            .param .align 64 .b8 map[128], .param .u16 half""",
    )
    assert [(p.name, p.size, p.alignment, p.offset) for p in kernel.params] == [
        ("flag", 1, 1, 0),
        ("view", 20, 8, 8),
        ("data", 8, 8, 32),
        ("scale", 4, 4, 40),
        ("map", 128, 64, 64),
        ("half", 2, 2, 192),
    ]


def test_limits() -> None:
    kernel = parse_body(
        "ret;",
        limits=".reqntid 384, 1, 1\n.maxntid 512\n.minnctapersm 2\n.maxnreg 168\n.reqnctapercluster 2,1\n",
    )
    assert (kernel.reqntid, kernel.maxntid, kernel.cluster) == ((384, 1, 1), (512, 1, 1), (2, 1, 1))
    assert (kernel.minnctapersm, kernel.max_registers) == (2, 168)
    plain = parse_body("ret;")
    assert (plain.reqntid, plain.maxntid, plain.cluster) == (None, None, None)
    assert (plain.minnctapersm, plain.max_registers) == (None, None)


def test_shared_variables_are_those_that_the_kernel_can_reach() -> None:
    kernel = parse_body(
        """.shared .align 16 .b8 ring[1024]; .shared .u64 barrier;
        mov.b32 %r1, dynamic; mov.b32 %r2, table; ret;""",
        before=""".extern .shared .align 1024 .b8 dynamic[];
            .shared .b32 table[2][3]; .shared .b32 of_another_kernel;\n""",
    )
    found = {v.name: (v.size, v.alignment, v.dynamic) for v in kernel.shared}
    assert found == {
        "dynamic": (0, 1024, True),
        "table": (24, 4, False),
        "ring": (1024, 16, False),
        "barrier": (8, 8, False),
    }


def test_local_variables() -> None:
    kernel = parse_body(".local .align 16 .b8 depot[64]; mov.b64 %rd1, depot; ret;")
    assert [(v.name, v.size, v.alignment) for v in kernel.local] == [("depot", 64, 16)]


@pytest.mark.parametrize(
    ("declaration", "content"),
    [
        (".global .align 64 .b8 x[4] = {1, 2, 0xFF};", bytes([1, 2, 255, 0])),
        (".const .b32 x = -2;", struct.pack("<i", -2)),
        (".const .f32 x[2] = {0f3F800000, 3};", struct.pack("<2f", 1, 3)),
        (".global .f64 x = 0.5;", struct.pack("<d", 0.5)),
        (".global .u16 x[2][2] = {{1, 2}, {3, 4}};", struct.pack("<4H", 1, 2, 3, 4)),
        (".global .u64 x[] = {7, 8};", struct.pack("<2Q", 7, 8)),
        (".visible .global .b32 x[3];", bytes(12)),
    ],
)
def test_global_variables_have_storage(declaration: str, content: bytes) -> None:
    kernel = parse_body("mov.b64 %rd1, x; ret;", before=declaration + "\n")
    (variable,) = kernel.variables
    assert variable.data.tobytes() == content
    assert variable.constant == (".const" in declaration)
    assert kernel.globals == {"x": variable.data.ctypes.data}
    assert variable.address % (64 if "align" in declaration else 2) == 0


# --- lines and sources


def test_sources_follow_loc_and_file() -> None:
    text = f"""{HEADER}.visible .entry kernel()
{{
    .reg .b32 %r<3>;
    mov.b32 %r1, 0;
    .loc 1 12 5
    mov.b32 %r1, 1;
    mov.b32 %r1, 2;
    .loc 2 40 3, function_name $L__info_string0, inlined_at 1 20 5
    mov.b32 %r1, 3;
    .loc 1 0 0
    ret;
}}
    .file 1 "/kernels/a // b.py"
    .file 2 "/kernels/c.py", 1700000000, 512
    .section .debug_str
    {{
.b8 95, 90
    }}
"""
    (kernel,) = ptx.parse(text).kernels
    assert [ins.source for ins in kernel.instructions] == [
        None,
        ("/kernels/a // b.py", 12),
        ("/kernels/a // b.py", 12),
        ("/kernels/c.py", 40),
        None,
    ]
    lines = text.splitlines()
    for ins in kernel.instructions:
        assert lines[ins.line - 1].strip() == ins.text + ";"


def test_comments_keep_the_lines() -> None:
    kernel = parse_body("// one; two\n/* three;\n\n four */ mov.b32 %r1, /* 7 */ 8; // end\nret;")
    move, leave = kernel.instructions
    assert move.text == "mov.b32 %r1, 8"
    assert leave.line == move.line + 1 == HEADER.count("\n") + 8


# --- instructions and scopes


def test_instruction() -> None:
    kernel = parse_body(
        """@%p1 add.s32\t%r1, %r2,
            -5; @!%p2 bra.uni end; bar.sync 0; cp.async.wait_all; end: ret;"""
    )
    add, branch, barrier, wait, _ = kernel.instructions
    assert (add.guard, add.opcode, add.operands) == (Guard(P1, False), "add.s32", (R1, R2, Immediate(-5)))
    assert add.text == "@%p1 add.s32 %r1, %r2, -5"
    assert (branch.guard, branch.operands) == (Guard(P2, True), (Symbol("end"),))
    assert (barrier.guard, barrier.operands) == (None, (Immediate(0),))
    assert wait.operands == ()
    assert kernel.labels == {"end": 4}


def test_inline_assembly_scopes_have_their_own_names() -> None:
    wait = """// begin inline asm
    {
    .reg .pred p, q;
    .reg .b32 x_<2>;
    LAB_WAIT:
    mbarrier.try_wait.parity.shared.b64 p, [%r1], x_1;
    @p bra.uni DONE;
    bra.uni LAB_WAIT;
    DONE:
    }
    // end inline asm
    """
    kernel = parse_body(wait + wait + "ret;")
    assert kernel.labels == {"LAB_WAIT#1": 0, "DONE#1": 3, "LAB_WAIT#2": 3, "DONE#2": 6}
    for start, scope in ((0, "#1"), (3, "#2")):
        poll, leave, again = kernel.instructions[start : start + 3]
        assert poll.operands == (
            Register("p" + scope, "pred"),
            Address(R1),
            Register("x_1" + scope, "b32"),
        )
        assert leave.guard == Guard(Register("p" + scope, "pred"), False)
        assert (leave.operands, again.operands) == (
            (Symbol("DONE" + scope),),
            (Symbol("LAB_WAIT" + scope),),
        )
    assert kernel.registers["q#2"] == "pred"
    assert kernel.registers["%r1"] == "b32"


def test_scopes_nest_and_fit_on_one_line() -> None:
    kernel = parse_body(
        "{ .reg .b32 a; mov.b32 a, 1; { .reg .b64 a; mov.b64 a, 2; bra out; } mov.b32 a, 3; } out: ret;"
    )
    moves = [ins.operands[0] for ins in kernel.instructions if ins.opcode.startswith("mov")]
    assert moves == [Register("a#1", "b32"), Register("a#2", "b64"), Register("a#1", "b32")]
    assert kernel.instructions[2].operands == (Symbol("out"),)


def test_a_scope_ends_its_names() -> None:
    with pytest.raises(PtxError, match="hidden is not a declared name"):
        parse_body("{ .reg .b32 hidden; } mov.b32 hidden, 1; ret;")


def test_branch_targets_become_a_vector_of_labels() -> None:
    kernel = parse_body("table: .branchtargets one, two;\nbrx.idx %r1, table; one: nop; two: ret;")
    assert kernel.instructions[0].operands == (R1, Vector((Symbol("one"), Symbol("two"))))


def test_pragma_is_skipped() -> None:
    assert len(parse_body('.pragma "nounroll"; ret;').instructions) == 1


@pytest.mark.parametrize(
    ("body", "opcodes"),
    [
        ("", ["ret"]),
        ("nop;", ["nop", "ret"]),
        ("@%p1 ret;", ["ret", "ret"]),
        ("bra end; end:", ["bra", "ret"]),
        ("loop: bra loop;", ["bra"]),
        ("exit;", ["exit"]),
    ],
)
def test_a_body_that_can_run_off_its_end_returns(body: str, opcodes: list[str]) -> None:
    assert [ins.opcode for ins in parse_body(body).instructions] == opcodes


# --- operands


@pytest.mark.parametrize(
    ("statement", "operands"),
    [
        ("mov.b64 {%r1, _}, %rd1;", (Vector((R1, ptx.SINK)), RD1)),
        ("setp.lt.and.s32 %p1|%p2, %r1, 4, !%p2;", (Pair(P1, P2), R1, Immediate(4), Negated(P2))),
        ("elect.sync _|%p1, -1;", (Pair(ptx.SINK, P1), Immediate(-1))),
        ("mov.u32 %r1, %tid.x;", (R1, Register("%tid.x", special=True))),
        ("mov.u32 %r1, %dynamic_smem_size;", (R1, Register("%dynamic_smem_size", special=True))),
        ("mov.u32 %r1, WARP_SZ;", (R1, Immediate(32))),
        ("ld.global.v2.b32 {%r1,%r2}, [%rd1+16];", (Vector((R1, R2)), Address(RD1, 16))),
        ("ld.global.b32 %r1, [%rd1+-8];", (R1, Address(RD1, -8))),
        ("ld.global.b32 %r1, [%rd1 - 0x10];", (R1, Address(RD1, -16))),
        ("ld.shared.b32 %r1, [64];", (R1, Address(64))),
        ("ld.shared.b32 %r1, [buffer+4];", (R1, Address(Symbol("buffer"), 4))),
        ("ld.param.b64 %rd1, [size];", (RD1, Address(Symbol("size")))),
        (
            "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, 0}], [%r3+128];",
            (Address(RD1, 0, (R1, Immediate(0))), Address(R3, 128)),
        ),
        ("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {%r2};", (Address(R1), Vector((R2,)))),
    ],
)
def test_operands(statement: str, operands: tuple[ptx.Operand, ...]) -> None:
    context = {"params": ".param .u64 size", "before": ".shared .b32 buffer[4];\n"}
    assert parse_operands(statement, **context) == operands


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", Immediate(0)),
        ("-17", Immediate(-17)),
        ("0x1F", Immediate(31)),
        ("0xFFFFFFFFFFFFFFFFU", Immediate(2**64 - 1)),
        ("017", Immediate(15)),
        ("0b101", Immediate(5)),
        ("10U", Immediate(10)),
        ("0f3F800000", Immediate(0x3F800000, "f32")),
        ("-0f3F800000", Immediate(0xBF800000, "f32")),
        ("0D3ff0000000000000", Immediate(0x3FF0000000000000, "f64")),
        ("1.0", Immediate(0x3FF0000000000000, "f64")),
        ("-2e0", Immediate(0xC000000000000000, "f64")),
    ],
)
def test_numbers(text: str, number: Immediate) -> None:
    assert parse_operands(f"mov.b64 %rd1, {text};") == (RD1, number)


@laws
@given(st.integers(-(2**63), 2**64 - 1), st.sampled_from([4, 8]))
def test_integer_bits_are_twos_complement(value: int, width: int) -> None:
    (_, number) = parse_operands(f"mov.b64 %rd1, {value};")
    assert isinstance(number, Immediate)
    assert number.bits(width) == value % 2 ** (8 * width)
    assert number.bits(0) == (value != 0)


@laws
@given(st.floats(width=32, allow_nan=False))
def test_float_bits_follow_the_width_of_the_operand(value: float) -> None:
    single, double = (int.from_bytes(struct.pack(form, value), "big") for form in (">f", ">d"))
    (_, of_single) = parse_operands(f"mov.b64 %rd1, 0f{single:08X};")
    (_, of_double) = parse_operands(f"mov.b64 %rd1, 0d{double:016X};")
    for number in (of_single, of_double):
        assert isinstance(number, Immediate)
        assert (number.bits(4), number.bits(8)) == (single, double)


def test_a_double_beyond_floats_becomes_infinity() -> None:
    assert Immediate(*_double(1e300)).bits(4) == 0x7F800000


def _double(value: float) -> tuple[int, str]:
    return int.from_bytes(struct.pack(">d", value), "big"), "f64"


# --- what is wrong


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (".weird 3; ret;", "unknown directive"),
        ("mov.b32 %r1, %r99; ret;", "%r99 is not a declared name"),
        ("mov.b32 %r1, %tidy.x; ret;", "%tidy.x is not a declared name"),
        ("mov.b32 %r1, 12abc; ret;", "12abc is not a declared name"),
        ("mov.b32 %r1, 089; ret;", "089 is not a declared name"),
        ("mov.b32 %r1, 0f3F80; ret;", "0f3F80 is not a declared name"),
        ("mov.b32 %r1, , 2; ret;", "an empty operand"),
        ("bra nowhere; ret;", "nowhere is not a declared name"),
        ("ld.shared.b32 %r1, [%r2+%r3]; ret;", "cannot read the address"),
        ("ld.shared.b32 %r1, [%r2+x]; ret;", "offset of"),
        ("ld.shared.b32 %r1, [{%r2}]; ret;", "cannot read the address"),
        ("ld.shared.b32 %r1, [1.5]; ret;", "cannot read the address"),
        ("mov.b64 {%r1, %r2; ret;", "unknown directive or instruction"),
        ("add.s32 %r1, [%r2; ret;", "cannot read the operands"),
        ("@5 bra end; end: ret;", "unknown directive or instruction"),
        ("setp.eq.s32 %p1|7, %r1, 0; ret;", "7 is not a register"),
        (".reg .v2 .b32 %v; ret;", "registers of type .v2"),
        (".reg .b32 5; ret;", "cannot read reg_names"),
        ("same: same: ret;", "label defined twice"),
        (".global .b32 x; ret;", "only shared and local"),
        ("{ .shared .b32 x; } ret;", "inner scope"),
        (".shared .b32 x = 3; ret;", "initial value"),
        (".shared .tile x; ret;", "type .tile"),
        (".loc 7 1 1\n ret;", "file 7"),
        ("call (%r1), f, (%r2); ret;", "(%r1) is not a declared name"),
    ],
)
def test_errors_in_a_body_name_the_line(body: str, message: str) -> None:
    with pytest.raises(PtxError, match=re.escape(message)) as caught:
        parse_body("\n\n" + body)
    assert caught.value.line >= HEADER.count("\n") + 6
    assert caught.value.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".func f() { ret; }", "unknown directive"),
        ("}", "unknown directive"),
        (".entry k() .unheard 3 { ret; }", "unknown directive"),
        (".entry k(.param .weird x) { ret; }", "type .weird"),
        (".entry k(.reg .b32 x) { ret; }", "cannot read params"),
        (".entry k() { ret;", "has no end"),
        (".extern .global .b32 x;", "other modules"),
        (".global .b64 x = y;", "must be a number"),
        (".global .b8 x[1] = {1, 2};", "more initial values"),
    ],
)
def test_errors_in_a_module_name_the_line(text: str, message: str) -> None:
    with pytest.raises(PtxError, match=message) as caught:
        ptx.parse(HEADER + "\n" + text)
    assert caught.value.line == HEADER.count("\n") + 2


def test_error_texts() -> None:
    error = UnsupportedInstruction("foo.b32: no such thing", 12, ("kernel.py", 34))
    assert isinstance(error, EmulatorError)
    assert str(error) == "PTX line 12 (kernel.py:34): unsupported instruction foo.b32: no such thing"
    assert "(" not in str(UnsupportedInstruction("foo", 12, None))
    assert str(PtxError("odd", 3, ".odd")) == "PTX line 3: odd: .odd"


def test_the_work_of_parsing_grows_as_the_text_does() -> None:
    """It is counted in calls, of Python's and of C's functions, so that no machine is too slow for it."""
    body = "add.s32 %r1, %r2, 3;\n@%p1 ld.global.v2.b32 {%r1, %r2}, [%rd1+16];\n"

    def calls(times: int) -> int:
        count = 0

        def counted(*_: object) -> None:
            nonlocal count
            count += 1

        before = sys.getprofile()
        sys.setprofile(counted)
        try:
            instructions = parse_body(body * times + "ret;").instructions
        finally:
            sys.setprofile(before)
        assert len(instructions) == 2 * times + 1
        return count

    calls(1)  # What is kept after the first text is no work of the others.
    assert calls(2_000) < 2.1 * calls(1_000)
