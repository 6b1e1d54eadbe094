"""Section `swap`: is any call of nn.MultiheadAttention slower after `replace_attention` than before?"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator

import torch

from ..testing import backends_used
from .providers import sentence
from .report import Row, plain, table
from .settings import Settings
from .swap_cases import SELF, SwapCase, grid
from .swap_trial import Trial, prepare
from .turns import FEWEST_ROUNDS, Ratio, no_garbage_collection, take_turns

TITLE = "whole calls of nn.MultiheadAttention, stock's time over ours: above 1, the swapped module is faster"

LIMIT = 0.98
"""A cell fails if its ratio is certainly below; what is above is as fast as stock, as a clock can tell."""
_LONGEST, _SHORTEST = 10.0, 0.1
"""Limits of the seconds that a cell is timed."""
_REPORT_EVERY = 30.0
_WORST = 10

TIMED, LEFT_OUT, WRONG = "timed", "left out", "wrong"
"""States of a row. What is left out does not count; what is wrong fails."""


def measure(settings: Settings) -> Iterator[Row]:
    """One row per cell. Every cell may take an equal part of the time that is left, and is timed for that."""
    cases = list(grid(settings))
    start = reported = time.perf_counter()
    with no_garbage_collection():
        for number, case in enumerate(cases):
            now = time.perf_counter()
            if now - reported > _REPORT_EVERY:
                reported = now
                print(f"  {number} of {len(cases)} cells, {now - start:.0f} s", file=sys.stderr, flush=True)
            left = start + settings.swap_seconds - now
            if left <= 0:
                yield case.row() | _not_timed(
                    LEFT_OUT, f"the {settings.swap_seconds} s of --budget were over"
                )
            else:
                seconds = max(_SHORTEST, min(_LONGEST, left / (len(cases) - number)))
                yield case.row() | _measure(case, settings, seconds)


def _measure(case: SwapCase, settings: Settings, seconds: float) -> Row:
    with warnings.catch_warnings():
        # A user is warned once, and not in every cell.
        warnings.simplefilter("ignore")
        # Between cells: the last one's modules may be parts of cycles, with memory of a GPU.
        gc.collect()
        try:
            trial = prepare(case, settings.device)
            trial.call("stock")
        # Stock raises errors of any type.
        except Exception as error:
            return _after_error(LEFT_OUT, f"stock raises {sentence(error)}")
        try:
            with backends_used() as used:
                trial.call("flash4")
            # Without an observer, so that the fast path may serve.
            trial.call("flash4")
        except Exception as error:
            return _after_error(WRONG, f"flash4 raises {sentence(error)}")
        try:
            differs = trial.what_differs()
        except Exception as error:
            return _after_error(LEFT_OUT, f"results cannot be checked: {sentence(error)}")
        if "flash4" in differs:
            return _not_timed(WRONG, f"flash4 is wrong: {differs['flash4']}")
        if differs:
            return _not_timed(LEFT_OUT, f"stock is wrong: {differs['stock']}")
        return _timed(trial, settings, seconds) | {"served_by": dict(used.keys())}


def _timed(trial: Trial, settings: Settings, seconds: float) -> Row:
    turns = take_turns("stock", trial.calls, settings, seconds, LIMIT)
    row: Row = {
        "state": TIMED,
        "stock_over_flash4": turns.ratio("stock", "flash4")._asdict(),
        "seconds": {who: turns.seconds(who)._asdict() for who in turns.samples},
    }
    if settings.on_gpu:
        row["host_stock_over_flash4"] = turns.ratio("stock", "flash4", "host")._asdict()
        row["host_seconds"] = {who: turns.seconds(who, "host")._asdict() for who in turns.samples}
    return row


def _after_error(state: str, why: str) -> Row:
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return _not_timed(state, why)


def _not_timed(state: str, why: str) -> Row:
    return {"state": state, "why": why}


def fails(row: Row) -> bool:
    """Whether a cell is certainly below the limit, or wrong."""
    return row["state"] == WRONG or (row["state"] == TIMED and ratio_of(row).is_below(LIMIT))


def ratio_of(row: Row, kind: str = "") -> Ratio:
    """The ratio of a timed row. kind: '' for the whole call, 'host_' for the host's time."""
    return Ratio(**row[f"{kind}stock_over_flash4"])


def mark(row: Row, kind: str = "") -> str:
    """'!' after a ratio that is certainly below the limit, '?' where nobody can tell, else nothing."""
    ratio = ratio_of(row, kind)
    return "!" if ratio.is_below(LIMIT) else "?" if ratio.is_uncertain(LIMIT) else ""


def text(rows: list[Row]) -> str:
    """Tables of ratios, one line per kind of call and one column per size; then what deserves a sentence."""
    parts = [_table(rows)]
    if any("host_stock_over_flash4" in row for row in rows):
        parts += ["", "the host's part of it: until the call returned, its kernels only queued"]
        parts += [_table(rows, "host_")]
    return "\n".join([*parts, "", *_legend(), *_summary(rows)])


KIND = ("way", "compiled", "dtype", "mode", "mask", "dropout", "need_weights")
"""The fields of a kind of call."""


def kind_of(row: Row) -> tuple[object, ...]:
    """The kind of a row's call; results from before there were ways are of self-attention."""
    return row.get("way", SELF), *(row[name] for name in KIND[1:])


def lines(rows: Iterable[Row]) -> dict[tuple[object, ...], dict[str, Row]]:
    """Rows by kind of call, then by size."""
    found: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(kind_of(row), {})[size_of(row)] = row
    return found


def size_of(row: Row) -> str:
    return f"{row['E']}/{row['H']} {row['B']}x{row['S']}"


def sizes_of(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(map(size_of, rows)))


def _table(rows: list[Row], kind: str = "") -> str:
    sizes = sizes_of(rows)
    return table(
        ["way", "how", "dtype", "mode", "mask", "dropout", "weights", *sizes],
        [
            [way, "compiled" if compiled else "eager", *words, *(_entry(line.get(x), kind) for x in sizes)]
            for (way, compiled, *words), line in lines(rows).items()
        ],
    )


def _entry(row: Row | None, kind: str) -> str:
    if row is None:
        return ""
    if row["state"] != TIMED:
        return "-" if row["state"] == LEFT_OUT else "-!"
    return f"{ratio_of(row, kind).median:.3f}{mark(row, kind)}"


def _legend() -> list[str]:
    return [
        "sizes: embed_dim / heads, batch x sequence; weights: need_weights",
        f"!: certainly below {LIMIT}, or wrong (-!); ?: either side of it is possible; -: left out",
    ]


def _summary(rows: list[Row]) -> Iterator[str]:
    timed = [row for row in rows if row["state"] == TIMED]
    if timed:
        mean = statistics.geometric_mean(ratio_of(row).median for row in timed)
        below = sum(mark(row) == "!" for row in timed)
        unsure = sum(mark(row) == "?" for row in timed)
        yield (
            f"{len(timed)} of {len(rows)} cells timed, geometric mean {mean:.3f}; below {LIMIT}: {below}, "
            f"uncertain: {unsure}"
        )
    for state in (WRONG, LEFT_OUT):
        reasons = Counter(row["why"] for row in rows if row["state"] == state)
        yield from (f"{state}: {why}, cells: {count}" for why, count in reasons.items())
    if any(ratio_of(row).low is None for row in timed):
        yield f"fewer than {FEWEST_ROUNDS} rounds make no cell certain"
    worst = sorted(filter(fails, timed), key=lambda row: ratio_of(row).median)
    if worst:
        yield f"below {LIMIT}, the worst {len(worst[:_WORST])}:"
    yield from map(_sentence, worst[:_WORST])


def _sentence(row: Row) -> str:
    """A slow cell in full."""
    ratio, seconds = ratio_of(row), row["seconds"]
    words = ", ".join(f"{name} {plain(value)}" for name, value in zip(KIND, kind_of(row), strict=True))
    served = ", ".join(sorted(set(row["served_by"].values()))) or "torch's own operators"
    return (
        f"  {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}, {ratio.rounds} rounds): "
        f"{1e3 * seconds['stock']['median']:.3f} and {1e3 * seconds['flash4']['median']:.3f} ms, "
        f"{size_of(row)}, {words}, served by {served}"
    )
