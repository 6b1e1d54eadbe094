"""Attention of compiled graphs on a CPU: torch's own operators, in Inductor's table of decompositions.

The backend that would serve these calls runs torch's kernel, too. In a graph nothing has to be decided
anymore, and the graph of stock attention holds just that operator, so that a call into Python would lose.
In eager mode the backend computes anew what the kernel makes of infinite and NaN scores; a graph cannot. It
turns a row whose scores are infinite into NaN, too. Of NaN in a query that no value has (as in attention to
other tokens), the kernel may make zeros where there are few keys, as in stock attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import env
from ..problem import CallOptions, has_float_mask
from ..reference.scoring import working_dtype
from . import decomposition, schema, small_in_graph
from .after_import import after_import

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_TINY = torch.finfo(torch.float32).tiny


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    *options: Any,
) -> Any:
    """`flash4::attention`, or NotImplemented: the graph keeps the operator."""
    causal = _served(q, k, v, attn_mask, sinks, *options)
    if causal is None:
        if _is_small(q, k, rng_state, *options):
            return small_in_graph.forward(q, k, v, attn_mask, sinks, rng_state, CallOptions(*options))
        return NotImplemented
    added = _added(attn_mask, q.dtype)
    out, lse = _forward(*_heads_first(q, k, v), 0.0, causal, attn_mask=added, scale=options[0])
    if q.dtype in (torch.bfloat16, torch.float16):
        # The kernel's zeros, where a score is infinite: 0 * inf is NaN. In float32 it makes none.
        out = out + (lse * 0.0)[..., None].to(out.dtype)
    low = lse.new_empty(*lse.shape[:2], 0)
    if has_float_mask(attn_mask):
        # Nobody asks for it: the backward below finds it by itself. So it is not computed.
        low = decomposition.lse_low(q, k, attn_mask, *options[:-1])
    if attn_mask is not None:
        lse = lse.masked_fill(_sees_nothing(attn_mask, causal, q.shape[1]), -torch.inf)
    return out.transpose(1, 2).contiguous(), lse.contiguous(), low


def _attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor | None,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    *options_and_mask_grad: Any,
) -> Any:
    """`flash4::attention_backward`, or NotImplemented."""
    *options, mask_grad = options_and_mask_grad
    causal = _served(q, k, v, attn_mask, sinks, *options)
    by_kernel = causal is not None and not (has_float_mask(attn_mask) or dlse is not None or mask_grad)
    if not by_kernel and _is_small(q, k, rng_state, *options):
        scored_by = attn_mask, sinks, rng_state, CallOptions(*options)
        return small_in_graph.backward(dout, dlse, q, k, v, lse, *scored_by, mask_grad)
    if causal is None:
        return NotImplemented
    if has_float_mask(attn_mask) and lse_low is not None:
        # Finds the error by itself, and leaves nothing that uses the forward's.
        same = dout, dlse, q, k, v, out, lse, None, attn_mask, sinks, rng_state
        return schema.attention_backward(*same, *options_and_mask_grad)
    if not by_kernel:
        return NotImplemented
    if attn_mask is not None:
        # exp(-inf - -inf) would be NaN; the kernel itself gives a row that sees nothing 0.
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
    added = _added(attn_mask, q.dtype)
    given = _heads_first(dout, q, k, v, out)
    grads = _backward(*given, lse, 0.0, causal, attn_mask=added, scale=options[0])
    nothing = q.new_empty(0)
    return *(x.transpose(1, 2) for x in grads), nothing, nothing


def _is_small(q: Tensor, k: Tensor, rng_state: Tensor | None, *options: Any) -> bool:
    """Whether a call that torch's kernel does not serve is written out."""
    return not _is_package() and small_in_graph.serves(q, k, rng_state, CallOptions(*options))


def _is_package() -> bool:
    """Whether the graph is for a package, which calls back to our operator: it chooses where it is loaded."""
    from torch._inductor.virtualized import V

    return V.aot_compilation is True


def _served(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
) -> bool | None:
    """Whether a call that torch's kernel serves is causal; None if it does not serve it, whatever unknown
    sizes may turn out to be."""
    # Loads sympy, as compiling does.
    from torch.fx.experimental.symbolic_shapes import statically_known_true as is_known

    if _is_package():
        return None
    plain = sinks is None and left is None and not softcap and not dropout_p and scale >= _TINY
    if q.device.type != "cpu" or not plain or env.BACKEND.get():
        return None
    (B, Sq, Hq, D), (_, Sk, Hk, _) = q.shape, k.shape
    if not (all(is_known(n > 0) for n in (B, Sq, Hq, D, Sk, Hk)) and is_known(D == v.shape[3])):
        return None
    if right is None:
        return False
    return True if is_known(right == Sq - Sk) else None


def _added(attn_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as the kernel takes it: floating, in q's dtype or the dtype of its sums."""
    if attn_mask is None or attn_mask.dtype == dtype:
        return attn_mask
    if attn_mask.dtype == torch.bool:
        return torch.where(attn_mask, 0.0, -torch.inf).to(dtype)
    return attn_mask.to(working_dtype(dtype))


def _sees_nothing(attn_mask: Tensor, causal: bool, Sq: int) -> Tensor:
    """Rows for which the mask, and causal if set, leave no key: bool, broadcastable to (B, Hq, Sq)."""
    visible = attn_mask if attn_mask.dtype == torch.bool else attn_mask != -torch.inf
    if causal:
        i = torch.arange(Sq, device=visible.device)[:, None]
        visible = visible & (torch.arange(visible.shape[-1], device=visible.device) <= i)
    return ~visible.any(-1)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """(B, S, H, D) as views (B, H, S, D), of copies where a row has gaps or begins inside of another one: the
    kernel reads none, and of what it is given Inductor keeps the order of strides alone."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false
    from torch.fx.experimental.symbolic_shapes import statically_known_true as is_known

    def is_in_place(x: Tensor) -> bool:
        overlaps = guard_or_false(x.stride(1) > 0) and guard_or_false(x.stride(1) < x.shape[-1])
        return is_known(x.stride(-1) == 1) and not overlaps

    return [(x if is_in_place(x) else x.contiguous()).transpose(1, 2) for x in tensors]


def _in_inductor() -> None:
    """Decomposes the operators in graphs for Inductor."""
    from torch._inductor import decomposition

    decomposition.decompositions[schema.attention] = _attention
    decomposition.decompositions[schema.attention_backward] = _attention_backward
    # Copies the table.
    decomposition.fast_random_decomps.cache_clear()


after_import("torch._inductor.decomposition", _in_inductor)
