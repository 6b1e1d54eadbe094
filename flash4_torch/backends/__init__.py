"""Backends serve attention calls; `choose` picks one, and `reasons` says why the others cannot."""

from .base import (
    ALIGNMENT,
    AddsParts,
    Backend,
    BackwardLaunch,
    DqSums,
    Launch,
    Order,
    Prepares,
    Results,
    RunningOut,
    Shares,
)
from .dispatch import (
    PRIORITY,
    announce,
    choose,
    excluding,
    first,
    is_plain,
    observers,
    own_backend,
    reasons,
)

__all__ = [
    "ALIGNMENT",
    "PRIORITY",
    "AddsParts",
    "Backend",
    "BackwardLaunch",
    "DqSums",
    "Launch",
    "Order",
    "Prepares",
    "Results",
    "RunningOut",
    "Shares",
    "announce",
    "choose",
    "excluding",
    "first",
    "is_plain",
    "observers",
    "own_backend",
    "reasons",
]
