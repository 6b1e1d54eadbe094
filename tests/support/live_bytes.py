"""Bytes that are allocated on a CPU while a call runs, seen without an observer of torch's operators."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_NAMES = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo2(ctypes.Structure):
    """glibc's struct of that name."""

    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES]


def can_be_counted() -> bool:
    """Whether the C library tells what is allocated: glibc 2.33 or later."""
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallinfo2")


def peak_of(call: Callable[[], Any], file: str, forget: Callable[[], None]) -> int:
    """The most bytes above those before the call, at any line of files whose path ends so.

    forget: drops what a test alone keeps alive; it runs before each count.
    """
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo2
    counts: list[int] = []

    def count() -> None:
        forget()
        found = mallinfo()
        counts.append(found.uordblks + found.hblkhd)

    def at_line(frame: FrameType, event: str, argument: Any) -> Any:
        count()
        return at_line

    def at_call(frame: FrameType, event: str, argument: Any) -> Any:
        return at_line if frame.f_code.co_filename.endswith(file) else None

    count()
    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        call()
    finally:
        sys.settrace(before)
    return max(counts) - counts[0]
