"""The host side of kernels over KV caches without a GPU: what is looked for, and launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from flash4_torch.backends.compiled import Target
from flash4_torch.backends.compiled.targets import Find
from flash4_torch.backends.compiled.tensors import past_dispatcher
from flash4_torch.backends.compiled.workspace import Need, Workspace, allocated
from flash4_torch.backends.kvcache import append, choice, decode_kernel, dispatch
from flash4_torch.backends.kvcache import compiled as kernels
from flash4_torch.fast_path import append as append_path
from flash4_torch.fast_path import kvcache as fast_path
from flash4_torch.kvcache_problem import CacheProblem
from flash4_torch.ops import kvcache as ops

NUM_SMS = 132


class Launch(NamedTuple):
    entry: str
    static: tuple[object, ...]
    args: tuple[Any, ...]


class Finding(kernels.Compiled):
    """The backend of a GPU, which takes the CPU for one, and notes the kernels that it looks for."""

    def __init__(self, target: Target) -> None:
        super().__init__("own", target)
        self.own = target
        self.found: list[tuple[str, tuple[object, ...]]] = []
        self.launches: list[Launch] = []

    def why_not(self, problem: CacheProblem) -> list[str]:
        return list(decode_kernel.limits(problem, self.own.decode))

    def target(self, problem: CacheProblem) -> Target:
        return self.own

    def find(self, problem: CacheProblem) -> Find:
        return self._find

    def _find(self, entry: str, static: tuple[object, ...]) -> Any:
        self.found.append((entry, static))
        return lambda *args: self.launches.append(Launch(entry, static, args))

    def sms(self, index: int) -> int:
        return NUM_SMS

    def current_device(self) -> int:
        return -1

    def workspace(self, index: int, needs: tuple[Need, ...]) -> Workspace:
        return allocated(needs, past_dispatcher("cpu"))

    def counters(self, index: int, number: int) -> Tensor:
        return torch.zeros(number, dtype=torch.int32)


@contextmanager
def gpu(target: Target) -> Iterator[Finding]:
    """A context in which calls around KV caches go to that GPU's kernels, which do nothing.

    As on a GPU, nobody reads lengths.
    """
    backend = Finding(target)
    found = choice.Kernels(target, backend._find)
    fast_path.clear()
    append_path.clear()
    try:
        with (
            mock.patch.object(dispatch, "PRIORITY", (backend,)),
            mock.patch.object(append, "find_kernels", lambda *args: None if args[-1] else found),
            mock.patch.object(ops, "check_values", lambda *args: None),
            mock.patch.object(fast_path, "check_values", lambda *args: None),
        ):
            yield backend
    finally:
        fast_path.clear()
        append_path.clear()
