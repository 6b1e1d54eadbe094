"""Runs the hand-written PTX of the emulator's tests on a real GPU, to see whether they expect what it does:

    PYTHONPATH=.:tests/emulator python -m pytest -p on_gpu tests/emulator/test_memory.py

Needs an NVIDIA GPU of sm_90a and cuda-python. Tests of the emulator's findings are skipped, and tests of
instructions that the GPU does not have fail. A test that breaks the GPU's context ends the process: with
pytest-xdist (`-n 4`) the others go on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from flash4_torch.emulator import engine, ptx
from flash4_torch.emulator.report import Counters, Report

TENSOR_MAP_BYTES = 128


def call(function: Any, *args: Any) -> Any:
    error, *results = function(*args)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{function.__name__}: {error.name}")
    return results[0] if results else None


class DeviceArrays:
    """Copies of arrays on the device; addresses in tensor maps are translated to them."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self.arrays = arrays
        self.pointers = [int(call(driver.cuMemAlloc, max(a.nbytes, 16))) for a in arrays]
        for array, pointer in zip(arrays, self.pointers, strict=True):
            copy = array.copy()
            if array.nbytes == TENSOR_MAP_BYTES:
                words = copy.reshape(-1).view(np.uint64)
                words[0] = self.translated(int(words[0]))
            call(driver.cuMemcpyHtoD, pointer, copy.ctypes.data, copy.nbytes)

    def translated(self, address: int) -> int:
        for array, pointer in zip(self.arrays, self.pointers, strict=True):
            if 0 <= address - array.ctypes.data < array.nbytes:
                return address - array.ctypes.data + pointer
        return address

    def fetch(self) -> None:
        for array, pointer in zip(self.arrays, self.pointers, strict=True):
            copy = np.empty(array.shape, array.dtype)
            call(driver.cuMemcpyDtoH, copy.ctypes.data, pointer, array.nbytes)
            array[...] = copy
            call(driver.cuMemFree, pointer)


def launch(function: Any, params: bytes, grid: Any, block: Any, cluster: Any, dynamic_shared: int) -> None:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = dynamic_shared
    config.attrs, config.numAttrs = [attribute], 1
    buffer = np.frombuffer(params + b"\0", np.uint8).copy()
    size = np.array([len(params)], np.uint64)
    # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END
    extra = np.array([1, buffer.ctypes.data, 2, size.ctypes.data, 0], np.uint64)
    call(driver.cuLaunchKernelEx, config, function, 0, extra.ctypes.data)
    call(driver.cuCtxSynchronize)


def run_on_gpu(
    text: str,
    args: Sequence[Any] = (),
    *,
    grid: Any = (1, 1, 1),
    block: Any = (32, 1, 1),
    cluster: Any = (1, 1, 1),
    dynamic_shared: int = 0,
    options: Any = None,
    check: bool = True,
) -> Report:
    """Runs like `engine.run_ptx`, on the GPU; the report is empty."""
    if not check:
        pytest.skip("findings are the emulator's")
    (kernel,) = ptx.parse(text).kernels
    arrays = DeviceArrays([a for a in args if isinstance(a, np.ndarray)])
    pointers = iter(arrays.pointers)
    values = [next(pointers).to_bytes(8, "little") if isinstance(a, np.ndarray) else bytes(a) for a in args]
    code = text.replace(".target sm_100a", ".target sm_90a").encode() + b"\0"
    module = call(driver.cuModuleLoadData, code)
    function = call(driver.cuModuleGetFunction, module, kernel.name.encode())
    try:
        launch(function, engine.pack_parameters(kernel, values), grid, block, cluster, dynamic_shared)
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    arrays.fetch()
    call(driver.cuModuleUnload, module)
    zeros = dict.fromkeys(Counters.__dataclass_fields__, 0)
    return Report(
        kernel=kernel.name, findings=[], counters=Counters(**{**zeros, "by_pipe": {}}), make_lines=list
    )


def pytest_configure() -> None:
    call(driver.cuInit, 0)
    context = call(driver.cuDevicePrimaryCtxRetain, call(driver.cuDeviceGet, 0))
    call(driver.cuCtxSetCurrent, context)
    engine.run_ptx = run_on_gpu
