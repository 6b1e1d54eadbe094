"""Exact results, and the tolerance all attention kernels share: at most twice the error of plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..masks import Band
from ..ops import check
from ..reference.attention import attention
from ..reference.dropout import Dropout
from ..reference.scoring import Scoring


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    softcap: float = 0.0,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `flash4_torch.attention` by definition, computed and returned in `dtype`.

    The arguments are those of `attention`. With dropout_p > 0, `rng_state` selects the mask; see
    `peek_rng_state`. The result is differentiable; it needs O(Sq * Sk) memory. In the inputs' own `dtype` it
    is the peer to compare errors with.
    """
    dropout = None
    if dropout_p > 0:
        if rng_state is None:
            raise ValueError("rng_state is None, but dropout_p > 0 needs it to know the mask")
        dropout = Dropout(rng_state, dropout_p)
    band: Band = check.band(causal, window)
    mask = check.attn_mask(attn_mask, q, k)
    scoring = Scoring(check.scale(scale, q.shape[-1]), band, check.softcap(softcap), mask, dropout)
    check.sinks(sinks, q)
    return attention(
        q.to(dtype), k.to(dtype), v.to(dtype), scoring, None if sinks is None else sinks.to(dtype)
    )


def assert_close_as_peer(
    actual: Tensor,
    exact: Tensor,
    peer: Tensor,
    factor: float = 2.0,
    what: str = "result",
    noise: float = 0.0,
) -> None:
    """`max |actual - exact| <= factor * max |peer - exact| + rounding + noise`.

    `exact` is float64, `peer` is plain torch's result in actual's dtype. Rounding is two units in the last
    place of the largest exact value (a peer may be exact by luck), plus 16 units in the last place of 1 in
    float32: a result that cancels to zero still has the noise of its terms. (Float64 results have no more
    exact reference; they get 1e-12.) `noise` is anything else the caller can account for. Infinities must
    stand where exact's do; NaN never passes.

    Raises:
        AssertionError: with the error and the bound.
    """
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(exact.shape)}"
    last_place = torch.finfo(actual.dtype).eps
    cancelled = 1e-12 if actual.dtype == torch.float64 else 16 * torch.finfo(torch.float32).eps
    actual, peer, exact = actual.detach().double(), peer.detach().double(), exact.detach()
    infinite = torch.isinf(exact)
    assert torch.equal(actual[infinite], exact[infinite]), f"{what}: infinities differ"
    if not (~infinite).any():
        return
    actual, exact, peer = actual[~infinite], exact[~infinite], peer[~infinite]
    largest = exact.abs().max()
    rounding = 2 * last_place * largest + cancelled * (1.0 + largest)
    bound = factor * (peer - exact).abs().max() + rounding + noise
    error = (actual - exact).abs().max()
    assert error <= bound, f"{what}: error {error:.3e} exceeds {bound:.3e}"
