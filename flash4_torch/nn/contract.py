"""Requirements on a call of nn.MultiheadAttention, with the stock module's own errors for violations."""

from __future__ import annotations

import math
import numbers
import operator
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ArgumentError
from . import padding


class Call(NamedTuple):
    """Arguments of one forward, in its order and with its defaults."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False


_MASKS = ("key_padding_mask", "attn_mask")
_FLAGS = ("need_weights", "average_attn_weights", "is_causal")


def has_kinds(call: Call) -> bool:
    """Whether all tensors are dense or nested and all flags are bools, as in nearly every call."""
    return (
        _is_served(call.query)
        and _is_served(call.key)
        and _is_served(call.value)
        and (call.key_padding_mask is None or _is_served(call.key_padding_mask))
        and (call.attn_mask is None or _is_served(call.attn_mask))
        and type(call.need_weights) is type(call.average_attn_weights) is type(call.is_causal) is bool
    )


def with_gradients(call: Call) -> Call:
    """The call, of which autograd can save every tensor: those made in inference mode are copied, as stock's
    projections copy them.
    """
    made = {id(x): x for x in call if isinstance(x, Tensor) and x.is_inference()}
    if not made:
        return call
    copies = {at: x.clone() for at, x in made.items()}
    tensors: Any = (copies.get(id(x), x) for x in call)
    return Call(*tensors)


def check_kinds(call: Call) -> None:
    """Raises ArgumentError for a tensor that is neither dense nor nested, and for a flag that is none."""
    for name, x in call._asdict().items():
        if name in _FLAGS:
            check_flag(name, x)
        elif isinstance(x, Tensor) and not _is_served(x):
            raise ArgumentError(name, f"a tensor of layout {x.layout}", "it must be dense or nested")
        elif not isinstance(x, Tensor) and not (x is None and name in _MASKS):
            limit = "it must be a tensor or None" if name in _MASKS else "it must be a tensor"
            raise ArgumentError(name, type(x).__name__, limit)


def _is_served(x: object) -> bool:
    return isinstance(x, Tensor) and x.layout in (torch.strided, torch.jagged)


def check_flag(name: str, value: object) -> None:
    """Raises ArgumentError unless True or False; 1, 0 and numpy's bools count, but not for `is_causal`."""
    if isinstance(value, (bool, torch.SymBool)):
        return
    is_theirs = type(value).__name__ in ("bool", "bool_") or (isinstance(value, int) and value in (0, 1))
    if name == "is_causal" or not is_theirs:
        raise ArgumentError(name, reprlib.repr(value), "it must be True or False")


def check_constructor(sizes: Mapping[str, object], flags: Mapping[str, object], dropout: object) -> None:
    """Raises ArgumentError for arguments of a type that could make no module, or only by accident."""
    for name, size in sizes.items():
        default = " or None" if name in ("kdim", "vdim") else ""
        if not _is_int(size) and not (default and size is None):
            raise ArgumentError(name, reprlib.repr(size), f"it must be an int{default}")
    if not isinstance(dropout, numbers.Real) or math.isnan(dropout):
        raise ArgumentError("dropout", reprlib.repr(dropout), "it must be a number from 0 to 1")
    for name, flag in flags.items():
        check_flag(name, flag)


def _is_int(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def appended_keys(module: nn.MultiheadAttention) -> int:
    """Number of keys that add_bias_kv and add_zero_attn append to the S given ones."""
    return int(module.bias_k is not None) + int(module.add_zero_attn)


def is_causal_by_rule(module: nn.MultiheadAttention, call: Call) -> bool:
    """Whether `is_causal` replaces `attn_mask`. With appended keys it cannot, since every row sees them."""
    return call.is_causal and appended_keys(module) == 0


def check(module: nn.MultiheadAttention, call: Call) -> None:
    """Raises and warns like the stock module's forward, before anything is computed."""
    padding.check_dtypes(call.key_padding_mask, call.attn_mask)
    F._mha_shape_check(  # type: ignore[attr-defined]
        call.query, call.key, call.value, call.key_padding_mask, call.attn_mask, module.num_heads
    )
    _check_dropout(module)
    if not (_inputs_fit(module, call) and _masks_fit(module, call)):
        _raise_as_stock(module, call)


def check_nested(module: nn.MultiheadAttention, call: Call) -> None:
    """Raises ArgumentError for a call with nested tensors that has no packed equivalent."""
    tensors = {"query": call.query, "key": call.key, "value": call.value}
    for name, x in tensors.items():
        if not x.is_nested or x.layout != call.query.layout or x.size(0) != call.query.size(0):
            kind = f"nested ({x.layout})" if x.is_nested else "not nested"
            raise ArgumentError(
                name, f"{kind}, of batch size {x.size(0)}", "query, key and value must be alike"
            )
    for name, mask in (("key_padding_mask", call.key_padding_mask), ("attn_mask", call.attn_mask)):
        if mask is not None:
            raise ArgumentError(name, "a tensor", "with nested inputs it must be None")
    if call.is_causal:
        raise ArgumentError("is_causal", True, "with nested inputs it must be False")
    if not module.batch_first:
        raise ArgumentError("batch_first", False, "with nested inputs it must be True")
    if appended_keys(module):
        raise ArgumentError("add_bias_kv or add_zero_attn", True, "with nested inputs both must be False")
    _check_dropout(module)


def check_shared(module: nn.MultiheadAttention, call: Call) -> None:
    """Raises ArgumentError for a call whose sequences ranks share, if it needs what only whole ones have."""
    shared = "where ranks share sequences"
    for name, x in (("query", call.query), ("key", call.key), ("value", call.value)):
        if x.is_nested:
            raise ArgumentError(name, "nested", f"{shared} it must be dense")
    if call.key_padding_mask is not None:
        limit = f"{shared} it must be None: pad at the end of causal sequences"
        raise ArgumentError("key_padding_mask", "a tensor", limit)
    if call.attn_mask is not None and not call.is_causal:
        raise ArgumentError("attn_mask", "a tensor", f"{shared} only is_causal=True hides keys")
    if call.need_weights:
        raise ArgumentError("need_weights", True, f"{shared} it must be False")
    if appended_keys(module):
        raise ArgumentError("add_bias_kv or add_zero_attn", True, f"{shared} both must be False")


def _check_dropout(module: nn.MultiheadAttention) -> None:
    if module.training and not 0.0 <= module.dropout <= 1.0:
        F.dropout(torch.empty(0), module.dropout)  # raises torch's error


def _inputs_fit(module: nn.MultiheadAttention, call: Call) -> bool:
    query, key, value = call.query, call.key, call.value
    return (
        query.shape[-1] == module.embed_dim
        and key.shape[:-1] == value.shape[:-1]
        and key.shape[-1] == module.kdim
        and value.shape[-1] == module.vdim
        and _batch_and_length(module, key)[0] == _batch_and_length(module, query)[0]
    )


def _masks_fit(module: nn.MultiheadAttention, call: Call) -> bool:
    padding_mask, mask = call.key_padding_mask, call.attn_mask
    N, L = _batch_and_length(module, call.query)
    _, S = _batch_and_length(module, call.key)
    if padding_mask is not None and not _is_mask(padding_mask, call, (S,), (N, S)):
        return False
    if mask is None:
        return not call.is_causal
    return _ignores_attn_mask(module, call) or _is_mask(mask, call, (L, S), (N * module.num_heads, L, S))


def _is_mask(mask: Tensor, call: Call, *shapes: tuple[int, ...]) -> bool:
    # Tuples of different lengths are compared element by element too, and torch.export would add guards.
    fits = any(mask.dim() == len(shape) and mask.shape == shape for shape in shapes)
    return fits and mask.device == call.query.device


def _batch_and_length(module: nn.MultiheadAttention, x: Tensor) -> tuple[int, int]:
    if x.dim() == 2:
        return 1, x.shape[0]
    return (x.shape[0], x.shape[1]) if module.batch_first else (x.shape[1], x.shape[0])


def _ignores_attn_mask(module: nn.MultiheadAttention, call: Call) -> bool:
    """Whether a mask of any size is accepted, because neither module reads it."""
    stock_reads_it = call.need_weights or call.key_padding_mask is not None
    return is_causal_by_rule(module, call) and not stock_reads_it


def _raise_as_stock(module: nn.MultiheadAttention, call: Call) -> NoReturn:
    """Lets torch's own function find the fault, so that the error is that of the installed torch."""
    query, key, value = (
        x.transpose(0, 1) if module.batch_first and x.dim() == 3 else x
        for x in (call.query, call.key, call.value)
    )
    F.multi_head_attention_forward(
        query,
        key,
        value,
        module.embed_dim,
        module.num_heads,
        module.in_proj_weight,
        module.in_proj_bias,
        module.bias_k,
        module.bias_v,
        module.add_zero_attn,
        module.dropout,
        module.out_proj.weight,
        module.out_proj.bias,
        key_padding_mask=call.key_padding_mask,
        need_weights=call.need_weights,
        attn_mask=call.attn_mask,
        use_separate_proj_weight=module.in_proj_weight is None,
        q_proj_weight=module.q_proj_weight,
        k_proj_weight=module.k_proj_weight,
        v_proj_weight=module.v_proj_weight,
        is_causal=call.is_causal,
    )
    given = {
        name: f"{tuple(x.shape)} on {x.device}" for name, x in call._asdict().items() if isinstance(x, Tensor)
    }
    raise ArgumentError(", ".join(given), ", ".join(given.values()), "their sizes and devices must fit")
