"""The operators `torch.ops.flash4.*`: the only place that touches torch.library.

The functions below are differentiable, compile, export, vmap and autocast. They check nothing that `api`
checks; tensors are (B, S, H, D), or packed (T, H, D).
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from . import autograd, fake, flops, impl, schema, vmap
from .autocast import autocast_inputs
from .random import draw_rng_state


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    rng_state: Tensor | None,
    *,
    scale: float,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """(out (B, Sq, Hq, Dv), lse (B, Hq, Sq)).

    The band is aligned to the bottom right and may be negative; `attn_mask` is 4-D or None; `rng_state` comes
    from `draw_rng_state` exactly when dropout_p > 0.
    """
    q, k, v = autocast_inputs(q, k, v)
    rng_state = _beside(q, rng_state)
    return autograd.attention(
        q, k, v, attn_mask, rng_state, scale, window_left, window_right, softcap, dropout_p, deterministic
    )


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    rng_state: Tensor | None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """(out (Tq, Hq, Dv), lse (Hq, Tq)) of packed sequences; the band is aligned in each of them."""
    q, k, v = autocast_inputs(q, k, v)
    rng_state = _beside(q, rng_state)
    return autograd.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        rng_state,
        max_seqlen_q,
        max_seqlen_k,
        scale,
        window_left,
        window_right,
        softcap,
        dropout_p,
        deterministic,
    )


def attention_weights(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None,
    rng_state: Tensor | None,
    *,
    scale: float,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    dropout_p: float,
    average_heads: bool,
) -> Tensor:
    """The weights `attention` applies, after dropout: (B, Sq, Sk) averaged over heads, or (B, Hq, Sq, Sk)."""
    q, k = autocast_inputs(q, k)
    return autograd.attention_weights(
        q, k, attn_mask, rng_state, scale, window_left, window_right, softcap, dropout_p, average_heads
    )


_dtensor_known = False


def _know_dtensor() -> None:
    """Registers the sharding rules once DTensor is loaded; loading it ourselves would cost every user 0.8
    s."""
    global _dtensor_known
    if _dtensor_known or torch.compiler.is_compiling() or "torch.distributed.tensor" not in sys.modules:
        return
    from . import sharding

    _dtensor_known = True
    sharding.register()


def _beside(q: Tensor, rng_state: Tensor | None) -> Tensor | None:
    """`rng_state` as it may meet `q`: replicated if that is a DTensor."""
    _know_dtensor()
    if rng_state is None or not _dtensor_known:
        return rng_state
    from . import sharding

    return sharding.beside(q, rng_state)


# A compiled graph may be the first to meet a DTensor, and tracing cannot register rules.
_know_dtensor()

__all__ = [
    "attention",
    "attention_varlen",
    "attention_weights",
    "autocast_inputs",
    "autograd",
    "draw_rng_state",
    "fake",
    "flops",
    "impl",
    "schema",
    "vmap",
]
