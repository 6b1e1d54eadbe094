"""The runs of train_text.py: a stock and a swapped one side by side, each in its own process.

No process inherits memory, and the two alternate step by step, so that other load on the machine slows both.
"""

import os
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

import flash4_torch
from flash4_torch.testing import backends_used
from language_model import (
    Batch,
    Corpus,
    LanguageModel,
    Tokenizer,
    continue_text,
    fill_gaps,
    gaps_batch,
    loss_of,
    next_token_batch,
    random_windows,
)

WARM_UP_STEPS = 5
VALIDATION_WINDOWS = 64
MIB = 2**20


@dataclass(frozen=True)
class Setup:
    """Settings that all runs of one comparison share."""

    width: int
    heads: int
    layers: int
    context: int
    batch: int
    steps: int
    learning_rate: float
    causal: bool = True
    """Whether the model is a decoder, else an encoder."""
    library: bool = False
    """Whether it learns from the modules of Python's library instead of its documentation."""
    device: str = "cpu"
    seed: int = 0

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context

    @property
    def model(self) -> str:
        return "decoder" if self.causal else "encoder"

    def batch_of(self, windows: Tensor, tokenizer: Tokenizer, generator: torch.Generator) -> Batch:
        """The batch made from windows (B, S + 1)."""
        if self.causal:
            return next_token_batch(windows)
        return gaps_batch(windows[:, :-1], len(tokenizer.tokens), generator)


@dataclass(frozen=True)
class Run:
    """The kind of one run: stock nn.MultiheadAttention or ours, eager or compiled, and its dropout."""

    compiled: bool
    dropout: float
    swapped: bool

    @property
    def attention(self) -> str:
        return "swapped" if self.swapped else "stock"

    @property
    def mode(self) -> str:
        return "compiled" if self.compiled else "eager"


@dataclass(frozen=True)
class Result:
    """Results of one run: losses in nats per token, step times after the warm-up in ms, memory in MiB."""

    losses: list[float]
    validation_loss: float
    step_ms: float
    """The median."""
    steps_ms: list[float]
    peak_mib: float
    swapped_modules: int
    training_calls: int
    evaluation_calls: int
    sample: str
    parameters: int

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last fifth of the steps: single batches differ too much to compare."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 5) :])


class Training:
    """A run that advances step by step."""

    def __init__(self, setup: Setup, run: Run):
        self._setup, self._run = setup, run
        self._corpus = Corpus.load(setup.library)
        self._memory = PeakMemory(setup.device)
        self._model = build_model(setup, run, len(self._corpus.tokenizer.tokens))
        self._trained = torch.compile(self._model, fullgraph=True) if run.compiled else self._model
        parameters, rate = self._model.parameters(), setup.learning_rate
        self._optimizer = torch.optim.AdamW(parameters, rate, betas=(0.9, 0.95))
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, rate, setup.steps)
        self._order = torch.Generator().manual_seed(setup.seed)
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._calls = 0

    def step(self) -> float:
        """Makes one training step and returns its loss."""
        setup = self._setup
        if len(self._losses) == WARM_UP_STEPS:
            self._memory.reset()
        windows = random_windows(self._corpus.train, setup.batch, setup.context + 1, self._order)
        batch = setup.batch_of(windows, self._corpus.tokenizer, self._order).to(setup.device)
        with backends_used() as used:
            start = time.perf_counter()
            self._optimizer.zero_grad()
            with autocast(setup.device):
                loss = loss_of(self._trained, batch)
            loss.backward()
            self._optimizer.step()
            self._losses.append(loss.item())
            self._seconds.append(time.perf_counter() - start)
        self._calls += forward_calls(used)
        self._schedule.step()
        return self._losses[-1]

    def result(self) -> Result:
        setup, model, corpus = self._setup, self._model, self._corpus
        peak_mib = self._memory.peak_mib()
        steps_ms = [1e3 * seconds for seconds in self._seconds[WARM_UP_STEPS:] or self._seconds]
        model.eval()
        with backends_used() as used_in_evaluation:
            validation_loss = validate(model, corpus, setup)
        return Result(
            losses=self._losses,
            validation_loss=validation_loss,
            step_ms=statistics.median(steps_ms),
            steps_ms=steps_ms,
            peak_mib=peak_mib,
            swapped_modules=sum(isinstance(m, flash4_torch.MultiheadAttention) for m in model.modules()),
            training_calls=self._calls,
            evaluation_calls=forward_calls(used_in_evaluation),
            sample=sample(model, corpus, setup),
            parameters=sum(x.numel() for x in model.parameters()),
        )


class Trainee(Protocol):
    """A training that can alternate with others: a step begins, and is over when its loss is requested."""

    def begin_step(self) -> Callable[[], float]: ...


def take_turns(trainees: Sequence[Trainee], steps: int, report: Callable[[int, list[float]], None]) -> None:
    """Runs the trainees' steps one after another; the first of a round is the last of the next.

    Warm-up steps, which compile and are not timed, run at the same time.
    report: called with the number of finished steps, and their last losses.
    """
    for step in range(steps):
        if step < WARM_UP_STEPS:
            losses = [finish() for finish in [trainee.begin_step() for trainee in trainees]]
        else:
            back = 1 if step % 2 else -1
            losses = [trainee.begin_step()() for trainee in trainees[::back]][::back]
        report(step + 1, losses)


def train_side_by_side(
    setup: Setup, runs: Sequence[Run], report: Callable[[int, list[float]], None]
) -> dict[Run, Result]:
    # Threads that spin while waiting make a step several times slower when something else needs the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with ExitStack() as stack:
        trainees = [stack.enter_context(InFreshProcess(setup, run)) for run in runs]
        take_turns(trainees, setup.steps, report)
        results = [trainee.begin_result() for trainee in trainees]
        return {run: result() for run, result in zip(runs, results, strict=True)}


class InFreshProcess:
    """A training in its own process, which starts immediately."""

    def __init__(self, setup: Setup, run: Run):
        self._pool = ProcessPoolExecutor(
            1, mp_context=get_context("spawn"), initializer=_begin, initargs=(setup, run)
        )

    def __enter__(self) -> "InFreshProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def begin_step(self) -> Callable[[], float]:
        return self._pool.submit(_step).result

    def begin_result(self) -> Callable[[], Result]:
        return self._pool.submit(_result).result


_training: Training
"""The state of a fresh process."""


def _begin(setup: Setup, run: Run) -> None:
    global _training
    _training = Training(setup, run)


def _step() -> float:
    return _training.step()


def _result() -> Result:
    return _training.result()


def build_model(setup: Setup, run: Run, tokens: int) -> LanguageModel:
    torch.manual_seed(setup.seed)
    vocabulary = tokens if setup.causal else tokens + 1
    size = (setup.width, setup.heads, setup.layers, setup.context)
    model = LanguageModel(vocabulary, *size, run.dropout, setup.causal).to(setup.device)
    if run.swapped:
        flash4_torch.replace_attention(model)
    torch.manual_seed(setup.seed)
    return model


@torch.no_grad()
def validate(model: LanguageModel, corpus: Corpus, setup: Setup) -> float:
    """Mean loss over the validation stream or its first windows, each as long as the context."""
    length, order = setup.context + 1, torch.Generator().manual_seed(setup.seed)
    stream = corpus.validation[: len(corpus.validation) // length * length]
    losses = []
    with autocast(setup.device):
        for window in stream.view(-1, 1, length)[:VALIDATION_WINDOWS]:
            batch = setup.batch_of(window, corpus.tokenizer, order).to(setup.device)
            losses.append(loss_of(model, batch).item())
    return statistics.fmean(losses)


def sample(model: LanguageModel, corpus: Corpus, setup: Setup) -> str:
    if setup.causal:
        return continue_text(model, corpus.tokenizer, prompt="The", count=80)
    return fill_gaps(model, corpus.tokenizer, corpus.validation[: min(setup.context, 80)])


def autocast(device: str) -> torch.autocast:
    """bfloat16 on a GPU; on a CPU single precision throughout."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def forward_calls(used: Counter[tuple[str, str]]) -> int:
    """Number of forward calls of flash4_torch's attention, on any backend."""
    return sum(count for (operator, _), count in used.items() if operator == "attention")


class PeakMemory:
    """Peak memory since reset(), in MiB above the usage when the object was made.

    On a GPU this is the allocator's peak; on a CPU the process's resident memory, which in a compiled run
    includes what the compiler left loaded.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.reset()
        self._baseline = self._peak()

    def reset(self) -> None:
        forget_peak = Path("/proc/self/clear_refs")
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        elif forget_peak.exists():
            forget_peak.write_text("5")

    def peak_mib(self) -> float:
        return (self._peak() - self._baseline) / MIB

    def _peak(self) -> int:
        if self._device == "cuda":
            return torch.cuda.max_memory_allocated()
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
