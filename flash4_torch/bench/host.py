"""Section `host`: microseconds a call at a size so small that only the way to the kernel is left."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import api, ops
from . import features
from .report import Row, table
from .settings import Settings, usual_dtype
from .timing import compare

TITLE = "host microseconds a call, at B=1 S=16 H=1 D=16"

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_SDPA = "F.scaled_dot_product_attention"
_RULES = (0.25, None, None, 0.0, 0.0, False)


def _operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = torch.ops.flash4.attention.default(q, k, v, None, None, *_RULES)[0]
    return out


def _function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.attention(
        q,
        k,
        v,
        None,
        None,
        scale=0.25,
        window_left=None,
        window_right=None,
        softcap=0.0,
        dropout_p=0.0,
        deterministic=False,
    )[0]


def _heads_first(attend: Callable[..., Tensor]) -> Attend:
    """A function with heads before the sequence, used as one with heads after it, as ours is."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    return call


CONTENDERS: dict[str, Attend] = {
    "flash4.attention": api.attention,
    "flash4.scaled_dot_product_attention": _heads_first(api.scaled_dot_product_attention),
    "flash4.ops.attention": _function,
    "torch.ops.flash4.attention": _operator,
    _SDPA: _heads_first(F.scaled_dot_product_attention),
}


def measure(settings: Settings) -> Iterator[Row]:
    """One row for each way to call and contender. Threads do not help at this size, so there is one.

    torch.compile needs a C++ compiler, without one its rows are left out.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _rows("no grad", _calls(settings, CONTENDERS, _no_grad), settings)
        yield from _rows("forward, recorded for autograd", _calls(settings, CONTENDERS, _recorded), settings)
        yield from _rows("forward + backward", _calls(settings, CONTENDERS, _step), settings)
        if any(map(shutil.which, ("c++", "g++", "clang++"))):
            compiled = {
                name: torch.compile(CONTENDERS[name], fullgraph=True) for name in ("flash4.attention", _SDPA)
            }
            yield from _rows("compiled, no grad", _calls(settings, compiled, _no_grad), settings)
            yield from _rows("compiled, forward + backward", _calls(settings, compiled, _step), settings)
    finally:
        torch.set_num_threads(threads)


Prepare = Callable[[Attend, tuple[Tensor, ...], Tensor], Callable[[], Any]]


def _calls(
    settings: Settings, contenders: Mapping[str, Attend], prepare: Prepare
) -> dict[str, Callable[[], Any]]:
    dtype = usual_dtype(settings.device)
    q, k, v, dout = (torch.randn(1, 16, 1, 16, dtype=dtype, device=settings.device) for _ in range(4))
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    return {name: prepare(attend, inputs, dout) for name, attend in contenders.items()}


def _no_grad(attend: Attend, inputs: tuple[Tensor, ...], dout: Tensor) -> Callable[[], Any]:
    return partial(features.forward, partial(attend, *inputs))


def _recorded(attend: Attend, inputs: tuple[Tensor, ...], dout: Tensor) -> Callable[[], Any]:
    return partial(attend, *inputs)


def _step(attend: Attend, inputs: tuple[Tensor, ...], dout: Tensor) -> Callable[[], Any]:
    return partial(features.step, partial(attend, *inputs), inputs, dout)


def _rows(mode: str, calls: Mapping[str, Callable[[], Any]], settings: Settings) -> Iterator[Row]:
    # The host is what is timed, on machines with a GPU too.
    result = compare(calls, replace(settings, device="cpu"))
    sdpa = result.seconds[_SDPA].median
    for name, seconds in result.seconds.items():
        yield {
            "mode": mode,
            "call": name,
            "seconds": seconds._asdict(),
            "over_sdpa": seconds.median / sdpa,
        }


def text(rows: list[Row]) -> str:
    return table(
        ["mode", "call", "µs", "quartiles", "of SDPA's"],
        [
            [
                row["mode"],
                row["call"],
                f"{1e6 * row['seconds']['median']:.1f}",
                f"{1e6 * row['seconds']['low']:.1f} to {1e6 * row['seconds']['high']:.1f}",
                f"{row['over_sdpa']:.2f}",
            ]
            for row in rows
        ],
    )
