"""A kernel by mma.sync for every config of the tables' rows, and a GPU that would run it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle, product
from typing import Any

from flash4_torch.configs import sm80, sm80_backward
from flash4_torch.configs.sizes import BackwardSizes, Sizes
from flash4_torch.configs.types import Features
from kernel_calls import Kernel

LARGE, SMALL, LARGEST = ("sm_80",), ("sm_86", "sm_89", "sm_120a"), ("sm_90a",)
"""Architectures by the SMEM of a CTA; sm_87 and sm_121a run the code of sm_80 and sm_120a. Those with kernels
of their own have the most, for float32 and wide heads."""
_BANDS: tuple[dict[str, Any], ...] = ({}, {"right": True}, {"left": True, "right": True})
_USES: tuple[dict[str, Any], ...] = (
    {},
    {"dropout": True},
    {"mask": "bool"},
    {"mask": "float32", "scaled": True},
    {"softcap": True, "scaled": True},
    {"mask": "bool", "dropout": True},
    {"mask": "float32", "softcap": True, "scaled": True, "dropout": True},
    {"varlen": True},
    {"varlen": True, "dropout": True},
)
Placed = tuple[str, Kernel]
"""An architecture, and a kernel for it."""
_Found = dict[tuple[Any, Any], Kernel]
"""Kernels by row and config."""


def forwards() -> dict[str, Placed]:
    """Kernels by name; none packs heads."""
    placed: dict[str, Placed] = {}
    for archs, table in ((SMALL, sm80.SMALL), (LARGE, sm80.LARGE)):
        found: _Found = {}
        for features in _features((*table.rows, *table.float32)):
            if not table.limits(features):
                for sizes in map(Sizes, (64, 64, 4096, 4096), (4095, 4096) * 2):
                    config = table.forward(features, sizes)
                    found.setdefault((table.row(features, sizes), config), (features, config))
        placed |= _placed(found, archs)
    return placed


def backwards() -> dict[str, Placed]:
    """Kernels by name, some with sums in order."""
    placed: dict[str, Placed] = {}
    rows = [
        row
        for dtype, D in product(("bfloat16", "float32"), (64, 512))
        for row in sm80_backward.rows_of(Features(dtype, D, D))
    ]
    served: set[Kernel] = set()
    tables = (sm80_backward.SMALL, sm80_backward.LARGE, sm80_backward.ON_REQUEST)
    for archs, table in zip((SMALL, LARGE, LARGEST), tables, strict=True):
        found: _Found = {}
        for bare, deterministic in product(_features(rows), (False, True)):
            features = bare._replace(deterministic=deterministic)
            if not table.limits(features):
                for Sk in (4095, 4096):
                    config = table.backward(features, BackwardSizes(Sk))
                    # Of GPUs with kernels of their own what no other table has.
                    if archs is not LARGEST or (features, config) not in served:
                        found.setdefault((table.row(features), config), (features, config))
                    served.add((features, config))
        placed |= _placed(found, archs)
    return placed


def _features(rows: Iterable[Any]) -> Iterator[Features]:
    """Every use of every row's head sizes."""
    heads, dtypes = dict.fromkeys((row.D, row.Dv) for row in rows), cycle(("bfloat16", "float16"))
    for uses, band, (D, Dv) in product(_USES, _BANDS, heads):
        features = Features(next(dtypes), D, Dv)._replace(**uses, **band)
        yield features
        for tf32 in (False, True):
            yield features._replace(dtype="float32", tf32=tf32)


def _placed(found: _Found, archs: tuple[str, ...]) -> dict[str, Placed]:
    """The architectures take turns."""
    turns = enumerate(zip(cycle(archs), found.values()))
    return {
        f"{arch}, {features.dtype}, {features.D} columns, {i}": (arch, (features, config))
        for i, (arch, (features, config)) in turns
    }
