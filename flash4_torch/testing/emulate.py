"""Run CuTe-DSL kernels without a GPU: their compiled PTX is executed on the CPU and checked while it runs::

    with emulate.device("sm_100a", schedule="late") as device:
        compiled = cute.compile(host_function, from_dlpack(a), from_dlpack(b))
        compiled(from_dlpack(a), from_dlpack(b))
    print(device.reports[-1].counters)

Inside the block every launch runs in the emulator, on CPU tensors; the first one that does something wrong
raises `EmulationError`, which names the warp, the PTX line and the source line. `run_ptx` runs PTX of any
origin. A whole script can run the same way; it may act as if its tensors were on a GPU, provided that it
makes no GPU tensors itself::

    python -m flash4_torch.testing.emulate --arch sm_90a script.py

A script may also open devices of its own, as in the first example: they start from the command's architecture
and options, and their launches are reported, too.
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from flash4_torch.emulator.emulate import Device, device
from flash4_torch.emulator.engine import SCHEDULES, STRICT, Options, run_ptx
from flash4_torch.emulator.errors import EmulatorError
from flash4_torch.emulator.host import ARCHITECTURES
from flash4_torch.emulator.report import EmulationError, Finding, Report
from flash4_torch.errors import Flash4Error

__all__ = ["Device", "EmulationError", "Finding", "Options", "Report", "device", "run_ptx"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status.

    The status is 1 if any launch had findings, else the script's own; it is 2, with a sentence on stderr, if
    the script cannot run.
    """
    given = _parser().parse_args(arguments)
    options = {
        "schedule": given.schedule,
        "seed": given.seed,
        "races": not given.no_races,
        "strict": frozenset(given.strict),
        "num_sms": given.num_sms,
    }
    if not Path(given.script).is_file():
        return _refuse(f"script is {given.script!r}, but there is no such file")
    with ExitStack() as stack:
        try:
            emulated = stack.enter_context(device(given.arch, check=False, gives_way=True, **options))
        except (Flash4Error, EmulatorError, ImportError) as error:
            return _refuse(str(error))
        try:
            status = _run(given.script, given.arguments)
        finally:
            for number, report in enumerate(emulated.reports):
                print(table(report, number, given.lines))
            print(summary(emulated.reports), flush=True)
    return int(any(report.findings for report in emulated.reports)) or status


def _run(script: str, arguments: Sequence[str]) -> int:
    """Runs the script as Python would, and returns its exit status."""
    argv, path = sys.argv, sys.path
    sys.argv, sys.path = [script, *arguments], [str(Path(script).resolve().parent), *path]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    finally:
        sys.argv, sys.path = argv, path
    return 0


def _refuse(sentence: str) -> int:
    print(f"flash4_torch.testing.emulate: {sentence}", file=sys.stderr)
    return 2


def table(report: Report, number: int = 0, lines: int = 0) -> str:
    """A readable table of a launch's counters and its `lines` most executed instructions."""
    parts = [f"launch {number}: {report.kernel}", str(report.counters)]
    hottest = sorted(report.lines, key=lambda line: -sum(line.counts))[:lines]
    parts += [f"{sum(line.counts):>16,}  {line.ptx_line:>6}  {line.ptx}" for line in hottest]
    return "\n".join(parts) + "\n"


def summary(reports: Sequence[Report]) -> str:
    """The findings of all launches; it is printed last, so that counters do not bury it."""
    if not reports:
        return "nothing was launched"
    wrong = [(number, report) for number, report in enumerate(reports) if report.findings]
    launches = f"{len(reports)} launch{'es' if len(reports) > 1 else ''}"
    parts = [f"findings in {len(wrong)} of {launches}" if wrong else f"no findings in {launches}"]
    for number, report in wrong:
        parts += [f"launch {number}: {report.kernel}", *map(str, report.findings)]
    return "\n".join(parts)


def _number(lowest: int, highest: int) -> Callable[[str], int]:
    """A type of arguments for argparse."""

    def parse(text: str) -> int:
        if not re.fullmatch("[0-9]{1,20}", text) or not lowest <= int(text) <= highest:
            limit = f"it must be a whole number from {lowest} to {highest}"
            raise argparse.ArgumentTypeError(f"{text!r}, but {limit}")
        return int(text)

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flash4_torch.testing.emulate",
        description="Runs a script whose CuTe-DSL kernels are compiled and launched for an emulated GPU, "
        "and prints for each launch what it executed, and at the end what was wrong.",
        epilog="example: python -m flash4_torch.testing.emulate --schedule late examples/find_a_race.py",
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, help="default: FLASH4_ARCH, else sm_100a")
    parser.add_argument(
        "--num-sms", type=_number(1, 1024), help="how many SMs the GPU has; default: the most"
    )
    parser.add_argument("--schedule", choices=SCHEDULES, default="eager", help="default: %(default)s")
    parser.add_argument(
        "--seed", type=_number(0, 2**64 - 1), default=0, help="of the fuzz schedule; default: %(default)s"
    )
    parser.add_argument("--no-races", action="store_true", help="do not check the order of memory accesses")
    parser.add_argument("--strict", choices=sorted(STRICT), action="append", default=[], help="a check more")
    parser.add_argument(
        "--lines",
        type=_number(0, 10**6),
        default=0,
        help="show the N most executed instructions",
        metavar="N",
    )
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    return parser


if __name__ == "__main__":
    sys.exit(main())
