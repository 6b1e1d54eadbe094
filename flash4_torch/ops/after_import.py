"""Callbacks that run once another module is imported, without importing it.

Sharding rules need torch.distributed.tensor, and FLOP formulas need torch.utils.flop_counter, which loads
Triton: together a second of import time for features that few use. Code that uses them imports them, and our
rules are registered at that moment.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, action: Callable[[], None]) -> None:
    """Calls `action` now if module `name` is loaded, and right after each later load or reload of it."""
    finder = _Finder(name, action)
    # The finder goes in first: another thread may load the module meanwhile.
    sys.meta_path.insert(0, finder)
    if name in sys.modules:
        import_module(name)  # waits for a thread that has not loaded all of it
        if not finder.has_acted:
            finder.act()


class _Finder(MetaPathFinder):
    """Finds one module by asking the later finders, and runs the action after each execution of the module.

    It stays installed: a request for a spec need not lead to an import, and a reloaded module has lost what
    was registered with it.
    """

    def __init__(self, name: str, action: Callable[[], None]):
        self._name, self._action = name, action
        self._asking = threading.local()
        self.has_acted = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Another finder that works like this one may ask all finders again.
        if fullname != self._name or hasattr(self._asking, "others"):
            return None
        self._asking.others = True
        try:
            answers = (finder.find_spec(fullname, path, target) for finder in self._behind())
            spec = next(filter(None, answers), None)
        finally:
            del self._asking.others
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def _behind(self) -> list[Any]:
        finders = list(sys.meta_path)
        others = finders[finders.index(self) + 1 :] if self in finders else []
        return [finder for finder in others if hasattr(finder, "find_spec")]

    def act(self) -> None:
        self.has_acted = True
        self._action()


class _Loader:
    """A module's own loader, plus the action after it has executed the module in sys.modules."""

    def __init__(self, loader: Any, finder: _Finder):
        self._loader, self._finder = loader, finder

    def exec_module(self, module: ModuleType) -> None:
        # Code that asks the module for its source, or for files next to it, must find its usual loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if sys.modules.get(module.__name__) is module:
            self._finder.act()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
