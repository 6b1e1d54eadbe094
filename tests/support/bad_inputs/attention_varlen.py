"""`attention_varlen`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

import flash4_torch
import garbage
from bad_inputs.attention import KEYWORDS, Row, cases, of_keywords, of_rules
from flash4_torch.errors import ArgumentError, DeviceError, DtypeError, LayoutError, RangeError, ShapeError

P = torch.randn(8, 2, 8)
CU = torch.tensor([0, 3, 8], dtype=torch.int32)
GOOD = {
    "q": P,
    "k": P,
    "v": P,
    "cu_seqlens_q": CU,
    "cu_seqlens_k": CU,
    "max_seqlen_q": 5,
    "max_seqlen_k": 5,
}


def of_tensors() -> Iterator[Row]:
    for name in ("q", "k", "v"):
        for called, x in garbage.other_layouts(P).items():
            yield Row({name: x}, LayoutError, f"{name} is {called}, but it must be a dense one")
        for x in garbage.nested(P).values():
            yield Row({name: x}, LayoutError, f"{name} is a nested tensor, but it must be a dense one")
        for called, value in {**garbage.NO_TENSORS, "NoneType": None}.items():
            yield Row({name: value}, ArgumentError, f"{name} is {called}, but it must be a tensor")
        for x in (P[None], P[0], P[0, 0], P[0, 0, 0]):
            yield Row({name: x}, ShapeError, f"{name} is {tuple(x.shape)}, but it must be (T, H, D)")
    for x in garbage.other_dtypes(P):
        yield Row({"k": x}, DtypeError, f"k is {x.dtype}, but it must be bfloat16, float16, float32")
    hint = "; if yours are (H, T, D), transpose(0, 1) makes (T, H, D) of them"
    q, k = torch.randn(4, 5, 8), torch.randn(2, 7, 8)
    words = f"q is (4, 5, 8), but its 5 heads must be a positive multiple of k's 7{hint}"
    yield Row({"q": q, "k": k, "v": k}, ShapeError, words)


def of_lengths() -> Iterator[Row]:
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        for called, value in {**garbage.NO_TENSORS, "NoneType": None}.items():
            yield Row({name: value}, ArgumentError, f"{name} is {called}, but it must be a tensor")
        words = f"{name} is a tensor of layout torch.sparse_coo, but it must be a dense one"
        yield Row({name: CU.to_sparse()}, LayoutError, words)
        for x in garbage.nested(CU[None]).values():
            yield Row({name: x}, LayoutError, f"{name} is a nested tensor, but it must be a dense one")
        for x in garbage.other_dtypes(CU.float()):
            if x.dtype not in (torch.int32, torch.int64):
                yield Row({name: x}, DtypeError, f"{name} is {x.dtype}, but it must be int32 or int64")
        yield Row({name: CU[None]}, ShapeError, f"{name} is (1, 3), but it must be (B + 1,)")
        yield Row({name: CU[0]}, ShapeError, f"{name} is (), but it must be (B + 1,)")
        yield Row({name: CU.to("meta")}, DeviceError, f"{name} is meta, but it must be on q's device, cpu")
        for values in ([0, 3, 7], [0, 3, 9], [1, 3, 8], [-1, 3, 8], [0, 3, 2**40]):
            words = "but it must begin with 0 and end with the packed length, 8"
            yield Row({name: torch.tensor(values)}, RangeError, words)
        for values in ([0, 9, 8], [0, -1, 8], [0, 2**62, 8]):
            yield Row({name: torch.tensor(values)}, RangeError, "but it must not decrease")


def of_longest() -> Iterator[Row]:
    for name in ("max_seqlen_q", "max_seqlen_k"):
        for value in ("5", 5.0, math.nan, True, 1j, [5], (5,), torch.tensor([5]), torch.tensor(5.0)):
            yield Row({name: value}, ArgumentError, "but it must be an int, a 0-dim tensor or None")
        for value in (torch.tensor(True), torch.tensor(5j)):
            yield Row({name: value}, ArgumentError, "but it must be an int, a 0-dim tensor or None")
        for value in garbage.HUGE_SIZES:
            yield Row({name: value}, RangeError, "but it must be below 2**63")
        for value in (-1, -(2**70), -(10**5000), torch.tensor(-1)):
            yield Row({name: value}, RangeError, "but it must be at least 0")
        yield Row({name: 4}, RangeError, f"{name} is 4, but the longest sequence has 5")
        words = f"{name} is meta, but it must be on a device, for its value is read"
        yield Row({name: torch.tensor(5, device="meta")}, DeviceError, words)


def rows() -> Iterator[Row]:
    yield from of_tensors()
    yield from of_lengths()
    yield from of_longest()
    yield from of_rules()
    lengths = {"cu_seq_lens_q": "it is called 'cu_seqlens_q'", "max_length_k": "it is called 'max_seqlen_k'"}
    yield from of_keywords("attention_varlen", {**KEYWORDS, **lengths})


CASES = tuple(cases(flash4_torch.attention_varlen, GOOD, rows()))
