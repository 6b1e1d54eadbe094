"""The report of `python -m flash4_torch info`: versions, devices, backends, kernels, environment, cache."""

from __future__ import annotations

import os
import platform
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from . import __version__, api, env
from .backends.compiled import TARGETS
from .compile import aot, cache, key
from .errors import Flash4Error, RangeError

Info = dict[str, Any]


def collect() -> Info:
    """Everything that `text` prints, as plain data. Compiles and computes nothing; needs no GPU."""
    return {
        "versions": versions(),
        "devices": [cpu(), *gpus()],
        "backends": {device: backends(device) for device in ["cpu", *(gpu["device"] for gpu in gpus())]},
        "kernels": kernels(),
        "environment": [
            {
                "name": variable.name,
                "value": variable.raw() or variable.default,
                "default": variable.default,
                "meaning": variable.meaning,
                "wrong": what_is_wrong(variable),
            }
            for variable in env.ALL
        ],
        "misspelt": env.misspelt(),
        "cache": kernel_cache(),
    }


def what_is_wrong(variable: env.Variable) -> str | None:
    """A sentence if the variable has a value that it cannot take, or names something that does not exist."""
    value = variable.raw()
    if not value:
        return None
    try:
        variable.get()
        if variable.is_folder and os.path.expanduser(value)[0] == "~":
            raise RangeError(variable.name, repr(value), "there is no such home folder")
        if variable is env.CACHE_DIR and not _may_hold_files(Path(value).expanduser()):
            raise RangeError(variable.name, repr(value), "it must be a folder that can be written to")
        if variable is env.AOT_DIR:
            aot.find(key.Key("", (), ""))
        if variable is env.BENCH_FA3 and not Path(value).is_file():
            raise RangeError(variable.name, repr(value), "there is no such file")
    except RangeError as error:
        return str(error)
    except Flash4Error as error:
        return f"{variable.name}: {error}"
    return None


def _may_hold_files(folder: Path) -> bool:
    """Whether the folder can be written to, or could be created; creates nothing."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError:
        return False
    return existing.is_dir() and os.access(existing, os.W_OK)


def complaints(info: Info) -> list[str]:
    """Everything that `collect` found wrong with the environment, as sentences."""
    return [*filter(None, (variable["wrong"] for variable in info["environment"])), *info["misspelt"]]


def versions() -> dict[str, str]:
    """Installed versions by name; nothing is imported to find them."""
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
    """The version of a distribution, or "not installed"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def kernel_cache() -> Info:
    """The cache's folder and its number of kernels and bytes; `error` says why there is no such folder."""
    try:
        files = cache.contents()
        sizes = [file.stat().st_size for file in files]
        return {"folder": str(cache.folder()), "kernels": len(files), "bytes": sum(sizes), "error": None}
    except (Flash4Error, RuntimeError, OSError) as error:
        return {"folder": None, "kernels": 0, "bytes": 0, "error": str(error)}


def _cache_sentence(found: Info) -> str:
    if found["error"]:
        return f"none: {found['error']}"
    return f"{found['kernels']} kernels, {found['bytes'] / 2**20:.1f} MiB in {found['folder']}"


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
    """Each backend by priority, and the reasons, if any, why it cannot serve plain training on `device`."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.empty(1, 128, 1, 64, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    try:
        return api.support(q, k, v)
    except RangeError as error:
        return {
            name: [f"{error.argument} is wrong, and so every call raises"] for name in env.BACKEND.choices
        }


def kernels() -> dict[str, str]:
    """How our kernels were proven, for each architecture that has some."""
    return {arch: target.proven for arch, target in TARGETS.items()}


def text(info: Info) -> str:
    """The result of `collect` as readable text."""
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
        lines += _indented(variable["meaning"])
        lines += _indented(f"WRONG: {variable['wrong']}") if variable["wrong"] else []
    lines += ["", f"kernel cache: {_cache_sentence(info['cache'])}"]
    if wrong := complaints(info):
        lines += ["", "wrong environment variables", *(f"  {sentence}" for sentence in wrong)]
    return "\n".join(lines)


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _device_sentence(device: Info) -> str:
    if device["device"] == "cpu":
        return f"{device['name']}, {device['capability']}, {device['threads']} threads"
    return f"{device['name']}, compute capability {device['capability']}, {device['memory_gib']} GiB"


def _aligned(pairs: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in pairs)
    return [f"  {name:<{width}}  {value}" for name, value in pairs]
