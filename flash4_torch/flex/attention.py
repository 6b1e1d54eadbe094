"""FlexAttention's functions: torch's contract, checked, as calls of the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ..errors import ArgumentError, DeviceError, DtypeError, ShapeError
from ..flex_problem import FlexInputs
from ..ops import CallOptions, autocast_inputs, check
from ..ops import flex as ops
from . import repeated
from .call import Functions, Mod, Results, attend, functions_of, traced
from .repeated import Request

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = ...,
    block_mask: BlockMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
    kernel_options: dict[str, Any] | None = ...,
    *,
    return_aux: None = ...,
) -> Tensor: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = ...,
    block_mask: BlockMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    return_lse: Literal[True],
    kernel_options: dict[str, Any] | None = ...,
    return_aux: None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = ...,
    block_mask: BlockMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
    kernel_options: dict[str, Any] | None = ...,
    *,
    return_aux: AuxRequest,
) -> tuple[Tensor, AuxOutput]: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = ...,
    block_mask: BlockMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: bool = ...,
    kernel_options: dict[str, Any] | None = ...,
    *,
    return_aux: AuxRequest | None = ...,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]: ...
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention`, in O(S) memory without compiling anything.

    Args:
        query: (B, Hq, Sq, D), bfloat16, float16, float32 or float64, any strides.
        key: (B or 1, Hk, Sk, D); with `enable_gqa` Hk divides Hq, else it is Hq. It may be narrower than
            query, as float8 is, and is converted to query's dtype then.
        value: (B or 1, Hk, Sk, Dv), likewise.
        score_mod: changes each scaled score: score_mod(score, b, h, q_idx, kv_idx), a function of 0-dim
            tensors written in torch. The score is float32 (float64 for float64), the indices are int32.
            Tensors that it captures get gradients if they require them.
        block_mask: a BlockMask, torch's or of `create_block_mask`, for these lengths. Default: all is seen.
            Only the blocks that it lists are visited, and its mask_mod decides on scores of partial ones.
        scale: factor on the product of query and key. Default: 1 / sqrt(D).
        enable_gqa: query heads h // (Hq // Hk) share a KV head.
        return_lse: also return lse, the log-sum-exp of each row's scores.
        kernel_options: torch's, which are hints for its kernels; nothing of them is used.
        return_aux: torch's newer spelling of `return_lse`: AuxRequest(lse=True). With max_scores=True also
            the largest score of each row, after score_mod and masks: for that plain torch goes over the
            scores once more, on every backend.

    Returns:
        out (B, Hq, Sq, Dv) in query's dtype; with `return_lse` (out, lse), lse (B, Hq, Sq) natural, float32
        (float64 for float64), differentiable; with `return_aux` (out, AuxOutput(lse, max_scores)), where
        max_scores (B, Hq, Sq) has lse's dtype and no gradient. A row that sees nothing gives out 0, lse and
        max_scores -inf and no gradient.

    Raises:
        ArgumentError: an argument is outside its limits.
        TraceError: a function uses something that a kernel cannot do for a score; the message names the
            operation and the line.
        BackendError: no backend can serve the call; see `flex_support`.
        DoubleBackwardError: second derivatives were asked for.

    Functions are traced: run on numbers without values, to record what they do; no source is read. A function
    that reads numbers, tensors and functions alone is traced again only when one of these has changed, values
    of tensors aside; one that reads lists, dicts or properties is traced in each call, for milliseconds.
    """
    _check_outputs(return_lse, return_aux)
    has_max = return_aux is not None and return_aux.max_scores
    has_lse = return_lse or (return_aux is not None and return_aux.lse)
    request = asked = largest = None
    has_options = kernel_options is not None and type(kernel_options) is not dict
    if not (torch.compiler.is_dynamo_compiling() or has_max or has_options):
        request = Request(query, key, value, score_mod, block_mask, scale, enable_gqa, has_lse)
        asked = repeated.lookup(request)
    if asked is not None and asked.call is not None:
        found = asked.call.run(query, key, value, asked.captured, asked.lists)
        out, lse = found if has_lse else (found, None)
    else:
        query, key, value = checked(query, key, value, enable_gqa, kernel_options)
        functions = functions_of(score_mod, None, block_mask)
        options = _options(check.scale(scale, query.shape[-1]))
        q, k, v = _heads_last(query, key, value)
        mods = None if asked is None else traced(q, k, *functions)
        results = attend(q, k, v, functions, options, max_scores=has_max, mods=mods)
        out, lse, largest = _heads_first(results, query)
        if request is not None and asked is not None and mods is not None:
            # Converted and expanded tensors are not the caller's.
            are_given = query is request.query and key is request.key and value is request.value
            if are_given and key.shape[0] == query.shape[0]:
                repeated.record(request, asked, FlexInputs(q, k, v, mods), options)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=largest)
    return (out, lse) if return_lse else out


def attend_heads_first(
    query: Tensor, key: Tensor, value: Tensor, functions: Functions, scale: float, max_scores: bool
) -> Results:
    """Results for checked tensors (B, H, S, D), out (B, Hq, Sq, Dv)."""
    q, k, v = _heads_last(query, key, value)
    return _heads_first(attend(q, k, v, functions, _options(scale), max_scores=max_scores), query)


def _options(scale: float) -> CallOptions:
    return CallOptions(scale, deterministic=torch.are_deterministic_algorithms_enabled())


def _heads_first(results: Results, query: Tensor) -> Results:
    """Results with out (B, Hq, Sq, Dv), contiguous if query is."""
    out = results.out.transpose(1, 2)
    return results._replace(out=out.contiguous() if query.is_contiguous() else out)


def flex_support(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> dict[str, list[str]]:
    """Backends that can serve `flex_attention` with the same arguments, and why the others cannot.

    Returns:
        A dict as `support` returns: from each backend, in order of priority, to the sentences why it cannot
        serve the call; no sentence if it can. If an input or a tensor that score_mod captures requires a
        gradient, the backward's reasons follow, each with the prefix "backward: ". Functions are traced, and
        no score is computed.

    Raises:
        ArgumentError, TraceError: as in `flex_attention`.
    """
    _check_outputs(return_lse, return_aux)
    query, key, value = checked(query, key, value, enable_gqa, kernel_options)
    q, k, v = _heads_last(query, key, value)
    mods = traced(q, k, *functions_of(score_mod, None, block_mask))
    options = _options(check.scale(scale, q.shape[-1]))
    has_lse = return_lse or (return_aux is not None and return_aux.lse)
    return ops.reasons(FlexInputs(q, k, v, mods), options, has_lse)


def _check_outputs(return_lse: bool, return_aux: AuxRequest | None) -> None:
    check.flag("return_lse", return_lse)
    if return_aux is not None and return_lse:
        raise ArgumentError("return_lse", return_lse, "it must be False beside return_aux")


def checked(
    query: Any, key: Any, value: Any, enable_gqa: Any, kernel_options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors of a call in query's dtype, or that of autocast, checked.

    Raises:
        ArgumentError: as in `flex_attention`.
    """
    if all(isinstance(x, Tensor) and check.is_dense(x) for x in (query, key, value)):
        query, key, value = autocast_inputs(query, key, value)
    _check(query, key, value, enable_gqa, kernel_options)
    return query, key.to(query.dtype), value.to(query.dtype)


def _heads_last(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, S, H, D) of (B or 1, H, S, D) each, with the first one's B."""
    B = tensors[0].shape[0]
    return tuple(x.expand(B, *x.shape[1:]).transpose(1, 2) for x in tensors)


def _check(query: Any, key: Any, value: Any, enable_gqa: bool, kernel_options: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise ArgumentError(name, type(x).__name__, "it must be a tensor")
        if not check.is_dense(x):
            raise check.not_dense(name, x)
        if x.dim() != 4:
            raise ShapeError(name, tuple(x.shape), "it must be (B, H, S, D), 4 dimensions")
        if query.dtype not in check.DTYPES:
            raise DtypeError("query", query.dtype, "it must be bfloat16, float16, float32 or float64")
        is_narrower = x.dtype.is_floating_point and x.dtype.itemsize < query.dtype.itemsize
        if x.dtype != query.dtype and not is_narrower:
            raise DtypeError(name, x.dtype, f"it must have query's dtype, {query.dtype}, or be narrower")
        if x.device != query.device:
            raise DeviceError(name, x.device, f"it must be on query's device, {query.device}")
    if key.shape[:3] != value.shape[:3]:
        raise ShapeError("value", tuple(value.shape), f"it must begin like key, {tuple(key.shape[:3])}")
    if query.shape[-1] != key.shape[-1] or 0 in (query.shape[-1], value.shape[-1]):
        raise ShapeError("key", tuple(key.shape), f"its last dimension must be query's, {query.shape[-1]}")
    if not check.is_one_of(key.shape[0], 1, query.shape[0]):
        raise ShapeError("key", tuple(key.shape), f"its batch size must be query's, {query.shape[0]}, or 1")
    check.flag("enable_gqa", enable_gqa)
    Hq, Hk = query.shape[1], key.shape[1]
    if not enable_gqa and Hq != Hk:
        limit = f"it must have query's {Hq} heads; enable_gqa=True lets query heads share KV heads"
        raise ShapeError("key", tuple(key.shape), limit)
    if Hk < 1 or Hq < 1 or Hq % Hk:
        raise ShapeError("query", tuple(query.shape), f"its {Hq} heads must be a multiple of key's {Hk}")
    if kernel_options is not None and not isinstance(kernel_options, dict):
        raise ArgumentError("kernel_options", type(kernel_options).__name__, "it must be a dict or None")
