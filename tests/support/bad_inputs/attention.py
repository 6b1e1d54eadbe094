"""`attention`, and `support`, which takes the same calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

import flash4_torch
import garbage
from bad_inputs import Case
from flash4_torch.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    KeywordError,
    LayoutError,
    RangeError,
    ShapeError,
)

X = torch.randn(2, 4, 2, 8)
MASK = torch.rand(2, 2, 4, 4)


class Row(NamedTuple):
    """A fault in an otherwise good call, and the error that it must raise."""

    changed: dict[str, Any]
    error: type[Exception]
    words: str


def of_tensors() -> Iterator[Row]:
    for name in ("q", "k", "v"):
        for called, x in garbage.other_layouts(X).items():
            yield Row({name: x}, LayoutError, f"{name} is {called}, but it must be a dense one")
        for x in garbage.nested(X).values():
            yield Row({name: x}, LayoutError, f"{name} is a nested tensor, but it must be a dense one")
        for called, value in {**garbage.NO_TENSORS, "NoneType": None}.items():
            yield Row({name: value}, ArgumentError, f"{name} is {called}, but it must be a tensor")
        for rank in (0, 1, 2, 3, 5):
            x = X[None] if rank == 5 else X[(0,) * (4 - rank)]
            yield Row({name: x}, ShapeError, f"{name} is {tuple(x.shape)}, but it must be (B, S, H, D)")
    for x in garbage.other_dtypes(X):
        limit = "but it must be bfloat16, float16, float32 or float64"
        yield Row({"q": x, "k": x, "v": x}, DtypeError, f"q is {x.dtype}, {limit}")
        yield Row({"k": x}, DtypeError, f"k is {x.dtype}, {limit}")
    for name in ("k", "v"):
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            words = f"{name} is {dtype}, but it must have q's dtype, torch.float32"
            yield Row({name: X.to(dtype)}, DtypeError, words)
        words = f"{name} is meta, but it must be on q's device, cpu"
        yield Row({name: X.to("meta")}, DeviceError, words)
    yield Row({"q": X.to("meta")}, DeviceError, "k is cpu, but it must be on q's device, meta")
    yield Row({"v": X[..., :0]}, ShapeError, "head dimensions must be at least 1")
    yield Row({"k": X[:, :, :0], "v": X[:, :, :0]}, ShapeError, "must be a positive multiple of k's 0")
    far = torch.empty(1, 2**31, 2, 8, device="meta")
    yield Row({"k": far, "v": far, "q": X[:1]}, DeviceError, "k is meta")


def of_heads_first() -> Iterator[Row]:
    """(B, H, S, D), as torch's own function has it."""
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    hint = "; if yours are (B, H, S, D), transpose(1, 2) makes (B, S, H, D) of them"
    words = f"q is (2, 4, 5, 8), but its 5 heads must be a positive multiple of k's 7{hint}"
    yield Row({"q": q, "k": k, "v": k}, ShapeError, words)
    same = torch.randn(2, 4, 6, 8)
    words = f"attn_mask is (6, 6), but it must broadcast to (B, Hq, Sq, Sk) = (2, 6, 4, 4){hint}"
    yield Row({"q": same, "k": same, "v": same, "attn_mask": torch.ones(6, 6)}, ShapeError, words)


def of_masks() -> Iterator[Row]:
    for mask in (MASK, MASK > 0.5):
        for called, x in garbage.other_layouts(mask).items():
            yield Row({"attn_mask": x}, LayoutError, f"attn_mask is {called}, but it must be a dense one")
        for x in garbage.nested(mask).values():
            yield Row({"attn_mask": x}, LayoutError, "attn_mask is a nested tensor, but it must be a dense")
    for called, value in garbage.NO_TENSORS.items():
        yield Row(
            {"attn_mask": value}, ArgumentError, f"attn_mask is {called}, but it must be a tensor or None"
        )
    for x in garbage.other_dtypes(MASK):
        if x.dtype != torch.bool:
            words = f"attn_mask is {x.dtype}, but it must be bool (True attends) or floating (added)"
            yield Row({"attn_mask": x}, DtypeError, words)
    yield Row({"attn_mask": MASK.to("meta")}, DeviceError, "attn_mask is meta, but it must be on q's device")
    for shape in ((0,), (3,), (4, 3), (3, 4), (3, 4, 4), (3, 2, 4, 4), (2, 4, 2, 8), (2, 2, 4, 0), (1,) * 5):
        words = f"attn_mask is {shape}, but it must broadcast to (B, Hq, Sq, Sk) = (2, 2, 4, 4)"
        yield Row({"attn_mask": torch.ones(shape)}, ShapeError, words)


def of_rules() -> Iterator[Row]:
    """scale, softcap, dropout_p, window, causal, deterministic and return_lse."""
    for name in ("scale", "softcap", "dropout_p"):
        nothing = [] if name == "scale" else [None]
        for value in [*garbage.NO_NUMBERS, *nothing]:
            yield Row({name: value}, ArgumentError, "but it must be a number")
    for value in garbage.NO_FLOAT32:
        is_long = isinstance(value, int) and value.bit_length() > 128
        shown = f"an int of {value.bit_length()} bits" if is_long else value
        yield Row({"scale": value}, RangeError, f"scale is {shown}, but it must be finite in float32")
        yield Row({"softcap": value}, RangeError, f"softcap is {shown}, but it must be finite in float32")
        words = f"dropout_p is {shown}, but it must be finite, from 0.0 to 1.0"
        yield Row({"dropout_p": value}, RangeError, words)
    for value in (-1, -1.0, -1e-45, -5e-324):
        words = f"softcap is {value}, but it must be finite in float32, and at least 0.0"
        yield Row({"softcap": value}, RangeError, words)
        words = f"dropout_p is {value}, but it must be finite, from 0.0 to 1.0"
        yield Row({"dropout_p": value}, RangeError, words)
    for value in (5e-324, 1e-50, 1e-45, 1e-38):
        words = f"softcap is {value}, but it must be 0, for none, or at least 1.18e-38"
        yield Row({"softcap": value}, RangeError, words)
    for value in (1.0000001, 2, 100):
        words = f"dropout_p is {value}, but it must be finite, from 0.0 to 1.0"
        yield Row({"dropout_p": value}, RangeError, words)
    yield from of_windows()
    yield from of_functions()
    for name in ("causal", "deterministic", "return_lse"):
        for value in [*garbage.NO_FLAGS, *([] if name == "deterministic" else [None])]:
            yield Row({name: value}, ArgumentError, "but it must be True or False")


def of_functions() -> Iterator[Row]:
    """score_mod, mask_mod and block_mask."""
    for value in (3, 0.5, "alibi", torch.ones(4, 4), [min]):
        kind = type(value).__name__
        for name in ("score_mod", "mask_mod"):
            yield Row({name: value}, ArgumentError, f"{name} is {kind}, but it must be a function")
    for value in (3, torch.ones(4, 4), min):
        words = (
            f"block_mask is {type(value).__name__}, but it must be a BlockMask, as create_block_mask makes it"
        )
        yield Row({"block_mask": value}, ArgumentError, words)


def of_windows() -> Iterator[Row]:
    for value in garbage.NO_PAIRS:
        yield Row({"window": value}, ArgumentError, "but it must be a pair (left, right) of sizes or None")
    wrong: list[tuple[type[Exception], str, list[Any]]] = [
        (ArgumentError, "but it must be an int or None", garbage.NO_SIZES),
        (RangeError, "but it must be below 2**63; None is unbounded", garbage.HUGE_SIZES),
        (RangeError, "but it must be above -2**63; None is unbounded", [-x for x in garbage.HUGE_SIZES]),
    ]
    for error, words, values in wrong:
        for value in values:
            yield Row({"window": (value, None)}, error, words)
            yield Row({"window": (None, value)}, error, words)
    none = "None is no bound, which flash-attn 2 and 3 write as -1"
    words = f"but left + right (0 if causal) must be at least 0, or no row sees a key; {none}"
    for window in ((-1, -1), (-1, 0), (0, -1), (3, -4), (-(2**62), 2**62 - 1)):
        yield Row({"window": window}, RangeError, f"window is {window}, {words}")
    for window in ((-1, None), (-7, 5)):
        yield Row({"window": window, "causal": True}, RangeError, f"window is {window}, {words}")
    for window in ((None, -1), (-1, -1), (128, -1)):
        words = f"window's right is -1, but causal=True is a right bound of 0; {none}"
        yield Row({"window": window, "causal": True}, RangeError, words)


KEYWORDS = {
    "softmax_scale": "it is called 'scale' here",
    "sm_scale": "it is called 'scale' here",
    "scaling": "it is called 'scale' here",
    "is_causal": "it is called 'causal' here",
    "window_size": "it is called 'window' here, where -1 is a bound and None is no bound",
    "sliding_window": "it is called 'window' here",
    "soft_cap": "it is called 'softcap' here",
    "dropout": "it is called 'dropout_p' here",
    "dropout_rate": "it is called 'dropout_p' here",
    "return_softmax_lse": "it is called 'return_lse' here",
    "return_attn_probs": "weights are not stored; return_lse=True gives the log-sum-exp of each row's scores",
    "alibi_slopes": "give what it adds to the scores as attn_mask",
    "enable_gqa": "query heads may always be a multiple of KV heads",
    "causul": "did you mean 'causal'?",
    "retrun_lse": "did you mean 'return_lse'?",
    "xyz": "it takes q, k, v, ",
}
MASKS = {name: "it is called 'attn_mask' here" for name in ("mask", "attention_mask", "attn_bias", "bias")}


def of_keywords(name: str, keywords: dict[str, str]) -> Iterator[Row]:
    for keyword, hint in keywords.items():
        yield Row({keyword: None}, KeywordError, f"{name} has no argument {keyword!r}; {hint}")


def cases(function: Callable[..., object], good: dict[str, Any], rows: Iterator[Row]) -> Iterator[Case]:
    """The rows as calls of `function`, numbered."""
    for number, row in enumerate(rows):
        name = f"{function.__name__} {number} {' '.join(row.changed)}"
        yield Case(name, partial(function, **{**good, **row.changed}), row.error, row.words)


def rows(name: str) -> Iterator[Row]:
    yield from of_tensors()
    yield from of_heads_first()
    yield from of_masks()
    yield from of_rules()
    yield from of_keywords(name, {**KEYWORDS, **MASKS})


GOOD = {"q": X, "k": X, "v": X}
CASES = (
    *cases(flash4_torch.attention, GOOD, rows("attention")),
    *cases(flash4_torch.support, GOOD, rows("support")),
)
