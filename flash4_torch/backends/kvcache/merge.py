"""Partial results of attention, merged: the kernel that serves a call, and its launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...kernels.common.kvcache import MergePlan
from ...reference import kvcache as reference
from ..compiled.params import dtype_name
from ..compiled.targets import MERGE_STATES
from .choice import find_kernels, launch_on
from .layout import copied_to_rows

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BYTES = 16
"""Bytes that a thread moves at a time."""
MOST_TENSORS = 8
"""Tensors of parts that a kernel is compiled for; more become one."""
_MOST_ROWS = (1 << 31) - 1


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) by the backend that serves the call.

    outs: tensors (N, B, Sq, Hq, Dv), each with parts of its own; lses, one for each: (N, B, Hq, Sq).

    Raises:
        BackendError: FLASH4_BACKEND forces a backend that cannot.
    """
    first = outs[0]
    kernels = find_kernels("merge_states", first.device, limits(first))
    if kernels is None or 0 in first.shape[1:]:
        return reference.merge(outs, lses)
    if len(outs) > MOST_TENSORS:
        outs, lses = [torch.cat(tuple(outs))], [torch.cat(tuple(lses))]
    step = _BYTES // first.element_size()
    parts = tuple(copied_to_rows(x, step) for x in outs)
    out, lse = first.new_empty(first.shape[1:]), lses[0].new_empty(lses[0].shape[1:])
    kernel = kernels.find(MERGE_STATES, (plan_of(parts),))
    launch_on(first.device, kernel, parts, tuple(lses), None, out, lse, None, None)
    return out, lse


def reachable(parts: Sequence[Tensor]) -> Iterator[tuple[str, tuple[object, ...]]]:
    """The entry, and what it is compiled for: the kernel that serves parts like these, if one does."""
    if not limits(parts[0]):
        yield MERGE_STATES, (plan_of(parts),)


def limits(parts: Tensor) -> list[str]:
    """The reasons why the kernel cannot serve the call, on whatever device it is."""
    why = []
    if parts.dtype not in _DTYPES:
        why.append(f"the dtype is {parts.dtype}, and it serves bfloat16, float16 and float32")
        return why
    step = _BYTES // parts.element_size()
    if parts.shape[-1] % step:
        why.append(f"Dv is {parts.shape[-1]}, and it serves multiples of {step}")
    rows = parts.shape[1] * parts.shape[2] * parts.shape[3]
    if rows > _MOST_ROWS:
        why.append(f"there are {rows} rows, and it counts them in 32 bits")
    return why


def plan_of(parts: Sequence[Tensor]) -> MergePlan:
    """What the kernel is compiled for."""
    return MergePlan(dtype_name(parts[0].dtype), parts[0].shape[-1], len(parts))


def common_plans(dtype: str, Dv: int) -> Iterator[MergePlan]:
    """Kernels for parts that are stacked, and for two of them that are not."""
    yield from (MergePlan(dtype, Dv, tensors) for tensors in (1, 2))
