"""`after_import` runs an action once each time that the module is executed, however it is found."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from flash4_torch.ops.after_import import after_import

NAME = "imported_by_a_test"


class Followed:
    """A module that can be imported, and what its value was at each action that followed."""

    def __init__(self) -> None:
        self.values: list[str] = []

    def follow(self) -> None:
        after_import(NAME, self.act)

    def act(self) -> None:
        # Actions import the module that they change.
        self.values.append(importlib.import_module(NAME).value)


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Followed]:
    file = tmp_path / f"{NAME}.py"
    file.write_text("import time\nvalue = 'half'\ntime.sleep(0.05)\nvalue = 'whole'\ndef f(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    # Only Python's own finders: pytest has one that serves as the loader of every module.
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if isinstance(finder, type)])
    yield Followed()
    for name in (NAME, f"{NAME}_too"):
        sys.modules.pop(name, None)


def test_it_follows_each_execution(followed: Followed) -> None:
    followed.follow()
    assert followed.values == []
    module = importlib.import_module(NAME)
    importlib.import_module(NAME)
    assert followed.values == ["whole"]
    importlib.reload(module)
    assert followed.values == ["whole"] * 2
    del sys.modules[NAME]
    importlib.import_module(NAME)
    assert followed.values == ["whole"] * 3


def test_what_is_loaded_already_is_followed_at_once(followed: Followed) -> None:
    module = importlib.import_module(NAME)
    followed.follow()
    assert followed.values == ["whole"]
    importlib.reload(module)
    assert followed.values == ["whole"] * 2


def test_looking_changes_nothing(followed: Followed) -> None:
    followed.follow()
    for _ in range(2):
        spec = importlib.util.find_spec(NAME)
        assert spec is not None and spec.loader is not None and NAME not in sys.modules
        assert "value" in spec.loader.get_source(NAME)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    assert copy.value == "whole" and followed.values == []
    importlib.import_module(NAME)
    assert followed.values == ["whole"]


def test_the_module_is_as_it_would_be(followed: Followed) -> None:
    followed.follow()
    module = importlib.import_module(NAME)
    assert module.__spec__ is not None
    assert type(module.__loader__) is type(module.__spec__.loader) is SourceFileLoader
    assert inspect.getsource(module.f) == "def f(): pass\n"


def test_a_module_that_is_nowhere_is_missed_as_before(followed: Followed) -> None:
    after_import("imported_by_nobody", followed.act)
    with pytest.raises(ModuleNotFoundError, match="imported_by_nobody"):
        importlib.import_module("imported_by_nobody")
    assert followed.values == []


@pytest.mark.parametrize("loads_first", [False, True])
def test_threads_that_import_at_once_find_it_done(followed: Followed, loads_first: bool) -> None:
    """The action may be registered before the first of them, or while they wait for one another."""
    together = threading.Barrier(4)

    def load() -> list[str]:
        together.wait()
        importlib.import_module(NAME)
        return list(followed.values)

    def follow_while_loading() -> list[str]:
        together.wait()
        while NAME not in sys.modules:
            pass
        followed.follow()
        return list(followed.values)

    if not loads_first:
        followed.follow()
    last: Callable[[], list[str]] = follow_while_loading if loads_first else load
    with ThreadPoolExecutor(4) as pool:
        seen = [thread.result() for thread in [*(pool.submit(load) for _ in range(3)), pool.submit(last)]]
    assert followed.values == ["whole"]
    assert all(values == ["whole"] for values in (seen[-1:] if loads_first else seen))


class Wrapping(MetaPathFinder):
    """Asks all finders, as a finder does that changes what it finds."""

    asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self.asking:
            return None
        self.asking = True
        try:
            return importlib.util.find_spec(fullname)
        finally:
            self.asking = False


class OneForAll(MetaPathFinder):
    """Loads every module that it finds itself, as zipped and frozen packages are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname.startswith(NAME) else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.value = "whole"


def test_others_of_the_same_loader_are_none_of_its_business(followed: Followed) -> None:
    sys.meta_path.insert(0, OneForAll())
    followed.follow()
    for _ in range(2):
        importlib.import_module(NAME)
        importlib.import_module(f"{NAME}_too")
        assert followed.values == ["whole"]
        del sys.modules[f"{NAME}_too"]


@pytest.mark.parametrize("place", [0, 1])
def test_another_that_wraps_is_respected(followed: Followed, place: int) -> None:
    """The other finder may stand before or after ours; the action runs once."""
    followed.follow()
    sys.meta_path.insert(place, Wrapping())
    importlib.import_module(NAME)
    assert followed.values == ["whole"]
