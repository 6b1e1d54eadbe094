"""The kernel that merges partial results, in the emulator, against exact sums."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everything import examples, one_of
from flash4_torch.compile import jit
from flash4_torch.kernels.common.kvcache import MergePlan
from flash4_torch.testing import emulate

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

ARCHS = ("sm_90a", "sm_100a", "sm_80", "sm_120a")
PLANS = (
    MergePlan("bfloat16", 128, 2),
    MergePlan("float32", 40, 1),
    MergePlan("float16", 8, 3),
    MergePlan("bfloat16", 256, 1),
    MergePlan("float32", 512, 2),
    MergePlan("float32", 72, 1, "bfloat16", lanes=4),
    MergePlan("float32", 128, 1, "float16", varlen=True, lanes=4),
)


@functools.cache
def compiled(arch: str, plan: MergePlan) -> Any:
    from flash4_torch.kernels.aux_kernels.merge_states import compile_merge

    with jit.quiet():
        return compile_merge(plan)


def run(
    arch: str,
    plan: MergePlan,
    outs: tuple[Tensor, ...],
    lses: tuple[Tensor, ...],
    sequences: tuple[Tensor, int] | None = None,
    lows: tuple[Tensor, ...] | None = None,
    **schedule: Any,
) -> tuple[Tensor, ...]:
    """A launch into memory full of NaN; raises for whatever the emulator finds wrong."""
    _, *rows, Dv = outs[0].shape
    dtype = getattr(torch, plan.out_dtype or plan.dtype)
    out, lse = torch.full((*rows, Dv), math.nan, dtype=dtype), torch.full(lses[0].shape[1:], math.nan)
    low = None if lows is None else torch.full_like(lse, math.nan)
    ends = [] if sequences is None else [sequences[0]]
    results = (out, lse) if low is None else (out, lse, low)
    touched = [x for x in (*outs, *lses, *(lows or ()), *results, *ends) if x.numel()]
    with emulate.device(arch, **schedule) as device, device.touching(*touched):
        compiled(arch, plan)(outs, lses, lows, out, lse, low, sequences)
    return results


def parts(draw: st.DrawFn, plan: MergePlan) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Parts with gaps between rows, some of which have no keys and NaN for a result."""
    torch.manual_seed(draw(st.integers(0, 999)))
    B, Sq, Hq = (draw(st.integers(1, most)) for most in (2, 7, 5))
    counts = [draw(st.integers(0, 6)) for _ in range(plan.tensors)]
    spread = draw(st.sampled_from([0.1, 3.0, 60.0]))
    gap = draw(st.sampled_from([0, 1]))
    outs, lses = [], []
    for n in counts:
        wide = torch.full((n, B, Sq, Hq + gap, plan.Dv + 8 * gap), math.nan)
        wide[..., :Hq, : plan.Dv] = torch.randn(n, B, Sq, Hq, plan.Dv)
        out = wide.to(getattr(torch, plan.dtype))[..., :Hq, : plan.Dv]
        lse = spread * torch.randn(n, B, Sq, Hq).transpose(2, 3)
        has_no_keys = torch.rand(lse.shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))
        lse[has_no_keys] = -math.inf
        out[has_no_keys.transpose(2, 3)] = math.nan
        outs.append(out)
        lses.append(lse if gap else lse.contiguous())
    return tuple(outs), tuple(lses)


@pytest.mark.parametrize(("arch", "plan"), one_of(3, [(a, p) for p in PLANS for a in ARCHS]), ids=str)
@given(data=st.data())
@settings(max_examples=examples(6, 30))
def test_results_are_those_over_all_keys(arch: str, plan: MergePlan, data: st.DataObject) -> None:
    outs, lses = parts(data.draw, plan)
    sequences = None
    if plan.varlen:
        # Rows of a batch of one are those of two sequences.
        outs, lses = tuple(x[:, 0] for x in outs), tuple(x[:, 0] for x in lses)
        rows = outs[0].shape[1]
        middle = data.draw(st.integers(0, rows))
        sequences = torch.tensor([0, middle, rows], dtype=torch.int32), 0
    out, lse = run(arch, plan, outs, lses, sequences, schedule="late")
    exact_lse = torch.cat(lses).double().logsumexp(0)
    weights = (torch.cat(lses).double() - exact_lse.where(exact_lse.isfinite(), 0.0)).exp()
    weights = weights.transpose(-2, -1)[..., None]
    terms = weights * torch.cat(outs).double().where(weights != 0.0, 0.0)
    exact, size = terms.sum(0), terms.abs().sum(0)
    error = torch.finfo(out.dtype).eps / 2 * exact.abs() * 1.0001 + 4e-6 * size + 1e-7
    assert ((out.double() - exact).abs() <= error).all()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)
    again = run(arch, plan, outs, lses, sequences, schedule="fuzz", seed=data.draw(st.integers(0, 9)))
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("arch", one_of(1, ARCHS))
@pytest.mark.parametrize("at", [0.0, 2.0**23, -(2.0**127)])
def test_weights_count_what_rounding_took_from_large_lses(arch: str, at: float) -> None:
    """Parts of 1, 2, ... keys next to a large score: lse alone would hide how many they are."""
    plan = MergePlan("float32", 64, 1, "bfloat16", lanes=4, has_low=True)
    counts = torch.arange(1.0, 8.0).double()
    rounded = (at + counts.log()).float()
    rest = (at - rounded.double()) + counts.log()
    lses, lows = (x.float()[:, None, None, None].repeat(1, 1, 3, 5) for x in (rounded, rest))
    lses[2, ..., 0], outs = -math.inf, torch.randn(7, 1, 5, 3, 64)
    lses[:, :, 0, 1] = -math.inf
    out, lse, low = run(arch, plan, (outs,), (lses,), lows=(lows,))
    weights = counts[:, None, None, None].where(lses.isfinite(), 0.0)
    total = weights.sum(0)
    truth = (weights.transpose(2, 3)[..., None] * outs).sum(0) / total.transpose(1, 2)[..., None]
    torch.testing.assert_close(out.double(), truth.where(truth.isfinite(), 0.0), rtol=0.005, atol=1e-6)
    torch.testing.assert_close((lse.double() - at) + low.double(), total.log(), rtol=0.0, atol=1e-6)
    assert (low[0, 0, 1], lse[0, 0, 1]) == (0.0, -math.inf)


@pytest.mark.parametrize("arch", ARCHS)
def test_one_part_with_keys_is_the_result(arch: str) -> None:
    """It has the same bits, wherever it is among parts without keys."""
    plan = PLANS[0]
    outs = torch.randn(5, 1, 3, 2, plan.Dv).bfloat16()
    lses = torch.full((5, 1, 2, 3), -math.inf)
    lses[3] = 7 * torch.randn(1, 2, 3)
    out, lse = run(arch, plan, (outs[:2], outs[2:]), (lses[:2], lses[2:]))
    assert torch.equal(out, outs[3]) and torch.equal(lse, lses[3])


@pytest.mark.parametrize("arch", one_of(4, ARCHS))
def test_rows_of_short_sequences_and_of_none_are_left_alone(arch: str) -> None:
    plan = PLANS[-1]
    outs, lses = torch.randn(3, 12, 2, plan.Dv), torch.randn(3, 2, 12)
    sequences = torch.tensor([1, 3, 3, 10], dtype=torch.int32), 3
    out, lse = run(arch, plan, (outs,), (lses,), sequences)
    whole = torch.tensor([0, 12], dtype=torch.int32), 0
    every_out, every_lse = run(arch, plan, (outs,), (lses,), whole)
    assert torch.equal(out[3:10], every_out[3:10]) and torch.equal(lse[:, 3:10], every_lse[:, 3:10])
    for others in (slice(0, 3), slice(10, 12)):
        assert out[others].isnan().all() and lse[:, others].isnan().all()
