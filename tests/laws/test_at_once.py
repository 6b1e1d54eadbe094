"""`reference.at_once`: the same results as tile by tile, in any number of parts."""

from __future__ import annotations

from unittest import mock

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from flash4_torch.masks import Band
from flash4_torch.reference import at_once, tiled, weights
from flash4_torch.reference.dropout import Dropout
from flash4_torch.reference.scoring import Scoring
from flash4_torch.testing import assert_close_as_peer

BOUND = st.none() | st.integers(-2, 9)
BANDS = st.builds(Band, BOUND, BOUND)


@given(
    st.tuples(*[st.integers(1, n) for n in (4, 12, 12, 3)]),
    BANDS,
    st.sampled_from(["", "bool", "float"]),
    st.sampled_from([None, None, None, 0.0, 0.3, 1.0]),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([1, 30, 1 << 19]),
    st.booleans(),
)
def test_parts_of_a_batch_equal_tiles(
    sizes: tuple[int, int, int, int],
    band: Band,
    mask: str,
    p: float | None,
    average: bool,
    entries: int,
    in_backward: int,
    of_heads: bool,
) -> None:
    B, Sq, Sk, H = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    q, k, v = (torch.randn(B, S, H, 4, generator=generator, dtype=torch.float64) for S in (Sq, Sk, Sk))
    seen = torch.rand(B, H if of_heads else 1, Sq, Sk, generator=generator) < 0.5
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill_(~seen, -torch.inf)
    dropout = None if p is None else Dropout(torch.tensor([5, 7]), p)
    scoring = Scoring(0.4, band, 0.0, {"": None, "bool": seen, "float": added}[mask], dropout)
    assert at_once.is_small(q, k, scoring)
    with mock.patch.object(at_once, "_MOST", entries * Sq * Sk * H):
        found = at_once.forward(q, k, v, scoring, average)
        without = at_once.forward(q, k, v, scoring)
    out, lse, low = tiled.forward(q, k, v, scoring)
    shown = weights.forward(q, k, lse, low, scoring, average)
    for actual, expected in ((found.out, out), (found.lse, lse), (found.weights, shown)):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
        assert actual is not None and actual.is_contiguous()
    assert without.weights is None and torch.equal(without.out, found.out)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) if average else None
    given = dout, dlse, q, k, v, out, lse
    with mock.patch.multiple(at_once, _MOST=entries * Sq * Sk * H, _MOST_IN_BACKWARD=in_backward):
        assert found.weights is not None
        dweights, wants = torch.randn_like(found.weights), mask == "float"
        grads = at_once.backward(*given, low, scoring, mask_grad=wants)
        together = at_once.backward(*given, low, scoring, dweights, wants)
    tiles = tiled.backward(*given, scoring, lse_low=low, mask_grad=wants)
    of_weights = weights.backward(dweights, q, k, lse, low, scoring, average, wants)
    for name in ("dq", "dk", "dv", "dmask"):
        alone, both, expected = (getattr(x, name) for x in (grads, together, tiles))
        assert (alone is None) == (both is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(alone, expected, rtol=1e-10, atol=1e-10)
            more = getattr(of_weights, name, None)
            torch.testing.assert_close(
                both, expected if more is None else expected + more, rtol=1e-9, atol=1e-9
            )
            assert alone.is_contiguous() and both.is_contiguous()


@given(
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.booleans(),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.0, 1.5]),
    st.integers(0, 99),
)
def test_results_in_16_bits_are_as_exact_as_torchs(
    dtype: torch.dtype, biased: bool, size: float, offset: float, seed: int
) -> None:
    """The law holds where a CPU multiplies in 16 bits, and where it does not; and torch's kernel does not
    round scores, however large they are.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(2, 33, 2, 16, generator=generator) for _ in range(4))
    q, k, v, dout = (x.to(dtype) for x in (q * size + offset, k * size + offset, v + offset, dout))
    mask = torch.randn(1, 2, 33, 33, generator=generator).to(dtype) if biased else None

    def by_torch(work: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(work).requires_grad_() for x in (q, k, v)]
        added = None if mask is None else mask.to(work)
        heads = (x.transpose(1, 2) for x in leaves)
        out = F.scaled_dot_product_attention(*heads, attn_mask=added, scale=0.3).transpose(1, 2)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(work))]

    exact, peer = by_torch(torch.float64), by_torch(dtype)
    scoring = Scoring(0.3, attn_mask=mask)
    for products in (dtype, torch.float32):
        with (
            mock.patch.object(at_once, "products_dtype", lambda _, products=products: products),
            mock.patch.object(at_once, "FEW", 0),
        ):
            out, lse, low, _ = at_once.forward(q, k, v, scoring)
            grads = at_once.backward(dout, None, q, k, v, out, lse, low, scoring)
        for x, e, p in zip((out, grads.dq, grads.dk, grads.dv), exact, peer, strict=True):
            assert x.dtype == dtype
            assert_close_as_peer(x, e, p)


@given(st.sampled_from([torch.bfloat16, torch.float16]), st.booleans(), st.integers(0, 99))
def test_weights_in_16_bits_are_as_exact_as_torchs(dtype: torch.dtype, average: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(2, 33, 2, 16, generator=generator).to(dtype) for _ in range(2))

    def plain(work: torch.dtype) -> torch.Tensor:
        scores = q.to(work).transpose(1, 2) @ k.to(work).permute(0, 2, 3, 1) * 0.3
        return scores.softmax(-1).mean(1) if average else scores.softmax(-1)

    weights = at_once.forward(q, k, k, Scoring(0.3), average).weights
    assert weights is not None and weights.dtype == dtype
    assert_close_as_peer(weights, plain(torch.float64), plain(dtype))


@given(st.integers(0, 99), st.sampled_from([-1e9, 1e7, 0.0]))
def test_lse_and_its_error_are_exact_together(seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 9, 2, 8, generator=generator) for _ in range(3))
    mask = torch.full((1, 1, 9, 9), size)
    found = at_once.forward(q, k, v, Scoring(0.3, attn_mask=mask))
    exact = at_once.forward(q.double(), k.double(), v.double(), Scoring(0.3))
    assert found.lse_low is not None
    # Scores next to a large mask keep few digits; what is left of them is summed up exactly.
    scores = (q * 0.3).transpose(1, 2) @ k.permute(0, 2, 3, 1) + mask
    together = found.lse.double() + found.lse_low.double()
    torch.testing.assert_close(together, scores.double().logsumexp(-1), rtol=0.0, atol=1e-6)
    if size == 0.0:
        torch.testing.assert_close(together, exact.lse, rtol=1e-5, atol=1e-5)
