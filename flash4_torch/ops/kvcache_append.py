"""The operators beside attention over a KV cache: appending to one, and merging partial results.

`append_kvcache` writes rows of k and v to the caches, and rotated q to q_out; tensors are (B, S, H, D), or
packed (T, H, D), and slot_mapping and positions are (T,) in either case, T tokens. k_scale and v_scale are
(sequences, Hk), with slots (1, Hk). q_out is present exactly where q is rotated; without q it is rotated in
place, because an operator's argument is either read or written.

`merge_states` takes lists of tensors, (N, T, Hq, Dv) and (N, Hq, T) or with (B, Sq) in place of T, each with
N parts of its own.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..backends.kvcache import append as append_backend
from ..backends.kvcache import merge as merge_backend
from ..errors import NoGradientError, RangeError
from ..reference.kvcache import Append
from .schema import LIBRARY, define, save_nothing, without_gradients

SCHEMAS = {
    "append_kvcache": (
        "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? slot_mapping, "
        "Tensor? block_table, Tensor? seqused_k, Tensor? cu_seqlens, Tensor? q, Tensor? positions, "
        "Tensor? cos, Tensor? sin, bool interleaved, Tensor? k_scale, Tensor? v_scale, Tensor(c!)? q_out) "
        "-> ()"
    ),
    "merge_states": "(Tensor[] outs, Tensor[] lses) -> (Tensor out, Tensor lse)",
}

# As for the other operators: results depend on strides only in that kernels read any.
for _name, _signature in SCHEMAS.items():
    define(_name, _signature)

_append_kvcache = torch.ops.flash4.append_kvcache.default
_merge_states = torch.ops.flash4.merge_states.default


def append_kvcache(*arguments: Any) -> None:
    """The operator below autograd: what it writes has no history."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        _append_kvcache(*(x.detach() if isinstance(x, Tensor) else x for x in arguments))
    else:
        with torch._C._AutoDispatchBelowAutograd():
            _append_kvcache(*arguments)
        note_change(arguments[2], arguments[3], arguments[-1])


def note_change(*written: Tensor | None) -> None:
    """Tells autograd of tensors that it may have saved: kernels write unseen. A graph knows by itself."""
    if not torch.compiler.is_compiling():
        increment_version([x for x in written if x is not None and not x.is_inference()])


def prepare(call: Append) -> append_backend.AppendLaunch:
    """What serves calls whose tensors are like these (`append_backend.prepare`)."""
    launch = append_backend.prepare(call)
    if call.k.device.type != "cpu":
        return launch

    def checked(call: Append) -> None:
        _check_values(call)
        launch(call)

    return checked


def without_gradient(function: str, x: Tensor, inputs: tuple[Tensor | None, ...]) -> Tensor:
    """`x`, which `function` has made of `inputs`; where a gradient may be asked for, a backward through it
    raises NoGradientError.

    A compiled graph cannot hold such an error for later, so that it is raised at once.
    """
    wanted = [i for i in inputs if i is not None and i.requires_grad]
    if not (torch.is_grad_enabled() and wanted):
        return x
    if torch.compiler.is_compiling():
        raise NoGradientError(function)
    return _WithoutGradient.apply(function, x.detach(), *wanted)


class _WithoutGradient(torch.autograd.Function):
    """Its backward names the function that has none."""

    @staticmethod
    def forward(ctx: Any, function: str, x: Tensor, *inputs: Tensor) -> Tensor:
        ctx.function = function
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NoGradientError(ctx.function)


def merge_states(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The operator; a backward through its results raises NoGradientError."""
    plain = not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
    if plain and not (torch.is_grad_enabled() and any(x.requires_grad for x in (*outs, *lses))):
        with torch._C._AutoDispatchBelowAutograd():
            return _merge_states(outs, lses)
    return _merge_states(outs, lses)


def describe(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor | None,
    block_table: Tensor | None,
    seqused_k: Tensor | None,
    cu_seqlens: Tensor | None,
    q: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    q_out: Tensor | None,
) -> Append:
    """The call with these arguments of the operator, as backends take it."""
    if k.dim() == 3:
        k, v = k[None], v[None]
        q, q_out = (None if x is None else x[None] for x in (q, q_out))
    if seqused_k is not None and not len(seqused_k):
        # Packed tokens that belong to no sequence, as if there were an empty one before them.
        seqused_k = seqused_k.new_zeros(1)
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.new_zeros(2)
        block_table = None if block_table is None else block_table.new_zeros(1, block_table.shape[1])
    return Append(
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slot_mapping,
        block_table=block_table,
        seqused_k=seqused_k,
        cu_seqlens=cu_seqlens,
        positions=positions,
        cos=cos,
        sin=sin,
        interleaved=interleaved,
        k_scale=k_scale,
        v_scale=v_scale,
        q=q_out if q is None else q,
        q_out=q_out,
    )


def _append(*arguments: Any) -> None:
    call = describe(*arguments)
    if call.k.device.type == "cpu":
        _check_values(call)
    append_backend.append(call)


def _check_values(x: Append) -> None:
    """Requires of numbers on the CPU that every token has its row and its position; to read a GPU's, the host
    would have to wait."""
    n, S = x.k.shape[:2]
    if x.slot_mapping is not None:
        slots, is_stored = x.k_cache.shape[0] * x.k_cache.shape[1], x.slot_mapping >= 0
        _require_below(
            "slot_mapping", x.slot_mapping, slots, f"the cache has {slots} slots; negative ones skip"
        )
        if x.positions is not None:
            _check_positions(x, x.positions[is_stored])
    elif x.seqused_k is not None:
        before = x.seqused_k.tolist()
        ends = [S * b for b in range(n + 1)] if x.cu_seqlens is None else x.cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] > n * S or any(b < a for a, b in pairwise(ends)):
            limit = f"it must begin with 0, not decrease, and end with at most the packed length, {n * S}"
            raise RangeError("cu_seqlens", ends, limit)
        after = [length + b - a for length, (a, b) in zip(before, pairwise(ends), strict=True)]
        _check_lengths(x, before, after)
        if x.positions is None:
            last = [end - 1 for length, end in zip(before, after, strict=True) if end > length]
            _check_positions(x, torch.tensor(last))
        else:
            _check_positions(x, x.positions[: ends[-1]])


def _check_lengths(x: Append, before: list[int], after: list[int]) -> None:
    """Requires room for all keys of a sequence, and pages for the new ones."""
    pages, page_size = x.k_cache.shape[:2]
    room = page_size if x.block_table is None else page_size * x.block_table.shape[1]
    for b, (first, end) in enumerate(zip(before, after, strict=True)):
        if first < 0:
            raise RangeError("seqused_k", first, "it must be at least 0")
        if end == first:
            continue
        if end > room:
            limit = f"with {end - first} more keys, sequence {b} would have {end}, and it has room for {room}"
            raise RangeError("seqused_k", first, limit)
        if x.block_table is not None:
            own = x.block_table[b, first // page_size : -(-end // page_size)]
            _require_within("block_table", own, pages, f"pages are 0 to {pages - 1}")


def _check_positions(x: Append, positions: Tensor) -> None:
    if x.cos is not None:
        rows = x.cos.shape[0]
        _require_within("positions", positions, rows, f"cos and sin have rows 0 to {rows - 1}")


def _require_within(name: str, values: Tensor, end: int, limit: str) -> None:
    if values.numel() and (lowest := int(values.min())) < 0:
        raise RangeError(name, lowest, limit)
    _require_below(name, values, end, limit)


def _require_below(name: str, values: Tensor, end: int, limit: str) -> None:
    if values.numel() and (highest := int(values.max())) >= end:
        raise RangeError(name, highest, limit)


def _append_fake(k: Tensor, *arguments: Any) -> None:
    """What is written has no shape to tell."""


def _merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    is_packed = outs[0].dim() == 4
    if is_packed:
        outs, lses = [x[:, None] for x in outs], [x[:, None] for x in lses]
    out, lse = merge_backend.merge(outs, lses)
    return (out[0], lse[0]) if is_packed else (out, lse)


def _merge_fake(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    return outs[0].new_empty(outs[0].shape[1:]), lses[0].new_empty(lses[0].shape[1:])


LIBRARY.impl("append_kvcache", _append, "CompositeExplicitAutograd")
LIBRARY.impl("merge_states", _merge, "CompositeExplicitAutograd")
torch.library.register_fake("flash4::append_kvcache", _append_fake, lib=LIBRARY)
torch.library.register_fake("flash4::merge_states", _merge_fake, lib=LIBRARY)
torch.library.register_autograd(
    "flash4::merge_states", without_gradients("merge_states"), setup_context=save_nothing, lib=LIBRARY
)
