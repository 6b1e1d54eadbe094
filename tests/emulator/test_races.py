"""The race checker, both ways: an ordered kernel gives no finding; without one synchronisation it gives one.

Order is what the PTX ISA calls causality order (section "Memory Consistency Model", with its proxies), and
asynchronous work completes as its section "Asynchronous Operations" says.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash4_torch.emulator.engine import Options, run_ptx
from flash4_torch.emulator.report import Finding, Report

SCHEDULES = (
    Options(schedule="eager"),
    Options(schedule="late"),
    *(Options(schedule="fuzz", seed=seed) for seed in range(4)),
)

# Registers and addresses that all kernels below use. %wN: the thread is of warp N; %first: it is the first of
# its warp; %leadN: both; %mine: its word of the buffer.
PROLOGUE = """
    .reg .pred %w0, %w1, %w2, %w3, %first, %lead0, %lead1, %done, %off;
    .reg .b32 %tid, %warp, %lane, %mine, %buffer, %bar, %bar2, %slot, %tmem, %a, %b, %c, %d, %i, %rank, %peer;
    .reg .f32 %f<4>;
    .reg .b64 %data, %word, %desc, %long;
    mov.u32 %tid, %tid.x;
    shr.u32 %warp, %tid, 5;
    and.b32 %lane, %tid, 31;
    setp.eq.u32 %w0, %warp, 0;
    setp.eq.u32 %w1, %warp, 1;
    setp.eq.u32 %w2, %warp, 2;
    setp.eq.u32 %w3, %warp, 3;
    setp.eq.u32 %first, %lane, 0;
    setp.eq.and.u32 %lead0, %warp, 0, %first;
    setp.eq.and.u32 %lead1, %warp, 1, %first;
    mov.u32 %buffer, buffer;
    mad.lo.u32 %mine, %lane, 4, %buffer;
    mov.u32 %bar, barriers;
    add.u32 %bar2, %bar, 8;
    mov.u32 %slot, slot;
    ld.param.u64 %data, [data];
    mad.wide.u32 %word, %lane, 4, %data;
"""
INIT_BARRIERS = """
    @%lead0 mbarrier.init.shared::cta.b64 [%bar], 1;
    @%lead0 mbarrier.init.shared::cta.b64 [%bar2], 1;
    @%lead0 fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""


def kernel(body: str, arch: str = "sm_100a") -> str:
    """A kernel with a pointer parameter, 4 KiB of shared memory, mbarriers and a word for tcgen05.alloc."""
    return f"""
.version 8.8
.target {arch}
.address_size 64
.visible .entry k(.param .u64 data)
{{
    .shared .align 1024 .b8 buffer[4096];
    .shared .align 8 .b64 barriers[4];
    .shared .align 4 .b32 slot;
    {PROLOGUE}
    {body}
    ret;
}}
"""


def in_order(body: str) -> str:
    return "\n".join(line.lstrip().removeprefix("~") for line in body.splitlines())


def out_of_order(body: str) -> str:
    return "\n".join(line for line in body.splitlines() if not line.lstrip().startswith("~"))


def run(body: str, options: Options, *, arch: str = "sm_100a", warps: int = 2, ctas: int = 1) -> Report:
    data = np.arange(1024, dtype=np.uint32)
    return run_ptx(
        kernel(body, arch),
        [data],
        grid=(ctas, 1, 1),
        cluster=(ctas, 1, 1),
        block=(32 * warps, 1, 1),
        options=options,
        check=False,
    )


def names(finding: Finding, first: str, second: str) -> bool:
    """Whether the two instructions of a race start like this, guards aside, in either order."""
    if finding.kind != "race":
        return False
    assert finding.other is not None
    here, there = (re.sub(r"^@\S+\s+", "", place.ptx) for place in (finding.at, finding.other))
    orders = ((here, there), (there, here))
    return any(a.startswith(first) and b.startswith(second) for a, b in orders)


@dataclass(frozen=True)
class Law:
    """A correct kernel. Without the lines marked ~ the instructions that start like `pair` race."""

    name: str
    pair: tuple[str, str]
    body: str
    says: str = "is not ordered with"
    arch: str = "sm_100a"
    warps: int = 2
    ctas: int = 1


def wait(barrier: str, parity: str | int, label: str, mark: str = "", guard: str = "") -> str:
    """Waits for a phase; `guard` is the predicate of the threads that wait."""
    skip = f"@!{guard} bra {label}_END;" if guard else ""
    return f"""
    {skip}
{label}:
    {mark}mbarrier.try_wait.parity.shared::cta.b64 %done, [{barrier}], {parity};
    {mark}@!%done bra {label};
{label}_END:
"""


LOAD_BULK = """
    @%lead0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 128;
    @%lead0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%buffer], [%data], 128, [%bar];
"""
STORE_BULK = """
    @%lead1 cp.async.bulk.global.shared::cta.bulk_group [%data], [%buffer], 128;
    @%lead1 cp.async.bulk.commit_group;
"""
STORE_BULK_DONE = "@%lead1 cp.async.bulk.wait_group 0;"

# %c: the lane's row of 16 bytes in the buffer; %word: the same in global memory.
ROWS = """
    mad.lo.u32 %c, %lane, 16, %buffer;
    mad.wide.u32 %word, %lane, 16, %data;
"""
LOAD_MATRICES = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%a, %b, %d, %i}, [%c];"

NO_FENCE = "no fence.proxy.async lies between"

THREADS = [
    Law(
        "a barrier orders a read after a write",
        ("ld.shared", "st.shared"),
        """
        @%w0 st.shared.u32 [%mine], %lane;
        ~bar.sync 0;
        @%w1 ld.shared.u32 %a, [%mine];
        """,
    ),
    Law(
        "a barrier orders a write after a read",
        ("ld.shared", "st.shared"),
        """
        @%w1 ld.shared.u32 %a, [%mine];
        ~bar.sync 0;
        @%w0 st.shared.u32 [%mine], %lane;
        """,
    ),
    Law(
        "a barrier orders a write after a write",
        ("st.shared.u32", "st.shared.v2"),
        """
        @%w0 st.shared.u32 [%buffer], %lane;
        ~bar.sync 0;
        @%w1 st.shared.v2.u32 [%buffer], {%lane, %lane};
        """,
    ),
    Law(
        "bar.arrive releases, bar.sync acquires",
        ("ld.shared", "st.shared"),
        """
        @%w0 st.shared.u32 [%mine], %lane;
        ~@%w0 bar.arrive 1, 64;
        ~@%w1 bar.sync 1, 64;
        @%w1 ld.shared.u32 %a, [%mine];
        """,
    ),
    Law(
        "what follows an arrival waits for the next one",
        ("ld.shared", "st.shared"),
        """
        mov.u32 %i, 1;
        @%w1 bra READ;
    NEXT:
        st.shared.u32 [%mine], %i;
        bar.arrive %i, 64;
        add.u32 %i, %i, 1;
        setp.lt.u32 %done, %i, 3;
        @%done bra NEXT;
        bra END;
    READ:
        bar.sync 1, 64;
        ~bar.sync 2, 64;
        ld.shared.u32 %a, [%mine];
    END:
        """,
    ),
    Law(
        "order is transitive",
        ("ld.shared", "st.shared"),
        """
        @%w0 st.shared.u32 [%mine], %lane;
        @%w0 bar.sync 1, 64;
        @%w1 bar.sync 1, 64;
        ~@%w1 bar.sync 2, 64;
        ~@%w2 bar.sync 2, 64;
        @%w2 ld.shared.u32 %a, [%mine];
        """,
        warps=3,
    ),
    Law(
        "arriving at an mbarrier releases, waiting acquires",
        ("ld.shared", "st.shared"),
        f"""
        {INIT_BARRIERS}
        @%w0 st.shared.u32 [%mine], %lane;
        bar.warp.sync -1;
        @%lead0 mbarrier.arrive.shared::cta.b64 _, [%bar];
        {wait("%bar", 0, "FULL", "~")}
        @%w1 ld.shared.u32 %a, [%mine];
        """,
    ),
    Law(
        "an mbarrier is initialised before others use it",
        ("mbarrier.init", "mbarrier.arrive"),
        """
        @%lead0 mbarrier.init.shared::cta.b64 [%bar], 1;
        @%w0 bar.arrive 1, 64;
        ~@%w1 bar.sync 1, 64;
        @%lead1 mbarrier.arrive.shared::cta.b64 _, [%bar];
        """,
    ),
    Law(
        "a plain read waits for atomics, which do not wait for each other",
        ("ld.shared", "atom.shared"),
        """
        @%w0 st.shared.u32 [%buffer], 0;
        bar.sync 0;
        atom.shared.add.f32 %f0, [%buffer], 0f3F800000;
        ~bar.sync 0;
        @%w2 ld.shared.u32 %b, [%buffer];
        """,
        warps=3,
    ),
    Law(
        "barrier.cluster orders the CTAs of a cluster",
        ("ld.shared", "st.shared::cluster"),
        """
        mov.u32 %rank, %cluster_ctarank;
        setp.eq.u32 %w2, %rank, 0;
        setp.eq.u32 %w3, %rank, 1;
        mapa.shared::cluster.u32 %peer, %mine, 1;
        @%w2 st.shared::cluster.u32 [%peer], %lane;
        ~barrier.cluster.arrive.release.aligned;
        ~barrier.cluster.wait.acquire.aligned;
        @%w3 ld.shared.u32 %a, [%mine];
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        """,
        warps=1,
        ctas=2,
    ),
    Law(
        "a relaxed arrival at barrier.cluster orders nothing",
        ("ld.shared", "st.shared::cluster"),
        """
        mov.u32 %rank, %cluster_ctarank;
        setp.eq.u32 %w2, %rank, 0;
        setp.eq.u32 %w3, %rank, 1;
        mapa.shared::cluster.u32 %peer, %mine, 1;
        @%w2 st.shared::cluster.u32 [%peer], %lane;
        barrier.cluster.arrive.relaxed.aligned;
        barrier.cluster.wait.acquire.aligned;
        ~barrier.cluster.arrive.release.aligned;
        ~barrier.cluster.wait.acquire.aligned;
        @%w3 ld.shared.u32 %a, [%mine];
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        """,
        warps=1,
        ctas=2,
    ),
]

# The first lane of a warp speaks for the others once bar.warp.sync has ordered them.
LANES = [
    Law(
        "a lane that arrives for its warp",
        ("ld.shared", "st.shared"),
        f"""
        {INIT_BARRIERS}
        @%w0 st.shared.u32 [%mine], %lane;
        ~bar.warp.sync -1;
        @%lead0 mbarrier.arrive.shared::cta.b64 _, [%bar];
        {wait("%bar", 0, "FULL")}
        @%w1 ld.shared.u32 %a, [%mine];
        """,
    ),
    Law(
        "a lane that arrives for the reads of its warp",
        ("st.shared", "ld.shared"),
        f"""
        {INIT_BARRIERS}
        @%w0 ld.shared.v2.u32 {{%a, %b}}, [%buffer];
        ~bar.warp.sync -1;
        @%lead0 mbarrier.arrive.shared::cta.b64 _, [%bar];
        {wait("%bar", 0, "FULL")}
        @%w1 st.shared.u32 [%mine], %lane;
        """,
    ),
    Law(
        "a lane that waits for its warp",
        ("ld.shared", "st.shared"),
        f"""
        {INIT_BARRIERS}
        @%lead0 st.shared.u32 [%buffer+4], 1;
        @%lead0 mbarrier.arrive.shared::cta.b64 _, [%bar];
        {wait("%bar", 0, "FULL", guard="%lead1")}
        ~bar.warp.sync -1;
        @%w1 ld.shared.u32 %a, [%mine];
        """,
    ),
    Law(
        "lanes that wait for another lane's bulk store",
        ("cp.async.bulk", "st.shared"),
        f"""
        {STORE_BULK}
        cp.async.bulk.wait_group.read 0;
        ~bar.warp.sync -1;
        @%w1 st.shared.u32 [%mine], %lane;
        {STORE_BULK_DONE}
        """,
    ),
    Law(
        "a lane that has copied what its warp wrote",
        ("cp.async.bulk", "st.shared"),
        f"""
        @%w1 st.shared.u32 [%mine], %lane;
        @%w1 fence.proxy.async.shared::cta;
        ~bar.warp.sync -1;
        {STORE_BULK}
        {STORE_BULK_DONE}
        """,
    ),
    Law(
        "a matrix that a warp stores together",
        ("cp.async.bulk", "stmatrix"),
        f"""
        mad.lo.u32 %c, %lane, 16, %buffer;
        @%w1 stmatrix.sync.aligned.m8n8.x4.shared.b16 [%c], {{%a, %b, %c, %d}};
        @%w1 fence.proxy.async.shared::cta;
        ~bar.warp.sync -1;
        {STORE_BULK}
        {STORE_BULK_DONE}
        """,
    ),
    Law(
        "a matrix that a warp loads together",
        ("ldmatrix", "st.shared"),
        f"""
        {ROWS}
        @%w0 st.shared.u32 [%c], %lane;
        ~bar.sync 0;
        @%w1 {LOAD_MATRICES}
        """,
    ),
    Law(
        "shuffles, votes and elections order nothing",
        ("ld.shared", "st.shared"),
        """
        @%lead0 st.shared.u32 [%buffer+4], 1;
        shfl.sync.idx.b32 %a, %lane, 0, 31, -1;
        vote.sync.any.pred %done, %first, -1;
        elect.sync %a|%off, -1;
        ~bar.warp.sync -1;
        @%w0 ld.shared.u32 %a, [%mine];
        """,
    ),
]

# %off: lanes that are not the first or its neighbour; %c: the word of the lane's neighbour.
NEIGHBOURS = """
    setp.gt.u32 %off, %lane, 1;
    xor.b32 %c, %lane, 1;
    mad.lo.u32 %c, %c, 4, %buffer;
"""
ONE_WARP = [
    Law(
        "bar.warp.sync orders a lane's read after another lane's write",
        ("ld.shared", "st.shared"),
        f"""
        {NEIGHBOURS}
        @%off st.shared.u32 [%mine], %lane;
        shfl.sync.idx.b32 %a, %lane, 0, 31, -1;
        vote.sync.any.pred %done, %first, -1;
        ~bar.warp.sync -1;
        @%off ld.shared.u32 %a, [%c];
        """,
        warps=1,
    ),
    Law(
        "bar.warp.sync orders a lane's write after another lane's read",
        ("ld.shared", "st.shared"),
        f"""
        {NEIGHBOURS}
        @%off ld.shared.u32 %a, [%c];
        ~bar.warp.sync -1;
        @%off st.shared.u32 [%mine], %lane;
        """,
        warps=1,
    ),
    Law(
        "bar.warp.sync orders writes of two lanes",
        ("st.shared.u32", "st.shared.u8"),
        f"""
        {NEIGHBOURS}
        @%off st.shared.u32 [%mine], %lane;
        ~bar.warp.sync -1;
        @%off st.shared.u8 [%c+3], %lane;
        """,
        warps=1,
    ),
    Law(
        "a barrier of all threads orders lanes",
        ("ld.shared", "st.shared"),
        f"""
        {NEIGHBOURS}
        @%off st.shared.u32 [%mine], %lane;
        ~bar.sync 0;
        @%off ld.shared.u32 %a, [%c];
        """,
        warps=1,
    ),
    Law(
        "a lane waits for its own cp.async, not for those of other lanes",
        ("cp.async.ca", "ld.shared"),
        f"""
        {NEIGHBOURS}
        cp.async.ca.shared.global [%mine], [%word], 4;
        cp.async.commit_group;
        cp.async.wait_group 0;
        ld.shared.u32 %a, [%mine];
        ~bar.warp.sync -1;
        ld.shared.v2.u32 {{%a, %b}}, [%buffer+16];
        """,
        says="is not ordered with the cp.async by lane",
        arch="sm_80",
        warps=1,
    ),
    Law(
        "bar.warp.sync before the wait does not order lanes after cp.async",
        ("cp.async.ca", "ldmatrix"),
        f"""
        {ROWS}
        cp.async.ca.shared.global [%c], [%word], 16;
        bar.warp.sync -1;
        cp.async.wait_all;
        ~bar.warp.sync -1;
        {LOAD_MATRICES}
        """,
        arch="sm_80",
        warps=1,
    ),
    Law(
        "bar.warp.sync gathers the cp.async of all lanes for the one that arrives",
        ("cp.async.ca", "ld.shared"),
        f"""
        {INIT_BARRIERS}
        @%w0 cp.async.ca.shared.global [%mine], [%word], 4;
        @%w0 cp.async.wait_all;
        ~@%w0 bar.warp.sync -1;
        @%lead0 mbarrier.arrive.shared::cta.b64 _, [%bar];
        {wait("%bar", 0, "FULL")}
        @%w1 ld.shared.u32 %a, [%mine];
        """,
    ),
    Law(
        "an arrival of cp.async is for the copies of its own lane",
        ("cp.async.ca", "ld.shared"),
        f"""
        @%lead0 mbarrier.init.shared::cta.b64 [%bar], 1;
        @%lead1 mbarrier.init.shared::cta.b64 [%bar2], 31;
        bar.sync 0;
        @%w0 cp.async.ca.shared.global [%mine], [%word], 4;
        @%lead0 cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%bar];
        setp.gt.and.u32 %off, %lane, 0, %w0;
        @%off cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%bar2];
        {wait("%bar", 0, "FIRST")}
        {wait("%bar2", 0, "OTHERS", mark="~")}
        @%w1 ld.shared.u32 %a, [%mine];
        """,
    ),
    Law(
        "cp.async may not overwrite what the warp's ldmatrix reads",
        ("cp.async.ca", "ldmatrix"),
        f"""
        {ROWS}
        st.shared.v4.u32 [%c], {{%a, %a, %a, %a}};
        bar.warp.sync -1;
        {LOAD_MATRICES}
        ~bar.warp.sync -1;
        cp.async.ca.shared.global [%c], [%word], 16;
        cp.async.wait_all;
        """,
        arch="sm_80",
        warps=1,
    ),
    Law(
        "stmatrix stores what other lanes read",
        ("stmatrix", "ld.shared"),
        f"""
        {ROWS}
        stmatrix.sync.aligned.m8n8.x4.shared.b16 [%c], {{%a, %b, %d, %i}};
        ~bar.warp.sync -1;
        ld.shared.u32 %a, [%c];
        """,
        warps=1,
    ),
]


def test_a_lane_publishes_what_it_did_itself() -> None:
    body = f"""
        {INIT_BARRIERS}
        @%w0 st.shared.u32 [%mine], %lane;
        @%lead0 mbarrier.arrive.shared::cta.b64 _, [%bar];
        {wait("%bar", 0, "FULL")}
        @%w1 ld.shared.u32 %a, [%buffer+<byte>];
    """
    assert not run(body.replace("<byte>", "0"), SCHEDULES[0]).findings
    assert run(body.replace("<byte>", "4"), SCHEDULES[0]).findings


COPIES = [
    Law(
        "a bulk store reads what went through a proxy fence, at the writer",
        ("cp.async.bulk", "st.shared"),
        f"""
        @%w0 st.shared.u32 [%mine], %lane;
        ~@%w0 fence.proxy.async.shared::cta;
        bar.sync 0;
        {STORE_BULK}
        {STORE_BULK_DONE}
        """,
        says=NO_FENCE,
    ),
    Law(
        "a bulk store reads what went through a proxy fence, at the issuer",
        ("cp.async.bulk", "st.shared"),
        f"""
        @%w0 st.shared.u32 [%mine], %lane;
        bar.sync 0;
        ~@%w1 fence.proxy.async.shared::cta;
        {STORE_BULK}
        {STORE_BULK_DONE}
        """,
        says=NO_FENCE,
    ),
    Law(
        "a proxy fence does not cover later writes",
        ("cp.async.bulk", "st.shared.v2"),
        f"""
        @%w1 st.shared.u32 [%mine], %lane;
        @%w1 fence.proxy.async.shared::cta;
        bar.warp.sync -1;
        @%w1 st.shared.v2.u32 [%buffer], {{%lane, %lane}};
        ~@%w1 fence.proxy.async.shared::cta;
        bar.warp.sync -1;
        {STORE_BULK}
        {STORE_BULK_DONE}
        """,
        says=NO_FENCE,
    ),
    Law(
        "a fence without a barrier orders nothing",
        ("cp.async.bulk", "st.shared"),
        f"""
        @%w0 st.shared.u32 [%mine], %lane;
        @%w0 fence.proxy.async.shared::cta;
        ~bar.sync 0;
        {STORE_BULK}
        {STORE_BULK_DONE}
        """,
    ),
    Law(
        "a bulk store's source is free when it has been read",
        ("cp.async.bulk", "st.shared.v2"),
        f"""
        @%w1 st.shared.u32 [%mine], %lane;
        @%w1 fence.proxy.async.shared::cta;
        bar.warp.sync -1;
        {STORE_BULK}
        ~@%lead1 cp.async.bulk.wait_group.read 0;
        bar.warp.sync -1;
        @%w1 st.shared.v2.u32 [%buffer], {{%lane, %lane}};
        {STORE_BULK_DONE}
        """,
    ),
    Law(
        "a bulk load has landed when its mbarrier says so",
        ("cp.async.bulk", "ld.shared"),
        f"""
        {INIT_BARRIERS}
        {LOAD_BULK}
        {wait("%bar", 0, "FULL", "~")}
        ld.shared.u32 %a, [%mine];
        bar.sync 0;
        {wait("%bar", 0, "DRAINED")}
        """,
    ),
    Law(
        "a bulk load comes after generic reads, for which a barrier is enough",
        ("cp.async.bulk", "ld.shared"),
        f"""
        {INIT_BARRIERS}
        @%w1 ld.shared.u32 %a, [%mine];
        ~bar.sync 0;
        {LOAD_BULK}
        {wait("%bar", 0, "FULL")}
        """,
    ),
    Law(
        "a bulk load comes after generic writes, for which it takes a fence",
        ("cp.async.bulk", "st.shared"),
        f"""
        {INIT_BARRIERS}
        @%w1 st.shared.u32 [%mine], %lane;
        ~@%w1 fence.proxy.async.shared::cta;
        bar.sync 0;
        {LOAD_BULK}
        {wait("%bar", 0, "FULL")}
        """,
        says=NO_FENCE,
    ),
    Law(
        "cp.async has landed when its group has been waited for",
        ("cp.async", "ld.shared"),
        """
        @%w0 cp.async.ca.shared.global [%mine], [%word], 4;
        cp.async.commit_group;
        ~cp.async.wait_group 0;
        @%w0 ld.shared.u32 %a, [%mine];
        cp.async.wait_all;
        """,
    ),
    Law(
        "cp.async.wait_group lets the newest groups go on",
        ("cp.async", "ld.shared.u32 %b"),
        """
        @%w0 cp.async.ca.shared.global [%mine], [%word], 4;
        cp.async.commit_group;
        @%w0 cp.async.ca.shared.global [%mine+128], [%word+128], 4;
        cp.async.commit_group;
        cp.async.wait_group 1;
        @%w0 ld.shared.u32 %a, [%mine];
        ~cp.async.wait_group 0;
        @%w0 ld.shared.u32 %b, [%mine+128];
        cp.async.wait_all;
        """,
    ),
    Law(
        "cp.async has landed for the warp that waits for it, and for others after a barrier",
        ("cp.async", "ldmatrix"),
        f"""
        {ROWS}
        @%w0 cp.async.cg.shared.global [%c], [%word], 16;
        cp.async.commit_group;
        cp.async.wait_group 0;
        ~bar.sync 0;
        @%w1 {LOAD_MATRICES}
        """,
    ),
    Law(
        "cp.async fills what all have read",
        ("cp.async", "ldmatrix"),
        f"""
        {ROWS}
        @%w0 st.shared.v4.u32 [%c], {{0, 0, 0, 0}};
        bar.sync 0;
        @%w1 {LOAD_MATRICES}
        ~bar.sync 0;
        @%w0 cp.async.cg.shared.global [%c], [%word], 16;
        cp.async.wait_all;
        """,
    ),
    Law(
        "cp.async releases through the mbarrier that it arrives at",
        ("cp.async", "ld.shared"),
        f"""
        @%lead0 mbarrier.init.shared::cta.b64 [%bar], 32;
        bar.sync 0;
        @%w0 cp.async.ca.shared.global [%mine], [%word], 4;
        @%w0 cp.async.mbarrier.arrive.noinc.shared.b64 [%bar];
        {wait("%bar", 0, "FULL", "~")}
        @%w1 ld.shared.u32 %a, [%mine];
        bar.sync 0;
        {wait("%bar", 0, "DRAINED")}
        """,
    ),
    Law(
        "cp.async writes through the generic proxy",
        ("cp.async.bulk", "cp.async.ca"),
        f"""
        @%w1 cp.async.ca.shared.global [%mine], [%word], 4;
        cp.async.wait_all;
        bar.warp.sync -1;
        ~@%w1 fence.proxy.async.shared::cta;
        {STORE_BULK}
        {STORE_BULK_DONE}
        """,
        says=NO_FENCE,
    ),
]

MMA_WGMMA = """
    setp.ne.u32 %off, %lane, %lane;
    shr.u32 %c, %buffer, 4;
    cvt.u64.u32 %desc, %c;
    or.b64 %desc, %desc, 0x0000001000080000;  // core matrices 128 bytes apart along K, 256 along M and N
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %desc, %desc, %off, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
"""
FILL_WGMMA = """
    mad.lo.u32 %c, %tid, 16, %buffer;
    st.shared.v4.u32 [%c], {0, 0, 0, 0};
"""

WGMMA = [
    Law(
        "wgmma reads what went through a proxy fence",
        ("wgmma.mma_async", "st.shared"),
        f"""
        {FILL_WGMMA}
        ~fence.proxy.async.shared::cta;
        bar.sync 0;
        {MMA_WGMMA}
        wgmma.wait_group.sync.aligned 0;
        """,
        says=NO_FENCE,
        arch="sm_90a",
        warps=4,
    ),
    Law(
        "wgmma's operands are free when its group has been waited for",
        ("wgmma.mma_async", "st.shared.u32"),
        f"""
        {FILL_WGMMA}
        fence.proxy.async.shared::cta;
        bar.sync 0;
        {MMA_WGMMA}
        ~wgmma.wait_group.sync.aligned 0;
        bar.sync 0;
        @%w0 st.shared.u32 [%mine], %lane;
        wgmma.wait_group.sync.aligned 0;
        """,
        arch="sm_90a",
        warps=4,
    ),
    Law(
        # PTX ISA, wgmma.commit_group: a group belongs to the warpgroup, not to the warp.
        "one warp may wait for the products of all four",
        ("wgmma.mma_async", "st.shared.u32"),
        f"""
        {FILL_WGMMA}
        fence.proxy.async.shared::cta;
        bar.sync 0;
        {MMA_WGMMA}
        ~wgmma.wait_group.sync.aligned 0;
        @%w0 st.shared.u32 [%mine], %lane;
        wgmma.wait_group.sync.aligned 0;
        """,
        arch="sm_90a",
        warps=4,
    ),
]

# %tmem: 32 columns of TMEM, from the first lane that the warp may use.
ALLOCATE = """
    @%w0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%slot], 32;
    @%w0 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    bar.sync 0;
    ld.shared.u32 %b, [%slot];
    shl.b32 %tmem, %warp, 21;
    add.u32 %tmem, %tmem, %b;
"""
FREE = """
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    @%w0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %b, 32;
"""
STORE_TENSOR = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%tmem], {%lane};"
LOAD_TENSOR = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%a}, [%tmem];"
FILL_TCGEN05 = """
    mad.lo.u32 %c, %tid, 32, %buffer;
    st.shared.v4.u32 [%c], {0, 0, 0, 0};
    st.shared.v4.u32 [%c+16], {0, 0, 0, 0};
"""
# D (128 x 16, f32) = A (128 x 16) B (16 x 16)^T, both f16 and both from the start of the buffer.
MMA_TCGEN05 = """
    setp.ne.u32 %off, %lane, %lane;
    shr.u32 %c, %buffer, 4;
    cvt.u64.u32 %desc, %c;
    or.b64 %desc, %desc, 0x0000401000080000;
    mov.u32 %d, 0x08040010;
    @%lead0 tcgen05.mma.cta_group::1.kind::f16 [%b], %desc, %desc, %d, %off;
    @%lead0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];
"""

TCGEN05 = [
    Law(
        "a tcgen05.ld comes after tcgen05.wait::st",
        ("tcgen05.ld", "tcgen05.st"),
        f"""
        {ALLOCATE}
        {STORE_TENSOR}
        ~tcgen05.wait::st.sync.aligned;
        {LOAD_TENSOR}
        tcgen05.wait::ld.sync.aligned;
        tcgen05.wait::st.sync.aligned;
        {FREE}
        """,
    ),
    Law(
        "a tcgen05.st comes after tcgen05.wait::ld",
        ("tcgen05.ld", "tcgen05.st"),
        f"""
        {ALLOCATE}
        {LOAD_TENSOR}
        ~tcgen05.wait::ld.sync.aligned;
        {STORE_TENSOR}
        tcgen05.wait::st.sync.aligned;
        tcgen05.wait::ld.sync.aligned;
        {FREE}
        """,
    ),
    Law(
        "tensor memory is freed after its last use",
        ("tcgen05.dealloc", "tcgen05.st"),
        f"""
        {ALLOCATE}
        @%w1 {STORE_TENSOR}
        @%w1 tcgen05.wait::st.sync.aligned;
        tcgen05.fence::before_thread_sync;
        @%w1 bar.arrive 1, 64;
        ~@%w0 bar.sync 1, 64;
        tcgen05.fence::after_thread_sync;
        @%w0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %b, 32;
        """,
    ),
    Law(
        "products follow each other, and a commit is for all of them",
        ("tcgen05.mma", "tcgen05.ld"),
        f"""
        {INIT_BARRIERS}
        {ALLOCATE}
        {FILL_TCGEN05}
        fence.proxy.async.shared::cta;
        bar.sync 0;
        {MMA_TCGEN05}
        {MMA_TCGEN05.replace("%bar", "%bar2")}
        {wait("%bar2", 0, "DONE", "~")}
        {LOAD_TENSOR}
        tcgen05.wait::ld.sync.aligned;
        {wait("%bar", 0, "DRAINED")}
        {wait("%bar2", 0, "DRAINED2")}
        {FREE}
        """,
        warps=4,
    ),
    Law(
        "a product is there when its commit has arrived",
        ("tcgen05.mma", "tcgen05.ld"),
        f"""
        {INIT_BARRIERS}
        {ALLOCATE}
        {FILL_TCGEN05}
        fence.proxy.async.shared::cta;
        bar.sync 0;
        {MMA_TCGEN05}
        {wait("%bar", 0, "DONE", "~")}
        {LOAD_TENSOR}
        tcgen05.wait::ld.sync.aligned;
        {wait("%bar", 0, "DRAINED")}
        {FREE}
        """,
        warps=4,
    ),
    Law(
        "operands of a product are free when its commit has arrived",
        ("tcgen05.mma", "st.shared.u32"),
        f"""
        {INIT_BARRIERS}
        {ALLOCATE}
        {FILL_TCGEN05}
        fence.proxy.async.shared::cta;
        bar.sync 0;
        {MMA_TCGEN05}
        {wait("%bar", 0, "DONE", "~")}
        @%w1 st.shared.u32 [%mine], %lane;
        {wait("%bar", 0, "DRAINED")}
        {FREE}
        """,
        warps=4,
    ),
    Law(
        "a product reads what went through a proxy fence",
        ("tcgen05.mma", "st.shared"),
        f"""
        {INIT_BARRIERS}
        {ALLOCATE}
        {FILL_TCGEN05}
        ~fence.proxy.async.shared::cta;
        bar.sync 0;
        {MMA_TCGEN05}
        {wait("%bar", 0, "DONE")}
        {FREE}
        """,
        says=NO_FENCE,
        warps=4,
    ),
]

LAWS = [*THREADS, *LANES, *ONE_WARP, *COPIES, *WGMMA, *TCGEN05]
each_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
each_schedule = pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: f"{o.schedule}{o.seed}")


@each_schedule
@each_law
def test_order_is_silent(law: Law, options: Options) -> None:
    report = run(in_order(law.body), options, arch=law.arch, warps=law.warps, ctas=law.ctas)
    assert not report.findings


@each_law
def test_missing_order_names_both_accesses(law: Law) -> None:
    """The schedule is eager, in which nothing ever goes wrong in fact."""
    report = run(out_of_order(law.body), SCHEDULES[0], arch=law.arch, warps=law.warps, ctas=law.ctas)
    assert any(names(finding, *law.pair) and law.says in finding.message for finding in report.findings)


@each_schedule
@each_law
def test_missing_order_is_found(law: Law, options: Options) -> None:
    assert run(out_of_order(law.body), options, arch=law.arch, warps=law.warps, ctas=law.ctas).findings


# Two stages of 128 bytes, each filled four times by warp 0 and read by warp 1.
RING = """
    .reg .b32 %full, %empty, %stage, %parity, %from;
    @%lead0 mbarrier.init.shared::cta.b64 [%bar], 1;
    @%lead0 mbarrier.init.shared::cta.b64 [%bar+8], 1;
    @%lead0 mbarrier.init.shared::cta.b64 [%bar+16], 1;
    @%lead0 mbarrier.init.shared::cta.b64 [%bar+24], 1;
    @%lead0 fence.mbarrier_init.release.cluster;
    bar.sync 0;
    mov.u32 %i, 0;
NEXT:
    and.b32 %a, %i, 1;
    mad.lo.u32 %full, %a, 8, %bar;
    add.u32 %empty, %full, 16;
    mad.lo.u32 %stage, %a, 128, %buffer;
    shr.u32 %parity, %i, 1;
    and.b32 %parity, %parity, 1;
    @%w1 bra CONSUME;
    xor.b32 %parity, %parity, 1;
EMPTY:
    <empty>mbarrier.try_wait.parity.shared::cta.b64 %done, [%empty], %parity;
    <empty>@!%done bra EMPTY;
    @%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%full], 128;
    @%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%stage], [%data], 128, [%full];
    bra STEP;
CONSUME:
    <full>mbarrier.try_wait.parity.shared::cta.b64 %done, [%full], %parity;
    <full>@!%done bra CONSUME;
    mad.lo.u32 %from, %lane, 4, %stage;
    ld.shared.u32 %a, [%from];
    bar.warp.sync -1;
    @%first mbarrier.arrive.shared::cta.b64 _, [%empty];
STEP:
    add.u32 %i, %i, 1;
    setp.lt.u32 %done, %i, 8;
    @%done bra NEXT;
"""


def ring(**without: bool) -> str:
    marks = {f"<{name}>": "~" if name in without else "" for name in ("full", "empty")}
    text = RING
    for mark, sign in marks.items():
        text = text.replace(mark, sign)
    return out_of_order(text)


@each_schedule
def test_ring_is_silent(options: Options) -> None:
    assert not run(ring(), options).findings


@each_schedule
@pytest.mark.parametrize("missing", ["full", "empty"])
def test_ring_needs_both_waits(missing: str, options: Options) -> None:
    assert run(ring(**{missing: True}), options).findings


def test_ring_overwrites_unread_stage() -> None:
    findings = run(ring(empty=True), SCHEDULES[0]).findings
    assert any(names(finding, "cp.async.bulk", "cp.async.bulk") for finding in findings)


@each_schedule
def test_copies_of_one_phase_must_not_overlap(options: Options) -> None:
    def body(offset: int) -> str:
        copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        return f"""
        {INIT_BARRIERS}
        @%lead0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 256;
        @%lead0 {copy} [%buffer], [%data], 128, [%bar];
        @%lead0 {copy} [%buffer+{offset}], [%data], 128, [%bar];
        {wait("%bar", 0, "FULL")}
        """

    assert not run(body(128), options).findings
    (race,) = run(body(112), options).findings
    assert names(race, "cp.async.bulk", "cp.async.bulk")
    assert "0x10)" in race.message.replace("0x470, 0x480)", "0x10)")


@each_schedule
def test_parts_of_a_word_are_apart(options: Options) -> None:
    """Accesses share bytes, not words."""
    body = """
        mad.lo.u32 %c, %lane, 6, %buffer;
        @%w0 st.shared.u16 [%c], 1;
        @%w1 st.shared.u16 [%c+4], 2;
        @%w1 ld.shared.u8 %a, [%c+<byte>];
    """
    assert not run(body.replace("<byte>", "5"), options).findings
    (race,) = run(body.replace("<byte>", "0"), options).findings
    assert names(race, "st.shared.u16", "ld.shared.u8")


@each_schedule
def test_lanes_do_not_race_at_once_or_with_themselves(options: Options) -> None:
    """Order within an instruction is not checked, nor within one piece of asynchronous work."""
    body = """
        mad.lo.u32 %c, %lane, 2, %buffer;
        @%w0 st.shared.u16 [%c+256], 1;
        @%w0 ld.shared.u16 %a, [%c+256];
        @%w0 st.shared.u16 [%c+256], 2;
        @%w0 st.shared.u32 [%buffer], 3;
        @%w0 ld.shared.u32 %a, [%buffer];
        bar.warp.sync -1;
        @%w0 cp.async.ca.shared.global [%buffer+4], [%data], 4;
        cp.async.wait_all;
    """
    assert not run(body, options).findings


def test_a_lane_that_speaks_for_loads_of_its_warp() -> None:
    """PTX leaves open whether an aligned wait orders the lanes; with strict "lanes" it does not."""
    body = f"""
        {INIT_BARRIERS}
        {ALLOCATE}
        setp.eq.u32 %w3, %warp, 4;
        @%w0 {LOAD_TENSOR}
        @%w0 tcgen05.wait::ld.sync.aligned;
        <sync>
        @%lead0 mbarrier.arrive.shared::cta.b64 _, [%bar];
        {wait("%bar", 0, "FULL")}
        @%w3 mov.u32 %tmem, %b;
        @%w3 {STORE_TENSOR}
        @%w3 tcgen05.wait::st.sync.aligned;
        {FREE}
    """
    strict = Options(strict=frozenset({"lanes"}))
    assert not run(body.replace("<sync>", ""), Options(), warps=5).findings
    assert not run(body.replace("<sync>", "bar.warp.sync -1;"), strict, warps=5).findings
    (race,) = run(body.replace("<sync>", ""), strict, warps=5).findings
    assert names(race, "tcgen05.ld", "tcgen05.st")


@each_schedule
def test_freed_tensor_memory_starts_afresh(options: Options) -> None:
    """All 512 columns, twice: tcgen05.alloc itself waits until the previous owner has freed them."""
    allocate = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%c], 512;"
    body = f"""
        .reg .pred %idle;
        and.b32 %a, %warp, 3;
        setp.ne.u32 %idle, %a, 0;
        @%idle bra END;
        mad.lo.u32 %c, %warp, 4, %buffer;
        {allocate}
        ld.shared.u32 %tmem, [%c];
        {STORE_TENSOR}
        tcgen05.wait::st.sync.aligned;
        tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tmem, 512;
    END:
    """
    assert not run(body, options, warps=5).findings


def test_a_range_is_one_finding() -> None:
    body = "st.shared.u32 [%mine], %lane;"
    (race,) = run(body, SCHEDULES[0], warps=2).findings
    assert race.times == 1
    assert "write of shared memory [0x400, 0x480) of CTA 0 by warp 1 of CTA 0" in race.message


def test_reading_what_nobody_wrote() -> None:
    body = """
        @%w0 st.shared.u16 [%buffer], 1;
        @%w0 ld.shared.<type> %a, [%buffer];
        @%w0 ld.shared.<type> %a, [%buffer];
    """
    strict = Options(strict=frozenset({"uninitialised"}))
    assert not run(body.replace("<type>", "u16"), strict).findings
    assert not run(body.replace("<type>", "u32"), Options()).findings
    first, second = run(body.replace("<type>", "u32"), strict).findings
    assert first.kind == second.kind == "uninitialised"
    assert first.at.ptx_line + 1 == second.at.ptx_line


def test_races_can_be_left_unchecked() -> None:
    assert not run(out_of_order(THREADS[0].body), Options(races=False)).findings


@pytest.mark.parametrize("ordered", [True, False])
def test_long_kernels(ordered: bool) -> None:
    """A write from long ago still counts, whatever has been synchronised since."""
    barrier = "bar.sync 0;" if ordered else ""
    findings = run(
        f"""
        {INIT_BARRIERS}
        @%w1 st.shared.u32 [%mine], %lane;
        {barrier}
        @%w1 bra END;
        mov.u32 %i, 0;
    NEXT:
        @%first mbarrier.arrive.shared::cta.b64 _, [%bar];
        st.shared.u32 [%mine+128], %i;
        add.u32 %i, %i, 1;
        setp.lt.u32 %done, %i, 70000;
        @%done bra NEXT;
        ld.shared.u32 %a, [%mine];
    END:
        """,
        Options(),
    ).findings
    assert [names(finding, "st.shared", "ld.shared") for finding in findings] == [True] * (not ordered)


# --- against brute force

WARPS = 3


@dataclass(frozen=True)
class Access:
    """An access by one lane, or by every lane if `lane` is None: lane i then touches the i-th word."""

    warp: int
    lane: int | None
    kind: str  # "ld", "st" or "atom"
    begin: int
    size: int

    def ptx(self) -> str:
        place, width = f"[%buffer+{self.begin}]", 8 * self.size
        guard = f"@%w{self.warp}"
        if self.lane is None:
            place = "[%mine]"
        else:
            guard = f"setp.eq.u32 %off, %tid, {32 * self.warp + self.lane}; @%off"
        if self.kind == "atom":
            return f"{guard} atom.shared.add.f32 %f0, {place}, 0f3F800000;"
        if self.kind == "st":
            return f"{guard} st.shared.u{width} {place}, %lane;"
        return f"{guard} ld.shared.u{width} %a, {place};"

    def by_lane(self) -> list[Access]:
        """The accesses of the two lanes that the checker must distinguish, here the first and the second."""
        if self.lane is not None:
            return [self]
        return [Access(self.warp, lane, self.kind, 4 * lane, 4) for lane in range(2)]

    def conflicts(self, other: Access) -> bool:
        apart = self.begin + self.size <= other.begin or other.begin + other.size <= self.begin
        kinds = {self.kind, other.kind}
        return not apart and ("st" in kinds or kinds == {"ld", "atom"})


@dataclass(frozen=True)
class Barrier:
    """A barrier of the given warps; for one warp it is bar.warp.sync."""

    warps: tuple[int, ...]

    def ptx(self) -> str:
        if len(self.warps) == 1:
            return f"@%w{self.warps[0]} bar.warp.sync -1;"
        number = 1 + sum(1 << warp for warp in self.warps)
        return " ".join(f"@%w{warp} bar.sync {number}, {32 * len(self.warps)};" for warp in self.warps)

    def by_lane(self) -> list[Barrier]:
        return [self]


Event = Access | Barrier


@st.composite
def access(draw: st.DrawFn) -> Access:
    kind = draw(st.sampled_from(["ld", "st", "atom"]))
    warp, lane = draw(st.integers(0, WARPS - 1)), draw(st.sampled_from([0, 1, None]))
    size = 4 if kind == "atom" or lane is None else draw(st.sampled_from([1, 2, 4]))
    return Access(warp, lane, kind, size * draw(st.integers(0, 8 // size - 1)), size)


GROUPS = [group for n in (1, 2, 3) for group in itertools.combinations(range(WARPS), n)]
EVENTS = st.lists(access() | st.sampled_from(GROUPS).map(Barrier), min_size=2, max_size=14)


def threads_of(event: Event) -> set[tuple[int, int | None]]:
    if isinstance(event, Access):
        return {(event.warp, event.lane)}
    return {(warp, lane) for warp in event.warps for lane in range(2)}


def racing(events: list[Event]) -> set[frozenset[int]]:
    """All pairs of conflicting accesses that no path of program order and barriers connects."""
    parts = [(i, part) for i, event in enumerate(events) for part in event.by_lane()]
    count = len(parts)
    reaches = np.zeros((count, count), bool)
    for i, j in itertools.combinations(range(count), 2):
        reaches[i, j] = bool(threads_of(parts[i][1]) & threads_of(parts[j][1]))
    for k in range(count):
        reaches |= np.outer(reaches[:, k], reaches[k])
    return {
        frozenset((parts[i][0], parts[j][0]))
        for i, j in itertools.combinations(range(count), 2)
        if isinstance(a := parts[i][1], Access)
        and isinstance(b := parts[j][1], Access)
        and a.conflicts(b)
        and not reaches[i, j]
    }


@settings(max_examples=150)
@given(EVENTS, st.sampled_from(SCHEDULES))
def test_agrees_with_brute_force(events: list[Event], options: Options) -> None:
    """No finding is false, and if there is a race there is a finding."""
    body = "\n".join(f"    {event.ptx()}" for event in events)
    text = kernel(body)
    first_line = text[: text.index(body)].count("\n") + 1
    found = {
        frozenset(place.ptx_line - first_line for place in (finding.at, finding.other) if place)
        for finding in run(body, options, warps=WARPS).findings
    }
    expected = racing(events)
    assert found <= expected
    assert bool(found) == bool(expected)


# --- the space of a proxy fence (PTX ISA, fence.proxy.async: .shared::cta, .shared::cluster, or all)

FENCES = ("", ".shared::cta", ".shared::cluster", ".global")
TO_PEER = """
    mov.u32 %rank, %cluster_ctarank;
    xor.b32 %peer, %rank, 1;
    mapa.shared::cluster.u32 %a, %mine, %peer;
"""
CLUSTER_BARRIER = """
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
"""


def proxy_races(body: str) -> list[Finding]:
    findings = run(TO_PEER + body + CLUSTER_BARRIER, SCHEDULES[0], ctas=2).findings
    assert all(names(f, "cp.async.bulk", "st.shared") and NO_FENCE in f.message for f in findings)
    return findings


@pytest.mark.parametrize("space", FENCES)
def test_a_writers_fence_covers_the_memory_that_it_names(space: str) -> None:
    """The writer's CTA is not the one whose memory it writes and a bulk store reads."""
    found = proxy_races(f"""
        @%w0 st.shared::cluster.u32 [%a], %lane;
        @%w0 fence.proxy.async{space};
        {CLUSTER_BARRIER}
        {STORE_BULK}
        {STORE_BULK_DONE}
    """)
    assert bool(found) == (space in (".shared::cta", ".global"))


@pytest.mark.parametrize("space", FENCES)
def test_a_readers_fence_covers_its_own_memory(space: str) -> None:
    found = proxy_races(f"""
        @%w0 st.shared::cluster.u32 [%a], %lane;
        {CLUSTER_BARRIER}
        @%w1 fence.proxy.async{space};
        {STORE_BULK}
        {STORE_BULK_DONE}
    """)
    assert bool(found) == (space == ".global")


def test_a_fence_of_both_ctas_memory_is_for_each_its_own() -> None:
    """One instruction writes half of its words in each CTA; a finding in one does not hold for the other."""
    body = f"""
        setp.lt.u32 %off, %lane, 16;
        selp.b32 %a, %mine, %a, %off;
        @%w0 st.shared::cluster.u32 [%a], %lane;
        @%w0 fence.proxy.async<space>;
        {CLUSTER_BARRIER}
        {STORE_BULK}
        {STORE_BULK_DONE}
    """
    assert not proxy_races(body.replace("<space>", ".shared::cluster"))
    (found,) = proxy_races(body.replace("<space>", ".shared::cta"))
    assert "shared memory [0x440, 0x480)" in found.message, "of the other CTA's words only"
