"""DistributedDataParallel in two processes: the gradients of one process on the joined batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import flash4_torch
from ranks import ranks

RANKS, PER_RANK = 2, 3


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


def gradients_of_one_rank(setting: Setting, kind: str) -> dict[str, Tensor]:
    """Gradients that this rank has of its part of the batch.

    The group outlives DDP: DDP's reducer drops its group with the GIL held and waits for gloo's threads,
    one of which may wait for the GIL to drop a finished all-reduce (seen with torch 2.13).
    """
    rank = distributed.get_rank()
    device = setting.device(rank)
    group = None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        group = distributed.new_group(backend=setting.library)
    model, batch = model_and_batch(setting, device)
    forward = DistributedDataParallel(model, process_group=group)
    if kind == "compiled":
        forward = torch.compile(forward, backend=setting.compiler)
    return gradients(model, forward, batch[rank * PER_RANK : (rank + 1) * PER_RANK])


_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")


@pytest.mark.parametrize(
    "setting", [ON_CPU, pytest.param(ON_GPUS, marks=_two_gpus)], ids=lambda setting: setting.library
)
@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_gradients_are_those_of_the_joined_batch(setting: Setting, kind: str) -> None:
    model, batch = model_and_batch(setting, setting.device(0))
    expected = gradients(model, model, batch)
    for rank, found in enumerate(ranks(RANKS).run(gradients_of_one_rank, setting, kind)):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            error = (found[name].double() - gradient.double()).norm() / gradient.double().norm()
            assert error <= setting.error, (rank, name)
