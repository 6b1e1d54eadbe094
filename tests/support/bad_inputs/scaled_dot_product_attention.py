"""`scaled_dot_product_attention`: torch's errors where those name the argument, ours where they do not."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

import flash4_torch
import garbage
from bad_inputs.attention import Row, cases, of_keywords
from flash4_torch.errors import DeviceError, LayoutError, RangeError, ShapeError

X = torch.randn(2, 3, 4, 8)
MASK = torch.rand(2, 3, 4, 4)
GOOD = {"query": X, "key": X, "value": X}


def of_tensors() -> Iterator[Row]:
    for name in GOOD:
        for called, x in garbage.other_layouts(X).items():
            # A matrix of another length is reported first.
            if "sparse_coo" in called or "mkldnn" in called or name == "query":
                yield Row({name: x}, LayoutError, f"{name} is {called}, but it must be a dense one")
        for value in [*garbage.NO_TENSORS.values(), None]:
            yield Row({name: value}, TypeError, f"argument '{name}'")
    for value in garbage.NO_TENSORS.values():
        yield Row({"attn_mask": value}, TypeError, "argument 'attn_mask'")
    for mask in (MASK, MASK > 0.5):
        for called, x in garbage.other_layouts(mask).items():
            yield Row({"attn_mask": x}, LayoutError, f"attn_mask is {called}, but it must be a dense one")
    words = "attn_mask is meta, but it must be on query's device, cpu"
    yield Row({"attn_mask": MASK.to("meta")}, DeviceError, words)
    yield Row({"attn_mask": MASK.to("meta"), "query": "x"}, TypeError, "argument 'query'")
    yield Row({"value": X[:, :, :2]}, ShapeError, "value is (2, 3, 2, 8), but its length must be key's, 4")
    for name in GOOD:
        yield Row({name: X.double()}, RuntimeError, "to have the same dtype")
        yield Row({name: X.to("meta")}, RuntimeError, "to have the same device type")


def of_rules() -> Iterator[Row]:
    for value in garbage.NO_FLOAT32:
        yield Row({"scale": value}, RangeError, "but it must be finite in float32")
    for value in (
        "1",
        b"1",
        1j,
        [1.0],
        (1.0,),
        {},
        torch.tensor([1.0]),
        torch.tensor(1.0, requires_grad=True),
    ):
        yield Row({"scale": value}, TypeError, "argument 'scale'")
        yield Row({"dropout_p": value}, TypeError, "argument 'dropout_p'")
    yield Row({"dropout_p": None}, TypeError, "argument 'dropout_p'")
    for value in (math.nan, math.inf, -math.inf, -1, -0.1, -(10**400), 10**400, 10**5000):
        yield Row({"dropout_p": value}, RangeError, "but it must be finite, from 0.0 to 1.0")
    for value in (1.5, 2):
        yield Row({"dropout_p": value}, RuntimeError, "dropout probability has to be between 0 and 1")
    for name in ("is_causal", "enable_gqa"):
        for value in [*garbage.NO_FLAGS, None]:
            yield Row({name: value}, TypeError, f"argument '{name}'")


KEYWORDS = {
    "causal": "it is called 'is_causal' here",
    "softmax_scale": "it is called 'scale' here",
    "dropout": "it is called 'dropout_p' here",
    "mask": "it is called 'attn_mask' here",
    "attention_mask": "it is called 'attn_mask' here",
    "is_casual": "did you mean 'is_causal'?",
    "return_lse": "it takes query, key, value, ",
    "window_size": "it takes query, key, value, ",
}


def rows() -> Iterator[Row]:
    yield from of_tensors()
    yield from of_rules()
    yield from of_keywords("scaled_dot_product_attention", KEYWORDS)


CASES = tuple(cases(flash4_torch.scaled_dot_product_attention, GOOD, rows()))
