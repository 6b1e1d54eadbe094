"""Locks that outlive a fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Lock:
    """A lock that is free in a forked child, whoever held it in the parent: the thread that would release it
    does not exist there.

    reentrant: whether the thread that holds it may take it again. Default: no.
    """

    def __init__(self, *, reentrant: bool = False) -> None:
        self._make = threading.RLock if reentrant else threading.Lock
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = self._make()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock. If a thread forks inside, its child releases the old lock, which it acquired."""
        with self._lock:
            yield
