"""Command lines that must be refused: exit status 2, and a sentence on stderr."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator

from flash4_torch.__main__ import main

from . import Case


class Refused(Exception):
    """The exit status was 2; the message is what stderr got."""


def refused(command: Callable[[list[str]], int], *arguments: str) -> Callable[[], object]:
    """A call of a command that raises what it prints where it refuses."""

    def made() -> object:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = command(list(arguments))
            except SystemExit as exit:
                status = exit.code
        if status == 2:
            assert not out.getvalue(), "refused, and printed a result"
            raise Refused(err.getvalue())
        return status

    return made


COUNTS = ("0", "-1", "-3", "1.5", "x", "", "1_0", " 1", "٣", "1e3", "0x10", "9" * 5000)
HEAD_DIMS = ("64x", "x64", "x", "64x64x64", "sixty", "", "64.0", "-64", "64X128", "64 128", "6_4", "9" * 5000)
ARCHS = ("sm_80", "sm_90", "hopper", "", "SM_90A", "90")
FEATURES = {
    "casual": "did you mean causal?",
    "causal+drop": "did you mean dropout?",
    "windows": "did you mean window?",
    "var-len": "did you mean varlen?",
    "floatmask": "did you mean float-mask?",
    "plain,causal": "each must be one of plain",
    "": "each must be one of plain",
    "+": "each must be one of plain",
    "mask+float-mask": "a call has one mask",
}


def _commands() -> Iterator[tuple[list[str], str]]:
    yield ["inf"], "did you mean info?"
    yield ["warm-up"], "did you mean warmup?"
    yield ["exports", "x"], "did you mean export?"
    yield ["benchmark"], "invalid choice: 'benchmark'"
    yield [""], "invalid choice: ''"
    yield ["--nope"], "unrecognized arguments: --nope"
    yield ["--version=3"], "ignored explicit argument"
    yield ["info", "--jsn"], "did you mean --json?"
    yield ["info", "x"], "unrecognized arguments: x"
    yield ["info", "--json=yes"], "ignored explicit argument"
    yield ["export"], "the following arguments are required: folder"


def _kernels() -> Iterator[tuple[list[str], str]]:
    for command in (["warmup"], ["export", "/dev/null/x"]):
        good = [*command, "--arch", "sm_90a"]
        for text in HEAD_DIMS:
            yield [*good, "--head-dim", text], "--head-dim" if text != "64 128" else "64 128"
        for text in ("63", "0", "264", "64x264", "00064x3"):
            yield [*good, "--head-dim", text], "a multiple of 8 up to 256"
        for text in COUNTS:
            yield [*good, "--groups", text], "argument --groups"
            yield [*good, "--jobs", text], "argument --jobs"
        yield [*good, "--groups", "1000000"], "groups is 1000000, but each must be from 1 to 1024"
        yield [*good, "--groups", "1", "1025"], "groups is 1025"
        for text in ARCHS:
            yield [*command, "--arch", text], "must be one of sm_90a, sm_100a, sm_103a"
        for text, words in FEATURES.items():
            yield [*good, "--features", text], words
        for text in ("float32", "half", "", "bfloat", "float16,bfloat16"):
            yield [*good, "--dtype", text], "argument --dtype: invalid choice"
        for option in ("--head-dim", "--dtype", "--features", "--groups", "--jobs", "--arch"):
            yield [*good, option], f"argument {option}: expected"
        yield [*good, "--head-dims", "64"], "did you mean --head-dim?"
        yield [*good, "--dtypes", "float16"], "did you mean --dtype?"
        yield [*good, "--gradients"], "did you mean --no-gradients?"
    for folder in ("/dev/null/x", "/proc/x", __file__):
        yield ["export", folder, "--arch", "sm_90a"], f"exported kernels in {folder}: the folder cannot be"
    yield ["export", "", "--arch", "sm_90a"], "folder is '', but it must be the path"


CASES = [
    Case(" ".join(arguments)[:60], refused(main, *arguments), Refused, words)
    for arguments, words in (*_commands(), *_kernels())
]
