"""The host side of our kernels for programmable attention without a GPU.

Stand-ins take the place of compiled kernels. What they write depends on everything that a kernel is given, so
that results are equal where kernels are given the same, and are not otherwise.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from driver_stand_in import driver
from flash4_torch import compile, fast_path
from flash4_torch.backends.compiled import POSTPROCESS, PREPROCESS, SM90A, prepared
from flash4_torch.backends.compiled.targets import BLOCK_BITS, BLOCK_TABLES
from flash4_torch.backends.flex import compiled, dispatch
from flash4_torch.backends.flex.compiled import Compiled, Emulated, why_not_kernels
from flash4_torch.backends.flex.tiled import Tiled
from flash4_torch.flex_problem import FlexProblem
from on_cpu_backward import in_order

Launch = tuple[str, float]
"""A kernel's entry, and a number that depends on all that it is given."""


class OnCpu(Compiled):
    """The backend of our kernels, which takes the CPU for a GPU."""

    def __init__(self) -> None:
        super().__init__("sm90", SM90A)

    def why_not(self, problem: FlexProblem) -> list[str]:
        return super().why_not(_on_gpu(problem))

    def target(self, problem: FlexProblem) -> Any:
        return super().target(_on_gpu(problem))

    def sms(self, index: int) -> int:
        return 132


def _on_gpu(problem: FlexProblem) -> FlexProblem:
    return problem._replace(spec=problem.spec._replace(device="cuda", capability=SM90A.capability))


@contextmanager
def gpu() -> Iterator[list[Launch]]:
    """A context in which flex_attention on CPU tensors goes to stand-ins; what they were given."""
    launches: list[Launch] = []

    def function(entry: str, static: tuple[Any, ...], arch: str) -> compile.Function:
        return lambda *args: _launch(launches, entry, static, args)

    forget()
    with ExitStack() as stack:
        for owner, name, value in (
            (dispatch, "PRIORITY", (OnCpu(), Tiled())),
            (compile, "function", function),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(driver())
        stack.enter_context(mock.patch("flash4_torch.problem._MADE_CONTIGUOUS", frozenset()))
        stack.callback(forget)
        yield launches


def forget() -> None:
    fast_path.clear()
    compiled._kernel.cache_clear()
    compiled._backward_kernels.cache_clear()


_WRITTEN = {
    BLOCK_BITS: (2, 3, 7),
    BLOCK_TABLES: (3, 4, 5, 6),
    PREPROCESS: (5, 6, 7),
    POSTPROCESS: (1,),
    SM90A.forward: (3, 4, 5),
    SM90A.backward: (5, 6, 7, 8),
}
"""Places of the arguments that a kernel writes. The backward's adds to sums of captured gradients, too."""
_STATS, _OUT = 4, 9
"""Places of what a backward that `preprocesses` writes and takes besides."""
_OF_MODS = 13
"""Place of what the backward's kernel takes for functions and block masks, and there of these sums."""
_SUMS = 3


def _launch(launches: list[Launch], entry: str, static: tuple[Any, ...], args: tuple[Any, ...]) -> None:
    if entry == SM90A.forward and static[0].splits:
        *args, parts = args
        fill(parts, 0.0)
    written, args = _WRITTEN.get(entry, ()), _in_order(entry, tuple(args))
    if entry == SM90A.backward and static[1].preprocesses:
        written = _STATS, *written
    number = digest((repr(static), *[x for i, x in enumerate(args) if i not in written]))
    if entry not in (BLOCK_BITS, BLOCK_TABLES):  # They are made once for a mask.
        launches.append((entry, number))
    for i in written:
        if args[i] is not None:
            fill(args[i], number + i)
    mods = args[_OF_MODS] if entry == SM90A.backward and len(args) > _OF_MODS else None
    if mods is not None and len(mods) > _SUMS:
        for i, x in enumerate(mods[_SUMS] or ()):
            x += (_ramp(x.numel()) * math.cos(number + i)).view(x.shape).to(x.dtype)


def _in_order(entry: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with dense tensors as (B, S, H, D), whatever the order in which they came."""
    ordered, last = list(args), args[-1]
    if entry in (SM90A.forward, SM90A.backward):
        *params, heads_first, out_heads_first = last
        ordered[:3] = in_order(heads_first, *args[:3])
        ordered[3:4] = in_order(out_heads_first, args[3])
        if entry == SM90A.backward:
            ordered[6:9] = in_order(heads_first, *args[6:9])
            if len(args) == _OF_MODS:
                ordered[_OUT : _OUT + 1] = in_order(out_heads_first, args[_OUT])
        ordered[-1] = tuple(params)
    elif entry == PREPROCESS:
        ordered[:2], ordered[-1] = in_order(last, *args[:2]), 0
    elif entry == POSTPROCESS:
        ordered[1:2], ordered[-1] = in_order(last, args[1]), 0
    return tuple(ordered)


@lru_cache(maxsize=64)
def _ramp(n: int) -> Tensor:
    return torch.cos(torch.arange(n, dtype=torch.float64))


def fill(x: Tensor, number: float) -> None:
    values = _ramp(x.numel()).view(x.shape) + math.cos(number)
    x.copy_(values if x.is_floating_point() else (values * 1e6).long() % 100)


def digest(x: Any) -> float:
    """A number that depends on everything that x holds: values, sizes and strides, but not addresses."""
    if isinstance(x, Tensor):
        values = torch.nan_to_num(x.detach().double(), 7.0, 9.0, -9.0).flatten()
        strides = [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]
        return float(values @ _ramp(x.numel())) + digest((str(x.dtype), *x.shape, *strides))
    if isinstance(x, str):
        return zlib.crc32(x.encode()) / 1e7
    if isinstance(x, (bool, int, float)) or x is None:
        return -3.0 if x is None else float(x)
    return sum(math.cos(i + 1.0) * digest(each) for i, each in enumerate(x))


class _Emulating(Emulated):
    """The emulator's backend, which is asked though no variable of the environment asks for it."""

    def why_not(self, problem: FlexProblem) -> list[str]:
        return list(why_not_kernels(self.target(problem), problem))


@contextmanager
def emulated_gpu() -> Iterator[None]:
    """A context in which flex_attention on CPU tensors goes to the emulator's kernels.

    They take the fast path, too; what they write is NaN before.
    """
    with ExitStack() as stack:
        for owner, name, value in (
            (dispatch, "PRIORITY", (_Emulating(), Tiled())),
            (prepared, "converted", lambda params: params),
            (prepared, "_empty", lambda device: _poisoned),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(driver())
        forget()
        stack.callback(forget)
        yield


def _poisoned(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.empty_strided(sizes, strides, dtype=dtype)
    return x.fill_(torch.nan if dtype.is_floating_point else 77)
