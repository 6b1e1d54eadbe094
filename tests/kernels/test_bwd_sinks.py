"""The kernel of the sinks' gradients in the emulator, against exact sums."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everything import examples
from flash4_torch.compile import jit
from flash4_torch.kernels.common.bwd.row_blocks import SinksPlan
from flash4_torch.testing import emulate

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

PLANS = {
    "sm_90a": (SinksPlan("bfloat16"), SinksPlan("float32", varlen=True)),
    "sm_100a": (SinksPlan("float16", varlen=True, negated=True), SinksPlan("float32", negated=True)),
}
CASES = [(arch, plan) for arch, plans in PLANS.items() for plan in plans]


@functools.cache
def compiled(arch: str, plan: SinksPlan):
    from flash4_torch.kernels.aux_kernels.bwd_sinks import compile_sinks_gradient

    with jit.quiet():
        return compile_sinks_gradient(plan)


@pytest.mark.parametrize(("arch", "plan"), CASES)
@given(
    numbers=st.sampled_from([2, 4]),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([64, 128, 512, 576, 2048, 2112])),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(3, 12))
def test_gradients_are_the_sums_of_all_rows(
    arch: str, plan: SinksPlan, numbers: int, sizes: tuple[int, int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    B, Hq, rows = sizes
    stats = torch.randn(numbers, *([] if plan.varlen else [B]), Hq, rows)
    stats[0][..., ::7], stats[1][..., ::7] = math.inf, 0.0  # no row
    sinks = 3 * torch.randn(Hq)
    sinks[0] = sinks[0] if seed % 2 else -math.inf
    sinks = sinks.to(getattr(torch, plan.dtype))
    terms = torch.exp2(sinks.double()[:, None] * math.log2(math.e) - stats[0].double()) * stats[1].double()
    exact = -terms.sum(-1).reshape(-1, Hq).sum(0)
    given_stats, dsinks = -stats if plan.negated else stats, torch.full_like(sinks, math.nan)
    with emulate.device(arch) as device, device.touching(given_stats, sinks, dsinks):
        compiled(arch, plan)(given_stats, sinks, dsinks)
    error = 2 * torch.finfo(dsinks.dtype).eps * exact.abs() + 1e-5 * terms.abs().sum(-1).reshape(-1, Hq).sum(
        0
    )
    assert ((dsinks.double() - exact).abs() <= error).all()
