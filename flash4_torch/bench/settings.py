"""Settings that all sections of a benchmark run share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..errors import hint
from .report import plain


@dataclass(frozen=True)
class Selection:
    """The cases to measure: the wanted values of a case's fields, as text; bools are 'yes' or 'no'."""

    wanted: Mapping[str, Sequence[str]] = field(default_factory=dict)

    FIELDS = (
        *("D", "causal", "S", "Hk", "dtype", "feature", "direction", "B", "Sq"),
        *("E", "mode", "mask", "dropout", "need_weights", "compiled", "mod", "way"),
    )

    @classmethod
    def parse(cls, words: Sequence[str], known: Mapping[str, Sequence[str]] | None = None) -> Selection:
        """Parses words such as 'S=1024,4096'.

        known: all values of a field; fields not in it take whole numbers. Default: fields take any value.

        Raises:
            ValueError: a word has another form, names no field, or gives a field a value that it cannot have.
        """
        wanted = {}
        for word in words:
            name, equals, values = word.partition("=")
            if not equals or name not in cls.FIELDS:
                raise ValueError(
                    f"{word!r}, but it must be NAME=VALUE,... with one of {', '.join(cls.FIELDS)}"
                )
            wanted[name] = values.split(",")
            limits = [] if known is None else [cls._limit(value, known.get(name)) for value in wanted[name]]
            if limit := next(filter(None, limits), ""):
                raise ValueError(f"{word!r}, but {name} must be {limit}")
        return cls(wanted)

    @staticmethod
    def _limit(value: str, choices: Sequence[str] | None) -> str:
        """The limit that a value violates; empty if it is allowed."""
        if choices is None:
            return "" if re.fullmatch("[0-9]{1,9}", value) else "a whole number"
        return "" if value in choices else f"one of {', '.join(choices)}{hint(value, choices)}"

    def narrowed(self, case: Mapping[str, str]) -> Selection:
        """The same, of which cases with these values are left."""
        return Selection({**self.wanted, **{name: [value] for name, value in case.items()}})

    def takes(self, case: Mapping[str, object]) -> bool:
        """Whether every selected field that the case has contains a wanted value."""
        return all(plain(case[name]) in values for name, values in self.wanted.items() if name in case)


@dataclass(frozen=True)
class Settings:
    """Settings of a run. quick: fewer, smaller cases. clock: 'wall', or 'cpu' for the process's CPU time."""

    device: str = "cpu"
    threads: int = 1
    quick: bool = False
    clock: str = "wall"
    rounds: int | None = None
    """Number of times that each contender is timed in a comparison; None: as often as `budget` allows."""
    selection: Selection = Selection()
    swap_seconds: int = 600
    """Seconds for all cells of section `swap`."""
    max_autotune: bool = False
    """Whether section `flex` times torch's kernels in that mode, too."""

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def budget(self) -> float:
        """Seconds for each comparison."""
        return 0.2 if self.quick else 1.0


def usual_dtype(device: str) -> torch.dtype:
    """The usual dtype of models on a device: bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.startswith("cuda") else torch.float32
