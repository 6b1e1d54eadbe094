"""What functions captured, as kernels take it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...reference.flex import Mod


def element(x: Tensor) -> Tensor:
    """A captured tensor as kernels read it: of one dimension at least, and not empty."""
    if x.numel() == 0:
        raise IndexError(f"an index is out of range for a captured tensor of shape {tuple(x.shape)}")
    return x if x.dim() else x.reshape(1)


def scalars_of(mod: Mod) -> tuple[Any, ...]:
    """A program's scalars: floats, or whole numbers."""
    return tuple(
        value if dtype.startswith(("float", "bfloat")) else int(value)
        for dtype, value in zip(mod.program.scalars, mod.scalars, strict=True)
    )


def captured_of(mod: Mod | None) -> tuple[Any, Any] | None:
    """What a function captured, as `kernels.common.programs.Captured`."""
    if mod is None or not (mod.tensors or mod.scalars):
        return None
    return tuple(map(element, mod.tensors)) or None, scalars_of(mod) or None
