"""Bad input: a named error that gives the argument, its value and the limit."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import flash4_torch
from flash4_torch.errors import ArgumentError, DeviceError, DtypeError, RangeError, ShapeError

X = torch.randn(2, 4, 2, 8)
CU = torch.tensor([0, 3, 8], dtype=torch.int32)
P = torch.randn(8, 2, 8)

# name: (arguments that differ from a good call, error, argument it names, a piece of the limit)
DENSE: dict[str, tuple[dict[str, Any], type[ArgumentError], str, str]] = {
    "q is not a tensor": ({"q": 3}, ArgumentError, "q", "must be a tensor"),
    "v is a list": ({"v": [1]}, ArgumentError, "v", "must be a tensor"),
    "q of rank 3": ({"q": X[0]}, ShapeError, "q", "(B, S, H, D)"),
    "k of rank 5": ({"k": X[None]}, ShapeError, "k", "(B, S, H, D)"),
    "integer q": ({"q": X.long()}, DtypeError, "q", "bfloat16, float16, float32 or float64"),
    "complex v": ({"v": X.cfloat()}, DtypeError, "v", "bfloat16, float16, float32 or float64"),
    "dtypes differ": ({"k": X.half()}, DtypeError, "k", "torch.float32"),
    "devices differ": ({"v": X.to("meta")}, DeviceError, "v", "cpu"),
    "batch differs": ({"k": X[:1], "v": X[:1]}, ShapeError, "k", "batch size must be q's, 2"),
    "k and v of other lengths": ({"v": X[:, :3]}, ShapeError, "v", "(2, 4, 2)"),
    "k and v of other heads": ({"v": X[:, :, :1]}, ShapeError, "v", "(2, 4, 2)"),
    "D differs": ({"k": X[..., :4]}, ShapeError, "k", "last dimension must be q's, 8"),
    "D is 0": ({"q": X[..., :0], "k": X[..., :0]}, ShapeError, "q, v", "at least 1"),
    "no heads": ({"q": X[:, :, :0]}, ShapeError, "q", "positive multiple of k's 2"),
    "heads do not divide": ({"q": X.repeat(1, 1, 2, 1)[:, :, :3]}, ShapeError, "q", "multiple of k's 2"),
    "fewer query heads than KV heads": ({"q": X[:, :, :1]}, ShapeError, "q", "multiple of k's 2"),
    "NaN scale": ({"scale": float("nan")}, RangeError, "scale", "finite"),
    "infinite scale": ({"scale": float("inf")}, RangeError, "scale", "finite"),
    "scale is text": ({"scale": "1"}, ArgumentError, "scale", "number"),
    "scale is a tensor": ({"scale": torch.tensor(1.0)}, ArgumentError, "scale", "number"),
    "negative softcap": ({"softcap": -1.0}, RangeError, "softcap", "at least 0.0"),
    "NaN softcap": ({"softcap": float("nan")}, RangeError, "softcap", "finite"),
    "dropout over 1": ({"dropout_p": 1.1}, RangeError, "dropout_p", "from 0.0 to 1.0"),
    "negative dropout": ({"dropout_p": -0.1}, RangeError, "dropout_p", "from 0.0 to 1.0"),
    "NaN dropout": ({"dropout_p": float("nan")}, RangeError, "dropout_p", "from 0.0 to 1.0"),
    "window is a number": ({"window": 3}, ArgumentError, "window", "pair"),
    "window of three": ({"window": (1, 2, 3)}, ArgumentError, "window", "pair"),
    "empty window": ({"window": (-1, 0)}, RangeError, "window", "left + right"),
    "causal and a negative right": (
        {"causal": True, "window": (None, -1)},
        RangeError,
        "window's right",
        "causal=True is a right bound of 0",
    ),
    "window of floats": ({"window": (None, 1.5)}, ArgumentError, "window's right", "int or None"),
    "mask is a list": ({"attn_mask": [True]}, ArgumentError, "attn_mask", "tensor or None"),
    "integer mask": ({"attn_mask": torch.ones(4, 4, dtype=torch.int8)}, DtypeError, "attn_mask", "bool"),
    "mask on another device": (
        {"attn_mask": torch.ones(4, 4, device="meta")},
        DeviceError,
        "attn_mask",
        "cpu",
    ),
    "mask too long": ({"attn_mask": torch.ones(4, 5)}, ShapeError, "attn_mask", "(2, 2, 4, 4)"),
    "mask of other heads": ({"attn_mask": torch.ones(3, 4, 4)}, ShapeError, "attn_mask", "(2, 2, 4, 4)"),
    "mask of rank 5": ({"attn_mask": torch.ones(1, 1, 1, 4, 4)}, ShapeError, "attn_mask", "(2, 2, 4, 4)"),
}

VARLEN: dict[str, tuple[dict[str, Any], type[ArgumentError], str, str]] = {
    "q of rank 4": ({"q": X}, ShapeError, "q", "(T, H, D)"),
    "cu_seqlens is a list": ({"cu_seqlens_q": [0, 8]}, ArgumentError, "cu_seqlens_q", "tensor"),
    "cu_seqlens of rank 2": ({"cu_seqlens_k": CU[None]}, ShapeError, "cu_seqlens_k", "(B + 1,)"),
    "cu_seqlens empty": ({"cu_seqlens_q": CU[:0]}, ShapeError, "cu_seqlens_q", "(B + 1,)"),
    "cu_seqlens float": ({"cu_seqlens_q": CU.float()}, DtypeError, "cu_seqlens_q", "int32 or int64"),
    "cu_seqlens elsewhere": ({"cu_seqlens_q": CU.to("meta")}, DeviceError, "cu_seqlens_q", "cpu"),
    "other numbers of sequences": (
        {"cu_seqlens_q": CU[[0, 2]]},
        ShapeError,
        "cu_seqlens_q, cu_seqlens_k",
        "equally many",
    ),
    "begins with 1": ({"cu_seqlens_q": torch.tensor([1, 3, 8])}, RangeError, "cu_seqlens_q", "begin with 0"),
    "ends early": ({"cu_seqlens_k": torch.tensor([0, 3, 7])}, RangeError, "cu_seqlens_k", "packed length, 8"),
    "a negative length": (
        {"cu_seqlens_q": torch.tensor([0, 5, 3, 8]), "cu_seqlens_k": torch.tensor([0, 3, 5, 8])},
        RangeError,
        "cu_seqlens_q",
        "must not decrease",
    ),
    "max_seqlen too small": ({"max_seqlen_k": 4}, RangeError, "max_seqlen_k", "longest sequence has 5"),
    "negative max_seqlen": ({"max_seqlen_q": -1}, RangeError, "max_seqlen_q", "at least 0"),
    "max_seqlen float": ({"max_seqlen_q": 5.0}, ArgumentError, "max_seqlen_q", "int, a 0-dim tensor or None"),
}


def check(function: Any, call: dict[str, Any], row: tuple[dict[str, Any], Any, str, str]) -> None:
    changed, error, argument, limit = row
    call = {**call, **changed}
    with pytest.raises(error) as caught:
        function(call.pop("q"), call.pop("k"), call.pop("v"), **call)
    assert caught.value.argument == argument
    assert argument in str(caught.value) and str(caught.value.value) in str(caught.value)
    assert limit in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("name", DENSE)
def test_attention(name: str) -> None:
    check(flash4_torch.attention, {"q": X, "k": X, "v": X}, DENSE[name])


@pytest.mark.parametrize("name", DENSE)
def test_support(name: str) -> None:
    check(flash4_torch.support, {"q": X, "k": X, "v": X}, DENSE[name])


@pytest.mark.parametrize("name", VARLEN)
def test_attention_varlen(name: str) -> None:
    call = {
        "q": P,
        "k": P,
        "v": P,
        "cu_seqlens_q": CU,
        "cu_seqlens_k": CU,
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
    }
    check(flash4_torch.attention_varlen, call, VARLEN[name])


def test_errors_are_catchable_as_the_builtin_ones() -> None:
    assert issubclass(RangeError, ValueError) and issubclass(DtypeError, TypeError)
    assert issubclass(ArgumentError, flash4_torch.errors.Flash4Error)
