"""Timing contenders against each other on a machine that other people use, too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from .settings import Settings

Call = Callable[[], Any]

_MAX_ROUNDS = 200
_SHORTEST_SAMPLE = 1e-3
_EVICTING_BYTES = 1 << 30


class Spread(NamedTuple):
    """Median and quartiles of `samples` measurements."""

    median: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))


class Comparison(NamedTuple):
    """Seconds a call of each contender, and how many times the first one's each takes."""

    seconds: dict[str, Spread]
    ratios: dict[str, Spread]
    """first / other, of each round by itself, so that what slows down a whole round cancels out."""


def compare(contenders: Mapping[str, Call], settings: Settings) -> Comparison:
    """Times the contenders in turn, within `settings.budget`: each round calls every one, in changing order.

    A sample is one call, or as many as make it a millisecond. On a GPU it is timed by events, one call a
    sample, after evicting the inputs from the GPU's cache.
    """
    timer = _GpuTimer(settings.device) if settings.on_gpu else _CpuTimer(contenders, settings.clock)
    for call in contenders.values():
        call()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    start = time.perf_counter()
    for done in range(_MAX_ROUNDS):
        elapsed = time.perf_counter() - start
        # Quartiles want seven rounds; what is very slow has to do with three.
        enough = 7 if elapsed < 5 * settings.budget else 3
        if done >= enough and elapsed > settings.budget:
            break
        for name in names:
            samples[name].append(timer.seconds(contenders[name]))
        names.reverse()
    first = samples[next(iter(contenders))]
    return Comparison(
        {name: Spread.of(values) for name, values in samples.items()},
        {
            name: Spread.of([a / b for a, b in zip(first, values, strict=True)])
            for name, values in samples.items()
        },
    )


class _CpuTimer:
    def __init__(self, contenders: Mapping[str, Call], clock: str):
        """Chooses how many calls make a sample: the same number for all contenders."""
        self._clock = time.process_time if clock == "cpu" else time.perf_counter
        self._calls = 1
        for call in contenders.values():
            call()
        once = min(self.seconds(call) for call in contenders.values() for _ in range(3))
        self._calls = max(1, int(_SHORTEST_SAMPLE / once))

    def seconds(self, call: Call) -> float:
        start = self._clock()
        for _ in range(self._calls):
            call()
        return (self._clock() - start) / self._calls


class _GpuTimer:
    def __init__(self, device: str):
        self._evicting = torch.empty(_EVICTING_BYTES, dtype=torch.int8, device=device)

    def seconds(self, call: Call) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Keeps the GPU busy, too, while the host queues the call: what a launch costs is section host's.
        self._evicting.fill_(1)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
