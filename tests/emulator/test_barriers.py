"""Barriers and setmaxnreg (barrier.cpp): what they do, and what misuse they report.

PTX ISA: Parallel Synchronization and Communication Instructions (mbarrier; bar, barrier; barrier.cluster);
setmaxnreg.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flash4_torch.emulator.engine import Options, run_ptx
from flash4_torch.emulator.report import Report

SCHEDULES = (Options(), Options(schedule="late"), *(Options(schedule="fuzz", seed=seed) for seed in range(3)))
schedules = pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: f"{o.schedule}{o.seed}")


def kernel(body: str, directives: str = "") -> str:
    """%i: thread, %warp, %rank: the CTA's; %first: thread 0; %lead: lane 0; %bar, %buffer: shared addresses.

    %out: the thread's own eight bytes of the array, all CTAs one after the other.
    """
    return f"""
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out) {directives}
{{
    .shared .align 8 .b64 barriers[4];
    .shared .align 8 .b8 buffer[512];
    .reg .pred %p, %q, %first, %lead, %done;
    .reg .b32 %i, %warp, %lane, %rank, %n, %bar, %buffer, %far, %x, %y, %z;
    .reg .b64 %out, %state, %later;
    mov.u32 %i, %tid.x;
    mov.u32 %rank, %ctaid.x;
    shr.u32 %warp, %i, 5;
    and.b32 %lane, %i, 31;
    setp.eq.u32 %first, %i, 0;
    setp.eq.u32 %lead, %lane, 0;
    mov.u32 %bar, barriers;
    mov.u32 %buffer, buffer;
    mov.u32 %n, %ntid.x;
    mad.lo.u32 %n, %rank, %n, %i;
    ld.param.u64 %out, [out];
    mad.wide.u32 %out, %n, 8, %out;
    {body}
    ret;
}}
"""


def launch(
    body: str, *, warps: int = 1, ctas: int = 1, options: Options | None = None, directives: str = ""
) -> tuple[np.ndarray, Report]:
    """The array (ctas, threads, 2) uint32, which held 99 before, and the report."""
    out = np.full((ctas, 32 * warps, 2), 99, np.uint32)
    report = run_ptx(
        kernel(body, directives),
        [out],
        grid=(ctas, 1, 1),
        cluster=(ctas, 1, 1),
        block=(32 * warps, 1, 1),
        options=options,
        check=False,
    )
    return out, report


def run(body: str, **how: Any) -> np.ndarray:
    out, report = launch(body, **how)
    report.raise_findings()
    return out


def finding(body: str, **how: Any) -> tuple[str, str, str]:
    """The kind, message and instruction of the only finding."""
    _, report = launch(body, **how)
    (found,) = report.findings
    return found.kind, found.message, found.at.ptx


# --- mbarrier: phases


def observed(body: str, init: int) -> str:
    """Thread 0 alone: each TEST in `body` shifts into %x whether phase 0 is complete."""
    test = """mbarrier.test_wait.parity.shared.b64 %done, [%bar], 0;
        selp.b32 %y, 1, 0, %done; mad.lo.u32 %x, %x, 2, %y;"""
    return f"""
        @!%first bra END;
        mov.u32 %x, 0;
        mbarrier.init.shared.b64 [%bar], {init};
        {body.replace("TEST", test)}
        st.global.u32 [%out], %x;
    END:
    """


@pytest.mark.parametrize(
    ("body", "init", "seen"),
    [
        # mbarrier.arrive: each lowers the pending count by one or by its operand.
        (
            "TEST mbarrier.arrive.shared.b64 _, [%bar]; TEST mbarrier.arrive.shared.b64 _, [%bar], 2; TEST",
            3,
            0b001,
        ),
        # .noComplete: this arrival must not end the phase, the next one may.
        (
            """mbarrier.arrive.noComplete.shared.b64 %state, [%bar], 2; TEST
            mbarrier.arrive.shared.b64 _, [%bar]; TEST""",
            3,
            0b01,
        ),
        # mbarrier.expect_tx, complete_tx: a phase ends when pending arrivals and bytes are both zero.
        (
            """mbarrier.expect_tx.relaxed.cta.shared.b64 [%bar], 64;
            mbarrier.arrive.shared.b64 _, [%bar]; TEST
            mbarrier.complete_tx.relaxed.cta.shared.b64 [%bar], 48; TEST
            mbarrier.complete_tx.relaxed.cta.shared.b64 [%bar], 16; TEST""",
            1,
            0b001,
        ),
        # mbarrier.arrive.expect_tx: it announces first, so its own arrival does not end the phase.
        (
            """mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 16; TEST
            mbarrier.complete_tx.relaxed.cta.shared.b64 [%bar], 16; TEST""",
            1,
            0b01,
        ),
        # Bytes may arrive before they are announced.
        (
            """mbarrier.complete_tx.relaxed.cta.shared.b64 [%bar], 16; TEST
            mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 16; TEST""",
            1,
            0b01,
        ),
        # Parity: the phase after the next has the parity of phase 0 again.
        ("mbarrier.arrive.shared.b64 _, [%bar]; TEST mbarrier.arrive.shared.b64 _, [%bar]; TEST", 1, 0b10),
        # mbarrier.arrive_drop: it also lowers the count that later phases expect.
        (
            """mbarrier.arrive_drop.shared.b64 _, [%bar]; TEST mbarrier.arrive.shared.b64 _, [%bar]; TEST
            mbarrier.arrive.shared.b64 _, [%bar]; TEST mbarrier.arrive.shared.b64 _, [%bar]; TEST""",
            2,
            0b0101,
        ),
        # mbarrier.inval: a former barrier may be initialised again.
        (
            """mbarrier.arrive.shared.b64 _, [%bar]; TEST mbarrier.inval.shared.b64 [%bar];
            mbarrier.init.shared.b64 [%bar], 1; TEST""",
            1,
            0b10,
        ),
    ],
    ids=["count", "noComplete", "bytes", "announce", "early bytes", "parity", "drop", "inval"],
)
def test_phases_end_when_all_has_arrived(body: str, init: int, seen: int) -> None:
    assert run(observed(body, init))[0, 0, 0] == seen


def test_a_phase_may_be_named_by_its_state() -> None:
    """PTX ISA, mbarrier.test_wait: the state is that of the current phase or the one before."""
    out = run(
        """
        @!%first bra END;
        mbarrier.init.shared.b64 [%bar], 2;
        mbarrier.arrive.shared.b64 %state, [%bar];
        mbarrier.test_wait.shared.b64 %p, [%bar], %state;
        mbarrier.arrive.shared.b64 %later, [%bar];
        mbarrier.test_wait.shared.b64 %q, [%bar], %later;
        mbarrier.arrive.shared.b64 %state, [%bar];
        mbarrier.try_wait.shared.b64 %done, [%bar], %later;
        selp.b32 %x, 4, 0, %p; selp.b32 %y, 2, 0, %q; add.u32 %x, %x, %y;
        selp.b32 %y, 1, 0, %done; add.u32 %x, %x, %y;
        mbarrier.test_wait.shared.b64 %p, [%bar], %state;
        selp.b32 %y, 1, 0, %p;
        st.global.v2.u32 [%out], {%x, %y};
    END:
        """
    )
    assert out[0, 0].tolist() == [3, 0]


def wait(parity: str | int, label: str, bar: str = "%bar") -> str:
    return f"{label}: mbarrier.try_wait.parity.shared.b64 %done, [{bar}], {parity}; @!%done bra {label};"


@schedules
def test_many_phases_hand_values_over(options: Options) -> None:
    """A producer warp and a consumer warp with one slot, a full and an empty barrier, eight rounds."""
    out = run(
        f"""
        @%first mbarrier.init.shared.b64 [%bar], 32;
        @%first mbarrier.init.shared.b64 [%bar+8], 32;
        bar.sync 0;
        mov.u32 %z, 0;
        mov.u32 %x, 0;
        mad.lo.u32 %buffer, %lane, 4, %buffer;
        setp.ge.u32 %p, %i, 32;
        @%p bra CONSUMER;
    PRODUCER:
        and.b32 %y, %z, 1; xor.b32 %y, %y, 1;
        {wait("%y", "EMPTY", "%bar+8")}
        mad.lo.u32 %x, %z, 100, %lane;
        st.shared.u32 [%buffer], %x;
        mbarrier.arrive.shared.b64 _, [%bar];
        add.u32 %z, %z, 1;
        setp.lt.u32 %p, %z, 8;
        @%p bra PRODUCER;
        bra END;
    CONSUMER:
        and.b32 %y, %z, 1;
        {wait("%y", "FULL")}
        ld.shared.u32 %y, [%buffer];
        mbarrier.arrive.shared.b64 _, [%bar+8];
        mad.lo.u32 %x, %x, 3, %y;
        add.u32 %z, %z, 1;
        setp.lt.u32 %p, %z, 8;
        @%p bra CONSUMER;
        st.global.u32 [%out], %x;
    END:
        """,
        warps=2,
        options=options,
    )
    expected = np.zeros(32, np.uint32)
    for phase in range(8):
        expected = expected * 3 + (phase * 100 + np.arange(32, dtype=np.uint32))
    np.testing.assert_array_equal(out[0, 32:, 0], expected)


REMOTE = """
    @%first mbarrier.init.shared.b64 [%bar], 1;
    {fence}
    barrier.cluster.arrive.{how}.aligned;
    barrier.cluster.wait.acquire.aligned;
    xor.b32 %x, %rank, 1;
    mapa.shared::cluster.u32 %far, %bar, %x;
    @%first mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%far];
    WAIT: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %done, [%bar], 0; @!%done bra WAIT;
    st.global.u32 [%out], %rank;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
"""
FENCE = "fence.mbarrier_init.release.cluster;"


@schedules
@pytest.mark.parametrize("how", ["release", "relaxed"])
def test_a_barrier_of_another_cta(how: str, options: Options) -> None:
    """mbarrier.arrive with .shared::cluster; relaxed barrier.cluster.arrive relies on the fence before it."""
    out = run(REMOTE.format(fence=FENCE, how=how), ctas=2, options=options)
    assert (out[:, :, 0] == [[0], [1]]).all()


def test_initialisation_is_made_visible_to_other_ctas() -> None:
    """fence.mbarrier_init is needed, or the barrier may not be there yet for the other CTA."""
    kind, message, instruction = finding(REMOTE.format(fence="", how="release"), ctas=2)
    assert kind == "mbarrier-init" and "fence.mbarrier_init" in message and "mbarrier.arrive" in instruction


# --- mbarrier: misuse

INIT = "mbarrier.init.shared.b64 [%bar], 2;"
ARRIVE = "mbarrier.arrive.shared.b64 _, [%bar];"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (ARRIVE, "has not been initialised"),
        ("mbarrier.test_wait.parity.shared.b64 %p, [%bar], 0;", "has not been initialised"),
        ("mbarrier.inval.shared.b64 [%bar];", "has not been initialised"),
        (f"{INIT} mbarrier.inval.shared.b64 [%bar]; {ARRIVE}", "has not been initialised"),
        (f"{INIT} {ARRIVE.replace(';', ', 3;')}", "3 arrivals where 2 are pending"),
        (f"{INIT} {ARRIVE} {INIT}", "initialised again in the middle of a phase"),
        (f"{INIT} {ARRIVE} mbarrier.inval.shared.b64 [%bar];", "invalidated in the middle of a phase"),
        ("mbarrier.init.shared.b64 [%bar], 0;", "count 0"),
        ("mbarrier.init.shared.b64 [%bar], 1048576;", "count 1048576"),
        (f"{INIT} mbarrier.expect_tx.relaxed.cta.shared.b64 [%bar], 1048576;", "transaction count 1048576"),
        (f"{INIT} mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 1048576;", "transaction count 1048576"),
        (
            f"{INIT} mbarrier.complete_tx.relaxed.cta.shared.b64 [%bar], 1048576;",
            "transaction count -1048576",
        ),
        (f"{INIT} mbarrier.arrive_drop.shared.b64 _, [%bar], 3;", "below zero"),
    ],
)
def test_misused_mbarriers_are_reported(body: str, says: str) -> None:
    """PTX ISA, mbarrier: operations are defined on initialised objects, for counts within their ranges."""
    kind, message, instruction = finding(f"@!%first bra END; {body} END:")
    assert (kind, says in message) == ("mbarrier", True), message
    assert instruction in body.replace("  ", " ")


def test_the_largest_counts_are_allowed() -> None:
    """PTX ISA, mbarrier: counts go to 2^20 - 1."""
    run(
        """
        @!%first bra END;
        mbarrier.init.shared.b64 [%bar], 1048575;
        mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 1048575;
        mbarrier.arrive.shared.b64 _, [%bar], 1048574;
        END:
        """
    )


@pytest.mark.parametrize(("address", "kind"), [("%bar+4", "misaligned"), ("%bar+65536", "out-of-bounds")])
def test_mbarriers_lie_aligned_in_shared_memory(address: str, kind: str) -> None:
    assert finding(f"@%first mbarrier.init.shared.b64 [{address}], 1;")[0] == kind


# --- named barriers


@schedules
def test_named_barriers_count_arrivals(options: Options) -> None:
    """Warps 0 and 1 bar.arrive, warp 2 bar.sync: 96 threads; barrier 2 orders the way back, in two rounds."""
    out = run(
        """
        mov.u32 %z, 0;
        mad.lo.u32 %x, %i, 4, %buffer;
    ROUND:
        setp.eq.u32 %p, %warp, 2;
        @%p bra READS;
        add.u32 %y, %i, %z;
        st.shared.u32 [%x], %y;
        bar.arrive 1, 96;
        bar.sync 2, 96;
        bra NEXT;
    READS:
        bar.sync 1, 96;
        ld.shared.u32 %y, [%x+-256];
        ld.shared.u32 %n, [%x+-128];
        st.global.v2.u32 [%out], {%y, %n};
        bar.sync 2, 96;
    NEXT:
        add.u32 %z, %z, 1000;
        setp.lt.u32 %p, %z, 2000;
        @%p bra ROUND;
        """,
        warps=3,
        options=options,
    )
    lanes = np.arange(32)
    np.testing.assert_array_equal(out[0, 64:], np.stack([1000 + lanes, 1032 + lanes], axis=1))
    assert (out[0, :64] == 99).all()


@schedules
def test_other_warps_do_not_take_part(options: Options) -> None:
    """Two pairs of warps with a barrier each; the number may come from a register."""
    out = run(
        """
        shr.u32 %x, %warp, 1; add.u32 %x, %x, 3;
        mov.u32 %y, 64;
        bar.sync %x, %y;
        bar.sync 0;
        st.global.u32 [%out], %x;
        """,
        warps=4,
        options=options,
    )
    assert out[0, :, 0].tolist() == [3] * 64 + [4] * 64


@schedules
def test_lanes_may_come_apart_to_a_barrier_that_is_not_aligned(options: Options) -> None:
    out = run(
        """
        setp.lt.u32 %p, %lane, 5;
        @%p bra FEW;
        barrier.sync 1;
        bra END;
    FEW:
        barrier.sync 1;
    END:
        st.global.u32 [%out], 5;
        """,
        warps=2,
        options=options,
    )
    assert (out[0, :, 0] == 5).all()


@schedules
def test_a_barrier_of_all_does_not_wait_for_warps_that_have_exited(options: Options) -> None:
    out = run(
        "setp.eq.u32 %p, %warp, 1; @%p exit; bar.sync 0; st.global.u32 [%out], 5;", warps=3, options=options
    )
    assert out[0, :, 0].tolist() == [5] * 32 + [99] * 32 + [5] * 32


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        ("bar.sync 16;", "barrier", "16"),
        ("bar.sync 1, 40;", "barrier", "no multiple of 32"),
        ("bar.sync 1, 0;", "barrier", "no multiple of 32"),
        ("bar.arrive 1, 32; @%p bar.arrive 1, 96; @!%p bar.arrive 1, 64;", "barrier", "96"),
        ("@%lead barrier.arrive 1, 32; barrier.arrive 1, 32;", "barrier", "more arrivals"),
        ("@%lead bar.sync 0;", "divergence", "some lanes"),
        ("@%lead barrier.sync.aligned 0;", "divergence", "some lanes"),
    ],
)
def test_misused_named_barriers_are_reported(body: str, kind: str, says: str) -> None:
    """PTX ISA, bar: 16 barriers; counts are multiples of the warp size, the same for all; .aligned."""
    found, message, _ = finding(f"setp.eq.u32 %p, %warp, 0; {body}", warps=2)
    assert (found, says in message) == (kind, True), message


# --- the cluster's barrier


@schedules
def test_cluster_barriers_wait_for_all_ctas(options: Options) -> None:
    """A CTA reads, in each of three rounds, what its neighbour wrote in that round."""
    out = run(
        """
        mov.u32 %z, 0;
        mov.u32 %y, 0;
        add.u32 %x, %rank, 1; and.b32 %x, %x, 3;
        mad.lo.u32 %buffer, %i, 4, %buffer;
        mapa.shared::cluster.u32 %far, %buffer, %x;
    ROUND:
        mad.lo.u32 %x, %z, 10, %rank;
        st.shared.u32 [%buffer], %x;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        ld.shared::cluster.u32 %x, [%far];
        mad.lo.u32 %y, %y, 100, %x;
        barrier.cluster.arrive.aligned;
        barrier.cluster.wait.aligned;
        add.u32 %z, %z, 1;
        setp.lt.u32 %p, %z, 3;
        @%p bra ROUND;
        st.global.u32 [%out], %y;
        """,
        warps=2,
        ctas=4,
        options=options,
    )
    neighbour = (np.arange(4) + 1) % 4
    expected = (neighbour * 100 + 10 + neighbour) * 100 + 20 + neighbour
    assert (out[:, :, 0] == expected[:, None]).all()


@schedules
def test_a_thread_that_arrived_and_left_does_not_count_twice(options: Options) -> None:
    """PTX ISA, barrier.cluster.wait: it waits for all threads that have not exited to arrive.

    Warp 0 arrives and exits; warp 1 waits for warp 2, which has something to write first.
    """
    out = run(
        """
        setp.eq.u32 %p, %warp, 2;
        @!%p bra ARRIVE;
        mov.u32 %z, 0;
    DELAY:
        ld.volatile.shared.u32 %x, [%buffer+64];
        add.u32 %z, %z, 1; setp.lt.u32 %q, %z, 20; @%q bra DELAY;
        st.shared.u32 [%buffer], 7;
    ARRIVE:
        barrier.cluster.arrive.release.aligned;
        setp.eq.u32 %p, %warp, 0;
        @%p exit;
        barrier.cluster.wait.acquire.aligned;
        ld.shared.u32 %x, [%buffer];
        st.global.u32 [%out], %x;
        """,
        warps=3,
        options=options,
    )
    assert out[0, :, 0].tolist() == [99] * 32 + [7] * 64


@schedules
def test_cluster_barriers_do_not_wait_for_threads_that_have_exited(options: Options) -> None:
    out = run(
        """
        setp.eq.u32 %p, %rank, 1;
        @%p exit;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        st.global.u32 [%out], 5;
        """,
        ctas=2,
        options=options,
    )
    assert out[:, 0, 0].tolist() == [5, 99]


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        ("barrier.cluster.wait.aligned;", "barrier", "arrive"),
        ("barrier.cluster.arrive.aligned; barrier.cluster.arrive.aligned;", "barrier", "twice"),
        ("@%lead barrier.cluster.arrive.aligned;", "divergence", "some lanes"),
    ],
)
def test_misused_cluster_barriers_are_reported(body: str, kind: str, says: str) -> None:
    """PTX ISA, barrier.cluster: arrive and wait alternate; .aligned needs the whole warp."""
    found, message, _ = finding(body, ctas=2)
    assert (found, says in message) == (kind, True), message


# --- setmaxnreg

EIGHT_WARPS = ".maxnreg 168"  # 8 warps with 168 registers a thread


def hand_over(dec: int, inc: int) -> str:
    """The first warpgroup gives registers away, the second takes some."""
    return f"""
        setp.lt.u32 %p, %warp, 4;
        @%p bra GIVES;
        setmaxnreg.inc.sync.aligned.u32 {inc};
        bra END;
    GIVES:
        setmaxnreg.dec.sync.aligned.u32 {dec};
    END:
        st.global.u32 [%out], 5;
    """


@schedules
def test_registers_are_handed_over(options: Options) -> None:
    """PTX ISA, setmaxnreg: .inc blocks until there are enough registers in the CTA's pool."""
    out = run(hand_over(96, 240), warps=8, options=options, directives=EIGHT_WARPS)
    assert (out[0, :, 0] == 5).all()


@schedules
def test_more_registers_than_there_are_is_a_deadlock(options: Options) -> None:
    kind, message, instruction = finding(
        hand_over(104, 240), warps=8, options=options, directives=EIGHT_WARPS
    )
    assert kind == "deadlock" and "setmaxnreg.inc from 168 to 240" in message
    assert instruction.startswith("setmaxnreg.inc")


# At launch a thread has only the registers that the least .inc asks for: 32. Other warps must release some.
RAISE_TWICE = """
    setp.eq.u32 %p, %warp, 0;
    @!%p exit;
    setmaxnreg.inc.sync.aligned.u32 40;
    setmaxnreg.inc.sync.aligned.u32 32;
"""


@pytest.mark.parametrize(
    ("instruction", "says"),
    [
        ("setmaxnreg.dec.sync.aligned.u32 100;", "multiple of 8"),
        ("setmaxnreg.dec.sync.aligned.u32 16;", "24 to 256"),
        ("setmaxnreg.inc.sync.aligned.u32 264;", "24 to 256"),
        ("setmaxnreg.dec.sync.aligned.u32 176;", ".dec to 176 from 168"),
        ("setmaxnreg.dec.sync.aligned.u32 24;" + RAISE_TWICE, ".inc to 32 from 40"),
    ],
)
def test_wrong_register_counts_are_reported(instruction: str, says: str) -> None:
    """PTX ISA, setmaxnreg: 24 to 256 in steps of 8; .dec does not raise, .inc does not lower."""
    kind, message, _ = finding(instruction, warps=4, directives=EIGHT_WARPS)
    assert (kind, says in message) == ("setmaxnreg", True), message
