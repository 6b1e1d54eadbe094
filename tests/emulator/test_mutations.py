"""Kernels that lack a synchronisation instruction: how they are made, and that the checks notice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from flash4_torch.emulator import ptx
from flash4_torch.emulator.engine import Options, Program, run_ptx
from flash4_torch.emulator.mutate import candidates, without
from flash4_torch.emulator.report import EmulationError
from kernels import Case, blackwell_gemm, pipeline, warp_gemm
from mutants import APART, EAGER, FUZZ, LATE, judge_of, subject_of
from mutation_study import subjects

SCHEDULES = [LATE, *FUZZ[:4], EAGER]

HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n"
# Warp 0 arrives after a while; warp 1 tries once and stores whether that succeeded.
TRY_ONCE = (
    HEAD
    + """
.visible .entry k(.param .u64 out) {
    .reg .pred %p, %done;
    .reg .b32 %r<4>;
    .reg .b64 %rd<2>;
    .shared .align 8 .b64 barrier;
    mov.u32 %r0, %tid.x;
    setp.eq.s32 %p, %r0, 0;
    @%p mbarrier.init.shared.b64 [barrier], 1;
    bar.sync 0;
    setp.ge.s32 %p, %r0, 32;
    @%p bra waits;
    setp.eq.s32 %p, %r0, 0;
    @%p mbarrier.arrive.shared.b64 _, [barrier];
    bra end;
waits:
    mbarrier.try_wait.parity.shared.b64 %done, [barrier], 0;
    ld.param.u64 %rd0, [out];
    selp.b32 %r1, 1, 0, %done;
    st.global.b32 [%rd0], %r1;
end:
    ret;
}
"""
)


def kernel(text: str) -> ptx.Kernel:
    return ptx.parse(text).kernels[0]


def test_candidates_synchronise_and_do_nothing_else() -> None:
    found = [kernel(TRY_ONCE).instructions[i].opcode for i in candidates(kernel(TRY_ONCE))]
    assert found == ["bar.sync", "mbarrier.arrive.shared.b64", "mbarrier.try_wait.parity.shared.b64"]


@pytest.mark.parametrize(
    ("opcode", "counts"),
    [
        ("tcgen05.wait::st.sync.aligned", True),
        ("tcgen05.fence::before_thread_sync", True),
        ("cp.async.bulk.wait_group.read", True),
        ("membar.gl", True),
        ("mbarrier.init.shared.b64", False),
        ("cp.async.ca.shared.global", False),
        ("setmaxnreg.dec.sync.aligned.u32", False),
    ],
)
def test_modifiers_do_not_hide_candidates(opcode: str, counts: bool) -> None:
    original = kernel(TRY_ONCE)
    other = replace(original.instructions[0], opcode=opcode)
    changed = replace(original, instructions=(other, *original.instructions[1:]))
    assert (0 in candidates(changed)) == counts


def test_a_mutant_differs_in_one_instruction_which_keeps_its_guard() -> None:
    original = kernel(TRY_ONCE)
    for index in candidates(original):
        mutant = without(original, index)
        changed = [
            i
            for i, pair in enumerate(zip(original.instructions, mutant.instructions, strict=True))
            if pair[0] != pair[1]
        ]
        assert changed == [index]
        assert mutant.instructions[index].guard == original.instructions[index].guard
        assert mutant.instructions[index].line == original.instructions[index].line


def test_a_wait_that_is_gone_has_succeeded() -> None:
    """A removed wait counts as successful; every other removed instruction does nothing.

    Without the arrival the wait could not end.
    """
    original = kernel(TRY_ONCE)
    _, arrive, wait = candidates(original)
    mutant = without(without(original, arrive), wait)
    assert mutant.instructions[arrive].opcode == "nop"
    out = np.full(1, -1, np.int32)
    program = Program(mutant, arch=90)
    program.launch(out.ctypes.data.to_bytes(8, "little"), grid=(1, 1, 1), block=(64, 1, 1)).raise_findings()
    assert out[0] == 1


def test_a_try_wait_may_run_out_of_time() -> None:
    """PTX ISA, mbarrier.test_wait, mbarrier.try_wait: it returns false when its time limit is over."""
    succeeded = Counter()
    for seed in range(20):
        out = np.full(1, -1, np.int32)
        run_ptx(TRY_ONCE, [out], block=(64, 1, 1), options=Options(schedule="fuzz", seed=seed))
        succeeded[int(out[0])] += 1
    assert set(succeeded) == {0, 1}


def test_every_wait_at_the_cluster_barrier_needs_an_arrive() -> None:
    """PTX ISA, barrier.cluster: the wait of a second phase is not satisfied by the arrive of the first."""
    both = "barrier.cluster.arrive;\n barrier.cluster.wait;\n"
    text = HEAD + ".visible .entry k() {\n" + 2 * both + "ret;\n}\n"
    run_ptx(text, cluster=(2, 1, 1), grid=(2, 1, 1))
    with pytest.raises(EmulationError, match="without an arrive"):
        run_ptx(text.replace(both, both + "barrier.cluster.wait;\n"), cluster=(2, 1, 1), grid=(2, 1, 1))


# The study (mutation_study.py) found that nothing notices these: a bar.warp.sync that another one follows,
# and
# the load warp's last waits, which are implied by what the store warps wait for.
@pytest.mark.parametrize(
    ("case", "arch", "unnoticed", "least"),
    [
        pytest.param(
            pipeline.ring_case(
                "sw128", (640, 128), pipeline.Ring(pipeline.Float16, (64, 64), pipeline.KIND.K_SW128)
            ),
            "sm_90a",
            ["bar.warp.sync"],
            10,
            id="ring",
        ),
        pytest.param(
            blackwell_gemm.case("two_ctas", m=512, rows=256, ctas=2),
            "sm_100a",
            ["mbarrier.try_wait.parity.shared.b64"],
            10,
            id="blackwell_gemm_two_ctas",
        ),
        # Two commits, a wait, and a barrier before and after a stage is read.
        pytest.param(warp_gemm.case("bf16", torch.bfloat16), "sm_90a", [], 5, id="warp_gemm"),
    ],
)
def test_a_missing_instruction_is_noticed(case: Case, arch: str, unnoticed: list[str], least: int) -> None:
    with judge_of(subject_of(case, arch)) as judge:
        assert [judge.differs(options) for options in SCHEDULES] == [None] * len(SCHEDULES)
        ((kernel, executed),) = ((k, set(counts)) for k, counts in judge.bench.executed.items())
        program = judge.bench.programs[kernel].kernel
        mutants = sorted(executed.intersection(candidates(program)))
        missed = [program.instructions[i].opcode for i in mutants if not judge.detects(kernel, i, SCHEDULES)]
    assert len(mutants) >= least
    assert not Counter(o for o in missed if not o.startswith(APART)) - Counter(unnoticed)


def test_a_lane_that_speaks_too_early_is_noticed() -> None:
    """Our forward for sm_100a without one of its bar.warp.syncs; it needs eight of them."""
    (subject,) = (s for s in subjects() if s.name == "forward, D=64")
    with judge_of(subject) as judge:
        assert judge.differs(LATE) is None
        ((kernel, executed),) = ((k, set(counts)) for k, counts in judge.bench.executed.items())
        program = judge.bench.programs[kernel].kernel
        syncs = [i for i in sorted(executed) if program.instructions[i].opcode == "bar.warp.sync"]
        noticed = [judge.detects(kernel, i, [LATE]) for i in syncs]
    assert Counter(noticed)["race"] >= 8
