"""Calls without a score_mod on a CPU: PyTorch's kernel gives what the definition gives, whatever the mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import flash4_torch
from everything import examples
from flash4_torch import testing
from flash4_torch.backends.flex import cpu, intervals
from flash4_torch.flex.block_mask import create_block_mask
from flex_mods import Mod

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def masks(Sq: int, Sk: int) -> dict[str, Mod]:
    document = torch.arange(max(Sq, Sk)) // 50
    width = torch.tensor([20, 90])
    return {
        "causal": lambda b, h, i, j: i >= j,
        "causal at the end": lambda b, h, i, j: i + Sk - Sq >= j,
        "window": lambda b, h, i, j: (i >= j) & (i - j < 33),
        "documents": lambda b, h, i, j: document[i] == document[j],
        "some rows": lambda b, h, i, j: (i % 3 != 0) & (j % 2 == 0),
        "heads": lambda b, h, i, j: i - j < width[h % 2],
        "batch entries": lambda b, h, i, j: (i + j) % (b + 2) != 0,
        "nothing": lambda b, h, i, j: i < 0,
    }


def tensors(B: int, Sq: int, Sk: int, heads: tuple[int, int], D: int, dtype: torch.dtype) -> list[Tensor]:
    (Hq, Hk) = heads
    shapes = (B, Hq, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, D)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def results(inputs: list[Tensor], mask: BlockMask) -> list[Tensor]:
    """out, lse and gradients."""
    gqa = inputs[0].shape[1] != inputs[1].shape[1]
    out, lse = flash4_torch.flex_attention(*inputs, block_mask=mask, enable_gqa=gqa, return_lse=True)
    assert out.is_contiguous() and lse.is_contiguous()
    return [out, lse, *gradients(out, inputs)]


def gradients(out: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of a sum with weights that differ everywhere; out (B, H, S, D)."""
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    return torch.autograd.grad(out, inputs, weights)


def shown_by(inputs: list[Tensor], mod: Mod) -> Tensor:
    """The mask of all scores."""
    (B, H, Sq, _), Sk = inputs[0].shape, inputs[1].shape[2]
    lanes = (
        torch.arange(n).view([-1 if dim == at else 1 for dim in range(4)])
        for at, n in enumerate((B, H, Sq, Sk))
    )
    return mod(*lanes).expand(B, H, Sq, Sk)


def defined(inputs: list[Tensor], shown: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The same by the definition."""
    out, lse = testing.reference(*(x.transpose(1, 2) for x in inputs), attn_mask=shown, dtype=dtype)
    out = out.transpose(1, 2)
    return [out, lse, *gradients(out, inputs)]


def of_torch(inputs: list[Tensor], shown: Tensor) -> list[Tensor]:
    """Gradients by torch's own function; 0 where it has NaN, for rows that see nothing."""
    gqa = inputs[0].shape[1] != inputs[1].shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=shown, enable_gqa=gqa)
    return [x.nan_to_num(0.0) for x in gradients(out, inputs)]


@given(
    seed=st.integers(0, 99),
    kind=st.sampled_from(list(masks(1, 1))),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 150), st.integers(1, 150)),
    heads=st.sampled_from([(2, 2), (4, 2), (2, 1)]),
    D=st.sampled_from([8, 33, 64]),
    dtype=st.sampled_from(DTYPES),
    block=st.sampled_from([16, 64, 128]),
)
@settings(max_examples=examples(25, 300))
def test_results_and_gradients_are_right(
    seed: int,
    kind: str,
    sizes: tuple[int, int, int],
    heads: tuple[int, int],
    D: int,
    dtype: torch.dtype,
    block: int,
) -> None:
    torch.manual_seed(seed)
    B, Sq, Sk = sizes
    inputs = tensors(*sizes, heads, D, dtype)
    of = (B if kind == "batch entries" else None), (heads[0] if kind == "heads" else None)
    mod = masks(Sq, Sk)[kind]
    mask = create_block_mask(mod, *of, Sq, Sk, device="cpu", BLOCK_SIZE=block)
    with testing.backends_used() as used:
        ours = results(inputs, mask)
    assert used == {("flex_attention", "cpu"): 1, ("flex_attention_backward", "cpu"): 1}
    shown = shown_by(inputs, mod)
    exact, peer = (defined(inputs, shown, x) for x in (torch.float64, dtype))
    others = of_torch(inputs, shown)
    # torch's fused kernel rounds other things than its plain functions do.
    noise = [0.0, 0.0, *(2 * (x - e).abs().max().item() for x, e in zip(others, exact[2:], strict=True))]
    for a, e, p, n in zip(ours, exact, peer, noise, strict=True):
        testing.assert_close_as_peer(a, e, p, noise=n)


@pytest.mark.parametrize("most", [0, 1 << 30], ids=["tiled", "whole mask"])
@pytest.mark.parametrize("kind", ["window", "documents"])
def test_who_serves_a_mask_changes_nothing(most: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tensors(1, 140, 140, (2, 2), 32, torch.float32)
    mask = create_block_mask(masks(140, 140)[kind], None, None, 140, 140, device="cpu", BLOCK_SIZE=32)
    monkeypatch.setattr(cpu, "_MOST_SCORES", most)
    monkeypatch.setattr(cpu, "_LEAST_SHOWN", 0.0)
    found = results(inputs, mask)
    monkeypatch.setenv("FLASH4_BACKEND", "tiled")
    for a, b in zip(found, results(inputs, mask), strict=True):
        torch.testing.assert_close(a, b)


def test_a_mask_is_evaluated_once_and_again_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[Any] = []
    original = intervals._found
    monkeypatch.setattr(intervals, "_found", lambda *args: evaluated.append(args) or original(*args))
    inputs = tensors(1, 90, 90, (2, 2), 16, torch.float32)
    limit = torch.tensor(40)
    mask = create_block_mask(lambda b, h, i, j: (i - j).abs() % 7 < limit, None, None, 90, 90, device="cpu")
    assert len({results(inputs, mask)[0].sum().item() for _ in range(3)}) == len(evaluated) == 1
    limit.fill_(3)
    narrower = create_block_mask(mask.mask_mod, None, None, 90, 90, device="cpu")
    found = [results(inputs, each) for each in (mask, narrower)]
    assert len(evaluated) == 3
    monkeypatch.setenv("FLASH4_BACKEND", "tiled")
    for own, each in zip(found, (mask, narrower), strict=True):
        for a, b in zip(own, results(inputs, each), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", [1, 2], ids=["k", "v"])
def test_poison_reaches_what_it_reaches_in_plain_torch(
    which: int, poison: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_LEAST_SHOWN", 0.0)
    inputs = tensors(1, 300, 300, (2, 2), 16, torch.float32)
    mask = create_block_mask(masks(300, 300)["documents"], None, None, 300, 300, device="cpu", BLOCK_SIZE=50)
    with torch.no_grad():
        inputs[which][:, :, 260] = poison
    found = results(inputs, mask)
    assert found[0][:, :, :100].isfinite().all() and not found[0][:, :, 250:].isfinite().all()
    monkeypatch.setenv("FLASH4_BACKEND", "tiled")
    for a, b in zip(found, results(inputs, mask), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_a_forced_backend_leaves_functions_of_scores_to_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH4_BACKEND", "cpu")
    inputs = [x.detach() for x in tensors(1, 20, 20, (2, 2), 16, torch.float32)]
    mask = create_block_mask(masks(20, 20)["causal"], None, None, 20, 20, device="cpu")
    with testing.backends_used() as used:
        flash4_torch.flex_attention(*inputs, lambda s, b, h, i, j: s * 2, mask)
        flash4_torch.flex_attention(*inputs, None, mask)
    assert used == {("flex_attention", "tiled"): 1, ("flex_attention", "cpu"): 1}
