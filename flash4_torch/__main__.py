"""The command line: `python -m flash4_torch info`, `warmup`, `export` and `bench`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .errors import Flash4Error


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that `arguments` (default: the process's) name and returns the exit status."""
    from .bench import command

    parser = argparse.ArgumentParser(prog="python -m flash4_torch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, devices, backends, environment variables, cache")
    info.add_argument("--json", action="store_true", help="print JSON instead of text")
    info.set_defaults(run=_info)
    warmup = commands.add_parser("warmup", help="compile kernels into the cache, before the first call")
    _add_kernels(warmup)
    warmup.set_defaults(run=_warmup)
    export = commands.add_parser("export", help="compile kernels into a folder for FLASH4_AOT_DIR")
    export.add_argument("folder")
    _add_kernels(export)
    export.add_argument(
        "--runtime", action="store_true", help="also copy the compiler's runtime library, 43 MB"
    )
    export.set_defaults(run=_export)
    command.add_arguments(
        commands.add_parser("bench", help="measure speed and memory against PyTorch's own attention")
    )
    options = parser.parse_args(arguments)
    return int(options.run(options))


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    """What `ahead.warmup` takes."""
    from . import ahead

    parser.add_argument("--arch", help="sm_90a, sm_100a or sm_103a; default: that of the GPU here")
    parser.add_argument(
        "--head-dim",
        dest="head_dims",
        nargs="+",
        type=_head_dim,
        default=ahead.HEAD_DIMS,
        help="D, or DxDv where they differ: 64 192x128",
    )
    parser.add_argument("--dtype", dest="dtypes", nargs="+", choices=ahead.DTYPES, default=ahead.DTYPES)
    parser.add_argument(
        "--features",
        nargs="+",
        default=ahead.FEATURES,
        metavar="WORDS",
        help="kernels for calls with these, joined by +: plain causal varlen+causal causal+dropout; of "
        + ", ".join(ahead.WORDS),
    )
    parser.add_argument(
        "--groups", nargs="+", type=int, default=(1,), help="query heads to a key head, for GQA and MQA"
    )
    parser.add_argument(
        "--no-gradients", dest="gradients", action="store_false", help="leave out the backward's kernels"
    )
    parser.add_argument("--jobs", type=int, help="compile so many at a time; default: one per processor")


def _head_dim(text: str) -> int | tuple[int, int]:
    D, _, Dv = text.partition("x")
    return (int(D), int(Dv)) if Dv else int(D)


def _chosen(options: argparse.Namespace) -> dict[str, Any]:
    names = ("arch", "head_dims", "dtypes", "features", "groups", "gradients", "jobs")
    return {name: getattr(options, name) for name in names}


def _warmup(options: argparse.Namespace) -> int:
    from . import ahead

    return _saying_why(lambda: ahead.as_text(ahead.warmup(**_chosen(options))))


def _export(options: argparse.Namespace) -> int:
    from . import ahead

    return _saying_why(lambda: str(ahead.export(options.folder, runtime=options.runtime, **_chosen(options))))


def _saying_why(result: Callable[[], str]) -> int:
    """Prints a result, or the sentence of the error in its place."""
    try:
        print(result())
    except Flash4Error as error:
        print(f"flash4_torch: {error}", file=sys.stderr)
        return 2
    return 0


def _info(options: argparse.Namespace) -> int:
    from . import info

    collected = info.collect()
    print(json.dumps(collected, indent=2) if options.json else info.text(collected))
    return 0


if __name__ == "__main__":
    sys.exit(main())
