"""Plots of results as PNG, one figure per section."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .report import Row

_COLORS = {"flash4": "#b3401f", "torch": "#8fb3d9", "sdpa": "#8fb3d9"}
_OTHERS = ("#6b8e6b", "#c9a45c", "#8c7aa9", "#4f7f94", "#a3a3a3")


def draw(results: dict[str, list[Row]], folder: Path) -> None:
    """Writes `folder`/<section>.png for every section."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in results.items():
        _FIGURES[name](rows).savefig(folder / f"{name}.png", dpi=120)


def _speeds(rows: list[Row]) -> Figure:
    groups = _grouped(rows, lambda r: (r["dtype"], r["D"], r["Hq"] // r["Hk"], r["causal"]))
    names = list(dict.fromkeys(name for r in rows for name in r["tflops"]))
    columns = 4
    height = -(-len(groups) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.7 * height), layout="constrained")
    panels = figure.subplots(height, columns, squeeze=False).flat
    for axes, ((dtype, D, gqa, causal), group) in zip(panels, groups.items(), strict=False):
        for i, name in enumerate(names):
            points = [(r["S"], r["tflops"][name]) for r in group if name in r["tflops"]]
            axes.plot([S for S, _ in points], [y for _, y in points], "o-", color=_color(name, i), label=name)
        axes.plot([r["S"] for r in group], [r["roof_tflops"] for r in group], "k:", label="roof")
        heads = f", GQA {gqa}" if gqa > 1 else ""
        axes.set_title(f"{dtype}, D={D}{heads}, {'causal' if causal else 'full'}", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("S")
        axes.set_ylabel("TFLOP/s")
        axes.grid(alpha=0.3)
    labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=len(names) + 1, frameon=False)
    return figure


def _memory(rows: list[Row]) -> Figure:
    groups = _grouped(rows, lambda r: (r["direction"], r["provider"]))
    figure = Figure(figsize=(11, 8), layout="constrained")
    for axes, ((direction, provider), group) in zip(
        figure.subplots(2, 2, sharex=True, sharey=True).flat, groups.items(), strict=False
    ):
        for row in group:
            label = f"{row['feature']}: S^{row['exponent']:.2f}"
            axes.plot(row["S"], row["peak_mib"], "o-", label=label)
        axes.set_title(f"{provider}, {direction}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("S")
        axes.set_ylabel("peak MiB on top of the inputs")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    return figure


def _features(rows: list[Row]) -> Figure:
    groups = _grouped(rows, lambda r: (r["dtype"], r["D"], r["S"], r["direction"]))
    figure = Figure(figsize=(5.5 * len(groups), 4), layout="constrained")
    for axes, ((dtype, D, S, direction), group) in zip(
        figure.subplots(1, len(groups), squeeze=False).flat, groups.items(), strict=True
    ):
        _pairs(axes, [r["feature"] for r in group], group)
        axes.set_title(f"{dtype}, D={D}, S={S}, {direction}")
    return figure


def _host(rows: list[Row]) -> Figure:
    groups = _grouped(rows, lambda r: r["mode"])
    figure = Figure(figsize=(3.6 * len(groups), 4), layout="constrained")
    for axes, (mode, group) in zip(
        figure.subplots(1, len(groups), squeeze=False).flat, groups.items(), strict=True
    ):
        names = [r["call"] for r in group]
        bars = axes.bar(
            range(len(names)), [1e6 * r["seconds"]["median"] for r in group], color=_COLORS["flash4"]
        )
        bars[names.index("F.scaled_dot_product_attention")].set_color(_COLORS["torch"])
        axes.bar_label(bars, fmt="%.0f")
        axes.margins(y=0.1)
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
        axes.set_title(mode, fontsize=9)
        axes.set_ylabel("µs a call")
    return figure


def _module(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    times, peaks = figure.subplots(1, 2)
    _pairs(times, [r["case"] for r in rows], rows)
    for shift, who in ((-0.2, "torch"), (0.2, "flash4")):
        places = [place + shift for place in range(len(rows))]
        peaks.bar(places, [r["peak_mib"][who] for r in rows], 0.38, color=_COLORS[who], label=who)
    peaks.set_xticks(range(len(rows)), [r["case"] for r in rows], rotation=30, ha="right")
    peaks.set_ylabel("peak MiB on top of the inputs")
    return figure


def _emulator(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = {
        "instructions": "million warp instructions a second",
        "mma_flops": "MFLOP/s of the tensor cores",
    }
    for axes, (count, label) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        shown = [row for row in rows if bool(row["mma_flops"]) == (count == "mma_flops")]
        for shift, who in ((-0.2, "races off"), (0.2, "races on")):
            places = [place + shift for place in range(len(shown))]
            speeds = [1e-6 * row[count] / row["seconds"][who]["median"] for row in shown]
            axes.bar(places, speeds, 0.38, label=who)
        axes.set_xticks(range(len(shown)), [row["kernel"] for row in shown], rotation=30, ha="right")
        axes.set_ylabel(label)
        axes.legend(frameon=False)
    return figure


def _pairs(axes: Axes, labels: list[str], rows: list[Row]) -> None:
    """Bars with the times of torch and ours side by side."""
    for shift, who in ((-0.2, "torch"), (0.2, "flash4")):
        places = [place + shift for place in range(len(rows))]
        times = [1e3 * r["seconds"][who]["median"] for r in rows]
        axes.bar(places, times, 0.38, color=_COLORS[who], label=who)
    axes.set_xticks(range(len(rows)), labels, rotation=30, ha="right")
    axes.set_ylabel("median ms")
    axes.legend(frameon=False)


def _grouped(rows: Iterable[Row], key: Callable[[Row], tuple[object, ...] | str]) -> dict:
    groups: dict = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _color(provider: str, index: int) -> str:
    return _COLORS.get(provider, _OTHERS[index % len(_OTHERS)])


_FIGURES: dict[str, Callable[[list[Row]], Figure]] = {
    "forward": _speeds,
    "backward": _speeds,
    "features": _features,
    "memory": _memory,
    "host": _host,
    "module": _module,
    "emulator": _emulator,
}
