"""What train_text.py shows: the table, the comparison of the loss curves, and the plot."""

from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from training import Result, Run, Setup

STOCK, SWAPPED = "#8fb3d9", "#b3401f"


@dataclass(frozen=True)
class Comparison:
    """A stock and a swapped run of the same mode and dropout, and how far apart they may be."""

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
        """Without dropout, of the curves, step by step; with it, the runs draw other masks: of their ends."""
        if self.run.dropout:
            pairs = [
                (self.stock.final_loss, self.swapped.final_loss),
                (self.stock.validation_loss, self.swapped.validation_loss),
            ]
        else:
            pairs = list(zip(self.stock.losses, self.swapped.losses, strict=True))
        return max(abs(a - b) for a, b in pairs)

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
    head = f"{'mode':<10}{'dropout':>7}  {'attention':<9}"
    columns = ("first", "final", "valid.", "ms/step", "tokens/s", "peak MiB", "flash4 calls")
    lines = [head + "".join(f"{name:>{max(9, len(name) + 2)}}" for name in columns)]
    lines.append("-" * len(lines[0]))
    for run, result in results.items():
        tokens_per_second = 1e3 * setup.tokens_per_step / result.step_ms
        lines.append(
            f"{run.mode:<10}{run.dropout:>7}  {run.attention:<9}"
            f"{result.losses[0]:>9.4f}{result.final_loss:>9.4f}{result.validation_loss:>9.4f}"
            f"{result.step_ms:>9.1f}{tokens_per_second:>10.0f}{result.peak_mib:>10.0f}"
            f"{result.training_calls:>9}+{result.evaluation_calls:<4}"
        )
    return "\n".join(lines)


def plot(path: Path, comparisons: list[Comparison]) -> None:
    """Loss curves of each pair, stock under swapped, beside bars of their step times."""
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    panels = figure.subplot_mosaic([["0", "1", "bars"], ["2", "3", "bars"]], width_ratios=[1, 1, 1.1])
    for i, comparison in enumerate(comparisons):
        _plot_losses(panels[str(i)], comparison)
    _plot_step_times(panels["bars"], comparisons)
    figure.suptitle("nn.TransformerEncoder with stock and with swapped attention")
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


def _plot_step_times(axes: Axes, comparisons: list[Comparison]) -> None:
    labels = [f"{comparison.run.mode}\ndropout {comparison.run.dropout}" for comparison in comparisons]
    places = range(len(comparisons))
    stock = [comparison.stock.step_ms for comparison in comparisons]
    swapped = [comparison.swapped.step_ms for comparison in comparisons]
    for shift, times, color, label in ((-0.2, stock, STOCK, "stock"), (0.2, swapped, SWAPPED, "swapped")):
        bars = axes.bar([place + shift for place in places], times, 0.38, color=color, label=label)
        axes.bar_label(bars, fmt="%.0f" if max(stock) >= 20 else "%.1f", padding=2)
    axes.set_xticks(places, labels)
    axes.set_title("training step")
    axes.set_ylabel("median time, ms")
    axes.legend(frameon=False)
