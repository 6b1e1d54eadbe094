"""The demo's comparison, small and eager: swapped training equals stock, and really calls our attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("tqdm")


@pytest.mark.parametrize("causal", [True, False])
def test_swapped_training_is_stock_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, causal: bool
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    import report
    import train_text
    from training import Run, Setup, train

    # An encoder is asked for one token in seven, so that it takes more of them for as steady a mean.
    batch = 2 if causal else 16
    setup = Setup(16, heads=2, layers=1, context=32, batch=batch, steps=3, learning_rate=1e-3, causal=causal)
    results = {
        run: train(setup, run, "test")
        for run in (Run(False, dropout, swapped) for dropout in (0.0, 0.1) for swapped in (False, True))
    }
    comparisons = train_text.compare(results, setup)
    assert len(comparisons) == 2
    assert train_text.verdict(results, comparisons, setup) == 0
    report.save(tmp_path / "numbers.json", results, setup)
    saved = json.loads((tmp_path / "numbers.json").read_text())
    assert [run["losses"] for run in saved["runs"]] == [result.losses for result in results.values()]
    assert saved["setup"]["steps"] == 3 and saved["versions"]["torch"] == torch.__version__
    broken = {run: result for run, result in results.items() if run.swapped}
    mistaken = {Run(run.compiled, run.dropout, swapped=False): result for run, result in broken.items()}
    assert train_text.verdict(mistaken, [], setup) == 1
