"""DistributedDataParallel on two gloo processes: the gradients of one process on the joined batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import flash4_torch

RANKS, PER_RANK, S, H, D = 2, 3, 6, 2, 4
KINDS = ("eager", "compiled")


class Model(nn.Module):
    """One layer each of the function and of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(H * D, 3 * H * D)
        self.attention = flash4_torch.MultiheadAttention(H * D, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).unbind(-3)
        x = x + flash4_torch.attention(q, k, v, causal=True).flatten(-2)
        return self.attention(x, x, x, need_weights=False)[0]


def model_and_batch() -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model().double(), torch.randn(RANKS * PER_RANK, S, H * D, dtype=torch.float64)


def gradients(model: nn.Module, forward: Callable[[Tensor], Tensor], batch: Tensor) -> dict[str, Tensor]:
    forward(batch).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def train_one_rank(rank: int, folder: Path) -> None:
    # Otherwise gloo looks the host's name up, which not every machine can.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{folder / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    for kind in KINDS:
        model, batch = model_and_batch()
        forward = DistributedDataParallel(model)
        if kind == "compiled":
            forward = torch.compile(forward, backend="aot_eager")
        mine = batch[rank * PER_RANK : (rank + 1) * PER_RANK]
        torch.save(gradients(model, forward, mine), folder / f"{kind}{rank}.pt")
    distributed.destroy_process_group()


def test_gradients_are_those_of_the_joined_batch(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(train_one_rank, (tmp_path,), nprocs=RANKS)
    model, batch = model_and_batch()
    expected = gradients(model, model, batch)
    for kind in KINDS:
        for rank in range(RANKS):
            torch.testing.assert_close(torch.load(tmp_path / f"{kind}{rank}.pt"), expected)
