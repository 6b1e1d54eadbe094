"""Sections `forward` and `backward`: ours against every peer, cell by cell, relative to the cell's roof.

In a script, `compare_cell` also times variants of one kernel against each other:

    q, k, v, _ = cell.inputs("cuda")
    row = compare_cell(cell, {"one": lambda: one(q, k, v), "other": lambda: other(q, k, v)}, Settings("cuda"))
    print(speeds.table_of([row]))
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import backends, env
from ..testing import backends_used
from . import gpu, providers, speeds
from .cases import Cell, Roof, cells, measure_roof
from .providers import Provider
from .report import Row
from .settings import Settings
from .timing import Call, compare

_ROUNDS, _ROUNDS_IF_LONG, _LONG = 6, 3, 16384

_TOLERANCE = 0.02
"""Norm of the difference of two results over the norm of one; bfloat16 rounding uses a quarter of it."""


@dataclass(frozen=True)
class Peers:
    """The section of one direction, 'forward' or 'backward'."""

    direction: str

    @property
    def TITLE(self) -> str:
        return f"attention, {self.direction}: TFLOP/s, and ours over the best peer's"

    def measure(self, settings: Settings) -> Iterator[Row]:
        """One row per cell. Roofs are measured before and after all cells; the higher one counts."""
        chosen = cells(settings) if settings.selection.takes({"direction": self.direction}) else []
        dtypes = {cell.dtype for cell in chosen}
        found, missing = providers.available(settings.device)
        before = {dtype: measure_roof(dtype, settings) for dtype in dtypes}
        with _forced(own_backend(settings)):
            rows = [self._row(cell, found, settings) for cell in chosen]
        after = {dtype: measure_roof(dtype, settings) for dtype in dtypes}
        for cell, row in zip(chosen, rows, strict=True):
            row["left_out"] |= missing
            yield row | under_roof(cell, self.direction, before[cell.dtype], after[cell.dtype])

    def _row(self, cell: Cell, found: Mapping[str, Provider], settings: Settings) -> Row:
        entry = prepare(found, cell, self.direction, settings.device)
        row = compare_cell(cell, entry.calls, settings, self.direction)
        print(speeds.line(row), file=sys.stderr, flush=True)
        return row | {"left_out": entry.left_out, "served_by": entry.served_by, "gpu": gpu.state()}

    def text(self, rows: list[Row]) -> str:
        return speeds.report(rows)


def own_backend(settings: Settings) -> str:
    """The backend of our own kernels for this GPU; empty if there is none, and dispatch chooses."""
    if not settings.on_gpu:
        return ""
    return backends.own_backend(torch.cuda.get_device_capability())


@contextmanager
def _forced(backend: str) -> Iterator[None]:
    before = env.change({env.BACKEND.name: backend} if backend else {})
    try:
        yield
    finally:
        env.change(before)


@dataclass(frozen=True)
class Entry:
    """The calls of the providers that serve a cell, the reasons why others do not, and our backends."""

    calls: dict[str, Call]
    left_out: dict[str, str]
    served_by: dict[str, str]


def prepare(found: Mapping[str, Provider], cell: Cell, direction: str, device: str) -> Entry:
    """Makes the inputs and runs every provider once.

    A provider that fails is left out, and so is one whose result differs from the reference: the result of
    the last provider that works, one of torch's.
    """
    inputs = cell.inputs(device)
    expected: tuple[Tensor, ...] = ()
    entry = Entry({}, {}, {})
    for name, provider in reversed(list(found.items())):
        try:
            with backends_used() as used, warnings.catch_warnings():
                # torch warns at length why a forced backend does not serve.
                warnings.simplefilter("ignore")
                call = provider.prepare(cell, direction, inputs)
                result = call()
            _refuse_difference(result, expected or result)
            expected = expected or result
        # Peers raise errors of any type.
        except Exception as error:
            entry.left_out[name] = providers.sentence(error)
        else:
            entry.calls[name] = call
            entry.served_by.update(used.keys())
    return replace(entry, calls={name: entry.calls[name] for name in found if name in entry.calls})


def _refuse_difference(result: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(result, expected, strict=True):
        difference = float((one.float() - other.float()).norm() / other.float().norm())
        # Written so that NaN is refused too.
        if not difference <= _TOLERANCE:
            raise ArithmeticError(f"its result differs from the others' by {difference:.2g}")


def compare_cell(
    cell: Cell, contenders: Mapping[str, Call], settings: Settings, direction: str = "forward"
) -> Row:
    """Times calls that all compute `cell`, alternating between them.

    Returns the cell's fields and, by contender: `seconds` with quartiles, `tflops` of the median, and
    `ratios`, the first contender's speed over this one's, computed round by round.
    """
    rounds = settings.rounds
    if settings.on_gpu and not rounds:
        rounds = _ROUNDS_IF_LONG if cell.S >= _LONG else _ROUNDS
    result = compare(contenders, replace(settings, rounds=rounds))
    work = cell.flops(direction)
    first = next(iter(contenders), "")
    return {
        **cell.case(),
        "direction": direction,
        "seconds": {name: seconds._asdict() for name, seconds in result.seconds.items()},
        "tflops": {name: work / seconds.median / 1e12 for name, seconds in result.seconds.items()},
        "ratios": {name: result.ratio(name, first)._asdict() for name in contenders},
    }


def under_roof(cell: Cell, direction: str, before: Roof, after: Roof) -> Row:
    """The fields of a cell's row that describe its roof."""
    roof = Roof(*map(max, zip(before, after, strict=True)))
    return {
        "roof_tflops": roof.flops(cell, direction) / 1e12,
        "matmul_tflops": [before.matmul / 1e12, after.matmul / 1e12],
        "copy_tbs": [before.copy / 1e12, after.copy / 1e12],
    }
