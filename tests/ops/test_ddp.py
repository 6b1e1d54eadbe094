"""DistributedDataParallel in two processes: the gradients of one process on the joined batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import flash4_torch
from ranks import START_METHOD

RANKS, PER_RANK = 2, 3
KINDS = ("eager", "compiled")


class Setting(NamedTuple):
    """A communication library with its dtype, sizes and compiler."""

    library: str
    dtype: torch.dtype
    S: int
    H: int
    D: int
    compiler: str
    error: float
    """Relative error allowed in a gradient, as sums are made in another order."""

    def device(self, rank: int) -> torch.device:
        return torch.device("cuda", rank) if self.library == "nccl" else torch.device("cpu")


ON_CPU = Setting("gloo", torch.float64, 6, 2, 4, "aot_eager", 1e-12)
ON_GPUS = Setting("nccl", torch.bfloat16, 333, 4, 64, "inductor", 0.02)


class Model(nn.Module):
    """One layer each of the function, of the function with a learned bias, and of the module."""

    def __init__(self, H: int, D: int) -> None:
        super().__init__()
        self.heads = (3, H, D)
        self.project = nn.Linear(H * D, 3 * H * D)
        self.bias = nn.Parameter(torch.ones(H, 4))
        self.attention = flash4_torch.MultiheadAttention(H * D, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, self.heads).unbind(-3)
        x = x + flash4_torch.attention(q, k, v, causal=True).flatten(-2)
        x = x + flash4_torch.attention(q, k, v, causal=True, score_mod=self.add_bias).flatten(-2)
        return self.attention(x, x, x, need_weights=False)[0]

    def add_bias(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + self.bias[h, (i - j).clamp(0, 3)]


def model_and_batch(setting: Setting, device: torch.device) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    model = Model(setting.H, setting.D).to(device, setting.dtype)
    batch = torch.randn(RANKS * PER_RANK, setting.S, setting.H * setting.D, dtype=torch.float64)
    return model, batch.to(device, setting.dtype)


def gradients(model: nn.Module, forward: Callable[[Tensor], Tensor], batch: Tensor) -> dict[str, Tensor]:
    forward(batch).square().mean().backward()
    return {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}


def train_one_rank(rank: int, setting: Setting, folder: Path) -> None:
    # Otherwise gloo looks the host's name up, which not every machine can.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = setting.device(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = f"file://{folder / 'store'}"
    distributed.init_process_group(setting.library, init_method=store, rank=rank, world_size=RANKS)
    for kind in KINDS:
        model, batch = model_and_batch(setting, device)
        forward = DistributedDataParallel(model)
        if kind == "compiled":
            forward = torch.compile(forward, backend=setting.compiler)
        mine = batch[rank * PER_RANK : (rank + 1) * PER_RANK]
        torch.save(gradients(model, forward, mine), folder / f"{kind}{rank}.pt")
    distributed.destroy_process_group()


_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")


@pytest.mark.parametrize(
    "setting", [ON_CPU, pytest.param(ON_GPUS, marks=_two_gpus)], ids=lambda setting: setting.library
)
def test_gradients_are_those_of_the_joined_batch(setting: Setting, tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(
        train_one_rank, (setting, tmp_path), nprocs=RANKS, start_method=START_METHOD
    )
    model, batch = model_and_batch(setting, setting.device(0))
    expected = gradients(model, model, batch)
    for kind in KINDS:
        for rank in range(RANKS):
            found = torch.load(tmp_path / f"{kind}{rank}.pt")
            for name, gradient in expected.items():
                error = (found[name].double() - gradient.double()).norm() / gradient.double().norm()
                assert error <= setting.error, (kind, rank, name)
