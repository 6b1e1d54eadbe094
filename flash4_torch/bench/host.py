"""Section `host`: microseconds per call at a size so small that only the path to the kernel matters."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import api, ops
from ..problem import CallOptions
from ..testing import backends_used
from . import features, providers
from .cases import Cell
from .peers import prepare
from .providers import Provider
from .report import Row, table
from .settings import Settings
from .timing import CpuTimer, compare

TITLE = "host microseconds of a small call: B1 S16 H1 D16 on a CPU, B1 S128 H2 D64 on a GPU"

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_SDPA = "F.scaled_dot_product_attention"
_TRANSFORMERS_SDPA = "transformers: sdpa"
_CPU_CELL = Cell(D=16, causal=False, S=16, B=1, Hq=1, Hk=1, dtype="float32")
_GPU_CELL = Cell(D=64, causal=False, S=128, B=1, Hq=2, Hk=2)


def _operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = torch.ops.flash4.attention.default(
        q, k, v, None, None, None, q.shape[-1] ** -0.5, None, None, 0.0, 0.0, False
    )[0]
    return out


def _function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.attention(q, k, v, None, None, None, CallOptions(scale=q.shape[-1] ** (-0.5)))[0]


def _heads_first(attend: Callable[..., Tensor]) -> Attend:
    """Adapts a function with heads before the sequence to our layout, with heads after it."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    return call


class _Nothing(torch.autograd.Function):
    """A baseline: a Python function that allocates results and gradients, and launches nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


NOTHING = "an autograd.Function that launches nothing"
CONTENDERS: dict[str, Attend] = {
    "flash4.attention": api.attention,
    "flash4.scaled_dot_product_attention": _heads_first(api.scaled_dot_product_attention),
    "flash4.ops.attention": _function,
    "torch.ops.flash4.attention": _operator,
    _SDPA: _heads_first(F.scaled_dot_product_attention),
}


def measure(settings: Settings) -> Iterator[Row]:
    """One row per way to call and contender. Threads do not help at this size, so there is one.

    The rows of transformers are left out where it is not installed, those of torch.compile without the C++
    compiler that it needs.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        everyone = CONTENDERS | _peers(settings)
        yield from _rows("nothing recorded", _calls(settings, everyone, _unrecorded), settings)
        everyone = CONTENDERS | {NOTHING: _Nothing.apply}
        yield from _rows("forward, recorded for autograd", _calls(settings, everyone, _recorded), settings)
        yield from _rows("forward + backward", _calls(settings, everyone, _step), settings)
        if importlib.util.find_spec("transformers"):
            calls = _calls(settings, _transformers(), _unrecorded)
            yield from _rows("transformers, nothing recorded", calls, settings, _TRANSFORMERS_SDPA)
        if any(map(shutil.which, ("c++", "g++", "clang++"))):
            compiled = {
                name: torch.compile(CONTENDERS[name], fullgraph=True) for name in ("flash4.attention", _SDPA)
            }
            yield from _rows("compiled", _calls(settings, compiled, _unrecorded), settings)
            yield from _rows("compiled, forward + backward", _calls(settings, compiled, _step), settings)
    finally:
        torch.set_num_threads(threads)


def _transformers() -> dict[str, Attend]:
    """Our function and transformers' own for SDPA, as its layers find and call them."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from ..integrations import transformers

    transformers.register()
    layer = nn.Module().eval()
    layer.is_causal, layer.num_key_value_groups = False, 1  # type: ignore[assignment]

    def call(attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = attend(layer, *heads, None, dropout=0.0, scaling=q.shape[-1] ** -0.5)[0]
        return out

    names = (transformers.NAME, "sdpa")
    return {f"transformers: {name}": partial(call, ALL_ATTENTION_FUNCTIONS[name]) for name in names}


def _cell(settings: Settings) -> Cell:
    """The cell of this device, so small that the kernel takes less time than its call."""
    return _GPU_CELL if settings.on_gpu else _CPU_CELL


def _peers(settings: Settings) -> dict[str, Attend]:
    """Forwards of other FlashAttention packages, below their autograd functions."""
    found, missing = providers.available(settings.device)
    cell = _cell(settings)
    others = {name: provider for name, provider in found.items() if name in ("fa3", "fa4")}
    entry = prepare(others, cell, "forward", settings.device)
    for name, why in (missing | entry.left_out).items():
        print(f"  left out {name}: {why}", file=sys.stderr)
    return {name: partial(_forward_of, others[name], cell) for name in entry.calls}


def _forward_of(provider: Provider, cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return provider.forward(q, k, v, cell)[0]


Making = Callable[[Attend, tuple[Tensor, ...], Tensor], Callable[[], Any]]


def _calls(
    settings: Settings, contenders: Mapping[str, Attend], make: Making
) -> dict[str, Callable[[], Any]]:
    *inputs, dout = _cell(settings).inputs(settings.device)
    leaves = tuple(x.requires_grad_() for x in inputs)
    return {name: make(attend, leaves, dout) for name, attend in contenders.items()}


def _unrecorded(attend: Attend, inputs: tuple[Tensor, ...], dout: Tensor) -> Callable[[], Any]:
    return partial(attend, *(x.detach() for x in inputs))


def _recorded(attend: Attend, inputs: tuple[Tensor, ...], dout: Tensor) -> Callable[[], Any]:
    return partial(attend, *inputs)


def _step(attend: Attend, inputs: tuple[Tensor, ...], dout: Tensor) -> Callable[[], Any]:
    return partial(features.step, partial(attend, *inputs), inputs, dout)


def _rows(
    mode: str, calls: Mapping[str, Callable[[], Any]], settings: Settings, baseline: str = _SDPA
) -> Iterator[Row]:
    served_by = {}
    for name, call in calls.items():
        with backends_used() as used:
            call()
        served_by[name] = dict(used.keys())
    # The host is timed, also on machines with a GPU.
    timer = CpuTimer(calls, settings.clock, torch.cuda.synchronize if settings.on_gpu else None)
    result = compare(calls, settings, timer)
    sdpa = result.seconds[baseline].median
    for name, seconds in result.seconds.items():
        yield {
            **_cell(settings).case(),
            "mode": mode,
            "call": name,
            "served_by": served_by[name],
            "seconds": seconds._asdict(),
            "over_sdpa": seconds.median / sdpa,
        }


def text(rows: list[Row]) -> str:
    return table(
        ["mode", "call", "served by", "µs", "quartiles", "of SDPA's"],
        [
            [
                row["mode"],
                row["call"],
                ", ".join(sorted(set(row.get("served_by", {}).values()))),
                f"{1e6 * row['seconds']['median']:.1f}",
                f"{1e6 * row['seconds']['low']:.1f} to {1e6 * row['seconds']['high']:.1f}",
                f"{row['over_sdpa']:.2f}",
            ]
            for row in rows
        ],
    )
