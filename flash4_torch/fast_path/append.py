"""The fast path of `append_kvcache`; the law is that of `fast_path`.

place, call = append.lookup(tensors, interleaved)
if call is not None:
    return call(tensors)
...
append.record(place, tensors, interleaved)

All layers of a model append alike in one step: the third one is recognised (`repeated`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_any_autocast_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from ..backends import ALIGNMENT
from ..backends.kvcache.append import AppendLaunch
from ..ops import kvcache_append
from .conditions import must_take_slow_path
from .repeated import Repeated

Place = tuple[Any, ...]
"""Whether gradients are recorded, the flag and its type, whether q is rotated in place, and which tensors
there are."""

_MOST_PLACES = 1024
"""Places to remember; when the memory is full, it is cleared."""

_repeated: dict[Place, Repeated[AppendCall]] = {}


class Tensors(NamedTuple):
    """The tensors of a call of `append_kvcache`, None in place of those that are not given."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    q: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    q_out: Tensor | None
    """These ten are read and written by whole vectors."""
    slot_mapping: Tensor | None
    block_table: Tensor | None
    seqused_k: Tensor | None
    cu_seqlens: Tensor | None
    positions: Tensor | None

    def given(self) -> list[Tensor]:
        """Those that there are, each one once: q may be q_out."""
        tensors = self[:9] + self[10:] if self.q_out is self.q else self
        return [x for x in tensors if x is not None]

    def with_q_out(self) -> Tensors:
        """The same call, which says where rotated q goes."""
        if self.q is None or self.q_out is not None:
            return self
        return self._replace(q_out=torch.empty_like(self.q, memory_format=torch.contiguous_format))

    def are_aligned(self) -> bool:
        places = 0
        for x in self[:10]:
            if x is not None:
                places |= x.data_ptr()
        return not places % ALIGNMENT


class AppendCall(NamedTuple):
    """A prepared call of `append_kvcache`."""

    launch: AppendLaunch
    interleaved: bool

    def __call__(self, tensors: Tensors) -> Tensor | None:
        """Appends, and returns rotated q."""
        x = tensors.with_q_out()
        self.launch(kvcache_append.describe(*arguments(x, self.interleaved)))
        kvcache_append.note_change(x.k_cache, x.v_cache, x.q_out)
        return x.q_out


def arguments(x: Tensors, interleaved: bool) -> tuple[Any, ...]:
    """What the slow path gives the operator."""
    sequences = 1 if x.seqused_k is None else x.seqused_k.shape[0]
    slots, positions = (
        y if y is None or y.dim() == 1 else y.reshape(-1) for y in (x.slot_mapping, x.positions)
    )
    k_scale, v_scale = (
        y if y is None else y.expand(sequences, x.k.shape[-2]) for y in (x.k_scale, x.v_scale)
    )
    where = slots, x.block_table, x.seqused_k, x.cu_seqlens
    rotary = None if x.q is x.q_out else x.q, positions, x.cos, x.sin, interleaved
    return x.k, x.v, x.k_cache, x.v_cache, *where, *rotary, k_scale, v_scale, x.q_out


def lookup(tensors: Tensors, interleaved: Any) -> tuple[Place | None, AppendCall | None]:
    """The call's place (None if it must take the slow path), and the prepared call, if there is one."""
    if is_dynamo_compiling() or must_take_slow_path() or _is_any_autocast_enabled():
        return None, None
    try:
        in_place = tensors.q_out is tensors.q
        place = (is_grad_enabled(), interleaved, type(interleaved), in_place, *[x is None for x in tensors])
        repeated = _repeated.get(place)
        if repeated is not None and repeated.calls:
            call = repeated.find(tensors.given())
            if call is not None and tensors.are_aligned():
                return place, call
    except (TypeError, ValueError, RuntimeError, AttributeError):
        # An argument that is none: the slow path reports it.
        return None, None
    return place, None


def record(place: Place | None, tensors: Tensors, interleaved: bool) -> None:
    """Remembers this call, which the slow path has served, if it is like the one before."""
    if place is None:
        return
    if place not in _repeated:
        if len(_repeated) >= _MOST_PLACES:
            _repeated.clear()
        _repeated[place] = Repeated()
    repeated, given = _repeated[place], tensors.given()
    if repeated.follows_its_like(None, given) and tensors.are_aligned() and _is_plain(tensors, given):
        call = kvcache_append.describe(*arguments(tensors.with_q_out(), interleaved))
        launch = kvcache_append.prepare(call)
        repeated.add(given, AppendCall(launch, interleaved))


def _is_plain(tensors: Tensors, given: list[Tensor]) -> bool:
    """Whether nobody asks for gradients, and there is something to append for some sequence."""
    if not all((type(x) is Tensor or type(x) is Parameter) and x.numel() and not x.is_neg() for x in given):
        return False
    inputs = tensors.k, tensors.v, tensors.q
    return not (is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs))


def clear() -> None:
    """Forgets all calls."""
    _repeated.clear()
