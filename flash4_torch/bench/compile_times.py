"""Compile times of kernels for Blackwell, ours and upstream's:

    python -m flash4_torch.bench.compile_times --rounds 3 --out results.json

Each sample is a separate process, with everything imported and no cache. The calls of `cute.compile` are
timed under the emulator, which asks for line information: tracing, lowering and assembling. No GPU is needed.
Run it on a quiet machine, or with `--clock cpu`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from .. import info
from ..errors import BackendError
from . import emulated
from .cases import DIRECTIONS, Cell
from .report import Row, table

ARCH = "sm_100a"
WIDTHS = (64, 128, 256)
S = 256
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


class _Timed:
    """A wrapper of `cute.compile` that records the seconds of each call."""

    def __init__(self, compile: Any, clock: Callable[[], float]):
        self._compile, self._clock = compile, clock
        self.seconds: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = self._clock()
        try:
            return self._compile(*args, **kwargs)
        finally:
            self.seconds.append(self._clock() - start)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compile, name)


@contextmanager
def _timing(clock: str) -> Iterator[list[float]]:
    cute = importlib.import_module("cutlass.cute")
    timed = _Timed(cute.compile, CLOCKS[clock])
    with mock.patch.object(cute, "compile", timed):
        yield timed.seconds


def sample(who: str, D: int, causal: bool, clock: str) -> dict[str, list[float]]:
    """Seconds that each kernel took, by its direction, in a process that has compiled none yet.

    A direction without a kernel is left out.
    """
    cell = Cell(D, causal, S, B=1, Hq=1, Hk=1)
    seconds = {}
    with emulated.CONTENDERS[who](ARCH) as attend, _timing(clock) as taken:
        for direction in DIRECTIONS:
            before = len(taken)
            with suppress(LookupError, BackendError):
                attend(cell, direction)
                seconds[direction] = taken[before:]
    return seconds


def measure(rounds: int, clock: str, who: Sequence[str]) -> Iterator[Row]:
    """One row per direction, with a list of samples for each of its kernels; contenders alternate."""
    for D, causal in itertools.product(WIDTHS, (False, True)):
        samples: dict[str, list[dict[str, list[float]]]] = {name: [] for name in who}
        for _, name in itertools.product(range(rounds), who):
            samples[name].append(_in_a_process(name, D, causal, clock))
        for name, direction in itertools.product(who, DIRECTIONS):
            kernels = zip(*(one.get(direction, []) for one in samples[name]), strict=True)
            yield {
                **{"D": D, "causal": causal, "direction": direction, "who": name, "clock": clock},
                "seconds": [list(kernel) for kernel in kernels],
            }


def _in_a_process(who: str, D: int, causal: bool, clock: str) -> dict[str, list[float]]:
    words = ["--sample", who, str(D), str(int(causal)), clock]
    command = [sys.executable, "-m", __spec__.name, *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def text(rows: list[Row]) -> str:
    """A table of medians: of the largest kernel of a direction, and of all its kernels together."""
    lines = []
    for row in rows:
        medians = [statistics.median(samples) for samples in row["seconds"]]
        mask = "causal" if row["causal"] else "full"
        spread = [max(medians, default=0.0), sum(medians)]
        lines.append(
            [row["direction"], row["D"], mask, row["who"], *(f"{s:.1f}" for s in spread), len(medians)]
        )
    return table(["direction", "D", "mask", "", "main kernel, s", "all kernels, s", "kernels"], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="samples of each kernel; default: %(default)s")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="default: %(default)s")
    parser.add_argument("--who", nargs="+", choices=emulated.CONTENDERS, default=sorted(emulated.installed()))
    parser.add_argument("--out", type=Path, help="write the results as JSON", metavar="FILE")
    parser.add_argument("--sample", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.sample:
        who, D, causal, clock = given.sample
        print(json.dumps(sample(who, int(D), causal == "1", clock)))
        return 0
    rows = list(measure(given.rounds, given.clock, given.who))
    print(text(rows))
    if given.out:
        head = {"versions": info.versions() | {"flash-attn-4": info.installed("flash-attn-4")}}
        given.out.write_text(json.dumps(head | {"machine": info.cpu(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
