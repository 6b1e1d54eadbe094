"""How much of a call's messages runs under its computation, from the times of a GPU's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from .report import Row

_MESSAGES = "ncclDevKernel"
"""How NCCL's kernels begin; they run until the last peer has come."""
_MOST_SPANS = 400


class Span(NamedTuple):
    """Microseconds of a GPU from the call's first kernel on."""

    start: float
    stop: float


def of(call: Callable[[], Any]) -> Row:
    """Milliseconds in which messages ran, in which they ran under computation, and in which nothing did.

    `spans` has the busy times themselves, in microseconds, for a figure.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = [
        (event.name(), event.start_ns() / 1e3, event.duration_ns() / 1e3)
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns()
    ]
    return summary(events)


def summary(events: list[tuple[str, float, float]]) -> Row:
    """The same, of kernels by name, first microsecond and duration."""
    if not events:
        return {}
    zero = min(start for _, start, _ in events)
    kinds = {
        kind: _union(
            Span(start - zero, start - zero + duration)
            for name, start, duration in events
            if name.startswith(_MESSAGES) == (kind == "messages")
        )
        for kind in ("messages", "computation")
    }
    messages, computation = kinds.values()
    busy = _union([*messages, *computation])
    hidden = _length(messages) + _length(computation) - _length(busy)
    return {
        "messages_ms": _length(messages) / 1e3,
        "hidden_ms": hidden / 1e3,
        "idle_ms": (busy[-1].stop - _length(busy)) / 1e3,
        "spans": {kind: spans if len(spans) <= _MOST_SPANS else [] for kind, spans in kinds.items()},
    }


def text(row: Row) -> str:
    return f"{row['hidden_ms']:.2f} of {row['messages_ms']:.2f} ms" if row else ""


def _union(spans: Iterable[Span]) -> list[Span]:
    """The same times as spans that do not touch, in order."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.start <= found[-1].stop:
            found[-1] = Span(found[-1].start, max(found[-1].stop, span.stop))
        else:
            found.append(span)
    return found


def _length(spans: list[Span]) -> float:
    return sum(span.stop - span.start for span in spans)
