"""Ring attention: each rank keeps its queries, and in hop t works on the keys of the rank t before it.

Keys and values of the next hop travel under the computation of this one, straight from the rank that owns
them: what of them nobody sees stays at home, and a hop without work is no hop. Partial outputs are merged in
float32 by their log-sum-exps. The backward takes the log-sum-exp of whole rows, so that the weights of every
tile are final; dQ is summed up in one workspace of the kernels where they can, and the gradients of keys are
sent back to their owner, who adds them in float32 and in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RangeError
from ..ops import schema
from ..ops.check import cu_seqlens_values
from ..ops.kvcache_append import merge_states
from ..ops.parts import QueryGradient, RunningOut
from ..problem import CallOptions, Saved
from ..reference import sinks as sink_rows
from ..reference.scoring import working_dtype
from .groups import Axis, group_of
from .layout import Shards
from .plan import ORIGIN_MULTIPLE, Documents, Hop, Problem, Span, Tile, hop
from .transfer import Message, Transfer, connect


class Ring(NamedTuple):
    """A call on this rank."""

    axis: Axis
    problem: Problem
    options: CallOptions
    rng_state: Tensor | None
    """Dropout's state of a part, int64 (7,): where this rank's heads begin included."""

    def hop(self, distance: int) -> Hop:
        """What this rank does with the keys of the rank `distance` before it."""
        rank, size = self.axis.rank, self.axis.size
        return hop(self.problem, rank, (rank - distance) % size)

    @property
    def tiles(self) -> int:
        """Tiles of all hops."""
        return sum(len(self.hop(distance).tiles) for distance in range(self.axis.size))

    def hop_of_reader(self, distance: int) -> Hop:
        """What the rank `distance` after this one does with this one's keys."""
        rank, size = self.axis.rank, self.axis.size
        return hop(self.problem, (rank + distance) % size, rank)

    def peers(self, distance: int) -> tuple[int, int]:
        """The ranks before and after this one."""
        rank, size = self.axis.rank, self.axis.size
        return (rank - distance) % size, (rank + distance) % size


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    cu_seqlens: Tensor | None,
    group: str,
    layout: str,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """The operator `ring_attention`."""
    if cu_seqlens is not None:
        out, lse = _forward(q[None], k[None], v[None], sinks, rng_state, cu_seqlens, group, layout, *options)
        return out[0], lse[0]
    return _forward(q, k, v, sinks, rng_state, None, group, layout, *options)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    cu_seqlens: Tensor | None,
    group: str,
    layout: str,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operator `ring_attention_backward`."""
    rules = (sinks, rng_state, cu_seqlens, group, layout, *options)
    if cu_seqlens is None:
        return _backward(Saved(dout, dlse, out, lse), q, k, v, *rules)
    of_rows = Saved(dout[None], None if dlse is None else dlse[None], out[None], lse[None])
    dq, dk, dv, dsinks = _backward(of_rows, q[None], k[None], v[None], *rules)
    return dq[0], dk[0], dv[0], dsinks


def _ring(
    q: Tensor,
    k: Tensor,
    rng_state: Tensor | None,
    cu_seqlens: Tensor | None,
    group: str,
    layout: str,
    options: CallOptions,
) -> Ring:
    pg = group_of(Axis(group, 0, 0))
    axis = Axis(group, dist.get_world_size(pg), dist.get_rank(pg))
    ends: tuple[int, ...] = ()
    if cu_seqlens is not None:
        ends, T = tuple(cu_seqlens.tolist()), axis.size * q.shape[1]
        cu_seqlens_values("cu_seqlens", cu_seqlens.cpu(), T, T)
    queries = Shards.of_shard(layout, axis.size, q.shape[1], ends=ends)
    keys = Shards.of_shard(layout, axis.size, k.shape[1], "k", ends)
    problem = Problem(queries, keys, options.band, ends, rng_state is not None)
    connect(axis, q.device)
    return Ring(axis, problem, options, rng_state)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    cu_seqlens: Tensor | None,
    group: str,
    layout: str,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    ring = _ring(q, k, rng_state, cu_seqlens, group, layout, CallOptions(*options))
    return attend_to(_hops(ring, k, v), ring, q, v.shape[-1], sinks)


def attend_to(
    hops: Iterator[tuple[Hop, Held]], ring: Ring, q: Tensor, Dv: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries over the keys of all hops."""
    rows = Rows(q, Dv, by_kernels=ring.tiles >= FEWEST_BY_KERNELS)
    for step, held in hops:
        for tile in step.tiles:
            rows.attend(ring, tile, *held.of(tile))
    out, lse = rows.finished()
    if sinks is not None:
        out, lse, _ = sink_rows.join(out, lse, None, sinks)
    return out.to(q.dtype).contiguous(), lse.contiguous()


class Held(NamedTuple):
    """Keys and values of a rank, or the parts of them that a hop reads, one after another."""

    k: Tensor
    v: Tensor
    parts: tuple[Span, ...]

    def at(self, keys: Span) -> slice:
        """The place of a span of the rank's keys in k and v."""
        before = 0
        for part in self.parts:
            if part.start <= keys.start < part.stop:
                return slice(before + keys.start - part.start, before + keys.stop - part.start)
            before += len(part)
        raise AssertionError("a tile reads keys that were not sent")

    def of(self, tile: Tile) -> tuple[Tensor, Tensor]:
        at = self.at(tile.keys)
        return self.k[:, at], self.v[:, at]


def _hops(ring: Ring, k: Tensor, v: Tensor) -> Iterator[tuple[Hop, Held]]:
    """This rank's hops, and the keys of each; those of the next one are under way meanwhile."""
    own = Held(k, v, (range(k.shape[1]),))
    under_way = _fetch(ring, 1, k, v)
    yield ring.hop(0), own
    for distance in range(1, ring.axis.size):
        transfer, held = under_way
        under_way = _fetch(ring, distance + 1, k, v)
        transfer.wait()
        yield ring.hop(distance), held


def _fetch(ring: Ring, distance: int, k: Tensor, v: Tensor) -> tuple[Transfer, Held]:
    """Posts the messages that bring the keys of a hop, and take this rank's to their reader."""
    if distance >= ring.axis.size:
        return Transfer(ring.axis, [], [], ""), Held(k, v, ())
    source, reader = ring.peers(distance)
    sends, receives = [], []
    held_parts = ring.hop(distance).parts
    if parts := ring.hop_of_reader(distance).parts:
        sends = [Message(taken(x, parts), reader) for x in (k, v)]
    count = sum(map(len, held_parts))
    held = Held(_empty_rows(k, count), _empty_rows(v, count), held_parts)
    if count:
        receives = [Message(held.k, source), Message(held.v, source)]
    return Transfer(ring.axis, sends, receives, f"hop {distance} of ring attention"), held


def _empty_rows(x: Tensor, count: int, dtype: torch.dtype | None = None) -> Tensor:
    """(B, count, H, D), like x (B, S, H, D)."""
    return x.new_empty(x.shape[0], count, *x.shape[2:], dtype=dtype)


def taken(x: Tensor, parts: tuple[Span, ...]) -> Tensor:
    """Parts of a rank's rows, one after another and contiguous."""
    if len(parts) == 1:
        return x[:, parts[0].start : parts[0].stop].contiguous()
    return torch.cat([x[:, part.start : part.stop] for part in parts], 1)


MOST_PENDING = 8
"""Parts of rows that wait to be merged in one go."""
FEWEST_BY_KERNELS = MOST_PENDING + 1
"""Tiles of a rank from which on the kernels of attention merge: one by one, they move more bytes than what
merges a few at once, but fewer launches follow them."""


class Part(NamedTuple):
    """Results of some rows over some of their keys: out (B, n, Hq, Dv), lse (B, Hq, n)."""

    rows: Span
    out: Tensor
    lse: Tensor

    def of(self, rows: Span) -> tuple[Tensor, Tensor]:
        """Some of its rows."""
        at = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
        return self.out[:, at], self.lse[..., at]


class Rows:
    """Rows of a result whose keys come in parts.

    A few parts are merged at once, by a kernel that rounds once. Where there are more, memory must not grow
    with their number: `by_kernels` has the kernels of attention merge each part with a result in float32;
    where these cannot, what a few parts make is added to such a result (float64 for float64).
    """

    def __init__(self, q: Tensor, Dv: int, by_kernels: bool = False):
        B, S, Hq, _ = q.shape
        self._shape, self._q = (B, S, Hq, Dv), q
        self._by_kernels = RunningOut(q, Dv) if by_kernels else None
        self._work = working_dtype(q.dtype)
        self._pending: list[Part] = []
        self._running: tuple[Tensor, Tensor] | None = None

    def attend(self, ring: Ring, tile: Tile, k: Tensor, v: Tensor) -> None:
        """Adds the keys of a tile."""
        by_kernels = None if tile.documents else self._by_kernels
        if by_kernels and by_kernels.add(tile.rows, k, v, _state(ring, tile), _options(ring, tile)):
            return
        self.merge(tile.rows, *_attend(ring, tile, self._q, k, v))

    def merge(self, rows: Span, out: Tensor, lse: Tensor) -> None:
        """Adds the keys of out (B, n, Hq, Dv) and lse (B, Hq, n)."""
        if len(self._pending) == MOST_PENDING:
            self._run()
        self._pending.append(Part(rows, out, lse))

    def finished(self) -> tuple[Tensor, Tensor]:
        found = None if self._by_kernels is None else self._by_kernels.finished()
        if found is not None:
            self._add(*found)
        if self._running is None:
            return self._at_once()
        if self._pending:
            self._run()
        return self._running

    def _at_once(self) -> tuple[Tensor, Tensor]:
        """The parts, merged in each span of rows that have the same ones."""
        S = self._shape[1]
        edges = sorted(
            {0, S, *(edge for part in self._pending for edge in (part.rows.start, part.rows.stop))}
        )
        outs, lses = [], []
        for span in starmap(range, pairwise(edges)):
            found = [p.of(span) for p in self._pending if p.rows.start <= span.start < p.rows.stop]
            out, lse = found[0] if found else self._nothing(len(span))
            if len(found) > 1:
                out, lse = merge_states(
                    [o[None] for o, _ in found], [part_lse[None] for _, part_lse in found]
                )
            outs.append(out)
            lses.append(lse)
        if not outs:
            return self._nothing(S)
        return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs, 1), torch.cat(lses, -1))

    def _run(self) -> None:
        """Adds what is pending to the result in float32."""
        out, lse = self._at_once()
        self._pending = []
        self._add(out, lse)

    def _add(self, out: Tensor, lse: Tensor) -> None:
        if self._running is None:
            self._running = out.to(self._work), lse
            return
        total, total_lse = self._running
        merged = torch.logaddexp(total_lse, lse)
        nothing = merged == -torch.inf
        # -inf - -inf is NaN.
        old, new = ((x - merged).exp_().masked_fill_(nothing, 0.0) for x in (total_lse, lse))
        total.mul_(_per_row(old)).addcmul_(out, _per_row(new))
        total_lse.copy_(merged)

    def _nothing(self, count: int) -> tuple[Tensor, Tensor]:
        """Results of rows without keys."""
        B, _, Hq, Dv = self._shape
        out = self._q.new_zeros((B, count, Hq, Dv), dtype=self._work)
        return out, self._q.new_full((B, Hq, count), -torch.inf, dtype=self._work)


def _per_row(x: Tensor) -> Tensor:
    """(B, Hq, S) as factors of (B, S, Hq, Dv)."""
    return x.transpose(1, 2)[..., None]


def _attend(ring: Ring, tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of a tile's rows and keys."""
    q = q[:, tile.rows.start : tile.rows.stop]
    options, state = _options(ring, tile), _state(ring, tile)
    if tile.documents is None:
        out, lse, _ = schema.attention(q, k, v, None, None, state, *options)
        return out, lse
    sequences = _sequences(tile.documents, q.device)
    out, lse = schema.attention_varlen(
        q[0], k[0], v[0], *sequences[:2], None, state, *sequences[2:], *options
    )
    return out[None], lse[None]


def _attend_backward(
    ring: Ring, tile: Tile, q: Tensor, k: Tensor, v: Tensor, saved: Saved
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of a tile's rows and keys."""
    rows = slice(tile.rows.start, tile.rows.stop)
    q, dout, out = q[:, rows], saved.dout[:, rows], saved.out[:, rows]
    lse = saved.lse[..., rows].contiguous()
    dlse = None if saved.dlse is None else saved.dlse[..., rows].contiguous()
    options, state = _options(ring, tile), _state(ring, tile)
    if tile.documents is None:
        dq, dk, dv, *_ = schema.attention_backward(
            dout, dlse, q, k, v, out, lse, None, None, None, state, *options, False
        )
        return dq, dk, dv
    ends_q, ends_k, *longest = _sequences(tile.documents, q.device)
    dlse = None if dlse is None else dlse[0]
    dq, dk, dv, _ = schema.attention_varlen_backward(
        dout[0], dlse, q[0], k[0], v[0], out[0], lse[0], ends_q, ends_k, None, state, *longest, *options
    )
    return dq[None], dk[None], dv[None]


def _options(ring: Ring, tile: Tile) -> CallOptions:
    return ring.options._replace(window_left=tile.band.left, window_right=tile.band.right)


def _sequences(documents: Documents, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    ends_k, longest_k = documents.of_keys()
    ends_q = _on_device(documents.ends, device)
    return ends_q, _on_device(ends_k, device), documents.longest, longest_k


@lru_cache(maxsize=1024)
def _on_device(numbers: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype).to(device)


def _state(ring: Ring, tile: Tile) -> Tensor | None:
    """Dropout's state with the positions at which the tile begins."""
    state = ring.rng_state
    if state is None:
        return None
    if state.device.type != "cpu":
        check_origin(ring, tile)
    moved = (0, 0, tile.first_row, tile.first_key, 0, 0, 0)
    # A document counts as a batch entry, of all heads.
    per_document = (0, 0, 0, 0, tile.first_document, 0, 0)
    device, dtype = state.device, torch.int64
    return state + _on_device(moved, device, dtype) + _on_device(per_document, device, dtype) * state[5]


def check_origin(ring: Ring, tile: Tile) -> None:
    """Requires that kernels can count dropout's positions from where the tile begins."""
    for first in (tile.first_row, tile.first_key):
        if first % ORIGIN_MULTIPLE:
            where = f"at multiples of {ORIGIN_MULTIPLE} in their document"
            limit = f"on a GPU chunks must begin {where}, not at {first}"
            raise RangeError("dropout_p", ring.options.dropout_p, limit)


class Sum:
    """A sum of tensors (B, n, H, D), each of a span of rows: float32 (float64 for float64), in order."""

    def __init__(self, like: Tensor):
        self._like = like
        self._total: Tensor | None = None

    def add(self, rows: Span, x: Tensor) -> None:
        like, work = self._like, working_dtype(self._like.dtype)
        if self._total is None:
            if len(rows) == like.shape[1]:
                self._total = x
                return
            self._total = like.new_zeros(like.shape, dtype=work)
        if self._total.dtype != work:
            self._total = self._total.to(work)
        self._total[:, rows.start : rows.stop] += x

    def finished(self) -> Tensor:
        """The sum in the tensor's own dtype."""
        if self._total is None:
            return torch.zeros_like(self._like, memory_format=torch.contiguous_format)
        return self._total.to(self._like.dtype).contiguous()


class Queries:
    """Queries of a backward, and the sum of their gradients.

    A tile adds to sums of the backend's where this serves that; other gradients are added here.
    """

    def __init__(self, q: Tensor, saved: Saved):
        self._q, self._saved = q, saved
        self._by_backend, self._others = QueryGradient(q, saved), Sum(q)

    def backward(self, ring: Ring, tile: Tile, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(dk, dv) of a tile, whose dq is added."""
        options, state = _options(ring, tile), _state(ring, tile)
        if tile.documents is None and (found := self._by_backend.add(tile.rows, k, v, state, options)):
            return found
        dq, dk, dv = _attend_backward(ring, tile, self._q, k, v, self._saved)
        self._others.add(tile.rows, dq)
        return dk, dv

    def finished(self) -> Tensor:
        """dq in q's dtype."""
        if (dq := self._by_backend.finished()) is not None:
            self._others.add(range(dq.shape[1]), dq)
        return self._others.finished()


def _backward(
    saved: Saved,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    cu_seqlens: Tensor | None,
    group: str,
    layout: str,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ring = _ring(q, k, rng_state, cu_seqlens, group, layout, CallOptions(*options))
    queries, dk, dv = Queries(q, saved), Sum(k), Sum(v)
    returning: Returning | None = None
    for distance, (step, held) in enumerate(_hops(ring, k, v)):
        gradients = gradients_of(step, ring, held, queries)
        if distance == 0:
            for keys, dk_part, dv_part in gradients.in_parts():
                dk.add(keys, dk_part)
                dv.add(keys, dv_part)
            continue
        if returning is not None:
            returning.add_to(dk, dv)
        returning = Returning(ring, distance, gradients, k, v)
    if returning is not None:
        returning.add_to(dk, dv)
    dsinks = q.new_empty(0)
    if sinks is not None:
        delta = sink_rows.delta(saved.dout, saved.out, saved.dlse, saved.lse.dtype)
        dsinks = sink_rows.gradient(delta, saved.lse, sinks)
    return queries.finished(), dk.finished(), dv.finished(), dsinks


class KeyGradients(NamedTuple):
    """Gradients of the parts of a rank's keys, one part after another, (B, n, Hk, D)."""

    dk: Tensor
    dv: Tensor
    parts: tuple[Span, ...]

    def in_parts(self) -> Iterator[tuple[Span, Tensor, Tensor]]:
        start = 0
        for part in self.parts:
            at = slice(start, start + len(part))
            yield part, self.dk[:, at], self.dv[:, at]
            start += len(part)


def _sent_dtype(step: Hop, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of keys travel: as kernels round them, unless they are sums already."""
    return dtype if step.reads_once else working_dtype(dtype)


def gradients_of(step: Hop, ring: Ring, held: Held, queries: Queries) -> KeyGradients:
    """Gradients of the keys of a hop; those of the queries are added to theirs."""
    dtype, count = _sent_dtype(step, held.k.dtype), sum(map(len, step.parts))
    dk = dv = None
    places = Held(held.k, held.v, step.parts)
    for tile in step.tiles:
        dk_part, dv_part = queries.backward(ring, tile, *held.of(tile))
        if len(step.tiles) == 1:
            return KeyGradients(dk_part, dv_part, step.parts)
        if dk is None or dv is None:
            dk, dv = (_empty_rows(x, count, dtype).zero_() for x in (held.k, held.v))
        at = places.at(tile.keys)
        dk[:, at] += dk_part
        dv[:, at] += dv_part
    return KeyGradients(held.k[:, :0] if dk is None else dk, held.v[:, :0] if dv is None else dv, step.parts)


class Returning:
    """Gradients of keys on their way to the owner, and those of this rank's keys on their way here."""

    def __init__(self, ring: Ring, distance: int, gradients: KeyGradients, k: Tensor, v: Tensor):
        source, reader = ring.peers(distance)
        step = ring.hop_of_reader(distance)
        dtype, count = _sent_dtype(step, k.dtype), sum(map(len, step.parts))
        dk, dv = (_empty_rows(x, count, dtype) for x in (k, v))
        self._received = KeyGradients(dk, dv, step.parts)
        sends = [Message(x.contiguous(), source) for x in gradients[:2] if gradients.parts]
        receives = [Message(x, reader) for x in self._received[:2] if step.parts]
        self._transfer = Transfer(ring.axis, sends, receives, f"hop {distance} of ring attention's backward")

    def add_to(self, dk: Sum, dv: Sum) -> None:
        self._transfer.wait()
        for keys, dk_part, dv_part in self._received.in_parts():
            dk.add(keys, dk_part)
            dv.add(keys, dv_part)
