"""Checks of the public functions' arguments; each error names the argument, its value and the limit."""

from __future__ import annotations

import math
import reprlib
import sys
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ArgumentError, DeviceError, DtypeError, LayoutError, RangeError, ShapeError
from ..masks import Band

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INDEX_DTYPES = (torch.int32, torch.int64)
_DTYPES_SENTENCE = "it must be bfloat16, float16, float32 or float64"
_FLOAT32 = torch.finfo(torch.float32)
"""The type of scores, and of the numbers that are applied to them."""
_LARGEST_INT = (1 << 63) - 1
"""The largest integer that the operators' schemas can carry."""
_NO_BOUND = "None is no bound, which flash-attn 2 and 3 write as -1"


def tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ArgumentError(name, type(x).__name__, "it must be a tensor")
        if not is_dense(x):
            raise not_dense(name, x, "; attention_varlen takes sequences of different lengths")


def is_dense(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_nested


def not_dense(name: str, x: Tensor, of_nested: str = "") -> LayoutError:
    if x.is_nested:
        return LayoutError(name, "a nested tensor", f"it must be a dense one{of_nested}")
    return LayoutError(name, f"a tensor of layout {x.layout}", "it must be a dense one, of torch.strided")


def qkv(q: Tensor, k: Tensor, v: Tensor, rank: int, layout: str) -> None:
    """Requires one dtype, one device and the layout '(B, S, H, D)' or '(T, H, D)' of q, k and v."""
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
        raise ShapeError(
            "q",
            tuple(q.shape),
            f"its {Hq} heads must be a positive multiple of k's {Hk}{_if_heads_first(q, k)}",
        )


def _if_heads_first(q: Tensor, k: Tensor) -> str:
    """A hint for the error if the head counts would fit with heads before the sequence; else empty."""
    Hq, Hk = q.shape[-3], k.shape[-3]
    if Hk < 1 or Hq < 1 or Hq % Hk:
        return ""
    here, there, dims = ("(B, S, H, D)", "(B, H, S, D)", "1, 2")
    if q.dim() == 3:
        here, there, dims = ("(T, H, D)", "(H, T, D)", "0, 1")
    return f"; if yours are {there}, transpose({dims}) makes {here} of them"


def same_batch(q: Tensor, k: Tensor) -> None:
    if q.shape[0] != k.shape[0]:
        raise ShapeError("k", tuple(k.shape), f"its batch size must be q's, {q.shape[0]}")


def sdpa_lengths(key: Tensor, value: Tensor) -> None:
    """Requires the same S of key (..., S, E) and value (..., S, Ev)."""
    tensors = isinstance(key, Tensor) and isinstance(value, Tensor) and not (key.is_nested or value.is_nested)
    if tensors and key.dim() > 1 and value.dim() > 1 and key.shape[-2] != value.shape[-2]:
        raise ShapeError("value", tuple(value.shape), f"its length must be key's, {key.shape[-2]}")


def sdpa_extras(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float
) -> None:
    """Rejects arguments for which torch's own function gives an obscure internal error or garbage."""
    tensors = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.layout not in (torch.strided, torch.jagged):
            raise not_dense(name, x)
    is_meta = {name for name, x in tensors.items() if isinstance(x, Tensor) and x.is_meta}
    if is_meta == {"attn_mask"} and isinstance(query, Tensor):
        raise DeviceError("attn_mask", "meta", f"it must be on query's device, {query.device}")
    if isinstance(dropout_p, (int, float)) and not 0.0 <= dropout_p <= sys.float_info.max:
        probability(dropout_p)


STOCK_SDPA = F.scaled_dot_product_attention
"""Torch's own, also where somebody has put ours in its place."""
_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"


def is_stock_sdpa() -> bool:
    """Whether nobody has replaced torch's function."""
    return F.scaled_dot_product_attention is STOCK_SDPA


def not_in_torchs_context_parallel(name: str) -> None:
    """Requires that torch's `context_parallel` has not replaced the function of torch that a call stands for.

    The call would see this rank's tokens alone.
    """
    if is_stock_sdpa():
        return
    theirs = sys.modules.get(_CONTEXT_PARALLEL)
    if theirs is not None and F.scaled_dot_product_attention in theirs._replaced_functions:
        raise _part_of_sequence(name)


def not_of_torchs_context_parallel(name: str) -> None:
    """Requires of a DTensor with a sharded sequence that torch's ring is off: its shards are out of order."""
    theirs = sys.modules.get(_CONTEXT_PARALLEL)
    if theirs is not None:
        active = theirs.DTensor._op_dispatcher._custom_op_handlers
        if not active.keys().isdisjoint(theirs.custom_ops):
            raise _part_of_sequence(name)


def _part_of_sequence(name: str) -> ArgumentError:
    limit = (
        "torch's context_parallel has rings for its own operators only: call flash4_torch.distributed."
        "parallelize_attention(model, mesh) before, or context_parallel_attention in a model of your own"
    )
    return ArgumentError(name, "one rank's part of a sequence", limit)


def is_flag(value: Any) -> bool:
    # A SymBool is a comparison of symbolic sizes under tracing.
    return isinstance(value, (bool, torch.SymBool))


def flag(name: str, value: bool) -> bool:
    if not is_flag(value):
        raise ArgumentError(name, reprlib.repr(value), "it must be True or False")
    return bool(value)


def band(causal: bool, window: tuple[int | None, int | None]) -> Band:
    """`causal` and `window` as one band. It may lie beside the diagonal, but must hold some diagonal."""
    flag("causal", causal)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ArgumentError(
            "window", reprlib.repr(window), "it must be a pair (left, right) of sizes or None"
        )
    for side, size in zip(("left", "right"), window, strict=True):
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
            raise ArgumentError(f"window's {side}", reprlib.repr(size), "it must be an int or None")
        if isinstance(size, int) and abs(size) > _LARGEST_INT:
            limit = "below 2**63" if size > 0 else "above -2**63"
            raise RangeError(f"window's {side}", _shown(size), f"it must be {limit}; None is unbounded")
    left, right = window
    if causal:
        if right is not None and right < 0:
            raise RangeError("window's right", right, f"causal=True is a right bound of 0; {_NO_BOUND}")
        right = 0
    if left is not None and right is not None and left + right < 0:
        limit = "left + right (0 if causal) must be at least 0, or no row sees a key"
        raise RangeError("window", tuple(window), f"{limit}; {_NO_BOUND}")
    return Band(left, right)


def scale(value: float | None, D: int, name: str = "scale") -> float:
    """The given scale, or 1 / sqrt(D)."""
    if value is None:
        return 1.0 / math.sqrt(D)
    return _number(name, value, -_FLOAT32.max, _FLOAT32.max)


def softcap(value: float) -> float:
    number = _number("softcap", value, 0.0, _FLOAT32.max)
    if 0.0 < number < _FLOAT32.tiny:
        # Scores are divided by softcap.
        raise RangeError("softcap", value, f"it must be 0, for none, or at least {_FLOAT32.tiny:.3g}")
    return number


def probability(value: float) -> float:
    return _number("dropout_p", value, 0.0, 1.0)


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, (bool, Tensor)) or not isinstance(value, (int, float)):
        raise ArgumentError(name, reprlib.repr(value), "it must be a number")
    # Comparisons only: under torch.compile a number may be symbolic. NaN fails all of them.
    if not low <= value <= high:
        span = f"finite, from {low} to {high}"
        if high == _FLOAT32.max:
            span = "finite in float32" + (", and at least 0.0" if low == 0.0 else "")
        raise RangeError(name, _shown(value), f"it must be {span}")
    return float(value)


def _shown(value: Any) -> object:
    """The number for an error message; its bit length if it is huge (Python refuses thousands of digits)."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    return value


def attn_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as a 4-D view, still broadcastable to (B, Hq, Sq, Sk)."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise ArgumentError("attn_mask", type(mask).__name__, "it must be a tensor or None")
    if not is_dense(mask):
        raise not_dense("attn_mask", mask)
    if mask.dtype != torch.bool and mask.dtype not in DTYPES:
        raise DtypeError("attn_mask", mask.dtype, "it must be bool (True attends) or floating (added)")
    if mask.device != q.device:
        raise DeviceError("attn_mask", mask.device, f"it must be on q's device, {q.device}")
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if not _broadcasts(mask, full):
        heads_first = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        hint = _if_heads_first(q, k) if _broadcasts(mask, heads_first) else ""
        raise ShapeError(
            "attn_mask", tuple(mask.shape), f"it must broadcast to (B, Hq, Sq, Sk) = {full}{hint}"
        )
    return mask[(None,) * (4 - mask.dim())]


def sinks(values: Tensor | None, q: Tensor, name: str = "sinks") -> Tensor | None:
    """Checks attention sinks, (Hq,) for q (..., Hq, D)."""
    if values is None:
        return None
    if not isinstance(values, Tensor):
        raise ArgumentError(name, type(values).__name__, "it must be a tensor or None")
    if not is_dense(values):
        raise not_dense(name, values)
    if values.dtype not in DTYPES:
        raise DtypeError(name, values.dtype, "it must be floating: a score per query head")
    if values.device != q.device:
        raise DeviceError(name, values.device, f"it must be on q's device, {q.device}")
    if tuple(values.shape) != (q.shape[-2],):
        raise ShapeError(name, tuple(values.shape), f"it must be (Hq,) = ({q.shape[-2]},)")
    return values


def _broadcasts(mask: Tensor, full: tuple[int, ...]) -> bool:
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    return len(sizes) == 4 and all(is_one_of(n, 1, m) for n, m in zip(sizes, full, strict=True))


def is_one_of(size: object, *allowed: object) -> bool:
    """Whether a size, or a tuple of sizes, equals one of others.

    In a graph of torch.compile `size in allowed` is False where only one of two equal sizes is known.
    """
    return any([size == x for x in allowed])


def cu_seqlens(name: str, lengths: Tensor, q: Tensor) -> None:
    """Checks cumulative lengths without reading their values; `cu_seqlens_values` reads them."""
    if not isinstance(lengths, Tensor):
        raise ArgumentError(name, type(lengths).__name__, "it must be a tensor")
    if not is_dense(lengths):
        raise not_dense(name, lengths)
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


def max_seqlen(name: str, value: int | Tensor | None, total: int) -> int:
    """The value as an int, given as an int, a 0-dim tensor, or None for `total`, the packed length."""
    if value is None:
        return total
    if isinstance(value, Tensor) and value.dim() == 0 and not value.is_floating_point():
        if value.is_meta:
            raise DeviceError(name, value.device, "it must be on a device, for its value is read")
        known_later = torch.compiler.is_compiling()
        value = cast(int, value.item())
        if known_later:
            torch._check(value >= 0)
            return value
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise ArgumentError(name, reprlib.repr(value), "it must be an int, a 0-dim tensor or None")
    if value < 0:
        raise RangeError(name, _shown(value), "it must be at least 0")
    if isinstance(value, int) and value > _LARGEST_INT:
        raise RangeError(name, _shown(value), "it must be below 2**63")
    return value


def cu_seqlens_values(name: str, lengths: Tensor, total: int, longest: int, *, padded: bool = False) -> None:
    """Requires cumulative lengths that rise from 0 to `total`, if `padded` below, in steps up to `longest`.

    They are read on the CPU only: reading them from a GPU would wait for it.
    """
    if lengths.device.type != "cpu":
        return
    values = lengths.tolist()
    if values[0] != 0 or (values[-1] > total if padded else values[-1] != total):
        end = f"{'at most ' if padded else ''}the packed length, {total}"
        raise RangeError(name, values, f"it must begin with 0 and end with {end}")
    steps = [b - a for a, b in pairwise(values)]
    if any(step < 0 for step in steps):
        raise RangeError(name, values, "it must not decrease: a sequence cannot have a negative length")
    if max(steps, default=0) > longest:
        argument = name.replace("cu_seqlens", "max_seqlen")
        raise RangeError(argument, longest, f"the longest sequence has {max(steps)}")
