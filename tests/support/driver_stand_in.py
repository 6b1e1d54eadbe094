"""A stand-in for CUDA's driver: a device with one stream, counters of 0, and a workspace of NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor

from flash4_torch.backends import tile_counters
from flash4_torch.backends.compiled import workspace

_NAN = 0x7FC00000
"""A float32, seen as an integer."""


@contextmanager
def driver() -> Iterator[None]:
    """A context in which launches on CPU tensors find a device."""

    def counter(index: int) -> Tensor:
        return torch.zeros(1, dtype=torch.int32)

    def fresh(index: int, number: int) -> Tensor:
        return torch.full((number,), _NAN, dtype=torch.int32)

    with ExitStack() as stack:
        for name, value in (
            ("counter", counter),
            ("current_device", lambda: -1),
            ("current_stream", lambda index: tile_counters.DEFAULT_STREAM),
            ("fresh", fresh),
        ):
            stack.enter_context(mock.patch.object(tile_counters, name, value))
        stack.enter_context(mock.patch.dict(workspace._words, clear=True))
        yield
