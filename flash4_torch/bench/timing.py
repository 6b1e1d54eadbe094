"""Timing of contenders against each other, on a machine that may have other work."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch

from .settings import Settings

Call = Callable[[], Any]

_MAX_ROUNDS = 200
_SHORTEST_SAMPLE = 1e-3

_BATCH = 5
_REST = 0.02
_QUEUEING_CYCLES = 10_000_000
"""About five milliseconds, enough for the host to queue a batch, even of short backwards on a slow host."""
_CYCLES_PER_S = 2e9
_MARGIN = 1.5


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
    """Results of `compare`, in seconds per call."""

    batches: dict[str, list[list[float]]]
    """Samples of each contender and round."""

    @property
    def seconds(self) -> dict[str, Spread]:
        return {name: Spread.of(list(chain(*batches))) for name, batches in self.batches.items()}

    def ratio(self, this: str, other: str) -> Spread:
        """Time of this / time of other, round by round: a slowdown of a whole round cancels out."""
        pairs = zip(self.batches[this], self.batches[other], strict=True)
        return Spread.of([statistics.median(a) / statistics.median(b) for a, b in pairs])


class Timer(Protocol):
    def samples(self, call: Call) -> list[float]:
        """Seconds per call: samples of one call or of a few in a row."""
        ...


def compare(contenders: Mapping[str, Call], settings: Settings, timer: Timer | None = None) -> Comparison:
    """Times the contenders in shuffled order, `settings.rounds` times or within `settings.budget`.

    On a CPU a sample is one call, or enough calls for a millisecond. On a GPU the device rests before each
    batch of calls, so that the previous batch's heat has no effect; the first call of a batch is dropped, and
    events time the others.
    """
    for call in contenders.values():
        call()
    timer = timer or (GpuTimer() if settings.on_gpu else CpuTimer(contenders, settings.clock))
    batches: dict[str, list[list[float]]] = {name: [] for name in contenders}
    order = list(contenders)
    shuffled = random.Random(0)
    start = time.perf_counter()
    for done in range(settings.rounds or _MAX_ROUNDS):
        if not settings.rounds and _is_enough(done, time.perf_counter() - start, settings.budget):
            break
        shuffled.shuffle(order)
        for name in order:
            batches[name].append(timer.samples(contenders[name]))
    return Comparison(batches)


def _is_enough(rounds: int, elapsed: float, budget: float) -> bool:
    """Whether the rounds suffice: quartiles need seven, but very slow comparisons make do with three."""
    return rounds >= (7 if elapsed < 5 * budget else 3) and elapsed > budget


class CpuTimer:
    def __init__(self, contenders: Mapping[str, Call], clock: str, settle: Call | None = None):
        """Chooses the number of calls in a sample, the same for all contenders.

        `settle`, if given, is called before every sample: calls may leave work on a device.
        """
        self._clock = time.process_time if clock == "cpu" else time.perf_counter
        self._settle = settle or (lambda: None)
        self._calls = 1
        once = min(self.samples(call)[0] for call in contenders.values() for _ in range(3))
        self._calls = max(1, int(_SHORTEST_SAMPLE / once))

    def samples(self, call: Call) -> list[float]:
        self._settle()
        start = self._clock()
        for _ in range(self._calls):
            call()
        return [(self._clock() - start) / self._calls]


class GpuTimer:
    def __init__(self, host_s: float = 0.0) -> None:
        """host_s: the host's seconds of a call, where queueing a batch takes longer than usual."""
        cycles = int(host_s * _BATCH * _MARGIN * _CYCLES_PER_S)
        self._cycles = max(_QUEUEING_CYCLES, cycles)

    def samples(self, call: Call) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_BATCH)]
        torch.cuda.synchronize()
        time.sleep(_REST)
        # The device is kept busy while the host queues the batch: host time belongs to section `host`.
        torch.cuda._sleep(self._cycles)
        for begin, end in events:
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in events[1:]]
