"""Calls with garbage among their arguments: our error, torch's where its contract holds, or right results."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash4_torch
import garbage
from bad_inputs import assert_clear
from everything import EVERYTHING
from flash4_torch import testing
from flash4_torch.errors import Flash4Error


class Call(dict[str, Any]):
    """A function's arguments by name."""

    def __repr__(self) -> str:
        shown = {
            name: f"{x.dtype} {x.layout} {[*x.shape] if not x.is_nested else 'nested'} on {x.device}"
            if isinstance(x, Tensor)
            else repr(x)[:200]
            for name, x in self.items()
        }
        return f"Call({shown})"


MANY = settings(max_examples=3000 if EVERYTHING else 150)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OTHER_DTYPES = (*DTYPES, torch.bool, torch.int32, torch.int64, torch.complex64, torch.float8_e5m2)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any shape of up to five dimensions, any dtype and any layout."""
    shape = draw(st.lists(st.integers(0, 4), max_size=5))
    x = torch.randn(shape).to(draw(st.sampled_from(OTHER_DTYPES)))
    kind = draw(st.sampled_from(("plain", "plain", "meta", "parameter", "sparse", "nested", "mkldnn")))
    if kind == "meta":
        return x.to("meta")
    if kind == "parameter":
        return torch.nn.Parameter(x, requires_grad=x.is_floating_point() or x.is_complex())
    if kind == "mkldnn" and x.dtype == torch.float32 and x.dim() and x.numel():
        return x.to_mkldnn()
    if kind == "nested" and x.dtype == torch.float32 and x.dim() > 1:
        return draw(st.sampled_from(list(garbage.nested(x).values()))) if len(x) else x
    if kind == "sparse" and x.dtype != torch.float8_e5m2:
        return x.to_sparse()
    return x


# Hypothesis cannot print longer numbers.
ODD_NUMBERS = st.sampled_from(
    [x for x in (*garbage.NO_FLOAT32, *garbage.HUGE_SIZES, 1e-50, 5e-324, 2**62) if not abs(x) > 10**1000]
)
NUMBERS = st.one_of(st.floats(-4.0, 4.0), st.integers(-9, 9), ODD_NUMBERS)
NO_NUMBERS = st.sampled_from(
    [
        *garbage.NO_NUMBERS,
        *garbage.NO_FLAGS,
        *garbage.NO_SIZES,
        *garbage.NO_PAIRS,
        *garbage.NO_TENSORS.values(),
    ]
)
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    NUMBERS,
    st.text(max_size=3),
    st.binary(max_size=3),
    NO_NUMBERS,
    tensors(),
)
ANYTHING = st.one_of(
    ATOMS,
    ATOMS,
    ATOMS,
    st.lists(ATOMS, max_size=3),
    st.tuples(ATOMS, ATOMS),
    st.tuples(st.one_of(st.none(), st.integers(-2, 5)), st.one_of(st.none(), st.integers(-2, 5))),
)

NEARLY: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.transpose(-3, -2),
    lambda x: x.transpose(0, -1),
    lambda x: x[..., :1],
    lambda x: x[:, :1],
    lambda x: x[:1],
    lambda x: x[None],
    lambda x: x[0],
    lambda x: x.repeat_interleave(2, -2),
    lambda x: x[..., ::2],
    lambda x: x.flip(-1),
    lambda x: x.requires_grad_(),
    *(lambda x, dtype=dtype: x.to(dtype) for dtype in OTHER_DTYPES),
]
"""Slips that change a tensor that fits; it may still fit."""

KEYWORDS = st.sampled_from(
    ["softmax_scale", "window_size", "is_causal", "causal", "mask", "xyz", "return_lse"]
)


@st.composite
def spoilt(draw: st.DrawFn, good: Call, optional: tuple[str, ...]) -> Call:
    """A good call with up to three arguments, given or not, replaced."""
    call = Call(good)
    names = st.sampled_from((*good, *optional))
    for name in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
        value = call.get(name)
        if isinstance(value, Tensor) and value.is_floating_point() and draw(st.booleans()):
            call[name] = draw(st.sampled_from(NEARLY))(value.clone())
        else:
            call[name] = draw(ANYTHING)
    if draw(st.integers(0, 15)) == 0:
        call.setdefault(draw(KEYWORDS), draw(ANYTHING))
    return call


def outcome(function: Callable[..., Any], call: Call) -> tuple[Any, Exception | None]:
    """The function's result, or the error that it raises."""
    with warnings.catch_warnings():
        # Torch's own warnings, of nested tensors and of masks' dtypes.
        warnings.simplefilter("ignore")
        try:
            return function(**call), None
        except Exception as error:
            return None, error


def assert_ours(error: Exception) -> None:
    assert isinstance(error, Flash4Error), f"{type(error).__name__}: {error}"
    assert_clear(str(error))


def assert_close(actual: Tensor, exact: Tensor, peer: Tensor, what: str) -> None:
    """Compares where plain torch in the same dtype has a number at all."""
    has_number = peer.isfinite() & exact.isfinite()
    assert actual.shape == exact.shape
    testing.assert_close_as_peer(actual[has_number], exact[has_number], peer[has_number], what=what)


OPTIONAL = ("causal", "window", "scale", "softcap", "dropout_p", "deterministic", "return_lse")
Q, K = torch.randn(2, 5, 4, 8), torch.randn(2, 6, 2, 8)
DENSE = Call(q=Q, k=K, v=K)


@given(spoilt(DENSE, (*OPTIONAL, "attn_mask")))
@MANY
def test_attention(call: Call) -> None:
    rng_state = testing.peek_rng_state()
    result, error = outcome(flash4_torch.attention, call)
    if error is not None:
        return assert_ours(error)
    if call["q"].is_meta:
        return None
    results = result if call.get("return_lse", False) else (result,)
    definition = {name: x for name, x in call.items() if name not in ("deterministic", "return_lse")}
    exact = testing.reference(**definition, rng_state=rng_state)
    peer = testing.reference(**definition, rng_state=rng_state, dtype=call["q"].dtype)
    for name, *values in zip(("out", "lse"), results, exact, peer, strict=False):
        assert_close(*values, what=name)
    return None


@given(spoilt(DENSE, (*OPTIONAL, "attn_mask")))
@MANY
def test_support_refuses_what_attention_refuses(call: Call) -> None:
    reasons, error = outcome(flash4_torch.support, call)
    _, expected = outcome(flash4_torch.attention, call)
    if error is None:
        assert expected is None and not all(reasons.values())
    else:
        assert_ours(error)
        assert type(error) is type(expected)
        assert str(error) == str(expected).replace("attention has no", "support has no")


LENGTHS = torch.tensor([0, 3, 3, 7])
P = torch.randn(7, 2, 8)
PACKED = Call(q=P, k=P, v=P, cu_seqlens_q=LENGTHS, cu_seqlens_k=LENGTHS, max_seqlen_q=4, max_seqlen_k=4)


@given(spoilt(PACKED, OPTIONAL))
@MANY
def test_attention_varlen(call: Call) -> None:
    result, error = outcome(flash4_torch.attention_varlen, call)
    if error is not None:
        return assert_ours(error)
    if call["q"].is_meta or call.get("dropout_p", 0):
        return None
    out = result[0] if call.get("return_lse", False) else result
    definition = {name: call[name] for name in ("causal", "window", "scale", "softcap") if name in call}
    q_ends, k_ends = (call[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    for b in range(len(q_ends) - 1):
        rows, keys = slice(q_ends[b], q_ends[b + 1]), slice(k_ends[b], k_ends[b + 1])
        sequence = call["q"][None, rows], call["k"][None, keys], call["v"][None, keys]
        exact, _ = testing.reference(*sequence, **definition)
        peer, _ = testing.reference(*sequence, **definition, dtype=out.dtype)
        assert_close(out[None, rows], exact, peer, f"sequence {b}")
    return None


HEADS_FIRST = Call(query=Q.transpose(1, 2), key=Q.transpose(1, 2), value=Q.transpose(1, 2))


@given(spoilt(HEADS_FIRST, ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")))
@MANY
def test_scaled_dot_product_attention(call: Call) -> None:
    result, error = outcome(flash4_torch.scaled_dot_product_attention, call)
    peer, expected = outcome(F.scaled_dot_product_attention, call)
    if isinstance(error, Flash4Error):
        return assert_ours(error)
    if error is not None:
        assert type(error) is type(expected) and _words(error) == _words(expected)
        return None
    mask = call.get("attn_mask")
    if expected is not None:
        # Broadcasting needs no minimum rank; torch's function does.
        assert isinstance(mask, Tensor) and mask.dim() < 2, expected
        peer = F.scaled_dot_product_attention(**{**call, "attn_mask": mask.expand(1, 1)})
    if result.is_meta or result.is_nested or float(call.get("dropout_p", 0.0)):
        return None
    assert (result.shape, result.dtype) == (peer.shape, peer.dtype)
    both = result.isfinite() & peer.isfinite()
    torch.testing.assert_close(result[both], peer[both], rtol=2e-2, atol=2e-2)
    return None


def _words(error: Exception | None) -> str:
    """The message, less the words that tell a call by position from one by name."""
    return re.sub(r" \(position \d\)", "", str(error))


def test_numpy_is_garbage_to_it_too() -> None:
    """Arrays are neither tensors nor numbers; torch's own function says so itself."""
    for call in (DENSE, PACKED):
        function = flash4_torch.attention if call is DENSE else flash4_torch.attention_varlen
        for name, value in call.items():
            if isinstance(value, Tensor):
                assert_ours(outcome(function, {**call, name: np.asarray(value)})[1] or AssertionError(name))
