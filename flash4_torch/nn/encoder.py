"""Torch's own call of a whole nn.TransformerEncoderLayer in evaluation, where it is the fastest.

Stock layers make it instead of calling their attention, in exchange for dozens of calls from Python. Its
attention is `fused`'s: it holds the weights of all heads, and what it gives rows that see nothing is NaN. It
knows nothing of hooks, adapters and settings that a layer's modules may have; layers with any call them.
"""

from __future__ import annotations

import math
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _is_any_autocast_enabled
from torch.nn.modules import module as hooks
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..fast_path.conditions import must_take_slow_path
from ..ops.check import is_stock_sdpa

FORWARD = nn.TransformerEncoderLayer.forward.__code__
"""Stock's forward, which asks."""


class Limits(NamedTuple):
    """Scores, at most, of what torch's layer serves."""

    plain: int
    """Those of a batch entry, without padding."""
    most: int
    """Those of all entries, without padding."""
    padded: int
    """The same with a mask of padding, which is read."""
    nested: int
    """The same of nested sequences, which torch's call pads to the length of the longest one."""
    wasted: int
    """Those of that padding, if they are more than all others."""


_LIMITS = {
    ("cpu", False): Limits(1 << 17, 1 << 24, 1 << 13, 1 << 18, 1 << 15),
    ("cpu", True): Limits(1 << 21, 1 << 24, 1 << 13, 1 << 24, 1 << 17),
    # The largest that were timed on an H200, where the host's time counts. Masks are not read.
    ("cuda", False): Limits(1 << 17, 1 << 20, 0, 1 << 20, 0),
    ("cuda", True): Limits(1 << 17, 1 << 20, 0, 1 << 29, 0),
}
"""Those of types of devices, and whether the layer has 16 bits; it serves no others."""
_KEPT_OR_HIDDEN = frozenset((0.0, -math.inf))


def serves(attention: nn.MultiheadAttention, asker: FrameType) -> bool:
    """Whether torch's layer serves the call of a layer with this attention, whose forward asks."""
    if must_take_slow_path() or _is_any_autocast_enabled() or not is_stock_sdpa():
        return False
    given = asker.f_locals
    layer, src, padding = given["self"], given["src"], given["src_key_padding_mask"]
    if type(src) is not Tensor or src.layout is not torch.strided:
        return False
    limits = _LIMITS.get((src.device.type, src.dtype.itemsize == 2))
    if limits is None:
        return False
    if given["is_causal"] or given["src_mask"] is not None or not _adds_nothing(attention):
        return False
    try:
        return _is_plain(layer, attention, src.dtype) and _is_few(attention, src, padding, limits)
    except (AttributeError, KeyError):  # no parameter, or one that is computed
        return False


def _is_few(attention: nn.MultiheadAttention, src: Tensor, padding: Tensor | None, limits: Limits) -> bool:
    """Whether the scores are so few that torch's layer is the fastest, and each row sees a key."""
    if src.is_nested:
        return _are_few(attention, src, limits)
    N, S, width = src.shape
    each = attention.num_heads * S * S
    if padding is not None:
        is_few = 0 < N * each <= limits.padded and padding.shape == (N, S) and _only_hides(padding)
    else:
        is_few = each <= limits.plain and 0 < N * each <= limits.most
    return is_few and width == attention.embed_dim


def _are_few(attention: nn.MultiheadAttention, src: Tensor, limits: Limits) -> bool:
    """The same of nested sequences."""
    sizes, width, H = src._nested_tensor_size().tolist(), attention.embed_dim, attention.num_heads
    squares = [size[0] ** 2 for size in sizes if size[1] == width]
    if len(squares) < len(sizes) or 0 in squares:
        return False
    real, padded = H * sum(squares), H * len(sizes) * max(squares)
    return padded <= limits.nested and (padded <= 2 * real or padded - real <= limits.wasted)


def _only_hides(padding: Tensor) -> bool:
    """Whether a floating mask (N, S) leaves keys as they are or hides them, and leaves each row one."""
    return all(0.0 in row and _KEPT_OR_HIDDEN.issuperset(row) for row in padding.tolist())


def _adds_nothing(attention: nn.MultiheadAttention) -> bool:
    """Whether the attention is that of its projections alone, and nobody waits for its call."""
    return not (
        attention.training
        or attention.bias_k is not None
        or attention.add_zero_attn
        or attention._forward_hooks
        or attention._forward_pre_hooks
        or hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
    )


def _is_plain(layer: Any, attention: nn.MultiheadAttention, dtype: torch.dtype) -> bool:
    """Whether the layer computes what torch's call does of its parameters."""
    # Without loops, which would take twice as long as all of this.
    parts = layer._modules
    linear1, linear2, norm1, norm2 = parts["linear1"], parts["linear2"], parts["norm1"], parts["norm2"]
    out_proj, own = attention._modules["out_proj"], attention._parameters
    return (
        type(layer) is nn.TransformerEncoderLayer
        and _is_known(layer.activation, layer.activation_relu_or_gelu)
        and _has_both(own["in_proj_weight"], own["in_proj_bias"], dtype)
        and _is_stock(out_proj, NonDynamicallyQuantizableLinear, dtype)
        and _is_stock(linear1, nn.Linear, dtype)
        and _is_stock(linear2, nn.Linear, dtype)
        and _is_stock(norm1, nn.LayerNorm, dtype)
        and _is_stock(norm2, nn.LayerNorm, dtype)
        and not (parts["dropout"].training or parts["dropout1"].training or parts["dropout2"].training)
    )


def _is_stock(part: Any, kind: type[nn.Module], dtype: torch.dtype) -> bool:
    own = part._parameters
    return (
        type(part) is kind and "forward" not in part.__dict__ and _has_both(own["weight"], own["bias"], dtype)
    )


def _has_both(weight: Any, bias: Any, dtype: torch.dtype) -> bool:
    return weight.dtype is dtype and bias.dtype is dtype


def _is_known(activation: object, number: int) -> bool:
    """Whether torch's number for an activation, which does not tell kinds of GELU apart, says all."""
    if number == 1:
        return activation is F.relu or type(activation) is nn.ReLU
    is_exact = type(activation) is nn.GELU and activation.approximate == "none"
    return number == 2 and (activation is F.gelu or is_exact)
