"""FLOP counts for torch.utils.flop_counter: those of torch's own attention, whatever is hidden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
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


def of_torch(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[int, int]:
    """torch's counts of its CUDA kernel, forward and with backward: meta tensors count without running.

    KV heads are repeated: not every version of torch counts GQA.
    """
    tensors = [x.detach().transpose(1, 2).to("meta") for x in (q, k, v)]
    q, k, v = (x.repeat_interleave(q.shape[2] // x.shape[1], 1).requires_grad_() for x in tensors)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    call = lambda: kernel(q, k, v, is_causal=causal)  # noqa: E731
    return flops(call), flops(lambda: call()[0].sum().backward())


def counts(call: Callable[[], Tensor]) -> tuple[int, int]:
    return flops(call), flops(lambda: call().sum().backward())


@given(lengths, lengths, heads, st.integers(1, 9), st.booleans(), bounds)
def test_attention_counts_as_torchs_own(
    Sq: int, Sk: int, heads: tuple[int, int], D: int, causal: bool, left: int | None
) -> None:
    q, k, v = dense(2, Sq, Sk, *heads, D, D)
    right = of_torch(q, k, v, causal)
    assert counts(lambda: flash4_torch.attention(q, k, v, causal=causal, window=(left, None))) == right
    tensors = [x.transpose(1, 2) for x in (q, k, v)]
    sdpa = flash4_torch.scaled_dot_product_attention
    assert counts(lambda: sdpa(*tensors, is_causal=causal, enable_gqa=True)) == right


def test_values_have_a_width_of_their_own() -> None:
    """The forward has two matmuls, the backward three more over D and two more over Dv."""
    q, k, v = dense(2, 5, 7, 4, 2, 6, 8)
    one = 2 * 2 * 4 * 5 * 7
    assert counts(lambda: flash4_torch.attention(q, k, v)) == (one * (6 + 8), one * (4 * 6 + 3 * 8))


def test_flex_counts_as_torchs_own() -> None:
    q, k, v = dense(2, 16, 24, 4, 4, 8, 8)

    def relative(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + (i - j)

    call = lambda: flash4_torch.attention(q, k, v, score_mod=relative)  # noqa: E731
    assert counts(call) == of_torch(q, k, v, False)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5))
def test_packed_sequences_count_one_by_one(lengths: list[tuple[int, int]]) -> None:
    q, k, v = (x[0] for x in dense(1, *map(sum, zip(*lengths, strict=True)), 4, 2, 8, 6))
    ends = [torch.tensor([0, *n]).cumsum(0) for n in zip(*lengths, strict=True)]

    def packed() -> Tensor:
        return flash4_torch.attention_varlen(q, k, v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])

    apart = [counts(lambda x=x: flash4_torch.attention(*dense(1, *x, 4, 2, 8, 6))) for x in lengths]
    assert counts(packed) == tuple(map(sum, zip(*apart, strict=True)))


def test_unknown_lengths_count_as_equal() -> None:
    """Fake tensors have no values; a graph holds such."""
    q, k, v = dense(3, 5, 7, 4, 2, 8, 6)
    expected = counts(lambda: flash4_torch.attention(q, k, v))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        packed = [mode.from_tensor(x.detach().flatten(0, 1)).requires_grad_() for x in (q, k, v)]
        ends = mode.from_tensor(torch.arange(0, 16, 5)), mode.from_tensor(torch.arange(0, 22, 7))
        found = counts(
            lambda: flash4_torch.attention_varlen(*packed, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
        )
    assert found == expected


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
