"""Cases that CI has no time for: with FLASH4_TEST_ALL=1 in the environment tests run all of theirs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")

EVERYTHING = bool(os.environ.get("FLASH4_TEST_ALL"))


def one_of(number: int, cases: Sequence[Case]) -> list[Case]:
    """The first of every `number` cases, or all of them."""
    return list(cases if EVERYTHING else cases[::number])


def examples(few: int, all_of_them: int) -> int:
    """How many examples hypothesis generates. The first one is the simplest, often one number of each."""
    return all_of_them if EVERYTHING else few
