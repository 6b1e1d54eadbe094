"""The order of execution (schedule.cpp), and the result of a launch (engine.py, report.py)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from flash4_torch.emulator.engine import DEVICE_SMS, Options, run_ptx
from flash4_torch.emulator.report import EmulationError, Finding, Report

# A lane that spins for ever fails the test instead of hanging it.
SCHEDULES = tuple(
    Options(schedule, seed, max_instructions=50_000_000)
    for schedule, seed in (("eager", 0), ("late", 0), ("fuzz", 0), ("fuzz", 1), ("fuzz", 2))
)
schedules = pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: f"{o.schedule}{o.seed}")


def kernel(body: str, arch: str = "sm_100a") -> str:
    """%i: thread, %warp, %cta; %first: thread 0 of its CTA; %all: the array."""
    return f"""
.version 8.8
.target {arch}
.address_size 64
.file 1 "where/it/came/from.py"
.visible .entry k(.param .u64 out)
{{
    .shared .align 128 .b8 buffer[1024];
    .shared .align 8 .b64 barriers[2];
    .reg .pred %p, %q, %first, %done;
    .reg .b32 %i, %warp, %cta, %bar, %buffer, %mine, %x, %y, %z;
    .reg .b64 %all, %out;
    mov.u32 %i, %tid.x;
    mov.u32 %cta, %ctaid.x;
    shr.u32 %warp, %i, 5;
    setp.eq.u32 %first, %i, 0;
    mov.u32 %bar, barriers;
    mov.u32 %buffer, buffer;
    mad.lo.u32 %mine, %i, 4, %buffer;
    ld.param.u64 %all, [out];
    {body}
    ret;
}}
"""


def launch(
    body: str, *, warps: int = 1, ctas: int = 1, options: Options | None = None, arch: str = "sm_100a"
) -> tuple[np.ndarray, Report]:
    """An array (1024,) uint32 of zeros after the launch, and the report."""
    out = np.zeros(1024, np.uint32)
    text = kernel(body, arch)
    report = run_ptx(text, [out], grid=(ctas, 1, 1), block=(32 * warps, 1, 1), options=options, check=False)
    return out, report


def run(body: str, **how: Any) -> np.ndarray:
    out, report = launch(body, **how)
    report.raise_findings()
    return out


def finding(body: str, **how: Any) -> Finding:
    _, report = launch(body, **how)
    (found,) = report.findings
    return found


def line_of(body: str, instruction: str) -> int:
    """The number of the first line of the kernel with this instruction."""
    lines = kernel(body).splitlines()
    return next(number for number, line in enumerate(lines, 1) if instruction in line)


# --- deadlocks

WAIT_FOR_EVER = """
    @%first mbarrier.init.shared.b64 [%bar], 3;
    bar.sync 0;
    @%first mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 48;
    setp.eq.u32 %p, %warp, 1;
    @%p bra OTHER;
WAIT:
    mbarrier.try_wait.parity.shared.b64 %done, [%bar], 0;
    @!%done bra WAIT;
OTHER:
    bar.sync 3, 64;
"""


@schedules
def test_a_deadlock_tells_who_waits_for_what(options: Options) -> None:
    found = finding(WAIT_FOR_EVER, warps=2, options=options)
    assert found.kind == "deadlock"
    first, second = found.message.splitlines()[1:3]
    assert "CTA 0 warp 0" in first and f"PTX line {line_of(WAIT_FOR_EVER, 'mbarrier.try_wait')} " in first
    assert "parity 0" in first and "0 phases complete, 2 of 3 arrivals and 48 bytes missing" in first
    assert "CTA 0 warp 1" in second and f"PTX line {line_of(WAIT_FOR_EVER, 'bar.sync 3')} " in second
    assert "named barrier 3: 32 of 64 threads" in second


@schedules
def test_a_deadlock_at_the_clusters_barrier_is_described(options: Options) -> None:
    body = """
        setp.eq.u32 %p, %warp, 1;
        @%p bra SECOND;
        barrier.cluster.arrive.aligned;
        barrier.cluster.wait.aligned;
        exit;
    SECOND:
        bar.sync 1, 64;
    """
    found = finding(body, warps=2, options=options)
    assert found.kind == "deadlock" and "barrier.cluster: 32 threads have arrived" in found.message


@pytest.mark.parametrize("options", SCHEDULES[1:3], ids=lambda o: o.schedule)
@pytest.mark.parametrize(
    "poll",
    [
        "ld.acquire.gpu.global.u32 %x, [%all];",
        "atom.global.cas.b32 %x, [%all], 1, 2;",
        "atom.global.add.u32 %x, [%all], 0;",
    ],
)
def test_polling_in_vain_is_a_deadlock(poll: str, options: Options) -> None:
    """Polling by atomic operations that change nothing counts, too."""
    body = f"@!%first exit; WAIT: {poll} setp.eq.u32 %p, %x, 0; @%p bra WAIT;"
    found = finding(body, options=Options(options.schedule, races=False))
    assert found.kind == "deadlock" and "poll" in found.message


@schedules
def test_a_launch_that_runs_away_is_stopped(options: Options) -> None:
    options = Options(options.schedule, options.seed, max_instructions=20_000)
    found = finding("AGAIN: add.u32 %x, %x, 1; bra AGAIN;", options=options)
    assert found.kind == "deadlock" and "run away" in found.message


# --- try_wait returns after a while


@schedules
@pytest.mark.parametrize("peeks", [1, 40])
def test_a_peek_may_come_back_false(peeks: int, options: Options) -> None:
    """PTX ISA, mbarrier.try_wait: it may return false; the program must then go on to what ends the phase."""
    out = run(
        f"""
        @!%first bra END;
        mbarrier.init.shared.b64 [%bar], 1;
        mov.u32 %y, 0;
    PEEK:
        mbarrier.try_wait.parity.shared.b64 %done, [%bar], 0;
        @%done bra END;
        add.u32 %y, %y, 1;
        setp.lt.u32 %p, %y, {peeks};
        @%p bra PEEK;
        mbarrier.arrive.shared.b64 _, [%bar];
        mbarrier.try_wait.parity.shared.b64 %done, [%bar], 0;
        selp.b32 %x, 1, 0, %done;
        st.global.v2.u32 [%all], {{%x, %y}};
    END:
        """,
        options=options,
    )
    assert out[1] == peeks
    assert out[0] == 1 or options.schedule == "fuzz"


# --- asynchronous work and exits

LOAD = """
    @!%first bra END;
    mbarrier.init.shared.b64 [%bar], 1;
    fence.proxy.async.shared::cta;
    mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%buffer], [%all], 128, [%bar];
    WAIT
    END:
"""
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %done, [%bar], 0; @!%done bra W;"


def test_loads_are_waited_for_before_the_exit() -> None:
    assert launch(LOAD.replace("WAIT", WAIT), options=Options(schedule="late"))[1].findings == []
    found = finding(LOAD.replace("WAIT", ""), options=Options(schedule="late"))
    assert found.kind == "exit-pending" and "cp.async.bulk" in found.at.ptx


STORE = """
    st.shared.u32 [%mine], %i;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%first cp.async.bulk.global.shared::cta.bulk_group [%all], [%buffer], 128;
    @%first cp.async.bulk.commit_group;
    WAIT
"""


@pytest.mark.parametrize("strict", [False, True])
def test_stores_are_waited_for_where_that_is_asked(strict: bool) -> None:
    """Hardware keeps a CTA's shared memory until its bulk stores are done, so only "exit" reports this."""
    options = Options(schedule="late", strict=frozenset({"exit"} if strict else ()))
    waits = STORE.replace("WAIT", "@%first cp.async.bulk.wait_group.read 0;")
    assert launch(waits, options=options)[1].findings == []
    out, report = launch(STORE.replace("WAIT", ""), options=options)
    assert [found.kind for found in report.findings] == ["exit-pending"] * strict
    np.testing.assert_array_equal(out[:32], np.arange(32))


# --- CTAs at the same time


@schedules
def test_an_earlier_cta_may_wait_for_a_later_one(options: Options) -> None:
    out = run(
        """
        setp.eq.u32 %p, %cta, 39;
        @%p bra PUBLISH;
    WAIT:
        ld.acquire.gpu.global.u32 %x, [%all];
        setp.eq.u32 %p, %x, 0;
        @%p bra WAIT;
        @%first red.relaxed.gpu.global.add.u32 [%all+4], 1;
        exit;
    PUBLISH:
        st.release.gpu.global.u32 [%all], 1;
        """,
        ctas=40,
        options=options,
    )
    assert out[:2].tolist() == [1, 39]


GRID_BARRIER = """
    @%first red.release.gpu.global.add.u32 [%all], 1;
    @%first bra WAIT;
    bra MET;
WAIT:
    {poll}
    setp.lt.u32 %p, %x, {ctas};
    @%p bra WAIT;
MET:
    bar.sync 0;
    @%first red.relaxed.gpu.global.add.u32 [%all+4], 1;
"""
LOAD_POLL, ATOMIC_POLL = (
    "ld.acquire.gpu.global.u32 %x, [%all];",
    "atom.acquire.gpu.global.add.u32 %x, [%all], 0;",
)


@schedules
@pytest.mark.parametrize("poll", [LOAD_POLL, ATOMIC_POLL], ids=["load", "atomic"])
def test_all_resident_ctas_may_wait_for_each_other(poll: str, options: Options) -> None:
    ctas = 132
    out = run(GRID_BARRIER.format(poll=poll, ctas=ctas), ctas=ctas, warps=2, options=options, arch="sm_90a")
    assert out[:2].tolist() == [ctas, ctas]


@pytest.mark.parametrize("arch", [90, 100])
def test_more_ctas_than_the_device_holds_cannot(arch: int) -> None:
    ctas = DEVICE_SMS[arch] + 1
    found = finding(GRID_BARRIER.format(poll=LOAD_POLL, ctas=ctas), ctas=ctas, arch=f"sm_{arch}a")
    assert found.kind == "deadlock" and "poll" in found.message


def test_a_device_holds_as_many_ctas_as_it_has_sms() -> None:
    small = Options(num_sms=3)
    assert run(GRID_BARRIER.format(poll=LOAD_POLL, ctas=3), ctas=3, options=small)[:1].tolist() == [3]
    assert finding(GRID_BARRIER.format(poll=LOAD_POLL, ctas=4), ctas=4, options=small).kind == "deadlock"


# --- the fuzz schedule

ORDER = """
    @!%first bra END;
    atom.global.add.u32 %x, [%all], 1;
    mad.wide.u32 %out, %x, 4, %all;
    st.global.u32 [%out+4], %cta;
    END:
"""


def order(options: Options) -> list[int]:
    """The order in which twelve CTAs took numbers."""
    return run(ORDER, ctas=12, options=options)[1:13].tolist()


def test_a_seed_stands_for_one_order() -> None:
    orders = [order(Options(schedule="fuzz", seed=seed)) for seed in range(6)]
    assert orders == [order(Options(schedule="fuzz", seed=seed)) for seed in range(6)]
    assert all(sorted(one) == list(range(12)) for one in orders)
    assert len(set(map(tuple, orders))) > 3
    assert order(Options()) == order(Options(schedule="late")) == list(range(12))


# --- counters


def test_counters_of_a_kernel_that_can_be_counted_by_hand() -> None:
    """Two CTAs of two warps. Warp 0 goes three rounds, warp 1 five."""
    body = """
        mov.u32 %y, 0;
        mad.lo.u32 %z, %warp, 2, 3;
    ROUND:
        add.u32 %y, %y, 1;
        setp.lt.u32 %p, %y, %z;
        @%p bra ROUND;
        st.shared.u32 [%mine], %y;
        bar.sync 0;
        ld.shared.u32 %x, [%mine];
        @%first st.global.v2.u32 [%all], {%x, %y};
    """
    out, report = launch(body, warps=2, ctas=2, options=Options(races=False))
    assert out[:2].tolist() == [3, 3]
    lines = {line.ptx.lstrip(): line for line in report.lines}
    assert lines["add.u32 %y, %y, 1"].counts == (2 * 3, 2 * 5)
    assert lines["@%p bra ROUND"].counts == (6, 10) and lines["@%p bra ROUND"].pipe == "control"
    assert lines["bar.sync 0"].counts == (2, 2) and lines["bar.sync 0"].pipe == "sync"
    counters = report.counters
    prologue, before, after = 8, 2, 5
    assert counters.instructions == 2 * (2 * (prologue + before + after) + 3 * (3 + 5))
    assert sum(counters.by_pipe.values()) == counters.instructions
    assert counters.by_pipe["control"] == 2 * (3 + 5 + 2)
    assert counters.by_pipe["sync"] == 4
    assert counters.by_pipe["memory"] == 2 * (2 * (2 + 1) + 2)
    assert counters.shared_written == counters.shared_read == 2 * 64 * 4
    assert counters.global_written == 2 * 8 and counters.global_read == 0
    assert counters.barrier_waits == 4
    assert (counters.mma, counters.async_bytes) == (0, 0)
    assert dict(counters.rows())["warp-instructions"] == counters.instructions
    assert f"{counters.instructions:,}" in str(counters)


def test_bytes_that_are_copied_asynchronously() -> None:
    report = launch(LOAD.replace("WAIT", WAIT))[1]
    assert report.counters.async_bytes == 128


# --- findings


def test_a_finding_names_its_line_and_source() -> None:
    body = """
        .loc 1 77 5
        ld.global.u32 %x, [%all+4096];
    """
    found = finding(body, warps=3, ctas=5)
    assert found.kind == "out-of-bounds"
    assert found.at.cta is not None and found.at.warp in range(3)
    assert found.at.ptx_line == line_of(body, "ld.global.u32 %x")
    assert found.at.source is not None
    file, line = found.at.source
    assert file.endswith("from.py") and line == 77
    text = str(found)
    assert text.startswith("out-of-bounds") and "from.py:77" in text and "ld.global.u32" in text


def test_findings_of_the_same_instructions_are_one() -> None:
    body = "st.shared.u32 [%buffer], %i; @%first st.global.u32 [%all], 5;"
    found = finding(body, warps=4, ctas=2)
    assert found.kind == "race" and found.times > 1 and found.other is not None
    assert f"({found.times} times)" in str(found)
    assert str(found).count("st.shared.u32 [%buffer], %i") == 2


def test_findings_may_be_raised() -> None:
    out = np.zeros(4, np.uint32)
    with pytest.raises(EmulationError, match="k:\nout-of-bounds") as raised:
        run_ptx(kernel("st.global.u32 [%all+16], 1;"), [out])
    assert [found.kind for found in raised.value.findings] == ["out-of-bounds"]
    assert raised.value.kernel == "k"


def test_a_trap_is_a_finding() -> None:
    body = "setp.eq.u32 %p, %warp, 1; @%p trap;"
    found = finding(body, warps=2)
    assert (found.kind, found.at.warp, found.at.ptx_line) == ("trap", 1, line_of(body, "trap"))


@schedules
def test_a_fault_in_asynchronous_work_names_what_issued_it(options: Options) -> None:
    found = finding(LOAD.replace("[%all], 128", "[%all+4096], 128").replace("WAIT", WAIT), options=options)
    assert found.kind == "out-of-bounds" and re.match("cp.async.bulk", found.at.ptx)


HAND_ON = """
    st.shared.u32 [%mine], 5;
    fence.proxy.async.shared::cta;
    bar.warp.sync -1;
    @!%first bra END;
    setp.eq.u32 %p, %cta, 1;
    @%p bra POLL;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%all], [%buffer], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group<read> 0;
    red.release.gpu.global.add.s32 [%all+1024], 1;
    bra END;
POLL:
    ld.acquire.gpu.global.u32 %x, [%all+1024];
    setp.eq.u32 %q, %x, 0;
    @%q bra POLL;
    ld.global.u32 %y, [%all];
    st.global.u32 [%all+2048], %y;
END:
"""


@schedules
def test_a_sum_that_has_been_waited_for_is_there(options: Options) -> None:
    out = run(HAND_ON.replace("<read>", ""), ctas=2, options=options)
    assert (out[0], out[512]) == (5, 5)


def test_a_sum_that_nobody_waits_for_is_late() -> None:
    """PTX ISA, cp.async.bulk.wait_group: with .read only the source has been read."""
    out = run(HAND_ON.replace("<read>", ".read"), ctas=2, options=Options("late"))
    assert (out[0], out[512]) == (5, 0)


# --- options


@pytest.mark.parametrize(
    ("options", "says"), [({"schedule": "soon"}, "soon"), ({"strict": frozenset({"exit", "maths"})}, "maths")]
)
def test_unknown_options_are_refused(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Options(**options)


def test_races_are_looked_for_unless_that_is_off() -> None:
    body = "st.shared.u32 [%buffer], %i;"
    assert finding(body, warps=2).kind == "race"
    assert launch(body, warps=2, options=Options(races=False))[1].findings == []


def test_arguments_fit_the_parameters() -> None:
    with pytest.raises(ValueError, match="1 parameters, got 2"):
        run_ptx(kernel(""), [np.zeros(4), np.int32(1)])
