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
    def time_ratios(self) -> list[float]:
        """Quartiles of the time of a swapped step over that of the adjacent stock step."""
        ratios = [a / b for a, b in zip(self.swapped.steps_ms, self.stock.steps_ms, strict=True)]
        quartiles: list[float] = torch.tensor(ratios).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        return quartiles

    @property
    def speed(self) -> str:
        low, median, high = self.time_ratios
        return f"{self.run.mode:<8}  dropout {self.run.dropout:<4}  {median:.2f} [{low:.2f}, {high:.2f}]"

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
    """Plots the loss curves of each pair, stock under swapped, next to the ratios of their step times."""
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    panels = figure.subplot_mosaic([["0", "1", "times"], ["2", "3", "times"]], width_ratios=[1, 1, 1.1])
    for i, comparison in enumerate(comparisons):
        _plot_losses(panels[str(i)], comparison)
    _plot_time_ratios(panels["times"], comparisons)
    millions = comparisons[0].stock.parameters / 1e6
    figure.suptitle(
        f"{setup.model}, {millions:.1f} M parameters, batches of {setup.batch} x {setup.context} tokens,"
        " with stock and with swapped attention"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _plot_losses(axes: Axes, comparison: Comparison) -> None:
    axes.plot(comparison.stock.losses, color=STOCK, linewidth=5, label="stock")
    axes.plot(comparison.swapped.losses, color=SWAPPED, linewidth=1.2, label="swapped")
    axes.set_title(f"{comparison.run.mode}, dropout {comparison.run.dropout}")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, title=f"{comparison.measure}:\n{comparison.difference:.1e}")


def _plot_time_ratios(axes: Axes, comparisons: list[Comparison]) -> None:
    """Plots quartiles as a bar with a mark at the median, and the medians of both in ms below."""
    axes.axhline(1.0, color=STOCK, linewidth=3, label="stock")
    for place, comparison in enumerate(comparisons):
        low, median, high = comparison.time_ratios
        label = "swapped" if place == 0 else None
        axes.bar(place, high - low, 0.3, low, color=SWAPPED, alpha=0.35, label=label)
        axes.hlines(median, place - 0.15, place + 0.15, color=SWAPPED, linewidth=2.5)
        axes.annotate(f"{median:.2f}", (place + 0.18, median), va="center")
    axes.set_xticks(range(len(comparisons)), [_times_label(comparison) for comparison in comparisons])
    axes.set_xlim(-0.5, len(comparisons) - 0.25)
    axes.margins(y=0.2)
    axes.set_title("time of a training step, median and quartiles")
    axes.set_ylabel("swapped / stock, of steps side by side")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)


def _times_label(comparison: Comparison) -> str:
    times = f"{comparison.stock.step_ms:.3g}, {comparison.swapped.step_ms:.3g} ms"
    return f"{comparison.run.mode}\ndropout {comparison.run.dropout}\n{times}"
