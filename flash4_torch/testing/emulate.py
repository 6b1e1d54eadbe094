"""Run CuTe-DSL kernels without a GPU: their compiled PTX is executed on the CPU and checked while it runs.

    with emulate.device("sm_100a", schedule="late") as device:
        compiled = cute.compile(host_function, from_dlpack(a), from_dlpack(b))
        compiled(from_dlpack(a), from_dlpack(b))
    print(device.reports[-1].counters)

Inside the block every launch runs in the emulator, on CPU tensors; the first one that does something wrong
raises `EmulationError`, which names the warp, the PTX line and the source line. `run_ptx` runs PTX of any
origin. The same for a whole script, which may believe that it works on a GPU's tensors if it makes none
itself:

    python -m flash4_torch.testing.emulate --arch sm_90a script.py
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence

from flash4_torch import env
from flash4_torch.emulator.emulate import Device, device
from flash4_torch.emulator.engine import SCHEDULES, STRICT, Options, run_ptx
from flash4_torch.emulator.host import ARCHITECTURES
from flash4_torch.emulator.report import EmulationError, Finding, Report

__all__ = ["Device", "EmulationError", "Finding", "Options", "Report", "device", "run_ptx"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 1 if any launch had findings."""
    parser = _parser()
    given = parser.parse_args(arguments)
    options = {
        "schedule": given.schedule,
        "seed": given.seed,
        "races": not given.no_races,
        "strict": frozenset(given.strict),
    }
    with device(given.arch, multiprocessors=given.multiprocessors, check=False, **options) as emulated:
        sys.argv = [given.script, *given.arguments]
        runpy.run_path(given.script, run_name="__main__")
    for number, report in enumerate(emulated.reports):
        print(table(report, number, given.lines))
    return int(any(report.findings for report in emulated.reports))


def table(report: Report, number: int = 0, lines: int = 0) -> str:
    """A launch's findings and counters for reading, and its `lines` most executed instructions."""
    parts = [f"launch {number}: {report.kernel}", str(report.counters)]
    hottest = sorted(report.lines, key=lambda line: -sum(line.counts))[:lines]
    parts += [f"{sum(line.counts):>16,}  {line.ptx_line:>6}  {line.ptx}" for line in hottest]
    parts += [str(finding) for finding in report.findings] or ["no findings"]
    return "\n".join(parts) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flash4_torch.testing.emulate",
        description="Runs a script whose CuTe-DSL kernels are compiled and launched for an emulated GPU, "
        "and prints for each launch what it executed and what was wrong with it.",
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, default=env.ARCH.get(), help="default: %(default)s")
    parser.add_argument("--multiprocessors", type=int, help="how many the GPU has; default: 132 or 148")
    parser.add_argument("--schedule", choices=SCHEDULES, default="eager", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the fuzz schedule; default: %(default)s")
    parser.add_argument("--no-races", action="store_true", help="do not check the order of memory accesses")
    parser.add_argument("--strict", choices=sorted(STRICT), action="append", default=[], help="a check more")
    parser.add_argument(
        "--lines", type=int, default=0, help="show the N most executed instructions", metavar="N"
    )
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    return parser


if __name__ == "__main__":
    sys.exit(main())
