"""Compiled kernels come from memory, the disk or the compiler; made once, found only where they fit."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from compile_cases import Scale
from flash4_torch import compile as layer
from flash4_torch import env, errors
from flash4_torch.compile import Key, arch, cache, key, library
from flash4_torch.configs.types import Features

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

SUPPORT = Path(__file__).parents[1] / "support"
SCALE = "compile_cases:compile_scale"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The disk cache, empty; the memory cache is empty as well."""
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "cache"))
    monkeypatch.setattr(layer, "_functions", {})
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Has a line for each compilation."""
    return tmp_path / "log"


def compilations(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def fresh_process(code: str, *options: str) -> subprocess.Popen[str]:
    """Runs `code` in an interpreter of its own that imports from tests/support, too."""
    start = f"import sys; sys.path[:0] = [{str(SUPPORT)!r}, {str(SUPPORT.parents[1])!r}]\n"
    command = [sys.executable, *options, "-c", start + textwrap.dedent(code)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def compiled_for(file: Path) -> int:
    """The number in the architecture's name, read from the GPU code inside a kernel's file."""
    contents = file.read_bytes()
    cubin = contents.index(b"\x7fELF", 4)
    abi, flags = contents[cubin + 8], struct.unpack_from("<I", contents, cubin + 48)[0]
    return (flags if abi < 8 else flags >> 8) & 0xFF


# A kernel on its way to memory


def test_a_kernel_is_compiled_once_kept_on_disk_and_loaded_from_there(folder: Path, log: Path) -> None:
    static = (Scale(2.0, str(log)),)
    first = layer.function(SCALE, static, "sm_90a")
    assert layer.function(SCALE, static, "sm_90a") is first
    name = Key(SCALE, static, "sm_90a").digest
    assert sorted(file.name for file in folder.iterdir()) == [f"{name}.lock", f"{name}.so"]

    layer._functions.clear()
    assert layer.function(SCALE, static, "sm_90a") is not first
    assert compilations(log) == 1


def test_a_loaded_kernel_refuses_what_it_was_not_compiled_for(log: Path) -> None:
    """This shows that its code is there and runs, as far as that goes without a GPU."""
    scale = layer.function(SCALE, (Scale(2.0, str(log)),), "sm_90a")
    with pytest.raises(ValueError, match="expected ndim=1"):
        scale(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        scale(torch.zeros(3))


@pytest.mark.parametrize("variable", [None, "sm_100a"])
def test_code_is_for_the_architecture_that_was_asked_for(
    log: Path, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is so, whatever CUTE_DSL_ARCH says, with no trace in the environment or the compiler's settings."""
    if variable:
        monkeypatch.setenv("CUTE_DSL_ARCH", variable)
    from cutlass.cutlass_dsl import CuTeDSL

    dsl = CuTeDSL._get_dsl()
    before = dict(os.environ), dsl.envar._arch, dsl._runtime_can_run_compiled
    for number, name in ((90, "sm_90a"), (100, "sm_100a")):
        layer.function(SCALE, (Scale(3.0, str(log)),), name)
        file = cache.find(Key(SCALE, (Scale(3.0, str(log)),), name).digest)
        assert file and compiled_for(file) == number
    assert (dict(os.environ), dsl.envar._arch, dsl._runtime_can_run_compiled) == before


def test_a_warm_first_call_imports_no_compiler(log: Path) -> None:
    """It imports what loads kernels, and nothing else: the time of a first call is that of imports.

    CUDA's bindings are there before, as torch 2.13 imports them, and tvm-ffi does for older ones.
    """
    code = f"""
        import json, sys
        import cuda.bindings.driver
        from flash4_torch import compile
        from compile_cases import Scale
        before = set(sys.modules)
        compile.function({SCALE!r}, (Scale(2.0, {str(log)!r}),), "sm_90a")
        new = {{module.partition(".")[0] for module in set(sys.modules) - before}}
        new -= set(sys.stdlib_module_names) | {{m for m in new if m.startswith("_cython")}}
        heavy = [module for module in ("cutlass", "triton") if module in sys.modules]
        print(json.dumps([sorted(new), heavy]))
    """
    cold, *warm = [json.loads(finished(fresh_process(code))) for _ in range(3)]
    assert compilations(log) == 1
    assert "cutlass" in cold[1]
    assert warm == [[["tvm_ffi"], []]] * 2


def test_without_a_linker_the_object_is_kept(
    folder: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_LINKERS", ("no-such-linker",))
    static = (Scale(2.0, str(log)),)
    for _ in range(2):
        layer._functions.clear()
        with pytest.raises(ValueError, match="expected device_type=cuda"):
            layer.function(SCALE, static, "sm_90a")(torch.zeros(3))
    assert compilations(log) == 1
    assert [file.suffix for file in cache.contents()] == [".o"]


def test_a_folder_that_cannot_be_written_to_costs_a_warning_only(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "file"))
    for count in (1, 2):
        layer._functions.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layer.function(SCALE, (Scale(1.0, str(log)),), "sm_90a")
        assert compilations(log) == count
        assert [w.category for w in caught] == [RuntimeWarning]


# What keys distinguish

PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4), st.floats(allow_nan=False)),
    lambda parts: st.lists(parts, max_size=3).map(tuple),
    max_leaves=6,
)
FEATURES = st.builds(
    Features,
    dtype=st.sampled_from(["bfloat16", "float16"]),
    D=st.integers(1, 32).map(lambda n: 8 * n),
    Dv=st.integers(1, 32).map(lambda n: 8 * n),
    left=st.booleans(),
    mask=st.sampled_from(["", "bool"]),
)
KEYS = st.builds(
    Key,
    st.sampled_from(["flash4_torch.kernels.a:f", "flash4_torch.kernels.a:g"]),
    st.tuples(FEATURES, PLAIN),
    st.sampled_from(arch.NAMES),
)


@given(one=KEYS, other=KEYS)
def test_different_keys_have_different_digests(one: Key, other: Key) -> None:
    assert (one.digest == other.digest) == (repr(one) == repr(other))


def test_a_digest_is_the_same_in_every_process() -> None:
    """Python's own hashes of strings are not."""
    static = (Features("bfloat16", 64, 64), ("x", None, 0.5))
    code = f"""
        from flash4_torch.compile import Key
        from flash4_torch.configs.types import Features, Mods
        print(Key({SCALE!r}, {static!r}, "sm_90a").digest)
    """
    assert finished(fresh_process(code)).strip() == Key(SCALE, static, "sm_90a").digest


@given(part=st.one_of(st.binary(), st.just(object()), st.just(torch.float16), st.lists(st.integers())))
def test_what_has_no_lasting_name_is_refused(part: Any) -> None:
    with pytest.raises(errors.RangeError, match="make a key"):
        _ = Key(SCALE, (1, ("a", part)), "sm_90a").digest


def _another_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, text in {"kernels/sm90/fwd.py": "x = 1", **dict.fromkeys(key.SOURCES, "")}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(key, "_PACKAGE", tmp_path)
    monkeypatch.setattr(key, "fingerprint", key.fingerprint.__wrapped__)


def _another_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(key, "_version", lambda distribution: "5.0")
    monkeypatch.setattr(key, "versions", key.versions.__wrapped__)


def _another_flavor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "installed_runtime", lambda: Path("/x/cu99/lib/libcute_dsl_runtime.so"))
    monkeypatch.setattr(key, "versions", key.versions.__wrapped__)


@pytest.mark.parametrize("change", [_another_source, _another_compiler, _another_flavor])
def test_what_others_made_is_never_found(
    change: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Key("flash4_torch.kernels.a:f", (1,), "sm_90a")
    before = one.digest
    change(monkeypatch, tmp_path)
    assert one.digest != before


def test_a_change_of_any_source_changes_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _another_source(monkeypatch, tmp_path)
    seen = {key.fingerprint("flash4_torch.kernels.a:f")}
    for file in sorted(tmp_path.rglob("*.py")):
        file.write_text(file.read_text() + "\n")
        seen.add(key.fingerprint("flash4_torch.kernels.a:f"))
    file.rename(file.with_name("other.py"))
    seen.add(key.fingerprint("flash4_torch.kernels.a:f"))
    assert len(seen) == 3 + len(key.SOURCES)


def test_every_module_that_kernels_import_is_hashed() -> None:
    """The kernels' fingerprint covers what they import, and what that imports in turn."""
    package = Path(key.__file__).parents[1]
    found = set((package / "kernels").rglob("*.py"))
    todo = list(found)
    while todo:
        new = _imports(todo.pop(), package) - found
        found |= new
        todo += new
    names = {file.relative_to(package).as_posix() for file in found}
    assert {name for name in names if not name.startswith("kernels/")} == set(key.SOURCES)


def _imports(file: Path, package: Path) -> set[Path]:
    """The package's modules that one of them imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for alias in node.names:
                places = base / f"{alias.name}.py", base.with_suffix(".py"), base / "__init__.py"
                found |= {next(path for path in places if path.is_file())}
    return found - {package / "__init__.py"}


def test_architectures_by_capability() -> None:
    capabilities = ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 1))
    found = [arch.of_capability(capability) for capability in capabilities]
    assert found == ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_121a"]
    for refused in ((7, 5), (10, 1), (13, 0)):
        with pytest.raises(errors.RangeError, match=r"kernels exist for sm_80, sm_86"):
            arch.of_capability(refused)
    with pytest.raises(errors.RangeError, match="'sm_75', but"):
        arch.checked("sm_75")


# Files that are not what they should be


def _built(contents: bytes) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        (folder / "name.so").write_bytes(contents)
        return folder / "name.so"

    return build


def _must_not_build(folder: Path) -> Path:
    raise AssertionError("the kernel is there")


@given(contents=st.binary(min_size=1, max_size=200), data=st.data())
def test_a_damaged_file_is_made_anew(contents: bytes, data: st.DataObject) -> None:
    shutil.rmtree(cache.folder(), ignore_errors=True)  # left by the previous example
    with cache.obtained("a" * 32, _built(contents)) as file:
        whole = file.read_bytes()
    assert whole.startswith(contents)
    end = data.draw(st.integers(0, len(whole) - 1), label="cut at")
    at = data.draw(st.integers(0, len(whole) - 1), label="or flip a bit of byte")
    flipped = whole[:at] + bytes([whole[at] ^ 1 << data.draw(st.integers(0, 7))]) + whole[at + 1 :]
    for damaged in (whole[:end], flipped, whole + b"x", b""):
        file.write_bytes(damaged)
        assert cache.find("a" * 32) is None
        with cache.obtained("a" * 32, _built(contents)) as again:
            assert again.read_bytes() == whole
    file.rename(file.with_name("b" * 32 + ".so"))
    assert cache.find("b" * 32) is None, "a file under another kernel's name"
    with cache.obtained("a" * 32, _built(contents)), cache.obtained("a" * 32, _must_not_build):
        pass


def test_a_failed_build_leaves_nothing(folder: Path) -> None:
    with pytest.raises(AssertionError), cache.obtained("a" * 32, _must_not_build):
        pass
    assert [file.name for file in folder.iterdir()] == [f"{'a' * 32}.lock"]


# Threads and processes


def test_threads_share_one_compilation(log: Path) -> None:
    barrier = threading.Barrier(6)

    def get(factor: float) -> Any:
        barrier.wait()
        return layer.function(SCALE, (Scale(factor, str(log)),), "sm_90a")

    with ThreadPoolExecutor(6) as pool:
        functions = list(pool.map(get, [1.0, 2.0] * 3))
    assert len({id(function) for function in functions}) == 2
    assert compilations(log) == 2


def test_processes_share_one_compilation(log: Path) -> None:
    code = f"""
        from compile_cases import Scale
        from flash4_torch import compile
        compile.function({SCALE!r}, (Scale(2.0, {str(log)!r}),), "sm_90a")
    """
    for process in [fresh_process(code) for _ in range(3)]:
        finished(process)
    assert compilations(log) == 1


def test_a_process_that_dies_while_compiling_stops_nobody(folder: Path, log: Path) -> None:
    code = f"""
        from flash4_torch import compile
        compile.function("compile_cases:die_at_first", ({str(log)!r},), "sm_90a")
    """
    dead, *others = [fresh_process(code) for _ in range(2)]
    for process in (dead, *others):
        process.communicate(timeout=120)
    assert sorted([dead.returncode, others[0].returncode]) == [-signal.SIGKILL, 0]
    assert compilations(log) == 2
    assert len(cache.contents()) == 1


def test_a_fork_in_the_middle_of_compiling_holds_up_neither_side(log: Path) -> None:
    """A data loader's worker has the parent's locks, but not the threads that would release them."""
    code = f"""
        import os, threading, time
        from compile_cases import Scale
        from flash4_torch import compile, env
        from flash4_torch.compile import jit

        entered, leave = threading.Event(), threading.Event()
        resolve = jit.resolve

        def slowly(entry):
            entered.set()
            leave.wait()
            return resolve(entry)

        def get():
            return compile.function({SCALE!r}, (Scale(2.0, {str(log)!r}),), "sm_90a")

        import cutlass
        jit.resolve = slowly
        thread = threading.Thread(target=get)
        thread.start()
        entered.wait()
        child = os.fork()
        if child == 0:
            jit.resolve = resolve
            env.change({{"FLASH4_CACHE_DIR": os.environ["FLASH4_CACHE_DIR"] + "2"}})
            get()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        leave.set()
        thread.join()
        print(status)
    """
    assert finished(fresh_process(code)).strip() == "0"
    assert compilations(log) == 2


# Errors and their messages


def test_a_failure_names_the_kernel_and_may_be_tried_again(log: Path) -> None:
    for attempt in (1, 2):
        with pytest.raises(errors.CompileError) as failure:
            layer.function("compile_cases:compile_in_vain", (str(log),), "sm_90a")
        assert compilations(log) == attempt
    assert str(failure.value) == (
        f"cannot compile compile_cases:compile_in_vain({str(log)!r}) for sm_90a: ValueError: tiles of 3 rows"
    )
    assert isinstance(failure.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("entry", "static", "reason"),
    [
        (
            "compile_cases:compile_without",
            ("cutlass",),
            r"cutlass must be installed \(pip install 'flash4_torch",
        ),
        ("compile_cases:absent", (), "AttributeError: module 'compile_cases' has no attribute 'absent'"),
        (SCALE, (1, 2, 3), "TypeError: compile_scale"),
    ],
)
def test_reasons(entry: str, static: tuple[object, ...], reason: str) -> None:
    with pytest.raises(errors.CompileError, match=reason):
        layer.function(entry, static, "sm_90a")


def test_a_kernel_whose_source_changes_meanwhile_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise another process would take the new code for that of the old source."""
    source = """
        from pathlib import Path
        import compile_kernel

        def compile_scale():
            with Path(__file__).open("a") as file:
                file.write("# edited")
            return compile_kernel.compile_scale(2.0)
    """
    (tmp_path / "changing.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(errors.CompileError, match="its sources have changed since this process began"):
        layer.function("changing:compile_scale", (), "sm_90a")
    assert cache.contents() == []


def test_the_compilers_warnings_stay_inside(log: Path) -> None:
    code = f"""
        from flash4_torch import compile
        compile.function("compile_cases:compile_with_warnings", ({str(log)!r},), "sm_90a")
    """
    process = fresh_process(code, "-W", "always")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out == "" and err == "train.py:1: DeprecationWarning: of the user\n"


def test_the_emulator_and_the_compile_layer_do_not_mix(log: Path) -> None:
    """What is compiled for the emulator runs nowhere else, so nothing of it may reach the disk."""
    from flash4_torch.emulator import host

    static = (Scale(2.0, str(log)),)
    host.install(lambda launch: None, "sm_90a")
    try:
        with pytest.raises(errors.CompileError, match="the emulator holds this process's compiler"):
            layer.function(SCALE, static, "sm_90a")
    finally:
        host.uninstall()
    assert cache.contents() == []
    layer.function(SCALE, static, "sm_90a")
    assert compilations(log) == 1
