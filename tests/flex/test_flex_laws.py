"""Laws of programmable attention: against the definition in float64, equal spellings, and compositions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import flash4_torch
from flash4_torch.flex.attention import traced
from flash4_torch.flex_problem import Mods
from flash4_torch.ops import CallOptions, draw_rng_state
from flash4_torch.ops.flex import flex_attention
from flash4_torch.reference.attention import attention as definition
from flash4_torch.reference.dropout import Dropout
from flash4_torch.reference.scoring import Scoring
from flex_mods import H, Mod, Parts


def tensors(Sq: int, Sk: int, Hk: int = 2, D: int = 4, Dv: int = 6, B: int = 2) -> list[Tensor]:
    """q, k and v, (B, S, H, D), float64."""
    shapes = (B, Sq, H, D), (B, Sk, Hk, D), (B, Sk, Hk, Dv)
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], wanted: list[Tensor]) -> None:
    """Results and gradients agree in float64."""
    upstream = [torch.randn_like(x) for x in theirs]
    # A row that sees nothing has lse -inf, whose gradient the definition turns to NaN.
    upstream = [torch.where(x.isfinite(), g, 0.0) for x, g in zip(theirs, upstream, strict=True)]
    found = torch.autograd.grad(ours, wanted, upstream, allow_unused=True, materialize_grads=True)
    expected = torch.autograd.grad(theirs, wanted, upstream, allow_unused=True, materialize_grads=True)
    for x, y in zip((*ours, *found), (*theirs, *expected), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)


def windowed(width: int) -> Mod:
    return lambda b, h, i, j: ((i - j).abs() <= width) & (j != 5 * h)


MASKS: dict[str, Mod | None] = {
    "none": None,
    "narrow": windowed(2),
    "wide": windowed(20),
    "nothing": lambda b, h, i, j: (i < 0) & (j < 0),
    "some rows": lambda b, h, i, j: (i % 3 == b) & (j <= i + 4),
}


@settings(max_examples=25)
@given(
    names=st.lists(st.sampled_from(Parts.NAMES), max_size=3),
    number=st.sampled_from([0.5, 1.0, 3.0]),
    mask=st.sampled_from(sorted(MASKS)),
    lengths=st.sampled_from([(1, 1), (17, 33), (33, 17), (40, 40)]),
    band=st.sampled_from([(None, None), (None, 0), (3, 5)]),
    softcap=st.sampled_from([0.0, 2.0]),
    extras=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_compositions_match_the_definition(
    names: list[str],
    number: float,
    mask: str,
    lengths: tuple[int, int],
    band: tuple[int | None, int | None],
    softcap: float,
    extras: tuple[bool, bool, bool],
) -> None:
    """score_mod, mask_mod and blocks beside a band, softcap, dropout and sinks."""
    has_blocks, has_dropout, has_sinks = extras
    q, k, v = tensors(*lengths)
    parts, mask_mod = Parts(), MASKS[mask]
    # A factor on -inf has a NaN for its gradient in the definition.
    names = sorted(names, key="same_document".__eq__)
    score_mod = parts.score_mod(names, number) if names else None
    block_mask = None
    if has_blocks and mask_mod is not None:
        block_mask = flash4_torch.create_block_mask(mask_mod, None, H, *lengths, "cpu", BLOCK_SIZE=8)
    options = CallOptions(0.3, *band, softcap=softcap, dropout_p=0.4 if has_dropout else 0.0)
    sinks = torch.randn(H, dtype=torch.float64).requires_grad_() if has_sinks else None
    state = draw_rng_state(q.device) if has_dropout else None
    mods = traced(q, k, score_mod, mask_mod, block_mask)._replace(sinks=sinks, rng_state=state)
    dropout = None if state is None else Dropout(state, 0.4)
    scoring = Scoring(0.3, options.band, softcap, None, dropout)
    theirs = definition(q, k, v, scoring, sinks, score_mod, mask_mod)
    wanted = [q, k, v, *parts.learned, *([] if sinks is None else [sinks])]
    same(flex_attention(q, k, v, mods, options), theirs, wanted)


@pytest.mark.parametrize("block", [8, (4, 16), 100])
@pytest.mark.parametrize("has_full", [True, False])
def test_blocks_change_nothing(block: Any, has_full: bool) -> None:
    """A table of blocks is a shortcut, with or without full blocks, at lengths that are no multiples."""
    q, k, v = tensors(30, 45)
    mask_mod = windowed(9)
    block_mask = flash4_torch.create_block_mask(
        mask_mod, None, H, 30, 45, "cpu", block, separate_full_blocks=has_full
    )
    options = CallOptions(0.5)
    plain = flex_attention(q, k, v, traced(q, k, None, mask_mod), options)
    same(flex_attention(q, k, v, traced(q, k, None, mask_mod, block_mask), options), plain, [q, k, v])


def test_unlisted_blocks_are_hidden_and_full_ones_unmasked() -> None:
    """The table decides before mask_mod does, as in torch's kernels."""
    q, k, v = tensors(8, 12)
    one = torch.ones(1, 1, 2, dtype=torch.int32)
    partial = torch.tensor([0, 9, 9, 1, 9, 9], dtype=torch.int32).view(1, 1, 2, 3)
    full = torch.tensor([2, 9, 9, 2, 9, 9], dtype=torch.int32).view(1, 1, 2, 3)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i + j) % 2 == 0

    block_mask = BlockMask.from_kv_blocks(
        one, partial, one, full, (4, 4), mask_mod, (8, 12), compute_q_blocks=False
    )

    def shown(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j // 4 == 2) | ((i // 4 == j // 4) & mask_mod(b, h, i, j))

    options = CallOptions(0.5)
    dense = definition(q, k, v, Scoring(0.5), None, None, shown)
    same(flex_attention(q, k, v, traced(q, k, None, mask_mod, block_mask), options), dense, [q, k, v])


def test_identity_changes_nothing() -> None:
    q, k, v = (x.transpose(1, 2) for x in tensors(20, 20))
    options: dict[str, Any] = {"enable_gqa": True, "return_lse": True}
    plain = flash4_torch.flex_attention(q, k, v, **options)
    modified = flash4_torch.flex_attention(q, k, v, lambda score, b, h, i, j: score, **options)
    assert all(torch.equal(x, y) for x, y in zip(plain, modified, strict=True))


def test_mask_mod_is_a_bool_mask() -> None:
    q, k, v = tensors(20, 26)
    seen = torch.rand(2, H, 20, 26) < 0.4
    masked = flash4_torch.attention(q, k, v, attn_mask=seen, return_lse=True, scale=0.5)
    mods = traced(q, k, None, lambda b, h, i, j: seen[b, h, i, j])
    same(flex_attention(q, k, v, mods, CallOptions(0.5)), masked, [q, k, v])


def test_gradient_of_slopes_is_the_slope() -> None:
    """ALiBi's learned slopes: autograd against central differences."""
    q, k, v = (x.detach().transpose(1, 2) for x in tensors(9, 9))
    slopes = torch.randn(H, dtype=torch.float64).requires_grad_()

    def loss(slopes: Tensor) -> Tensor:
        out = flash4_torch.flex_attention(
            q, k, v, lambda score, b, h, i, j: score + slopes[h] * (j - i), enable_gqa=True
        )
        return (out * torch.arange(out.numel()).view(out.shape).sin()).sum()

    assert torch.autograd.gradcheck(loss, (slopes,), fast_mode=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_dtypes_are_rounded_once(dtype: torch.dtype) -> None:
    """Scores are float32 inside; the error is that of rounding inputs and output."""
    q, k, v = (x.detach().to(dtype) for x in tensors(33, 33))
    table = torch.randn(H, dtype=dtype)
    score_mod: Mod = lambda score, b, h, i, j: score + table[h] * (i - j)  # noqa: E731
    ours, lse = flex_attention(q, k, v, traced(q, k, score_mod, None), CallOptions(0.5))
    wide = definition(*(x.double() for x in (q, k, v)), Scoring(0.5), None, score_mod)
    assert (ours.dtype, lse.dtype) == (dtype, torch.float32)
    bound = 2 * torch.finfo(dtype).eps * float(v.double().abs().max()) + 1e-5
    assert float((ours.double() - wide[0]).abs().max()) <= bound
    torch.testing.assert_close(lse.double(), wide[1], rtol=1e-5, atol=1e-5)


def test_hidden_scores_have_no_gradient() -> None:
    """A score that score_mod made -inf gives nothing to what was computed from it, not even a NaN."""
    q, k, v = tensors(12, 12)
    gain = torch.rand((), dtype=torch.float64).requires_grad_()

    def hides(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(j <= i - 1, score, -float("inf")) * gain

    masked = traced(q, k, lambda score, b, h, i, j: score * gain, lambda b, h, i, j: j <= i - 1)
    options = CallOptions(0.5)
    expected = flex_attention(q, k, v, masked, options)
    same(flex_attention(q, k, v, traced(q, k, hides, None), options), expected, [q, k, v, gain])


def test_empty_calls() -> None:
    for Sq, Sk, B in [(0, 5, 2), (5, 0, 2), (5, 5, 0)]:
        q, k, v = tensors(Sq, Sk, B=B)
        mods = traced(q, k, lambda score, b, h, i, j: score * 2, windowed(3))
        out, lse = flex_attention(q, k, v, mods, CallOptions(0.5))
        grads = torch.autograd.grad([out, lse], [q, k, v], [torch.ones_like(out), torch.ones_like(lse)])
        assert all(not x.any() for x in (out, *grads)) and bool((lse == -torch.inf).all())


@settings(max_examples=20)
@given(order=st.permutations(range(3)), sizes=st.tuples(*3 * [st.integers(2, 5)]), Dv=st.sampled_from([4, 6]))
def test_out_has_the_order_of_query_in_memory(order: list[int], sizes: tuple[int, ...], Dv: int) -> None:
    """torch's function has it, too: no model has to copy what it then gives a view of."""
    B, S, heads = sizes
    inner = [sizes[i] for i in order]
    back = [order.index(i) for i in range(3)]
    q = torch.randn(*inner, 4).permute(*back, 3)
    assert q.shape == (B, S, heads, 4)
    k, v = torch.randn(B, 7, heads, 4), torch.randn(B, 7, heads, Dv)
    mods = traced(q, k, lambda score, b, h, i, j: score * 2, None)
    out, _ = flex_attention(q, k, v, mods, CallOptions(0.5))
    assert out.permute(*order, 3).is_contiguous()


def test_operators_keep_torchs_contract() -> None:
    q, k, v = tensors(9, 11)
    parts = Parts()
    block_mask = flash4_torch.create_block_mask(windowed(3), None, None, 9, 11, "cpu", 4)
    mods = traced(q, k, parts.score_mod(["alibi", "gained"], 0.5), windowed(3), block_mask)
    mods = mods._replace(captured=[x.detach().requires_grad_(x.requires_grad) for x in mods.captured])
    mods = Mods(*(list(x) if isinstance(x, tuple) else x for x in mods))
    # Sequences before batch entries in memory, too.
    other = q.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    for x in (q, other):
        torch.library.opcheck(torch.ops.flash4.flex_attention.default, (x, k, v, *mods, *CallOptions(0.5)))
