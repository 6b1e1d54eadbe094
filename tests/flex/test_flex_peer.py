"""flex_attention against torch's: at most twice its error, for drawn functions, masks, sizes and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import flash4_torch
from flash4_torch.reference.attention import attention as definition
from flash4_torch.reference.scoring import Scoring
from flash4_torch.testing import assert_close_as_peer
from flex_mods import H, Parts, drawn_mask, torchs

masks = st.builds(drawn_mask, st.integers(0, 20), st.integers(1, 3), st.integers(1, 40))
lengths = st.tuples(st.integers(1, 48), st.integers(1, 48))
blocks = st.sampled_from([4, 16, (8, 16), 128])


def inputs(lengths: tuple[int, int], Hk: int, D: int, Dv: int, dtype: torch.dtype) -> list[Tensor]:
    (Sq, Sk), B = lengths, 2
    shapes = (B, H, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, Dv)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


@settings(max_examples=30)
@given(
    names=st.lists(st.sampled_from(Parts.NAMES[:-1]), max_size=3, unique=True),
    mask=masks,
    lengths=lengths,
    block=blocks,
    Hk=st.sampled_from([1, 2, 4]),
    widths=st.sampled_from([(4, 4), (8, 3), (20, 32)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_error_is_at_most_twice_torchs(
    names: list[str],
    mask: Any,
    lengths: tuple[int, int],
    block: Any,
    Hk: int,
    widths: Any,
    dtype: torch.dtype,
) -> None:
    """out, lse and all gradients, those of captured tensors too, against the definition in float64."""
    q, k, v = inputs(lengths, Hk, *widths, dtype)
    parts = Parts(dtype)
    block_mask = flash4_torch.create_block_mask(mask, 2, H, *lengths, "cpu", block)
    ours = flash4_torch.flex_attention(
        q, k, v, parts.score_mod(names, 0.5), block_mask, enable_gqa=True, return_lse=True
    )
    theirs = torchs(q, k, v, parts.score_mod(names, 0.5), block_mask)
    wide, exactly = [x.detach().double().requires_grad_() for x in (q, k, v)], parts.exact()
    scoring = Scoring(widths[0] ** -0.5)
    score_mod = exactly.score_mod(names, 0.5)
    out, lse = definition(*(x.transpose(1, 2) for x in wide), scoring, None, score_mod, mask)
    exact = out.transpose(1, 2), lse
    upstream = [torch.randn(x.shape).to(x.dtype) for x in ours]
    of_exact = [g.double() for g in upstream]
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    found = torch.autograd.grad(ours, [q, k, v, *parts.learned], upstream, **options)
    # torch's lse is of its own dtype.
    peers = [g.to(x.dtype) for g, x in zip(upstream, theirs, strict=True)]
    peer = torch.autograd.grad(theirs, [q, k, v, *parts.learned], peers, **options)
    truth = torch.autograd.grad(exact, [*wide, *exactly.learned], of_exact, **options)
    what = ["out", "lse", "dq", "dk", "dv", "dslopes", "dtable", "dgain"]
    for x, y, z, name in zip((*ours, *found), (*exact, *truth), (*theirs, *peer), what, strict=True):
        assert_close_as_peer(x, y, z, what=name)


@pytest.mark.filterwarnings("ignore")
def test_torchs_public_function_takes_our_block_mask() -> None:
    """It gives our results, where it runs uncompiled; it has no backward on a CPU."""
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in inputs((40, 33), 2, 8, 8, torch.float32))
    slopes = torch.rand(H)
    block_mask = flash4_torch.create_block_mask(drawn_mask(5, 2, 9), 2, H, 40, 33, "cpu", 16)

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i - j).abs()

    call = q, k, v, alibi, block_mask, 0.3, True
    ours, aux = flash4_torch.flex_attention(*call, return_aux=torch_flex.AuxRequest(lse=True))
    theirs, peer = torch_flex.flex_attention(*call, return_aux=torch_flex.AuxRequest(lse=True))
    assert isinstance(aux, torch_flex.AuxOutput) and aux.max_scores is None
    for x, y in ((ours, theirs), (aux.lse, peer.lse)):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
