"""The backend of our kernels for this machine's GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash4_torch.backends.compiled import TARGETS
from flash4_torch.configs.types import Features
from on_cpu import name_of

_BY_CAPABILITY = {target.capability: target for target in TARGETS.values()}
_TARGET = _BY_CAPABILITY.get(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None

OURS = name_of(_TARGET) if _TARGET else ""
"""The backend of our kernels for it; empty where there is none."""

needs_ours = pytest.mark.skipif(
    not OURS,
    reason="needs a GPU of compute capability " + " or ".join(f"{a}.{b}" for a, b in _BY_CAPABILITY),
)


def lacks_gradients(D: int, Dv: int, **features: Any) -> list[str]:
    """Reasons why our kernels for it have no gradients of such calls; empty if they have."""
    return _TARGET.backward_configs.limits(Features("bfloat16", D, Dv, **features)) if _TARGET else []
