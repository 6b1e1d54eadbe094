"""The demo's comparison, small and eager: swapped training equals stock, and really calls our attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from everything import EVERYTHING

pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))


@pytest.mark.parametrize("causal", [True, False])
def test_swapped_training_is_stock_training(tmp_path: Path, causal: bool) -> None:
    import report
    import train_text
    from training import Result, Run, Setup, Training

    def train(setup: Setup, run: Run) -> Result:
        training = Training(setup, run)
        for _ in range(setup.steps):
            training.step()
        return training.result()

    # An encoder is asked for one token in seven, so it needs more of them for as steady a mean.
    batch = 2 if causal else 16
    setup = Setup(16, heads=2, layers=1, context=32, batch=batch, steps=3, learning_rate=1e-3, causal=causal)
    results = {
        run: train(setup, run)
        for run in (Run(False, dropout, swapped) for dropout in (0.0, 0.1) for swapped in (False, True))
    }
    comparisons = train_text.compare(results, setup)
    assert len(comparisons) == 2
    assert train_text.verdict(results, comparisons, setup) == 0
    report.save(tmp_path / "numbers.json", results, setup)
    saved = json.loads((tmp_path / "numbers.json").read_text())
    assert [run["losses"] for run in saved["runs"]] == [result.losses for result in results.values()]
    assert saved["setup"]["steps"] == 3 and saved["versions"]["torch"] == torch.__version__
    for run in saved["runs"]:
        assert len(run["steps_ms"]) == 3 and run["step_ms"] in run["steps_ms"]
    report.plot(tmp_path / "picture.png", comparisons, setup)
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    broken = {run: result for run, result in results.items() if run.swapped}
    mistaken = {Run(run.compiled, run.dropout, swapped=False): result for run, result in broken.items()}
    assert train_text.verdict(mistaken, [], setup) == 1


def test_times_are_compared_step_by_step() -> None:
    """A slowdown of two neighbouring steps alike changes nothing."""
    import report
    from training import Result, Run

    def result(*steps_ms: float) -> Result:
        return Result([1.0], 1.0, 1.0, list(steps_ms), 0.0, 0, 0, "", 0)

    load = (1.0, 2.0, 5.0, 1.0, 3.0)
    stock = result(*(10.0 * x for x in load))
    swapped = result(*(r * 10.0 * x for r, x in zip((0.7, 0.9, 0.5, 0.8, 1.1), load, strict=True)))
    comparison = report.Comparison(Run(False, 0.0, False), stock, swapped, 1.0)
    assert comparison.time_ratios == pytest.approx([0.7, 0.8, 0.9])
    assert "0.80 [0.70, 0.90]" in comparison.speed
    alone = report.Comparison(Run(False, 0.0, False), result(2.0), result(1.0), 1.0)
    assert alone.time_ratios == [0.5] * 3


def test_turns_alternate_and_only_warm_up_overlaps() -> None:
    from training import WARM_UP_STEPS, take_turns

    events: list[str] = []

    class Trainee:
        def __init__(self, name: str):
            self.name = name

        def begin_step(self) -> Callable[[], float]:
            events.append(f"{self.name} begins")

            def finish() -> float:
                events.append(f"{self.name} ends")
                return float(self.name)

            return finish

    reported: list[tuple[int, list[float]]] = []
    take_turns([Trainee("1"), Trainee("2")], WARM_UP_STEPS + 2, lambda *report: reported.append(report))
    assert reported == [(step + 1, [1.0, 2.0]) for step in range(WARM_UP_STEPS + 2)]
    overlapping, first, second = (
        ["1 begins", "2 begins", "1 ends", "2 ends"],
        *([f"{n} begins", f"{n} ends"] for n in "12"),
    )
    assert events == overlapping * WARM_UP_STEPS + first + second + second + first


@pytest.mark.skipif(not EVERYTHING, reason="starts two processes; FLASH4_TEST_ALL=1 asks for it")
def test_a_pair_in_processes_of_its_own() -> None:
    from training import Run, Setup, train_side_by_side

    setup = Setup(16, heads=2, layers=1, context=32, batch=2, steps=7, learning_rate=1e-3)
    steps: list[int] = []
    runs = [Run(False, 0.0, swapped) for swapped in (False, True)]
    results = train_side_by_side(setup, runs, lambda step, losses: steps.append(step))
    assert steps == list(range(1, 8)) and list(results) == runs
    stock, swapped = results.values()
    assert stock.losses == pytest.approx(swapped.losses, abs=1e-5)
    assert len(stock.steps_ms) == len(swapped.steps_ms) == 2
    assert (stock.training_calls, swapped.training_calls) == (0, 7)


def test_progress_is_told_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from train_text import Progress

    progress = Progress("1/4 eager", 3)
    for step in (1, 2, 3):
        progress(step, [5.0, 5.25])
    lines = [line.rstrip() for line in capsys.readouterr().err.splitlines()]
    assert lines[0] == "1/4 eager: starting two processes"
    assert lines[-1].startswith("1/4 eager: step 3 of 3, loss 5.000 and 5.250,")
