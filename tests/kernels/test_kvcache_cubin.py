"""The kernels around a KV cache as ptxas compiles them: nothing spills."""

from __future__ import annotations

import pytest

import compiled_files
from everything import one_of
from flash4_torch.backends.compiled import APPEND_KVCACHE, MERGE_STATES
from flash4_torch.backends.kvcache import append, merge
from flash4_torch.compile import Key

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
import test_append_kernel
import test_merge_kernel

APPENDS = (
    *test_append_kernel.PLANS.values(),
    *append.common_plans("bfloat16", 128, 128),
    *append.common_plans("float16", 256, 256, converts_fp8=False),
)
MERGES = (
    *test_merge_kernel.PLANS,
    *merge.common_plans("bfloat16", 128),
    test_merge_kernel.MergePlan("float16", 64, merge.MOST_TENSORS),
)
UNUSUAL = {
    ("sm_120a", test_append_kernel.PLANS["slots, rotary"]): "10 instructions around a division of 64 bits",
    ("sm_120a", MERGES[-1]): "74 registers",
}
"""What ptxas does to kernels of one architecture alone."""
KEYS = [
    Key(entry, (plan,), arch)
    for arch in ("sm_90a", "sm_100a", "sm_80", "sm_86", "sm_89", "sm_120a")
    for entry, plans in ((APPEND_KVCACHE, APPENDS), (MERGE_STATES, MERGES))
    for plan in plans
    if (arch, plan) not in UNUSUAL
    and not (arch in ("sm_80", "sm_86") and entry == APPEND_KVCACHE and plan.float8 and plan.converts_fp8)
]


def test_nothing_spills(tmp_path_factory: pytest.TempPathFactory) -> None:
    codes = compiled_files.codes(one_of(37, KEYS), tmp_path_factory)
    spilling = {key: code for key, code in codes.items() if code.spills or code.stack}
    assert not spilling, "\n".join(map(str, spilling.items()))
    # So many let at least 1024 threads share an SM, whose loads keep memory busy.
    crowded = {key: code for key, code in codes.items() if code.registers > 64}
    assert not crowded, "\n".join(map(str, crowded.items()))
