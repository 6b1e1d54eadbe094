"""Command lines that must be refused: exit status 2, and a sentence on stderr."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator

from flash4_torch.__main__ import main
from flash4_torch.testing import emulate

from . import Case


class Refused(Exception):
    """The exit status was 2; the message is what stderr got."""


def refused(command: Callable[[list[str]], int], *arguments: str) -> Callable[[], object]:
    """A call of a command that raises what the command prints where it refuses."""

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


def _case(command: Callable[[list[str]], int], arguments: list[str], words: str) -> Case:
    return Case(" ".join(arguments)[:60], refused(command, *arguments), Refused, words)


COUNTS = ("0", "-1", "-3", "1.5", "x", "", "1_0", " 1", "٣", "1e3", "0x10", "9" * 5000)
HEAD_DIMS = ("64x", "x64", "x", "64x64x64", "sixty", "", "64.0", "-64", "64X128", "64 128", "6_4", "9" * 5000)
ARCHS = ("sm_75", "sm_90", "hopper", "", "SM_90A", "90")
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
        for text in ("63", "0", "520", "64x520", "00064x3"):
            yield [*good, "--head-dim", text], "a multiple of 8 up to 512"
        for text in COUNTS:
            yield [*good, "--groups", text], "argument --groups"
            yield [*good, "--jobs", text], "argument --jobs"
        yield [*good, "--groups", "1000000"], "groups is 1000000, but each must be from 1 to 1024"
        yield [*good, "--groups", "1", "1025"], "groups is 1025"
        for text in ARCHS:
            yield [*command, "--arch", text], "must be one of sm_80, sm_86, sm_87, sm_89, sm_90a"
        for text, words in FEATURES.items():
            yield [*good, "--features", text], words
        for text in ("float64", "half", "", "bfloat", "float16,bfloat16"):
            yield [*good, "--dtype", text], "argument --dtype: invalid choice"
        for option in ("--head-dim", "--dtype", "--features", "--groups", "--jobs", "--arch"):
            yield [*good, option], f"argument {option}: expected"
        yield [*good, "--head-dims", "64"], "did you mean --head-dim?"
        yield [*good, "--dtypes", "float16"], "did you mean --dtype?"
        yield [*good, "--gradients"], "did you mean --no-gradients?"
    for folder in ("/dev/null/x", "/proc/x", __file__):
        yield ["export", folder, "--arch", "sm_90a"], f"exported kernels in {folder}: the folder cannot be"
    yield ["export", "", "--arch", "sm_90a"], "folder is '', but it must be the path"


def _emulate() -> Iterator[tuple[list[str], str]]:
    yield [], "the following arguments are required: script"
    yield ["/nonexistent/script.py"], "script is '/nonexistent/script.py', but there is no such file"
    yield ["/proc"], "script is '/proc', but there is no such file"
    yield [""], "script is '', but there is no such file"
    for arch in ARCHS:
        yield ["--arch", arch, __file__], "argument --arch: invalid choice"
    for option, most in {"--num-sms": 1024, "--seed": 2**64 - 1, "--lines": 10**6}.items():
        for text in ("-1", "1.5", "x", "", "1_0", "9" * 5000, str(most + 1)):
            yield [option, text, __file__], f"argument {option}: "
    yield ["--num-sms", "0", __file__], "'0', but it must be a whole number from 1 to 1024"
    for text in ("lazy", "", "EAGER", "late,fuzz"):
        yield ["--schedule", text, __file__], "argument --schedule: invalid choice"
    for text in ("all", "", "wait-ld"):
        yield ["--strict", text, __file__], "argument --strict: invalid choice"


def _bench() -> Iterator[tuple[list[str], str]]:
    for text in COUNTS[1:]:
        yield ["--threads", text], "argument --threads"
        yield ["--rounds", text], "argument --rounds"
        yield ["--budget", text], "argument --budget"
    yield ["--threads", "0"], "--threads is 0, but it must be at least 1"
    yield ["--threads", "100000"], "--threads is 100000, but it must be at most"
    yield ["--rounds", "1"], "--rounds is 1, but it must be at least 2"
    yield ["--rounds", "100000000"], "--rounds is 100000000, but it must be at most"
    yield ["--budget", "0"], "--budget is 0, but it must be at least 1"
    yield ["--budget", "86401"], "--budget is 86401, but it must be at most 86400"
    for text in ("nope", "", "gpu", "CPU", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "mps", "meta"):
        yield ["--device", text], f"--device is {text!r}, but it must be cpu, cuda or cuda:N"
    for text in ("wall-clock", "", "gpu"):
        yield ["--clock", text], "argument --clock: invalid choice"
    yield ["--model", "b20"], "argument --model: invalid choice: 'b20'"
    yield ["--model", "h100"], "argument --model: invalid choice"
    yield ["forwards"], "unknown section forwards; there are forward, backward"
    yield ["forwards"], "did you mean forward?"
    yield ["forward", "bakward"], "did you mean backward?"
    yield [""], "unknown section ''"
    for word in (
        "D",
        "D=",
        "=64",
        "d=64",
        "D:64",
        "width=64",
        "D=64,",
        "D=x",
        "D=-64",
        "D=6.4",
        "S=1k",
        "Hk=two",
    ):
        yield ["--cells", word], f"--cells is {word!r}, but "
    for word in ("causal=maybe", "causal=True", "dtype=fp8", "dtype=torch.float16", "direction=both"):
        yield ["--cells", word], f"--cells is {word!r}, but "
    for word in ("mode=train", "mask=padding,causal+padding", "dropout=0.0", "compiled=True", "E=64x"):
        yield ["--cells", word], f"--cells is {word!r}, but "
    yield ["--cells", "feature=nope"], "--cells is 'feature=nope', but "
    for option in ("--out", "--plot"):
        for path in ("/dev/null/x", "/proc/x/y", f"{__file__}/x"):
            yield [option, path], f"{option} is {path!r}, but "
        yield [option, ""], f"argument {option}: '' is not a path"
    yield ["--out", "/proc"], "--out is '/proc', but "
    yield ["--plot", __file__], f"--plot is {__file__!r}, but "
    for option in ("--out", "--plot", "--threads", "--cells", "--device", "--model"):
        yield [option], f"argument {option}: expected"


CASES = [
    *(_case(main, arguments, words) for arguments, words in (*_commands(), *_kernels())),
    *(_case(main, ["bench", *arguments], words) for arguments, words in _bench()),
    *(_case(emulate.main, arguments, words) for arguments, words in _emulate()),
]
