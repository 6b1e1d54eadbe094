"""Checks that a change leaves the kernels as they are: compares their PTX, and lists those that differ.

    python tests/ptx_gate.py COMMIT [GROUP ...]     all groups, or those whose names contain one of the words

The kernels are those of the tests that read SASS, all that tests run in the emulator, which bring together
every two settings that can meet, and the small ones around them that a warm-up compiles. They are compared by
their places in these lists, so that names of fields and of entries may change. Names of symbols, line
numbers, comments and sections for debuggers do not count. It exits with 1 if a kernel differs or is missing,
takes about ten minutes for a tree on two cores, and keeps the PTX of a commit in build/ptx.
"""

from __future__ import annotations

import difflib
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
KEPT = HERE / "build" / "ptx"
Key = tuple[str, tuple[Any, ...], str]
"""Entry, static arguments, architecture."""
_MACHINE_CODE = (
    "test_sm80_cubin",
    "test_sm90_cubin",
    "test_sm90_backward_cubin",
    "test_sm100_cubin",
    "test_sm100_backward_cubin",
)
_EMULATED = (
    "test_sm80_kernel",
    "test_sm90_kernel",
    "test_sm90_backward_kernel",
    "test_sm90_backward_wide",
    "test_sm100_kernel",
    "test_sm100_backward_kernel",
)
_ARCHS = {"sm80": "sm_80", "sm90": "sm_90a", "sm100": "sm_100a"}
_DEBUG = re.compile(r"^\s*\.(loc|file|section)\b.*?$|^\s*//.*?$|\s*//[^\n]*$", re.MULTILINE)


class _Done(BaseException):
    """Ends a compilation when its PTX is there; this script needs no later stage."""


def kernels() -> dict[str, list[Key]]:
    """Kernels by the list that they come from."""
    from flash4_torch import ahead
    from flash4_torch.backends.compiled import TARGETS

    found: dict[str, list[Key]] = {}
    for name in _MACHINE_CODE:
        found[name] = [tuple(key) for key in import_module(name).keys()]  # noqa: SIM118
    for name in _EMULATED:
        arch = _ARCHS[name.split("_")[1]]
        entry = TARGETS[arch].backward if "backward" in name else TARGETS[arch].forward
        found[name] = [(entry, static, arch) for static in import_module(name).STATICS.values()]
    for arch in TARGETS:
        target = TARGETS[arch]
        keys = ahead.kernels(arch, [64, 128], ["bfloat16"], list(ahead.WORDS), [1, 4])
        own = (target.forward, target.backward)
        found[f"warm-up of {arch}"] = [tuple(key) for key in keys if key.entry not in own]
    return found


def ptx_of(key: Key) -> str:
    """The PTX of a kernel, without the parts that do not count."""
    entry, static, arch = key
    from flash4_torch.compile import jit

    texts: list[str] = []
    compiler = import_module("cutlass.base_dsl.compiler").Compiler
    original = compiler.compile

    def compile_to_ptx(self: Any, module: Any, pipeline: str, *args: Any, **kwargs: Any) -> None:
        (chip,) = re.findall(r"cubin-chip=\w+", pipeline)
        with tempfile.TemporaryDirectory() as folder:
            pipeline = pipeline.replace(chip, f"dump-ptx-path='{folder}/kernel' {chip}")
            original(self, module, pipeline.replace("cubin-format=bin", "cubin-format=isa"), *args, **kwargs)
            texts.extend(file.read_text() for file in Path(folder).iterdir())
        raise _Done

    compiler.compile = compile_to_ptx
    try:
        with jit.quiet(), jit._targeting(arch):
            jit.resolve(entry)(*static)
    except _Done:
        pass
    finally:
        compiler.compile = original
    (text,) = texts
    return without_names(text)


def without_names(ptx: str) -> str:
    """PTX with its symbols numbered in order of appearance, up to the debuggers' sections at its end."""
    ptx = _DEBUG.sub("", ptx.split("\t.section\t.debug")[0])
    for i, name in enumerate(dict.fromkeys(_declared(ptx))):
        ptx = re.sub(rf"(?<![\w$%.]){re.escape(name)}(?![\w$])", f"symbol{i}", ptx)
        ptx = re.sub(rf"(?<![\w$%.]){re.escape(name)}_param_", f"symbol{i}_param_", ptx)
    return "\n".join(line.rstrip() for line in ptx.splitlines() if line.strip()) + "\n"


def _declared(ptx: str) -> Iterator[str]:
    """Kernels, functions, and variables in global and shared memory."""
    yield from re.findall(r"\.entry\s+([\w$]+)", ptx)
    yield from re.findall(
        r"\.(?:shared|global|const)\b[^;=]*?\s([A-Za-z_$][\w$]*)\s*(?:\[[^\]]*\])?\s*[;=]", ptx
    )


def record(into: Path, words: list[str]) -> None:
    """Writes the PTX of this tree's kernels."""
    found = {group: keys for group, keys in kernels().items() if any(word in group for word in words or [""])}
    names = [(group, i) for group, keys in found.items() for i in range(len(keys))]
    keys = [found[group][i] for group, i in names]
    processes = len(os.sched_getaffinity(0))
    with (
        ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool,
        gzip.open(into, "wt") as file,
    ):
        for (group, i), key, text in zip(names, keys, pool.map(ptx_of, keys), strict=True):
            file.write(json.dumps([group, i, str(key), text]) + "\n")


def read(file: Path) -> dict[tuple[str, int], tuple[str, str]]:
    with gzip.open(file, "rt") as lines:
        return {(group, i): (key, text) for group, i, key, text in map(json.loads, lines)}


def recorded(commit: str, words: list[str]) -> Path:
    """The file with a commit's PTX, made in a tree of its own, by that tree's lists."""
    commit = subprocess.check_output(["git", "rev-parse", commit], cwd=HERE, text=True).strip()
    file = KEPT / f"{'-'.join([commit, *words])}.gz"
    if not file.exists():
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(f"git archive {commit} | tar x -C {folder}", cwd=HERE, shell=True, check=True)
            _record_in(Path(folder), file, words)
    return file


def _record_in(tree: Path, file: Path, words: list[str]) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    script = str(tree / "tests" / "ptx_gate.py")
    subprocess.run([sys.executable, script, "--record", str(part), *words], check=True)
    part.rename(file)


def compare(before: Path, after: Path) -> int:
    old, new = read(before), read(after)
    different = [place for place in old if place in new and old[place][1] != new[place][1]]
    missing = sorted(set(old) ^ set(new))
    for group, i in different:
        print(f"differs: {group} {i}: {new[group, i][0]}")
    for group, i in missing:
        print(f"on one side only: {group} {i}: {(old | new)[group, i][0]}")
    if different:
        texts = (found[different[0]][1].splitlines() for found in (old, new))
        print("\n".join(list(difflib.unified_diff(*texts, lineterm="", n=1))[:40]))
    kinds = len({text for _, text in old.values()})
    counts = f"{len(different)} differ, {len(missing)} on one side only"
    print(f"{len(old)} kernels, {kinds} different texts: {counts}")
    return 1 if different or missing else 0


def main() -> int:
    if sys.argv[1] == "--record":
        record(Path(sys.argv[2]), sys.argv[3:])
        return 0
    commit, *words = sys.argv[1:]
    before, after = recorded(commit, words), KEPT / "now.gz"
    _record_in(HERE, after, words)
    return compare(before, after)


if __name__ == "__main__":
    tree = Path(__file__).resolve().parents[1]
    paths = [str(tree / "tests" / folder) for folder in ("support", "kernels", "gpu", "laws")] + [str(tree)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.exit(main())
