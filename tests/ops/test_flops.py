"""FLOP counts for torch.utils.flop_counter: torch's own for full attention, else those of visible pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import flash4_torch
from flash4_torch import ops

lengths = st.integers(1, 24)
heads = st.tuples(st.integers(1, 2), st.integers(1, 3)).map(lambda n: (n[0] * n[1], n[0]))
bounds = st.one_of(st.none(), st.integers(0, 30))


def flops(function: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def dense(B: int, Sq: int, Sk: int, Hq: int, Hk: int, D: int, Dv: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (B, Sq, Hq, D), (B, Sk, Hk, D), (B, Sk, Hk, Dv)
    return tuple(torch.zeros(shape, requires_grad=True) for shape in shapes)


def visible_pairs(Sq: int, Sk: int, causal: bool, left: int | None, right: int | None) -> int:
    """The number of visible pairs, counted one by one from the definition of `attention`'s band."""
    right = 0 if causal else right
    return sum(
        (left is None or j >= i + Sk - Sq - left) and (right is None or j <= i + Sk - Sq + right)
        for i in range(Sq)
        for j in range(Sk)
    )


def test_full_attention_counts_as_torchs_own() -> None:
    """torch has formulas for its CUDA kernel; on meta tensors it counts without running."""
    q, k, v = dense(2, 16, 24, 4, 4, 8, 8)
    mine = flops(lambda: flash4_torch.attention(q, k, v))
    mine_with_backward = flops(lambda: flash4_torch.attention(q, k, v).sum().backward())
    q, k, v = (x.detach().transpose(1, 2).to("meta").requires_grad_() for x in (q, k, v))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    assert mine == flops(lambda: kernel(q, k, v))
    assert mine_with_backward == flops(lambda: kernel(q, k, v)[0].sum().backward())


@given(lengths, heads, st.integers(1, 9))
def test_causal_counts_half_and_the_diagonal(S: int, heads: tuple[int, int], D: int) -> None:
    q, k, v = dense(2, S, S, *heads, D, D)
    full, causal = (flops(lambda c=c: flash4_torch.attention(q, k, v, causal=c)) for c in (False, True))
    assert causal * 2 * S == full * (S + 1)


@given(lengths, lengths, heads, st.integers(1, 9), st.integers(1, 9), st.booleans(), bounds, bounds)
def test_windows_count_visible_pairs(
    Sq: int,
    Sk: int,
    heads: tuple[int, int],
    D: int,
    Dv: int,
    causal: bool,
    left: int | None,
    right: int | None,
) -> None:
    """The forward has two GEMMs, the backward three more over D and two more over Dv."""
    B, (Hq, _) = 2, heads
    q, k, v = dense(B, Sq, Sk, *heads, D, Dv)
    call = lambda: flash4_torch.attention(q, k, v, causal=causal, window=(left, right))  # noqa: E731
    per_width = 2 * B * Hq * visible_pairs(Sq, Sk, causal, left, right)
    assert flops(call) == per_width * (D + Dv)
    assert flops(lambda: call().sum().backward()) == per_width * (4 * D + 3 * Dv)


def test_equal_lengths_packed_count_as_a_batch() -> None:
    q, k, v = dense(3, 5, 7, 4, 2, 8, 6)
    packed = [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v)]

    def varlen() -> Tensor:
        return flash4_torch.attention_varlen(
            *packed,
            cu_seqlens_q=torch.arange(0, 16, 5),
            cu_seqlens_k=torch.arange(0, 22, 7),
            max_seqlen_q=5,
            max_seqlen_k=7,
        )

    assert flops(varlen) == flops(lambda: flash4_torch.attention(q, k, v))
    assert flops(lambda: varlen().sum().backward()) == flops(
        lambda: flash4_torch.attention(q, k, v).sum().backward()
    )


def test_weights_count_one_product_and_three_backward() -> None:
    q, k, _ = dense(2, 5, 7, 4, 2, 8, 8)

    def weights() -> Tensor:
        lse = q.new_zeros(2, 4, 5)
        return ops.autograd.attention_weights(
            q, k, lse, None, None, None, None, 1.0, None, None, 0.0, 0.0, False
        )

    one = 2 * 2 * 4 * 5 * 7 * 8
    assert flops(weights) == one
    assert flops(lambda: weights().sum().backward()) == 4 * one
