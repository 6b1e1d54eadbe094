"""`run_ptx` runs any text, arguments and options it gets, or raises an error that says what is wrong.

A form is an opcode with operands. The tests try right forms with one operand added or removed, or with an
operand of another kind, width or value in place of one. FLASH4_TEST_ALL=1 tries all of them, otherwise a
sample is tried.
"""

from __future__ import annotations

import contextlib
import random
import re
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everything import EVERYTHING
from flash4_torch.emulator import engine, ptx
from flash4_torch.emulator.engine import Options, Program, run_ptx
from flash4_torch.emulator.errors import EmulatorError, LaunchError, PtxError, UnsupportedInstruction
from flash4_torch.emulator.lower.base import FAMILIES, find
from flash4_torch.emulator.lower.forms import FORMS
from flash4_torch.emulator.report import EmulationError
from test_races import LAWS, Law, in_order
from test_races import kernel as law_kernel

OURS = (PtxError, UnsupportedInstruction, EmulationError, LaunchError)
SAMPLE = 2000
BRIEF = Options(max_instructions=5000, timeout=20)

# Right forms in the order of flash4_torch/emulator/lower, and opcodes that lack a modifier they need.
RIGHT = """
add.u32 %r1, %r2, 3
add.sat.s32 %r1, %r2, %r3
add.cc.u32 %r1, %r2, %r3
add.f32 %f1, %f2, 1.5
add.rz.ftz.f32 %f1, %f2, %f3
add.f64 %e1, %e2, %e3
add.f16x2 %r1, %r2, %r3
add.u64 %d1, %d2, 5
sub.s16 %h1, %h2, 1
add.f32.bf16 %f1, %h1, %f2
mul.lo.u32 %r1, %r2, 3
mul.wide.u32 %d1, %r2, %r3
mul.hi.u64 %d1, %d2, %d3
mul.wide.u16 %r1, %h1, %h2
mad.lo.s32 %r1, %r2, %r3, 4
mad.wide.s32 %d1, %r2, %r3, %d2
fma.rn.f32 %f1, %f2, %f3, %f4
fma.rn.f32x2 %d1, %d2, %d3, %d4
div.u32 %r1, %r2, %r3
div.s32 %r1, %r2, 0
rem.u64 %d1, %d2, %d3
neg.s32 %r1, %r2
abs.f64 %e1, %e2
min.s32 %r1, %r2, %r3
max.f32 %f1, %f2, %f3
max.f32 %f1, %f2, %f3, %f4
min.NaN.bf16x2 %r1, %r2, %r3
rcp.approx.ftz.f32 %f1, %f2
sqrt.rn.f64 %e1, %e2
ex2.approx.ftz.f32 %f1, %f2
tanh.approx.f32 %f1, %f2
addc.cc.u32 %r1, %r2, %r3
madc.lo.u32 %r1, %r2, %r3, %r4
sad.u32 %r1, %r2, %r3, %r4
dp4a.u32.u32 %r1, %r2, %r3, %r4
copysign.f32 %f1, %f2, %f3
and.b32 %r1, %r2, 7
and.pred %p1, %p2, %p3
not.b64 %d1, %d2
not.pred %p1, %p2
cnot.b32 %r1, %r2
shl.b32 %r1, %r2, 3
shr.s64 %d1, %d2, %r1
shf.l.wrap.b32 %r1, %r2, %r3, %r4
bfe.u32 %r1, %r2, %r3, %r4
bfe.s64 %d1, %d2, %r1, %r2
bfi.b32 %r1, %r2, %r3, 1, 2
bfind.u32 %r1, %r2
bfind.shiftamt.u64 %r1, %d2
clz.b32 %r1, %r2
popc.b64 %r1, %d1
brev.b32 %r1, %r2
lop3.b32 %r1, %r2, %r3, %r4, 0x96
prmt.b32 %r1, %r2, %r3, 0x5410
prmt.b32.f4e %r1, %r2, %r3, %r4
setp.lt.u32 %p1, %r1, 2
setp.eq.f32 %p1|%p2, %f1, %f2
setp.ne.and.s32 %p1, %r1, 0, !%p2
set.lt.u32.f32 %r1, %f1, %f2
selp.b32 %r1, %r2, 3, %p1
selp.f64 %e1, %e2, %e3, !%p1
slct.u32.s32 %r1, %r2, %r3, %r4
testp.finite.f32 %p1, %f1
mov.b32 %r1, %r2
mov.u32 %r1, %tid.x
mov.u64 %d1, buffer
mov.b64 %d1, {%r1, %r2}
mov.b64 {%r1, _}, %d1
mov.b32 {%h1, %h2}, %r1
mov.pred %p1, %p2
mov.u64 %d1, %clock64
cvt.u32.u64 %r1, %d1
cvt.rn.f32.s32 %f1, %r1
cvt.rzi.s32.f32 %r1, %f1
cvt.rn.bf16x2.f32 %r1, %f1, %f2
cvt.rn.f16.f32 %h1, %f1
cvt.f32.f16 %f1, %h1
cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f2
cvt.rn.f16x2.e4m3x2 %r1, %h1
cvt.sat.u8.s32 %r1, %r2
cvt.rni.f32.f32 %f1, %f2
cvt.s64.s8 %d1, %r1
cvt.rna.tf32.f32 %r1, %f1
shfl.sync.bfly.b32 %r1|%p1, %r2, 1, 31, -1
vote.sync.ballot.b32 %r1, %p1, -1
vote.sync.any.pred %p1, !%p2, -1
match.any.sync.b32 %r1, %r2, -1
match.all.sync.b64 %r1|%p1, %d1, -1
redux.sync.add.u32 %r1, %r2, -1
redux.sync.max.NaN.f32 %f1, %f2, -1
activemask.b32 %r1
elect.sync _|%p1, -1
nanosleep.u32 100
ld.global.u32 %r1, [%d1]
ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%d1+16]
ld.shared.v2.b64 {%d2, %d3}, [%r1]
ld.param.u64 %d2, [data]
ld.u8 %r2, [%d1]
ld.global.s8 %h1, [%d1]
ld.acquire.gpu.global.u32 %r2, [%d1]
ld.global.v8.b32 {%r1, %r2, %r3, %r4, %r1, %r2, %r3, %r4}, [%d1]
ld.volatile.shared.u16 %h1, [buffer]
st.global.u32 [%d1], %r2
st.shared.v4.b32 [%r1], {%r1, %r2, %r3, %r4}
st.release.gpu.global.u32 [%d1], 5
st.shared::cluster.u32 [%r1], %r2
st.bulk.weak.shared::cta [%r1], %d2, 0
atom.global.add.u32 %r1, [%d1], 1
atom.shared.cas.b64 %d2, [%r1], %d3, %d4
atom.global.add.v2.f32 {%f1, %f2}, [%d1], {%f3, %f4}
red.global.add.f32 [%d1], %f1
red.global.add.noftz.bf16x2 [%d1], %r1
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r1]
stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%r1], {%r2, %r3}
movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r2
cvta.to.global.u64 %d2, %d1
cvta.shared.u64 %d2, %d3
mapa.shared::cluster.u32 %r2, %r1, 0
mapa.u64 %d2, %d1, %r1
getctarank.shared::cluster.u32 %r2, %r1
isspacep.shared %p1, %d1
prefetch.global.L2 [%d1]
createpolicy.fractional.L2::evict_last.b64 %d2, 1.0
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1, {%r2, %r3}], [%r4]
cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%d1, {%r2}], [%r4], %h1
cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%d1, {%r2, %r3, %r4}], [%r1]
cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%d1, {%r2, %r3}], [%r1]
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1], 16, [%r4]
cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%d1], [%r1], 16, %d2
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r1], 16, [%r4]
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d1], [%r1], 16
cp.async.bulk.commit_group
cp.async.bulk.wait_group.read 0
cp.async.cg.shared.global [%r1], [%d1], 16
cp.async.ca.shared.global [%r1], [%d1], 4, %r2
cp.async.ca.shared.global [%r1], [%d1], 8, %p1
cp.async.commit_group
cp.async.wait_group 1
cp.async.wait_all
cp.async.mbarrier.arrive.noinc.shared.b64 [%r4]
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r1], {%r2, %r3}, [%r4]
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r1], %r2, [%r4]
tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r1], %d1
tensormap.replace.tile.box_dim.b1024.b32 [%d1], 2, %r2
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%d1], [%r1], 128
bra END
bra.uni END
brx.idx %r2, {END}
ret
exit
trap
nop
fence.acq_rel.gpu
membar.cta
fence.proxy.async.shared::cta
fence.proxy.async
fence.mbarrier_init.release.cluster
fence.proxy.tensormap::generic.acquire.gpu [%d1], 128
griddepcontrol.wait
setmaxnreg.dec.sync.aligned.u32 24
bar.warp.sync -1
bar.sync 0
bar.sync 1, 32
bar.arrive 1, 64
barrier.cta.sync.aligned 0
bar.red.popc.u32 %r1, 0, 32, %p1
barrier.cta.red.and.aligned.pred %p1, 0, !%p2
barrier.cluster.arrive.aligned
barrier.cluster.wait.aligned
mbarrier.init.shared::cta.b64 [%r4], 1
mbarrier.inval.shared.b64 [%r4]
mbarrier.arrive.shared::cta.b64 %d2, [%r4]
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 16
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4], 1
mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r4], 16
mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r4], 0, 1000
mbarrier.test_wait.shared::cta.b64 %p1, [%r4], %d2
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r1, %r2}, {%f1, %f2, %f3, %f4}
mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%r1, %r2}, {%r1, %r2}, {%r1}, {%r3, %r4}
wgmma.fence.sync.aligned
wgmma.commit_group.sync.aligned
wgmma.wait_group.sync.aligned 0
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %d2, %d3, %p1, 1, 1, 0, 0
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, %d3, 1, 1, 1, 0
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned
tcgen05.wait::ld.sync.aligned
tcgen05.fence::after_thread_sync
tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r3]
tcgen05.st.sync.aligned.16x32bx2.x2.b32 [%r3], 16, {%r1, %r2}
tcgen05.ld.red.sync.aligned.32x32b.x2.max.f32 {%f1, %f2}, %f3, [%r3]
tcgen05.mma.cta_group::1.kind::f16 [%r3], %d2, %d3, %r2, {%r1, %r2, %r3, %r4}, %p1
tcgen05.mma.cta_group::1.kind::tf32 [%r3], [%r2], %d3, %r2, %p1, 3
tcgen05.cp.cta_group::1.128x256b [%r3], %d2
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4]
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r4], %h1
"""  # noqa: E501
BARE = """
add mul.wide mad shl.pred shf.b32 setp setp.and.u32 set.u32 slct.u32 testp.f32 cvt cvt.u32
cvt.foo.bar shfl.sync.b32 vote.sync.pred match.any.sync redux.sync.u32 isspacep ld ld.global atom
atom.add red.async st.async ldmatrix prmt.b32.f4e.b4e cp.async.bulk.tensor cp.async.bulk
cp.reduce.async.bulk cp.reduce.async.bulk.tensor.1d tensormap.replace mma.sync wgmma.mma_async
tcgen05.ld tcgen05.mma tcgen05.commit bar barrier barrier.cluster mbarrier.arrive fence
"""
OTHERS = [
    "%r1",
    "%d1",
    "%h1",
    "%p1",
    "%q1",
    "%f1",
    "%e1",
    "_",
    "7",
    "-1",
    "99999999999999999999999",
    "1.5",
    "0f3F800000",
    "0d3FF0000000000000",
    "%tid.x",
    "%laneid",
    "%is_explicit_cluster",
    "%clock64",
    "buffer",
    "data",
    "END",
    "!%p1",
    "!%r1",
    "%r1|%p1",
    "%r1|%r2",
    "_|_",
    "[%r1]",
    "[%d1]",
    "[%h1]",
    "[%p1]",
    "[%tid.x]",
    "[buffer]",
    "[data]",
    "[data+4000]",
    "[END]",
    "[0]",
    "[%r1+99999999999999999999]",
    "[%d1,{%r1}]",
    "[%d1,{%p1,%r1}]",
    "{%r1}",
    "{%r1,%r2}",
    "{%d1,%d2}",
    "{%p1,%p2}",
    "{_,_}",
    "{1,2}",
    "{%r1,[%r2]}",
    "{%r1,%r2,%r3,%r4,%r1,%r2,%r3,%r4,%r1,%r2,%r3,%r4,%r1,%r2,%r3,%r4}",
    "{END,END}",
]

DECLARED = """
.reg .b32 %r<8>; .reg .b64 %d<8>; .reg .b16 %h<4>; .reg .pred %p<4>; .reg .b128 %q<2>; .reg .f32
%f<5>; .reg .f64 %e<4>; .shared .align 128 .b8 buffer[1024];
"""
# Valid addresses, so that whatever is not refused does its work.
START = """
ld.param.u64 %d1, [data]; mov.u32 %r1, buffer; mov.b32 %r2, 1; mov.b32 %r3, 0; add.u32 %r4, %r1,
512; mov.b64 %d2, 8; mov.b64 %d3, 0; mov.b64 %d4, 1; mov.b16 %h1, 1; mov.b16 %h2, 2; setp.eq.u32
%p1, %r1, %r1; setp.ne.u32 %p2, %r1, %r1;
"""


def kernel(body: str, arch: str) -> str:
    return (
        f".version 8.8\n.target {arch}\n.entry k(.param .u64 data)\n{{{DECLARED}{START}\n{body}\nEND: ret; }}"
    )


def rights() -> list[tuple[str, list[str]]]:
    """The right forms: opcodes and operands."""
    forms = []
    for text in RIGHT.strip().splitlines():
        opcode, _, operands = text.strip().partition(" ")
        forms.append((opcode, re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,\s])+", operands)))
    return forms


def wrongs() -> Iterator[str]:
    for opcode, operands in [*rights(), *((opcode, ["%r1", "%r2"]) for opcode in BARE.split())]:
        n = len(operands)
        changed = [operands[:i] + operands[i + 1 :] for i in range(n)]
        changed += [[*operands, other] for other in OTHERS]
        changed += [[*operands[:i], other, *operands[i + 1 :]] for i in range(n) for other in OTHERS]
        yield from (f"{opcode} {', '.join(each)};" for each in changed)
        parts = opcode.split(".")
        yield from (
            f"{'.'.join(parts[:i] + parts[i + 1 :])} {', '.join(operands)};" for i in range(1, len(parts))
        )


def outcome(body: str) -> str:
    """The outcome of a kernel: "runs", or the name of an error, one of OURS."""
    arch = "sm_90a" if body.startswith("wgmma") else "sm_100a"
    try:
        run_ptx(kernel(body, arch), [np.zeros(64, np.uint32)], options=BRIEF)
    except OURS as error:
        return type(error).__name__
    return "runs"


@pytest.mark.parametrize("form", rights(), ids=lambda form: form[0])
def test_right_forms_are_taken(form: tuple[str, list[str]]) -> None:
    """A right form may still misbehave at run time: there is no tensor map and no MMA to wait for."""
    opcode, operands = form
    assert outcome(f"{opcode} {', '.join(operands)};") in ("runs", "EmulationError")


def test_every_family_has_forms_and_is_tried() -> None:
    tried = {find(opcode) for opcode, _ in rights()}
    assert set(FAMILIES.values()) == tried
    assert set(FORMS) >= {p for p in FAMILIES if find(p) and p.count(".") == 0 and p not in ("vote", "match")}


def test_wrong_forms_are_refused_or_run() -> None:
    every = list(dict.fromkeys(wrongs()))
    forms = every if EVERYTHING else random.Random(0).sample(every, SAMPLE)
    counts = Counter(outcome(form) for form in forms)
    print(dict(counts), "of", len(every))
    assert counts["PtxError"] > counts["runs"]


# --- texts that are not PTX

ODD = st.one_of(
    st.sampled_from(
        [
            *OTHERS,
            "{",
            "}",
            "[",
            "]",
            ";",
            ",",
            ":",
            "@",
            "!",
            "|",
            "<",
            ">",
            "\n",
            '"',
            "//",
            "/*",
            "0x",
            "-",
        ]
    ),
    st.sampled_from(
        [
            ".reg",
            ".pred",
            ".b32",
            ".align 3",
            ".shared",
            ".global .b8 z[010];",
            ".entry",
            ".param",
            "ret;",
            "bra",
        ]
    ),
    st.integers(-(2**70), 2**70).map(str),
    st.text(max_size=4),
)
EDITS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12), ODD), max_size=4)


def runs_or_refuses(text: str) -> None:
    with contextlib.suppress(*OURS):
        run_ptx(text, [np.zeros(1024, np.uint32)], block=(64, 1, 1), options=BRIEF)


@settings(derandomize=True, deadline=None, max_examples=4000 if EVERYTHING else 80)
@given(st.sampled_from(LAWS), EDITS, st.floats(0, 1))
def test_edited_and_truncated_texts(law: Law, edits: list[tuple[float, int, str]], end: float) -> None:
    text = law_kernel(in_order(law.body), law.arch)
    for at, length, new in edits:
        begin = round(at * len(text))
        text = text[:begin] + new + text[begin + length :]
    runs_or_refuses(text)
    runs_or_refuses(text[: round(end * len(text))])


@settings(derandomize=True, deadline=None, max_examples=2000 if EVERYTHING else 100)
@given(st.one_of(st.text(), st.binary().map(lambda b: b.decode("latin-1")), st.lists(ODD).map(" ".join)))
def test_texts_of_anything(text: str) -> None:
    runs_or_refuses(text)
    runs_or_refuses(f".version 8.8\n.target sm_90a\n.entry k() {{ .reg .b32 %r<4>; {text} }}")
    runs_or_refuses(f".version 8.8\n.target sm_90a\n{text}\n.entry k() {{ ret; }}")


@pytest.mark.parametrize(
    ("module", "body", "what"),
    [
        (".shared .b8 s[1000000000000];", "mov.u32 %r1, s;", "1000000000000 bytes"),
        (".shared .b8 s[300000];", "mov.u32 %r1, s;", "bytes of static shared memory"),
        (".shared .align 3 .b8 s[3];", "", "power of two"),
        (".shared .align 0 .b8 s[3];", "", "power of two"),
        (".global .b8 s[99999999999999999999];", "", "a variable of"),
        (".global .b8 s[09];", "", "09 is not a number"),
        (".global .f32 s = 1" + "0" * 400 + ";", "", "too large for its type"),
        ("", ".reg .b32 %many<2000000000>;", "registers"),
        ("", ".reg .b32 %many<9" + "9" * 5000 + ">;", "digits"),
        ("", "setp.eq.u32 %p1, 1, 1; @" + "!" * 5000 + "%p1 ret;", "unknown"),
        ("", "add.u32 %r1, " + "!" * 5000 + "%p1, 3;", "not a declared name"),
        ("", "@%r1 bra END;", "not a predicate"),
        ("", "bra data;", "must be a label"),
        ("", "ld.param.u32 %r1, [data+100000000000];", "of the parameters"),
        ("", "ld.param.u32 %r1, [data+8];", "of 8 bytes of parameters"),
    ],
)
def test_what_is_too_large_or_not_there(module: str, body: str, what: str) -> None:
    text = kernel(body, "sm_90a").replace(".entry", f"{module}\n.entry")
    with pytest.raises(OURS, match=what):
        run_ptx(text, [np.zeros(4, np.uint32)])


@pytest.mark.parametrize("target", ["", "foo", "sm_", "sm_9", "compute_90", "sm_1000000"])
def test_targets_that_are_none(target: str) -> None:
    with pytest.raises(PtxError, match="no architecture"):
        run_ptx(f".version 8.8\n.target {target}\n.entry k() {{ ret; }}")


# --- launches

EMPTY = ".version 8.8\n.target sm_90a\n.entry k(){ ret; }"


@pytest.mark.parametrize(
    "launch",
    [
        {"cluster": (0, 1, 1)},
        {"cluster": (2, 1, 1), "grid": (3, 1, 1)},
        {"cluster": (64, 1, 1), "grid": (64, 1, 1)},
        {"cluster": (1, 1)},
        {"grid": (1, 1)},
        {"grid": (1, 1, 1, 1)},
        {"grid": 1},
        {"grid": (0, 1, 1)},
        {"grid": (-1, 1, 1)},
        {"grid": (2**32, 1, 1)},
        {"grid": (1, 65536, 1)},
        {"grid": (1.0, 1, 1)},
        {"grid": (True, 1, 1)},
        {"block": (2000, 1, 1)},
        {"block": (1, 1, 65)},
        {"block": (0, 1, 1)},
        {"block": None},
        {"dynamic_shared": 500_000},
        {"dynamic_shared": 2**32},
        {"dynamic_shared": -4},
        {"dynamic_shared": 1.5},
        {"dynamic_shared": None},
        {"args": [b"1234"]},
    ],
    ids=str,
)
def test_launches_that_no_gpu_takes(launch: dict[str, Any]) -> None:
    with pytest.raises(LaunchError):
        run_ptx(EMPTY, **launch)


@pytest.mark.parametrize(
    "arg",
    [b"1234", np.int32(1), 3, 1.5, None, "x", [1], np.zeros((8, 8))[:, ::2], torch.zeros(8, 8).t()],
    ids=repr,
)
def test_arguments_that_no_parameter_takes(arg: Any) -> None:
    with pytest.raises(LaunchError):
        run_ptx(EMPTY.replace("k()", "k(.param .u64 data)"), [arg])


def test_a_text_has_one_kernel() -> None:
    for text in (EMPTY.replace(".entry k(){ ret; }", ""), EMPTY + "\n.entry other(){ ret; }"):
        with pytest.raises(LaunchError, match="only kernel"):
            run_ptx(text)


@pytest.mark.parametrize(
    "options",
    [
        *({"timeout": value} for value in (0, -1, float("nan"), "1")),
        *({"seed": value} for value in (-1, 1.5, None)),
        *({"max_instructions": value} for value in (2**64, "many")),
        *({"num_sms": value} for value in (0, 2**32, 1.0)),
        {"schedule": "never"},
        {"strict": {"lines"}},
        {"strict": ["lines"]},
    ],
    ids=str,
)
def test_options_that_mean_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Options(**options)


@pytest.mark.parametrize(
    "access", ["ld.global.u32 %r1, [%d1]", "st.global.u32 [%d1], 1", "red.global.add.u32 [%d1], 1"]
)
@pytest.mark.parametrize("address", [0, 8, 2**47, 2**63])
def test_wild_pointers_are_found(access: str, address: int) -> None:
    """Wild pointers are found even if no regions are given, and if the kernel has no tensor at all."""
    text = kernel(f"mov.u64 %d1, {address}; {access};", "sm_90a")
    with pytest.raises(EmulationError, match="in no tensor"):
        run_ptx(text, [bytes(8)])
    module = ptx.parse(text)
    report = Program(module.kernels[0], arch=90).launch(bytes(8), grid=(1, 1, 1), block=(32, 1, 1))
    assert [finding.kind for finding in report.findings] == ["out-of-bounds"]


# --- ends


def test_a_launch_that_runs_away_ends_on_the_last_turn_of_a_cluster() -> None:
    body = "mov.b32 %r1, 1;\n" * 20
    with pytest.raises(EmulationError, match="run away"):
        run_ptx(kernel(body, "sm_90a"), [bytes(8)], grid=(1000, 1, 1), options=Options(max_instructions=500))


@pytest.mark.parametrize("schedule", ["eager", "late", "fuzz"])
def test_a_launch_ends_in_time(schedule: str) -> None:
    options = Options(schedule=schedule, timeout=0.2)
    with pytest.raises(
        EmulationError, match=r"has not ended in 0.2 s:\n  CTA 0 warp 0 .* at PTX line .*\(bra AGAIN\)"
    ):
        run_ptx(EMPTY.replace("ret;", "AGAIN: bra AGAIN;"), options=options)


@pytest.mark.parametrize("schedule", ["eager", "fuzz"])
def test_signals_end_a_launch(schedule: str) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ptx(EMPTY.replace("ret;", "AGAIN: bra AGAIN;"), options=Options(schedule=schedule))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not run_ptx(EMPTY, grid=(64, 1, 1)).findings


def test_a_launch_is_run_whole_or_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.engine(), "finished_ctas", lambda handle: 3)
    with pytest.raises(EmulatorError, match="3 of 4 CTAs"):
        run_ptx(EMPTY, grid=(4, 1, 1))
