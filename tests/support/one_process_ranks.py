"""All ranks of a ring in one process, without messages: their hops on each other's shards, in turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash4_torch.distributed import ring
from flash4_torch.distributed.groups import Axis
from flash4_torch.distributed.layout import Shards
from flash4_torch.distributed.plan import Problem
from flash4_torch.problem import CallOptions, Saved


class Whole(NamedTuple):
    """Results of a whole sequence, (B, S, H, D), and lse (B, Hq, S)."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def ring_in_one_process(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    layout: str,
    ranks: int,
    options: CallOptions,
    ends: tuple[int, ...] = (),
    state: Tensor | None = None,
) -> Whole:
    """tensors: q, k, v and dout, (B, S, H, D). state: dropout's, of the whole call."""
    q, k, v, dout = tensors
    S, Hq = q.shape[1], q.shape[2]
    shards = Shards(layout, ranks, S, ends if layout == "documents" else ())
    problem = Problem(shards, shards, options.band, ends, state is not None)
    if state is not None:
        state = torch.cat([state, state.new_tensor([0, 0, 0, Hq, Hq])])
    places = [torch.cat([torch.arange(c.start, c.stop) for c in shards.chunks(r)]) for r in range(ranks)]
    q_of, k_of, v_of, dout_of = ([x[:, at.to(x.device)] for at in places] for x in (q, k, v, dout))
    sums = [(ring.Sum(k_of[r]), ring.Sum(v_of[r])) for r in range(ranks)]
    rows: list[tuple[Tensor, Tensor]] = []
    dqs: list[Tensor] = []
    for rank in range(ranks):
        here = ring.Ring(Axis("", ranks, rank), problem, options, state)

        def hops(here: ring.Ring = here) -> Iterator[tuple[Any, ring.Held]]:
            for distance in range(ranks):
                step = here.hop(distance)
                if step.tiles:
                    held = (ring.taken(x[step.source], step.parts) for x in (k_of, v_of))
                    yield step, ring.Held(*held, step.parts)

        out, lse = ring.attend_to(hops(), here, q_of[rank], v.shape[-1])
        rows.append((out, lse))
        queries = ring.Queries(q_of[rank], Saved(dout_of[rank], None, out, lse))
        for step, held in hops():
            found = ring.gradients_of(step, here, held, queries)
            for keys, dk, dv in found.in_parts():
                sums[step.source][0].add(keys, dk)
                sums[step.source][1].add(keys, dv)
        dqs.append(queries.finished())
    order = torch.cat(places).argsort().to(q.device)
    results = [
        [out for out, _ in rows],
        dqs,
        *([part.finished() for part in parts] for parts in zip(*sums, strict=True)),
    ]
    out, dq, dk, dv = (torch.cat(parts, 1)[:, order] for parts in results)
    return Whole(out, torch.cat([lse for _, lse in rows], -1)[..., order], dq, dk, dv)
