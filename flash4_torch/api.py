"""The public functions: check the arguments, fill in the defaults, one operator call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import backends, fast_path, ops
from .backends import Order
from .errors import ArgumentError
from .fast_path import Door, Returned
from .flex import repeated
from .flex.call import Mod, attend, functions_of, traced
from .flex_problem import FlexInputs, Mods
from .ops import check
from .ops import flex as flex_ops
from .ops.impl import describe_inputs
from .ops.keywords import hides_unknown, no_argument
from .problem import CallOptions, Inputs

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from typing_extensions import Unpack

Window = tuple[int | None, int | None]

_DENSE, _VARLEN = Door("attention"), Door("attention_varlen", varlen=True)
_FUNCTIONS = Door("attention with functions")
_SDPA = Door("scaled_dot_product_attention", Order(heads_first=True, out_heads_first=True))


class _Options(TypedDict, total=False):
    """Keywords of `attention_varlen` that do not affect its return type."""

    causal: bool
    window: Window
    scale: float | None
    softcap: float
    dropout_p: float
    sinks: Tensor | None
    deterministic: bool | None
    score_mod: Mod | None
    mask_mod: Mod | None
    block_mask: BlockMask | None


class _DenseOptions(_Options, total=False):
    attn_mask: Tensor | None


class _Sequences(TypedDict):
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


class _VarlenOptions(_Options, _Sequences, total=False):
    max_seqlen_q: int | Tensor | None
    max_seqlen_k: int | Tensor | None


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[_DenseOptions]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[_DenseOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[_DenseOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
@hides_unknown
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float = 0.0,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    **unknown: Any,
) -> Any:
    """Attention, softmax(scale * q k^T) v, in O(S) memory.

    Args:
        q: (B, Sq, Hq, D), bfloat16, float16, float32 or float64, any strides.
        k: (B, Sk, Hk, D); Hk divides Hq, and query head h reads KV head h // (Hq // Hk) (GQA, MQA).
        v: (B, Sk, Hk, Dv).
        causal: row i sees keys up to i + Sk - Sq (aligned to the bottom right).
        window: (left, right), row i sees keys from i + Sk - Sq - left to i + Sk - Sq + right; None: no bound.
            A negative bound leaves out the diagonal: (None, -1) is all keys before it, (-1, 3) the three
            after it. left + right must be at least 0. causal=True sets right to 0; a negative right beside it
            is an error.
        scale: factor on q k^T. Default: 1 / sqrt(D).
        softcap: c > 0 replaces a score x by c * tanh(x / c), before the mask. Default: 0, off.
        attn_mask: broadcastable to (B, Hq, Sq, Sk), never expanded in memory. Bool: True attends. Floating:
            added to the scores; it gets a gradient if it requires one. Not beside score_mod, mask_mod or
            block_mask.
        sinks: (Hq,), floating. One more score in every row's softmax, of a key whose value is 0: what a row
            gives to it, no key gets. It is neither scaled, capped nor masked, and gets a gradient.
        dropout_p: probability of dropping a weight, from 0 to 1; kept weights are multiplied by
            1 / (1 - dropout_p). torch's generator seeds it.
        deterministic: bitwise repeatable gradients. Default: torch.are_deterministic_algorithms_enabled().
        return_lse: also return lse, the log-sum-exp of each row's scores.
        score_mod: changes each score, after scale and softcap: score_mod(score, b, h, q_idx, kv_idx), a
            function of 0-dim tensors written in torch, as in `flex_attention`. h counts query heads, and
            positions begin with 0 for queries and keys alike. Tensors that it captures get gradients if they
            require them.
        mask_mod: mask_mod(b, h, q_idx, kv_idx), True where a query sees a key, beside causal and window.
        block_mask: a BlockMask, of `create_block_mask` for Sq and Sk, instead of a mask_mod: blocks that
            nobody sees are not computed.

    Returns:
        out (B, Sq, Hq, Dv), contiguous, in q's dtype; with `return_lse` (out, lse). lse (B, Hq, Sq) is the
        natural log, float32 (float64 for float64 inputs), before dropout, and differentiable; it counts the
        sinks. A row without a visible key gives out 0, lse -inf (with sinks the sink) and zero gradients.

    Raises:
        ArgumentError: an argument is outside its limits; the message names it, its value and the limit.
        KeywordError: there is no such argument; the message says what to use instead.
        TraceError: score_mod or mask_mod does what a kernel cannot do for a score.
        BackendError: no backend can serve the call; see `support`.
        DoubleBackwardError: second derivatives were asked for.

    Under autocast q, k and v are cast to the autocast dtype. The algorithm is FlashAttention-4's; see
    `flash4_torch.reference.tiled` for a readable version.
    """
    if unknown:
        raise no_argument(attention, unknown)
    signature = request = asked = None
    is_plain = score_mod is None and mask_mod is None and block_mask is None
    if not (is_plain or torch.compiler.is_dynamo_compiling()):
        alone = attn_mask is None and sinks is None and (deterministic is None or deterministic is False)
        if alone and type(window) is tuple and type(dropout_p) in (float, int) and dropout_p == 0:
            others = *window, causal, softcap
            rest = score_mod, block_mask, scale, True, return_lse, mask_mod, others, _FUNCTIONS
            request = repeated.Request(q, k, v, *rest)
            asked = repeated.lookup(request)
            if asked.call is not None:
                return asked.call.run(q, k, v, asked.captured, asked.lists)
    if is_plain and type(window) is tuple:
        flags = (*window, causal, scale, softcap, dropout_p, deterministic, return_lse)
        signature, call = fast_path.lookup(_DENSE, q, k, v, (attn_mask, sinks), flags)
        if call is not None:
            return call.run(q, k, v, attn_mask, sinks)
    if has_torch_function((q, k, v, attn_mask, sinks)) and ops.is_recorded(q, k, v, attn_mask, sinks):
        return handle_torch_function(
            attention,
            (q, k, v, attn_mask, sinks),
            q,
            k,
            v,
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
            attn_mask=attn_mask,
            sinks=sinks,
            dropout_p=dropout_p,
            deterministic=deterministic,
            return_lse=return_lse,
            score_mod=score_mod,
            mask_mod=mask_mod,
            block_mask=block_mask,
        )
    q, k, v, attn_mask, options = _dense_call(
        q, k, v, causal, window, scale, softcap, attn_mask, sinks, dropout_p, deterministic, return_lse
    )
    rng_state = _rng_state(q, options)
    if is_plain:
        out, lse = ops.attention(q, k, v, attn_mask, sinks, rng_state, options)
        inputs = Inputs(q, k, v, attn_mask, sinks)
        fast_path.record(signature, _DENSE, inputs, options, returned=Returned(return_lse))
    else:
        _refuse_beside_functions(attn_mask)
        functions = functions_of(score_mod, mask_mod, block_mask)
        given = Mods(sinks=sinks, rng_state=rng_state)
        mods = None if asked is None else traced(q, k, *functions, given)
        out, lse, _ = attend(q, k, v, functions, options, given, mods=mods)
        if request is not None and asked is not None and mods is not None:
            # Converted tensors are not the caller's.
            are_given = q is request.query and k is request.key and v is request.value
            if are_given and out.is_contiguous():
                repeated.record(request, asked, FlexInputs(q, k, v, mods), options)
        out = out.contiguous()
    return (out, lse) if return_lse else out


def _refuse_beside_functions(attn_mask: Tensor | None) -> None:
    if attn_mask is not None:
        limit = "it must be None beside score_mod, mask_mod or block_mask: a function can read the tensor"
        raise ArgumentError("attn_mask", f"a tensor of shape {tuple(attn_mask.shape)}", limit)


def _dense_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: Window,
    scale: float | None,
    softcap: float,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    dropout_p: float,
    deterministic: bool | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, CallOptions]:
    """Arguments of a dense call, checked and with defaults filled in."""
    check.tensors(q, k, v)
    q, k, v = ops.autocast_inputs(q, k, v)
    check.qkv(q, k, v, 4, "(B, S, H, D)")
    check.same_batch(q, k)
    attn_mask = check.attn_mask(attn_mask, q, k)
    check.sinks(sinks, q)
    options = call_options(q, causal, window, scale, softcap, dropout_p, deterministic)
    check.flag("return_lse", return_lse)
    return q, k, v, attn_mask, options


def call_options(
    q: Tensor,
    causal: bool,
    window: Window,
    scale: float | None,
    softcap: float,
    dropout_p: float,
    deterministic: bool | None,
) -> CallOptions:
    """The options of a call, checked and with defaults filled in."""
    band = check.band(causal, window)
    return CallOptions(
        scale=check.scale(scale, q.shape[-1]),
        window_left=band.left,
        window_right=band.right,
        softcap=check.softcap(softcap),
        dropout_p=check.probability(dropout_p),
        deterministic=(
            torch.are_deterministic_algorithms_enabled()
            if deterministic is None
            else check.flag("deterministic", deterministic)
        ),
    )


def _rng_state(q: Tensor, options: CallOptions) -> Tensor | None:
    return ops.draw_rng_state(q.device) if options.dropout_p > 0 else None


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[_VarlenOptions]
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[_VarlenOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[_VarlenOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
@hides_unknown
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    causal: bool = False,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    **unknown: Any,
) -> Any:
    """Attention over B sequences of different lengths, packed one after another without padding.

    Args:
        q: (Tq, Hq, D), all queries in sequence order.
        k: (Tk, Hk, D).
        v: (Tk, Hk, Dv).
        cu_seqlens_q: (B + 1,), int32 or int64; sequence b's queries begin at cu_seqlens_q[b] and end before
            cu_seqlens_q[b + 1]. It begins with 0, never decreases and ends with Tq; that is checked on the
            CPU only, because the host would have to wait for a GPU's values.
        cu_seqlens_k: (B + 1,), the same for k and v.
        max_seqlen_q: length of the longest sequence of queries, or an upper bound; an int, or a 0-dim tensor
            (the host then waits for its value). Default: Tq, which needs no synchronisation. On a GPU it
            costs time: tiles are launched as if every sequence had this length, and most of them are empty.
            Results change by rounding only.
        max_seqlen_k: the same for keys; default Tk.
        causal, window, scale, softcap, sinks, dropout_p, deterministic: as in `attention`, within each
            sequence.
        return_lse: also return lse (Hq, Tq).
        score_mod, mask_mod: as in `attention`; b counts sequences, and positions begin with 0 in each.
        block_mask: of positions within a sequence, for at least max_seqlen_q and max_seqlen_k; the same for
            all sequences, or made with B of them for the batch. A mask of the packed tensors' own positions,
            (Tq, Tk), belongs to `flex_attention` of one batch entry.

    Returns:
        out (Tq, Hq, Dv), or (out, lse); equal to `attention` on each sequence by itself. For dropout, each
        sequence counts as a batch entry.

    Raises:
        ArgumentError, KeywordError, BackendError, TraceError, DoubleBackwardError: as in `attention`.
    """
    if unknown:
        raise no_argument(attention_varlen, unknown)
    signature = None
    others = (cu_seqlens_q, cu_seqlens_k, sinks)
    is_plain = score_mod is None and mask_mod is None and block_mask is None
    if is_plain and type(window) is tuple:
        lengths = max_seqlen_q, max_seqlen_k
        flags = (*window, causal, scale, softcap, dropout_p, deterministic, return_lse, *lengths)
        signature, call = fast_path.lookup(_VARLEN, q, k, v, others, flags)
        if call is not None:
            return call.run(q, k, v, *others)
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sinks)
    if has_torch_function(tensors) and ops.is_recorded(*tensors):
        return handle_torch_function(
            attention_varlen,
            tensors,
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            dropout_p=dropout_p,
            deterministic=deterministic,
            return_lse=return_lse,
            score_mod=score_mod,
            mask_mod=mask_mod,
            block_mask=block_mask,
        )
    check.tensors(q, k, v)
    q, k, v = ops.autocast_inputs(q, k, v)
    check.qkv(q, k, v, 3, "(T, H, D)")
    check.cu_seqlens("cu_seqlens_q", cu_seqlens_q, q)
    check.cu_seqlens("cu_seqlens_k", cu_seqlens_k, q)
    check.same_sequences(cu_seqlens_q, cu_seqlens_k)
    check.sinks(sinks, q)
    options = call_options(q, causal, window, scale, softcap, dropout_p, deterministic)
    check.flag("return_lse", return_lse)
    max_seqlens = (
        check.max_seqlen("max_seqlen_q", max_seqlen_q, q.shape[0]),
        check.max_seqlen("max_seqlen_k", max_seqlen_k, k.shape[0]),
    )
    rng_state = _rng_state(q, options)
    if is_plain:
        out, lse = ops.attention_varlen(q, k, v, *others, rng_state, *max_seqlens, options)
        inputs = Inputs(q, k, v, None, sinks, None, cu_seqlens_q, cu_seqlens_k)
        fast_path.record(signature, _VARLEN, inputs, options, max_seqlens, Returned(return_lse))
    else:
        given = Mods(sinks=sinks, rng_state=rng_state, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        given = given._replace(max_seqlen_q=max_seqlens[0], max_seqlen_k=max_seqlens[1])
        out, lse, _ = attend(q, k, v, functions_of(score_mod, mask_mod, block_mask), options, given)
    return (out, lse) if return_lse else out


@hides_unknown
def support(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float = 0.0,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    **unknown: Any,
) -> dict[str, list[str]]:
    """Backends that can serve `attention` with the same arguments, and the reasons why the others cannot.

    Returns:
        A dict from each backend, in order of priority, to the sentences why it cannot serve the call; no
        sentence if it can. The first backend without a reason serves the call; FLASH4_BACKEND is a reason
        against all others. If an input requires a gradient, the backward's reasons are listed too, each with
        the prefix "backward: "; forward and backward each choose their backend. Nothing is computed.

    Raises:
        ArgumentError, KeywordError, TraceError: as in `attention`.
    """
    if unknown:
        raise no_argument(support, unknown)
    q, k, v, attn_mask, options = _dense_call(
        q, k, v, causal, window, scale, softcap, attn_mask, sinks, dropout_p, deterministic, return_lse
    )
    if score_mod is not None or mask_mod is not None or block_mask is not None:
        _refuse_beside_functions(attn_mask)
        mods = traced(q, k, *functions_of(score_mod, mask_mod, block_mask), Mods(sinks=sinks))
        return flex_ops.reasons(FlexInputs(q, k, v, mods), options, return_lse)
    mask_grad = attn_mask is not None and attn_mask.requires_grad
    sinks_grad = sinks is not None and sinks.requires_grad
    wants_grad = mask_grad or sinks_grad or any(x.requires_grad for x in (q, k, v))
    problem = describe_inputs(Inputs(q, k, v, attn_mask, sinks), options)
    reasons = backends.reasons(problem)
    if wants_grad:
        spec = problem.spec._replace(backward=True, dlse=return_lse, dmask=mask_grad)
        for name, why in backends.reasons(problem._replace(spec=spec)).items():
            reasons[name] += [f"backward: {sentence}" for sentence in why if sentence not in reasons[name]]
    return reasons


@hides_unknown
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **unknown: Any,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention with its exact contract, served by our backends.

    Args:
        query: (..., Hq, L, E): heads before the sequence, unlike `attention`.
        key: (..., H, S, E).
        value: (..., H, S, Ev).
        attn_mask: broadcastable to (..., Hq, L, S); bool (True attends) or floating (added).
        dropout_p: as in `attention`.
        is_causal: row i sees keys up to i (aligned to the top left, as torch does).
        scale: default 1 / sqrt(E).
        enable_gqa: lets Hq be a multiple of H.

    Returns:
        (..., Hq, L, Ev). A row without a visible key gives 0, as torch's does.

    Raises:
        ShapeError: key and value differ in length (torch would read past the end).
        RangeError: scale is NaN, or infinite in float32; dropout_p is NaN, negative or infinite.
        LayoutError: a tensor is sparse, or in a library's own layout.
        DeviceError: attn_mask alone is a meta tensor.
        ArgumentError: torch's `context_parallel` is active, which has to see torch's own function.
        KeywordError: there is no such argument; the message says what to use instead.
        Exception: any error that torch's function raises for the same arguments, otherwise.
    """
    if unknown:
        raise no_argument(scaled_dot_product_attention, unknown)
    check.not_in_torchs_context_parallel("query")
    signature, call = fast_path.lookup(
        _SDPA, query, key, value, (attn_mask, None), (dropout_p, is_causal, scale, enable_gqa)
    )
    if call is not None:
        out: Tensor = call.run(query, key, value, attn_mask, None)
        return out
    tensors = (query, key, value, attn_mask)
    if has_torch_function(tensors) and ops.is_recorded(*tensors):
        return handle_torch_function(
            scaled_dot_product_attention,
            tensors,
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    check.sdpa_lengths(key, value)
    if all(isinstance(x, Tensor) for x in (query, key, value)):
        query, key, value = ops.autocast_inputs(query, key, value)
    if not _serves_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
        # torch's function raises its own errors, and serves calls that have no (B, S, H, D) form.
        check.sdpa_extras(query, key, value, attn_mask, dropout_p)
        return check.STOCK_SDPA(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    Hk = max(key.shape[-3], value.shape[-3]) if query.dim() > 2 else 1
    q, k, v = _heads_last(query, batch), _heads_last(key, batch, Hk), _heads_last(value, batch, Hk)
    L, S = q.shape[1], k.shape[1]
    options = CallOptions(
        scale=check.scale(scale, q.shape[-1]),
        # Causal aligned to the top left, expressed as a bottom-right band.
        window_right=L - S if is_causal else None,
        dropout_p=float(dropout_p),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    mask = None if attn_mask is None else _mask_4d(attn_mask, batch, query.dim())
    out, _ = ops.attention(q, k, v, mask, None, _rng_state(q, options), options)
    if all(_is_transposed(x, y) for x, y in ((q, query), (k, key), (v, value))):
        fast_path.record(signature, _SDPA, Inputs(q, k, v, mask), options, returned=Returned(lse=False))
    return out.transpose(1, 2).reshape(*query.shape[:-3] and batch, *query.shape[-3:-2], L, v.shape[-1])


def _is_transposed(x: Tensor, heads_first: Tensor) -> bool:
    """Whether `x` is the other tensor with dimensions swapped, and nothing was broadcast."""
    return heads_first.dim() == 4 and x.shape == heads_first.transpose(1, 2).shape


def _serves_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> bool:
    """Whether torch would accept the call and `attention` can express it."""
    tensors = (query, key, value)
    if not all(isinstance(x, Tensor) and check.is_dense(x) and x.dim() >= 2 for x in tensors):
        return False
    if not (check.is_flag(is_causal) and check.is_flag(enable_gqa)) or not isinstance(
        dropout_p, (int, float)
    ):
        return False
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        # torch accepts whatever converts to a number, 0-dim tensors for example.
        return False
    if attn_mask is not None and not (isinstance(attn_mask, Tensor) and check.is_dense(attn_mask)):
        return False
    same = all(
        (x.dtype, x.device, x.dim()) == (query.dtype, query.device, query.dim()) and x.shape[-1] > 0
        for x in tensors
    )
    if not same or query.dtype not in check.DTYPES or not 0.0 <= dropout_p <= 1.0:
        return False
    if query.shape[-1] != key.shape[-1]:
        return False
    heads = [x.shape[-3] for x in tensors if x.dim() > 2]
    if heads and (0 in heads or not _heads_agree(heads, enable_gqa)):
        return False
    try:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
        scores = (*batch, *query.shape[-3:-2], query.shape[-2], key.shape[-2])
        if attn_mask is not None and torch.broadcast_shapes(attn_mask.shape, scores) != scores:
            return False
    except RuntimeError:
        return False
    if attn_mask is None:
        return True
    mask_fits = (
        attn_mask.dtype in (torch.bool, torch.float32, query.dtype) and attn_mask.device == query.device
    )
    return mask_fits and not is_causal


def _heads_agree(heads: list[int], enable_gqa: bool) -> bool:
    Hq, Hk, Hv = heads
    if enable_gqa:
        return Hk == Hv and Hq % Hk == 0
    # Compared one by one instead of in sets: symbolic sizes have no hash.
    return all(check.is_one_of(H, 1, Hq) for H in (Hk, Hv))


def _heads_last(x: Tensor, batch: torch.Size, H: int | None = None) -> Tensor:
    """(..., H, S, D), with batch and heads broadcast, as (B, S, H, D); a view up to four dimensions."""
    x = x if x.dim() > 2 else x.unsqueeze(0)
    x = x.expand(*batch, H or x.shape[-3], *x.shape[-2:])
    x = x.unsqueeze(0) if x.dim() == 3 else x.flatten(0, -4)
    return x.transpose(1, 2)


def _mask_4d(mask: Tensor, batch: torch.Size, rank: int) -> Tensor:
    """A mask that broadcasts to (..., H, L, S) of `rank` dimensions as a 4-D one."""
    if rank <= 4:
        return mask[(None,) * (4 - mask.dim())]
    mask = mask[(None,) * (rank - mask.dim())]
    return mask.expand(*batch, *mask.shape[-3:]).flatten(0, -4)
