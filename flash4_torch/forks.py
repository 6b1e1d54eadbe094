"""Locks that outlive a fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Lock:
    """A lock that a forked child finds open, whoever held it in the parent: the thread that would open it has
    no copy there.
    """

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """A thread that forks in here closes in the child what it has opened, the lock from before."""
        with self._lock:
            yield
