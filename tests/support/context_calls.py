"""Calls of context parallel attention that ranks run together."""

from __future__ import annotations

import os
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from flash4_torch import env
from flash4_torch.distributed import (
    context_parallel_attention,
    ring,
    shard_documents,
    shard_sequence,
    unshard_documents,
    unshard_sequence,
)

MESHES = {
    "ring 2": (2,),
    "ring 3": (3,),
    "ring 4": (4,),
    "ulysses 2": (1, 2),
    "ulysses 4": (1, 4),
    "ring 2 x ulysses 2": (2, 2),
}
"""Sizes: of a ring, or of a ring and of ulysses."""
WORLD = 4


@cache
def mesh_of(kind: str) -> DeviceMesh | None:
    """The mesh of that kind in this process; None if it has no place in it. Every rank must call it."""
    sizes = MESHES[kind]
    names = ("ring", "ulysses")
    count = torch.tensor(sizes).prod().item()
    if count == WORLD:
        whole = init_device_mesh("cpu", sizes, mesh_dim_names=names[: len(sizes)])
        return whole["ulysses"] if sizes[0] == 1 else whole
    group = distributed.new_group(list(range(count)))
    if distributed.get_rank() >= count:
        return None
    name = names[len(sizes) - 1]
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))


class Call(NamedTuple):
    """A call for all ranks: whole tensors are made from a seed, and every rank takes its part."""

    mesh: str
    layout: str
    B: int
    chunk: int
    """Positions of the smallest part that the layout knows."""
    group: int
    Hk: int
    D: int
    Dv: int
    dtype: torch.dtype
    options: dict[str, Any]
    ends: tuple[int, ...] = ()
    """Ends of packed documents, in thousandths of the sequence; empty: a dense one."""
    sinks: bool = False
    lse: bool = True
    Sk: int = 0
    """Keys in chunks, if not as many as queries."""
    seed: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        return MESHES[self.mesh]

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.Hk * self.group

    def length(self, chunk: int) -> int:
        ring, ulysses = (*self.sizes, 1)[:2]
        return chunk * 2 * ring * ulysses

    def cu_seqlens(self) -> Tensor | None:
        if not self.ends:
            return None
        S = self.length(self.chunk)
        cuts = sorted(end * S // 1000 for end in self.ends)
        return torch.tensor([0, *cuts, S])

    def tensors(self) -> list[Tensor]:
        """q, k, v, perhaps sinks, dout and dlse of the whole sequence."""
        generator = torch.Generator().manual_seed(self.seed)
        Sq, Hq = self.length(self.chunk), self.heads
        Sk = self.length(self.Sk) if self.Sk else Sq
        batch = () if self.ends else (self.B,)
        shapes = [(*batch, Sq, Hq, self.D), (*batch, Sk, self.Hk, self.D), (*batch, Sk, self.Hk, self.Dv)]
        shapes += [(Hq,), (*batch, Sq, Hq, self.Dv), (*batch, Hq, Sq)]
        made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        made = [x.to(self.dtype) for x in made[:5]] + made[5:]
        return made


def results(call: Call, how: str = "") -> list[Tensor] | None:
    """Whole out, lse, dq, dk, dv and dsinks of a rank's call, brought together from all ranks."""
    if how == "by kernels":
        with (
            mock.patch.dict(os.environ, {env.BACKEND.name: "emulator", env.ARCH.name: "sm_100a"}),
            mock.patch.object(ring, "FEWEST_BY_KERNELS", 2),
        ):
            return results(call)
    mesh = mesh_of(call.mesh)
    if mesh is None:
        return None
    q, k, v, sinks, dout, dlse = call.tensors()
    dim = 0 if call.ends else 1
    layout = call.layout if "ring" in call.mesh else "contiguous"
    shard, unshard = partial(shard_sequence, layout=layout), partial(unshard_sequence, layout=layout)
    if layout == "documents":
        ends = call.cu_seqlens()
        shard, unshard = (
            partial(shard_documents, cu_seqlens=ends),
            partial(unshard_documents, cu_seqlens=ends),
        )
    q, k, v, dout = (shard(x, mesh=mesh, dim=dim) for x in (q, k, v, dout))
    dlse = shard(dlse, mesh=mesh, dim=dim + 1)
    inputs = [x.requires_grad_() for x in (q, k, v, *([sinks] if call.sinks else []))]
    torch.manual_seed(call.seed + 1000 * distributed.get_rank())
    options = dict(call.options, layout=layout, cu_seqlens=call.cu_seqlens(), return_lse=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Any:
        return context_parallel_attention(q, k, v, mesh, sinks=sinks, **options)

    inputs_and_sinks = q, k, v, sinks if call.sinks else None
    if how == "checkpointed":
        out, lse = checkpoint(attend, *inputs_and_sinks, use_reentrant=False)
    elif how == "compiled":
        out, lse = torch.compile(attend, fullgraph=True, backend="aot_eager")(*inputs_and_sinks)
    else:
        out, lse = attend(*inputs_and_sinks)
    assert out.is_contiguous() and lse.is_contiguous()
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    loss = (out * dout).sum() + ((finite * dlse).sum() if call.lse else 0.0)
    dq, dk, dv, *dsinks = torch.autograd.grad(loss, inputs)
    assert all(g.dtype == x.dtype for g, x in zip((dq, dk, dv), (q, k, v), strict=True))
    whole = [unshard(x.detach(), mesh=mesh, dim=dim) for x in (out, dq, dk, dv)]
    whole.insert(1, unshard(lse.detach(), mesh=mesh, dim=dim + 1))
    for gradient in dsinks:
        for n in range(mesh.ndim):
            distributed.all_reduce(gradient, group=mesh.get_group(n))
    return [*whole, *dsinks]
