"""A child that is forked while another thread holds a lock of ours goes on without that thread."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "flash4_torch"

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

CODE = """
import os, signal, sys, tempfile, threading
from contextlib import ExitStack
from pathlib import Path
import torch
import flash4_torch
from flash4_torch import compile, env, forks
from flash4_torch.backends import constants, emulator, tile_counters
from flash4_torch.compile import Key, jit
from flash4_torch.emulator import build
from flash4_torch.flex import trace
from flash4_torch.reference import dropout

source = Path(sys.argv[1]) / "answer.cpp"
source.write_text('extern "C" int answer() { return 42; }')
build_folder = {"FLASH4_CACHE_DIR": sys.argv[1]}
q = torch.randn(1, 3, 1, 8)
key = Key("a:b", (), "sm_90a")

class Compiled:
    def export_to_c(self, path, function_name):
        Path(path).write_text("")

tile_counters._zeros = lambda index, n, wait=False: torch.zeros(n)
resolve = jit.resolve
jit.resolve = lambda entry: Compiled if entry == key.entry else resolve(entry)
jit.is_edited = lambda entry: False
compile._load = lambda key: "loaded"

def attend():
    env.change({"FLASH4_BACKEND": "emulator"})
    return flash4_torch.attention(q, q, q)

def builds():
    env.change(build_folder)
    return build.load(build.shared_object("libanswer", [source], ["-fPIC"])).answer() == 42

CALLS = {
    "emulator": lambda: torch.equal(attend(), expected),
    "tile_counters": lambda: tile_counters._give_out((0, 0)).numel() == 1,
    "constants": lambda: constants.even_ends(torch.device("cpu"), 1, 2).tolist() == [0, 2],
    "build": builds,
    "jit": lambda: jit.build(key, Path(tempfile.mkdtemp(dir=sys.argv[1]))).stem == key.digest,
    "function": lambda: compile.function(*key) == "loaded",
    "trace": lambda: trace.recorded(torch.neg, q) is not None,
    "dropout": lambda: dropout.Dropout(q.long().view(-1)[:2], 0.5).tile((1,) * 4, *[range(1)] * 3).all() <= 1,
}
LOCKS = {
    "emulator": emulator._one_at_a_time.held,
    "tile_counters": tile_counters._giving_out.held,
    "constants": constants._making.held,
    "build": build._one_at_a_time.held,
    "jit": jit._one_at_a_time.held,
    "dropout": dropout._masks._lock.held,
    "trace": trace._one_at_a_time.held,
    "function": lambda: compile._locks.setdefault(key, threading.Lock()),
}

expected = attend()
held, leave = threading.Event(), threading.Event()

def hold():
    with ExitStack() as locks:
        for lock in LOCKS.values():
            locks.enter_context(lock())
        held.set()
        leave.wait()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
for name, call in CALLS.items():
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if call() else 1)
    print(name, os.waitpid(child, 0)[1])
leave.set()
thread.join()
print("parent", int(not all(call() for call in CALLS.values())))
"""


def test_a_forked_child_goes_on_without_the_threads_that_hold_locks(tmp_path: Path) -> None:
    path = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})"
    command = [sys.executable, "-c", path + CODE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    names = (
        "emulator",
        "tile_counters",
        "constants",
        "build",
        "jit",
        "function",
        "trace",
        "dropout",
        "parent",
    )
    assert done.stdout.splitlines() == [f"{name} 0" for name in names], done.stderr


def test_there_are_no_other_locks() -> None:
    """Each lock has its place above: `forks.Lock`, or the dictionary that a fork empties.

    The benchmark's is one of processes that it spawns.
    """
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("Lock", "RLock", "Condition", "Semaphore")
    }
    users = {"backends/emulator.py", "backends/tile_counters.py", "emulator/build.py", "compile/jit.py"}
    users |= {
        "backends/constants.py",
        "reference/dropout.py",
        "flex/trace.py",
        "integrations/torch_flex.py",
        "bench/flex.py",
    }
    assert found == {"forks.py", "compile/__init__.py", *users}
