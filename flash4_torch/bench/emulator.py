"""Section `emulator`: how fast the emulated device runs, with and without its race checker, on one thread."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ..emulator import ptx
from ..emulator.engine import Options, Program
from ..emulator.report import Report
from .report import Row, table
from .settings import Settings
from .timing import compare

TITLE = "the emulator on one thread: million warp instructions a second, and GFLOP/s of the tensor cores"

WARPS = 4
CHECKERS = {"races off": Options(races=False), "races on": Options(races=True)}


class Launch(Protocol):
    """A function that runs a kernel once."""

    def __call__(self, *, options: Options) -> Report: ...


@dataclass(frozen=True)
class Loop:
    """A kernel of `WARPS` warps that repeats `body` `turns` times, between `start` and `end`.

    %t holds the thread's index, %base the address of `shared_bytes` of shared memory, and %n the number of
    iterations left.
    """

    registers: str
    start: str
    body: str
    turns: int
    end: str = ""
    arch: str = "sm_90a"
    shared_bytes: int = 1024

    def text(self) -> str:
        return f"""
.version 8.8
.target {self.arch}
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry loop(.param .u32 turns)
{{
    .shared .align 8 .b64 done;
    .shared .align 4 .b32 slot;
    .reg .b32 %n, %t, %base;
    .reg .pred %more;
    {self.registers}
    ld.param.u32 %n, [turns];
    mov.u32 %t, %tid.x;
    mov.u32 %base, memory;
    {self.start}
AGAIN:
    {self.body}
    sub.u32 %n, %n, 1;
    setp.ne.u32 %more, %n, 0;
    @%more bra AGAIN;
    {self.end}
    ret;
}}
"""

    def launcher(self) -> Launch:
        module = ptx.parse(self.text())
        program = Program(module.kernels[0], arch=module.arch)
        return partial(
            program.launch,
            self.turns.to_bytes(4, "little"),
            grid=(1, 1, 1),
            block=(32 * WARPS, 1, 1),
            dynamic_shared=self.shared_bytes,
        )


ARITHMETIC = Loop(
    registers=".reg .f32 %x, %y, %z;\n.reg .b32 %i, %j;\n.reg .pred %p;",
    start="cvt.rn.f32.u32 %x, %t;\nmov.f32 %y, 0f3F000000;\nmov.f32 %z, 0f00000000;\nmov.b32 %i, 1;",
    body="""
    fma.rn.f32 %z, %x, %y, %z;
    add.rn.f32 %x, %x, %y;
    mul.rn.f32 %z, %z, %y;
    max.f32 %z, %z, %y;
    setp.lt.f32 %p, %z, %x;
    selp.f32 %y, %y, 0f3F000000, %p;
    ex2.approx.ftz.f32 %z, %z;
    shl.b32 %j, %i, 3;
    add.s32 %i, %i, %j;
    xor.b32 %i, %i, %n;
    mad.lo.s32 %i, %i, 3, %j;
    and.b32 %i, %i, 1023;
    """,
    turns=20_000,
)

# Every thread writes 16 bytes and reads its neighbour's.
TILES = Loop(
    registers=".reg .b32 %to, %from, %v<4>;",
    start="""
    shl.b32 %to, %t, 4;
    xor.b32 %from, %to, 16;
    add.u32 %to, %to, %base;
    add.u32 %from, %from, %base;
    mov.b32 %v0, %t;
    mov.b32 %v1, %t;
    mov.b32 %v2, %t;
    mov.b32 %v3, %t;
    """,
    body="""
    st.shared.v4.b32 [%to], {%v0, %v1, %v2, %v3};
    bar.sync 0;
    ld.shared.v4.b32 {%v0, %v1, %v2, %v3}, [%from];
    add.u32 %v0, %v0, %v3;
    bar.sync 0;
    """,
    turns=10_000,
    shared_bytes=32 * WARPS * 16,
)

# A warp's lanes write and read 4 bytes, 132 apart: no two are adjacent.
SCATTERED = Loop(
    registers=".reg .b32 %to, %v;",
    start="mad.lo.u32 %to, %t, 132, %base;\nmov.b32 %v, %t;",
    body="""
    st.shared.b32 [%to], %v;
    ld.shared.b32 %v, [%to];
    add.u32 %v, %v, 1;
    bar.sync 0;
    """,
    turns=10_000,
    shared_bytes=32 * WARPS * 132,
)

# Both operands are 128-byte rows of 64 bf16 numbers, swizzled, K-major: A at %base, B after it. A step of
# 16 in K is 32 bytes. The operands are uninitialised.
_ROWS = 1 << 16 | 64 << 32
_DESCRIPTORS = """
    shr.u32 %t, %base, 4;
    cvt.u64.u32 %a, %t;
    or.b64 %a, %a, {layout};
    add.s64 %b, %a, {b_offset};
"""
_K_STEPS = range(0, 8, 2)
_N = 256


def _wgmma(m: int = 64) -> Loop:
    sums = ", ".join(f"%d{i}" for i in range(_N // 2))
    steps = [
        f"""
    add.s64 %ak, %a, {step};
    add.s64 %bk, %b, {step};
    wgmma.mma_async.sync.aligned.m{m}n{_N}k16.f32.bf16.bf16 {{{sums}}}, %ak, %bk, 1, 1, 1, 0, 0;"""
        for step in _K_STEPS
    ]
    return Loop(
        registers=f".reg .f32 %d<{_N // 2}>;\n.reg .b64 %a, %b, %ak, %bk;",
        start=_DESCRIPTORS.format(layout=_ROWS | 1 << 62, b_offset=m * 128 >> 4)
        + "\n".join(f"mov.f32 %d{i}, 0f00000000;" for i in range(_N // 2)),
        body="wgmma.fence.sync.aligned;"
        + "".join(steps)
        + "\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;",
        turns=200,
        shared_bytes=(m + _N) * 128,
    )


def _tcgen05(m: int = 128) -> Loop:
    instruction = 1 << 4 | 1 << 7 | 1 << 10 | _N >> 3 << 17 | m >> 4 << 24  # f32 from bf16
    steps = [
        f"""
    add.s64 %ak, %a, {step};
    add.s64 %bk, %b, {step};
    @%one tcgen05.mma.cta_group::1.kind::f16 [%sums], %ak, %bk, {instruction}, %more;"""
        for step in _K_STEPS
    ]
    return Loop(
        registers=".reg .b32 %sums, %phase;\n.reg .b64 %a, %b, %ak, %bk;\n.reg .pred %one, %first, %ok;",
        start=f"""
    setp.eq.u32 %one, %t, 0;
    setp.lt.u32 %first, %t, 32;
    @%one mbarrier.init.shared::cta.b64 [done], 1;
    fence.mbarrier_init.release.cluster;
    @%first tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], {_N};
    bar.sync 0;
    ld.shared.b32 %sums, [slot];
    mov.b32 %phase, 0;
    setp.ne.u32 %more, %n, 0;
    """
        + _DESCRIPTORS.format(layout=_ROWS | 1 << 46 | 2 << 61, b_offset=m * 128 >> 4),
        body="".join(steps)
        + """
    @%one tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [done];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %ok, [done], %phase;
    @!%ok bra WAIT;
    xor.b32 %phase, %phase, 1;
    bar.sync 0;""",
        turns=200,
        end=f"@%first tcgen05.dealloc.cta_group::1.sync.aligned.b32 %sums, {_N};",
        arch="sm_100a",
        shared_bytes=(m + _N) * 128,
    )


LOOPS = {
    "arithmetic": ARITHMETIC,
    "16-byte shared memory accesses, barriers": TILES,
    "scattered 4-byte accesses, barriers": SCATTERED,
    "wgmma m64n256k16": _wgmma(),
    "tcgen05.mma m128n256k16": _tcgen05(),
}


def measure(settings: Settings) -> Iterator[Row]:
    """One row per kernel; no rows without a C++ compiler."""
    if not any(map(shutil.which, ("g++", "c++"))):
        return
    for name, loop in LOOPS.items():
        yield _row(name, loop.launcher(), settings)


def _row(name: str, launch: Launch, settings: Settings) -> Row:
    report = launch(options=CHECKERS["races on"])
    report.raise_findings()
    counters = report.counters
    result = compare({who: partial(launch, options=options) for who, options in CHECKERS.items()}, settings)
    return {
        "kernel": name,
        "instructions": counters.instructions,
        "mma_flops": counters.mma_flops,
        "seconds": {who: seconds._asdict() for who, seconds in result.seconds.items()},
    }


def text(rows: list[Row]) -> str:
    return table(
        [
            "kernel",
            "instructions",
            *(f"M/s, {who}" for who in CHECKERS),
            *(f"GFLOP/s, {who}" for who in CHECKERS),
        ],
        [
            [
                row["kernel"],
                row["instructions"],
                *(f"{1e-6 * row['instructions'] / row['seconds'][who]['median']:.1f}" for who in CHECKERS),
                *(_gflops(row["mma_flops"] / row["seconds"][who]["median"]) for who in CHECKERS),
            ]
            for row in rows
        ],
    )


def _gflops(flops: float) -> str:
    return f"{1e-9 * flops:.1f}" if flops else ""
