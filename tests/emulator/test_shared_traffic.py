"""Bytes of shared memory and passes through its banks, counted for each instruction."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flash4_torch.bench.emulator import CHECKERS, LOOPS, WARPS
from flash4_torch.emulator.engine import Options, run_ptx
from flash4_torch.emulator.report import Line, Report

EVERY_LANE = "true"


def accesses(address: str, vector: str = "", lanes: str = EVERY_LANE) -> dict[str, Line]:
    """A store and a load of one warp: their lines.

    address: PTX that computes %a, an offset in bytes, from the lane's number %lane. vector: "", ".v2" or
    ".v4".
    lanes: PTX that sets %p in the lanes that take part.
    """
    registers = {"": "%x", ".v2": "{%x, %y}", ".v4": "{%x, %y, %z, %w}"}[vector]
    guard = "" if lanes == EVERY_LANE else "@%p "
    text = f"""
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k()
{{
    .shared .align 128 .b8 memory[8192];
    .reg .b32 %a, %lane, %base, %x, %y, %z, %w;
    .reg .pred %p;
    mov.u32 %lane, %tid.x;
    mov.u32 %base, memory;
    {address}
    add.u32 %a, %a, %base;
    {"" if lanes == EVERY_LANE else lanes}
    mov.b32 %x, 0; mov.b32 %y, 0; mov.b32 %z, 0; mov.b32 %w, 0;
    {guard}st.shared{vector}.b32 [%a], {registers};
    {guard}ld.shared{vector}.b32 {registers}, [%a];
    ret;
}}
"""
    report = run_ptx(text, options=Options(races=False))
    return {line.ptx.removeprefix("@%p ")[:2]: line for line in report.lines}


@pytest.mark.parametrize(
    ("address", "vector", "bytes_moved", "passes"),
    [
        pytest.param("shl.b32 %a, %lane, 2;", "", 128, 1, id="neighbours"),
        pytest.param("mul.lo.u32 %a, %lane, 132;", "", 128, 1, id="a word further each row"),
        pytest.param("shl.b32 %a, %lane, 7;", "", 128, 32, id="one bank"),
        pytest.param("shl.b32 %a, %lane, 3;", "", 128, 2, id="every other bank"),
        pytest.param("mov.b32 %a, 4;", "", 4, 1, id="one word"),
        pytest.param("shr.u32 %a, %lane, 4; shl.b32 %a, %a, 7;", "", 8, 2, id="two words of one bank"),
        pytest.param("shl.b32 %a, %lane, 3;", ".v2", 256, 2, id="neighbours, 8 bytes"),
        pytest.param("shl.b32 %a, %lane, 4;", ".v4", 512, 4, id="neighbours, 16 bytes"),
        pytest.param("mov.b32 %a, 16;", ".v4", 16, 1, id="the same 16 bytes"),
        pytest.param("shr.u32 %a, %lane, 2; shl.b32 %a, %a, 4;", ".v4", 128, 1, id="8 times 16 bytes"),
        pytest.param("mul.lo.u32 %a, %lane, 144;", ".v4", 512, 4, id="16 bytes further each row"),
        pytest.param("shl.b32 %a, %lane, 7;", ".v4", 512, 32, id="16 bytes of each row"),
        pytest.param(
            # Eight lanes access the same four banks, though all 32 together spread over the banks.
            "and.b32 %a, %lane, 7; shl.b32 %a, %a, 7; shr.u32 %x, %lane, 3; mad.lo.u32 %a, %x, 16, %a;",
            ".v4",
            512,
            32,
            id="16 bytes, conflicts of a quarter",
        ),
    ],
)
def test_of_a_warp(address: str, vector: str, bytes_moved: int, passes: int) -> None:
    lines = accesses(address, vector)
    for name in ("st", "ld"):
        assert lines[name].shared_bytes == (bytes_moved,)
        assert lines[name].shared_passes == (passes,)


def test_lanes_that_are_not_there_ask_for_nothing() -> None:
    lines = accesses("shl.b32 %a, %lane, 2;", lanes="setp.lt.u32 %p, %lane, 5;")
    assert lines["st"].shared_bytes == (20,) and lines["st"].shared_passes == (1,)


def test_other_instructions_move_nothing() -> None:
    lines = accesses("shl.b32 %a, %lane, 2;")
    assert {line.shared_bytes for name, line in lines.items() if name not in ("st", "ld")} == {(0,)}


def loop(name: str, turns: int) -> Report:
    return replace(LOOPS[name], turns=turns).launcher()(options=CHECKERS["races off"])


@pytest.mark.parametrize(
    ("name", "operation", "expected"),
    [
        # A and B, 32 bytes of K each: by one thread, or by the four warps, where B counts for the first warp.
        ("tcgen05.mma m128n256k16", "tcgen05.mma", [4 * 32 * (128 + 256), 0, 0, 0]),
        ("wgmma m64n256k16", "wgmma.mma_async", [4 * 32 * (16 + 256)] + 3 * [4 * 32 * 16]),
    ],
)
def test_tensor_cores_read_operands_once_an_instruction(
    name: str, operation: str, expected: list[int]
) -> None:
    lines = [line for line in loop(name, 2).lines if operation in line.ptx]
    assert np.array([line.shared_bytes for line in lines]).sum(0).tolist() == [2 * n for n in expected]
    assert np.array([line.shared_passes for line in lines]).sum() == 2 * sum(expected) // 128


def test_copies_in_and_out() -> None:
    text = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 from, .param .u64 to)
{
    .shared .align 128 .b8 tile[256];
    .shared .align 8 .b64 bar;
    .reg .b64 %from, %to;
    .reg .b32 %tile, %bar;
    .reg .pred %ok;
    ld.param.u64 %from, [from];
    ld.param.u64 %to, [to];
    mov.u32 %tile, tile;
    mov.u32 %bar, bar;
    mbarrier.init.shared::cta.b64 [%bar], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%tile], [%from], 256, [%bar];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %ok, [%bar], 0;
    @!%ok bra WAIT;
    cp.async.bulk.global.shared::cta.bulk_group [%to], [%tile], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    ret;
}
"""
    source, target = np.arange(64, dtype=np.int32), np.zeros(32, np.int32)
    report = run_ptx(text, [source, target], block=(1, 1, 1))
    np.testing.assert_array_equal(target, source[:32])
    moved = {line.ptx.split()[0]: line.shared_bytes for line in report.lines if any(line.shared_bytes)}
    assert moved == {
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes": (256,),
        "cp.async.bulk.global.shared::cta.bulk_group": (128,),
    }


def test_of_all_warps() -> None:
    """Counts of all warps: every thread writes 16 bytes and reads its neighbour's, without conflicts."""
    lines = {line.ptx[:9]: line for line in loop("16-byte shared memory accesses, barriers", 3).lines}
    for name in ("st.shared", "ld.shared"):
        assert lines[name].shared_bytes == WARPS * (3 * 512,)
        assert lines[name].shared_passes == WARPS * (3 * 4,)
