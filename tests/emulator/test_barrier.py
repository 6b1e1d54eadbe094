"""Barriers that also combine a predicate of their threads (PTX ISA: barrier.red), against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lanes import drawn, few

from flash4_torch.emulator.engine import Options, run_ptx

WARPS = 3
THREADS = 32 * WARPS
SCHEDULES = [Options(), Options(schedule="late"), *(Options(schedule="fuzz", seed=seed) for seed in range(3))]


def kernel(rounds: int, barrier: str, aligned: str) -> str:
    """Reads a word for each round and thread, and writes whether all, whether any, and how many are not 0."""
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
