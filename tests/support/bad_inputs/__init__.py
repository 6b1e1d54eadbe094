"""Bad inputs: one module for each public function, with the calls that it must refuse as its `CASES`."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import pytest

_INTERNAL = (
    "flash4::",
    "flash4.attention",
    "aten::",
    "aten.",
    "c10::",
    "INTERNAL ASSERT",
    "Expected a value of type",
    "has no attribute",
    "not supported between instances",
    "unsupported operand type",
    "unhashable type",
    "object is not",
    "Could not run",
    "Boolean value of Tensor",
    "invalid literal",
    "Traceback",
)
"""Pieces of messages in which Python or torch speaks of our internals, not of the caller's argument."""


class Case(NamedTuple):
    """A call that must fail: with `error`, and with `words` in its message."""

    name: str
    call: Callable[[], object]
    error: type[BaseException]
    words: str


def check(case: Case) -> None:
    """Makes the call.

    Raises:
        AssertionError: it did not fail with that error and those words, or internal text shows.
    """
    with pytest.raises(case.error) as caught:
        case.call()
    message = str(caught.value)
    assert case.words in message, message
    assert_clear(message)


def assert_clear(message: str) -> None:
    """No text of our internals or torch's is shown."""
    shown = [text for text in _INTERNAL if text in message]
    assert not shown, f"{shown} in: {message}"


def tried() -> dict[str, int]:
    """How many bad inputs each module of this package holds."""
    doors = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return {door.__name__.rpartition(".")[2]: len(door.CASES) for door in doors}
