"""`python -m flash4_torch bench`: runs the chosen sections, prints tables, writes JSON and plots."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch

from .. import info
from ..ahead import why_not_writable
from ..errors import hint
from . import (
    context,
    decode,
    emulator,
    feature_times,
    flex,
    flex_cases,
    gpu,
    host,
    memory,
    models,
    module,
    providers,
    swap,
    swap_cases,
)
from .cases import DIRECTIONS
from .cycles import MACHINES
from .features import FEATURES
from .peers import Peers
from .prediction import Prediction
from .report import Row
from .settings import Selection, Settings


class Section(Protocol):
    """A section: a module, or an object with the same attributes."""

    @property
    def TITLE(self) -> str: ...

    def measure(self, settings: Settings) -> Iterator[Row]: ...

    def text(self, rows: list[Row]) -> str: ...


SECTIONS: Mapping[str, Section] = {
    "forward": Peers("forward"),
    "backward": Peers("backward"),
    "features": feature_times,
    "memory": memory,
    "host": host,
    "module": module,
    "emulator": emulator,
    "decode": decode,
    "models": models,
    "swap": swap,
    "context": context,
    "flex": flex,
}
BY_NAME_ONLY = ("swap", "decode", "models", "context", "flex")
"""Sections that take long, want other packages, or that only servers or many GPUs care for."""

_CELL_VALUES: Mapping[str, Sequence[str]] = {
    "causal": ("yes", "no"),
    "dtype": ("bfloat16", "float16", "float32"),
    "feature": (*FEATURES, *module.CASES),
    "direction": tuple(dict.fromkeys(DIRECTIONS + feature_times.DIRECTIONS + flex.DIRECTIONS)),
    "mode": swap_cases.MODES,
    "mask": swap_cases.MASKS,
    "dropout": swap_cases.DROPOUTS,
    "need_weights": ("yes", "no"),
    "compiled": ("yes", "no"),
    "way": swap_cases.WAYS,
    "mod": tuple(flex_cases.CASES),
}
"""Values that --cells may give to fields that are not numbers."""
_MOST_ROUNDS = 1000
_MOST_SECONDS = 24 * 60 * 60
_NO_COMPILER = "--model compiles kernels: pip install 'flash4_torch[kernels]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="section",
        help=f"what to measure: {', '.join(SECTIONS)}; default: all but {', '.join(BY_NAME_ONLY)}",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases, shorter timings")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu or cuda; default: cuda where there is a GPU",
    )
    parser.add_argument(
        "--threads", type=_whole_number, default=torch.get_num_threads(), help="CPU threads; default: torch's"
    )
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: the process's time on CPUs, for one thread on a machine with other work; default: wall",
    )
    parser.add_argument(
        "--cells",
        nargs="+",
        default=[],
        metavar="NAME=VALUES",
        help=f"measure only these, as D=64,128 causal=yes S=4096; names: {', '.join(Selection.FIELDS)}",
    )
    parser.add_argument(
        "--rounds",
        type=_whole_number,
        help="how often each contender is timed in a comparison, at least 2; default: by a time budget, and "
        "6 (3 where S is 16384 or more) for forward and backward on a GPU",
    )
    parser.add_argument(
        "--budget",
        type=_whole_number,
        default=Settings.swap_seconds,
        metavar="SECONDS",
        help="swap begins no cell after so many seconds, and divides them among its cells; default: 600",
    )
    parser.add_argument(
        "--max-autotune",
        action="store_true",
        help=f"flex times torch's kernels in mode {flex.MAX_AUTOTUNE}, too, which takes some minutes",
    )
    parser.add_argument(
        "--model",
        choices=MACHINES,
        help="instead: what a GPU that is not here would be busy with, predicted from runs in the emulator",
    )
    parser.add_argument("--out", type=_path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--plot", type=_path, metavar="FOLDER", help="write one PNG per section")
    parser.set_defaults(run=run)


def _whole_number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("'' is not a path")
    return Path(text)


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns the exit status: 1 if `swap` finds a swapped module slower or wrong."""
    if sentence := _why_not(options):
        return _refuse(sentence)
    selection = Selection.parse(options.cells)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    settings = Settings(
        options.device,
        options.threads,
        options.quick,
        options.clock,
        options.rounds,
        selection,
        options.budget,
        options.max_autotune,
    )
    if options.model:
        return _predict(options.model, settings, options.out)
    if "context" in options.sections and not context.start(settings):
        # Another of torchrun's processes prints, and writes the results.
        options.out = options.plot = None
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    started = gpu.state()
    results: dict[str, list[Row]] = {}
    for name in options.sections or [name for name in SECTIONS if name not in BY_NAME_ONLY]:
        results[name] = _run_section(SECTIONS[name], settings)
        # After each section: a later one may fail.
        if options.out:
            options.out.write_text(json.dumps(_document(settings, results, started), indent=1) + "\n")
    if options.plot:
        from . import plots

        plots.draw(results, options.plot)
    swapped = results.get("swap", [])
    if len(results) == 1 and swapped and all(row["state"] == swap.LEFT_OUT for row in swapped):
        return _refuse("every cell was left out, so nothing was measured")
    return _succeeded(any(results.values())) or int(any(map(swap.fails, swapped)))


def _succeeded(measured: bool) -> int:
    """The exit status; a selection that matches no case is a failure."""
    return 0 if measured else _refuse("no case is what --cells selects, so nothing was measured")


def _why_not(options: argparse.Namespace) -> str:
    """A sentence about wrong options, before anything is measured; empty if they are right."""
    try:
        Selection.parse(options.cells, _CELL_VALUES)
    except ValueError as error:
        return f"--cells is {error}"
    return (
        _why_no_sections(options.sections)
        or _why_no_device(options.device)
        or _why_no_threads(options.threads)
        or _why_no_rounds(options.rounds)
        or _why_no_budget(options.budget)
        or _why_no_plots(options.plot)
        or _why_no_results(options.out)
        or ("" if not options.model or find_spec("cutlass") else _NO_COMPILER)
    )


def _why_no_sections(names: Sequence[str]) -> str:
    unknown = [name for name in names if name not in SECTIONS]
    if not unknown:
        return ""
    words = ", ".join(name or repr(name) for name in unknown)
    return f"unknown section {words}; there are {', '.join(SECTIONS)}{hint(unknown[0], SECTIONS)}"


def _why_no_device(name: str) -> str:
    if not re.fullmatch("cpu|cuda(:[0-9]{1,3})?", name):
        return f"--device is {name!r}, but it must be cpu, cuda or cuda:N"
    if name == "cpu":
        return ""
    if not torch.cuda.is_available():
        return f"--device is {name}, but torch sees no GPU"
    if int(name.partition(":")[2] or 0) >= torch.cuda.device_count():
        return f"--device is {name}, but the last GPU is cuda:{torch.cuda.device_count() - 1}"
    return ""


def _why_no_threads(threads: int) -> str:
    if threads < 1:
        return f"--threads is {threads}, but it must be at least 1"
    most = max(os.cpu_count() or 1, torch.get_num_threads())
    return f"--threads is {threads}, but it must be at most {most}" if threads > most else ""


def _why_no_rounds(rounds: int | None) -> str:
    if rounds is not None and rounds < 2:
        return f"--rounds is {rounds}, but it must be at least 2"
    if rounds is not None and rounds > _MOST_ROUNDS:
        return f"--rounds is {rounds}, but it must be at most {_MOST_ROUNDS}"
    return ""


def _why_no_budget(seconds: int) -> str:
    if 1 <= seconds <= _MOST_SECONDS:
        return ""
    limit = "at least 1" if seconds < 1 else f"at most {_MOST_SECONDS}"
    return f"--budget is {seconds}, but it must be {limit}"


def _why_no_plots(folder: Path | None) -> str:
    if folder is None:
        return ""
    if not _has_matplotlib():
        return "--plot needs matplotlib: pip install 'flash4_torch[demo]'"
    reason = why_not_writable(folder)
    return f"--plot is {str(folder)!r}, but the folder cannot be written to ({reason})" if reason else ""


def _why_no_results(file: Path | None) -> str:
    if file is None:
        return ""
    reason = "it is a folder" if file.is_dir() else why_not_writable(file.parent)
    return f"--out is {str(file)!r}, but the file cannot be written ({reason})" if reason else ""


def _predict(machine: str, settings: Settings, out: Path | None) -> int:
    prediction = Prediction(machine)
    rows = _run_section(prediction, settings)
    if out:
        out.write_text(prediction.document(rows))
    return _succeeded(bool(rows))


def _refuse(sentence: str) -> int:
    print(f"flash4_torch bench: {sentence}", file=sys.stderr)
    return 2


def _has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def _run_section(section: Section, settings: Settings) -> list[Row]:
    print(section.TITLE, flush=True)
    rows: list[Row] = []
    for row in section.measure(settings):
        rows.append(row)
        if sys.stderr.isatty():
            print(f"\r  {len(rows)} measured", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    print(section.text(rows), end="\n\n", flush=True)
    return rows


def _document(
    settings: Settings, results: dict[str, list[Row]], started: dict[str, str]
) -> dict[str, object]:
    return {
        "versions": info.versions() | providers.versions(),
        "machine": [info.cpu(), *info.gpus()],
        "parameters": {
            "device": settings.device,
            "threads": settings.threads,
            "quick": settings.quick,
            "clock": settings.clock,
            "rounds": settings.rounds,
            "cells": settings.selection.wanted,
            "budget": settings.swap_seconds,
            "max_autotune": settings.max_autotune,
        },
        "gpu": {"before": started, "after": gpu.state()},
        "sections": results,
    }
