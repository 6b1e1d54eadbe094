"""Any command line and any arguments of a warm-up: a right run, or an error of ours or of argparse.

Nothing is compiled or measured: stand-ins write down what they are asked for, and check it.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import flash4_torch
from bad_inputs import _INTERNAL
from everything import EVERYTHING
from flash4_torch import ahead, env
from flash4_torch.__main__ import main
from flash4_torch.bench import command
from flash4_torch.compile import Key, aot, pool
from flash4_torch.compile.pool import Prepared
from flash4_torch.configs.types import Features
from flash4_torch.errors import ArgumentError, ExportError, Flash4Error
from flash4_torch.testing import emulate

EXAMPLES = settings(
    max_examples=2000 if EVERYTHING else 60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

RATIO = {"median": 1.0, "low": 0.99, "high": 1.01, "rounds": 8}

asked: list[tuple[list[Key], int | None]] = []
"""Kernels and jobs that the compilers were asked for since the last call began."""


def prepare(
    keys: Sequence[Key], jobs: int | None, progress: Callable[..., None], made: Any = None
) -> list[Prepared]:
    """A stand-in for `pool.prepare`."""
    asked.append((list(keys), jobs))
    assert keys and len(set(keys)) == len(keys)
    assert jobs is None or (type(jobs) is int and jobs >= 1)
    progress(0, len(keys))
    for number, key in enumerate(keys):
        assert repr(eval(repr(key.static), vars(flash4_torch.configs.types) | PLANS)) == repr(key.static)
        features = key.static[0]
        if isinstance(features, Features):
            assert features.dtype in ahead.DTYPES
            assert all(type(D) is int and 0 < D <= 256 and D % 8 == 0 for D in (features.D, features.Dv))
        if made:
            made(key, 0.5)
        progress(number + 1, len(keys))
    return [Prepared(key, 0.5) for key in keys]


def plans() -> dict[str, Any]:
    """The other classes that occur in kernels' names."""
    from flash4_torch.kernels.common import kvcache, mask_tables
    from flash4_torch.kernels.common.bwd import row_blocks

    return vars(kvcache) | vars(mask_tables) | vars(row_blocks)


PLANS = plans()


@pytest.fixture(autouse=True)
def seams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    def export(folder: Path, keys: Sequence[Key], *, runtime: bool) -> Path:
        assert asked and list(keys) == asked[-1][0] and type(runtime) is bool
        (folder / aot.MANIFEST).write_text("{}")
        return folder / aot.MANIFEST

    def run_section(section: Any, settings: Any) -> list[dict[str, str]]:
        assert settings.device == "cpu" and (settings.rounds is None or settings.rounds >= 2)
        return [{"measured": section.TITLE, "state": "timed", "stock_over_flash4": RATIO}]

    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pool, "prepare", prepare)
    monkeypatch.setattr(aot, "export", export)
    monkeypatch.setattr(command, "_run_section", run_section)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    yield tmp_path


# Command lines: words, and whether they are good in their place.

TEXT = st.text(st.characters(blacklist_characters="/.\0", blacklist_categories=("Cs",)), max_size=6)
"""Text that names no folder outside of the test's own."""


class Words(NamedTuple):
    """Words that may stand in some place, and words that must not."""

    good: Sequence[str] = ()
    bad: Sequence[str] = ()


GARBAGE = ("", "x", "-1", "0", "1.5", "1_0", "nan", "None", "ß", "3;4", "9" * 40, "64x", "--", "a=b")
COUNT = Words(["1", "2", "3", "007"], GARBAGE)

KERNEL_OPTIONS = {
    "--arch": (1, Words(["sm_80", "sm_90a", "sm_100a", "sm_120a"], ["sm_75", "SM_90A", "", "90"])),
    "--head-dim": (2, Words(["64", "128", "192x128", "8", "256"], [*GARBAGE, "63", "520", "64x65", "x64"])),
    "--dtype": (2, Words(ahead.DTYPES, ["float64", "half", "", "bfloat"])),
    "--features": (
        2,
        Words(
            ["plain", "causal", "varlen+causal", "mask+dropout"], ["", "+", "casual", "mask+float-mask", "x"]
        ),
    ),
    "--groups": (2, Words(["1", "2", "8", "64", "1024"], [*GARBAGE, "1025", "1000000"])),
    "--jobs": (1, COUNT),
    "--no-gradients": (0, Words()),
}
OPTIONS: dict[str, dict[str, tuple[int, Words]]] = {
    "info": {"--json": (0, Words())},
    "warmup": KERNEL_OPTIONS,
    "export": {**KERNEL_OPTIONS, "--runtime": (0, Words())},
    "bench": {
        "--quick": (0, Words()),
        "--device": (1, Words(["cpu"], ["gpu", "", "cuda:x", "meta", "cuda:999"])),
        "--threads": (1, Words(["1"], [*GARBAGE, "100000"])),
        "--clock": (1, Words(["wall", "cpu"], ["gpu", ""])),
        "--rounds": (1, Words(["2", "10"], [*GARBAGE, "1", "1001"])),
        "--budget": (1, Words(["1", "600"], [*GARBAGE, "86401"])),
        "--max-autotune": (0, Words()),
        "--cells": (
            2,
            Words(["D=64,128", "S=1024", "causal=yes", "dtype=float32"], ["D", "D=x", "B=1", "a=b", ""]),
        ),
        "--out": (1, Words(["results.json", "new/results.json"], ["/dev/null/x", "/proc", "", "."])),
    },
}
POSITIONAL = {
    "info": (0, 0, Words()),
    "warmup": (0, 0, Words()),
    "export": (1, 1, Words(["out", "deep/out"], ["/dev/null/x", "/proc/x", "", __file__])),
    "bench": (0, 2, Words(list(command.SECTIONS), ["", "forwards", "x"])),
}


@st.composite
def lines(draw: st.DrawFn) -> tuple[list[str], bool]:
    """A command line, and whether it is good; one half of them is."""
    name = draw(st.sampled_from(list(OPTIONS)))
    spoilt, used = draw(st.booleans()), []

    def drawn(words: Words, least: int, most: int) -> list[str]:
        allowed = (*words.good, *words.bad) if spoilt else words.good
        found = draw(st.lists(st.sampled_from(allowed), min_size=least, max_size=most)) if most else []
        used.extend(text in words.good for text in found)
        return found

    least, most, words = POSITIONAL[name]
    line = [name, *drawn(words, least, most)]
    chosen = draw(st.lists(st.sampled_from(list(OPTIONS[name])), unique=True, max_size=4))
    if name in ("warmup", "export") and "--arch" not in chosen:
        line += ["--arch", "sm_90a"]
    for option in chosen:
        most, words = OPTIONS[name][option]
        line += [option, *drawn(words, min(most, 1), most)]
    if spoilt and draw(st.integers(0, 9)) == 0:
        line.append(draw(st.sampled_from(["--nope", "--job s", "-x", "--json=1", "--quick=1"])))
        used.append(False)
    return line, all(used)


def outcome(run: Callable[[list[str]], int], line: list[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr; any exception but SystemExit is a fault."""
    asked.clear()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = run(line)
        except SystemExit as end:
            status = int(end.code or 0)
    return status, out.getvalue(), err.getvalue()


@EXAMPLES
@given(lines())
def test_a_line_runs_if_all_its_words_are_good(line_and_good: tuple[list[str], bool]) -> None:
    line, good = line_and_good
    status, out, err = outcome(main, line)
    assert (status == 0) == good, (line, status, err)
    if good:
        check_run(line, out)
    else:
        check_refusal(status, out, err)


def check_run(line: list[str], out: str) -> None:
    if line[0] in ("warmup", "export"):
        ((keys, _),) = asked
        assert all(key.arch == line[line.index("--arch") + 1] for key in keys)
    if line[0] == "warmup":
        assert out.endswith(f"\n{len(keys)} kernels\n") and out.count("\n") == len(keys) + 2
    if line[0] == "export":
        assert Path(out.removesuffix("\n")).read_text() == "{}"
    if line[0] == "info":
        assert ("--json" not in line) or json.loads(out)


def check_refusal(status: int, out: str, err: str) -> None:
    """Asserts refusal before any compilation or measurement, with a reason in the caller's words last."""
    assert status == 2 and out == "" and not asked
    assert re.search(r"^(python -m )?flash4_torch[a-z .]*: .{10}", err, re.MULTILINE), err
    assert not [text for text in _INTERNAL if text in err], err


@EXAMPLES
@given(st.lists(st.one_of(st.sampled_from([*OPTIONS, *KERNEL_OPTIONS, "-h", "--version"]), TEXT)))
def test_any_words_are_run_or_refused(line: list[str]) -> None:
    status, out, err = outcome(main, line)
    assert status in (0, 2)
    if status:
        check_refusal(status, out, err)


@EXAMPLES
@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                ["--arch", "sm_90a", "--seed", "--lines", "3", "--schedule", "late", "--strict", "nope.py"]
            ),
            TEXT,
        )
    )
)
def test_the_emulate_command_refuses_any_words(line: list[str]) -> None:
    """There is no such script."""
    status, out, err = outcome(emulate.main, line)
    if not {"-h", "--help"} & set(line):
        assert status == 2
        check_refusal(status, out, err)


# Keywords

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-300, 300),
    st.sampled_from([1 << 70, -(1 << 70), 10**400]),
    st.floats(),
    TEXT,
    st.binary(max_size=4),
    st.sampled_from(
        [64, 128, 256, "bfloat16", "float16", "causal", "mask+float-mask", "mask", "plain", 1, 8]
    ),
    st.sampled_from(
        [np.int64(64), np.float32(64), torch.tensor(64), torch.tensor([1, 2]), torch.bfloat16, object()]
    ),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner),
    ),
    max_leaves=4,
)
GOOD: dict[str, Sequence[Any]] = {
    "arch": ["sm_86", "sm_90a", "sm_100a", "sm_103a"],
    "head_dims": [[64], (128, (192, 128)), {256}, range(8, 32, 8), [np.int64(64)]],
    "dtypes": [["float16"], ("bfloat16", "float16")],
    "features": [["causal"], ["plain", "varlen+deterministic"]],
    "groups": [[1], [2, 1024], {8}, [np.int8(4)]],
    "gradients": [True, False],
    "jobs": [1, 3, 1 << 40, None],
    "log": [io.StringIO(), None],
    "runtime": [True, False],
}


@st.composite
def keywords(draw: st.DrawFn, names: Sequence[str]) -> dict[str, Any]:
    """Good arguments; in one half of the calls some are anything."""
    drawn = {"arch": "sm_90a", "head_dims": [64], "features": ["plain"]}
    spoilt = draw(st.booleans())
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True)):
        good = st.sampled_from(GOOD[name])
        drawn[name] = draw(st.one_of(good, ANYTHING) if spoilt else good)
    # With None, it would ask for the GPU's architecture.
    return drawn if drawn["arch"] is not None else drawn | {"arch": ""}


@EXAMPLES
@given(keywords([name for name in GOOD if name != "runtime"]))
def test_any_keywords_of_warmup(chosen: dict[str, Any]) -> None:
    asked.clear()
    try:
        prepared = flash4_torch.warmup(**chosen)
    except ArgumentError as error:
        assert error.argument in chosen and not asked
        assert not [text for text in _INTERNAL if text in str(error)], error
        return
    ((keys, jobs),) = asked
    assert [kernel for kernel, _ in prepared] == keys
    assert jobs == chosen.get("jobs") and {key.arch for key in keys} == {chosen["arch"]}
    widths = {key.static[0].D for key in keys if isinstance(key.static[0], Features)}
    assert widths == {D[0] if isinstance(D, tuple) else D for D in chosen["head_dims"]}


@EXAMPLES
@given(
    keywords(list(GOOD)),
    st.one_of(st.sampled_from(["out", Path("out"), "/dev/null/x", __file__]), ANYTHING),
)
def test_any_keywords_of_export(chosen: dict[str, Any], folder: Any) -> None:
    asked.clear()
    try:
        manifest = ahead.export(folder, **chosen)
    except Flash4Error as error:
        assert isinstance(error, (ArgumentError, ExportError)) and not asked
        if isinstance(error, ArgumentError):
            assert error.argument in {*chosen, "folder"}
        assert not [text for text in _INTERNAL if text in str(error)], error
        return
    assert manifest == Path(folder) / aot.MANIFEST and manifest.read_text() == "{}"
    assert chosen.get("runtime", False) in (True, False)
