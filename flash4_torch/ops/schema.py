"""The schemas of the operators in namespace `flash4`: the single source of truth.

Layouts: dense tensors are (B, S, H, D), lse is (B, Hq, Sq); packed ones are (T, H, D) and lse is (Hq, Tq).
The band (window_left, window_right) is aligned to the bottom right and may be negative; causal is right = 0.
`rng_state` is the int64 pair (seed, offset) on the tensors' device, present exactly when dropout_p > 0; seven
numbers make the call a part of a larger one (`reference.dropout`; kernels count from multiples of 16).
`lse_low` is the rounding error of lse, (B, Hq, Sq) with a floating attn_mask, else (B, Hq, 0): with a large
mask, lse alone does not tell how many keys a row attends to. The backward uses it if it is given.
`sinks` (Hq,) is one more score in every row's softmax, of a key without a value; lse counts it.
Every result is freshly allocated and contiguous, but on a GPU gradients of q, k and v lie in memory as these
do (`problem.new_gradient`). `dmask` has no elements unless `mask_grad` asks for it, nor has `dsinks` without
sinks.
`attention_weights_signed` returns each head's weights as they are before dropout, and negative where dropout
takes them: one result from which a graph reads both. The sign of a weight that is 0 says nothing.
`attention_and_weights` is for graphs with gradients: one node of autograd, below which there are `attention`
and `attention_weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import DoubleBackwardError, NoGradientError

_SCORES = "float scale, SymInt? window_left, SymInt? window_right, float softcap, float dropout_p"
_RULES = f"{_SCORES}, bool deterministic"
_DENSE = f"Tensor? attn_mask, Tensor? sinks, Tensor? rng_state, {_RULES}"
_VARLEN = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? sinks, Tensor? rng_state, "
    f"SymInt max_seqlen_q, SymInt max_seqlen_k, {_RULES}"
)
_EACH_HEAD = (
    "Tensor q, Tensor k, Tensor lse, Tensor? lse_low, "
    f"Tensor? attn_mask, Tensor? sinks, Tensor? rng_state, {_SCORES}"
)
_WEIGHTS = f"{_EACH_HEAD}, bool average_heads"
_SAVED = "Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
_DENSE_SAVED = f"{_SAVED}, Tensor? lse_low"

SCHEMAS = {
    "attention_and_weights": (
        f"(Tensor q, Tensor k, Tensor v, {_DENSE}, bool average_heads) "
        "-> (Tensor out, Tensor lse, Tensor weights)"
    ),
    "attention": f"(Tensor q, Tensor k, Tensor v, {_DENSE}) -> (Tensor out, Tensor lse, Tensor lse_low)",
    "attention_backward": (
        f"({_DENSE_SAVED}, {_DENSE}, bool mask_grad) "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask, Tensor dsinks)"
    ),
    "attention_varlen": f"(Tensor q, Tensor k, Tensor v, {_VARLEN}) -> (Tensor out, Tensor lse)",
    "attention_varlen_backward": f"({_SAVED}, {_VARLEN}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    "attention_weights": f"({_WEIGHTS}) -> Tensor weights",
    "attention_weights_signed": f"({_EACH_HEAD}) -> Tensor weights",
    "attention_weights_backward": (
        f"(Tensor dweights, {_WEIGHTS}, bool mask_grad) "
        "-> (Tensor dq, Tensor dk, Tensor dmask, Tensor dsinks)"
    ),
}

# The results depend on strides only in that the kernels read any stride.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

LIBRARY = torch.library.Library("flash4", "DEF")


def define(name: str, signature: str) -> None:
    """Declare an operator of the library."""
    LIBRARY.define(f"{name}{signature}", tags=_TAGS)


def save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save nothing for a backward that refuses."""


def refuse_double_backward(ctx: Any, *gradients: Any) -> Any:
    """Refuse the backward of an operator that computes gradients."""
    raise DoubleBackwardError


def without_gradients(function: str) -> Callable[..., Any]:
    """The backward of a public function that has none."""

    def refuse(ctx: Any, *gradients: Any) -> Any:
        raise NoGradientError(function)

    return refuse


for _name, _signature in SCHEMAS.items():
    define(_name, _signature)

attention_and_weights = torch.ops.flash4.attention_and_weights.default
attention = torch.ops.flash4.attention.default
attention_backward = torch.ops.flash4.attention_backward.default
attention_varlen = torch.ops.flash4.attention_varlen.default
attention_varlen_backward = torch.ops.flash4.attention_varlen_backward.default
attention_weights = torch.ops.flash4.attention_weights.default
attention_weights_signed = torch.ops.flash4.attention_weights_signed.default
attention_weights_backward = torch.ops.flash4.attention_weights_backward.default
