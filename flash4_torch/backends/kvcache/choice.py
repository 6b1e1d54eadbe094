"""Who serves what is done around a KV cache: compiled kernels, the emulator, or plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import env
from ...errors import BackendError
from .. import emulator, tile_counters
from ..compiled.backend import missing_packages
from ..compiled.targets import SM90A, SM100A, SM103A, Find

_KERNELS = {"sm90": (SM90A,), "sm100": (SM100A, SM103A)}
"""Backends of compiled kernels."""
_TARGETS = {target.capability: (name, target) for name, targets in _KERNELS.items() for target in targets}


def find_kernels(call: str, device: torch.device, limits: Sequence[str]) -> Find | None:
    """The function that gets compiled kernels for a device, or None if plain torch serves the call.

    call: its name, for errors. limits: sentences why the kernels cannot serve it on any device. Plain torch
    also stands for those backends that have no kernels for it: cpu, sdpa, sm80, efficient and tiled.

    Raises:
        BackendError: FLASH4_BACKEND asks for kernels, and they cannot serve the call.
        RangeError: FLASH4_BACKEND names no backend.
    """
    forced = env.BACKEND.get()
    find: Find = emulator.emulated_find
    if forced == emulator.Emulator.name:
        why = _why_not_emulated(device)
    elif forced and forced not in _KERNELS:
        return None
    else:
        why, find = _compiled(device, forced)
    why = [*why, *limits]
    if why and forced:
        raise BackendError(call, {forced: why})
    return None if why else find


def _compiled(device: torch.device, forced: str) -> tuple[list[str], Find]:
    """Sentences why compiled kernels do not serve a device, and the function that gets them."""
    if device.type != "cuda":
        return [f"the tensors are on {device.type}, and it serves cuda"], emulator.emulated_find
    capability = torch.cuda.get_device_capability(device)
    _, target = _TARGETS.get(capability, ("", SM90A))
    served = [of for of, (of_name, _) in _TARGETS.items() if forced in ("", of_name)]
    why = (
        []
        if capability in served
        else [f"the GPU's compute capability is {capability}, and it serves {' and '.join(map(str, served))}"]
    )
    return [*why, *_packages(missing_packages(exported=bool(env.AOT_DIR.get())))], target.find


def _why_not_emulated(device: torch.device) -> list[str]:
    why = [] if device.type == "cpu" else [f"the tensors are on {device.type}, and it serves cpu"]
    return [*why, *_packages(missing_packages(exported=False))]


def _packages(absent: Sequence[str]) -> list[str]:
    if not absent:
        return []
    return [f"{' and '.join(absent)} must be installed (pip install 'flash4_torch[kernels]')"]


def launch_on(device: torch.device, kernel: Callable[..., Any], *args: Any) -> None:
    """Launches on the current stream of a device, which need not be the current one."""
    if device.type == "cuda" and tile_counters.current_device() != device.index:
        with torch.cuda.device(device):
            kernel(*args)
    else:
        kernel(*args)
