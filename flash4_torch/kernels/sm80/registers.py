"""Registers of a thread, where all have as many."""

from __future__ import annotations

from typing import NamedTuple

_REGISTERS, _MOST_OF_THREAD = 65536, 255


class Registers(NamedTuple):
    """Registers that a thread may have."""

    thread: int


def registers_of_threads(threads: int) -> Registers:
    """Registers of a thread of a CTA that has an SM to itself."""
    return Registers(min(_REGISTERS // threads // 8 * 8, _MOST_OF_THREAD))
