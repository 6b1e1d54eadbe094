"""CPU tensors that pass for tensors of the emulated device."""

from __future__ import annotations

import ctypes
from typing import Any

_CPU, _CUDA = 1, 2  # DLPack's device types
# The offset of DLDevice, two int32 (type, ordinal), in the structure that a capsule of that name holds.
_DEVICE_OFFSET = {b"dltensor": 8, b"dltensor_versioned": 40}

_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class DeviceTensor:
    """The memory of a CPU tensor, which DLPack presents as memory of CUDA device 0."""

    def __init__(self, tensor: Any):
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None, **_: Any) -> Any:
        """The tensor's capsule. Launches are complete when they return, so streams mean nothing here."""
        version = {} if max_version is None else {"max_version": max_version}
        capsule = self.tensor.__dlpack__(**version)
        name = _capsule_name(capsule)
        device = _capsule_pointer(capsule, name) + _DEVICE_OFFSET[name]
        (ctypes.c_int32 * 2).from_address(device)[:] = [_CUDA, 0]
        return capsule


def as_device(tensor: Any) -> Any:
    """`tensor` as a tensor of the emulated device; it shares the memory.

    Takes anything with `__dlpack__` (a torch tensor, a NumPy array); raises ValueError unless it is in CPU
    memory.
    """
    if isinstance(tensor, DeviceTensor):
        return tensor
    device = tensor.__dlpack_device__()
    if device[0] != _CPU:
        raise ValueError(f"the emulator works on CPU tensors; this one is on DLPack device {tuple(device)}")
    return DeviceTensor(tensor)


def as_device_arguments(value: Any) -> Any:
    """`value` with every tensor in it, in tuples and lists at any depth, as the emulated device's."""
    if hasattr(value, "__dlpack__"):
        return as_device(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(as_device_arguments, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(as_device_arguments, value))
    return value
