"""What `python -m flash4_torch info` prints: versions, devices, backends, kernels, environment, cache."""

from __future__ import annotations

import platform
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from . import __version__, api, env
from .backends.compiled import TARGETS
from .compile import cache, key

Info = dict[str, Any]


def collect() -> Info:
    """Everything `text` prints, as plain data. Compiles and computes nothing; needs no GPU."""
    return {
        "versions": versions(),
        "devices": [cpu(), *gpus()],
        "backends": {device: backends(device) for device in ["cpu", *(gpu["device"] for gpu in gpus())]},
        "kernels": kernels(),
        "environment": [
            {"name": v.name, "value": v.get(), "default": v.default, "meaning": v.meaning} for v in env.ALL
        ],
        "kernel cache": kernel_cache(),
    }


def versions() -> dict[str, str]:
    """What is installed, by name; nothing is imported for it."""
    return {
        "flash4_torch": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA (of torch)": torch.version.cuda or "none",
        "nvidia-cutlass-dsl": installed("nvidia-cutlass-dsl"),
        "CUDA (of nvidia-cutlass-dsl)": key.versions()["CUDA"],
        "apache-tvm-ffi": installed("apache-tvm-ffi"),
    }


def installed(distribution: str) -> str:
    """The version of a distribution, or that there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def kernel_cache() -> str:
    files = cache.contents()
    mib = sum(file.stat().st_size for file in files) / 2**20
    return f"{len(files)} kernels, {mib:.1f} MiB in {cache.folder()}"


def cpu() -> Info:
    return {
        "device": "cpu",
        "name": _cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    description = Path("/proc/cpuinfo")
    lines = description.read_text().splitlines() if description.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def gpus() -> list[Info]:
    """Each CUDA device with its name, compute capability and memory in GiB."""
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        )
    return found


def backends(device: str) -> dict[str, list[str]]:
    """For a plain training call on `device`: each backend by priority, and why it cannot serve it, if so."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.empty(1, 128, 1, 64, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    return api.support(q, k, v)


def kernels() -> dict[str, str]:
    """For each architecture that we have kernels for, how they were proven."""
    return {arch: target.proven for arch, target in TARGETS.items()}


def text(info: Info) -> str:
    """`collect`'s result for reading."""
    lines = ["versions"]
    lines += _aligned(list(info["versions"].items()))
    lines += ["", "devices"]
    lines += _aligned([(d["device"], _device_sentence(d)) for d in info["devices"]])
    for device, reasons in info["backends"].items():
        lines += ["", f"backends for plain attention on {device}, forward and backward, in order of priority"]
        lines += _aligned([(name, "; ".join(why) or "serves it") for name, why in reasons.items()])
    lines += ["", "our kernels by architecture, and how they were proven"]
    lines += _aligned(list(info["kernels"].items()))
    lines += ["", "environment variables"]
    for variable in info["environment"]:
        lines += _aligned([(variable["name"], variable["value"] or "(empty)")])
        lines += textwrap.wrap(variable["meaning"], 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    lines += ["", f"kernel cache: {info['kernel cache']}"]
    return "\n".join(lines)


def _device_sentence(device: Info) -> str:
    if device["device"] == "cpu":
        return f"{device['name']}, {device['capability']}, {device['threads']} threads"
    return f"{device['name']}, compute capability {device['capability']}, {device['memory_gib']} GiB"


def _aligned(pairs: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in pairs)
    return [f"  {name:<{width}}  {value}" for name, value in pairs]
