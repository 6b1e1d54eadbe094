"""The cells to measure, their FLOPs and unavoidable bytes, and the roof that follows from these."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .settings import Settings
from .timing import compare

DIRECTIONS = ("forward", "backward")

TOKENS, HIDDEN = 32768, 2048
"""B * S, and the approximate Hq * D, of every cell on a GPU."""

_LENGTHS = {
    64: (256, 512, 1024, 2048, 4096, 16384),
    96: (1024, 8192),
    128: (256, 512, 1024, 2048, 4096, 16384),
    192: (1024, 8192),
    256: (1024, 4096, 16384),
}
_GQA_D, _GQA_GROUP, _GQA_LENGTHS = 128, 4, (2048, 8192)


@dataclass(frozen=True)
class Cell:
    """Self-attention of q (B, S, Hq, D) with k and v (B, S, Hk, D)."""

    D: int
    causal: bool
    S: int
    B: int
    Hq: int
    Hk: int
    dtype: str = "bfloat16"
    window: int | None = None
    """Row i of a causal cell sees keys from i - window on; None: from the first key on."""

    def case(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Random q, k, v and dout."""
        heads = (self.Hq, self.Hk, self.Hk, self.Hq)
        dtype = getattr(torch, self.dtype)
        q, k, v, dout = (torch.randn(self.B, self.S, H, self.D, dtype=dtype, device=device) for H in heads)
        return q, k, v, dout

    def flops(self, direction: str) -> float:
        """FLOPs of two GEMMs forward, five backward; causal counts exactly half."""
        products = {"forward": 2, "backward": 5}[direction]
        return products * 2.0 * self.B * self.Hq * self._scores() * self.D

    def _scores(self) -> float:
        if self.window is not None and self.window < self.S:
            return (self.window + 1) * self.S - self.window * (self.window + 1) / 2
        return self.S**2 / (2 if self.causal else 1)

    def bytes(self, direction: str) -> int:
        """Bytes of q, k, v and out; backward also dout, dq, dk and dv. Row data such as lse is left out."""
        forward = 2 * self.B * self.S * (self.Hq + self.Hk) * self.D * getattr(torch, self.dtype).itemsize
        return forward * {"forward": 1, "backward": 2}[direction]


def gpu_cells() -> Iterator[Cell]:
    for D, lengths in _LENGTHS.items():
        for causal, S in itertools.product((False, True), lengths):
            yield _gpu_cell(D, causal, S)
    for causal, S in itertools.product((False, True), _GQA_LENGTHS):
        yield _gpu_cell(_GQA_D, causal, S, _GQA_GROUP)


def _gpu_cell(D: int, causal: bool, S: int, group: int = 1) -> Cell:
    H = HIDDEN // D
    return Cell(D, causal, S, B=TOKENS // S, Hq=H, Hk=H // group)


def cpu_cells() -> Iterator[Cell]:
    for dtype, D, causal, S in itertools.product(
        ("float32", "bfloat16"), (64, 128), (False, True), (256, 1024, 2048)
    ):
        yield Cell(D, causal, S, B=2, Hq=4, Hk=4, dtype=dtype)


def cells(settings: Settings) -> list[Cell]:
    """The cells of this machine that `settings` selects; quick keeps those with S = 1024."""
    found = gpu_cells() if settings.on_gpu else cpu_cells()
    return [
        cell
        for cell in found
        if settings.selection.takes(cell.case()) and (not settings.quick or cell.S == 1024)
    ]


class Roof(NamedTuple):
    """Limits that no kernel exceeds: FLOP/s of a large GEMM, bytes/s of a large copy, read and write."""

    matmul: float
    copy: float

    def flops(self, cell: Cell, direction: str) -> float:
        """FLOP/s that the slower of compute and memory allows."""
        return min(self.matmul, self.copy * cell.flops(direction) / cell.bytes(direction))


def measure_roof(dtype: str, settings: Settings) -> Roof:
    n, size = (8192, 1 << 30) if settings.on_gpu else (2048, 1 << 27)
    a, b = (torch.randn(n, n, dtype=getattr(torch, dtype), device=settings.device) for _ in range(2))
    source = torch.randint(-128, 128, (size,), dtype=torch.int8, device=settings.device)
    target = torch.empty_like(source)
    times = compare({"matmul": lambda: a @ b, "copy": lambda: target.copy_(source)}, settings).seconds
    return Roof(2.0 * n**3 / times["matmul"].median, 2.0 * size / times["copy"].median)
