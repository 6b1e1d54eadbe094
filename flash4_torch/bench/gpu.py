"""The state of a GPU, as nvidia-smi reports it. Nothing here changes a setting."""

from __future__ import annotations

import subprocess

import torch

_QUERIES = {
    "driver": "driver_version",
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "watts": "power.draw",
    "limit_watts": "power.limit",
    "celsius": "temperature.gpu",
}


def state() -> dict[str, str]:
    """Driver, clocks, power and temperature of torch's current device; empty if nvidia-smi cannot tell."""
    if not torch.cuda.is_available():
        return {}
    card = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    query = f"--query-gpu={','.join(_QUERIES.values())}"
    command = ["nvidia-smi", f"--id={card}", query, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_QUERIES, map(str.strip, answer.split(",")), strict=True))
