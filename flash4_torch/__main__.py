"""The command line: `python -m flash4_torch info` and `python -m flash4_torch bench`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that `arguments` (default: the process's) name and returns the exit status."""
    from .bench import command

    parser = argparse.ArgumentParser(prog="python -m flash4_torch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, devices, backends, environment variables, cache")
    info.add_argument("--json", action="store_true", help="print JSON instead of text")
    info.set_defaults(run=_info)
    command.add_arguments(
        commands.add_parser("bench", help="measure speed and memory against PyTorch's own attention")
    )
    options = parser.parse_args(arguments)
    return int(options.run(options))


def _info(options: argparse.Namespace) -> int:
    from . import info

    collected = info.collect()
    print(json.dumps(collected, indent=2) if options.json else info.text(collected))
    return 0


if __name__ == "__main__":
    sys.exit(main())
