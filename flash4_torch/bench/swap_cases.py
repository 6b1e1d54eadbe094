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
SELF = "self"
WAYS = (
    SELF,
    "sequence-first",
    "unbatched",
    "cross",
    "shared-qk",
    "apart",
    "widths",
    "autocast",
    "autocast-cross",
)
"""Ways to call the module: self-attention of batches; the same with `batch_first=False`, and without a batch;
over half as many keys of another tensor; with another tensor for the values; with three tensors, also of
three widths; float32 under autocast to bfloat16."""

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
    way: str = SELF

    @property
    def is_cast(self) -> bool:
        return self.way.startswith("autocast")

    def row(self) -> Row:
        """The fields by which `--cells` selects and a row is known."""
        size = {"E": self.size.E, "H": self.size.H, "B": self.size.B, "S": self.size.S}
        return {name: value for name, value in self._asdict().items() if name != "size"} | size


def grid(settings: Settings) -> Iterator[SwapCase]:
    """The cells that `settings` select; what takes longest comes last.

    Dropout does nothing in evaluation, so there are no such cells. Each compiled cell takes two compilations:
    unless the selection says which are wanted, they are measured at the first size, in the device's usual
    dtype. So are other ways than self-attention, and those without a mask and not compiled.
    """
    for case in _all(settings):
        if (
            settings.selection.takes(case.row())
            and (case.mode == "training" or case.dropout == "0")
            and (not settings.quick or case.dtype == _usual(settings))
            and (not case.compiled or _is_unasked(case, settings) or _asks_for("compiled", settings))
            and (case.way == SELF or _is_way_unasked(case, settings) or _asks_for("way", settings))
            and (not case.is_cast or case.dtype == "float32")
        ):
            yield case


def _all(settings: Settings) -> Iterator[SwapCase]:
    for way in WAYS:
        for values in itertools.product(
            (False, True), sizes(settings), DTYPES, MODES, MASKS, DROPOUTS, (False, True)
        ):
            yield SwapCase(*values, way=way)


def sizes(settings: Settings) -> tuple[Size, ...]:
    known = GPU_SIZES if settings.on_gpu else CPU_SIZES
    return known[:_QUICK_SIZES] if settings.quick else known


def _usual(settings: Settings) -> str:
    return dtype_name(usual_dtype(settings.device))


def _is_unasked(case: SwapCase, settings: Settings) -> bool:
    usual = "float32" if case.is_cast else _usual(settings)
    return not settings.quick and case.size == sizes(settings)[0] and case.dtype == usual


def _is_way_unasked(case: SwapCase, settings: Settings) -> bool:
    return _is_unasked(case, settings) and case.mask == "none" and not case.compiled


def _asks_for(name: str, settings: Settings) -> bool:
    return name in settings.selection.wanted
