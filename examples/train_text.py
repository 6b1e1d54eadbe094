"""Train a language model with stock and with flash4_torch attention, and show that nothing else changed.

A small causal nn.TransformerEncoder learns the English of Python's documentation. On a GPU a decoder and an
encoder of 100 million parameters learn the modules of Python's standard library. Each pair of runs has the
same seed and the same order of data; the second calls flash4_torch.replace_attention(model) first. Pairs run
eager and under torch.compile(fullgraph=True), without and with dropout. Without dropout the two loss curves
must agree step by step. With dropout they use different masks by design, so only their ends are compared.
The two runs of a pair alternate, so that the ratio of their times does not depend on the machine's load.
Compiled pairs are left out where there is no C++ compiler.

    python examples/train_text.py            # under five minutes on two CPU cores; uses a GPU if there is one
    python examples/train_text.py --help
"""

import argparse
import os
import shutil
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from report import Comparison, plot, save, table
from training import Result, Run, Setup, train_side_by_side

_DECODER = Setup(width=128, heads=4, layers=2, context=128, batch=16, steps=80, learning_rate=5e-3)
SMALL = (_DECODER, replace(_DECODER, causal=False))
_LARGE = replace(_DECODER, learning_rate=3e-4, steps=300, library=True)
LARGE = (
    replace(_LARGE, width=1024, heads=8, layers=8, context=2048, batch=8),
    # At 3e-4 its loss jumps once; then rounding alone puts two stock runs, eager and compiled, 0.01 apart.
    replace(_LARGE, width=768, heads=12, layers=14, context=1024, batch=16, causal=False, learning_rate=1e-4),
)


def main() -> int:
    args = parse_arguments()
    return max(compare_attention(setup, args.out) for setup in chosen_setups(args))


def compare_attention(setup: Setup, folder: Path) -> int:
    start = time.perf_counter()
    results = train_all(setup)
    comparisons = compare(results, setup)
    picture = folder / f"{setup.model}.png"
    plot(picture, comparisons, setup)
    save(picture.with_suffix(".json"), results, setup)
    print(f"\n{table(results, setup)}\n")
    print("\n".join(map(str, comparisons)))
    print("\nSwapped over stock: time of neighbouring steps, median and quartiles; peak memory:")
    print("\n".join(comparison.speed for comparison in comparisons))
    print(f"\nA swapped model, trained without dropout, writes:\n{sample(results)}\n")
    print(f"{time.perf_counter() - start:.0f} s in all; plot in {picture}, numbers beside it")
    return verdict(results, comparisons, setup)


def parse_arguments() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu")
    parser.add_argument("--size", choices=("small", "large"), help="default: small on a CPU, large on a GPU")
    parser.add_argument(
        "--model", choices=("decoder", "encoder"), help="default: the decoder on a CPU, both on a GPU"
    )
    parser.add_argument("--steps", type=int, help="training steps of each of a model's eight runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "out", help="folder for plots and numbers"
    )
    return parser.parse_args()


def chosen_setups(args: argparse.Namespace) -> list[Setup]:
    size = args.size or ("large" if args.device == "cuda" else "small")
    chosen = {"device": args.device, "seed": args.seed} | ({"steps": args.steps} if args.steps else {})
    setups = [replace(setup, **chosen) for setup in {"small": SMALL, "large": LARGE}[size]]
    models = [args.model] if args.model else ["decoder", "encoder"][: 2 if args.device == "cuda" else 1]
    return [setup for setup in setups if setup.model in models]


def train_all(setup: Setup) -> dict[Run, Result]:
    pairs = list(product(modes(), (0.0, 0.1)))
    results: dict[Run, Result] = {}
    for number, (compiled, dropout) in enumerate(pairs, start=1):
        runs = [Run(compiled, dropout, swapped) for swapped in (False, True)]
        progress = Progress(f"{number}/{len(pairs)} {runs[0].mode}, dropout {dropout}", setup.steps)
        results |= train_side_by_side(setup, runs, progress)
    return results


def modes() -> tuple[bool, ...]:
    """Eager, and compiled where torch.compile finds the C++ compiler that it needs."""
    if any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        return False, True
    print("no C++ compiler, so nothing is compiled: c++, g++ or clang++ would do", file=sys.stderr)
    return (False,)


class Progress:
    """The progress of a pair: one line that is rewritten on a terminal, several lines elsewhere."""

    def __init__(self, title: str, steps: int):
        self._title, self._steps = title, steps
        self._begin = self._last = time.perf_counter()
        self._on_terminal = sys.stderr.isatty()
        self._print(f"{title}: starting two processes")

    def __call__(self, step: int, losses: list[float]) -> None:
        now = time.perf_counter()
        if step < self._steps and now - self._last < (0.5 if self._on_terminal else 10):
            return
        self._last = now
        done = "loss {:.3f} and {:.3f}".format(*losses)
        self._print(f"{self._title}: step {step} of {self._steps}, {done}, {now - self._begin:.0f} s")
        if step == self._steps and self._on_terminal:
            print(file=sys.stderr)

    def _print(self, line: str) -> None:
        start, end = ("\r", "") if self._on_terminal else ("", "\n")
        print(f"{start}{line:<78}", end=end, file=sys.stderr, flush=True)


def compare(results: dict[Run, Result], setup: Setup) -> list[Comparison]:
    return [
        Comparison(run, result, results[replace(run, swapped=True)], tolerance(run, setup))
        for run, result in results.items()
        if not run.swapped
    ]


def tolerance(run: Run, setup: Setup) -> float:
    """The allowed difference of two runs, in nats per token.

    With dropout: five stock runs of the default size that differ only in their dropout masks ended within
    0.008 of each other. Without: rounding alone, in single precision or, on a GPU, bfloat16.
    """
    if run.dropout:
        return 0.02
    return 0.01 if setup.device == "cuda" else 1e-4


def sample(results: dict[Run, Result]) -> str:
    """Text by the last swapped model without dropout: the compiled one, if there is one."""
    return [result.sample for run, result in results.items() if run.swapped and not run.dropout][-1]


def verdict(results: dict[Run, Result], comparisons: list[Comparison], setup: Setup) -> int:
    """Exit status: 0 if every pair agrees, and all swapped and no stock models have and called our attention.

    A compiled graph on a CPU may hold PyTorch's own operators instead, whose calls nobody counts.
    """
    failures = [str(comparison) for comparison in comparisons if not comparison.agrees]
    for run, result in results.items():
        layers = setup.layers if run.swapped else 0
        if result.swapped_modules != layers:
            failures.append(f"{run}: {result.swapped_modules} modules of ours, expected {layers}")
        expected, may_be_hidden = layers * setup.steps, run.compiled and setup.device == "cpu"
        if result.training_calls != expected and not (may_be_hidden and result.training_calls == 0):
            failures.append(f"{run}: {result.training_calls} calls in training, expected {expected}")
        if bool(result.evaluation_calls) != run.swapped:
            failures.append(f"{run}: {result.evaluation_calls} calls in evaluation")
    for failure in failures:
        print("FAILED:", failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
