"""flex_attention against torch's own in float64, forward and all gradients, for what researchers write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks

import flash4_torch
from everything import EVERYTHING
from flex_mods import MASKS, MODS, H, MadeMod, Mod, Sizes, causal, torchs

S, BLOCK = 64, 16
SIZES = Sizes(S, H=H)


def call(**sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of 2 entries, float64."""
    D, Dv, Hk = sizes.get("D", 8), sizes.get("Dv", 8), sizes.get("Hk", 2)
    shapes = (2, H, S, D), (2, Hk, S, D), (2, Hk, S, Dv)
    q, k, v = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    return q, k, v


def agree(
    theirs: tuple[Tensor, Tensor], ours: tuple[Tensor, Tensor], wanted: list[Tensor], rows: Tensor
) -> None:
    """Results and gradients are the same where a row sees something; torch's gradients are NaN elsewhere."""
    shown = rows[..., None]
    dout, dlse = torch.randn_like(ours[0]) * shown, torch.randn_like(ours[1]) * rows
    torch.testing.assert_close(ours[0] * shown, theirs[0] * shown, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-10, atol=1e-11)
    found = torch.autograd.grad(ours, wanted, (dout, dlse))
    expected = torch.autograd.grad(theirs, wanted, (dout, dlse))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("mask", MASKS, ids=lambda f: f.__name__)
def test_mask_agrees_with_torch(mask: Callable[[Sizes], Mod]) -> None:
    q, k, v = call()
    block_mask = create_block_mask(mask(SIZES), 2, None, S, S, device="cpu", BLOCK_SIZE=BLOCK)
    theirs = torchs(q, k, v, lambda score, b, h, i, j: score, block_mask)
    ours = flash4_torch.flex_attention(q, k, v, None, block_mask, enable_gqa=True, return_lse=True)
    assert bool((ours[1] > -torch.inf).all())
    agree(theirs, ours, [q, k, v], torch.ones(2, H, S, dtype=torch.float64))


@pytest.mark.parametrize("make", MODS, ids=lambda f: f.__name__)
def test_score_mod_agrees_with_torch(make: Callable[[Sizes], MadeMod]) -> None:
    q, k, v = call(Dv=5)
    score_mod, learned, for_torch = make(SIZES)
    block_mask = create_block_mask(causal(SIZES), None, None, S, S, device="cpu", BLOCK_SIZE=BLOCK)
    theirs = torchs(q, k, v, for_torch or score_mod, block_mask)
    ours = flash4_torch.flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True, return_lse=True)
    agree(theirs, ours, [q, k, v, *learned], torch.ones(2, H, S, dtype=torch.float64))


def itself(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i == j


def one_after_another(mods: list[Mod]) -> Mod:
    def composed(score: Tensor, *places: Tensor) -> Tensor:
        for mod in mods:
            score = mod(score, *places)
        return score

    return composed


@settings(max_examples=100 if EVERYTHING else 8)
@given(
    masks=st.lists(st.sampled_from(MASKS), min_size=1, max_size=3, unique=True),
    join=st.sampled_from([and_masks, or_masks]),
    mods=st.lists(st.sampled_from(MODS), max_size=3, unique=True),
    block=st.sampled_from([16, 24, 128]),
    by_parts=st.booleans(),
)
def test_compositions_agree_with_torch(
    masks: list[Callable[[Sizes], Mod]],
    join: Callable[..., Mod],
    mods: list[Callable[[Sizes], MadeMod]],
    block: int,
    by_parts: bool,
) -> None:
    """Masks joined by torch's functions, and score mods one after another; a block mask or arguments."""
    q, k, v = call(Dv=5)
    made = [make(SIZES) for make in mods]
    learned = [x for each in made for x in each.learned]
    # torch has no gradient of a row that sees nothing.
    mask = or_masks(join(*(make(SIZES) for make in masks)), itself)
    block_mask = create_block_mask(mask, 2, None, S, S, device="cpu", BLOCK_SIZE=block)
    theirs = torchs(q, k, v, one_after_another([x.for_torch or x.mod for x in made]), block_mask)
    score_mod = one_after_another([x.mod for x in made])
    if by_parts:
        q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = flash4_torch.attention(q_, k_, v_, score_mod=score_mod, mask_mod=mask, return_lse=True)
        ours = out.transpose(1, 2), lse
    else:
        ours = flash4_torch.flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True, return_lse=True)
    agree(theirs, ours, [q, k, v, *learned], torch.ones(2, H, S, dtype=torch.float64))
