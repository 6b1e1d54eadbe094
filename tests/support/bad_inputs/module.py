"""`MultiheadAttention`, its constructor, forward and `from_torch`, and `replace_attention`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bad_inputs import Case
from flash4_torch.errors import ArgumentError, ScriptError
from flash4_torch.nn import MultiheadAttention, replace_attention

X = torch.randn(2, 5, 8)
MANY = torch.tensor([True, False])
NO_TENSORS: dict[str, Any] = {
    "int": 3,
    "float": 2.5,
    "bool": True,
    "str": "x",
    "list": [[1.0]],
    "tuple": (X,),
    "dict": {"x": X},
    "ndarray": np.ones((2, 5, 8)),
    "Linear": nn.Linear(1, 1),
    "type": int,
    "object": object(),
}
"""Objects by the name of their type, which the message gives."""
NO_FLAGS: list[Any] = [
    "no",
    "",
    b"",
    None,
    2,
    -1,
    0.5,
    math.nan,
    1j,
    [],
    [True],
    (),
    {},
    MANY,
    np.array([1, 0]),
]
NO_SIZES: list[Any] = [
    "8",
    8.0,
    math.nan,
    [8],
    (8,),
    {},
    8j,
    torch.randn(2),
    torch.tensor([8, 8]),
    np.ones(2),
]
NO_NUMBERS: list[Any] = ["0.1", None, [0.1], 0.1j, math.nan, torch.tensor(0.1), np.array([0.1]), object()]


def of_constructor() -> Iterator[tuple[dict[str, Any], type[BaseException], str]]:
    for name in ("embed_dim", "num_heads", "kdim", "vdim"):
        may_be_none = name in ("kdim", "vdim")
        for value in NO_SIZES if may_be_none else [*NO_SIZES, None]:
            yield (
                {name: value},
                ArgumentError,
                "it must be an int or None" if may_be_none else "it must be an int",
            )
    for name in ("embed_dim", "num_heads"):
        for size in (0, -4):
            yield {name: size}, ValueError, f"got embed_dim={size if name == 'embed_dim' else 8}"
    yield {"num_heads": 3}, AssertionError, "embed_dim must be divisible by num_heads"
    for name in ("kdim", "vdim"):
        yield {name: -1}, RuntimeError, "negative dimension -1"
    for value in NO_NUMBERS:
        yield {"dropout": value}, ArgumentError, "it must be a number from 0 to 1"
    for name in ("bias", "add_bias_kv", "add_zero_attn", "batch_first"):
        for value in NO_FLAGS:
            yield {name: value}, ArgumentError, "it must be True or False"
    yield {"device": "nowhere"}, RuntimeError, "device"
    yield {"device": 2.5}, TypeError, "device"
    yield {"dtype": "float32"}, TypeError, "dtype"
    yield {"dtype": torch.int64}, RuntimeError, "floating point"


class Own(nn.MultiheadAttention):
    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options)


def patched() -> nn.Module:
    module = nn.MultiheadAttention(8, 2)
    module.forward = module.forward
    return module


def of_from_torch() -> Iterator[tuple[Any, type[BaseException], str]]:
    for kind, value in {**NO_TENSORS, "NoneType": None, "Sequential": nn.Sequential(), "Tensor": X}.items():
        yield value, TypeError, f"module is {kind}, but it must be an nn.MultiheadAttention"
    yield nn.MultiheadAttention, TypeError, "module is type, but"
    yield Own(8, 2), TypeError, "that does not override forward"
    yield patched(), TypeError, "that does not override forward"


def of_replace() -> Iterator[tuple[tuple[Any, ...], type[BaseException], str]]:
    wrong = {**NO_TENSORS, "NoneType": None, "Tensor": X}
    del wrong["Linear"]
    for kind, value in wrong.items():
        yield (value,), ArgumentError, f"model is {kind}, but it must be a torch.nn.Module"
    yield (nn.Transformer,), ArgumentError, "model is type"
    yield ([nn.MultiheadAttention(8, 2)],), ArgumentError, "model is list"
    yield (nn.MultiheadAttention(8, 2).parameters(),), ArgumentError, "model is generator"
    for kind, value in wrong.items():
        if kind not in ("NoneType", "type"):
            yield (model(), value), ArgumentError, f"predicate is {kind}, but it must be a function"
    for function in (lambda: True, lambda name: True, lambda a, b, c: True):
        yield (model(), function), ArgumentError, "predicate is a function of"
    for answer in ("no", "", b"x", MANY, torch.tensor(True), np.array([1, 0])):
        yield (model(), lambda *_, answer=answer: answer), ArgumentError, "predicate('0', ...) is"


def model() -> nn.Module:
    return nn.Sequential(nn.MultiheadAttention(8, 2))


def other_layouts() -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "sparse_coo": X.to_sparse(),
            "sparse_csr": X.to_sparse_csr(),
            "_mkldnn": X.to_mkldnn(),
        }


def of_forward() -> Iterator[tuple[dict[str, Any], type[BaseException], str]]:
    for name in ("query", "key", "value"):
        for kind, value in {**NO_TENSORS, "NoneType": None}.items():
            yield {name: value}, ArgumentError, f"{name} is {kind}, but it must be a tensor"
    for name in ("key_padding_mask", "attn_mask"):
        for kind, value in NO_TENSORS.items():
            yield {name: value}, ArgumentError, f"{name} is {kind}, but it must be a tensor or None"
        yield {name: X.long()[0]}, AssertionError, "only bool and floating types of"
        yield {name: X.cfloat()[0]}, AssertionError, "only bool and floating types of"
    for name in ("need_weights", "average_attn_weights", "is_causal"):
        for value in NO_FLAGS:
            yield {name: value}, ArgumentError, "it must be True or False"
    # Sizes, and the other errors of torch's own module.
    yield {"query": X[..., :6]}, AssertionError, "was expecting embedding dimension of 8, but got 6"
    yield {"query": X[0, 0]}, AssertionError, "query should be unbatched 2D or batched 3D tensor"
    yield {"query": X[None]}, AssertionError, "query should be unbatched 2D or batched 3D tensor"
    yield {"query": X[0]}, AssertionError, "For unbatched (2-D) `query`"
    yield {"key": X[0]}, AssertionError, "For batched (3-D) `query`"
    yield {"value": X[:, :3]}, AssertionError, "does not match value"
    yield {"key_padding_mask": X[0, 0, :5]}, AssertionError, "expected `key_padding_mask` to be"
    yield (
        {"key_padding_mask": torch.zeros(3, 5)},
        AssertionError,
        "shape[0] to be 2, but got 3",
    )
    yield {"attn_mask": torch.zeros(5)}, AssertionError, "expected `attn_mask` to be"
    yield {"attn_mask": torch.zeros(3, 5)}, RuntimeError, "The shape of the 2D attn_mask is"
    yield {"attn_mask": torch.zeros(1, 5, 5)}, RuntimeError, "The shape of the 3D attn_mask is"
    yield {"is_causal": True}, RuntimeError, "Need attn_mask if specifying the is_causal hint"
    for mask in ("key_padding_mask", "attn_mask"):
        shape = (2, 5) if mask == "key_padding_mask" else (5, 5)
        yield {mask: torch.zeros(shape, device="meta")}, ArgumentError, "their sizes and devices must fit"
    for mask in ("key_padding_mask", "attn_mask"):
        shape = (2, 5) if mask == "key_padding_mask" else (5, 5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for sparse in (torch.ones(shape).to_sparse(), torch.ones(shape).to_sparse_csr()):
                yield {mask: sparse}, ArgumentError, f"{mask} is a tensor of layout torch.sparse"
    for layout, x in other_layouts().items():
        for names in (("query", "key", "value"), ("query",), ("key",), ("value",)):
            words = f"{names[0]} is a tensor of layout torch.{layout}, but it must be dense or nested"
            yield dict.fromkeys(names, x), ArgumentError, words
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
    for name in ("query", "key", "value"):
        yield {name: quantized}, RuntimeError, "must have the same dtype, but got QInt8 and Float"


def cases() -> Iterator[Case]:
    def numbered(door: str, call: Callable[[], object], error: type[BaseException], words: str) -> Case:
        count[door] = count.get(door, 0) + 1
        return Case(f"{door} {count[door]}", call, error, words)

    count: dict[str, int] = {}
    for changed, error, words in of_constructor():
        arguments = {"embed_dim": 8, "num_heads": 2} | changed
        yield numbered("constructor", lambda a=arguments: MultiheadAttention(**a), error, words)
    for value, error, words in of_from_torch():
        yield numbered("from_torch", lambda v=value: MultiheadAttention.from_torch(v), error, words)
    for given, error, words in of_replace():
        yield numbered("replace_attention", lambda g=given: replace_attention(*g), error, words)
    module = MultiheadAttention(8, 2, batch_first=True)
    for changed, error, words in of_forward():
        call = {"query": X, "key": X, "value": X} | changed
        yield numbered("forward", lambda c=call: module(**c), error, words)
    yield Case("jit.script", lambda: torch.jit.script(module), ScriptError, "torch.export")
    yield Case(
        "fx", lambda: torch.fx.symbolic_trace(module), ArgumentError, "only a model that holds this module"
    )


CASES = tuple(cases())
