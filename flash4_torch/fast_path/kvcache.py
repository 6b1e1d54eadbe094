"""The fast path of `attention_kvcache`; the law is that of `fast_path`.

signature, call = kvcache.lookup(tensors, bounds, flags)
if call is not None:
    return call(tensors, wants_lse)
...
kvcache.record(signature, flags, inputs, options)

Steps of a server are calls of one kind, whose sizes change: tokens, sequences, columns of the table, bounds.
A kind is checked once, by the slow path. What a new number of sequences, or new bounds decide is decided once
for these; tokens and columns decide nothing. A call of the very sizes of the one before is recognised by
torch's own check of all tensors (`repeated`).
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
from ..kvcache_problem import CacheExtent, CacheInputs, CacheOptions, CacheProblem
from ..ops.kvcache import check_values, describe
from .conditions import must_take_slow_path
from .repeated import Repeated

Kind = tuple[Any, ...]
"""What calls have in common whose sizes alone differ."""
Sizes = tuple[int, int, int]
"""B, max_seqlen_q and max_seqlen_k, from 1 on."""
Signature = tuple[Kind, Sizes]
Place = tuple[Any, ...]
"""Whether gradients are recorded, bounds and flags with their types, and which tensors there are."""

_MOST_KINDS, _MOST_SIZES = 1024, 1024
"""Kinds to remember, and sizes of each; when a memory is full, it is cleared."""
_MOST_TOKENS, _LONGEST = 1 << 28, 1 << 29
"""Calls of more tokens, or bounds above this, take the slow path, which knows who counts them."""
_PLAIN = frozenset({bool, int, float, type(None)})

_UNKNOWN: Any = object()
"""What stands for sizes that have not been looked at; None for those that the slow path must serve."""

_calls: dict[Kind, Calls] = {}
_repeated: dict[Place, Repeated[CacheCall]] = {}


class CacheCall(NamedTuple):
    """A prepared call of `attention_kvcache`."""

    launch: CacheLaunch
    shape: tuple[int, int, int, int] | None
    """out's, (B, Sq, Hq, Dv), or None if q is packed."""
    scales: tuple[int, int] | None
    """B and Hk, if the cache has 8-bit numbers."""

    def __call__(self, tensors: tuple[Any, ...], wants_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
        """out, and lse if it is wanted. tensors: as `lookup` takes them."""
        q, k_cache, v_cache, block_table, cu_seqlens_q, seqused_k, sinks, k_scale, v_scale, out = tensors
        if self.scales is not None:
            k_scale, v_scale = _of_heads(q, (k_scale, v_scale), self.scales)
        rest = (k_cache, v_cache, block_table, cu_seqlens_q, seqused_k, None, sinks, k_scale, v_scale)
        if (shape := self.shape) is None:
            results = self.launch(CacheInputs(q, *rest), out)
            return results if wants_lse else results[0]
        result, lse = self.launch(CacheInputs(q.flatten(0, 1), *rest), _packed(out))
        if out is None:
            out = result.view(shape)
        B, Sq, Hq, _ = shape
        return (out, lse.view(Hq, B, Sq).transpose(0, 1)) if wants_lse else out


class Calls:
    """The calls of one kind, which the slow path has served once, by their sizes."""

    __slots__ = ("backend", "by_sizes", "options", "problem")

    def __init__(self, problem: CacheProblem, options: CacheOptions):
        self.problem = problem
        self.options = options
        backend = backends.choose(problem)
        self.backend = backend if isinstance(backend, backends.PreparesCache) else None
        self.by_sizes: dict[Sizes, CacheCall | None] = {}

    def prepare(self, sizes: Sizes, tensors: tuple[Any, ...]) -> CacheCall | None:
        """The call of these sizes; None if it must take the slow path."""
        if len(self.by_sizes) >= _MOST_SIZES:
            self.by_sizes.clear()
        call = self.by_sizes[sizes] = self._prepared(sizes, *tensors)
        return call

    def _prepared(
        self,
        sizes: Sizes,
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
    ) -> CacheCall | None:
        (B, Sq, Sk), (_, _, _, _, Hq, Hk, page_size) = sizes, self.problem.extent
        is_packed = q.dim() == 3
        T = q.shape[0] if is_packed else B * Sq
        problem = self.problem.of_sizes(CacheExtent(B, T, Sq, Sk, Hq, Hk, page_size))
        # Nearly always it is the same one; where it is not, a call is not worth its preparation.
        if (backend := self.backend) is None or backends.choose(problem) is not backend:
            return None
        scales = None
        if problem.spec.cache_dtype.itemsize == 1:
            scales = B, Hk
            k_scale, v_scale = _of_heads(q, (k_scale, v_scale), scales)
        packed = q if is_packed else q.flatten(0, 1)
        rest = k_cache, v_cache, block_table, cu_seqlens_q, seqused_k, None, sinks, k_scale, v_scale
        launch = backend.prepare(CacheInputs(packed, *rest), problem, out if is_packed else _packed(out))
        if launch is None:
            return None
        if problem.spec.device == "cpu":
            launch = _checked(launch, self.options._replace(max_seqlen_q=Sq, max_seqlen_k=Sk))
        return CacheCall(launch, None if is_packed else (B, Sq, Hq, v_cache.shape[3]), scales)


def _of_heads(q: Tensor, scales: tuple[Tensor | None, ...], shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Views (B, Hk) of both scales."""
    k_scale, v_scale = ((one(q.device) if x is None else x).expand(shape) for x in scales)
    return k_scale, v_scale


def _packed(out: Tensor | None) -> Tensor | None:
    return None if out is None else out.view(out.shape[0] * out.shape[1], *out.shape[2:])


def lookup(
    tensors: tuple[Any, ...], bounds: tuple[Any, Any], flags: tuple[Any, ...]
) -> tuple[Signature | None, CacheCall | None]:
    """The call's signature (None if it must take the slow path), and the prepared call, if there is one.

    tensors: q, k_cache, v_cache, block_table, cu_seqlens_q, seqused_k, sinks, k_scale, v_scale and out, or
    None in their place. bounds: max_seqlen_q and max_seqlen_k. flags: everything else, all of it scalars.
    """
    if is_dynamo_compiling() or must_take_slow_path() or _is_any_autocast_enabled():
        return None, None
    try:
        place = is_grad_enabled(), *bounds, *flags, *map(type, bounds), *map(type, flags)
        place += tuple([x is None for x in tensors])
        repeated = _repeated.get(place)
        if repeated is not None and repeated.calls:
            call = repeated.find([x for x in tensors if x is not None])
            if call is not None and not _places(tensors) % ALIGNMENT:
                return None, call
        signature = _signature(tensors, *bounds, flags)
        calls = None if signature is None else _calls.get(signature[0])
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        # An argument that is none: the slow path reports it.
        return None, None
    if signature is None or calls is None:
        return signature, None
    call = calls.by_sizes.get(signature[1], _UNKNOWN)
    if call is _UNKNOWN:
        call = calls.prepare(signature[1], tensors)
    if call is not None:
        if repeated is None:
            if len(_repeated) >= _MOST_KINDS:
                _repeated.clear()
            repeated = _repeated[place] = Repeated()
        given = [x for x in tensors if x is not None]
        if repeated.follows_its_like(signature, given) and not _places(tensors) % ALIGNMENT:
            repeated.add(given, call)
    return signature, call


def _places(tensors: tuple[Any, ...]) -> int:
    """The addresses that a kind knows, as one number, a multiple of `ALIGNMENT` if all of them are."""
    q, k_cache, v_cache, _, _, _, sinks, k_scale, v_scale, out = tensors
    places: int = q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()
    for x in (sinks, k_scale, v_scale, out):
        if x is not None:
            places |= x.data_ptr()
    return places


def _signature(
    tensors: tuple[Any, ...], max_seqlen_q: Any, max_seqlen_k: Any, flags: tuple[Any, ...]
) -> Signature | None:
    """The kind and the sizes of a call, or None if sizes do not fit one another, or are none.

    Whatever the slow path decides, or refuses, depends on these and on nothing else.
    """
    q, k_cache, _, block_table, cu_seqlens_q, seqused_k, _, k_scale, v_scale, out = tensors
    q_shape = q.shape
    if len(q_shape) == 3:
        T, B = q_shape[0], cu_seqlens_q.shape[0] - 1
        Sq = T if max_seqlen_q is None else max_seqlen_q
        if out is not None and out.shape[0] != T:
            return None
        # The number of tokens is no part of the kind.
        kind: Kind = (3, *flags, *map(type, flags))
        first = 1
    else:
        T, B, Sq = q_shape[0] * q_shape[1], q_shape[0], q_shape[1]
        kind = (4, max_seqlen_q, type(max_seqlen_q), *flags, *map(type, flags))
        first = 0
    if block_table is None:
        room, fits = k_cache.shape[1], k_cache.shape[0] >= B
    else:
        rows, columns = block_table.shape
        room, fits = k_cache.shape[1] * columns, rows == B
    Sk = room if max_seqlen_k is None else max_seqlen_k
    if seqused_k is not None:
        fits = fits and seqused_k.shape[0] == B
    if not (fits and type(Sq) is int and type(Sk) is int and B > 0 and 0 < T <= _MOST_TOKENS):
        return None
    if not (0 < Sq <= _LONGEST and 0 < Sk <= _LONGEST):
        return None
    for scale in (k_scale, v_scale):
        if scale is not None and scale.dim() == 2:
            kind += (B,)
    may_need_grad = is_grad_enabled()
    for x in tensors:
        if x is None:
            kind += (None,)
            continue
        place = x.data_ptr()
        if (
            not (type(x) is Tensor or type(x) is Parameter)
            or not place
            or x.is_neg()
            or (may_need_grad and x.requires_grad)
        ):
            return None
        if x is block_table or x is cu_seqlens_q or x is seqused_k:
            kind += (x.dim(), x.dtype, x.get_device())
        elif x is q or x is out:
            kind += (x.shape[first:], x.stride(), x.dtype, x.get_device(), place % ALIGNMENT)
        else:
            kind += (x.shape, x.stride(), x.dtype, x.get_device(), place % ALIGNMENT)
    return kind, (B, Sq, Sk)


def record(
    signature: Signature | None,
    flags: tuple[Any, ...],
    inputs: CacheInputs,
    options: CacheOptions,
) -> None:
    """Remembers the kind of this call, which the slow path has served. inputs: packed."""
    if signature is None or signature[0] in _calls or not _PLAIN.issuperset(map(type, flags)):
        return
    if len(_calls) >= _MOST_KINDS:
        _calls.clear()
    _calls[signature[0]] = Calls(describe(inputs, options), options)


def _checked(launch: CacheLaunch, options: CacheOptions) -> CacheLaunch:
    """The launch after a look at the lengths, which are the host's."""

    def checked(inputs: CacheInputs, out: Tensor | None) -> tuple[Tensor, Tensor]:
        check_values(inputs, options)
        return launch(inputs, out)

    return checked


def clear() -> None:
    """Forgets all calls; the next one of each kind takes the slow path."""
    _calls.clear()
    _repeated.clear()
