"""The grid of section `swap`: every kind of call of a module that a user may have before a swap."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from .module import Size
from .report import Row, dtype_name
from .settings import Settings, usual_dtype

MODES = ("training", "evaluation")
DTYPES = ("float32", "bfloat16", "float16")
MASKS = ("none", "causal", "padding", "padding+causal", "float", "bool")
DROPOUTS = ("0", "0.1")

GPU_SIZES = (
    Size(512, 8, 1, 128),
    Size(256, 4, 64, 64),
    Size(768, 12, 16, 512),
    Size(1024, 16, 8, 2048),
    Size(2048, 16, 2, 4096),
)
CPU_SIZES = (
    Size(512, 8, 1, 128),
    Size(64, 2, 1, 16),
    Size(256, 4, 8, 256),
    Size(512, 8, 4, 512),
    Size(768, 12, 2, 1024),
)
_QUICK_SIZES = 2


class SwapCase(NamedTuple):
    """One cell of the grid."""

    compiled: bool
    size: Size
    dtype: str
    mode: str
    mask: str
    dropout: str
    need_weights: bool

    def row(self) -> Row:
        """The fields by which `--cells` selects and a row is known."""
        size = {"E": self.size.E, "H": self.size.H, "B": self.size.B, "S": self.size.S}
        return {name: value for name, value in self._asdict().items() if name != "size"} | size


def grid(settings: Settings) -> Iterator[SwapCase]:
    """The cells that `settings` select; what takes longest comes last.

    Dropout does nothing in evaluation, so there are no such cells. Each compiled cell takes two compilations:
    unless the selection says which are wanted, they are measured at the first size, in the device's usual
    dtype.
    """
    for values in itertools.product(
        (False, True), sizes(settings), DTYPES, MODES, MASKS, DROPOUTS, (False, True)
    ):
        case = SwapCase(*values)
        if (
            settings.selection.takes(case.row())
            and (case.mode == "training" or case.dropout == "0")
            and (not settings.quick or case.dtype == _usual(settings))
            and (not case.compiled or _is_compiled_unasked(case, settings) or _asks_for_compiled(settings))
        ):
            yield case


def sizes(settings: Settings) -> tuple[Size, ...]:
    known = GPU_SIZES if settings.on_gpu else CPU_SIZES
    return known[:_QUICK_SIZES] if settings.quick else known


def _usual(settings: Settings) -> str:
    return dtype_name(usual_dtype(settings.device))


def _is_compiled_unasked(case: SwapCase, settings: Settings) -> bool:
    return not settings.quick and case.size == sizes(settings)[0] and case.dtype == _usual(settings)


def _asks_for_compiled(settings: Settings) -> bool:
    return "compiled" in settings.selection.wanted
