"""`bench --model`: instruction counts of our kernels and upstream's, and a GPU's cycle model of them.

Nothing is timed, and no GPU is needed: the kernels run in the emulator. If upstream is not installed, its
numbers are read from `RECORDED`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from .. import info
from ..errors import BackendError
from . import emulated
from .cases import DIRECTIONS, Cell
from .cycles import MACHINES, UNITS, Cycles, Machine, cycles, flops_per_second
from .emulated import OURS, UPSTREAM
from .instruction_counts import ISSUED, MATH, Counts
from .providers import sentence
from .report import Row, table
from .settings import Settings

RECORDED = Path(__file__).parent / "results" / "blackwell-weights.json"

SCORES = 128 * 128
"""Unit of the tables' numbers: the scores of one tile. The masked half of a causal call is not counted."""


@dataclass(frozen=True)
class Prediction:
    """The section of one machine; a row's numbers are those of whole launches."""

    machine: str

    @property
    def TITLE(self) -> str:
        return f"{self.machine}: weights of attention in the emulator, and a bound: predicted, never timed"

    def measure(self, settings: Settings) -> Iterator[Row]:
        """One row per cell, direction and contender."""
        cases = [
            case
            for case in itertools.product(cells(settings), DIRECTIONS)
            if settings.selection.takes({"direction": case[1]})
        ]
        here = emulated.installed()
        for who, contender in emulated.CONTENDERS.items():
            if who not in here:
                yield from recorded(who, cases)
                continue
            with contender(MACHINES[self.machine].arch) as attend:
                for cell, direction in cases:
                    yield _row(cell, direction, who, attend)

    def text(self, rows: list[Row]) -> str:
        known = sorted((Entry.of(row) for row in rows if "launches" in row), key=lambda entry: entry.order)
        remarks = [_left_out(row) for row in rows if "left_out" in row]
        if any("recorded" in row for row in rows):
            remarks.append(f"{UPSTREAM} is not installed: its numbers are those recorded in {RECORDED.name}")
        machine = MACHINES[self.machine]
        return "\n\n".join(
            filter(None, [counts_table(known), cycles_table(known, machine), "\n".join(remarks)])
        )

    def document(self, rows: list[Row]) -> str:
        """JSON with one row per line: what was run, and the model's prediction for it."""
        machine = MACHINES[self.machine]
        head = {
            "versions": info.versions() | {"flash-attn-4": _upstream_version(rows)},
            "model": {"name": self.machine, **machine._asdict(), "note": "predicted, never timed"},
        }
        lines = [json.dumps(row | _predicted(row, machine)) for row in rows]
        return json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


def _row(cell: Cell, direction: str, who: str, attend: emulated.Attend) -> Row:
    case = {**cell.case(), "direction": direction, "who": who}
    try:
        return case | {"launches": [weight.row() for weight in attend(cell, direction)]}
    except (LookupError, BackendError) as error:
        return case | {"left_out": sentence(error)}


def _upstream_version(rows: list[Row]) -> str:
    if any("recorded" in row for row in rows):
        return str(json.loads(RECORDED.read_text())["versions"]["flash-attn-4"])
    return info.installed("flash-attn-4")


def cells(settings: Settings) -> list[Cell]:
    """The selected cells, with one head each: more heads would repeat the same work."""
    widths, lengths = ((128,), (512,)) if settings.quick else ((64, 128, 256), (512, 1024, 2048))
    cases = itertools.product(widths, (False, True), lengths)
    found = [Cell(D, causal, S, B=1, Hq=1, Hk=1) for D, causal, S in cases]
    return [cell for cell in found if settings.selection.takes(cell.case())]


def recorded(who: str, cases: Sequence[tuple[Cell, str]]) -> Iterator[Row]:
    """The recorded rows of these cells and directions."""
    for row in json.loads(RECORDED.read_text())["rows"]:
        if row["who"] == who and (cell_of(row), row["direction"]) in cases:
            yield row | {"recorded": RECORDED.name}


def cell_of(row: Row) -> Cell:
    """The cell of a row."""
    return Cell(**{field.name: row[field.name] for field in fields(Cell)})


class Entry(NamedTuple):
    """A parsed row."""

    cell: Cell
    direction: str
    who: str
    launches: list[Counts]

    @classmethod
    def of(cls, row: Row) -> Entry:
        launches = [Counts.of_row(launch) for launch in row["launches"]]
        return cls(cell_of(row), row["direction"], row["who"], launches)

    @property
    def case(self) -> tuple[Any, ...]:
        return self.direction, self.cell.D, "causal" if self.cell.causal else "full", self.cell.S

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key: cell by cell, ours first."""
        return DIRECTIONS.index(self.direction), self.cell.D, self.cell.causal, self.cell.S, self.who != OURS

    @property
    def units(self) -> float:
        return self.cell.flops("forward") / (4 * self.cell.D) / SCORES

    def each(self, total: float) -> float:
        """A total divided by the number of units."""
        return total / self.units

    def instructions(self, *classes: str) -> float:
        return self.each(sum(weight.count(*classes) for weight in self.launches))

    def cycles(self, machine: Machine) -> Cycles:
        """Cycles of all launches together, per unit."""
        each = (cycles(weight, machine) for weight in self.launches)
        return Cycles(*(self.each(sum(unit)) for unit in zip(*each, strict=True)))

    def tflops(self, machine: Machine) -> float:
        return flops_per_second(self.cell.flops(self.direction), self.launches, machine) / 1e12


def _predicted(row: Row, machine: Machine) -> dict[str, Any]:
    if "launches" not in row:
        return {}
    entry = Entry.of(row)
    busy = entry.cycles(machine)
    return {
        "cycles": {name: round(value, 1) for name, value in busy._asdict().items()},
        "bottleneck": busy.bottleneck,
        "predicted_tflops": round(entry.tflops(machine), 1),
    }


_CASE = ("direction", "D", "mask", "S")
_WEIGHTS: dict[str, Callable[[Entry], float]] = {
    "MUFU": lambda entry: entry.instructions("mufu"),
    "FMA+ALU": lambda entry: entry.instructions(*MATH),
    "all": lambda entry: entry.instructions(*ISSUED),
    "shared KiB": lambda entry: entry.each(sum(w.shared_bytes for w in entry.launches)) / 1024,
    "MMA MFLOP": lambda entry: entry.each(sum(w.mma_flops for w in entry.launches)) / 1e6,
    "waits": lambda entry: entry.each(sum(sum(w.waits.values()) for w in entry.launches)),
}


def counts_table(entries: list[Entry]) -> str:
    """A table of the counts per unit of scores; in brackets, ours over upstream's."""
    upstream = {entry.case: entry for entry in entries if entry.who == UPSTREAM}
    lines = [
        [*entry.case, entry.who, *(_compared(entry, weight, upstream) for weight in _WEIGHTS.values())]
        for entry in entries
    ]
    title = f"for every {SCORES} scores that are seen; in brackets, {OURS} over {UPSTREAM}"
    return f"{title}\n{table([*_CASE, '', *_WEIGHTS], lines)}"


def _compared(
    entry: Entry, weight: Callable[[Entry], float], upstream: Mapping[tuple[Any, ...], Entry]
) -> str:
    value = weight(entry)
    peer = weight(upstream[entry.case]) if entry.who == OURS and entry.case in upstream else 0.0
    return f"{value:.1f}" + (f" ({value / peer:.2f})" if peer else "")


def cycles_table(entries: list[Entry], machine: Machine) -> str:
    """A table of the cycles that an SM's units need per unit of scores, and of the speed that they allow."""
    lines = []
    for entry in entries:
        busy = entry.cycles(machine)
        speed = f"{entry.tflops(machine):.0f}"
        lines.append([*entry.case, entry.who, *(f"{value:.0f}" for value in busy), busy.bottleneck, speed])
    head = [*_CASE, "", *(f"{unit} cycles" for unit in UNITS), "bottleneck", "predicted TFLOP/s"]
    return f"cycles of an SM for the same; a bound that was never timed\n{table(head, lines)}"


def _left_out(row: Row) -> str:
    mask = "causal" if row["causal"] else "full"
    return f"{row['who']} {row['direction']} D={row['D']} {mask} S={row['S']}: {row['left_out']}"
