"""Checks of the public functions' arguments; each failure names the argument, its value and the limit."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import ArgumentError, DeviceError, DtypeError, RangeError, ShapeError
from ..masks import Band

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INDEX_DTYPES = (torch.int32, torch.int64)
_DTYPES_SENTENCE = "it must be bfloat16, float16, float32 or float64"


def tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ArgumentError(name, type(x).__name__, "it must be a tensor")


def qkv(q: Tensor, k: Tensor, v: Tensor, rank: int, layout: str) -> None:
    """q, k and v have one dtype, one device and the layout '(B, S, H, D)' or '(T, H, D)'."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != rank:
            raise ShapeError(name, tuple(x.shape), f"it must be {layout}, {rank} dimensions")
        if x.dtype not in DTYPES:
            raise DtypeError(name, x.dtype, _DTYPES_SENTENCE)
        if x.dtype != q.dtype:
            raise DtypeError(name, x.dtype, f"it must have q's dtype, {q.dtype}")
        if x.device != q.device:
            raise DeviceError(name, x.device, f"it must be on q's device, {q.device}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ShapeError(
            "v", tuple(v.shape), f"all but its last dimension must be k's, {tuple(k.shape[:-1])}"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ShapeError("k", tuple(k.shape), f"its last dimension must be q's, {q.shape[-1]}")
    if q.shape[-1] < 1 or v.shape[-1] < 1:
        raise ShapeError("q, v", (tuple(q.shape), tuple(v.shape)), "head dimensions must be at least 1")
    Hq, Hk = q.shape[-2], k.shape[-2]
    if Hk < 1 or Hq < 1 or Hq % Hk:
        raise ShapeError("q", tuple(q.shape), f"its {Hq} heads must be a positive multiple of k's {Hk}")


def same_batch(q: Tensor, k: Tensor) -> None:
    if q.shape[0] != k.shape[0]:
        raise ShapeError("k", tuple(k.shape), f"its batch size must be q's, {q.shape[0]}")


def sdpa_lengths(key: Tensor, value: Tensor) -> None:
    """(..., S, E) and (..., S, Ev) have the same S."""
    tensors = isinstance(key, Tensor) and isinstance(value, Tensor) and not (key.is_nested or value.is_nested)
    if tensors and key.dim() > 1 and value.dim() > 1 and key.shape[-2] != value.shape[-2]:
        raise ShapeError("value", tuple(value.shape), f"its length must be key's, {key.shape[-2]}")


def band(causal: bool, window: tuple[int | None, int | None]) -> Band:
    """`causal` and `window` as one band."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ArgumentError("window", repr(window), "it must be a pair (left, right) of sizes or None")
    for side, size in zip(("left", "right"), window, strict=True):
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
            raise ArgumentError(f"window's {side}", repr(size), "it must be an int or None")
        if size < 0:
            raise RangeError(f"window's {side}", size, "it must be at least 0; None is unbounded")
    left, right = window
    return Band(left, 0 if causal else right)


def scale(value: float | None, D: int) -> float:
    """The given scale, or 1 / sqrt(D)."""
    if value is None:
        return 1.0 / math.sqrt(D)
    return _number("scale", value, -math.inf, math.inf)


def softcap(value: float) -> float:
    return _number("softcap", value, 0.0, math.inf)


def probability(value: float) -> float:
    return _number("dropout_p", value, 0.0, 1.0)


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, (bool, Tensor)) or not isinstance(value, (int, float)):
        raise ArgumentError(name, repr(value), "it must be a number")
    # Comparisons only: under torch.compile a number may be symbolic. NaN fails all of them.
    if not (-math.inf < value < math.inf and low <= value <= high):
        span = f"from {low} to {high}" if math.isfinite(high) else f"at least {low}"
        raise RangeError(
            name, value, "it must be finite" if low == -math.inf else f"it must be finite, {span}"
        )
    return float(value)


def attn_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as a 4-D view, still broadcastable to (B, Hq, Sq, Sk)."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise ArgumentError("attn_mask", type(mask).__name__, "it must be a tensor or None")
    if mask.dtype != torch.bool and mask.dtype not in DTYPES:
        raise DtypeError("attn_mask", mask.dtype, "it must be bool (True attends) or floating (added)")
    if mask.device != q.device:
        raise DeviceError("attn_mask", mask.device, f"it must be on q's device, {q.device}")
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(sizes) != 4 or any(n not in (1, m) for n, m in zip(sizes, full, strict=True)):
        raise ShapeError("attn_mask", tuple(mask.shape), f"it must broadcast to (B, Hq, Sq, Sk) = {full}")
    return mask[(None,) * (4 - mask.dim())]


def cu_seqlens(name: str, lengths: Tensor, q: Tensor) -> None:
    """What can be said of cumulative lengths without reading them; `cu_seqlens_values` reads them."""
    if not isinstance(lengths, Tensor):
        raise ArgumentError(name, type(lengths).__name__, "it must be a tensor")
    if lengths.dim() != 1 or lengths.shape[0] < 1:
        raise ShapeError(name, tuple(lengths.shape), "it must be (B + 1,)")
    if lengths.dtype not in _INDEX_DTYPES:
        raise DtypeError(name, lengths.dtype, "it must be int32 or int64")
    if lengths.device != q.device:
        raise DeviceError(name, lengths.device, f"it must be on q's device, {q.device}")


def same_sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        shapes = (tuple(cu_seqlens_q.shape), tuple(cu_seqlens_k.shape))
        raise ShapeError("cu_seqlens_q, cu_seqlens_k", shapes, "they must describe equally many sequences")


def max_seqlen(name: str, value: int | Tensor) -> int:
    """An int, from an int or a 0-dim tensor."""
    if isinstance(value, Tensor) and value.dim() == 0 and not value.is_floating_point():
        known_later = torch.compiler.is_compiling()
        value = cast(int, value.item())
        if known_later:
            torch._check(value >= 0)
            return value
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise ArgumentError(name, repr(value), "it must be an int or a 0-dim tensor")
    if value < 0:
        raise RangeError(name, value, "it must be at least 0")
    return value


def cu_seqlens_values(name: str, lengths: Tensor, total: int, longest: int) -> None:
    """Cumulative lengths rise from 0 to `total` in steps of at most `longest`.

    Only read on the CPU: on a GPU that would wait for it.
    """
    if lengths.device.type != "cpu":
        return
    values = lengths.tolist()
    if values[0] != 0 or values[-1] != total:
        raise RangeError(name, values, f"it must begin with 0 and end with the packed length, {total}")
    steps = [b - a for a, b in pairwise(values)]
    if any(step < 0 for step in steps):
        raise RangeError(name, values, "it must not decrease: a sequence cannot have a negative length")
    if max(steps, default=0) > longest:
        argument = name.replace("cu_seqlens", "max_seqlen")
        raise RangeError(argument, longest, f"the longest sequence has {max(steps)}")
