"""The GPU architectures that kernels are compiled for, by the compiler's names."""

from __future__ import annotations

import torch

from ..errors import RangeError

BY_CAPABILITY = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_87",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
    (12, 1): "sm_121a",
}
"""Architectures by compute capability; code for an 'a' architecture runs on that capability only."""

NAMES = tuple(BY_CAPABILITY.values())


def of_capability(capability: tuple[int, int]) -> str:
    """The architecture of a compute capability: "sm_90a" for (9, 0). Raises RangeError for others."""
    if capability not in BY_CAPABILITY:
        major, minor = capability
        raise RangeError(
            "the compute capability", f"{major}.{minor}", f"kernels exist for {', '.join(NAMES)}"
        )
    return BY_CAPABILITY[capability]


def checked(arch: str | None) -> str:
    """`arch` itself, or the current GPU's for None. Raises RangeError if there is no such architecture."""
    if arch is None and torch.cuda.is_available():
        return of_capability(torch.cuda.get_device_capability())
    if arch not in NAMES:
        asked = "" if arch else "without a GPU to ask "
        raise RangeError("arch", repr(arch), f"{asked}it must be one of {', '.join(NAMES)}")
    return arch
