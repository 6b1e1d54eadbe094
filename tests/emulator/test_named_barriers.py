"""Barriers of a CTA: who counts, and the votes of barrier.red (PTX ISA: bar, barrier), against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash4_torch.emulator.engine import Options, run_ptx
from lanes import drawn, few

WARPS = 3
THREADS = 32 * WARPS
SCHEDULES = [Options(), Options(schedule="late"), *(Options(schedule="fuzz", seed=seed) for seed in range(3))]


def kernel(rounds: int, barrier: str, aligned: str) -> str:
    """Reads a word for each round and thread; writes whether all, whether any, and how many are not 0."""
    body = "\n".join(
        f"""
        ld.global.b32 %word, [%from + {4 * i * THREADS}];
        setp.ne.u32 %p, %word, 0;
        {barrier}.and{aligned}.pred %all, 1, {THREADS}, %p;
        {barrier}.or{aligned}.pred %any, 1, {THREADS}, %p;
        {barrier}.popc{aligned}.u32 %holds, 2, %p;
        {barrier}.popc{aligned}.u32 %fails, 3, {THREADS}, !%p;
        selp.b32 %word, 1, 0, %all;
        st.global.b32 [%to + {16 * i * THREADS}], %word;
        selp.b32 %word, 1, 0, %any;
        st.global.b32 [%to + {16 * i * THREADS + 4}], %word;
        st.global.b32 [%to + {16 * i * THREADS + 8}], %holds;
        st.global.b32 [%to + {16 * i * THREADS + 12}], %fails;
        """
        for i in range(rounds)
    )
    return f"""
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 words, .param .u64 results)
{{
    .reg .pred %p, %all, %any;
    .reg .b32 %tid, %word, %holds, %fails;
    .reg .b64 %from, %to;
    mov.u32 %tid, %tid.x;
    ld.param.u64 %from, [words];
    ld.param.u64 %to, [results];
    mad.wide.u32 %from, %tid, 4, %from;
    mad.wide.u32 %to, %tid, 16, %to;
    {body}
    ret;
}}
"""


@pytest.mark.parametrize(
    ("barrier", "aligned"), [("bar.red", ""), ("barrier.red", ""), ("barrier.cta.red", ".aligned")]
)
@few
@given(drawn, st.sampled_from([0.0, 0.02, 0.5, 0.98, 1.0]))
def test_threads_vote(barrier: str, aligned: str, rng: np.random.Generator, chance: float) -> None:
    rounds = 4
    text = kernel(rounds, barrier, aligned)
    words = (rng.random((rounds, THREADS)) < chance).astype(np.uint32)
    holds = words.sum(axis=1)
    expected = np.stack([holds == THREADS, holds > 0, holds, THREADS - holds], axis=1)
    for options in SCHEDULES:
        results = np.zeros((rounds, THREADS, 4), np.uint32)
        run_ptx(text, [words, results], grid=(1, 1, 1), block=(THREADS, 1, 1), options=options)
        assert (results == expected[:, None]).all()


SUM = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 results)
{{
    .shared .align 4 .b32 sum;
    .reg .pred %leaves, %first;
    .reg .b32 %tid, %value;
    .reg .b64 %to;
    mov.u32 %tid, %tid.x;
    setp.eq.u32 %first, %tid, 0;
    @%first st.shared.b32 [sum], 0;
    {barrier};
    setp.ge.u32 %leaves, %tid, {stay};
    @%leaves exit;
    atom.shared.add.u32 %value, [sum], 1;
    {barrier};
    ld.shared.b32 %value, [sum];
    ld.param.u64 %to, [results];
    mad.wide.u32 %to, %tid, 4, %to;
    st.global.b32 [%to], %value;
    ret;
}}
"""


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda options: f"{options.schedule}{options.seed}")
@given(threads=st.integers(1, 100), stay=st.integers(1, 100))
@few
def test_a_barrier_without_a_count_is_for_the_threads_that_are_there(
    options: Options, threads: int, stay: int
) -> None:
    """The block need not fill its last warp, and threads may have exited."""
    stay = min(stay, threads)
    results = np.zeros(threads, np.uint32)
    run_ptx(
        SUM.format(barrier="barrier.sync 0", stay=stay),
        [results],
        grid=(1, 1, 1),
        block=(threads, 1, 1),
        options=options,
    )
    assert results.tolist() == [stay] * stay + [0] * (threads - stay)


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda options: f"{options.schedule}{options.seed}")
@given(threads=st.integers(33, 64))
@few
def test_lanes_that_the_block_lacks_count_where_there_is_a_count(options: Options, threads: int) -> None:
    results = np.zeros(threads, np.uint32)
    run_ptx(
        SUM.format(barrier="barrier.sync 0, 64", stay=threads),
        [results],
        grid=(1, 1, 1),
        block=(threads, 1, 1),
        options=options,
    )
    assert (results == threads).all()


def test_a_barrier_with_a_count_waits_for_threads_that_have_exited() -> None:
    report = run_ptx(
        SUM.format(barrier="barrier.sync 0, 64", stay=32),
        [np.zeros(64, np.uint32)],
        grid=(1, 1, 1),
        block=(64, 1, 1),
        check=False,
    )
    assert [finding.kind for finding in report.findings] == ["deadlock"]
