"""Two calls that take turns: the ratio of their times, and the limits between which its median lies."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from .settings import Settings
from .timing import Call, Spread

FEWEST_ROUNDS = 8
"""The fewest values whose smallest and largest enclose the median with `CERTAINTY`."""
MOST_ROUNDS = 400
CERTAINTY = 0.99
PRECISION = 0.01
"""Half the distance of the limits, relative to the median, at which a ratio is known well enough."""

_SHORTEST_SAMPLE = 2e-3
_MOST_CALLS = 10
"""Few enough that their kernels fit a GPU's queue, so that the host never waits for a free place in it."""
_WARM_UP_CALLS = 3
_LONG_CALL = 0.05
_PEEK_EVERY = 4
"""Rounds between two looks at the limits: each look is another chance to stop at a lucky moment."""


class Sample(NamedTuple):
    """Seconds per call: until the call returned, and until its work was done. Equal on a CPU."""

    host: float
    whole: float


class Ratio(NamedTuple):
    """A median ratio of times, and the limits of its median; no limits if the rounds are too few."""

    median: float
    low: float | None
    high: float | None
    rounds: int

    @classmethod
    def of(cls, values: list[float]) -> Ratio:
        low, high = limits_of_median(values) or (None, None)
        return cls(statistics.median(values), low, high, len(values))

    def is_below(self, limit: float) -> bool:
        """Whether the median is certainly below the limit."""
        return self.high is not None and self.high < limit

    def is_uncertain(self, limit: float) -> bool:
        """Whether the median may be on either side of the limit."""
        return self.low is None or self.high is None or self.low < limit <= self.high

    @property
    def is_precise(self) -> bool:
        return self.low is not None and self.high is not None and self.spread <= PRECISION

    @property
    def spread(self) -> float:
        """Half the distance of the limits, relative to the median; infinite without limits."""
        if self.low is None or self.high is None:
            return math.inf
        return (self.high - self.low) / 2 / self.median


def limits_of_median(values: list[float]) -> tuple[float, float] | None:
    """Values between which the median of their distribution lies with `CERTAINTY`, if there are enough.

    They are order statistics: of n independent values, the number below the median is binomial (n, 1/2),
    whatever the distribution.
    """
    k = _outer_values(len(values))
    ordered = sorted(values)
    return (ordered[k - 1], ordered[-k]) if k else None


def _outer_values(n: int) -> int:
    """The largest k for which the k-th smallest and the k-th largest of n values are such limits; 0: none."""
    tail, k = 0.0, 0
    while k < n and (tail := tail + math.comb(n, k) / 2**n) <= (1 - CERTAINTY) / 2:
        k += 1
    return k


@dataclass(frozen=True)
class Turns:
    """The samples of each of two calls, one a round."""

    samples: Mapping[str, list[Sample]] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        return min(map(len, self.samples.values()))

    def ratio(self, this: str, other: str, kind: str = "whole") -> Ratio:
        """Time of this / time of other, round by round: a slow moment of the machine slows both.

        kind: 'whole' or 'host'.
        """
        pairs = zip(self.samples[this], self.samples[other], strict=True)
        return Ratio.of([getattr(a, kind) / getattr(b, kind) for a, b in pairs])

    def seconds(self, name: str, kind: str = "whole") -> Spread:
        return Spread.of([getattr(sample, kind) for sample in self.samples[name]])


class Stopwatch:
    """A stopwatch for batches of calls; all batches have the same number of calls."""

    def __init__(self, calls: Mapping[str, Call], settings: Settings):
        """Calls everyone a few times and chooses the number of calls in a batch."""
        self._settle = partial(torch.cuda.synchronize, settings.device) if settings.on_gpu else lambda: None
        self._clock = time.process_time if settings.clock == "cpu" else time.perf_counter
        self._calls = 1
        once = min(map(self._warm_up, calls.values()))
        self._calls = max(1, min(_MOST_CALLS, math.ceil(_SHORTEST_SAMPLE / max(once, 1e-9))))

    def _warm_up(self, call: Call) -> float:
        """The shortest of a few calls, of one if it is long."""
        shortest = self.sample(call).whole
        if shortest > _LONG_CALL:
            return shortest
        return min(shortest, *(self.sample(call).whole for _ in range(_WARM_UP_CALLS - 1)))

    def sample(self, call: Call) -> Sample:
        self._settle()
        start = self._clock()
        for _ in range(self._calls):
            call()
        returned = self._clock()
        self._settle()
        done = self._clock()
        return Sample((returned - start) / self._calls, (done - start) / self._calls)


def take_turns(
    this: str, calls: Mapping[str, Call], settings: Settings, seconds: float, limit: float
) -> Turns:
    """Times two calls in turns; the first of a round is the last of the next.

    There are `settings.rounds` rounds, or else at least `FEWEST_ROUNDS` and as many as it takes until the
    ratio of `this` to the other is precise and certainly on one side of `limit`, or `seconds` are over.
    """
    first, second = calls
    other = second if this == first else first
    watch = Stopwatch(calls, settings)
    turns = Turns({name: [] for name in calls})
    start = time.perf_counter()
    while not _is_enough(turns, this, other, settings, time.perf_counter() - start > seconds, limit):
        for name in (first, second) if turns.rounds % 2 else (second, first):
            turns.samples[name].append(watch.sample(calls[name]))
    return turns


def _is_enough(
    turns: Turns, this: str, other: str, settings: Settings, time_is_up: bool, limit: float
) -> bool:
    rounds = turns.rounds
    if settings.rounds:
        return rounds >= settings.rounds
    if rounds < FEWEST_ROUNDS or (rounds % _PEEK_EVERY and not time_is_up):
        return False
    if time_is_up or rounds >= MOST_ROUNDS:
        return True
    ratio = turns.ratio(this, other)
    return ratio.is_precise and not ratio.is_uncertain(limit)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switches Python's garbage collector off. `gc.collect` leaves alone what exists now, so it is quick."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()
