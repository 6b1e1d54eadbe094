"""Text of sections `forward` and `backward`: the table of their rows, the means, the roofs, the remarks."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .providers import OURS
from .report import Row, table


def best_peer(row: Row) -> str:
    """Name of the fastest contender except ours; empty if there is none."""
    return max(row["tflops"].keys() - {OURS}, key=row["tflops"].__getitem__, default="")


def versus_best(row: Row) -> dict[str, float] | None:
    """Our speed over the best peer's, with quartiles; None if one of the two is missing."""
    return row["ratios"].get(best_peer(row)) if OURS in row["tflops"] else None


def report(rows: list[Row]) -> str:
    """The full text for a section's rows."""
    names = _contenders(rows)
    head = [*_CASE, *names, "best peer", "ratio", "quartiles", "roof", "of roof"]
    lines = [[*_case(row), *_speeds(row, names), *_verdict(row)] for row in rows]
    return "\n".join([table(head, lines), *means(rows), *_roofs(rows), *_remarks(rows)])


def table_of(rows: list[Row]) -> str:
    """A table of the speeds only, in TFLOP/s, for contenders of any name; the last column is the fastest."""
    names = _contenders(rows)
    lines = [
        [*_case(row), *_speeds(row, names), max(row["tflops"], key=row["tflops"].__getitem__)] for row in rows
    ]
    return table([*_CASE, *names, "fastest"], lines)


def line(row: Row) -> str:
    """One row in one line, to follow a run."""
    case = " ".join(f"{name}={value}" for name, value in zip(_CASE, _case(row), strict=True))
    return f"  {case}: {', '.join(f'{name} {_number(speed)}' for name, speed in row['tflops'].items())}"


_CASE = ("dtype", "D", "mask", "S", "BxHq/Hk")


def _case(row: Row) -> list[Any]:
    mask = "causal" if row["causal"] else "full"
    if row["window"] is not None:
        mask = f"window {row['window']}"
    return [row["dtype"], row["D"], mask, row["S"], f"{row['B']}x{row['Hq']}/{row['Hk']}"]


def _contenders(rows: list[Row]) -> list[str]:
    """Contenders in the order of the first row that has them."""
    return list(dict.fromkeys(name for row in rows for name in row["tflops"]))


def _speeds(row: Row, names: list[str]) -> list[str]:
    return [_number(row["tflops"][name]) if name in row["tflops"] else "" for name in names]


def _number(speed: float) -> str:
    return f"{speed:.1f}" if speed >= 10 else f"{speed:.4g}"


def _verdict(row: Row) -> list[str]:
    ratio, ours = versus_best(row), row["tflops"].get(OURS)
    return [
        best_peer(row),
        f"{ratio['median']:.3f}" if ratio else "",
        f"{ratio['low']:.3f} to {ratio['high']:.3f}" if ratio else "",
        _number(row["roof_tflops"]),
        f"{ours / row['roof_tflops']:.0%}" if ours else "",
    ]


def means(rows: list[Row]) -> list[str]:
    """Geometric means of the ratios by D (GQA separate) and overall, and how many cells are at 1 or more."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        ratio = versus_best(row)
        if ratio:
            gqa = f" GQA {row['Hq'] // row['Hk']}" if row["Hq"] != row["Hk"] else ""
            groups.setdefault(f"D {row['D']}{gqa}", []).append(ratio["median"])
    every = [ratio for ratios in groups.values() for ratio in ratios]
    if not every:
        return []
    parts = [_mean(name, ratios) for name, ratios in [*groups.items(), ("all", every)]]
    ahead = sum(ratio >= 1 for ratio in every)
    return [
        f"geometric mean of the ratios, ours / best peer: {', '.join(parts)}",
        f"ratio at least 1.00 in {ahead} of {len(every)} cells",
    ]


def _mean(name: str, ratios: list[float]) -> str:
    return f"{name} {statistics.geometric_mean(ratios):.3f}"


def _roofs(rows: list[Row]) -> list[str]:
    """The roofs as measured before and after, once per dtype."""
    measured = {row["dtype"]: (row["matmul_tflops"], row["copy_tbs"]) for row in rows}
    return [
        f"{dtype}: matrix product{_numbers(matmul, 'TFLOP/s')}, copy{_numbers(copy, 'TB/s')}"
        for dtype, (matmul, copy) in measured.items()
    ]


def _numbers(values: list[float], unit: str) -> str:
    return f" {' and '.join(f'{value:.4g}' for value in values)} {unit}" if values else " not measured"


def _remarks(rows: list[Row]) -> list[str]:
    served = _counted(
        f"{operator} by {backend}" for row in rows for operator, backend in row["served_by"].items()
    )
    left_out = _counted(f"{name}: {why}" for row in rows for name, why in row["left_out"].items())
    return [
        *(f"{OURS} served {what}, cells: {count}" for what, count in served),
        *(f"left out {what}, cells: {count}" for what, count in left_out),
    ]


def _counted(remarks: Iterable[str]) -> list[tuple[str, int]]:
    return list(Counter(remarks).items())
