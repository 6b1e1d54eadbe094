"""The public functions: check the arguments of a rank, exchange heads, and go round the ring."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import ops
from ..api import Window, call_options
from ..errors import ArgumentError, ShapeError
from ..ops import check
from ..ops import context_parallel as operators
from ..ops.keywords import hides_unknown, no_argument
from ..problem import CallOptions
from . import ring, ulysses
from .groups import ALONE, Axis, Ranks, axis_of, ranks_of
from .layout import Layout, check_layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

operators.implement(
    {
        "ring_attention": ring.forward,
        "ring_attention_backward": ring.backward,
        "all_to_all": ulysses.all_to_all,
        "from_first_rank": ulysses.from_first_rank,
    }
)


@hides_unknown
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh | ProcessGroup | None = None,
    *,
    layout: Layout = "zigzag",
    cu_seqlens: Tensor | None = None,
    causal: bool = False,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
    **unknown: Any,
) -> Any:
    """Attention of one sequence over many ranks: each holds a part of it, and gets its part of the result.

    Args:
        q: (B, Sq / ranks, Hq, D), this rank's queries, as `shard_sequence` makes them; equal shapes on all
            ranks. Packed documents: (T / ranks, Hq, D), and `cu_seqlens`.
        k: (B, Sk / ranks, Hk, D), its keys.
        v: (B, Sk / ranks, Hk, Dv).
        mesh: the ranks. A DeviceMesh with dimensions "ring", "ulysses" or both (without names: ring, then
            ulysses), or a process group, which is a ring. "ulysses" ranks exchange sequence for heads by
            all-to-all, and its size must divide Hq; fewer KV heads than ranks are repeated. "ring" ranks work
            on each other's keys in turn, for any number of heads. Default: a ring of all ranks.
        layout: how the ring's ranks divide the sequence, "zigzag" (even work for causal) or "contiguous";
            packed documents also "documents", as `shard_documents` divides them.
        cu_seqlens: (B + 1,), where documents of the whole packed sequence begin and end, as in
            `attention_varlen`; equal on all ranks. A ring reads its values: on a CPU they cost no waiting.
        causal, window, scale, softcap, sinks, deterministic: as in `attention`, in whole sequences; sinks are
            those of all heads.
        dropout_p: as in `attention`; the mask is that of one process, in which torch's generator is in the
            state of the first rank's. On a GPU chunks begin at multiples of 16 tokens of their document, or
            it is a RangeError.
        return_lse: also return lse, (B, Hq, Sq / ranks), or packed (Hq, T / ranks).

    Returns:
        out (B, Sq / ranks, Hq, Dv), or (out, lse): this rank's rows of what `attention` returns for the whole
        sequence. Gradients of q, k and v are whole; that of sinks is this rank's share of a sum over ranks.
        Every rank has to run the backward.

    Raises:
        ArgumentError: an argument is outside its limits; the message names it, its value and the limit.
        KeywordError: there is no such argument; the message says what to use instead.
        CommunicationError: another rank failed, or did not answer within its process group's timeout.
    """
    if unknown:
        raise no_argument(context_parallel_attention, unknown)
    ranks = ranks_of(mesh)
    return attention_of_ranks(
        q,
        k,
        v,
        ranks,
        check_layout(layout),
        cu_seqlens,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_lse=return_lse,
    )


@hides_unknown
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    layout: Layout = "zigzag",
    cu_seqlens: Tensor | None = None,
    causal: bool = False,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
    **unknown: Any,
) -> Any:
    """`context_parallel_attention` over a group or a one-dimensional mesh, all of whose ranks are a ring.

    Args:
        group: the ranks. Default: all. The others: as in `context_parallel_attention`.
    """
    if unknown:
        raise no_argument(ring_attention, unknown)
    ranks = Ranks(axis_of("group", group), ALONE)
    return attention_of_ranks(
        q,
        k,
        v,
        ranks,
        check_layout(layout),
        cu_seqlens,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_lse=return_lse,
    )


@hides_unknown
def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    causal: bool = False,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
    **unknown: Any,
) -> Any:
    """`context_parallel_attention` over a group or a one-dimensional mesh, all of whose ranks divide heads.

    The layout is contiguous: rank n holds the n-th part of the sequence.

    Args:
        group: the ranks. Default: all. The others: as in `context_parallel_attention`.
    """
    if unknown:
        raise no_argument(ulysses_attention, unknown)
    ranks = Ranks(ALONE, axis_of("group", group))
    return attention_of_ranks(
        q,
        k,
        v,
        ranks,
        "contiguous",
        cu_seqlens,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_lse=return_lse,
    )


def attention_of_ranks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: Ranks,
    layout: Layout,
    cu_seqlens: Tensor | None,
    *,
    causal: bool = False,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Any:
    """`context_parallel_attention` over known ranks."""
    check.tensors(q, k, v)
    _check_local(q, k, v)
    q, k, v = ops.autocast_inputs(q, k, v)
    if cu_seqlens is None:
        if layout == "documents":
            raise ArgumentError("layout", repr(layout), "it is for packed documents: give cu_seqlens")
        check.qkv(q, k, v, 4, "(B, S, H, D)")
        check.same_batch(q, k)
    else:
        check.qkv(q, k, v, 3, "(T, H, D)")
        _check_documents(q, k, cu_seqlens)
    check.sinks(sinks, q)
    options = call_options(q, causal, window, scale, softcap, dropout_p, deterministic)
    check.flag("return_lse", return_lse)
    state = _rng_state(q, ranks, options)
    if cu_seqlens is not None:
        q, k, v = q[None], k[None], v[None]
    heads = ranks.ulysses
    if heads.size > 1:
        own = ulysses.heads_of_rank(q.shape[2], heads)
        q, k, v = ulysses.to_heads(q, k, v, heads)
        sinks = None if sinks is None else sinks[own]
    out, lse = _of_heads(q, k, v, ranks.ring, layout, cu_seqlens, sinks, state, options)
    if heads.size > 1:
        out = ulysses.to_sequence(out, heads)
        lse = ulysses.lse_to_sequence(lse, heads) if return_lse else lse
    if cu_seqlens is not None:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _check_local(*tensors: Tensor) -> None:
    theirs = None if torch.compiler.is_compiling() else sys.modules.get("torch.distributed.tensor")
    for name, x in zip("qkv", tensors, strict=True):
        if theirs is not None and isinstance(x, theirs.DTensor):
            limit = "it must be this rank's part of the sequence, which to_local() gives"
            raise ArgumentError(name, "a DTensor", limit)


def _check_documents(q: Tensor, k: Tensor, cu_seqlens: Tensor) -> None:
    on_cpu = isinstance(cu_seqlens, Tensor) and cu_seqlens.device.type == "cpu"
    check.cu_seqlens("cu_seqlens", cu_seqlens, cu_seqlens if on_cpu else q)
    if q.shape[0] != k.shape[0]:
        raise ShapeError("k", tuple(k.shape), f"it must have q's length, {q.shape[0]}, in packed sequences")


def _rng_state(q: Tensor, ranks: Ranks, options: CallOptions) -> Tensor | None:
    """The first rank's state, as that of a part: (seed, offset, 0, 0, first head, heads, own)."""
    if options.dropout_p == 0.0:
        return None
    state = ops.draw_rng_state(q.device)
    for axis in (ranks.ring, ranks.ulysses):
        if axis.size > 1:
            state = operators.from_first_rank(state, axis.group)
    Hq = q.shape[-2]
    own = ulysses.heads_of_rank(Hq, ranks.ulysses)
    return torch.cat([state, state.new_tensor([0, 0, own.start, Hq, own.stop - own.start])])


def _of_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    layout: Layout,
    cu_seqlens: Tensor | None,
    sinks: Tensor | None,
    state: Tensor | None,
    options: CallOptions,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's heads, (B, S, H, D); packed sequences have B = 1."""
    if axis.size > 1:
        packed = cu_seqlens is not None
        q, k, v = (x[0] if packed else x for x in (q, k, v))
        out, lse = operators.ring_attention(q, k, v, sinks, state, cu_seqlens, axis.group, layout, *options)
        return (out[None], lse[None]) if packed else (out, lse)
    if cu_seqlens is None:
        return ops.attention(q, k, v, None, sinks, state, options)
    longest = q.shape[1]
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        longest = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
    ends = cu_seqlens.to(q.device, non_blocking=True)
    out, lse = ops.attention_varlen(q[0], k[0], v[0], ends, ends, sinks, state, longest, longest, options)
    return out[None], lse[None]
