"""`python -m flash4_torch bench`: runs the chosen sections, prints tables, writes JSON and plots."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch

from .. import info
from . import emulator, feature_times, gpu, host, memory, module, providers
from .cycles import MACHINES
from .peers import Peers
from .prediction import Prediction
from .report import Row
from .settings import Selection, Settings


class Section(Protocol):
    """A module, or an object like one."""

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
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="section",
        help=f"what to measure: {', '.join(SECTIONS)}; default: all",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases, shorter timings")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu or cuda; default: cuda where there is a GPU",
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="CPU threads; default: torch's"
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
        type=int,
        help="how often each contender is timed in a comparison, at least 2; default: by a time budget, and "
        "6 (3 where S is 16384 or more) for forward and backward on a GPU",
    )
    parser.add_argument(
        "--model",
        choices=MACHINES,
        help="instead: what a GPU that is not here would be busy with, predicted from runs in the emulator",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write one PNG per section")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns the exit status."""
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        return _refuse(f"unknown section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        return _refuse(f"--device is {options.device}, but torch sees no GPU")
    if options.threads < 1:
        return _refuse(f"--threads is {options.threads}, but it must be at least 1")
    if options.rounds is not None and options.rounds < 2:
        return _refuse(f"--rounds is {options.rounds}, but it must be at least 2")
    try:
        selection = Selection.parse(options.cells)
    except ValueError as error:
        return _refuse(f"--cells is {error}")
    if options.plot and not _has_matplotlib():
        return _refuse("--plot needs matplotlib: pip install 'flash4_torch[demo]'")
    if options.model and not find_spec("cutlass"):
        return _refuse("--model compiles kernels: pip install 'flash4_torch[kernels]'")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    settings = Settings(
        options.device, options.threads, options.quick, options.clock, options.rounds, selection
    )
    if options.model:
        return _predict(options.model, settings, options.out)
    started = gpu.state()
    results: dict[str, list[Row]] = {}
    for name in options.sections or SECTIONS:
        results[name] = _run_section(SECTIONS[name], settings)
        # After each section: a later one may fail.
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(_document(settings, results, started), indent=1) + "\n")
    if options.plot:
        from . import plots

        plots.draw(results, options.plot)
    return 0


def _predict(machine: str, settings: Settings, out: Path | None) -> int:
    prediction = Prediction(machine)
    rows = _run_section(prediction, settings)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(prediction.document(rows))
    return 0


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
        },
        "gpu": {"before": started, "after": gpu.state()},
        "sections": results,
    }
