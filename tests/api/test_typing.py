"""The public functions as type checkers see them. mypy reads this file, too: see pyproject.toml."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from typing_extensions import assert_type

import flash4_torch
from flash4_torch.errors import ArgumentError, KeywordError

X = torch.randn(1, 4, 2, 8)
LENGTHS = torch.tensor([0, 4])


def test_return_lse_says_what_attention_returns() -> None:
    lse_too = X.shape[0] == 1
    out = assert_type(flash4_torch.attention(X, X, X), Tensor)
    assert_type(flash4_torch.attention(X, X, X, causal=True, return_lse=False), Tensor)
    both = assert_type(flash4_torch.attention(X, X, X, scale=None, return_lse=True), tuple[Tensor, Tensor])
    either = flash4_torch.attention(X, X, X, window=(1, None), return_lse=lse_too)
    assert_type(either, Tensor | tuple[Tensor, Tensor])
    assert isinstance(out, Tensor) and isinstance(both, tuple) and isinstance(either, tuple)


def test_return_lse_says_what_attention_varlen_returns() -> None:
    lse_too = X.shape[0] == 1
    out = flash4_torch.attention_varlen(X[0], X[0], X[0], cu_seqlens_q=LENGTHS, cu_seqlens_k=LENGTHS)
    both = flash4_torch.attention_varlen(
        X[0],
        X[0],
        X[0],
        cu_seqlens_q=LENGTHS,
        cu_seqlens_k=LENGTHS,
        max_seqlen_q=4,
        max_seqlen_k=LENGTHS[1],
        causal=True,
        return_lse=True,
    )
    either = flash4_torch.attention_varlen(
        X[0],
        X[0],
        X[0],
        cu_seqlens_q=LENGTHS,
        cu_seqlens_k=LENGTHS,
        max_seqlen_q=4,
        max_seqlen_k=None,
        return_lse=lse_too,
    )
    assert_type(out, Tensor)
    assert_type(both, tuple[Tensor, Tensor])
    assert_type(either, Tensor | tuple[Tensor, Tensor])
    assert isinstance(out, Tensor) and isinstance(both, tuple) and isinstance(either, tuple)


def test_wrong_calls_are_told_before_they_are_made() -> None:
    """An unused `type: ignore` is an error: each of these lines must be one to a type checker."""
    with pytest.raises(KeywordError):
        flash4_torch.attention(X, X, X, softmax_scale=1.0)  # type: ignore[call-overload]
    with pytest.raises(ArgumentError):
        flash4_torch.attention(X, X, X, causal="no")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="cu_seqlens_q"):
        flash4_torch.attention_varlen(X[0], X[0], X[0])  # type: ignore[call-overload]


def test_q_says_what_append_kvcache_returns() -> None:
    caches = X.new_zeros(2, 3, 4, 2, 8)
    where = torch.arange(4)[None]
    angles = torch.ones(4, 2)
    q = X if X.shape[0] == 1 else None
    flash4_torch.append_kvcache(X, X, *caches, slot_mapping=where)
    turned = flash4_torch.append_kvcache(
        X, X, *caches, slot_mapping=where, positions=where, cos=angles, sin=angles, q=X
    )
    either = flash4_torch.append_kvcache(
        X, X, *caches, slot_mapping=where, positions=where, cos=angles, sin=angles, q=q
    )
    assert_type(turned, Tensor)
    assert_type(either, Tensor | None)
    assert_type(flash4_torch.merge_states(X[None], X[None, ..., 0].mT), tuple[Tensor, Tensor])
    assert isinstance(turned, Tensor) and isinstance(either, Tensor)


def test_the_others() -> None:
    assert_type(flash4_torch.support(X, X, X), dict[str, list[str]])
    x = X.transpose(1, 2)
    assert_type(flash4_torch.flex_support(x, x, x), dict[str, list[str]])
    assert_type(flash4_torch.scaled_dot_product_attention(X, X, X), Tensor)
