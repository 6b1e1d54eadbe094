"""Kernels before the first call: `warmup` fills the cache, `export` a folder that needs no compiler."""

from __future__ import annotations

import io
import json
import os
import pickle
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import assume, given

import cubin
import flash4_torch
from compile_cases import Scale
from everything import EVERYTHING, one_of
from flash4_torch import ahead, env, errors, progress
from flash4_torch import compile as layer
from flash4_torch.__main__ import main
from flash4_torch.backends import dispatch
from flash4_torch.backends.compiled import (
    DECODE,
    MASK_BLOCKS,
    MASK_TRANSPOSE,
    POSTPROCESS,
    PREPROCESS,
    SM80_FAMILY,
    SM90A,
    SM100A,
    SM103A,
    TARGETS,
    WEIGHTS,
    Compiled,
    Target,
    backward,
    forward,
)
from flash4_torch.compile import Key, aot, arch, cache, key, library, pool
from flash4_torch.configs.sizes import BackwardSizes, Sizes
from flash4_torch.configs.types import Features
from flash4_torch.ops.impl import CallOptions, describe_inputs
from flash4_torch.problem import Inputs, Problem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

SCALE = "compile_cases:compile_scale"
IN_VAIN = "compile_cases:compile_in_vain"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The disk cache, empty; the memory cache is empty as well."""
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "cache"))
    monkeypatch.setattr(layer, "_functions", {})
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Has a line for each compilation, with the process it was in."""
    return tmp_path / "log"


def scales(log: Path, count: int) -> list[Key]:
    return [Key(SCALE, (Scale(float(n), str(log)),), "sm_90a") for n in range(count)]


def processes(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def silent(done: int, total: int) -> None:
    pass


# Which kernels


@given(
    target=st.sampled_from(list(TARGETS.values())),
    D=st.sampled_from([64, 128, (192, 128)]),
    dtype=st.sampled_from(ahead.DTYPES),
    words=st.sampled_from(["plain", "causal", "window+dropout", "varlen+causal", "softcap", "mask"]),
    group=st.sampled_from([1, 4]),
    Sq=st.integers(1, 20000),
    Sk=st.integers(1, 20000),
)
def test_every_size_of_a_call_finds_its_kernel(
    target: Target, D: Any, dtype: str, words: str, group: int, Sq: int, Sk: int
) -> None:
    prepared = ahead.kernels(target.arch, [D], [dtype], [words], [group])
    features = ahead.features_of(D, dtype, words)
    config = target.forward_configs.forward(features, Sizes(Sq, Sk, group))
    assert Key(target.forward, (features, config), target.arch) in prepared


@given(
    target=st.sampled_from(list(TARGETS.values())),
    dtype=st.sampled_from(ahead.DTYPES),
    words=st.sampled_from(["plain", "causal", "window", "varlen+causal", "mask", "causal+deterministic"]),
    Sq=st.integers(1, 2000),
    Sk=st.integers(1, 2000),
)
def test_so_does_its_backward(target: Target, dtype: str, words: str, Sq: int, Sk: int) -> None:
    features = ahead.features_of(64, dtype, words)._replace(deterministic="deterministic" in words)
    prepared = ahead.kernels(target.arch, [64], [dtype], [words], [1])
    without = ahead.kernels(target.arch, [64], [dtype], [words], [1], gradients=False)
    wanted = set()
    for dmask in {False, "float-mask" in words}:
        asked = features._replace(dmask=dmask)
        config = target.backward_configs.backward(asked, BackwardSizes(Sk))
        for dlse in (False, True):
            before, behind = backward.row_plans(asked, config, dlse=dlse)
            wanted |= {(PREPROCESS, (before,)), (POSTPROCESS, (behind,))}
        wanted.add((target.backward, (asked, config)))
        if features.mask:
            plan = backward.mask_plan(features.mask, config)
            wanted |= {(entry, (plan,)) for entry in (MASK_BLOCKS, MASK_TRANSPOSE)[: 2 - plan.column_major]}
    assert {Key(*kernel, target.arch) for kernel in wanted} <= set(prepared)
    assert {key.entry for key in without} <= {target.forward, MASK_BLOCKS}


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"window_right": 0},
    "window+softcap": {"window_left": 0, "window_right": 0, "softcap": 30.0},
    "causal+dropout": {"window_right": 0, "dropout_p": 0.1},
    "large-softcap": {"softcap": 100.0},
}
"""Words for warm-up, and calls that they stand for."""


@given(
    target=st.sampled_from(list(TARGETS.values())),
    heads=st.sampled_from([(64, 64), (128, 128), (320, 320), (512, 512), (24, 264)]),
    dtype=st.sampled_from(ahead.ALL_DTYPES),
    words=st.sampled_from(list(CALLS)),
    Sq=st.integers(2, 2000),
    Sk=st.integers(2, 2000),
    tf32=st.booleans(),
)
def test_whoever_serves_a_call_finds_its_kernel(
    target: Target, heads: tuple[int, int], dtype: str, words: str, Sq: int, Sk: int, tf32: bool
) -> None:
    """Calls on every GPU, of float32 and wide heads too, for which some run kernels of other GPUs."""
    assume(dtype != "float32" or max(heads) <= 128)
    call = described(target, heads, dtype, words, Sq, Sk, tf32=tf32)
    asked = {*asked_for(target, call), *asked_for(target, in_backward(call))}
    assert asked <= set(ahead.kernels(target.arch, [heads], [dtype], [words], [1]))


def described(
    target: Target,
    heads: tuple[int, int],
    dtype: str,
    words: str,
    Sq: int,
    Sk: int,
    tf32: bool = False,
) -> Problem:
    """A call on a GPU of that architecture."""
    q, k, v = (
        torch.empty(1, S, 1, D, dtype=getattr(torch, dtype), device="meta")
        for S, D in ((Sq, heads[0]), (Sk, heads[0]), (Sk, heads[1]))
    )
    problem = describe_inputs(Inputs(q, k, v), CallOptions(scale=0.1, **CALLS[words]))
    of_gpu = {"device": "cuda", "capability": target.capability, "tf32": tf32 and dtype == "float32"}
    return problem._replace(spec=problem.spec._replace(**of_gpu))


def in_backward(call: Problem) -> Problem:
    return call._replace(spec=call.spec._replace(backward=True))


def asked_for(
    target: Target, call: Problem, found: Callable[[Key], layer.Function] = lambda key: print
) -> list[Key]:
    """The kernels that a call asks for, which are then `found`."""
    asked: list[Key] = []

    def find(entry: str, static: tuple[object, ...]) -> layer.Function:
        asked.append(Key(entry, static, target.arch))
        return found(asked[-1])

    ours = [b for b in dispatch.PRIORITY if isinstance(b, Compiled) and not b.why_not(call)]
    assert ours or call.spec.backward
    for backend in ours[:1]:
        (backward if call.spec.backward else forward).decide(backend.target(call), call, 8, find)
    return asked


@pytest.mark.parametrize(
    ("word", "D", "dtype", "limit"),
    [
        ("kvcache", 64, "float32", "the dtype is float32, and it serves 16-bit dtypes"),
        ("kvcache", 264, "bfloat16", "D is 264 and Dv is 264, and it serves up to 256"),
        ("weights", 264, "bfloat16", "D is 264 and Dv is 264, and it serves up to 256"),
    ],
)
def test_words_of_narrow_or_16_bit_calls_are_refused_in_others(
    word: str, D: int, dtype: str, limit: str
) -> None:
    with pytest.raises(errors.RangeError, match=limit):
        ahead.kernels("sm_80", [D], [dtype], [f"causal+{word}"], [1])


def test_float32_weights_are_compiled_in_both_precisions_without_tma() -> None:
    keys = ahead.kernels("sm_90a", [64], ["float32"], ["weights"], [1], False)
    static = [key.static for key in keys if key.entry == WEIGHTS]
    assert {(features.tf32, average, tma) for features, average, tma in static} == {
        (tf32, average, False) for tf32 in (False, True) for average in (False, True)
    }


def test_kernels_are_listed_once() -> None:
    keys = ahead.kernels("sm_90a", [64, 64], ["float16"], ["mask", "float-mask", "mask"], [1, 1], False)
    assert len(keys) == len(set(keys))
    assert {k.entry for k in keys} == {SM90A.forward, MASK_BLOCKS}


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        ("plain", {}),
        ("causal", {"right": True}),
        ("causal+dropout", {"right": True, "dropout": True}),
        ("window+softcap", {"left": True, "right": True, "softcap": True, "scaled": True}),
        ("varlen+mask", {"varlen": True, "mask": "bool"}),
        ("float-mask", {"mask": "float16", "scaled": True}),
    ],
)
def test_features_by_words(words: str, chosen: dict[str, Any]) -> None:
    assert ahead.features_of((192, 128), "float16", words) == Features("float16", 192, 128, **chosen)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"arch": "sm_75"}, "arch is 'sm_75', but it must be one of sm_80, sm_86"),
        ({"head_dims": [60]}, "head_dims is 60, but each must be a multiple of 8 up to 512"),
        ({"head_dims": [(64, 520)]}, "head_dims is 520, but each must be a multiple of 8 up to 512"),
        ({"dtypes": ["float64"]}, "dtypes is 'float64', but each must be one of bfloat16, float16, float32"),
        ({"features": ["causal+windows"]}, "features is 'windows', but each must be one of plain, causal"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(errors.RangeError) as failure:
        flash4_torch.warmup(**{"arch": "sm_90a", **arguments})
    assert str(failure.value).startswith(sentence)


@given(
    target=st.sampled_from(list(TARGETS.values())),
    D=st.sampled_from([64, 256, (192, 128)]),
    words=st.sampled_from(["plain", "causal", "varlen+deterministic", "mask", "window+dropout"]),
    group=st.integers(65, ahead.MAX_GROUP),
)
def test_what_serves_64_heads_serves_any_more(target: Target, D: Any, words: str, group: int) -> None:
    of_64, of_more = (set(ahead.kernels(target.arch, [D], ["float16"], [words], [g])) for g in (64, group))
    if words == "mask":
        # Heads that share a tile divide the group.
        of_64 = {key for key in of_64 if group % _heads_of(key) == 0}
    assert of_64 == of_more


def _heads_of(key: Key) -> int:
    """Query heads that share the tiles of a kernel, or of a mask's tables; 1 if it has none."""
    last = key.static[-1]
    return int(getattr(last, "pack_gqa", getattr(last, "heads", 1)))


def test_numbers_of_other_libraries_make_the_same_kernels() -> None:
    ours = ahead.kernels("sm_90a", [64, (192, 128)], ["float16"], ["plain"], [2])
    theirs = np.int64(64), (np.int32(192), np.uint8(128))
    assert repr(ahead.kernels("sm_90a", list(theirs), ["float16"], ["plain"], [np.int16(2)])) == repr(ours)


@pytest.mark.parametrize("target", list(TARGETS.values()), ids=lambda target: target.arch)
def test_names_for_reading_tell_kernels_apart(target: Target) -> None:
    features = ["plain", "causal+varlen", "window+softcap", "mask", "float-mask+dropout", "deterministic"]
    features += ["causal+ring", "dropout+ring"]
    keys = ahead.kernels(target.arch, [64, (192, 128), 256], ahead.DTYPES, features, [1, 8])
    names = [progress.in_words(key) for key in keys]
    assert len(set(names)) == len(keys)
    for name in names:
        assert "=" not in name and "_" not in name.replace("attn_mask", "") and ":" not in name


# warmup


def test_missing_kernels_are_compiled_in_other_processes(folder: Path, log: Path) -> None:
    keys = scales(log, 3)
    layer.function(*keys[0])
    seen: list[tuple[int, int]] = []
    made: list[tuple[Key, bool]] = []
    prepared = pool.prepare(
        keys,
        2,
        lambda done, total: seen.append((done, total)),
        lambda key, took: made.append((key, took > 0.0)),
    )
    assert made == [(keys[0], False), (keys[1], True), (keys[2], True)]
    assert [kernel for kernel, _ in prepared] == keys
    assert [seconds > 0.0 for _, seconds in prepared] == [False, True, True]
    assert seen == [(1, 3), (2, 3), (3, 3)]
    here, *workers = processes(log)
    assert here == str(os.getpid()) and len(workers) == 2 and here not in workers

    assert [seconds for _, seconds in pool.prepare(keys, 2, silent)] == [0.0] * 3
    for key_ in keys:
        layer.function(*key_)
    assert len(processes(log)) == 3


def test_a_log_has_a_line_for_each_kernel_as_soon_as_it_is_there(log: Path) -> None:
    """Each is flushed, says which of how many it is, and at the end nothing is left."""
    first, second, third, failing = scales(log, 4)
    flushed: list[str] = []

    class File(io.StringIO):
        def flush(self) -> None:
            flushed.append(self.getvalue())

    lines = progress.Lines(File())
    lines.begin(1, 4)
    for key_, took in ((second, 0.0), (first, 1.234), (third, 61.0), (failing, "ValueError: no")):
        lines.made(key_, took)
    shown = flushed[-1].splitlines()
    assert [text.count("\n") for text in flushed] == [1, 2, 3, 4, 5]
    assert shown[0] == "4 kernels: 1 in the cache, 3 to compile"
    assert shown[1] == f"1 of 4  in cache  {second}"
    assert re.fullmatch(rf"2 of 4    1\.23 s  {re.escape(str(first))}, about \d+ s left", shown[2])
    assert re.fullmatch(rf"3 of 4   61\.00 s  {re.escape(str(third))}, about \d+ s left", shown[3])
    assert shown[4] == f"4 of 4    failed  {failing}"


def test_a_servers_log_gets_a_line_now_and_then() -> None:
    """None where nothing has to be compiled."""
    log = io.StringIO()
    progress.Notes(log)(3, 3)
    assert not log.getvalue()
    notes = progress.Notes(log)
    for done in (1, 2, 3):
        notes(done, 3)
    beginning, end = log.getvalue().splitlines()
    assert beginning == "flash4_torch: 1 of 3 kernels are compiled"
    assert end == "flash4_torch: 3 of 3 kernels are compiled"
    often = progress.Notes(log, seconds=0.0)
    for done in (1, 2, 3):
        often(done, 3)
    assert re.search(r": 2 of 3 kernels are compiled, about \d+ s left$", log.getvalue(), re.MULTILINE)


def test_workers_that_start_at_once_compile_once(log: Path) -> None:
    """One prepares the kernels; the other waits, and then finds them."""
    kernels = scales(log, 1)
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from flash4_torch.compile import Key, pool\n"
        "from compile_cases import Scale\n"
        f"key = Key({SCALE!r}, (Scale(0.0, {str(log)!r}),), 'sm_90a'); print('asks', flush=True)\n"
        "print(pool.prepare([key], 1, lambda done, total: None)[0].seconds)"
    )
    cache.require_writable()
    with cache.alone([kernel.digest for kernel in kernels]):
        other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert other.stdout and other.stdout.readline() == "asks\n"
        layer.function(*kernels[0])
        assert other.poll() is None and len(processes(log)) == 1
    assert other.communicate()[0] == "0.0\n" and len(processes(log)) == 1


def test_a_failure_stops_no_other_kernel(log: Path) -> None:
    die = Key("compile_cases:die_at_first", (str(log),), "sm_90a")
    good, bad = scales(log, 1), Key(IN_VAIN, (str(log),), "sm_90a")
    with pytest.raises(errors.CompileError) as failure:
        pool.prepare([die, bad, *good], 1, silent)
    sentences = str(failure.value).splitlines()
    assert sentences[0] == f"cannot compile 2 of 3 kernels: {die}: the compiling process ended with status -9"
    assert sentences[1] == f"cannot compile {bad}: ValueError: tiles of 3 rows"
    assert cache.find(good[0].digest)


def test_a_cache_that_cannot_be_written_to_is_an_error(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "file"))
    with pytest.raises(errors.RangeError, match=env.CACHE_DIR.name):
        pool.prepare(scales(log, 1), 1, silent)


SCRIPT = """
import sys
import flash4_torch
from flash4_torch import ahead
from flash4_torch.compile import Key

print("once")
ahead.kernels = lambda *chosen: [Key("compile_cases:compile_with_warnings", (sys.argv[1],), "sm_90a")]
print(len(flash4_torch.warmup("sm_90a")))
"""


def test_a_script_runs_once_and_sees_a_bar_on_a_terminal_only(tmp_path: Path, log: Path) -> None:
    """Its main module has no `if __name__ == "__main__"`, and the kernels warn."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore::DeprecationWarning:train", str(tmp_path / "script.py")]
    command.append(str(log))
    path = [
        str(Path(__file__).parents[1] / "support"),
        str(Path(__file__).parents[2]),
        os.environ.get("PYTHONPATH", ""),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    ours, theirs = pty.openpty()
    on_terminal = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    assert on_terminal.stdout == "once\n1\n"
    assert "0 of 1 kernels" in shown and shown.endswith("] 1 of 1 kernels\r\n")

    elsewhere = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (elsewhere.stdout, elsewhere.stderr) == ("once\n1\n", "")


@pytest.mark.parametrize("target", one_of(2, [SM103A, SM100A]), ids=lambda target: target.arch)
def test_a_kernel_is_compiled_for_its_architecture(target: Target) -> None:
    """SASS for Blackwell names the architecture that it is for."""
    features = Features("bfloat16", 64, 64)
    entry, config = target.forward, target.forward_configs.forward(features, Sizes(4096, 4096))
    ((kernel, _),) = pool.prepare([Key(entry, (features, config), target.arch)], 1, silent)
    file = cache.find(kernel.digest)
    assert file is not None
    found = {name for name in arch.NAMES if name.encode() in file.read_bytes()}
    assert found == {target.arch}


@pytest.mark.parametrize("target", one_of(len(SM80_FAMILY), SM80_FAMILY), ids=lambda target: target.arch)
def test_kernels_by_mma_sync_are_warmed_up_and_exported(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of such a GPU find their kernels in the folder: float32 forward and backward with those around
    it, decode, append and merge.
    """
    own = dict.fromkeys(
        ahead.kernels(target.arch, [64], ["float32"], ["causal"], [1])
        + ahead.kernels(target.arch, [64], ["bfloat16"], ["causal+kvcache"], [1], gradients=False)
    )
    call = described(target, (64, 64), "float32", "causal", 100, 300)
    calls = [call, in_backward(call)] if EVERYTHING else [call]
    asked = [key for each in calls for key in asked_for(target, each)]
    kinds = {key.entry: key for key in [*reversed(own), *asked]}
    assert {target.forward, target.backward, PREPROCESS, POSTPROCESS, DECODE} < set(kinds)
    keys = [key for key in kinds.values() if EVERYTHING or key in asked or key.entry == DECODE]
    assert set(asked) <= set(keys) <= set(own)
    monkeypatch.setattr(ahead, "kernels", lambda *chosen: keys)
    out = tmp_path / "out"
    assert main(["warmup", "--arch", target.arch]) == 0
    assert main(["export", str(out), "--arch", target.arch]) == 0
    assert {cubin.compute_capability(file) for file in out.glob("*.so")} == {target.capability}
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "another cache"))
    monkeypatch.setenv(env.AOT_DIR.name, str(out))
    monkeypatch.setattr(layer, "_functions", {})
    aot._manifest.cache_clear()
    for key_ in keys:
        assert callable(layer.function(*key_))
    monkeypatch.setattr(layer, "_functions", {})
    for each in calls:
        assert asked_for(target, each, lambda key: layer.function(*key))
    assert not cache.contents()
    aot._manifest.cache_clear()


# The command line


def test_commands_pass_on_what_they_are_given(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Any, ...]] = []

    def kernels(*chosen: Any) -> list[Key]:
        asked.append(chosen)
        return scales(log, 1)

    monkeypatch.setattr(ahead, "kernels", kernels)
    options = ["--arch", "sm_90a", "--head-dim", "64", "192x128", "--dtype", "float16"]
    options += ["--features", "causal+varlen", "--groups", "1", "8", "--jobs", "1"]
    assert main(["warmup", *options]) == 0
    assert capsys.readouterr().out.endswith(f"{scales(log, 1)[0]}\n1 kernels\n")
    assert main(["export", str(tmp_path / "out"), *options]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out' / 'manifest.json'}\n"
    assert asked == [("sm_90a", [64, (192, 128)], ["float16"], ["causal+varlen"], [1, 8], True)] * 2
    assert main(["warmup"]) == 0
    assert asked[2] == (None, ahead.HEAD_DIMS, ahead.DTYPES, ahead.FEATURES, (1,), True)
    assert main(["warmup", "--no-gradients"]) == 0
    assert asked[3][-1] is False


def test_a_command_says_what_is_wrong_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "--arch", "sm_90a", "--head-dim", "63"]) == 2
    assert capsys.readouterr() == (
        "",
        "flash4_torch: head_dims is 63, but each must be a multiple of 8 up to 512\n",
    )


# export


@pytest.fixture
def exported(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with two kernels, in use, and nothing in the caches."""
    out = tmp_path / "exported"
    aot.export(out, scales(log, 2))
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "another cache"))
    monkeypatch.setenv(env.AOT_DIR.name, str(out))
    aot._manifest.cache_clear()
    yield out
    aot._manifest.cache_clear()


def test_an_exported_kernel_needs_no_compiler(exported: Path, log: Path) -> None:
    """The package is hidden, and with it the one place that could compile or hold the runtime library."""
    code = f"""
import sys
for name in [m for m in sys.modules if m.startswith("nvidia_cutlass_dsl")]:
    del sys.modules[name]
sys.path[:] = [p for p in sys.path if "dsl_packages" not in p]
sys.path[:0] = {[str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]!r}
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if "cutlass" in name else find_spec(name, *a)
import torch
from compile_cases import Scale
from flash4_torch import compile
f = compile.function({SCALE!r}, (Scale(1.0, {str(log)!r}),), "sm_90a")
try:
    f(torch.zeros(3))
except ValueError as error:
    print(error)
print("cutlass" in sys.modules)
"""
    aot.export(exported, [], runtime=True)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "expected device_type=cuda" in done.stdout and done.stdout.endswith("False\n")


def test_what_the_folder_lacks_comes_from_the_cache(exported: Path, log: Path) -> None:
    before = len(processes(log))
    for kernel in scales(log, 3):
        layer.function(*kernel)
    assert len(processes(log)) == before + 1
    assert len(cache.contents()) == 1


def test_the_manifest_says_what_is_there(exported: Path, log: Path) -> None:
    document = json.loads((exported / aot.MANIFEST).read_text())
    assert document["versions"] == key.versions()
    described = [(k["entry"], k["static"], k["arch"], k["function"]) for k in document["kernels"]]
    assert described == [(k.entry, repr(k.static), k.arch, k.digest) for k in scales(log, 2)]
    files = sorted(file.name for file in exported.iterdir())
    assert files == sorted([aot.MANIFEST, aot.LOCK, *(k["file"] for k in document["kernels"])])


def test_the_runtime_can_be_exported_too(tmp_path: Path) -> None:
    aot.export(tmp_path / "out", [], runtime=True)
    assert (tmp_path / "out" / library.installed_runtime().name).stat().st_size > 1 << 20


def _another_source(exported: Path, manifest: dict[str, Any]) -> None:
    manifest["kernels"][0]["sources"] = "0"


def _another_machine(exported: Path, manifest: dict[str, Any]) -> None:
    manifest["versions"]["machine"] = "vax"


def _another_compiler(exported: Path, manifest: dict[str, Any]) -> None:
    manifest["versions"]["nvidia-cutlass-dsl"] = "1.0"


def _another_format(exported: Path, manifest: dict[str, Any]) -> None:
    manifest["format"] = 99


def _damage(exported: Path, manifest: dict[str, Any]) -> None:
    file = exported / manifest["kernels"][0]["file"]
    file.write_bytes(file.read_bytes()[:-1])


def _a_missing_file(exported: Path, manifest: dict[str, Any]) -> None:
    (exported / manifest["kernels"][0]["file"]).unlink()


def _a_missing_field(exported: Path, manifest: dict[str, Any]) -> None:
    del manifest["kernels"][0]["static"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_another_source, "compile_cases:compile_scale has changed since; export again"),
        (_another_machine, "it is for vax, and this is "),
        (_another_compiler, "it was made by nvidia-cutlass-dsl 1.0, and "),
        (_another_format, "its format is 99, and this version reads 2"),
        (_damage, "is missing or damaged"),
        (_a_missing_file, "is missing or damaged"),
        (_a_missing_field, "manifest.json cannot be read"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(
    exported: Path, log: Path, change: Callable[[Path, dict[str, Any]], None], reason: str
) -> None:
    """Compiling instead would be what its user wanted to rule out."""
    file = exported / aot.MANIFEST
    manifest = json.loads(file.read_text())
    change(exported, manifest)
    file.write_text(json.dumps(manifest))
    before = len(processes(log))
    with pytest.raises(errors.ExportError) as failure:
        layer.function(*scales(log, 1)[0])
    assert str(failure.value).startswith(f"exported kernels in {exported}: ") and reason in str(failure.value)
    assert len(processes(log)) == before


def test_a_folder_without_a_manifest_is_refused(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.AOT_DIR.name, str(tmp_path / "nowhere"))
    with pytest.raises(errors.ExportError, match="cannot be read"):
        layer.function(*scales(log, 1)[0])


def test_exporting_takes_a_linker(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_LINKERS", ())
    with pytest.raises(errors.ExportError, match="exporting takes a linker"):
        aot.export(tmp_path / "out", scales(log, 1))


def test_errors_survive_pickling() -> None:
    for error in (errors.CompileError("a kernel", "no reason"), errors.ExportError("a folder", "no reason")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
