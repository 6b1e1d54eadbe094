"""Runs recorded launches on a GPU and reports in JSON how their results differ from the emulator's."""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver
from torch import Tensor

from .comparison import compared, differences
from .recording import Launch, Recording, Region, Step

SECONDS_A_STEP = 60  # the first step also starts CUDA
ALIGNMENT = 512  # bytes: alignment of what torch allocates on a GPU


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if any difference is not explained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("result", type=Path)
    given = parser.parse_args(arguments)
    steps = [replayed_elsewhere(given.recording, i) for i in _numbers(given.recording)]
    _stop_worker()
    good = sum(step["explained"] for step in steps)
    summary = {
        "steps": len(steps),
        "explained": good,
        "identical": sum(s.get("identical", False) for s in steps),
    }
    result = {"versions": versions(given.recording), "summary": summary, "steps": steps}
    given.result.write_text(json.dumps(result, indent=1) + "\n")
    print(summary)
    return int(good < len(steps))


def _numbers(path: Path) -> range:
    return range(len(_recording(path).steps))


def versions(path: Path) -> dict[str, Any]:
    version = call(driver.cuDriverGetVersion)
    return {
        "recorded with": _recording(path).versions,
        "replayed with": {
            "device": torch.cuda.get_device_name(),
            "CUDA driver": f"{version // 1000}.{version % 1000 // 10}",
            "torch": torch.__version__,
        },
    }


def replayed_elsewhere(path: Path, number: int) -> dict[str, Any]:
    """Replays a step in a process of its own, because a kernel that fails or hangs spoils the process."""
    step = _recording(path).steps[number]
    try:
        outcome = _submit(path, number).result(SECONDS_A_STEP)
    except Exception as error:
        _stop_worker()
        outcome = {"explained": False, "error": f"{type(error).__name__}: {error}"}
    kernels = {launch.kernel: launch.ptx_sha256 for launch in step.launches}
    answer = {"step": step.name, "ptx_sha256": kernels, **outcome}
    if not outcome["explained"]:
        print(json.dumps(answer), flush=True)
    return answer


def _submit(path: Path, number: int) -> Future[dict[str, Any]]:
    return _worker().submit(replayed, path, number)


@functools.cache
def _worker() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def _stop_worker() -> None:
    for process in list((_worker()._processes or {}).values()):
        process.kill()
    _worker().shutdown()
    _worker.cache_clear()


@functools.cache
def _recording(path: Path) -> Recording:
    return Recording.load(path)


def replayed(path: Path, number: int) -> dict[str, Any]:
    """Runs one step, and compares all its memory with what the emulator made of it."""
    recording = _recording(path)
    step = recording.steps[number]
    buffers = [Buffer.holding(recording.bytes(r.before), r.address) for r in step.regions]
    run(recording, step, buffers)
    pairs = zip(step.regions, buffers, strict=True)
    outputs = [compare(recording, r, b.bytes.cpu()) for r, b in pairs if touched(recording, r, b.bytes.cpu())]
    return {
        "explained": all(output["explained"] for output in outputs),
        "identical": all(output["differing"] == 0 for output in outputs),
        "outputs": outputs,
    }


def touched(recording: Recording, region: Region, result: Tensor) -> bool:
    """Whether the emulator or the GPU changed the region."""
    return region.before != region.after or not torch.equal(
        result, recording.tensor(region.before, torch.uint8)
    )


def compare(recording: Recording, region: Region, result: Tensor) -> dict[str, Any]:
    """Compares the GPU's result, in bytes, with the emulator's.

    Also compares the emulator's result with the model's and gives its distance from the exact one.
    """
    ours = recording.tensor(region.after, region.dtype)
    answer = {"name": region.name, **compared(result.view(region.dtype), ours, region.bound)}
    if region.model is not None:
        answer["of_model"] = differences(recording.tensor(region.model, region.dtype), ours)
    if region.error is not None:
        answer["rms_of_emulator_from_exact"] = region.error
    return answer


@dataclass(frozen=True)
class Buffer:
    """Memory of the GPU, aligned as the recorded memory was."""

    bytes: Tensor

    @staticmethod
    def holding(data: bytes, address: int) -> Buffer:
        memory = torch.empty(len(data) + ALIGNMENT, dtype=torch.uint8, device="cuda")
        start = address % ALIGNMENT
        held = memory[start : start + len(data)]
        if data:
            held.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return Buffer(held)

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()


def run(recording: Recording, step: Step, buffers: Sequence[Buffer]) -> None:
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for launch in step.launches:
        start(_function(recording, launch), launch, parameters(launch, buffers), stream.cuda_stream)
    torch.cuda.synchronize()


def parameters(launch: Launch, buffers: Sequence[Buffer]) -> list[Tensor]:
    params = [bytearray(data) for data in launch.params]
    for number, offset, region, distance in launch.pointers:
        address = buffers[region].address + distance
        params[number][offset : offset + 8] = address.to_bytes(8, "little")
    return [torch.frombuffer(data, dtype=torch.uint8) for data in params]


_functions: dict[tuple[str, str], Any] = {}


def _function(recording: Recording, launch: Launch) -> Any:
    """The kernel, allowed to use the shared memory and the cluster size that it asks for."""
    key = launch.cubin, launch.kernel
    if key not in _functions:
        library = call(driver.cuModuleLoadData, recording.bytes(launch.cubin))
        _functions[key] = call(driver.cuModuleGetFunction, library, launch.kernel.encode())
    attributes = driver.CUfunction_attribute
    for attribute, value in (
        (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared),
        (attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
    ):
        call(driver.cuFuncSetAttribute, _functions[key], attribute, value)
    return _functions[key]


def start(function: Any, launch: Launch, params: Sequence[Tensor], stream: int) -> None:
    attributes = _attributes(launch)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
    config.sharedMemBytes, config.hStream = launch.shared, stream
    config.attrs, config.numAttrs = attributes, len(attributes)
    addresses = torch.tensor([data.data_ptr() for data in params])
    call(driver.cuLaunchKernelEx, config, function, addresses.data_ptr(), 0)


def _attributes(launch: Launch) -> list[Any]:
    ids = driver.CUlaunchAttributeID
    cluster = driver.CUlaunchAttribute()
    cluster.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = launch.cluster
    together = driver.CUlaunchAttribute()
    together.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    together.value.cooperative = int(launch.cooperative)
    early = driver.CUlaunchAttribute()
    early.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = int(launch.programmatic)
    return [cluster, together, early]


def call(function: Any, *args: Any) -> Any:
    error, *results = function(*args)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{function.__name__}: {error.name}")
    return results[0] if results else None


if __name__ == "__main__":
    raise SystemExit(main())
