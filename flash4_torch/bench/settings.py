"""What all sections of a benchmark run share."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Settings:
    """`quick`: fewer and smaller cases. `clock`: 'wall', or 'cpu' for the time the process has on CPUs."""

    device: str = "cpu"
    threads: int = 1
    quick: bool = False
    clock: str = "wall"

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def budget(self) -> float:
        """Seconds for each comparison."""
        return 0.2 if self.quick else 1.0


def usual_dtype(device: str) -> torch.dtype:
    """What models run in on a device: bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.startswith("cuda") else torch.float32
