"""`append_kvcache`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import flash4_torch
import garbage
from bad_inputs.attention import Row, cases, of_keywords
from flash4_torch.errors import ArgumentError, DeviceError, DtypeError, LayoutError, RangeError, ShapeError

T, HK, D, DV, PAGES, SIZE = 5, 2, 8, 6, 3, 4
K, V, Q = torch.randn(T, HK, D), torch.randn(T, HK, DV), torch.randn(T, 4, D)
K_CACHE, V_CACHE = torch.zeros(PAGES, SIZE, HK, D), torch.zeros(PAGES, SIZE, HK, DV)
SLOTS, ANGLES = torch.arange(T), torch.rand(9, 3)
LENGTHS, ENDS = torch.tensor([0, 1]).int(), torch.tensor([0, 2, 5]).int()
TABLE = torch.tensor([[0], [1]]).int()
SLOTTED: dict[str, Any] = {"k": K, "v": V, "k_cache": K_CACHE, "v_cache": V_CACHE, "slot_mapping": SLOTS}
PAGED = {**SLOTTED, "slot_mapping": None, "seqused_k": LENGTHS, "cu_seqlens": ENDS, "block_table": TABLE}
BATCH = {"k": K[:4].view(2, 2, HK, D), "v": V[:4].view(2, 2, HK, DV), "cu_seqlens": None}
ROTARY = {"cos": ANGLES, "sin": ANGLES, "positions": SLOTS, "q": Q}
FLOAT8 = {"k_cache": K_CACHE.to(torch.float8_e4m3fn), "v_cache": V_CACHE.to(torch.float8_e4m3fn)}


def of_rows() -> Iterator[Row]:
    for name in ("k", "v", "k_cache", "v_cache"):
        for called, value in {**garbage.NO_TENSORS, "NoneType": None}.items():
            yield Row({name: value}, ArgumentError, f"{name} is {called}, but it must be a tensor")
        for called, x in garbage.other_layouts(SLOTTED[name]).items():
            yield Row({name: x}, LayoutError, f"{name} is {called}, but it must be a dense one")
        for x in garbage.nested(SLOTTED[name]).values():
            yield Row({name: x}, LayoutError, f"{name} is a nested tensor, but it must be a dense one")
    for x in garbage.other_dtypes(K):
        yield Row(
            {"k": x}, DtypeError, f"k is {x.dtype}, but it must be bfloat16, float16, float32 or float64"
        )
    for name in ("v", "k_cache", "v_cache"):
        words = f"{name} is meta, but it must be on k's device, cpu"
        yield Row({name: SLOTTED[name].to("meta")}, DeviceError, words)
        words = f"{name} is torch.bfloat16, but it must have k's dtype, torch.float32"
        yield Row({name: SLOTTED[name].bfloat16()}, DtypeError, words)
    yield Row({"v_cache": FLOAT8["v_cache"]}, DtypeError, "it must have k_cache's dtype, torch.float32")
    yield Row({"k": K[0]}, ShapeError, "k is (2, 8), but it must be (T, Hk, D), or (B, S, Hk, D)")
    yield Row({"v": V[:4]}, ShapeError, "all but its last dimension must be k's, (5, 2)")
    yield Row({"k": K[..., :0]}, ShapeError, "the heads and their dimensions must be at least 1")
    words = "k_cache is (3, 4, 1, 8), but it must have four dimensions, and the last two must be k's, (2, 8)"
    yield Row({"k_cache": K_CACHE[:, :, :1]}, ShapeError, words)
    yield Row({"v_cache": V_CACHE[0]}, ShapeError, "and the last two must be v's, (2, 6)")
    words = "v_cache is (2, 4, 2, 6), but its first two dimensions must be k_cache's, (3, 4)"
    yield Row({"v_cache": V_CACHE[:2]}, ShapeError, words)


def of_slots() -> Iterator[Row]:
    words = "slot_mapping, seqused_k is neither given, but one of them must say where the tokens go"
    yield Row({"slot_mapping": None}, ArgumentError, words)
    yield Row({"seqused_k": LENGTHS}, ArgumentError, "slot_mapping, seqused_k is both given")
    for name, x in (("block_table", TABLE), ("cu_seqlens", ENDS)):
        yield Row({name: x}, ArgumentError, f"{name} is given, but with slot_mapping there is nothing")
    for called, value in garbage.NO_TENSORS.items():
        yield Row(
            {"slot_mapping": value}, ArgumentError, f"slot_mapping is {called}, but it must be a tensor"
        )
    words = "slot_mapping is torch.float32, but it must be int32 or int64"
    yield Row({"slot_mapping": SLOTS.float()}, DtypeError, words)
    yield Row({"slot_mapping": SLOTS[:4]}, ShapeError, "slot_mapping is (4,), but it must be (T,) = (5,)")
    yield Row({"slot_mapping": SLOTS.to("meta")}, DeviceError, "it must be on k's device, cpu")
    words = "slot_mapping is 12, but the cache has 12 slots; negative ones skip"
    yield Row({"slot_mapping": torch.tensor([0, 12, -1, 3, 4])}, RangeError, words)


def of_rotary() -> Iterator[Row]:
    yield Row({"cos": ANGLES}, ArgumentError, "sin is None, but a rotation needs it beside cos")
    yield Row({"sin": ANGLES}, ArgumentError, "cos is None, but a rotation needs it beside sin")
    for name, x in (("q", Q), ("positions", SLOTS)):
        yield Row({name: x}, ArgumentError, f"{name} is given, but without cos and sin nothing is rotated")
    words = "q_out is given, but without q there is nothing to put there"
    yield Row({"q_out": Q}, ArgumentError, words)
    words = "positions is None, but slot_mapping does not tell the positions of tokens"
    yield Row({**ROTARY, "positions": None}, ArgumentError, words)
    words = "cos is torch.float64, but it must be float32"
    yield Row({**ROTARY, "cos": ANGLES.double()}, DtypeError, words)
    yield Row({**ROTARY, "cos": ANGLES[0]}, ShapeError, "cos is (3,), but it must be (positions, R / 2)")
    for width in (0, 5):
        wide = torch.rand(9, width)
        words = f"cos is (9, {width}), but it must be (positions, R / 2), with R from 2 to D = 8"
        yield Row({**ROTARY, "cos": wide, "sin": wide}, ShapeError, words)
    yield Row({**ROTARY, "sin": ANGLES[:8]}, ShapeError, "sin is (8, 3), but it must be cos's = (9, 3)")
    yield Row({**ROTARY, "q": Q[:4]}, ShapeError, "q is (4, 4, 8), but it must have k's tokens, (5,)")
    yield Row({**ROTARY, "q": Q.half()}, DtypeError, "q is torch.float16, but it must have k's dtype")
    words = "q_out is (5, 2, 8), but it must be q's shape = (5, 4, 8)"
    yield Row({**ROTARY, "q_out": Q[:, :2]}, ShapeError, words)
    yield Row({**ROTARY, "q_out": Q.half()}, DtypeError, "q_out is torch.float16, but it must have q's dtype")
    for value in garbage.NO_FLAGS:
        yield Row({**ROTARY, "interleaved": value}, ArgumentError, "but it must be True or False")
    for number in (-1, 9):
        words = f"positions is {number}, but cos and sin have rows 0 to 8"
        yield Row({**ROTARY, "positions": torch.tensor([0, number, 1, 2, 3])}, RangeError, words)


def of_scales() -> Iterator[Row]:
    words = "k_scale is given, but only a float8_e4m3fn cache has a scale, and this is torch.float32"
    yield Row({"k_scale": torch.tensor(1.0)}, ArgumentError, words)
    words = "v_scale is (2, 2), but it must be (), (Hk,): one of [(), (2,)]"
    yield Row({**FLOAT8, "v_scale": torch.ones(2, 2)}, ShapeError, words)
    words = "k_scale is torch.float16, but it must be float32"
    yield Row({**FLOAT8, "k_scale": torch.tensor(1.0).half()}, DtypeError, words)
    yield Row({**FLOAT8, "k_scale": 0.5}, ArgumentError, "k_scale is float, but it must be a tensor")


def of_sequences() -> Iterator[Row]:
    words = "cu_seqlens is None, but it must divide the tokens of k (T, Hk, D) among sequences"
    yield Row({"cu_seqlens": None}, ArgumentError, words)
    for name in ("cu_seqlens", "seqused_k", "block_table"):
        words = f"{name} is torch.int64, but it must be int32"
        yield Row({name: PAGED[name].long()}, DtypeError, words)
        yield Row(
            {name: PAGED[name].to("meta")}, DeviceError, f"{name} is meta, but it must be on k's device"
        )
        yield Row({name: [0, 1]}, ArgumentError, f"{name} is list, but it must be a tensor")
    yield Row({"cu_seqlens": ENDS[:0]}, ShapeError, "cu_seqlens is (0,), but it must be (B + 1,)")
    yield Row({"seqused_k": LENGTHS[:1]}, ShapeError, "seqused_k is (1,), but it must be (B,) = (2,)")
    words = "block_table is (1, 1), but it must be (B, blocks) with B = 2"
    yield Row({"block_table": TABLE[:1]}, ShapeError, words)
    words = (
        "k_cache is (3, 4, 2, 8), but without block_table it must have an entry for each of the 2 sequences"
    )
    yield Row({"block_table": None}, ShapeError, words)
    words = "cu_seqlens is given, but it divides packed tokens, and k is (B, S, Hk, D)"
    yield Row({**BATCH, "cu_seqlens": ENDS}, ArgumentError, words)
    words = "it must begin with 0, not decrease, and end with at most the packed length, 5"
    for ends in ([1, 2, 5], [0, 3, 2], [0, 2, 6]):
        yield Row({"cu_seqlens": torch.tensor(ends).int()}, RangeError, f"cu_seqlens is {ends}, but {words}")
    yield Row(
        {"seqused_k": torch.tensor([-1, 0]).int()}, RangeError, "seqused_k is -1, but it must be at least"
    )
    words = "seqused_k is 2, but with 3 more keys, sequence 1 would have 5, and it has room for 4"
    yield Row({"seqused_k": torch.tensor([0, 2]).int()}, RangeError, words)
    yield Row(
        {**BATCH, "seqused_k": torch.tensor([3, 0]).int()}, RangeError, "sequence 0 would have 5, and it"
    )
    for page in (-1, 3):
        words = f"block_table is {page}, but pages are 0 to 2"
        yield Row({"block_table": torch.tensor([[0], [page]]).int()}, RangeError, words)
    short = {"cos": ANGLES[:3], "sin": ANGLES[:3]}
    yield Row(short, RangeError, "positions is 3, but cos and sin have rows 0 to 2")


KEYWORDS = {
    "cache_seqlens": "it is called 'seqused_k' here",
    "page_table": "it is called 'block_table' here",
    "rotary_cos": "it is called 'cos' here",
    "k_descale": "it is called 'k_scale' here",
    "slot_maping": "did you mean 'slot_mapping'?",
    "xyz": "it takes k, v, k_cache, ",
}


def of_slotted() -> Iterator[Row]:
    for rows in (of_rows, of_slots, of_rotary, of_scales):
        yield from rows()
    yield from of_keywords("append_kvcache", KEYWORDS)


CASES = (
    *cases(flash4_torch.append_kvcache, SLOTTED, of_slotted()),
    *cases(flash4_torch.append_kvcache, PAGED, of_sequences()),
)
