"""The fast path of `attention_kvcache`; the law is that of `fast_path`.

signature, call = kvcache.lookup(tensors, flags)
if call is not None:
    return call(*tensors)
...
kvcache.record(signature, inputs, options)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, is_grad_enabled
from torch._C import _is_any_autocast_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from ..backends import ALIGNMENT
from ..backends import kvcache as backends
from ..backends.constants import one
from ..backends.kvcache import CacheLaunch
from ..kvcache_problem import CacheInputs, CacheOptions
from ..ops.kvcache import check_values, describe
from .conditions import must_take_slow_path

Signature = tuple[Any, ...]

_MOST = 4096
"""Signatures to remember; when the memory is full, it is cleared."""
_PLAIN = frozenset({bool, int, float, type(None)})

_calls: dict[Signature, CacheCall | None] = {}


class CacheCall(NamedTuple):
    """A prepared call of `attention_kvcache`."""

    launch: CacheLaunch
    shape: tuple[int, ...]
    """Shape of out, (B, Sq, Hq, Dv) or (T, Hq, Dv)."""
    scales: tuple[int, int] | None
    """B and Hk, if the cache has 8-bit numbers."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor | None,
        cu_seqlens_q: Tensor | None,
        seqused_k: Tensor | None,
        sinks: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        shape = self.shape
        if self.scales is not None:
            k_scale, v_scale = (
                (one(q.device) if x is None else x).expand(self.scales) for x in (k_scale, v_scale)
            )
        tensors = (k_cache, v_cache, block_table, cu_seqlens_q, seqused_k, None, sinks, k_scale, v_scale)
        if len(shape) == 3:
            return self.launch(CacheInputs(q, *tensors), out)
        B, Sq, Hq, Dv = shape
        packed_out = None if out is None else out.view(B * Sq, Hq, Dv)
        result, lse = self.launch(CacheInputs(q.view(B * Sq, Hq, -1), *tensors), packed_out)
        return result.view(shape) if out is None else out, lse.view(Hq, B, Sq).transpose(0, 1)


def lookup(tensors: tuple[Any, ...], flags: tuple[Any, ...]) -> tuple[Signature | None, CacheCall | None]:
    """The call's signature (None if it must take the slow path), and the prepared call, if there is one.

    tensors: q, k_cache, v_cache, block_table, cu_seqlens_q, seqused_k, sinks, k_scale, v_scale and out, or
    None in their place. flags: everything else, all of it scalars.
    """
    if is_dynamo_compiling() or must_take_slow_path() or _is_any_autocast_enabled():
        return None, None
    may_need_grad = is_grad_enabled()
    signature: Signature = (*flags, *map(type, flags))
    try:
        for x in tensors:
            if x is None:
                signature += (None,)
                continue
            place = x.data_ptr()
            if (
                not (type(x) is Tensor or type(x) is Parameter)
                or not place
                or x.is_neg()
                or (may_need_grad and x.requires_grad)
            ):
                return None, None
            signature += (x.shape, x.stride(), x.dtype, x.get_device(), place % ALIGNMENT)
        return signature, _calls.get(signature)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        # An argument that is none: the slow path reports it.
        return None, None


def record(
    signature: Signature | None,
    flags: tuple[Any, ...],
    inputs: CacheInputs,
    options: CacheOptions,
    shape: tuple[int, ...],
    out: Tensor | None,
) -> None:
    """Prepares calls of this signature, after the slow path has served one.

    inputs, out: packed, with scales of heads. shape: that of out as the caller gets it.
    """
    if signature is None or signature in _calls or not _PLAIN.issuperset(map(type, flags)):
        return
    if len(_calls) >= _MOST:
        _calls.clear()
    _calls[signature] = _prepared(inputs, options, shape, out)


def _prepared(
    inputs: CacheInputs, options: CacheOptions, shape: tuple[int, ...], out: Tensor | None
) -> CacheCall | None:
    problem = describe(inputs, options)
    backend = backends.choose(problem)
    if inputs.causal is not None or not isinstance(backend, backends.PreparesCache):
        return None
    launch = backend.prepare(inputs, problem, out)
    if launch is None:
        return None
    if problem.spec.device == "cpu":
        launch = _checked(launch, options)
    scales = None if inputs.k_scale is None else (problem.extent.B, problem.extent.Hk)
    return CacheCall(launch, shape, scales)


def _checked(launch: CacheLaunch, options: CacheOptions) -> CacheLaunch:
    """The launch after a look at the lengths, which are the host's."""

    def checked(inputs: CacheInputs, out: Tensor | None) -> tuple[Tensor, Tensor]:
        check_values(inputs, options)
        return launch(inputs, out)

    return checked


def clear() -> None:
    """Forgets all signatures; the next call of each takes the slow path."""
    _calls.clear()
