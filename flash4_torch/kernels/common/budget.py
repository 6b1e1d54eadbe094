"""Register budgets by role: tables of a kernel's plan, whose first row that admits the plan applies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Budget(NamedTuple):
    """A row: registers of a thread, by role, for the plans that `when` admits."""

    when: Callable[[Any], object]
    registers: Any
    why: str


def registers_of(plan: Any, table: Iterable[Budget]) -> Any:
    """The registers of the first row that admits the plan."""
    return next(row.registers for row in table if row.when(plan))


def always(plan: Any) -> bool:
    return True
