"""Bad calls of the module and of what makes it: a clear error, torch's own, or the right result."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bad_inputs import Case, check, module
from flash4_torch.errors import Flash4Error
from flash4_torch.nn import MultiheadAttention


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("case", module.CASES, ids=[case.name for case in module.CASES])
def test_it_is_refused_clearly(case: Case) -> None:
    check(case)


def test_flags_of_numpy_and_0_and_1_are_flags() -> None:
    """Stock takes them, and they can mean nothing else."""
    ours, x = MultiheadAttention(8, 2, bias=1, batch_first=module.np.True_), torch.randn(2, 5, 8)
    for true, false in ((1, 0), (module.np.True_, module.np.False_)):
        out, weights = ours(x, x, x, need_weights=true, average_attn_weights=false)
        assert weights.shape == (2, 2, 5, 5)
        torch.testing.assert_close(out, ours(x, x, x, need_weights=false)[0])


# A good call first, so that failures shrink to it.
TOKENS = (
    torch.randn(2, 5, 8),
    torch.randn(5, 2, 8),
    torch.randn(5, 8),
    torch.randn(2, 5, 6),
    torch.randn(3, 4, 8),
    torch.randn(2, 0, 8),
    torch.randn(1, 2, 5, 8),
    torch.randn(8),
    torch.tensor(1.0),
    torch.randn(2, 5, 8, dtype=torch.float64),
    torch.randn(2, 5, 8).half(),
    torch.ones(2, 5, 8, dtype=torch.int64),
    torch.randn(2, 5, 8, dtype=torch.complex64),
    None,
    "x",
    3,
    [[1.0]],
)
MASKS = (
    None,
    *(
        torch.zeros(shape, dtype=torch.bool)
        for shape in ((5, 5), (2, 5), (5, 2), (4, 5, 5), (5,), (3, 5), ())
    ),
    *(torch.zeros(shape) for shape in ((5, 5), (2, 5), (4, 5, 5))),
    torch.zeros(5, 5, dtype=torch.float64),
    torch.zeros(2, 5, dtype=torch.int64),
    [True],
    "no",
)
FLAGS = (True, False, 1, 0, None, "no", torch.tensor(True))
OPTIONS: dict[str, Any] = {
    "batch_first": st.booleans(),
    "bias": st.booleans(),
    "add_bias_kv": st.booleans(),
    "add_zero_attn": st.booleans(),
    "kdim": st.sampled_from([None, None, 6]),
    "dropout": st.sampled_from([0.0, 1.0]),
}


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """A call any of whose arguments may be wrong; most are right."""

    def one_of(values: tuple[Any, ...]) -> Any:
        return draw(st.sampled_from(values)) if draw(st.integers(0, 3)) == 0 else values[0]

    query = one_of(TOKENS)
    key = query if draw(st.booleans()) else one_of(TOKENS)
    call = {"query": query, "key": key, "value": key if draw(st.booleans()) else one_of(TOKENS)}
    for name in ("key_padding_mask", "attn_mask"):
        call[name] = draw(st.sampled_from(MASKS)) if draw(st.booleans()) else None
    call["is_causal"] = one_of(FLAGS[1:])
    return call | {name: one_of(FLAGS) for name in ("need_weights", "average_attn_weights")}


def outcome(attention: nn.Module, call: dict[str, Any]) -> Any:
    try:
        return attention(**call)
    except Exception as error:
        return error


@settings(max_examples=400)
@given(st.fixed_dictionaries(OPTIONS), calls(), st.booleans())
def test_outcome_is_stocks_or_an_error_of_ours(
    options: dict[str, Any], call: dict[str, Any], train: bool
) -> None:
    stock = nn.MultiheadAttention(8, 2, **options).train(train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, actual = (outcome(m, call) for m in (stock, MultiheadAttention.from_torch(stock)))
    if isinstance(actual, Flash4Error):
        return
    if isinstance(expected, Exception):
        if isinstance(actual, tuple):
            assert serves_more(call), expected
        else:
            # Either of two faults in a call may be found first.
            assert isinstance(actual, (AssertionError, RuntimeError, IndexError)), (actual, expected)
        return
    assert isinstance(actual, tuple), (actual, expected)
    for x, y in zip(actual, expected, strict=True):
        assert (x is None) == (y is None)
        assert x is None or (x.shape == y.shape and x.dtype == y.dtype)
    if not call["is_causal"] and not (train and options["dropout"]):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def serves_more(call: dict[str, Any]) -> bool:
    """Whether ours may serve what stock does not: masks of another dtype, and tensors without elements."""
    tensors = [x for x in call.values() if isinstance(x, Tensor)]
    masks = [call[name] for name in ("key_padding_mask", "attn_mask") if call[name] is not None]
    return any(x.numel() == 0 for x in tensors) or any(x.dtype == torch.float64 for x in masks)
