"""Section `flex`: flex_attention by our kernels beside torch's, for the masks and score mods of `flex_cases`.

Each contender's out and gradients are compared with float64 in two heads before anything is timed. On a GPU
kernels are compiled ahead in other processes, several cells at once, which leave them in the caches on disk.
With max-autotune each cell has a process that measures it, too: all compile at once, and take turns to time.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
import statistics
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import api
from ..flex.attention import flex_attention
from ..flex.block_mask import create_block_mask
from ..testing import backends_used
from . import flex_cases, gpu
from .cases import HIDDEN, TOKENS
from .flex_cases import CASES, Case, Sizes, each
from .providers import OURS, has_fa4, sentence
from .report import Row, dtype_name, table
from .settings import Settings, usual_dtype
from .timing import Call, GpuTimer, compare

TITLE = "flex_attention: the peers' time over ours"

DIRECTIONS = ("forward", "step")
"""A step is a forward and the gradients of q, k and v; what score mods learn gets none."""
MAX_AUTOTUNE = "max-autotune-no-cudagraphs"
_LENGTHS = (8192, 2048, 32768)
_ROUNDS, _ROUNDS_IF_LONG, _LONG = 4, 2, 32768
_TOLERANCE = 0.02
"""Norm of the difference from float64 over the norm; bfloat16 rounding uses a quarter of it."""
_SCORES = 1 << 24
"""Scores of float64 that are held at once."""
_MOST_PROCESSES = 12
"""Processes that compile ahead."""
_MOST_TUNING = 8
"""Processes that have torch choose among kernels, and compile with several threads each."""
_PDEATHSIG = 1
"""prctl's number of the request for a signal when the process that started this one ends."""


class Cell(NamedTuple):
    """Self-attention of q, k and v (B, Hq, S, D)."""

    mod: str
    D: int
    S: int
    B: int
    Hq: int


def cells(settings: Settings) -> list[Cell]:
    """The cells of this machine that `settings` selects; quick keeps the shortest sequence."""
    if settings.on_gpu:
        lengths = (min(_LENGTHS),) if settings.quick else _LENGTHS
        found = [
            Cell(mod, D, S, TOKENS // S, HIDDEN // D) for S in lengths for D in (128, 64) for mod in CASES
        ]
    else:
        found = [Cell(mod, 16, 128, 2, 2) for mod in CASES]
    return [
        cell
        for cell in found
        if settings.selection.takes(cell._asdict()) and any(_directions(cell, settings))
    ]


def _directions(cell: Cell, settings: Settings) -> list[str]:
    return [x for x in DIRECTIONS if settings.selection.takes({"direction": x})]


def measure(settings: Settings) -> Iterator[Row]:
    """A row for each cell and direction."""
    yield from measured(cells(settings), settings)


def measured(chosen: list[Cell], settings: Settings) -> Iterator[Row]:
    """Rows of these cells, in their order."""
    if not chosen:
        return
    if settings.on_gpu and settings.max_autotune:
        yield from _tuned(chosen, settings)
        return
    with _processes(len(chosen), settings) as ahead:
        for part in ahead.parts(chosen):
            for cell in part:
                for row in _rows(cell, settings):
                    print(_line(row), file=sys.stderr, flush=True)
                    yield row


class _Ahead(NamedTuple):
    """Other processes that compile what cells need, in turn with measurements, which they would disturb."""

    pool: ProcessPoolExecutor | None
    number: int
    settings: Settings

    def parts(self, chosen: list[Cell]) -> Iterator[list[Cell]]:
        """The cells, as many at a time as there are processes, compiled."""
        for start in range(0, len(chosen), self.number):
            part = chosen[start : start + self.number]
            if self.pool is not None:
                begun = time.perf_counter()
                # Without these processes all is compiled where it is measured.
                with suppress(BrokenExecutor):
                    list(self.pool.map(partial(_first_calls, settings=self.settings), part))
                seconds = time.perf_counter() - begun
                print(f"  {len(part)} cells compiled in {seconds:.1f} s", file=sys.stderr, flush=True)
            yield part


@contextmanager
def _processes(most: int, settings: Settings) -> Iterator[_Ahead]:
    number = min(most, _MOST_PROCESSES, max(1, (os.cpu_count() or 1) - 2))
    if not settings.on_gpu or number < 2:
        yield _Ahead(None, most, settings)
        return
    # Forked processes could not use the GPU.
    with ProcessPoolExecutor(number, multiprocessing.get_context("spawn"), _begin_process) as pool:
        yield _Ahead(pool, number, settings)


def _begin_process() -> None:
    """Has the process end with the one that measures, and keeps torch from starting still more of them.

    It says nothing: who waits for the end of our output would wait for such a process, too.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    # A thread could not end it while a compiler keeps Python's lock.
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        os._exit(1)
    from torch._inductor import config

    config.compile_threads = 1


_turn: AbstractContextManager[Any] = nullcontext()
"""What a process that shares the GPU with others holds while it times anything."""


def _tuned(chosen: list[Cell], settings: Settings) -> Iterator[Row]:
    """Rows of cells, each measured by another process, in the order in which they are done.

    Tens of kernels are compiled for a cell, on a few threads; only to time them does a process need the GPU
    for itself. A step has four times the kernels of a forward, which comes first.
    """
    cores, context = os.cpu_count() or 1, multiprocessing.get_context("spawn")
    number = min(len(chosen), _MOST_TUNING, max(1, cores // 2))
    arguments = context.Lock(), max(1, cores // number)
    tasks = [
        (cell, replace(settings, selection=settings.selection.narrowed({"direction": direction})))
        for direction in DIRECTIONS
        for cell in chosen
        if direction in _directions(cell, settings)
    ]
    with ProcessPoolExecutor(number, context, _begin_tuning, arguments) as pool:
        for done in as_completed([pool.submit(_all_rows, *task) for task in tasks]):
            for row in done.result():
                print(_line(row), file=sys.stderr, flush=True)
                yield row


def _begin_tuning(turn: AbstractContextManager[Any], threads: int) -> None:
    global _turn
    _begin_process()
    from torch._inductor import config

    config.compile_threads = threads
    _turn = turn
    _take_turns_to_choose(turn)


def _take_turns_to_choose(turn: AbstractContextManager[Any]) -> None:
    """Has inductor time the kernels that it chooses among while no other process times anything."""
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    time_all = AlgorithmSelectorCache.benchmark_in_current_process

    def time_in_turn(choices: Any, *args: Any, **kwargs: Any) -> Any:
        for choice in choices:
            # Nothing to do, but with Pythons where inductor does not compile ahead; what fails, fails again.
            with suppress(Exception):
                choice.precompile()
        with turn:
            return time_all(choices, *args, **kwargs)

    AlgorithmSelectorCache.benchmark_in_current_process = staticmethod(time_in_turn)  # type: ignore[method-assign]


def _all_rows(cell: Cell, settings: Settings) -> list[Row]:
    rows = list(_rows(cell, settings))
    torch.cuda.empty_cache()
    return rows


def _first_calls(cell: Cell, settings: Settings) -> None:
    """Makes calls once; what fails here fails where it is measured, too, and is named there."""
    with suppress(Exception), _quiet():
        contenders = _contenders(cell, settings)
        for contender, direction in itertools.product(contenders.values(), _directions(cell, settings)):
            with suppress(Exception):
                contender.call(direction)()
        torch.cuda.synchronize()
        # Other processes' tensors are as large.
        contenders.clear()
        del contender
        torch.cuda.empty_cache()
    torch.compiler.reset()


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch warns that its own function, where it is not compiled, takes memory for all scores.
        warnings.simplefilter("ignore")
        yield


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contender:
    """A function of tensors in a layout of its own."""

    attend: Attend
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    """q, k, v and dout."""
    of_batches: Callable[[Tensor], Tensor] = lambda x: x
    """A tensor as (B, H, S, D)."""
    is_same: bool = True
    """Whether it computes the cell; else it is timed for comparison."""

    def call(self, direction: str) -> Call:
        """The call to time; it returns (out,) or (out, dq, dk, dv)."""
        q, k, v, dout = self.tensors
        if direction == "forward":

            def forward() -> tuple[Tensor, ...]:
                with torch.no_grad():
                    return (self.attend(q, k, v),)

            return forward
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]

        def step() -> tuple[Tensor, ...]:
            out = self.attend(*inputs)
            return out, *torch.autograd.grad(out, inputs, dout)

        return step


def _sizes(cell: Cell, settings: Settings) -> Sizes:
    return Sizes(cell.S, cell.B, cell.Hq, settings.device, torch.float32, learns=False)


def _seed(cell: Cell) -> None:
    torch.manual_seed(zlib.crc32(repr(cell).encode()))


def _case(cell: Cell, settings: Settings) -> Case:
    _seed(cell)
    return CASES[cell.mod](_sizes(cell, settings))


def _contenders(cell: Cell, settings: Settings) -> dict[str, Contender]:
    case, device = _case(cell, settings), settings.device
    shape = cell.B, cell.Hq, cell.S, cell.D
    q, k, v, dout = (torch.randn(shape, device=device, dtype=usual_dtype(device)) for _ in range(4))
    block_mask = create_block_mask(case.mask, case.batches, None, cell.S, cell.S, device=device)

    def by(function: Any) -> Contender:
        return Contender(
            lambda q, k, v: function(q, k, v, score_mod=case.score_mod, block_mask=block_mask),
            (q, k, v, dout),
        )

    found = {OURS: by(flex_attention)}
    found |= {name: by(function) for name, function in _peers(settings).items()}
    return found | _native(cell, settings, (q, k, v, dout))


def _peers(settings: Settings) -> dict[str, Any]:
    from torch.nn.attention.flex_attention import flex_attention as torchs

    if not settings.on_gpu:
        return {"torch": torchs}
    found = {"triton": torch.compile(torchs, dynamic=False)}
    if settings.max_autotune:
        found["triton max-autotune"] = torch.compile(torchs, dynamic=False, mode=MAX_AUTOTUNE)
    if has_fa4():
        found["flash-attn-4"] = torch.compile(
            partial(torchs, kernel_options={"BACKEND": "FLASH"}), dynamic=False
        )
    return found


def _native(
    cell: Cell, settings: Settings, tensors: tuple[Tensor, Tensor, Tensor, Tensor]
) -> dict[str, Contender]:
    """Our kernels without functions, for the same mask if we have it."""
    sizes, name = _sizes(cell, settings), f"{OURS} native"

    def dense(**options: Any) -> Contender:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads_last = (x.transpose(1, 2) for x in (q, k, v))
            return api.attention(*heads_last, causal=True, **options).transpose(1, 2)

        return Contender(attend, tensors)

    if cell.mod == "causal":
        return {name: dense()}
    if cell.mod == "sliding_window":
        return {name: dense(window=(flex_cases.window_of(sizes), None))}
    if cell.mod == "softcap" and sizes.is_long:
        return {name: dense(softcap=flex_cases.CAP)}
    if cell.mod == "documents" and sizes.is_long:
        return {f"{OURS} packed": _packed(cell, sizes, tensors)}
    if cell.mod == "alibi":
        return {f"{OURS} causal": replace(dense(), is_same=False)}
    return {}


def _packed(cell: Cell, sizes: Sizes, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> Contender:
    """Documents as sequences that lie one after another, heads within tokens."""
    lengths = flex_cases.document_of(sizes).unique_consecutive(return_counts=True)[1].repeat(cell.B)
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    longest = int(lengths.max())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return api.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=True,
        )

    q, k, v, dout = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in tensors)
    return Contender(attend, (q, k, v, dout), lambda x: x.unflatten(0, (cell.B, cell.S)).transpose(1, 2))


_NAMES = ("out", "dq", "dk", "dv")


def exact(case: Case, b: int, h: int, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """out, dq, dk and dv of one head in float64, some rows at a time.

    tensors: the head's q, k, v and dout, (S, D) each.
    """
    q, k, v, dout = (x.detach().double() for x in tensors)
    S, D = q.shape
    k, v = k.requires_grad_(), v.requires_grad_()
    outs, dqs = [], []
    j = torch.arange(S, device=q.device)
    batch, head = (torch.tensor(x, device=q.device) for x in (b, h))
    for part in torch.arange(S, device=q.device).split(max(1, _SCORES // S)):
        rows, i = q[part].requires_grad_(), part[:, None]
        scores = rows @ k.T * D**-0.5
        if case.score_mod is not None:
            scores = each(case.score_mod)(scores, batch, head, i, j)
        seen = each(case.mask)(batch, head, i, j)
        out = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num() @ v
        (dq,) = torch.autograd.grad(out, rows, dout[part], retain_graph=True)
        out.backward(dout[part], inputs=[k, v])
        outs.append(out.detach())
        dqs.append(dq)
    assert k.grad is not None and v.grad is not None
    return [torch.cat(outs), torch.cat(dqs), k.grad, v.grad]


class _Exact(NamedTuple):
    """Results in float64 of two heads."""

    heads: tuple[tuple[int, int], ...]
    right: list[list[Tensor]]

    @classmethod
    def of(cls, case: Case, cell: Cell, tensors: tuple[Tensor, ...]) -> _Exact:
        heads = tuple(dict.fromkeys([(0, 0), (cell.B - 1, cell.Hq - 1)]))
        return cls(heads, [exact(case, b, h, tuple(x[b, h] for x in tensors)) for b, h in heads])

    def differences(self, found: list[Tensor]) -> dict[str, float]:
        """The largest norm of a difference over the norm, of each result that was found."""
        pairs = [
            (name, x[b, h].double(), right[i])
            for (b, h), right in zip(self.heads, self.right, strict=True)
            for i, (name, x) in enumerate(zip(_NAMES, found, strict=False))
        ]
        sizes = {name: 0.0 for name, *_ in pairs}
        for name, x, right in pairs:
            # NaN is not smaller than anything, and stays.
            difference = float((x - right).norm() / right.norm())
            sizes[name] = difference if not difference <= sizes[name] else sizes[name]
        return sizes


class _Entry(NamedTuple):
    """A contender's call, and what its first results were."""

    call: Call
    first_s: float
    differences: dict[str, float]


def _rows(cell: Cell, settings: Settings) -> Iterator[Row]:
    torch.compiler.reset()
    with _quiet():
        contenders = _contenders(cell, settings)
        with _turn:
            right = _Exact.of(_case(cell, settings), cell, contenders[OURS].tensors)
        for direction in _directions(cell, settings):
            yield _row(cell, direction, contenders, right, settings)


def _row(
    cell: Cell, direction: str, contenders: Mapping[str, Contender], right: _Exact, settings: Settings
) -> Row:
    entries: dict[str, _Entry] = {}
    left_out: dict[str, str] = {}
    with backends_used() as used:
        for name, contender in contenders.items():
            try:
                entries[name] = _entry(contender, direction, right, settings)
            # Peers raise errors of any type.
            except Exception as error:
                left_out[name] = sentence(error)
    row: Row = {
        **cell._asdict(),
        "direction": direction,
        "dtype": dtype_name(usual_dtype(settings.device)),
        "first_s": {name: entry.first_s for name, entry in entries.items()},
        "differences": {name: entry.differences for name, entry in entries.items()},
        "left_out": left_out,
        "served_by": dict(used.keys()),
        "seconds": {},
        "ratios": {},
    }
    if not entries:
        return row
    calls = {name: entry.call for name, entry in entries.items()}
    if settings.on_gpu and not settings.rounds:
        settings = replace(settings, rounds=_ROUNDS_IF_LONG if cell.S >= _LONG else _ROUNDS)
    with _turn:
        host = {name: _host_seconds(call, settings) for name, call in calls.items()}
        times = compare(calls, settings, GpuTimer(max(host.values())) if settings.on_gpu else None)
    row["host_seconds"] = host
    row["seconds"] = {name: spread._asdict() for name, spread in times.seconds.items()}
    if OURS in calls:
        row["ratios"] = {name: times.ratio(name, OURS)._asdict() for name in calls if name != OURS}
    return row | {"gpu": gpu.state()}


def _entry(contender: Contender, direction: str, right: _Exact, settings: Settings) -> _Entry:
    call = contender.call(direction)
    begun = time.perf_counter()
    found = call()
    if settings.on_gpu:
        torch.cuda.synchronize()
    first_s = time.perf_counter() - begun
    if not contender.is_same:
        return _Entry(call, first_s, {})
    differences = right.differences([contender.of_batches(x.detach()) for x in found])
    for name, difference in differences.items():
        # Written so that NaN is refused too.
        if not difference <= _TOLERANCE:
            raise ArithmeticError(f"its {name} differs from float64 by {difference:.2g} of the norm")
    return _Entry(call, first_s, differences)


_HOST_CALLS = 5
_SLEEP_CYCLES = 50_000_000
"""About 25 ms, in which a call is queued."""


def _host_seconds(call: Call, settings: Settings) -> float:
    """Seconds until a call returns while the device is busy with something else; the last one counts.

    Those before it prepare its launches, and what recognises it.
    """
    seconds = 0.0
    for _ in range(_HOST_CALLS):
        if settings.on_gpu:
            torch.cuda.synchronize()
            torch.cuda._sleep(_SLEEP_CYCLES)
        begun = time.perf_counter()
        call()
        seconds = time.perf_counter() - begun
    if settings.on_gpu:
        torch.cuda.synchronize()
    return seconds


def text(rows: list[Row]) -> str:
    """The table of milliseconds with the ratios, and their means."""
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    head = ["mod", "D", "S", "direction", *(f"{name} ms" for name in names)]
    head += [f"{name} / {OURS}" for name in names if name != OURS] + ["error"]
    lines = [
        [
            *(row[name] for name in ("mod", "D", "S", "direction")),
            *(_milliseconds(row, name) for name in names),
            *(_ratio(row, name) for name in names if name != OURS),
            f"{max(row['differences'].get(OURS, {'': 0.0}).values()):.4f}",
        ]
        for row in rows
    ]
    return "\n".join([table(head, lines), *_means(rows), *_remarks(rows)])


def _milliseconds(row: Row, name: str) -> str:
    return f"{1e3 * row['seconds'][name]['median']:.3f}" if name in row["seconds"] else ""


def _ratio(row: Row, name: str) -> str:
    return f"{row['ratios'][name]['median']:.3f}" if name in row["ratios"] else ""


def _means(rows: list[Row]) -> list[str]:
    """Geometric means of each contender's ratios, by direction, and the number of cells at 1 or more."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for name, ratio in row["ratios"].items():
            found.setdefault((name, row["direction"]), []).append(ratio["median"])
    return [
        f"{name}'s time / {OURS}'s, {direction}: geometric mean {statistics.geometric_mean(ratios):.3f}, "
        f"least {min(ratios):.3f}, at least 1.00 in {sum(x >= 1 for x in ratios)} of {len(ratios)} cells"
        for (name, direction), ratios in sorted(found.items())
    ]


def _remarks(rows: list[Row]) -> list[str]:
    served: dict[str, int] = {}
    for row in rows:
        for operator, backend in row["served_by"].items():
            what = f"{OURS} served {operator} by {backend}"
            served[what] = served.get(what, 0) + 1
    left_out: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, why in row["left_out"].items():
            left_out.setdefault((name, why), []).append(_where(row))
    return [
        *(f"{what}, cells: {number}" for what, number in served.items()),
        *(
            f"left out {name}: {why}, cells: {len(cells)}, the first one {cells[0]}"
            for (name, why), cells in left_out.items()
        ),
    ]


def _where(row: Row) -> str:
    return f"{row['mod']} D={row['D']} S={row['S']} {row['direction']}"


def _line(row: Row) -> str:
    """One row in one line, to follow a run."""
    times = [f"{name} {_milliseconds(row, name)} ms" for name in row["seconds"]]
    ratios = [f"{name} / {OURS} {_ratio(row, name)}" for name in row["ratios"]]
    errors = [f"{name} {max(found.values()):.4f}" for name, found in row["differences"].items() if found]
    words = [", ".join(x) for x in (times, ratios, [f"errors {' '.join(errors)}"]) if x]
    missing = [f"left out {name}: {why}" for name, why in row["left_out"].items()]
    return f"  {_where(row)}: {'; '.join([*words, *missing])}"
