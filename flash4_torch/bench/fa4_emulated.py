"""flash-attn-4's kernels in the emulator, if that package is installed; we do not depend on it."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from .. import env
from ..emulator import host

Run = Callable[[host.Launch], None]
ALIGNMENT = 256  # bytes; cudaMalloc aligns to this


@contextmanager
def flash_attn_4(run: Run, arch: str, num_sms: int | None = None) -> Iterator[ModuleType]:
    """flash-attn-4's `interface` module; inside the context `_flash_attn_fwd` and `_bwd` take CPU tensors."""
    num_sms = num_sms or host.ARCHITECTURES[arch].num_sms
    before = env.change({"FLASH_ATTENTION_ARCH": arch, "FLASH_ATTENTION_NUM_SMS": str(num_sms)})
    try:
        with pretended_gpu(run, arch, num_sms), warnings.catch_warnings():
            # The DSL warns about an argument that the kernels leave out when it is empty.
            warnings.filterwarnings("ignore", message="Argument aux_data")
            interface = importlib.import_module("flash_attn.cute.interface")
            _forget_device(interface)
            yield interface
    finally:
        env.change(before)


def _forget_device(interface: ModuleType) -> None:
    """Clears flash-attn-4's caches of device properties: the next test may emulate another device."""
    interface._get_device_arch.cache_clear()
    importlib.import_module("flash_attn.cute.cute_dsl_utils").get_max_active_clusters.cache_clear()


@contextmanager
def pretended_gpu(run: Run, arch: str, num_sms: int | None = None) -> Iterator[None]:
    """Installs the emulator, and makes torch report a GPU whose "cuda" memory is the CPU's."""
    device = host.ARCHITECTURES[arch]
    stream = SimpleNamespace(cuda_stream=0)
    properties = SimpleNamespace(
        major=device.major,
        minor=device.minor,
        multi_processor_count=num_sms or device.num_sms,
    )
    answers = {
        "torch.cuda.is_available": True,
        "torch.cuda.device_count": 1,
        "torch.cuda.current_device": 0,
        "torch.cuda.current_stream": stream,
        "torch.cuda.Stream": stream,
        "torch.cuda.default_stream": stream,
        "torch.cuda.Event": mock.MagicMock(**{"elapsed_time.return_value": 1.0}),
        "torch.cuda.get_device_capability": (device.major, device.minor),
        "torch.cuda.get_device_properties": properties,
        "torch.cuda.synchronize": None,
        "cuda.bindings.driver.cuInit": None,
        "cuda.bindings.driver.cuDeviceGetCount": (0, 1),  # success, one device
        "cutlass.base_dsl.runtime.cuda.initialize_cuda_context": None,
        "cutlass.testing.benchmark": 1.0,  # examples time themselves after they check their results
        "cutlass.cute.testing.benchmark": 1.0,
    }
    host.install(run, arch, num_sms)
    with ExitStack() as stack:
        stack.callback(host.uninstall)
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, return_value=answer))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(lambda tensor: True)))
        stack.enter_context(_CudaOnCpu())
        yield


class _CudaOnCpu(TorchFunctionMode):
    """torch's functions with "cuda" replaced by "cpu"; new tensors are aligned like CUDA memory."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return _aligned(args[0])
        kwargs = kwargs or {}
        named = {name: _on_cpu(value) for name, value in kwargs.items()}
        result = function(*map(_on_cpu, args), **named)
        made = any(map(_names_cuda, [*args, *kwargs.values()]))
        return _aligned(result) if made and isinstance(result, torch.Tensor) else result


def _names_cuda(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) and str(value).startswith("cuda")


def _on_cpu(value: Any) -> Any:
    return "cpu" if _names_cuda(value) else value


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of the same strides, at a multiple of ALIGNMENT."""
    if tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = torch.empty(extent * tensor.element_size() + ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % ALIGNMENT
    copy = memory[start : start + extent * tensor.element_size()].view(tensor.dtype)
    return copy.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
