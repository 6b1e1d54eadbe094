"""Plots of results as PNG, one figure per section."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from . import swap
from .report import Row, plain

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
    figure, panels = _panels(len(groups))
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


def _panels(number: int, columns: int = 4) -> tuple[Figure, Iterator[Axes]]:
    """A figure with room for that many small plots, and their axes."""
    height = -(-number // columns)
    figure = Figure(figsize=(3.6 * columns, 2.7 * height), layout="constrained")
    return figure, iter(figure.subplots(height, columns, squeeze=False).flat)


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


def _models(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(9, 5), layout="constrained")
    _pairs(figure.subplots(), [f"{r['model']}\n{r['mode']}" for r in rows], rows)
    return figure


def _context(rows: list[Row]) -> Figure:
    timed = [row for row in rows if "efficiency" in row]
    profiled = [row for row in timed if any(row.get("overlap", {}).get("spans", {}).values())]
    groups = _grouped(timed, lambda r: (r["direction"], r["D"]))
    ways = list(dict.fromkeys((row["how"], row["ranks"]) for row in timed))
    names, counts = (list(dict.fromkeys(x)) for x in zip(*ways, strict=True))
    heights = [3.0] * -(-len(groups) // 2) + ([1.4] if profiled else [])
    figure = Figure(figsize=(11, sum(heights) + 0.8), layout="constrained")
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    for i, ((direction, D), group) in enumerate(groups.items()):
        axes = figure.add_subplot(grid[i // 2, i % 2])
        for how, ranks in ways:
            points = [(r["S"], r["efficiency"]) for r in group if (r["how"], r["ranks"]) == (how, ranks)]
            line = ("--" if "torch" in how else "-") + "os^Dv"[counts.index(ranks) % 5]
            color = colormaps["tab10"](names.index(how) % 10)
            label = f"{how}, {ranks} ranks"
            axes.plot(*zip(*points, strict=True) if points else ((), ()), line, color=color, label=label)
        axes.set_title(f"{direction}, D={D}", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("S")
        axes.set_ylabel("efficiency")
        axes.grid(alpha=0.3)
    if profiled:
        _timeline(figure.add_subplot(grid[-1, :]), max(profiled, key=_shows_messages))
    labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _shows_messages(row: Row) -> tuple[bool, float]:
    """Whether a row has hops under which messages can hide, and for what share of the call they did."""
    return row["how"] == "ring", row["overlap"]["hidden_ms"] / row["seconds"]


def _timeline(axes: Axes, row: Row) -> None:
    """When the GPU of the first rank computed, and when messages ran."""
    colors = {"messages": "#b3401f", "computation": "#8fb3d9"}
    spans = row["overlap"]["spans"]
    for place, (kind, found) in enumerate(spans.items()):
        bars = [(start / 1e3, (stop - start) / 1e3) for start, stop in found]
        axes.broken_barh(bars, (place - 0.4, 0.8), color=colors[kind])
    axes.set_yticks(range(len(spans)), list(spans))
    axes.set_xlabel("ms")
    sizes = f"S={row['S']}, D={row['D']}, {row['ranks']} ranks"
    axes.set_title(f"the first rank's GPU in a {row['direction']}, {row['how']}, {sizes}", fontsize=9)


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


_RATIOS = LogNorm(0.5, 2.0)
_REDS_TO_BLUES = colormaps["RdBu"]


def _swap(rows: list[Row]) -> Figure:
    """A heat map for each mode: blue where the swapped module is faster."""
    groups = _grouped(rows, lambda r: r["mode"])
    heights = [len(_kinds(group)) for group in groups.values()]
    columns = max(len(_columns(group)) for group in groups.values())
    size = (max(7.0, 3.0 + 0.55 * columns), 1.0 + sum(1.1 + 0.24 * height for height in heights))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=[h + 4 for h in heights]).flat
    for axes, (mode, group) in zip(panels, groups.items(), strict=True):
        _heat_map(axes, group)
        axes.set_ylabel(mode, fontsize=11, fontweight="bold")
    timed = sum(row["state"] == swap.TIMED for row in rows)
    slow = sum(map(swap.fails, rows))
    figure.suptitle(
        "nn.MultiheadAttention: stock's time over the swapped module's, blue where the swap is faster\n"
        f"{timed} of {len(rows)} cells timed, {slow} below {swap.LIMIT} or wrong (framed); "
        "?: either side is possible; -: left out",
        fontsize=10,
    )
    return figure


def _heat_map(axes: Axes, rows: list[Row]) -> None:
    """Ratios by kind of call, and by how it runs, dtype and size."""
    kinds, columns = _kinds(rows), _columns(rows)
    for row in rows:
        x, y = columns.index(_column(row)), kinds.index(_kind(row))
        text, color = _shown(row)
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", linewidth=0.5))
        dark = sum(weight * channel for weight, channel in zip((0.3, 0.6, 0.1), color, strict=False)) < 0.5
        axes.text(
            x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7, color="white" if dark else "black"
        )
        if swap.fails(row):
            frame = Rectangle((x + 0.04, y + 0.06), 0.92, 0.88, fill=False, edgecolor="black", linewidth=1.2)
            axes.add_patch(frame)
    for x, (*kind, _) in enumerate(columns):
        if x == 0 or kind != list(columns[x - 1][:2]):
            axes.axvline(x, color="black", linewidth=1)
            how, dtype = kind
            axes.text(x + 0.1, -0.25, f"{dtype}\n{how}", fontsize=8)
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(kinds), 0)
    axes.set_xticks([x + 0.5 for x in range(len(columns))], [c[-1].replace(" ", "\n") for c in columns])
    axes.set_xlabel("embed_dim / heads, batch x sequence", fontsize=8)
    axes.set_yticks([y + 0.5 for y in range(len(kinds))], kinds)
    axes.tick_params(axis="x", labelsize=7, length=0)
    axes.tick_params(axis="y", labelsize=8, length=0)
    axes.spines[:].set_visible(False)


def _shown(row: Row) -> tuple[str, tuple[float, float, float, float]]:
    """A cell's text and colour."""
    if row["state"] != swap.TIMED:
        return ("-" if row["state"] == swap.LEFT_OUT else "wrong"), (0.9, 0.9, 0.9, 1.0)
    ratio = swap.ratio_of(row).median
    uncertain = "?" if swap.mark(row) == "?" else ""
    return f"{ratio:.2f}{uncertain}", _REDS_TO_BLUES(float(_RATIOS(min(max(ratio, 0.5), 2.0))))


def _kinds(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(map(_kind, rows)))


def _kind(row: Row) -> str:
    dropout = f", dropout {row['dropout']}" if row["dropout"] != "0" else ""
    weights = ", weights" if row["need_weights"] else ""
    return f"{'no' if row['mask'] == 'none' else plain(row['mask'])} mask{dropout}{weights}"


def _columns(rows: list[Row]) -> list[tuple[str, str, str]]:
    """How, dtype and size of each column, the sizes of one dtype together."""
    found = list(dict.fromkeys(map(_column, rows)))
    kinds = list(dict.fromkeys(column[:2] for column in found))
    return sorted(found, key=lambda column: kinds.index(column[:2]))


def _column(row: Row) -> tuple[str, str, str]:
    return "compiled" if row["compiled"] else "eager", row["dtype"], swap.size_of(row)


def _decode(rows: list[Row]) -> Figure:
    groups = _grouped(rows, lambda r: (r["Hq"], r["Hk"], r["D"], r["Sq"], r["B"]))
    names = list(dict.fromkeys(name for r in rows for name in r["tbs"] if "float8" not in name))
    figure, panels = _panels(len(groups))
    for axes, ((Hq, Hk, D, Sq, B), group) in zip(panels, groups.items(), strict=False):
        for i, name in enumerate(names):
            points = [(r["S"], r["tbs"][name]) for r in group if name in r["tbs"]]
            style = "o-" if name in _COLORS else "o--"
            axes.plot(
                [S for S, _ in points], [y for _, y in points], style, color=_color(name, i), label=name
            )
        axes.plot([r["S"] for r in group], [r["copy_tbs"] for r in group], "k:", label="copy")
        axes.set_title(f"{Hq}/{Hk} heads, D={D}, {B} x {Sq} tokens", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("keys")
        axes.set_ylabel("TB/s of K and V")
        axes.grid(alpha=0.3)
    labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=len(names) + 1, frameon=False)
    return figure


def _flex(rows: list[Row]) -> Figure:
    groups = _grouped(rows, lambda r: (r["direction"], r["D"], r["S"]))
    figure, panels = _panels(len(groups), columns=2)
    for axes, ((direction, D, S), group) in zip(panels, groups.items(), strict=False):
        names = list(dict.fromkeys(name for r in group for name in r["ratios"]))
        width = 0.8 / max(len(names), 1)
        for i, name in enumerate(names):
            shown = {x: r["ratios"][name]["median"] for x, r in enumerate(group) if name in r["ratios"]}
            places = [x + i * width for x in shown]
            axes.bar(places, list(shown.values()), width, color=_OTHERS[i % len(_OTHERS)], label=name)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(group)), [r["mod"] for r in group], rotation=60, ha="right", fontsize=6)
        axes.set_title(f"{direction}, D={D}, S={S}", fontsize=9)
        axes.set_ylabel("time over ours")
        axes.legend(frameon=False, fontsize=7)
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
    "swap": _swap,
    "decode": _decode,
    "models": _models,
    "context": _context,
    "flex": _flex,
}
