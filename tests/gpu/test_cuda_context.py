"""One sequence over ranks on GPUs: every hop by our kernels on one, and whole calls over NCCL on more."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash4_torch
from everything import EVERYTHING, one_of
from flash4_torch.backends.compiled import SM90A, SM100A, Target
from flash4_torch.distributed import context_parallel_attention, shard_sequence, unshard_sequence
from flash4_torch.problem import CallOptions
from flash4_torch.testing import assert_close_as_peer, peek_rng_state, reference
from on_cpu import gpu
from one_process_ranks import ring_in_one_process

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
S, HQ, HK, D = 768, 4, 2, 64
CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": (100, None)},
    "softcap": {"causal": True, "softcap": 20.0},
    "dropout": {"causal": True, "dropout_p": 0.25},
    "dropout, window": {"causal": True, "window": (100, None), "dropout_p": 0.25},
    "packed": {"causal": True, "ends": (0, 96, 400, 448, S)},
    "packed, dropout": {"causal": True, "dropout_p": 0.25, "ends": (0, 96, 400, 448, S)},
}

OF_MANY = list(CASES) if EVERYTHING else ["causal", "packed, dropout"]
"""Cases of whole calls: each rank waits for the kernels of all of them."""


def tensors(device: str = "cuda") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout, (1, S, H, D)."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, S, H, D) for H in (HQ, HK, HK, HQ)]
    q, k, v, dout = (torch.randn(x, generator=generator).to(device, torch.bfloat16) for x in shapes)
    return q, k, v, dout


def definition(case: dict[str, Any], state: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """out, dq, dk and dv by definition, on the CPU."""
    q, k, v, dout = (x.to(dtype) for x in tensors("cpu"))
    options = {name: value for name, value in case.items() if name != "ends"}
    inputs = [x.requires_grad_() for x in (q, k, v)]
    ends, outs = case.get("ends", (0, S)), []
    for b, (start, stop) in enumerate(pairwise(ends)):
        if state is not None:
            options["rng_state"] = torch.cat([state, torch.tensor([0, 0, b * HQ, HQ, HQ])])
        outs.append(reference(*(x[:, start:stop] for x in inputs), **options, dtype=dtype)[0])
    out = torch.cat(outs, 1)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def options_of(case: dict[str, Any]) -> CallOptions:
    left, _ = case.get("window", (None, None))
    right = 0 if case.get("causal") else None
    return CallOptions(D**-0.5, left, right, case.get("softcap", 0.0), case.get("dropout_p", 0.0), True)


def check(found: list[Tensor], case: dict[str, Any], state: Tensor | None) -> None:
    exact, peer = (definition(case, state, dtype) for dtype in (torch.float64, torch.bfloat16))
    for name, mine, right, near in zip(("out", "dq", "dk", "dv"), found, exact, peer, strict=True):
        assert_close_as_peer(mine.cpu(), right, near, what=name)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize(
    "name, layout, ranks",
    one_of(3, [(name, *where) for name in CASES for where in (("zigzag", 3), ("contiguous", 4))]),
)
def test_hops_of_all_ranks(name: str, layout: str, ranks: int, device: str) -> None:
    case = CASES[name]
    state = torch.tensor([12345, 678]) if "dropout_p" in case else None
    there = None if state is None else state.to(device)
    found = ring_in_one_process(tensors(device), layout, ranks, options_of(case), case.get("ends", ()), there)
    check([found.out, found.dq, found.dk, found.dv], case, state)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"causal": True, "window": (100, None)}], ids=str)
@pytest.mark.parametrize("ends", [(0, 96, 400, 448, S), (0, 5, 405, 406, 417, 430, S)], ids=str)
def test_hops_of_documents(ends: tuple[int, ...], options: dict[str, Any], device: str) -> None:
    """A hop's rectangles of documents as packed sequences, whose queries and keys differ in length."""
    case = {**options, "ends": ends}
    found = ring_in_one_process(tensors(device), "documents", 3, options_of(case), ends)
    check([found.out, found.dq, found.dk, found.dv], case, None)


@pytest.mark.parametrize("target", [SM90A, SM100A], ids=lambda target: target.arch)
@pytest.mark.parametrize("name", ["dropout, window", "packed, dropout"])
def test_kernels_get_what_they_are_promised(name: str, target: Target) -> None:
    """The host of our kernels, with stand-ins that assert what kernels take and compute from it."""
    case, state = CASES[name], torch.tensor([12345, 678])
    with gpu(target) as machine:
        options, ends = options_of(case), case.get("ends", ())
        found = ring_in_one_process(tensors("cpu"), "zigzag", 3, options, ends, state)
    check([found.out, found.dq, found.dk, found.dv], case, state)
    launches = [*machine.launches, *machine.backwards]
    assert len(launches) > 6 and all(launch.features.dropout_of_part for launch in launches)


def run_rank(rank: int, folder: Path, shape: tuple[int, int]) -> None:
    torch.cuda.set_device(rank)
    size, store = shape[0] * shape[1], f"file://{folder / 'store'}"
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=size)
    mesh = dist.device_mesh.init_device_mesh("cuda", shape, mesh_dim_names=("ring", "ulysses"))
    if 1 in shape:
        mesh = mesh["ring"] if shape[1] == 1 else mesh["ulysses"]
    for name in OF_MANY:
        case = CASES[name]
        torch.manual_seed(0)
        state = peek_rng_state("cuda").cpu()
        q, k, v, dout = (shard_sequence(x, mesh) for x in tensors())
        inputs = [x.requires_grad_() for x in (q, k, v)]
        options = {key: value for key, value in case.items() if key != "ends"}
        ends = torch.tensor(case["ends"]) if "ends" in case else None
        call = inputs if ends is None else [x[0] for x in inputs]
        out = context_parallel_attention(*call, mesh, cu_seqlens=ends, **options)
        out = out if ends is None else out[None]
        gradients = torch.autograd.grad(out, inputs, dout)
        whole = [unshard_sequence(x, mesh).cpu() for x in (out, *gradients)]
        torch.save((whole, state), folder / f"{name}{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (4, 1), (2, 2), (1, 4)], ids=str)
def test_many_gpus(shape: tuple[int, int], tmp_path: Path) -> None:
    size = shape[0] * shape[1]
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    torch.multiprocessing.spawn(run_rank, (tmp_path, shape), nprocs=size)
    for name in OF_MANY:
        case = CASES[name]
        first, *others = (torch.load(tmp_path / f"{name}{rank}.pt") for rank in range(size))
        check(first[0], case, first[1] if "dropout_p" in case else None)
        for other, _ in others:
            assert all(torch.equal(a, b) for a, b in zip(first[0], other, strict=True))


def test_dropout_refuses_odd_chunks_on_gpus() -> None:
    """Kernels count positions from multiples of 16; the state says which device would."""
    from flash4_torch.distributed import ring
    from flash4_torch.distributed.groups import ALONE
    from flash4_torch.distributed.layout import Shards
    from flash4_torch.distributed.plan import Problem, Tile
    from flash4_torch.masks import Band

    shards = Shards("zigzag", 2, 64)
    problem = Problem(shards, shards, Band(), (), True)
    meta = torch.empty(7, dtype=torch.int64, device="meta")
    it = ring.Ring(ALONE, problem, CallOptions(1.0, dropout_p=0.5), meta)
    with pytest.raises(flash4_torch.errors.RangeError, match="multiples of 16 in their document, not at 8"):
        ring.check_origin(it, Tile(range(8), range(8), Band(), first_row=8))
