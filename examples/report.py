"""Output of train_text.py: the table, the comparison of the loss curves, the plot, and the raw numbers."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import flash4_torch
from training import Result, Run, Setup

STOCK, SWAPPED = "#8fb3d9", "#b3401f"


@dataclass(frozen=True)
class Comparison:
    """A stock and a swapped run of the same mode and dropout, and the tolerance between them."""

    run: Run
    stock: Result
    swapped: Result
    tolerance: float

    @property
    def measure(self) -> str:
        if self.run.dropout:
            return "difference of final or validation loss"
        return "largest difference of the loss curves"

    @property
    def difference(self) -> float:
        """Largest difference of the curves, step by step; with dropout, whose masks differ, of their ends."""
        if self.run.dropout:
            pairs = [
                (self.stock.final_loss, self.swapped.final_loss),
                (self.stock.validation_loss, self.swapped.validation_loss),
            ]
        else:
            pairs = list(zip(self.stock.losses, self.swapped.losses, strict=True))
        return max(abs(a - b) for a, b in pairs)

    @property
    def step_ratios(self) -> list[float]:
        """Each swapped step's time over that of the stock step beside it."""
        return [a / b for a, b in zip(self.swapped.steps_ms, self.stock.steps_ms, strict=True)]

    @property
    def time_ratios(self) -> list[float]:
        """Quartiles of `step_ratios`."""
        ratios = torch.tensor(self.step_ratios)
        quartiles: list[float] = ratios.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        return quartiles

    @property
    def memory_ratio(self) -> float:
        """Peak memory of the swapped run over that of the stock run, at least one MiB each."""
        return max(1.0, self.swapped.peak_mib) / max(1.0, self.stock.peak_mib)

    @property
    def speed(self) -> str:
        low, median, high = self.time_ratios
        return (
            f"{self.run.mode:<8}  dropout {self.run.dropout:<4}  time {median:.2f} [{low:.2f}, {high:.2f}]"
            f"  memory {self.memory_ratio:.2f}"
        )

    @property
    def name(self) -> str:
        return f"{self.run.mode}, " + (f"dropout {self.run.dropout}" if self.run.dropout else "no dropout")

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        verdict = "agrees" if self.agrees else "DIFFERS"
        return (
            f"{self.run.mode:<8}  dropout {self.run.dropout:<4}  {self.measure:<38}  {self.difference:.1e}"
            f"  allowed {self.tolerance:.0e}  {verdict}"
        )


def table(results: dict[Run, Result], setup: Setup) -> str:
    head = ("mode", "dropout", "attention", "first", "final", "valid.", "ms/step", "tokens/s", "MiB", "calls")
    rows = [head, *(_cells(run, result, setup) for run, result in results.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    legend = (
        "\nfirst, final, valid.: loss in nats a token, final over the last fifth of the steps"
        "\nMiB: peak memory above the idle process"
        "\ncalls: of flash4_torch's attention, forward, in training + validation"
    )
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]]) + legend


def _cells(run: Run, result: Result, setup: Setup) -> tuple[str, ...]:
    losses = (result.losses[0], result.final_loss, result.validation_loss)
    return (
        run.mode,
        str(run.dropout),
        run.attention,
        *(f"{loss:.4f}" for loss in losses),
        f"{result.step_ms:.1f}",
        f"{1e3 * setup.tokens_per_step / result.step_ms:.0f}",
        f"{result.peak_mib:.0f}",
        f"{result.training_calls} + {result.evaluation_calls}",
    )


def save(path: Path, results: dict[Run, Result], setup: Setup) -> None:
    """Saves everything as JSON: versions, the GPU if there is one, the setup, each run's losses and times.

    Files without `steps_ms` in flash4_torch/bench/results are from runs that were made one after another.
    """
    report = {
        "versions": {"torch": torch.__version__, "flash4_torch": flash4_torch.__version__},
        "gpu": torch.cuda.get_device_name() if setup.device == "cuda" else None,
        "setup": asdict(setup),
        "runs": [asdict(run) | asdict(result) for run, result in results.items()],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def plot(path: Path, comparisons: list[Comparison], setup: Setup) -> None:
    """Plots the loss curves of each pair, stock under swapped, next to their step times and memory."""
    figure = Figure(figsize=(14, 7.5), layout="constrained")
    figure.suptitle(headline(comparisons, setup), fontsize=13, fontweight="bold")
    losses, costs = figure.subfigures(1, 2, width_ratios=[1.2, 1])
    panels = losses.subplots(-(-len(comparisons) // 2), 2, sharex=True, sharey=True, squeeze=False)
    for axes, comparison in zip(panels.flat, comparisons, strict=False):
        _plot_losses(axes, comparison)
    losses.supxlabel("step", fontsize=10)
    losses.supylabel("training loss, nats a token", fontsize=10)
    times, memory = costs.subplots(2, 1, height_ratios=[1.3, 1])
    _plot_time_ratios(times, comparisons)
    _plot_memory(memory, comparisons)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="upper left", frameon=False, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def headline(comparisons: list[Comparison], setup: Setup) -> str:
    """What the picture shows, in numbers."""
    millions = comparisons[0].stock.parameters / 1e6
    exact = [comparison.difference for comparison in comparisons if not comparison.run.dropout]
    losses = f"the same losses to {max(exact):.0e}, " if exact else ""
    times = _range([comparison.time_ratios[1] for comparison in comparisons])
    memory = _range([comparison.memory_ratio for comparison in comparisons])
    return (
        f"Attention of a {setup.model} of {millions:.1f} M parameters swapped, "
        f"{setup.batch} x {setup.context} tokens a step:\n"
        f"{losses}{times} of stock's time, {memory} of its memory"
    )


def _range(ratios: list[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low} to {high}"


def _plot_losses(axes: Axes, comparison: Comparison) -> None:
    axes.plot(comparison.stock.losses, color=STOCK, linewidth=5, label="stock")
    axes.plot(comparison.swapped.losses, color=SWAPPED, linewidth=1.2, label="swapped")
    axes.set_title(comparison.name)
    axes.grid(alpha=0.3)
    what = "other dropout masks:\nends differ by" if comparison.run.dropout else "curves differ\nby at most"
    axes.annotate(
        f"{what} {comparison.difference:.0e}", (0.97, 0.95), xycoords="axes fraction", ha="right", va="top"
    )


def _plot_time_ratios(axes: Axes, comparisons: list[Comparison]) -> None:
    """Plots every pair of steps as a dot; quartiles as a box with a mark at the median."""
    places = range(len(comparisons))
    axes.axvline(1.0, color=STOCK, linewidth=4)
    for place, comparison in enumerate(comparisons):
        low, median, high = comparison.time_ratios
        ratios = comparison.step_ratios
        # A fixed scatter: neighbours in time are not neighbours in the plot.
        heights = [place + 0.3 * (((7 * i) % 11) / 10 - 0.5) for i in range(len(ratios))]
        axes.plot(ratios, heights, ".", color=SWAPPED, alpha=0.45, markersize=5, markeredgewidth=0)
        axes.barh(place, high - low, 0.45, low, facecolor="none", edgecolor=SWAPPED, linewidth=1.2)
        axes.vlines(median, place - 0.225, place + 0.225, color=SWAPPED, linewidth=3)
        milliseconds = f"{comparison.stock.step_ms:.3g} to {comparison.swapped.step_ms:.3g} ms"
        axes.annotate(
            f"{median:.2f}  ({milliseconds})", (median, place - 0.27), ha="center", va="bottom", fontsize=9
        )
    axes.set_xlim(*_limits(comparisons))
    axes.set_ylim(len(comparisons) - 0.5, -0.75)
    axes.set_yticks(list(places), [comparison.name.replace(", ", "\n") for comparison in comparisons])
    axes.set_title("time of a step, swapped / stock: dots, quartiles, median")
    axes.set_xlabel("swapped is faster left of 1")
    axes.grid(axis="x", alpha=0.3)


def _limits(comparisons: list[Comparison]) -> tuple[float, float]:
    """Limits of an axis with 1, all quartiles and all but the most extreme dots."""
    ratios = [torch.tensor(comparison.step_ratios) for comparison in comparisons]
    low = min(1.0, *(float(x.quantile(0.03)) for x in ratios))
    high = max(1.0, *(float(x.quantile(0.97)) for x in ratios))
    room = 0.05 * (high - low) + 0.02
    return low - room, high + room


def _plot_memory(axes: Axes, comparisons: list[Comparison]) -> None:
    for shift, who, color in ((-0.2, "stock", STOCK), (0.2, "swapped", SWAPPED)):
        peaks = [getattr(comparison, who).peak_mib for comparison in comparisons]
        bars = axes.barh([place + shift for place in range(len(peaks))], peaks, 0.38, color=color)
        axes.bar_label(bars, fmt=" %.0f", fontsize=9)
    axes.set_yticks(
        range(len(comparisons)), [comparison.name.replace(", ", "\n") for comparison in comparisons]
    )
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_title("peak memory, MiB above the idle process")
    axes.grid(axis="x", alpha=0.3)
