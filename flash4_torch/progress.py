"""Progress of a warm-up while it compiles: a line per kernel or a bar, and an estimate of the time left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TextIO

from .backends.compiled import (
    APPEND_KVCACHE,
    DECODE,
    GROUP_REDUCE,
    MASK_BLOCKS,
    MASK_TRANSPOSE,
    MERGE_STATES,
    POSTPROCESS,
    PREPROCESS,
    SINKS_GRADIENT,
    TARGETS,
    WEIGHTS,
)
from .compile import Key
from .configs.types import Features

_WIDTH = 40
"""Width of the bar in characters."""

_KINDS = {
    **{target.forward: "forward" for target in TARGETS.values()},
    **{target.backward: "backward" for target in TARGETS.values()},
    PREPROCESS: "backward, row sums before it",
    POSTPROCESS: "backward, dQ after it",
    GROUP_REDUCE: "backward, dK and dV of groups",
    SINKS_GRADIENT: "backward, gradients of sinks",
    WEIGHTS: "attention weights",
    MASK_BLOCKS: "blocks of attn_mask",
    MASK_TRANSPOSE: "attn_mask transposed, and its blocks",
    DECODE: "few tokens over a KV cache",
    APPEND_KVCACHE: "append to a KV cache",
    MERGE_STATES: "merge of partial results",
}
"""Kernels' names by their entries."""


class _Pace:
    """The rate at which kernels were compiled, and how long the remaining ones will take at that rate."""

    def __init__(self, done: int, total: int) -> None:
        self._start = time.monotonic()
        self._before, self._total = done, total

    def left(self, done: int) -> str:
        """`, about 3 min left`; empty before the first kernel and after the last."""
        made, left = done - self._before, self._total - done
        if not made or not left:
            return ""
        seconds = (time.monotonic() - self._start) / made * left
        return f", about {seconds:.0f} s left" if seconds < 90 else f", about {seconds / 60:.0f} min left"


class Lines:
    """One line per kernel, written as soon as the kernel is there, so that a log file shows progress too."""

    def __init__(self, log: TextIO) -> None:
        self._log = log
        self._pace: _Pace | None = None
        self._done = self._total = 0

    def begin(self, done: int, total: int) -> None:
        """The first call reports how much there is to do; later calls do nothing."""
        if self._pace is None:
            self._pace, self._total = _Pace(done, total), total
            self._write(f"{total} kernels: {done} in the cache, {total - done} to compile")

    def made(self, kernel: Key, took: float | str) -> None:
        """Reports one kernel. took: seconds, or the reason why it failed."""
        assert self._pace is not None
        self._done += 1
        result = "  failed" if isinstance(took, str) else f"{took:6.2f} s" if took else "in cache"
        count = f"{self._done:>{len(str(self._total))}} of {self._total}"
        self._write(f"{count}  {result}  {in_words(kernel)}{self._pace.left(self._done)}")

    def _write(self, line: str) -> None:
        print(line, file=self._log, flush=True)


class Notes:
    """A line now and then, for the log of a server; none if there is nothing to compile."""

    def __init__(self, log: TextIO, seconds: float = 10.0) -> None:
        self._log, self._seconds = log, seconds
        self._pace: _Pace | None = None
        self._last = 0.0

    def __call__(self, done: int, total: int) -> None:
        begins = self._pace is None
        self._pace = self._pace or _Pace(done, total)
        if begins and done == total:
            return
        now = time.monotonic()
        if begins or done == total or now >= self._last + self._seconds:
            self._last = now
            line = f"flash4_torch: {done} of {total} kernels are compiled{self._pace.left(done)}"
            print(line, file=self._log, flush=True)


class Bar:
    """A progress bar on one line of a terminal."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._pace: _Pace | None = None

    def __call__(self, done: int, total: int) -> None:
        self._pace = self._pace or _Pace(done, total)
        filled = _WIDTH * done // max(total, 1)
        bar = "#" * filled + "." * (_WIDTH - filled)
        text = f"\r\x1b[Kflash4_torch: [{bar}] {done} of {total} kernels{self._pace.left(done)}"
        print(text, end="\n" if done == total else "", file=self._terminal, flush=True)


def in_words(kernel: Key) -> str:
    """A kernel's name for people: what it computes and, in parentheses, how.

    forward, bfloat16, D 64, causal (warpgroups 2, keys 128, kv stages 4, q stages 2)
    """
    kind = _KINDS.get(kernel.entry)
    if kind is None:
        return str(kernel)
    what = [_features(part) if isinstance(part, Features) else "" for part in kernel.static]
    how = [", ".join(_fields(part)) for part in kernel.static if not isinstance(part, Features)]
    return f"{', '.join(filter(None, [kind, *what]))} ({'; '.join(how)})"


def _features(features: Features) -> str:
    """The features, in the words of `warmup`'s argument where it has them."""
    f = features
    head_dim = f"D {f.D}" if f.D == f.Dv else f"D {f.D}, Dv {f.Dv}"
    band = {(False, True): "causal", (True, True): "window", (True, False): "window to the left"}
    words = [f.dtype, head_dim, band.get((f.left, f.right), ""), f"{f.mask} mask" if f.mask else ""]
    rest = f._replace(left=False, right=False, mask="", dmask=False)
    words += [*list(_fields(rest))[3:], "gradient of the mask" if f.dmask else ""]
    return ", ".join(filter(None, words))


def _fields(part: object) -> Iterator[str]:
    """A named tuple's fields that differ from their defaults: `kv stages 4`, `pingpong`, `no ragged k`."""
    if not isinstance(part, tuple) or not hasattr(part, "_fields"):
        yield str(part)
        return
    defaults: dict[str, object] = getattr(part, "_field_defaults", {})
    for field, value in zip(part._fields, part, strict=True):
        name = field.replace("_", " ")
        if isinstance(value, tuple):
            yield from _fields(value)
        elif value is True and defaults.get(field) is not True:
            yield name
        elif value is False and defaults.get(field) is True:
            yield f"no {name}"
        elif not isinstance(value, bool) and (field, value) not in defaults.items():
            yield str(value).replace("_", " ") if isinstance(value, str) else f"{name} {value}"
