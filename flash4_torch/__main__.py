"""The command line: `python -m flash4_torch info`, `warmup`, `export` and `bench`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from . import __version__
from .compile.arch import NAMES
from .errors import Flash4Error, hint

_COMMAND = "python -m flash4_torch"

_EPILOG = f"""examples:
  {_COMMAND} info
  {_COMMAND} warmup --arch sm_90a --head-dim 64 128 --features plain causal
  {_COMMAND} export kernels/ --arch sm_100a --head-dim 128 --features causal --groups 1 8
  {_COMMAND} bench forward --quick
  {_COMMAND} warmup --help
"""

_INFO_EPILOG = """--json prints an object with these keys:
  versions     name: version, or "not installed"
  devices      a list of {device, name, capability}, cpu with threads, GPUs with memory_gib
  backends     device: {backend: [why it does not serve plain attention there]}; no reason: it can
  kernels      architecture: how its kernels were proven
  environment  a list of {name, value, default, meaning, wrong}; wrong: a sentence, or null
  misspelt     a list of sentences, for each variable that looks like one of ours and is none
  cache        {folder, kernels, bytes, error}; error: why there is no such folder, or null

The exit status is 1 where an environment variable is wrong or misspelt, else 0.
"""

FEATURE_WORDS = {
    "plain": "none of the others",
    "causal": "causal=True",
    "window": "a window, bounded on both sides",
    "softcap": "softcap > 0; with 16-bit dtypes up to 64",
    "large-softcap": "softcap > 64",
    "varlen": "packed sequences: attention_varlen",
    "dropout": "dropout_p > 0",
    "mask": "a boolean attn_mask",
    "float-mask": "an attn_mask in the call's dtype",
    "sinks": "attention sinks in the call's dtype",
    "weights": "attention weights, for need_weights=True",
    "kvcache": "attention_kvcache, append_kvcache as serving engines call it, and merge_states",
    "deterministic": "deterministic gradients",
    "ring": "what ranks that share a sequence call, too",
}
"""Meaning of each word of --features."""

_FEATURES_EPILOG = "\n".join(
    [
        "features:",
        "  Each argument of --features is one kind of call: words joined by +, in any order.",
        *(f"  {word:<13}  {meaning}" for word, meaning in FEATURE_WORDS.items()),
        "  A call needs the kernel that has all of its words: a causal one with dropout needs",
        "  causal+dropout, which neither `causal` nor `dropout` prepares.",
        "",
        "examples:",
        "  {command} --arch sm_90a --head-dim 64 128 --features plain causal varlen+causal",
        "  {command} --arch sm_100a --head-dim 192x128 --features causal+dropout --groups 1 8",
    ]
)

_BENCH_EPILOG = f"""examples:
  {_COMMAND} bench --quick
  {_COMMAND} bench forward backward --cells D=64,128 causal=yes --out results.json --plot plots/
  {_COMMAND} bench swap --cells dtype=bfloat16 compiled=no
  {_COMMAND} bench --model b200

The exit status is 1 where section swap finds a swapped module slower than stock, or wrong.
"""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors suggest the word that was meant."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: list[_Parser] = []

    def error(self, message: str) -> NoReturn:
        if choice := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            message += hint(choice[1], re.findall(r"[\w-]+", choice[2]))
        elif option := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            message += hint(option[1], self._all_options())
        super().error(message)

    def _all_options(self) -> list[str]:
        """All options, of this parser and its commands: argparse lets the outer parser refuse an option."""
        helps = "".join(parser.format_help() for parser in (self, *self.commands))
        return re.findall(r"--[a-z][a-z-]*", helps)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command named by `arguments` (default: the process's) and returns the exit status.

    Status 2 means a bad command line, as in argparse, or a Flash4Error, whose message is on stderr.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        return int(options.run(options))
    except Flash4Error as error:
        print(f"flash4_torch: {error}", file=sys.stderr)
        return 2


def _parser() -> _Parser:
    from .bench import command

    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog=_COMMAND, description=__doc__, epilog=_EPILOG, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"flash4_torch {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")

    def add(name: str, sentence: str, epilog: str) -> _Parser:
        description = sentence[0].upper() + sentence[1:] + "."
        added = commands.add_parser(
            name, help=sentence, description=description, epilog=epilog, formatter_class=raw
        )
        parser.commands.append(added)
        return added

    info = add("info", "versions, devices, backends, environment variables, cache", _INFO_EPILOG)
    info.add_argument("--json", action="store_true", help="print JSON instead of text")
    info.set_defaults(run=_info)
    warmup = add(
        "warmup",
        "compile kernels into the cache, before the first call",
        _FEATURES_EPILOG.format(command=f"{_COMMAND} warmup"),
    )
    _add_kernels(warmup)
    warmup.set_defaults(run=_warmup)
    export = add(
        "export",
        "compile kernels into a folder for FLASH4_AOT_DIR",
        _FEATURES_EPILOG.format(command=f"{_COMMAND} export kernels/"),
    )
    export.add_argument("folder")
    _add_kernels(export)
    export.add_argument(
        "--runtime", action="store_true", help="also copy the compiler's runtime library, 43 MB"
    )
    export.set_defaults(run=_export)
    command.add_arguments(
        add("bench", "measure speed and memory against PyTorch's own attention", _BENCH_EPILOG)
    )
    return parser


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `ahead.warmup`."""
    from . import ahead

    parser.add_argument("--arch", help=f"{', '.join(NAMES)}; default: that of the GPU here")
    parser.add_argument(
        "--head-dim",
        dest="head_dims",
        nargs="+",
        type=_head_dim,
        default=ahead.HEAD_DIMS,
        help="D, or DxDv where they differ: 64 192x128; default: 64 128",
    )
    parser.add_argument(
        "--dtype",
        dest="dtypes",
        nargs="+",
        choices=ahead.ALL_DTYPES,
        default=ahead.DTYPES,
        help="default: bfloat16 float16",
    )
    parser.add_argument(
        "--features",
        nargs="+",
        default=ahead.FEATURES,
        metavar="WORDS",
        help="kinds of calls, as explained below; default: plain causal",
    )
    parser.add_argument(
        "--groups",
        nargs="+",
        type=count,
        default=(1,),
        help="query heads to a KV head, for GQA and MQA; 64 serves all larger ones, too; default: 1",
    )
    parser.add_argument(
        "--no-gradients", dest="gradients", action="store_false", help="leave out the backward's kernels"
    )
    parser.add_argument("--jobs", type=count, help="compile so many at a time; default: one per processor")


def _head_dim(text: str) -> int | tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,9})(?:x([0-9]{1,9}))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is neither D nor DxDv, as in 64 or 192x128")
    return (int(found[1]), int(found[2])) if found[2] else int(found[1])


def count(text: str) -> int:
    """Parses a whole number of at least 1 from the command line."""
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _chosen(options: argparse.Namespace) -> dict[str, Any]:
    names = ("arch", "head_dims", "dtypes", "features", "groups", "gradients", "jobs")
    return {name: getattr(options, name) for name in names}


def _warmup(options: argparse.Namespace) -> int:
    from . import ahead

    prepared = ahead.warmup(**_chosen(options), log=sys.stdout)
    print(f"{len(prepared)} kernels")
    return 0


def _export(options: argparse.Namespace) -> int:
    """Kernel lines go to stderr: stdout gets only the manifest's path, for scripts."""
    from . import ahead

    print(ahead.export(options.folder, **_chosen(options), runtime=options.runtime, log=sys.stderr))
    return 0


def _info(options: argparse.Namespace) -> int:
    from . import info

    collected = info.collect()
    print(json.dumps(collected, indent=2) if options.json else info.text(collected))
    return int(bool(info.complaints(collected)))


if __name__ == "__main__":
    sys.exit(main())
