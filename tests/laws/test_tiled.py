"""FlashAttention-4's algorithm in `reference.tiled`: exact for any tiling, rescaling as rarely as claimed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import Case, cases
from flash4_torch.masks import Band
from flash4_torch.reference import attention, tiled
from flash4_torch.reference.scoring import Scoring


def scoring_of(case: Case) -> Scoring:
    right = 0 if case.kwargs["causal"] else case.kwargs["window"][1]
    mask = case.kwargs["attn_mask"]
    return Scoring(
        case.kwargs["scale"] or 0.5,
        Band(case.kwargs["window"][0], right),
        case.kwargs["softcap"],
        None if mask is None else mask.detach()[(None,) * (4 - mask.dim())],
    )


TILINGS = st.builds(
    tiled.Tiling,
    rows=st.sampled_from([1, 7, 16]),
    keys=st.sampled_from([1, 8, 15]),
    elements=st.sampled_from([1, 300, 1 << 20]),
    rescale_threshold=st.sampled_from([0.0, 0.5, 8.0]),
)


@given(cases((torch.float64,)), TILINGS)
def test_every_tiling_gives_the_same(case: Case, tiling: tiled.Tiling) -> None:
    q, k, v = (x.detach() for x in (case.q, case.k, case.v))
    scoring = scoring_of(case)
    out, lse = attention.attention(q, k, v, scoring)
    tiled_out, tiled_lse, _ = tiled.forward(q, k, v, scoring, tiling)
    torch.testing.assert_close(tiled_out, out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(tiled_lse, lse, rtol=1e-10, atol=1e-10)
    dout = torch.randn_like(out)
    ours, once = (
        tiled.backward(dout, None, q, k, v, out, lse, scoring, tiling=t) for t in (tiling, tiled.Tiling())
    )
    for a, b in ((ours.dq, once.dq), (ours.dk, once.dk), (ours.dv, once.dv)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_about_nine_of_ten_rescales_are_skipped() -> None:
    """The paper's claim, on scores that spread over a few powers of two as a trained model's do."""
    q, k, v = (torch.randn(1, 1024, 4, 64) for _ in "qkv")
    count = tiled.RescaleCount()
    tiling = tiled.Tiling(keys=128)
    out, _, _ = tiled.forward(q * 4.0, k, v, Scoring(0.125, Band(None, 0)), tiling, count)
    assert count.steps > 10_000
    assert 0.1 < count.grown / count.steps < 0.5
    assert count.skipped > 0.9
    exact, _ = attention.attention(q * 4.0, k, v, Scoring(0.125, Band(None, 0)))
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-5)


def test_threshold_zero_rescales_whenever_the_maximum_grows() -> None:
    q, k, v = (torch.randn(1, 512, 2, 16) for _ in "qkv")
    count = tiled.RescaleCount()
    tiled.forward(q, k, v, Scoring(0.5), tiled.Tiling(keys=64, rescale_threshold=0.0), count)
    assert count.rescaled == count.grown > 0


def test_rising_scores_do_rescale() -> None:
    """Scores that each exceed the last by more than the threshold leave no rescale to skip."""
    q = torch.ones(1, 4, 1, 1)
    k = torch.arange(8.0).view(1, 8, 1, 1) * 20.0
    count = tiled.RescaleCount()
    out, lse, _ = tiled.forward(q, k, k, Scoring(1.0), tiled.Tiling(keys=1), count)
    assert count.skipped == 0.0 and count.steps == 4 * 7
    torch.testing.assert_close(out, torch.full_like(out, 140.0))
    torch.testing.assert_close(lse, torch.full_like(lse, 140.0))


def test_polynomial_exp2() -> None:
    x = torch.cat([-torch.rand(100_000) * 126.0, torch.arange(-126.0, 9.0)])
    relative = tiled.exp2_poly3(x).double() / torch.exp2(x.double()) - 1.0
    assert relative.abs().max() < 8.9e-5
    assert tiled.exp2_poly3(torch.tensor([-torch.inf])) == 0.0
    assert tiled.exp2_poly3(torch.tensor([-500.0])) < 1e-37


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_polynomial_exp2_is_invisible_in_half_precision(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 300, 2, 32).to(dtype) for _ in "qkv")
    scoring = Scoring(0.2)
    exact, _ = attention.attention(q.double(), k.double(), v.double(), scoring)
    errors = [
        (tiled.forward(q, k, v, scoring, tiled.Tiling(exp2=exp2))[0] - exact).abs().max()
        for exp2 in (torch.exp2, tiled.exp2_poly3)
    ]
    assert errors[1] <= 1.1 * errors[0]
