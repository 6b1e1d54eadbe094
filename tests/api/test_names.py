"""The names under which autograd, anomaly mode and profilers show our operators."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import flash4_torch
from flash4_torch.problem import CallOptions
from on_cpu import gpu

X = torch.randn(1, 8, 2, 16).bfloat16().requires_grad_()


def varlen(x: Tensor) -> Tensor:
    ends = torch.tensor([0, 3, 8])
    x = x.flatten(0, 1)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 5, "max_seqlen_k": 5}
    return flash4_torch.attention_varlen(x, x, x, **lengths)


def weights(x: Tensor) -> Tensor:
    return flash4_torch.ops.attention_and_weights(x, x, x, None, None, None, CallOptions(scale=1.0), False)[2]


def dense(x: Tensor) -> Tensor:
    return flash4_torch.attention(x, x, x)


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": dense,
    "attention_varlen": varlen,
    "attention_weights": weights,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_node_is_named_after_its_operator(name: str) -> None:
    operator = OPERATORS[name]
    assert operator(X).grad_fn.name() == f"flash4_{name}Backward"
    seen: list[str] = []

    def total(x: Tensor) -> Tensor:
        out = operator(x)
        seen.append(out.grad_fn.name())
        return out.sum()

    torch.func.grad(total)(X.detach())
    assert seen == [f"flash4_{name}GeneratedBackward"]


def test_so_it_is_on_the_short_way() -> None:
    with gpu():
        assert [dense(X).grad_fn.name() for _ in range(3)] == ["flash4_attentionBackward"] * 3


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize("short", [False, True])
def test_anomaly_mode_names_the_operator(short: bool) -> None:
    with gpu() if short else nullcontext():
        for _ in range(2):
            dense(X).sum().backward()
        with torch.autograd.detect_anomaly():
            out = dense(X)
            with pytest.raises(RuntimeError, match="'flash4_attentionBackward' returned nan"):
                out.backward(torch.full_like(out, torch.nan))


def test_profilers_see_both_directions() -> None:
    with torch.profiler.profile(acc_events=True) as profile:
        dense(X).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"flash4::attention", "flash4::attention_backward", "flash4_attentionBackward"} <= names
