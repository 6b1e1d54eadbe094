"""Laws of attention that hold whatever the numbers are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash4_torch
from cases import Case, cases, finite_sum, windows
from flash4_torch import fast_path, testing
from flash4_torch.masks import Band

F64 = (torch.float64,)


def attend(
    case: Case, q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None, **kwargs: Any
):
    """(out, lse) of a case with some of its arguments replaced."""
    tensors = (case.q if q is None else q, case.k if k is None else k, case.v if v is None else v)
    return flash4_torch.attention(*tensors, **{**case.kwargs, **kwargs}, return_lse=True)


def assert_same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@given(cases(F64))
def test_linear_in_v(case: Case) -> None:
    other = torch.randn_like(case.v)
    together, _ = attend(case, v=2.0 * case.v - 3.0 * other)
    assert_same(together, 2.0 * attend(case)[0] - 3.0 * attend(case, v=other)[0])


@given(cases(F64, sinks=None))
def test_weights_sum_to_one(case: Case) -> None:
    out, lse = attend(case, v=torch.ones_like(case.v))
    attends = torch.isfinite(lse).to(out.dtype).transpose(1, 2)[..., None]
    assert_same(out, attends.expand_as(out))


@given(cases(F64, attn_mask=None, causal=False, window=(None, None)))
def test_order_of_keys_does_not_matter(case: Case) -> None:
    order = torch.randperm(case.k.shape[1])
    for a, b in zip(attend(case), attend(case, k=case.k[:, order], v=case.v[:, order]), strict=True):
        assert_same(a, b)


@given(cases(F64, softcap=0.0, sinks=None))
def test_a_shift_of_all_scores_moves_only_lse(case: Case) -> None:
    mask = case.kwargs["attn_mask"]
    bias = torch.zeros(1, 1, 1, 1, dtype=torch.float64) if mask is None else mask
    if bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape, dtype=torch.float64).masked_fill(~bias, -torch.inf)
    out, lse = attend(case)
    shifted, shifted_lse = attend(case, attn_mask=bias.double() + 2.5)
    assert_same(out, shifted)
    assert_same(lse + 2.5, shifted_lse)


@given(cases(F64))
def test_gqa_is_repeated_keys(case: Case) -> None:
    group = case.q.shape[2] // case.k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (case.k, case.v))
    for a, b in zip(attend(case), attend(case, k=k, v=v), strict=True):
        assert_same(a, b)


@given(cases(F64, sinks=None), st.integers(0, 40))
def test_keys_split_in_two_merge_by_lse(case: Case, at: int) -> None:
    """Split-KV and ring attention rely on this."""
    Sq, Sk = case.q.shape[1], case.k.shape[1]
    at = min(at, Sk)
    band = Band(*case.kwargs["window"])._replace(**({"right": 0} if case.kwargs["causal"] else {}))
    i, j = torch.arange(Sq)[:, None], torch.arange(Sk)
    visible = torch.as_tensor(band.visible(i, j, Sq, Sk)).broadcast_to(Sq, Sk)
    mask = case.kwargs["attn_mask"]
    parts = []
    for keys in (slice(0, at), slice(at, Sk)):
        seen = visible[:, keys]
        if mask is None:
            part_mask = seen
        else:
            part = mask if mask.shape[-1] == 1 else mask[..., keys]
            part_mask = part & seen if part.dtype == torch.bool else part.masked_fill(~seen, -torch.inf)
        parts.append(
            attend(
                case,
                k=case.k[:, keys],
                v=case.v[:, keys],
                attn_mask=part_mask,
                causal=False,
                window=(None, None),
            )
        )
    assert_merges(parts, attend(case))


def assert_merges(parts: list[tuple[Tensor, Tensor]], whole: tuple[Tensor, Tensor]) -> None:
    """(out, lse) over two disjoint sets of keys add up, weighted by their lse, to those over their union."""
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    shares = [torch.exp(part_lse - lse).nan_to_num().transpose(1, 2)[..., None] for _, part_lse in parts]
    assert_same(whole[0], parts[0][0] * shares[0] + parts[1][0] * shares[1])
    assert_same(whole[1], lse)


@given(cases(F64, causal=False, sinks=None), st.integers(-50, 50))
def test_bands_beside_each_other_merge_by_lse(case: Case, at: int) -> None:
    """A window is cut between two diagonals: one part ends where the other begins."""
    left, right = case.kwargs["window"]
    at = max(at, -50 if left is None else -left)
    at = min(at, 50 if right is None else right - 1)
    assume(left is None or left + at >= 0)
    parts = [attend(case, window=(left, at)), attend(case, window=(-at - 1, right))]
    assert_merges(parts, attend(case))


@given(cases(F64, attn_mask=None, window=(None, None), causal=True))
def test_causal_rows_ignore_later_keys(case: Case) -> None:
    Sq, Sk = case.q.shape[1], case.k.shape[1]
    for i in range(0, Sq, 3):
        seen = max(0, min(Sk, i + Sk - Sq + 1))
        row, row_lse = attend(
            case, q=case.q[:, i : i + 1], k=case.k[:, :seen], v=case.v[:, :seen], causal=False
        )
        out, lse = attend(case)
        assert_same(out[:, i : i + 1], row)
        assert_same(lse[:, :, i : i + 1], row_lse)


@given(cases(F64, causal=False))
def test_window_is_the_mask_it_describes(case: Case) -> None:
    Sq, Sk = case.q.shape[1], case.k.shape[1]
    left, right = case.kwargs["window"]
    distance = torch.arange(Sk) - torch.arange(Sq)[:, None] - (Sk - Sq)
    seen = torch.ones(Sq, Sk, dtype=torch.bool)
    seen &= distance >= -left if left is not None else True
    seen &= distance <= right if right is not None else True
    mask = case.kwargs["attn_mask"]
    if mask is not None:
        seen = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)
    for a, b in zip(attend(case), attend(case, window=(None, None), attn_mask=seen), strict=True):
        assert_same(a, b)


@given(cases(F64))
def test_rows_without_keys_are_zero_and_pass_no_gradient(case: Case) -> None:
    Sq, Sk = case.q.shape[1], case.k.shape[1]
    hidden = torch.zeros(max(Sq, 1), 1, dtype=torch.bool)[:Sq]
    out, lse = attend(case, attn_mask=hidden if Sq != 1 else hidden[:1])
    sinks = case.kwargs["sinks"]
    assert (out == 0).all() and (lse == (-torch.inf if sinks is None else sinks[:, None].double())).all()
    loss = out.sum() + finite_sum(lse, torch.ones_like(lse))
    for gradient in torch.autograd.grad(loss, (case.q, case.k, case.v)):
        assert (gradient == 0).all()
    assert Sk >= 0


@given(cases())
def test_results_are_contiguous_and_typed(case: Case) -> None:
    out, lse = attend(case)
    B, Sq, Hq, _ = case.q.shape
    assert out.shape == (B, Sq, Hq, case.v.shape[-1]) and out.dtype == case.q.dtype and out.is_contiguous()
    assert lse.shape == (B, Hq, Sq) and lse.is_contiguous()
    assert lse.dtype == (torch.float64 if case.q.dtype == torch.float64 else torch.float32)


@given(cases(F64))
def test_inputs_stay_as_they_were(case: Case) -> None:
    before = [x.clone() for x in case.differentiable]
    out, _ = attend(case)
    out.sum().backward()
    for a, b in zip(before, case.differentiable, strict=True):
        assert torch.equal(a, b)


@st.composite
def packed(draw: st.DrawFn) -> tuple[list[int], list[int], dict[str, Any]]:
    """Lengths of queries and keys of up to four sequences, empty ones included, and keyword arguments.

    The longest lengths are given, given as an upper bound, or left out.
    """
    B = draw(st.integers(0, 4))
    length = st.integers(0, 20)
    causal = draw(st.booleans())
    kwargs = {
        "causal": causal,
        "window": draw(windows(causal, most=20)),
        "softcap": draw(st.sampled_from([0.0, 2.0])),
        "dropout_p": draw(st.sampled_from([0.0, 0.3])),
    }
    q_lengths, k_lengths = ([draw(length) for _ in range(B)] for _ in "qk")
    for name, lengths in (("max_seqlen_q", q_lengths), ("max_seqlen_k", k_lengths)):
        if draw(st.booleans()):
            kwargs[name] = max(lengths, default=0) + draw(st.sampled_from([0, 0, 7]))
    return q_lengths, k_lengths, kwargs


@given(packed(), st.sampled_from([torch.int32, torch.int64]))
@settings(max_examples=100)
def test_varlen_is_a_loop(problem: tuple[list[int], list[int], dict[str, Any]], dtype: torch.dtype) -> None:
    q_lengths, k_lengths, kwargs = problem
    Hq, Hk, D, Dv = 4, 2, 8, 5
    q, k, v = (
        torch.randn(sum(lengths), H, d, dtype=torch.float64, requires_grad=True)
        for lengths, H, d in ((q_lengths, Hq, D), (k_lengths, Hk, D), (k_lengths, Hk, Dv))
    )
    rng_state = testing.peek_rng_state()
    with testing.poisoned_memory():
        out, lse = flash4_torch.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=torch.tensor([0, *torch.tensor(q_lengths).cumsum(0)], dtype=dtype),
            cu_seqlens_k=torch.tensor([0, *torch.tensor(k_lengths).cumsum(0)], dtype=dtype),
            return_lse=True,
            **kwargs,
        )
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        gradients = torch.autograd.grad((out * dout).sum() + finite_sum(lse, dlse), (q, k, v))
    definition = {name: x for name, x in kwargs.items() if not name.startswith("max_")}
    outs, lses = [], []
    for b, (qs, ks, vs) in enumerate(
        zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
    ):
        # Sequence b replays dropout as batch entry b.
        batch = [x[None].expand(b + 1, *x.shape) for x in (qs, ks, vs)]
        one, one_lse = testing.reference(*batch, **definition, rng_state=rng_state)
        outs.append(one[b])
        lses.append(one_lse[b])
    expected = torch.cat(outs) if outs else torch.empty_like(out)
    expected_lse = torch.cat(lses, 1) if lses else torch.empty_like(lse)
    assert_same(out, expected)
    assert_same(lse, expected_lse)
    if outs:
        loss = (expected * dout).sum() + finite_sum(expected_lse, dlse)
        for a, b in zip(gradients, torch.autograd.grad(loss, (q, k, v)), strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("S", [5, 300])
def test_rows_may_begin_inside_of_one_another(S: int, step: int, dtype: torch.dtype) -> None:
    """Windows over a series do; torch's kernel for CPUs reads some of them wrongly, and refuses others."""
    series = torch.randn(2, 3, step * (S - 1) + 16, dtype=dtype)
    overlapping = series.unfold(-1, 16, step).transpose(1, 2)
    dout = torch.randn(2, S, 3, 16, dtype=dtype)
    seen = torch.ones(S, S, dtype=torch.bool).tril()
    copied = overlapping.contiguous()

    def heads_first(*qkv: Tensor) -> Tensor:
        out = flash4_torch.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv))
        return out.transpose(1, 2)

    calls: list[Callable[..., Tensor]] = [
        flash4_torch.attention,
        lambda *qkv: flash4_torch.attention(*qkv, attn_mask=seen),
        heads_first,
    ]
    for call in calls:
        results = []
        for q, k in ((copied, copied), (overlapping, copied), (copied, overlapping), (copied, copied)):
            inputs = [x.detach().requires_grad_() for x in (q, k, copied)]
            out = call(*inputs)
            results.append((out, *torch.autograd.grad(out, inputs, dout)))
        for found in results[1:]:
            for a, b in zip(found, results[0], strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(2, 60, 4), (1, 60, 1), (2, 1, 4), (1, 1, 1)])
@pytest.mark.parametrize("how", ["plain", "masked", "dropout", "window", "varlen", "SDPA", "flex"])
def test_results_may_be_changed_in_place(how: str, shape: tuple[int, int, int]) -> None:
    """Torch's may, too; the first call of a kind goes another way than later ones."""
    B, S, H = shape
    q, k, v = (x.requires_grad_() for x in torch.randn(3, B, S, H, 16).unbind(0))
    heads_first, packed = [x.transpose(1, 2) for x in (q, k, v)], [x.flatten(0, 1) for x in (q, k, v)]
    ends, seen = torch.arange(B + 1, dtype=torch.int32) * S, torch.ones(S, S, dtype=torch.bool).tril()
    call: Any = {
        "plain": lambda: flash4_torch.attention(q, k, v),
        "masked": lambda: flash4_torch.attention(q, k, v, attn_mask=seen),
        "dropout": lambda: flash4_torch.attention(q, k, v, dropout_p=0.3),
        "window": lambda: flash4_torch.attention(q, k, v, window=(3, None)),
        "varlen": lambda: flash4_torch.attention_varlen(*packed, cu_seqlens_q=ends, cu_seqlens_k=ends),
        "SDPA": lambda: flash4_torch.scaled_dot_product_attention(*heads_first),
        "flex": lambda: flash4_torch.flex_attention(*heads_first),
    }[how]
    fast_path.clear()
    for _ in range(3):
        call().add_(1.0)
