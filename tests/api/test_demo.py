"""The demo's comparison, small and eager: swapped training equals stock, and really calls our attention."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from everything import EVERYTHING

pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))


def train(setup: Any, run: Any) -> Any:
    """The result of a run of the example's."""
    from training import Training

    training = Training(setup, run)
    for _ in range(setup.steps):
        training.step()
    return training.result()


@pytest.mark.parametrize("causal", [True, False])
def test_swapped_training_is_stock_training(tmp_path: Path, causal: bool) -> None:
    import report
    import train_text
    from training import Run, Setup

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


def test_a_compiled_run_on_a_cpu_passes() -> None:
    """Its graph holds PyTorch's operators: no call of ours in training, but in evaluation."""
    import train_text
    from training import Run, Setup

    setup = Setup(16, heads=2, layers=1, context=32, batch=2, steps=2, learning_rate=1e-3)
    run = Run(compiled=True, dropout=0.1, swapped=True)
    result = train(setup, run)
    assert train_text.verdict({run: result}, [], setup) == 0
    for wrong in ({"swapped_modules": 0}, {"training_calls": 1}, {"evaluation_calls": 0}):
        assert train_text.verdict({run: replace(result, **wrong)}, [], setup) == 1
    eager = replace(result, training_calls=0)
    assert train_text.verdict({replace(run, compiled=False): eager}, [], setup) == 1


def test_times_are_compared_step_by_step() -> None:
    """A slowdown of two neighbouring steps alike changes nothing."""
    import report
    from training import Result, Run

    def result(*steps_ms: float) -> Result:
        return Result([1.0], 1.0, 1.0, list(steps_ms), 0.0, 0, 0, 0, "", 0)

    load = (1.0, 2.0, 5.0, 1.0, 3.0)
    stock = result(*(10.0 * x for x in load))
    swapped = result(*(r * 10.0 * x for r, x in zip((0.7, 0.9, 0.5, 0.8, 1.1), load, strict=True)))
    comparison = report.Comparison(Run(False, 0.0, False), stock, swapped, 1.0)
    assert comparison.time_ratios == pytest.approx([0.7, 0.8, 0.9])
    assert "time 0.80 [0.70, 0.90]" in comparison.speed
    alone = report.Comparison(Run(False, 0.0, False), result(2.0), result(1.0), 1.0)
    assert alone.time_ratios == [0.5] * 3


def test_memory_is_compared() -> None:
    import report
    from training import Result, Run, Setup

    def result(peak_mib: float) -> Result:
        return Result([1.0], 1.0, 1.0, [1.0], peak_mib, 0, 0, 0, "", 10**6)

    pairs = [
        report.Comparison(Run(False, dropout, False), result(200.0), result(200.0 * ratio), 1.0)
        for dropout, ratio in ((0.0, 0.9), (0.1, 0.5))
    ]
    assert "memory 0.90" in pairs[0].speed and "memory 0.50" in pairs[1].speed
    setup = Setup(16, heads=2, layers=1, context=32, batch=2, steps=3, learning_rate=1e-3)
    assert report.headline(pairs, setup).endswith("1.00 of stock's time, 0.50 to 0.90 of its memory")
    nothing = report.Comparison(Run(False, 0.0, False), result(0.0), result(0.0), 1.0)
    assert nothing.memory_ratio == 1.0


def test_nothing_is_compiled_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import train_text
    from training import Result, Run, Setup

    def trained(setup: Setup, runs: list[Run], report: Any) -> dict[Run, Result]:
        return {run: Result([1.0], 1.0, 1.0, [1.0], 0.0, 0, 0, 0, str(run), 0) for run in runs}

    monkeypatch.setattr(train_text, "train_side_by_side", trained)
    for compiler, compiled in (("/usr/bin/c++", True), (None, False)):
        monkeypatch.setattr(train_text.shutil, "which", lambda name, found=compiler: found)
        results = train_text.train_all(train_text.SMALL[0])
        assert len(results) == 4 * (1 + compiled) and any(run.compiled for run in results) == compiled
        assert train_text.sample(results) == str(Run(compiled, dropout=0.0, swapped=True))
        assert ("no C++ compiler" in capsys.readouterr().err) != compiled


ROOT = Path(__file__).parents[2]


def brought_by(extra: str) -> set[str]:
    """The packages that flash4_torch with `extra` brings to this machine, torch and its own left out."""
    names, waiting = set(), [Requirement(f"flash4_torch[{extra}]")]
    while waiting:
        wanted = waiting.pop()
        for text in metadata.requires(wanted.name) or ():
            needed = Requirement(text)
            extras = wanted.extras or {""}
            if needed.marker and not any(needed.marker.evaluate({"extra": name}) for name in extras):
                continue
            name = canonicalize_name(needed.name)
            if name not in names and name != "torch":
                names.add(name)
                waiting.append(needed)
    return names


def test_the_demo_brings_no_tools_and_only_what_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    brought = brought_by("demo")
    assert "matplotlib" in brought <= pinned
    tools = {"pytest", "ruff", "mypy", "hypothesis", "pre-commit", "transformers", "nvidia-cutlass-dsl"}
    assert not brought & tools and tools & brought_by("test")


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("target", ["demo", "test", "lint", "sanitize"])
def test_make_installs_what_a_target_needs_and_no_more(target: str, tmp_path: Path) -> None:
    """A dry run, in a folder without a virtual environment."""
    command = ["make", "--dry-run", "--directory", str(ROOT), target, f"VENV={tmp_path}/venv"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (install,) = (line for line in printed.splitlines() if "--editable" in line)
    assert "--constraint constraints.txt" in install
    extras = install.rpartition("[")[2].strip("]'").split(",")
    assert set(extras) - {"kernels"} == ({"demo"} if target == "demo" else {"test", "demo", "dev", "docs"})


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
