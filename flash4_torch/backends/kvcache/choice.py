"""Who serves what is done around a KV cache: compiled kernels, the emulator, or plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ... import env
from ...errors import BackendError
from .. import emulator, tile_counters
from ..compiled.served import why_missing
from ..compiled.targets import SM80_FAMILY, SM80_ON_REQUEST, SM90A, SM100A, SM103A, Find, Target

_KERNELS = {"sm90": (SM90A,), "sm100": (SM100A, SM103A), "sm80": SM80_FAMILY}
"""Backends of compiled kernels."""
_ON_REQUEST = {"sm80": SM80_ON_REQUEST}
"""What they serve only where FLASH4_BACKEND asks for them."""


class Kernels(NamedTuple):
    """Compiled kernels for a device."""

    target: Target
    find: Find


def find_kernels(call: str, device: torch.device, limits: Sequence[str]) -> Kernels | None:
    """The compiled kernels for a device, or None if plain torch serves the call.

    call: its name, for errors. limits: sentences why the kernels cannot serve it on any device. Plain torch
    also stands for those backends that have no kernels for it: cpu, sdpa, efficient and tiled.

    Raises:
        BackendError: FLASH4_BACKEND asks for kernels, and they cannot serve the call.
        RangeError: FLASH4_BACKEND names no backend.
    """
    forced = env.BACKEND.get()
    target = None
    if forced == emulator.Emulator.name:
        why = emulator.why_not_emulated(device.type)
    elif forced and forced not in _KERNELS:
        return None
    else:
        why, target = _compiled(device, forced)
    why = [*why, *limits]
    if why and forced:
        raise BackendError(call, {forced: why})
    if why:
        return None
    return (
        Kernels(target, target.find)
        if target
        else Kernels(emulator.emulated_target(), emulator.emulated_find)
    )


def _compiled(device: torch.device, forced: str) -> tuple[list[str], Target | None]:
    """Sentences why compiled kernels do not serve a device, and its target."""
    if device.type != "cuda":
        return [f"the tensors are on {device.type}, and it serves cuda"], None
    capability = torch.cuda.get_device_capability(device)
    served = {
        target.capability: target
        for name, targets in _KERNELS.items()
        for target in targets
        if forced in ("", name)
    }
    served |= {target.capability: target for target in _ON_REQUEST.get(forced, ())}
    why = []
    if capability not in served:
        own = " and ".join(map(str, served))
        why.append(f"the GPU's compute capability is {capability}, and it serves {own}")
    return [*why, *why_missing(exported=bool(env.AOT_DIR.get()))], served.get(capability)


def launch_on(device: torch.device, kernel: Callable[..., Any], *args: Any) -> None:
    """Launches on the current stream of a device, which need not be the current one."""
    if device.type == "cuda" and tile_counters.current_device() != device.index:
        with torch.cuda.device(device):
            kernel(*args)
    else:
        kernel(*args)
