"""Faults of the kernel cache, of the emulator's build cache and of exported folders, with their outcomes.

    python fault_cases.py [PART ...]    # prints {name: outcome} as JSON, of names that have these parts

Every fault has a forked process of its own, so that a crash is an outcome. Kernels are tiny libraries that
answer with a number; `planted` ones answer another number and leave a mark when they are loaded.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from flash4_torch import compile as layer  # noqa: E402
from flash4_torch import env, errors, store  # noqa: E402
from flash4_torch.compile import Key, aot, cache, jit, library  # noqa: E402
from flash4_torch.emulator import build  # noqa: E402
from flash4_torch.emulator.errors import EmulatorError  # noqa: E402

RIGHT, OTHER, PLANTED = 42, 43, 13
KEY = Key("compile_cases:compile_scale", (1.0,), "sm_90a")
KEY_2 = Key("compile_cases:compile_scale", (2.0,), "sm_90a")
NOBODY = 65534
IS_ROOT = os.geteuid() == 0
SECONDS = 60

LIBRARY = """
#include <cstdlib>
#include <fcntl.h>
#include <cstdint>
struct Any { int32_t type; uint32_t padding; int64_t value; };
extern "C" int FUNCTION(void*, const void*, int32_t, Any* result) {
    *result = {1, 0, ANSWER};
    return 0;
}
extern "C" int answer() { return ANSWER; }
#ifdef MARK
__attribute__((constructor)) static void mark() { creat(std::getenv("MARK"), 0666); }
#endif
"""


def library_of(folder: Path, key: Key, answer: int, *flags: str) -> bytes:
    (folder / "library.cpp").write_text(LIBRARY)
    defines = [f"-DFUNCTION=__tvm_ffi_{key.digest}", f"-DANSWER={answer}", *flags]
    command = ["g++", "-shared", "-fPIC", *defines, "-o", str(folder / "x.so"), str(folder / "library.cpp")]
    subprocess.run(command, check=True)
    return (folder / "x.so").read_bytes()


class Outcome(NamedTuple):
    result: str
    """"works", "sentence", or anything else, which is a failure."""
    said: list[str]
    """The error's text, or the warnings'."""
    builds: int
    planted: bool
    """Whether the planted library was loaded."""


class Libraries(NamedTuple):
    right: bytes
    other: bytes
    planted: bytes


class Place:
    """The target of a fault: folders of its own, with everything intact at first."""

    def __init__(self, libraries: Libraries, root: Path):
        self.libraries, self.root, self.builds = libraries, root, 0
        self.cache = root / "cache"
        self.kernels = self.cache / "kernels"
        self.file = self.kernels / f"{KEY.digest}.so"
        self.lock = self.kernels / f"{KEY.digest}.lock"
        self.mark = root / "mark"
        self.exported = root / "exported"
        self.manifest = self.exported / aot.MANIFEST
        self.source = root / "answer.cpp"
        self.source.write_text(f'extern "C" int answer() {{ return {RIGHT}; }}')
        change(FLASH4_CACHE_DIR=str(self.cache), FLASH4_AOT_DIR=None, MARK=str(self.mark))
        jit.build = self.build
        os.chdir(root)

    def build(self, key: Key, folder: Path) -> Path:
        self.builds += 1
        path = folder / f"{key.digest}.so"
        path.write_bytes(self.libraries.right if key == KEY else self.libraries.other)
        return path

    def fill(self) -> None:
        with cache.obtained(KEY.digest, lambda folder: self.build(KEY, folder)):
            self.builds = 0

    def sealed(self, contents: bytes) -> bytes:
        return contents + store._seal(contents, KEY.digest)

    def plant(self, path: Path, contents: bytes | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(self.sealed(self.libraries.planted) if contents is None else contents)

    def export(self, *keys: Key) -> None:
        aot.export(self.exported, keys or [KEY])
        shutil.rmtree(self.cache)
        change(FLASH4_AOT_DIR=str(self.exported))
        self.builds = 0

    def edit(self, change: Callable[[dict[str, Any]], object]) -> None:
        document = json.loads(self.manifest.read_text())
        change(document)
        self.manifest.write_text(json.dumps(document))

    @property
    def exported_library(self) -> Path:
        return self.exported / f"{KEY.digest}.so"


def change(**values: str | None) -> None:
    env.change(values)


Fault = Callable[[Place], Any]
KERNELS: dict[str, tuple[Fault, str]] = {}
BUILDS: dict[str, tuple[Fault, str]] = {}
FOLDERS: dict[str, tuple[Fault, str]] = {}
EXPORTS: dict[str, tuple[Fault, str]] = {}


def fault(table: dict[str, tuple[Fault, str]], expected: str) -> Callable[[Fault], Fault]:
    """expected: "works", "warns" (and works), "sentence"; "root" before it if it takes root's rights."""

    def add(function: Fault) -> Fault:
        table[function.__name__.strip("_")] = function, expected
        return function

    return add


def give_away(*paths: Path) -> None:
    """Gives paths to another user; without root's rights, all our files are made to look like another's."""
    if IS_ROOT:
        for path in paths:
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    else:
        ours = os.geteuid()
        os.geteuid = lambda: ours + 1


def failing(owner: Any, name: str, error: int) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(error, os.strerror(error))

    setattr(owner, name, fail)


# The kernel cache: what lies in the kernel's place


@fault(KERNELS, "works")
def a_kernel_cut_short(p: Place) -> None:
    os.truncate(p.file, 1000)


@fault(KERNELS, "works")
def a_flipped_bit(p: Place) -> None:
    contents = bytearray(p.file.read_bytes())
    contents[len(contents) // 2] ^= 1
    p.file.write_bytes(contents)


@fault(KERNELS, "works")
def an_empty_kernel(p: Place) -> None:
    p.file.write_bytes(b"")


@fault(KERNELS, "works")
def a_dangling_link(p: Place) -> None:
    p.file.unlink()
    p.file.symlink_to(p.root / "nowhere")


@fault(KERNELS, "works")
def a_link_to_another_library(p: Place) -> None:
    p.plant(p.root / "evil.so", p.libraries.planted)
    p.file.unlink()
    p.file.symlink_to(p.root / "evil.so")


@fault(KERNELS, "works")
def a_library_without_a_seal(p: Place) -> None:
    p.plant(p.file, p.libraries.planted)


@fault(KERNELS, "works")
def another_kernel_under_this_name(p: Place) -> None:
    p.plant(p.file, p.libraries.planted + store._seal(p.libraries.planted, KEY_2.digest))


@fault(KERNELS, "warns")
def a_folder_as_kernel(p: Place) -> None:
    p.file.unlink()
    p.file.mkdir()


@fault(KERNELS, "works")
def a_pipe_as_kernel(p: Place) -> None:
    p.file.unlink()
    os.mkfifo(p.file)


@fault(KERNELS, "works")
def an_unreadable_kernel(p: Place) -> None:
    p.file.chmod(0)


@fault(KERNELS, "root warns")
def a_kernel_of_another_user(p: Place) -> None:
    p.plant(p.file)
    give_away(p.file)


@fault(KERNELS, "warns")
def a_kernel_that_all_may_write(p: Place) -> None:
    p.plant(p.file)
    p.file.chmod(0o666)


@fault(KERNELS, "warns")
def a_kernel_that_a_group_may_write(p: Place) -> None:
    p.plant(p.file)
    p.file.chmod(0o664)


@fault(KERNELS, "works")
def an_unlinked_kernel_of_the_other_suffix(p: Place) -> None:
    p.plant(p.file.with_suffix(".o"), b"nonsense")


# Its lock


@fault(KERNELS, "works")
def a_folder_as_lock(p: Place) -> None:
    p.file.unlink()
    p.lock.unlink()
    p.lock.mkdir()


@fault(KERNELS, "works")
def a_link_as_lock(p: Place) -> Callable[[], bool]:
    victim = p.root / "victim"
    victim.write_text("dear")
    p.file.unlink()
    p.lock.unlink()
    p.lock.symlink_to(victim)
    return lambda: victim.read_text() == "dear"


@fault(KERNELS, "works")
def a_dangling_link_as_lock(p: Place) -> Callable[[], bool]:
    p.file.unlink()
    p.lock.unlink()
    p.lock.symlink_to(p.root / "victim")
    return lambda: not (p.root / "victim").exists()


@fault(KERNELS, "works")
def a_pipe_as_lock(p: Place) -> None:
    p.file.unlink()
    p.lock.unlink()
    os.mkfifo(p.lock)


@fault(KERNELS, "works")
def a_lock_without_permission(p: Place) -> None:
    p.file.unlink()
    p.lock.chmod(0)


@fault(KERNELS, "root works")
def a_lock_that_another_user_holds_for_ever(p: Place) -> None:
    p.file.unlink()
    p.lock.chmod(0o666)
    give_away(p.lock)
    hold_for_ever(p.lock)


@fault(KERNELS, "works")
def a_lock_that_others_may_hold(p: Place) -> None:
    p.file.unlink()
    p.lock.chmod(0o666)
    hold_for_ever(p.lock)


def hold_for_ever(path: Path) -> None:
    """Locks in another process, which ends with this one."""
    read, write = os.pipe()
    if os.fork() == 0:
        file = path.open("r+")
        fcntl.lockf(file, fcntl.LOCK_EX)
        os.write(write, b"x")
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(0)
    os.read(read, 1)


@fault(KERNELS, "works")
def a_file_system_without_locks(p: Place) -> None:
    p.file.unlink()
    failing(fcntl, "lockf", errno.ENOLCK)


# Its folder


@fault(KERNELS, "warns")
def dev_null_as_folder(p: Place) -> None:
    change(FLASH4_CACHE_DIR="/dev/null")


@fault(KERNELS, "warns")
def proc_as_folder(p: Place) -> None:
    change(FLASH4_CACHE_DIR="/proc")


@fault(KERNELS, "warns")
def a_file_as_folder(p: Place) -> None:
    change(FLASH4_CACHE_DIR=str(p.source))


@fault(KERNELS, "warns")
def a_very_long_name(p: Place) -> None:
    change(FLASH4_CACHE_DIR="/tmp/" + "a" * 5000)


@fault(KERNELS, "warns")
def a_very_deep_folder(p: Place) -> None:
    change(FLASH4_CACHE_DIR=str(p.root) + "/a" * 2500)


@fault(KERNELS, "warns")
def a_loop_of_links(p: Place) -> None:
    (p.root / "loop").symlink_to("loop")
    change(FLASH4_CACHE_DIR=str(p.root / "loop"))


@fault(KERNELS, "works")
def a_link_to_a_folder_of_ours(p: Place) -> None:
    (p.root / "elsewhere").symlink_to(p.cache)
    change(FLASH4_CACHE_DIR=str(p.root / "elsewhere"))


@fault(KERNELS, "warns")
def the_home_of_nobody(p: Place) -> None:
    change(FLASH4_CACHE_DIR="~no-such-user/x")


@fault(KERNELS, "warns")
def no_home_and_no_passwd_entry(p: Place) -> None:
    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    pwd.getpwuid = unknown
    change(FLASH4_CACHE_DIR=None, HOME=None)


@fault(KERNELS, "works")
def a_home_that_is_missing(p: Place) -> Callable[[], bool]:
    change(FLASH4_CACHE_DIR=None, HOME=str(p.root / "home"))
    return lambda: (p.root / "home" / ".cache").is_dir()


@fault(KERNELS, "warns")
def a_home_that_is_a_device(p: Place) -> None:
    change(FLASH4_CACHE_DIR=None, HOME="/dev/null")


@fault(KERNELS, "warns")
def a_home_without_permission(p: Place) -> None:
    (p.root / "home").mkdir(0o000)
    change(FLASH4_CACHE_DIR=None, HOME=str(p.root / "home"))


@fault(KERNELS, "works")
def an_empty_variable(p: Place) -> Callable[[], bool]:
    """It counts as unset: files in the working directory are not loaded, and nothing is written there."""
    change(FLASH4_CACHE_DIR="", HOME=str(p.root / "home"))
    p.plant(p.root / "kernels" / p.file.name)
    return lambda: (p.root / "home").exists() and len(list((p.root / "kernels").iterdir())) == 1


@fault(KERNELS, "warns")
def a_folder_that_is_read_only(p: Place) -> None:
    p.file.unlink()
    p.kernels.chmod(0o555)


@fault(KERNELS, "works")
def a_read_only_folder_that_has_the_kernel(p: Place) -> Callable[[], bool]:
    p.kernels.chmod(0o555)
    return lambda: p.builds == 0


@fault(KERNELS, "warns")
def a_folder_without_permission(p: Place) -> None:
    p.kernels.chmod(0)


@fault(KERNELS, "warns")
def a_missing_folder_in_one_that_is_read_only(p: Place) -> None:
    shutil.rmtree(p.kernels)
    p.cache.chmod(0o555)


@fault(KERNELS, "warns")
def a_folder_that_all_may_write(p: Place) -> None:
    p.plant(p.file)
    p.kernels.chmod(0o777)


@fault(KERNELS, "warns")
def a_folder_like_tmp(p: Place) -> None:
    p.plant(p.file)
    p.kernels.chmod(0o1777)


@fault(KERNELS, "warns")
def a_folder_that_a_group_may_write(p: Place) -> None:
    p.plant(p.file)
    p.kernels.chmod(0o770)


@fault(KERNELS, "root warns")
def a_folder_of_another_user(p: Place) -> None:
    p.plant(p.file)
    give_away(p.kernels, p.file)


@fault(KERNELS, "works")
def no_mask_for_new_files(p: Place) -> Callable[[], bool]:
    """Folders and files are writable by nobody else all the same."""
    os.umask(0)
    shutil.rmtree(p.cache)
    return lambda: (p.cache.stat().st_mode | p.kernels.stat().st_mode | p.file.stat().st_mode) & 0o022 == 0


# The disk, and the temporary folder


@fault(KERNELS, "warns")
def a_disk_that_is_full_while_writing(p: Place) -> None:
    p.file.unlink()
    write = store.write

    def in_little_room(path: Path, contents: bytes) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        try:
            write(path, contents)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    store.write = in_little_room


@fault(KERNELS, "warns")
def a_disk_that_is_full_at_fsync(p: Place) -> None:
    p.file.unlink()
    failing(os, "fsync", errno.ENOSPC)


@fault(KERNELS, "warns")
def a_disk_that_is_full_at_rename(p: Place) -> None:
    p.file.unlink()
    failing(os, "replace", errno.ENOSPC)


@fault(KERNELS, "warns")
def a_disk_that_is_full_for_names(p: Place) -> None:
    p.file.unlink()
    failing(tempfile, "mkstemp", errno.ENOSPC)


@fault(KERNELS, "warns")
def a_quota_that_is_used_up_for_folders(p: Place) -> None:
    shutil.rmtree(p.cache)
    failing(Path, "mkdir", errno.EDQUOT)


@fault(KERNELS, "sentence")
def a_temporary_folder_that_is_full(p: Place) -> None:
    p.file.unlink()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(p.libraries.right), resource.RLIM_INFINITY))


@fault(KERNELS, "works")
def no_temporary_folder(p: Place) -> None:
    p.file.unlink()
    failing(tempfile, "gettempdir", errno.ENOENT)


@fault(KERNELS, "sentence")
def no_room_anywhere(p: Place) -> None:
    failing(tempfile, "gettempdir", errno.ENOENT)
    change(FLASH4_CACHE_DIR="/dev/null")


@fault(KERNELS, "works")
def no_links_in_temporary_folders(p: Place) -> None:
    failing(Path, "symlink_to", errno.EPERM)


@fault(KERNELS, "sentence")
def a_disk_that_fails_while_reading(p: Place) -> None:
    failing(store, "opened", errno.EIO)


# Processes


@fault(KERNELS, "works")
def a_build_that_is_killed(p: Place) -> Callable[[], bool]:
    """A later build removes its leftovers; meanwhile there is nothing in the cache."""
    p.file.unlink()
    change(TMPDIR=str(p.root / "tmp"))
    (p.root / "tmp").mkdir()
    tempfile.tempdir = None
    child = os.fork()
    if child == 0:
        jit.build = lambda key, folder: os.kill(os.getpid(), signal.SIGKILL)
        layer.function(*KEY)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    (rest,) = (p.root / "tmp").iterdir()
    assert [file.name for file in p.kernels.iterdir()] == [p.lock.name]
    os.utime(rest, (0, 0))
    return lambda: not rest.exists()


@fault(KERNELS, "works")
def unfinished_files_of_dead_processes(p: Place) -> Callable[[], bool]:
    p.file.unlink()
    (p.kernels / "flash4_torch-dead").write_text("half")
    os.utime(p.kernels / "flash4_torch-dead", (0, 0))
    (p.kernels / "flash4_torch-live").write_text("half")
    return lambda: sorted(f.name for f in p.kernels.glob("flash4_torch-*")) == ["flash4_torch-live"]


@fault(KERNELS, "works")
def eight_processes_at_once(p: Place) -> Callable[[], bool]:
    """Only one of them builds."""
    p.file.unlink()
    log = p.root / "log"

    def noted(key: Key, folder: Path) -> Path:
        with log.open("a") as file:
            file.write("x")
        time.sleep(0.1)
        return p.build(key, folder)

    jit.build = noted
    children = []
    for _ in range(7):
        child = os.fork()
        if child == 0:
            os._exit(layer.function(*KEY)() != RIGHT)
        children.append(child)

    def all_well() -> bool:
        return all(os.waitpid(child, 0)[1] == 0 for child in children) and log.read_text() == "x"

    return all_well


@fault(KERNELS, "works")
def a_second_kernel_under_the_same_descriptor(p: Place) -> Callable[[], bool]:
    """dlopen takes a path that it has seen for the library that it has seen there before."""
    return lambda: layer.function(*KEY_2)() == OTHER and layer.function(*KEY)() == RIGHT


# The emulator's build cache


def built(p: Place, suffix: str) -> Path:
    (path,) = (p.cache / "build").glob(f"*{suffix}")
    return path


@fault(BUILDS, "works")
def an_engine_cut_short(p: Place) -> None:
    os.truncate(built(p, ".so"), 1000)


@fault(BUILDS, "works")
def an_engine_cut_in_half(p: Place) -> None:
    os.truncate(built(p, ".so"), built(p, ".so").stat().st_size // 2)


@fault(BUILDS, "works")
def an_empty_engine(p: Place) -> None:
    built(p, ".so").write_bytes(b"")


@fault(BUILDS, "works")
def a_flipped_bit_in_the_engine(p: Place) -> None:
    contents = bytearray(built(p, ".so").read_bytes())
    contents[200] ^= 1
    built(p, ".so").write_bytes(contents)


@fault(BUILDS, "works")
def an_object_file_cut_short(p: Place) -> None:
    os.truncate(built(p, ".o"), 300)
    built(p, ".so").unlink()


@fault(BUILDS, "works")
def an_empty_object_file(p: Place) -> None:
    built(p, ".o").write_bytes(b"")
    built(p, ".so").unlink()


@fault(BUILDS, "sentence")
def a_folder_as_engine(p: Place) -> None:
    path = built(p, ".so")
    path.unlink()
    path.mkdir()


@fault(BUILDS, "sentence")
def a_folder_as_object_file(p: Place) -> None:
    path = built(p, ".o")
    path.unlink()
    path.mkdir()


@fault(BUILDS, "works")
def an_engine_without_a_seal(p: Place) -> None:
    p.plant(built(p, ".so"), p.libraries.planted)


@fault(BUILDS, "warns")
def an_engine_that_all_may_write(p: Place) -> None:
    path = built(p, ".so")
    p.plant(path, p.libraries.planted + store._seal(p.libraries.planted, path.stem))
    path.chmod(0o666)


@fault(BUILDS, "root warns")
def an_engine_of_another_user(p: Place) -> None:
    path = built(p, ".so")
    p.plant(path, p.libraries.planted + store._seal(p.libraries.planted, path.stem))
    give_away(path)


@fault(BUILDS, "works")
def folders_as_the_builds_locks(p: Place) -> None:
    for path in [*(p.cache / "build").glob("*.lock")]:
        path.unlink()
        path.mkdir()
    built(p, ".so").unlink()
    built(p, ".o").unlink()


@fault(BUILDS, "works")
def a_link_as_the_builds_lock(p: Place) -> Callable[[], bool]:
    victim = p.root / "victim"
    victim.write_text("dear")
    for path in [*(p.cache / "build").glob("*.lock")]:
        path.unlink()
        path.symlink_to(victim)
    built(p, ".so").unlink()
    return lambda: victim.read_text() == "dear"


@fault(BUILDS, "sentence")
def a_read_only_build_folder(p: Place) -> None:
    built(p, ".so").unlink()
    (p.cache / "build").chmod(0o555)


@fault(BUILDS, "works")
def a_read_only_build_folder_that_has_the_engine(p: Place) -> None:
    (p.cache / "build").chmod(0o555)


@fault(BUILDS, "sentence")
def a_build_folder_that_all_may_write(p: Place) -> None:
    (p.cache / "build").chmod(0o777)


@fault(BUILDS, "sentence")
def a_build_folder_in_the_home_of_nobody(p: Place) -> None:
    change(FLASH4_CACHE_DIR="~no-such-user/x")


@fault(BUILDS, "sentence")
def a_full_disk_for_the_engine(p: Place) -> None:
    built(p, ".so").unlink()
    failing(os, "fsync", errno.ENOSPC)


@fault(BUILDS, "sentence")
def no_temporary_room_for_the_engine(p: Place) -> None:
    built(p, ".so").unlink()
    failing(tempfile, "mkdtemp", errno.ENOSPC)


@fault(BUILDS, "works")
def an_empty_variable_for_the_build(p: Place) -> Callable[[], bool]:
    change(FLASH4_CACHE_DIR="", HOME=str(p.root / "home"))
    return lambda: not (p.root / "build").exists()


# An exported folder: what its manifest says


def edits(name: str, expected: str, change: Callable[[dict[str, Any]], object]) -> None:
    FOLDERS[name] = (lambda p: p.edit(change)), expected


def texts(name: str, text: bytes) -> None:
    def write(p: Place) -> None:
        p.manifest.write_bytes(text)

    FOLDERS[name] = write, "sentence"


texts("an empty manifest", b"")
texts("a manifest that is cut", b'{"format": 2, "vers')
texts("a manifest that is not UTF-8", b'{"format": "\xff"}')
texts("a manifest that is nested too deeply", b"[" * 200_000)
for value in ("[]", "null", "2", '"x"', "NaN", "{}"):
    texts(f"a manifest that is {value}", value.encode())
for value in (None, 1, 99, "2", [2], True):
    edits(f"format {value!r}", "sentence", lambda m, value=value: m.update(format=value))
for value in (None, [], "x", {}):
    edits(f"versions {value!r}", "sentence", lambda m, value=value: m.update(versions=value))
for name in ("nvidia-cutlass-dsl", "machine", "CPU"):
    edits(f"versions without {name}", "sentence", lambda m, name=name: m["versions"].pop(name))
    edits(
        f"versions with a number as {name}", "sentence", lambda m, name=name: m["versions"].update({name: 7})
    )
edits("another machine", "sentence", lambda m: m["versions"].update(machine="vax"))
edits("another compiler", "sentence", lambda m: m["versions"].update({"nvidia-cutlass-dsl": "1.0"}))
edits("a CPU with more", "sentence", lambda m: m["versions"].update(CPU=m["versions"]["CPU"] + " avx1024"))
edits("a CPU with less", "works", lambda m: m["versions"].update(CPU=m["versions"]["CPU"].split()[0]))
for value in (None, 7, "x", [], "0" * 63):
    edits(f"runtime {value!r}", "sentence", lambda m, value=value: m.update(runtime=value))
for value in (None, 7, {}, "x", [None], [[]], ["x"]):
    edits(f"kernels {value!r}", "sentence", lambda m, value=value: m.update(kernels=value))
for name in ("entry", "static", "arch", "file", "function", "sha256", "sources"):
    edits(f"a kernel without {name}", "sentence", lambda m, name=name: m["kernels"][0].pop(name))
    for value in (None, 7, [], {}):
        edits(
            f"a kernel whose {name} is {value!r}",
            "sentence",
            lambda m, name=name, value=value: m["kernels"][0].update({name: value}),
        )
for value in (
    "../evil.so",
    "/evil.so",
    "..",
    ".",
    "",
    "a\0b.so",
    "\ud800.so",
    "x" * 5000 + ".so",
    "manifest.json",
):
    edits(f"file {value[:20]!r}", "sentence", lambda m, value=value: m["kernels"][0].update(file=value))
for value in ("no_such_function", "", "a\0b", "\ud800"):
    edits(f"function {value!r}", "sentence", lambda m, value=value: m["kernels"][0].update(function=value))
edits("sources that have changed", "sentence", lambda m: m["kernels"][0].update(sources="0"))
edits("another hash", "sentence", lambda m: m["kernels"][0].update(sha256="0" * 64))
edits("a kernel that is there twice", "works", lambda m: m["kernels"].append(m["kernels"][0]))
edits("what later versions may add", "works", lambda m: m.update(more=1))


@fault(FOLDERS, "sentence")
def a_library_outside_the_folder(p: Place) -> None:
    """The library is planted, with its hash in the manifest, which somebody else has written."""
    p.plant(p.root / "evil.so", p.libraries.planted)
    checksum = aot.hashlib.sha256(p.libraries.planted).hexdigest()
    p.edit(lambda m: m["kernels"][0].update(file="../evil.so", sha256=checksum))


@fault(FOLDERS, "sentence")
def no_manifest(p: Place) -> None:
    p.manifest.unlink()


@fault(FOLDERS, "sentence")
def a_folder_as_manifest(p: Place) -> None:
    p.manifest.unlink()
    p.manifest.mkdir()


@fault(FOLDERS, "sentence")
def a_pipe_as_manifest(p: Place) -> None:
    p.manifest.unlink()
    os.mkfifo(p.manifest)


@fault(FOLDERS, "sentence")
def a_device_as_manifest(p: Place) -> None:
    p.manifest.unlink()
    p.manifest.symlink_to("/dev/zero")


@fault(FOLDERS, "sentence")
def a_manifest_without_permission(p: Place) -> None:
    p.manifest.chmod(0)


@fault(FOLDERS, "sentence")
def a_manifest_that_all_may_write(p: Place) -> None:
    p.manifest.chmod(0o666)


@fault(FOLDERS, "sentence")
def a_folder_of_kernels_that_all_may_write(p: Place) -> None:
    p.exported.chmod(0o777)


@fault(FOLDERS, "sentence")
def a_folder_of_kernels_that_a_group_may_write(p: Place) -> None:
    p.exported.chmod(0o775)


@fault(FOLDERS, "sentence")
def an_exported_library_that_all_may_write(p: Place) -> None:
    p.exported_library.chmod(0o666)


@fault(FOLDERS, "root sentence")
def an_exported_library_of_a_third_user(p: Place) -> None:
    give_away(p.exported_library)


@fault(FOLDERS, "root works")
def a_folder_of_kernels_of_another_user(p: Place) -> None:
    """The user has named that owner by naming the folder."""
    give_away(p.exported, *p.exported.iterdir())


# Its contents


@fault(FOLDERS, "sentence")
def no_library(p: Place) -> None:
    p.exported_library.unlink()


@fault(FOLDERS, "sentence")
def a_library_cut_short(p: Place) -> None:
    os.truncate(p.exported_library, 1000)


@fault(FOLDERS, "sentence")
def an_empty_library(p: Place) -> None:
    p.exported_library.write_bytes(b"")


@fault(FOLDERS, "sentence")
def a_replaced_library(p: Place) -> None:
    p.plant(p.exported_library, p.libraries.planted)


@fault(FOLDERS, "sentence")
def a_folder_as_library(p: Place) -> None:
    p.exported_library.unlink()
    p.exported_library.mkdir()


@fault(FOLDERS, "sentence")
def a_pipe_as_library(p: Place) -> None:
    p.exported_library.unlink()
    os.mkfifo(p.exported_library)


@fault(FOLDERS, "sentence")
def a_library_that_is_none(p: Place) -> None:
    """The manifest has its hash."""
    p.exported_library.write_bytes(b"nonsense")
    p.edit(lambda m: m["kernels"][0].update(sha256=aot.hashlib.sha256(b"nonsense").hexdigest()))


@fault(FOLDERS, "sentence")
def a_folder_that_is_missing(p: Place) -> None:
    shutil.rmtree(p.exported)


@fault(FOLDERS, "sentence")
def a_file_as_exported_folder(p: Place) -> None:
    change(FLASH4_AOT_DIR=str(p.source))


@fault(FOLDERS, "sentence")
def an_exported_folder_in_the_home_of_nobody(p: Place) -> None:
    change(FLASH4_AOT_DIR="~no-such-user/x")


@fault(FOLDERS, "works")
def an_empty_variable_for_the_exported_folder(p: Place) -> Callable[[], bool]:
    os.chdir(p.exported)
    change(FLASH4_AOT_DIR="")
    return lambda: p.builds == 1


@fault(FOLDERS, "works")
def a_kernel_that_is_not_there(p: Place) -> Callable[[], bool]:
    p.edit(lambda m: m.update(kernels=[]))
    return lambda: p.builds == 1


def installed(path: Path | None) -> None:
    """Makes the file the compiler's runtime library; None if none is installed."""

    def ask() -> Path:
        if path is None:
            raise ImportError("it is not installed")
        return path

    library.installed_runtime = ask
    library._provide_installed_runtime.cache_clear()


def runtime(name: str, expected: str, spoil: Callable[[Place, Path], object]) -> None:
    """A fault of a folder that has its own runtime library, where none is installed."""

    def change_it(p: Place) -> None:
        (p.root / "runtime.so").write_bytes(p.libraries.other)
        installed(p.root / "runtime.so")
        aot.export(p.exported, [], runtime=True)
        installed(None)
        spoil(p, p.exported / library.RUNTIME)

    FOLDERS[name] = change_it, expected


def cut_in_half(p: Place, path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def made_a_folder(p: Place, path: Path) -> None:
    path.unlink()
    path.mkdir()


runtime("a runtime library", "works", lambda p, path: None)
runtime("a runtime library that is cut in half", "sentence", cut_in_half)
runtime("a runtime library of four bytes", "sentence", lambda p, path: os.truncate(path, 4))
runtime("another runtime library", "sentence", lambda p, path: p.plant(path, p.libraries.planted))
runtime("no runtime library", "sentence", lambda p, path: path.unlink())
runtime("a folder as runtime library", "sentence", made_a_folder)
runtime("a runtime library that all may write", "sentence", lambda p, path: path.chmod(0o666))


@fault(FOLDERS, "sentence")
def a_runtime_library_that_the_manifest_does_not_know(p: Place) -> None:
    """The library is not loaded, although none is installed."""
    p.plant(p.exported / library.RUNTIME, p.libraries.planted)

    installed(None)


@fault(FOLDERS, "sentence")
def an_installed_runtime_library_that_is_broken(p: Place) -> None:
    (p.root / "runtime.so").write_bytes(b"half")
    installed(p.root / "runtime.so")


# Exporting: the second export into a folder that has one kernel


@fault(EXPORTS, "works")
def a_second_export(p: Place) -> Callable[[], bool]:
    aot.export(p.exported, [KEY_2])
    return lambda: layer.function(*KEY_2)() == OTHER


@fault(EXPORTS, "works")
def two_exports_at_once(p: Place) -> Callable[[], bool]:
    shutil.rmtree(p.exported)
    read = aot._to_add_to

    def slowly(folder: Path) -> Any:
        before = read(folder)
        time.sleep(1)
        return before

    aot._to_add_to = slowly
    children = []
    for key in (KEY, KEY_2, KEY, KEY_2):
        child = os.fork()
        if child == 0:
            aot.export(p.exported, [key])
            os._exit(0)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    return lambda: layer.function(*KEY_2)() == OTHER


@fault(EXPORTS, "works")
def an_export_of_the_same_again(p: Place) -> Callable[[], bool]:
    """Others may have it mapped: its file is left alone."""
    before = p.exported_library.stat()
    aot.export(p.exported, [KEY])
    return lambda: p.exported_library.stat() == before


@fault(EXPORTS, "works")
def an_export_that_mends_a_library(p: Place) -> Callable[[], bool]:
    """A new file takes its place; processes that have the old one mapped keep it."""
    before = p.exported_library.stat().st_ino
    with p.exported_library.open("ab") as file:
        file.write(b"x")
        file.flush()
        aot.export(p.exported, [KEY])
        return lambda: p.exported_library.stat().st_ino != before


@fault(EXPORTS, "sentence")
def an_export_beside_another_compilers(p: Place) -> None:
    p.edit(lambda m: m["versions"].update({"nvidia-cutlass-dsl": "1.0"}))
    aot.export(p.exported, [KEY_2])


@fault(EXPORTS, "sentence")
def an_export_beside_another_cpus(p: Place) -> None:
    p.edit(lambda m: m["versions"].update(CPU="sse2"))
    aot.export(p.exported, [KEY_2])


@fault(EXPORTS, "sentence")
def an_export_beside_a_broken_manifest(p: Place) -> None:
    p.manifest.write_text("{")
    aot.export(p.exported, [KEY_2])


@fault(EXPORTS, "sentence")
def an_export_to_dev_null(p: Place) -> None:
    aot.export(Path("/dev/null/x"), [KEY])


@fault(EXPORTS, "sentence")
def an_export_to_proc(p: Place) -> None:
    aot.export(Path("/proc/x"), [KEY])


@fault(EXPORTS, "sentence")
def an_export_to_a_file(p: Place) -> None:
    aot.export(p.source, [KEY])


@fault(EXPORTS, "sentence")
def an_export_to_a_read_only_folder(p: Place) -> None:
    p.exported.chmod(0o555)
    aot.export(p.exported, [KEY_2])


@fault(EXPORTS, "sentence")
def an_export_to_a_folder_that_all_may_write(p: Place) -> None:
    p.exported.chmod(0o777)
    aot.export(p.exported, [KEY_2])


@fault(EXPORTS, "sentence")
def an_export_to_a_full_disk(p: Place) -> None:
    with cache.obtained(KEY_2.digest, lambda folder: p.build(KEY_2, folder)):
        failing(os, "fsync", errno.ENOSPC)
        aot.export(p.exported, [KEY_2])


@fault(EXPORTS, "sentence")
def an_export_over_a_folder(p: Place) -> None:
    (p.exported / f"{KEY_2.digest}.so").mkdir()
    aot.export(p.exported, [KEY_2])


@fault(EXPORTS, "sentence")
def an_export_of_a_runtime_library_that_is_not_installed(p: Place) -> None:
    installed(None)
    aot.export(p.exported, [KEY_2], runtime=True)


@fault(EXPORTS, "works")
def a_link_as_the_exports_lock(p: Place) -> Callable[[], bool]:
    victim = p.root / "victim"
    victim.write_text("dear")
    (p.exported / aot.LOCK).unlink()
    (p.exported / aot.LOCK).symlink_to(victim)
    aot.export(p.exported, [KEY_2])
    return lambda: victim.read_text() == "dear"


@fault(EXPORTS, "works")
def an_export_without_a_mask(p: Place) -> None:
    os.umask(0)
    shutil.rmtree(p.exported)
    aot.export(p.exported, [KEY])


# Trying them


class Case(NamedTuple):
    area: str
    breaks: Fault
    expected: str
    needs_root: bool


CASES = {
    f"{area}: {name.replace('_', ' ')}": Case(area, breaks, expected.split()[-1], expected.startswith("root"))
    for area, table in (
        ("kernels", KERNELS),
        ("build", BUILDS),
        ("folder", FOLDERS),
        ("export", EXPORTS),
    )
    for name, (breaks, expected) in table.items()
}


def attempt_kernel(p: Place) -> bool:
    return layer.function(*KEY)() == RIGHT


def attempt_build(p: Place) -> bool:
    return build.load(build.shared_object("libanswer", [p.source], ["-fPIC"])).answer() == RIGHT


def try_it(p: Place, area: str, breaks: Fault) -> Outcome:
    """Commits the fault in this process and returns the outcome."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            holds = breaks(p)
            if area == "export":
                # Exported kernels must come from nowhere else.
                shutil.rmtree(p.cache, ignore_errors=True)
                failing(jit, "build", 0)
            right = attempt_build(p) if area == "build" else attempt_kernel(p)
            result = "works" if right and (holds is None or holds()) else "wrong"
        except (errors.Flash4Error, EmulatorError) as error:
            result, said = "sentence", [str(error)]
        except BaseException as error:  # whatever it is, it is the outcome
            result, said = type(error).__name__, [str(error)]
    if result == "works" and any(w.category is RuntimeWarning for w in caught):
        result = "warns"
    return Outcome(result, said + [str(w.message) for w in caught], p.builds, p.mark.exists())


def outcome_of(name: str, libraries: Libraries, base: Path) -> Outcome:
    """The fault takes place in a process of its own: a crash, or one that hangs, is an outcome, too."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(SECONDS)
            os.write(write, json.dumps(_in_the_child(name, libraries, base)).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    with open(read, "rb") as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    return Outcome(f"ended with status {status}", [], 0, False) if status else Outcome(*json.loads(answer))


def _in_the_child(name: str, libraries: Libraries, base: Path) -> Outcome:
    area, breaks, _, needs_root = CASES[name]
    if IS_ROOT and not needs_root:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    place = Place(libraries, Path(tempfile.mkdtemp(dir=base)))
    if area == "kernels":
        place.fill()
    elif area == "build":
        shutil.copytree(base / "build", place.cache / "build", ignore=shutil.ignore_patterns("*.lock"))
        for path in [*(place.cache / "build").iterdir()]:
            path.with_suffix(".lock").touch(0o600)
    else:
        place.export()
    return try_it(place, area, breaks)


def main() -> None:
    base = Path(tempfile.mkdtemp())
    base.chmod(0o777)
    try:
        libraries = Libraries(
            library_of(base, KEY, RIGHT),
            library_of(base, KEY_2, OTHER),
            library_of(base, KEY, PLANTED, "-DMARK"),
        )
        whole = Place(libraries, base)
        change(FLASH4_CACHE_DIR=str(base))
        attempt_build(whole)
        (base / "build").chmod(0o755)
        # Loaded while there are rights to read it: compiled kernels ask for the runtime library.
        library._provide_installed_runtime()
        names = [name for name in CASES if all(part in name for part in sys.argv[1:])]
        print(json.dumps({name: outcome_of(name, libraries, base) for name in names}))
    finally:
        shutil.rmtree(base, onerror=_make_removable)


def _make_removable(remove: Any, path: str, _: Any) -> None:
    """Removes a path that could not be listed, or that lies in such a folder, without root's rights."""
    os.chmod(os.path.dirname(path), 0o700)
    os.chmod(path, 0o700)
    shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


if __name__ == "__main__":
    main()
