"""One training run of train_text.py, measured in a process of its own, so that none inherits memory."""

import os
import resource
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

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
    """What all runs of one comparison share."""

    width: int
    heads: int
    layers: int
    context: int
    batch: int
    steps: int
    learning_rate: float
    causal: bool = True
    """A decoder, else an encoder."""
    library: bool = False
    """Learns from the modules of Python's library instead of its documentation."""
    device: str = "cpu"
    seed: int = 0

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context

    @property
    def model(self) -> str:
        return "decoder" if self.causal else "encoder"

    def batch_of(self, windows: Tensor, tokenizer: Tokenizer, generator: torch.Generator) -> Batch:
        """Of windows (B, S + 1)."""
        if self.causal:
            return next_token_batch(windows)
        return gaps_batch(windows[:, :-1], len(tokenizer.tokens), generator)


@dataclass(frozen=True)
class Run:
    """What one run is: stock nn.MultiheadAttention or ours, eager or compiled, with which dropout."""

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
    """What one run gave: losses in nats a token, the median step in ms, memory in MiB."""

    losses: list[float]
    validation_loss: float
    step_ms: float
    peak_mib: float
    training_calls: int
    evaluation_calls: int
    sample: str
    parameters: int

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last fifth of the steps: single batches differ too much to compare."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 5) :])


def train_in_fresh_process(setup: Setup, run: Run, title: str) -> Result:
    # Threads that spin while they wait make a step several times slower when something else wants the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(train, setup, run, title).result()


def train(setup: Setup, run: Run, title: str) -> Result:
    corpus = Corpus.load(setup.library)
    memory = PeakMemory(setup.device)
    model = build_model(setup, run, len(corpus.tokenizer.tokens))
    with backends_used() as used_in_training:
        losses, step_seconds = optimize(model, corpus, setup, run, memory, title)
    peak_mib = memory.peak_mib()
    model.eval()
    with backends_used() as used_in_evaluation:
        validation_loss = validate(model, corpus, setup)
    return Result(
        losses=losses,
        validation_loss=validation_loss,
        step_ms=1e3 * statistics.median(step_seconds),
        peak_mib=peak_mib,
        training_calls=forward_calls(used_in_training),
        evaluation_calls=forward_calls(used_in_evaluation),
        sample=sample(model, corpus, setup),
        parameters=sum(x.numel() for x in model.parameters()),
    )


def build_model(setup: Setup, run: Run, tokens: int) -> LanguageModel:
    torch.manual_seed(setup.seed)
    vocabulary = tokens if setup.causal else tokens + 1
    size = (setup.width, setup.heads, setup.layers, setup.context)
    model = LanguageModel(vocabulary, *size, run.dropout, setup.causal).to(setup.device)
    if run.swapped:
        flash4_torch.replace_attention(model)
    torch.manual_seed(setup.seed)
    return model


def optimize(
    model: LanguageModel, corpus: Corpus, setup: Setup, run: Run, memory: "PeakMemory", title: str
) -> tuple[list[float], list[float]]:
    """Train for setup.steps steps; the loss of each step, and the seconds of each after the warm-up."""
    trained = torch.compile(model, fullgraph=True) if run.compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), setup.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, setup.learning_rate, setup.steps)
    order = torch.Generator().manual_seed(setup.seed)
    losses: list[float] = []
    seconds: list[float] = []
    seconds_between_updates = 0.5 if sys.stderr.isatty() else 10
    progress = tqdm(range(setup.steps), title, unit="step", mininterval=seconds_between_updates)
    for step in progress:
        if step == WARM_UP_STEPS:
            memory.reset()
        windows = random_windows(corpus.train, setup.batch, setup.context + 1, order)
        batch = setup.batch_of(windows, corpus.tokenizer, order).to(setup.device)
        start = time.perf_counter()
        optimizer.zero_grad()
        with autocast(setup.device):
            loss = loss_of(trained, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        schedule.step()
        progress.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
    return losses, seconds[WARM_UP_STEPS:] or seconds


@torch.no_grad()
def validate(model: LanguageModel, corpus: Corpus, setup: Setup) -> float:
    """Mean loss over the validation stream, or its first windows, cut to the context's length."""
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
    """How often flash4_torch's attention ran forward, whichever backend served it."""
    return sum(count for (operator, _), count in used.items() if operator == "attention")


class PeakMemory:
    """Highest memory since reset(), in MiB above what was in use when the object was made.

    On a GPU the allocator's peak; on a CPU the process's resident memory, which in a compiled run includes
    what the compiler left loaded.
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
