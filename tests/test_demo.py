"""The demo's comparison, small and eager: swapped training equals stock, and really calls our attention."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tqdm")


def test_swapped_training_is_stock_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    import train_text
    from training import Run, Setup, train

    setup = Setup(width=16, heads=2, layers=1, context=32, batch=2, steps=3, learning_rate=1e-3)
    results = {
        run: train(setup, run, "test")
        for run in (Run(False, dropout, swapped) for dropout in (0.0, 0.1) for swapped in (False, True))
    }
    comparisons = train_text.compare(results, setup)
    assert len(comparisons) == 2
    assert train_text.verdict(results, comparisons, setup) == 0
    broken = {run: result for run, result in results.items() if run.swapped}
    mistaken = {Run(run.compiled, run.dropout, swapped=False): result for run, result in broken.items()}
    assert train_text.verdict(mistaken, [], setup) == 1
