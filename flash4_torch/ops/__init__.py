"""The operators `torch.ops.flash4.*`: the only place that touches torch.library.

The functions below support autograd, torch.compile, torch.export, vmap and autocast. They do not repeat the
checks of `api`; tensors are (B, S, H, D), or packed (T, H, D).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from ..problem import CallOptions
from . import autograd, cpu_in_graph, fake, impl, schema, vmap
from .after_import import after_import
from .autocast import autocast_inputs
from .decomposition import decompositions
from .random import draw_rng_state


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    options: CallOptions,
) -> tuple[Tensor, Tensor]:
    """Attention as (out (B, Sq, Hq, Dv), lse (B, Hq, Sq)).

    q, k and v come from `autocast_inputs`; `attn_mask` is 4-D or None; `sinks` is (Hq,) or None; `rng_state`
    comes from `draw_rng_state` exactly when dropout_p > 0.
    """
    out, lse, _ = autograd.attention(q, k, v, *_beside(q, rng_state, attn_mask, sinks), *options)
    return out, lse


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    options: CallOptions,
) -> tuple[Tensor, Tensor]:
    """Attention over packed sequences as (out (Tq, Hq, Dv), lse (Hq, Tq)); the band is aligned in each."""
    sequences = _beside(q, rng_state, cu_seqlens_q, cu_seqlens_k, sinks)
    return autograd.attention_varlen(q, k, v, *sequences, max_seqlen_q, max_seqlen_k, *options)


def attention_and_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    options: CallOptions,
    average_heads: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention` as (out, lse, weights), which share lse.

    The weights are those after dropout: averaged over heads (B, Sq, Sk), else (B, Hq, Sq, Sk).
    """
    scored_by = attn_mask, sinks, rng_state = _beside(q, rng_state, attn_mask, sinks)
    if autograd.in_graph():
        out, lse, weights = schema.attention_and_weights(q, k, v, *scored_by, *options, average_heads)
        return out, lse, weights
    out, lse, weights = autograd.attention_and_weights(q, k, v, *scored_by, *options, average_heads)
    return out, lse, weights


def is_recorded(*arguments: object) -> bool:
    """Whether a proxy is among the arguments: it stands for a tensor while torch.fx records the calls."""
    return any(isinstance(x, fx.Proxy) for x in arguments)


_dtensor_loaded = False


def _use_dtensor_rules() -> None:
    global _dtensor_loaded
    from . import sharding

    sharding.register()
    _dtensor_loaded = True


def _use_flop_formulas() -> None:
    from . import flops

    flops.register()


def _stay_whole_in_inductor() -> None:
    """Keeps Inductor from refusing our operators: with CI set, it refuses those with a decomposition."""
    from torch._inductor.lowering import FALLBACK_ALLOW_LIST

    FALLBACK_ALLOW_LIST.update(f"flash4::{name}" for name in schema.SCHEMAS)


after_import("torch.distributed.tensor", _use_dtensor_rules)
after_import("torch.utils.flop_counter", _use_flop_formulas)
after_import("torch._inductor.lowering", _stay_whole_in_inductor)


def _beside(q: Tensor, rng_state: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
    """The others, then `rng_state`, in a form that fits `q`: replicated if `q` is a DTensor."""
    if not _dtensor_loaded:
        return *others, rng_state
    from . import sharding

    sharding.check_sequence(q)
    fitting = [None if x is None else sharding.beside(q, x) for x in others]
    return *fitting, None if rng_state is None else sharding.beside(q, rng_state, is_state=True)


__all__ = [
    "CallOptions",
    "attention",
    "attention_and_weights",
    "attention_varlen",
    "autocast_inputs",
    "autograd",
    "cpu_in_graph",
    "decompositions",
    "draw_rng_state",
    "fake",
    "impl",
    "is_recorded",
    "schema",
    "vmap",
]
