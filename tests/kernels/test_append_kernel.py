"""The kernel that appends to a KV cache, in the emulator: any cache, any table, and no other bit changes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import append_calls
from append_calls import Before, check_append
from everything import EVERYTHING, examples, one_of
from flash4_torch.compile import jit
from flash4_torch.kernels.common.kvcache import FLOAT8, AppendPlan, RotaryPlan
from flash4_torch.reference.kvcache import Append
from flash4_torch.testing import emulate

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

ARCHS = ("sm_90a", "sm_100a")
SCALED = {"cache_dtype": FLOAT8, "k_scaled": True, "v_scaled": True}
NEOX, GPT_J = RotaryPlan(64, False, "float32", q=True), RotaryPlan(40, True, "bfloat16", q=True)
PLANS = {
    "slots, rotary": AppendPlan("bfloat16", 128, 128, slots="int64", rotary=NEOX._replace(positions="int64")),
    "pages, packed, GPT-J": AppendPlan("bfloat16", 72, 40, paged=True, packed=True, rotary=GPT_J),
    "dense, scaled": AppendPlan("float16", 64, 256, **SCALED, rotary=RotaryPlan(64, False, "float16")),
    "slots": AppendPlan("float16", 8, 192, slots="int32"),
    "pages, scaled, rotary": AppendPlan(
        "bfloat16", 256, 64, paged=True, **SCALED, rotary=GPT_J._replace(dtype="float32", positions="int32")
    ),
    "dense, packed": AppendPlan("bfloat16", 64, 64, packed=True, rotary=NEOX),
    "slots, float8": AppendPlan("bfloat16", 128, 8, slots="int64", cache_dtype=FLOAT8, v_scaled=True),
    "pages": AppendPlan("float16", 96, 96, paged=True),
    "slots, scaled, GPT-J": AppendPlan(
        "float16", 40, 40, slots="int32", **SCALED, rotary=RotaryPlan(40, True, "float16", "int64", True)
    ),
    "pages, packed": AppendPlan("bfloat16", 136, 24, paged=True, packed=True),
    "large": AppendPlan("bfloat16", 576, 512, slots="int64"),
}
PLANS |= {
    f"{name}, by integers": PLANS[name]._replace(converts_fp8=False)
    for name in ("dense, scaled", "slots, float8")
}
CASES = [(ARCHS[(i + j) % 2], name) for j in range(2) for i, name in enumerate(PLANS)]
BY_INTEGERS = [(arch, name) for arch in ("sm_80", "sm_86") for name in PLANS if "integers" in name]
_FEW = 8


@functools.cache
def compiled(arch: str, plan: AppendPlan) -> Any:
    from flash4_torch.kernels.aux_kernels.append_kvcache import compile_append

    with jit.quiet():
        return compile_append(plan)


def run(arch: str, plan: AppendPlan, x: Append, **schedule: Any) -> None:
    """A launch; raises for whatever the emulator finds wrong."""
    k_cache, v_cache = (cache.view(torch.uint8) if plan.float8 else cache for cache in (x.k_cache, x.v_cache))
    where = x.slot_mapping, x.block_table, x.seqused_k, x.cu_seqlens, x.positions, x.cos, x.sin
    tensors = (x.k, x.v, k_cache, v_cache, *where, x.k_scale, x.v_scale, x.q, x.q_out)
    touched = [t for t in tensors if t is not None and t.numel()]
    with emulate.device(arch, **schedule) as device, device.touching(*touched):
        compiled(arch, plan)(*tensors)


@pytest.mark.parametrize(
    ("arch", "name"), [*(CASES if EVERYTHING else CASES[:_FEW]), *one_of(3, BY_INTEGERS)]
)
@given(data=st.data())
@settings(max_examples=examples(8, 40))
def test_rows_are_right_and_all_else_keeps_its_bits(arch: str, name: str, data: st.DataObject) -> None:
    plan = PLANS[name]
    x = data.draw(append_calls.calls(plan))
    before = Before.of(x)
    schedule, seed = data.draw(st.sampled_from(["late", "fuzz"])), data.draw(st.integers(0, 9))
    run(arch, plan, x, schedule=schedule, seed=seed)
    check_append(x, before)


@pytest.mark.parametrize("v_scaled", [False, True])
def test_integers_round_as_the_instruction_does(v_scaled: bool) -> None:
    """Every bfloat16 number becomes what torch makes of it, ties, subnormal numbers, infinity and NaN too."""
    plan = AppendPlan(
        "bfloat16", 64, 64, "float8_e4m3fn", slots="int64", v_scaled=v_scaled, converts_fp8=False
    )
    k = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).view(1, 256, 4, 64)
    caches = torch.zeros(2, 1, 256, 4, 64).to(torch.float8_e4m3fn)
    scale = torch.full((1, 4), 0.3) if v_scaled else None
    run("sm_80", plan, Append(k, k, *caches, slot_mapping=torch.arange(256), v_scale=scale))
    for cache, divisor in zip(caches, (1.0, 0.3 if v_scaled else 1.0), strict=True):
        exact = (k[0].float() / torch.tensor(divisor)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        nan = exact.float().isnan()
        assert torch.equal(cache[0].float().isnan(), nan)
        assert torch.equal(cache[0].view(torch.uint8)[~nan], exact.view(torch.uint8)[~nan])


@pytest.mark.parametrize("cu_seqlens", [[0, 9, -5, 40], [7, 3, 2, 1], [2**31 - 1, -(2**31), 0, 5]])
def test_any_cumulative_lengths_are_safe(cu_seqlens: list[int]) -> None:
    """Whatever cu_seqlens holds, the launch touches nothing but its tensors and ends."""
    plan = PLANS["dense, packed"]._replace(rotary=None)
    k, (k_cache, v_cache) = torch.randn(1, 8, 2, 64).bfloat16(), torch.zeros(2, 3, 16, 2, 64).bfloat16()
    lengths = torch.zeros(3, dtype=torch.int32)
    ends = torch.tensor(cu_seqlens, dtype=torch.int32)
    run("sm_90a", plan, Append(k, k, k_cache, v_cache, seqused_k=lengths, cu_seqlens=ends))


def test_many_sequences_are_found() -> None:
    """There are more of them than a warp can test at once, some of them empty."""
    plan = PLANS["dense, packed"]._replace(rotary=None)
    lengths = torch.tensor([0, 1, 3, 0, 0, 2] * 200)
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    k = torch.randn(1, int(ends[-1]), 1, 64).bfloat16()
    caches = torch.zeros(2, len(lengths), 4, 1, 64).bfloat16()
    before = torch.ones(len(lengths), dtype=torch.int32)
    run("sm_100a", plan, Append(k, k, *caches, seqused_k=before, cu_seqlens=ends))
    for x in caches:
        assert torch.equal(torch.cat([x[b, 1 : 1 + n] for b, n in enumerate(lengths)]), k[0])


def test_pages_may_be_far_apart() -> None:
    """Pages are more than 2**31 elements from each other; memory in between is never touched."""
    plan, far = AppendPlan("bfloat16", 64, 64, slots="int64"), 2**31 + 64
    caches = [
        torch.empty(2 * far, dtype=torch.bfloat16).as_strided((2, 4, 1, 64), (far, 64, 64, 1))
        for _ in range(2)
    ]
    k = torch.randn(1, 3, 1, 64).bfloat16()
    run("sm_90a", plan, Append(k, k, *caches, slot_mapping=torch.tensor([7, 2, 4])))
    for x in caches:
        assert torch.equal(torch.stack([x[1, 3], x[0, 2], x[1, 0]]), k[0])
