"""Runs kernels in the emulator and records all it takes to run them on a GPU."""

from __future__ import annotations

import argparse
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flash4_torch.emulator import dsl, host, ptx
from flash4_torch.emulator.emulate import Device
from flash4_torch.emulator.engine import Options, pack_parameters

from ..kernels import all_cases
from ..peers import flash_attn_4
from . import bounds
from .recording import Bound, Launch, Recording, Region, Step

ARCH = "sm_90a"
PACKAGES = ("flash4-torch", "torch", "nvidia-cutlass-dsl")


class Recorder:
    """An emulated device that records what it is given to do."""

    def __init__(self, schedule: str = "late"):
        self.recording = Recording({name: version(name) for name in PACKAGES})
        self._device = Device(ARCH, Options(schedule=schedule))
        self._cubins: dict[str, bytes] = {}
        self._tensors: dict[int, tuple[str, Tensor]] = {}  # by the storage's address, which they keep alive
        self._exact: dict[int, Tensor] = {}
        self._bounds: Callable[[str], Bound] = lambda name: Bound()
        self._step: tuple[str, list[Launch], dict[int, bytes]] = ("", [], {})

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, must be installed as the seam's `run`: learns cubins, and tensors as they are passed."""
        connect, convert = dsl.connect, dsl.as_device_arguments

        def connect_and_learn(*, learn: Callable[[bytes, str], None], **rest: Any) -> ExitStack:
            def learn_twice(cubin: bytes, text: str) -> None:
                self._cubins[text] = cubin
                learn(cubin, text)

            return connect(learn=learn_twice, **rest)

        def convert_and_remember(value: Any) -> Any:
            self._remember_all(value)
            return convert(value)

        with (
            mock.patch.object(dsl, "connect", connect_and_learn),
            mock.patch.object(dsl, "as_device_arguments", convert_and_remember),
        ):
            yield

    def remember(self, name: str, tensor: Tensor, exact: Tensor | None = None) -> None:
        """The first name that a tensor's memory gets is the one in the recording; exact: what it should become."""
        address = tensor.untyped_storage().data_ptr()
        self._tensors.setdefault(address, (name, tensor))
        if exact is not None:
            self._exact[address] = exact

    def _remember_all(self, value: Any) -> None:
        if isinstance(value, (tuple, list)):
            for item in value:
                self._remember_all(item)
        elif isinstance(tensor := getattr(value, "tensor", value), Tensor):
            self.remember(f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}", tensor)

    @contextmanager
    def step(self, name: str, bound: Callable[[str], Bound]) -> Iterator[None]:
        """Records the launches inside as one step; bound: by the name of a tensor."""
        self._begin(name, bound)
        try:
            yield
            self._end()
        finally:
            self._tensors, self._exact = {}, {}

    @contextmanager
    def steps(self, name: str, bound: Callable[[str], Bound]) -> Iterator[None]:
        """Records each launch inside as a step of its own."""
        with mock.patch.object(self, "run", lambda launch: None):
            yield

    def _begin(self, name: str, bound: Callable[[str], Bound]) -> None:
        self._step, self._bounds = (name, [], {}), bound

    def _end(self) -> None:
        ...
