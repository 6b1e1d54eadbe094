"""Section `attention`: full and causal attention, forward and backward, against torch's SDPA."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import flops
from .providers import Attend, serving
from .report import Row, dtype_name, ratio, table
from .settings import Settings
from .timing import compare

TITLE = "attention, forward and backward, against F.scaled_dot_product_attention"


def measure(settings: Settings) -> Iterator[Row]:
    """One row for each case, direction and provider; TFLOP/s beside the roof, a matrix product's."""
    roofs: dict[torch.dtype, float] = {}
    for case in _cases(settings):
        dtype = case["dtype"]
        if dtype not in roofs:
            roofs[dtype] = flops.matmul_roof(dtype, settings)
        yield from _measure_case(case, roofs[dtype], settings)


def _cases(settings: Settings) -> Iterator[dict[str, Any]]:
    B, H, sizes = (4, 16, [1024, 4096, 16384]) if settings.on_gpu else (2, 4, [256, 1024, 2048])
    if settings.quick:
        sizes = sizes[1:2]
    dtypes = [torch.bfloat16] if settings.on_gpu else [torch.float32, torch.bfloat16]
    for dtype, D, causal, S in itertools.product(dtypes, (64, 128), (False, True), sizes):
        yield {"dtype": dtype, "B": B, "H": H, "D": D, "causal": causal, "S": S}


def _measure_case(case: dict[str, Any], roof: float, settings: Settings) -> Iterator[Row]:
    B, S, H, D, causal = (case[name] for name in ("B", "S", "H", "D", "causal"))
    q, k, v, dout = (torch.randn(B, S, H, D, dtype=case["dtype"], device=settings.device) for _ in range(4))
    providers = serving(q, k, v, causal)
    forward_flops = flops.forward(B, S, H, D, causal)
    forwards = {name: _forward(attend, q, k, v, causal) for name, attend in providers.items()}
    backwards = {name: _backward(attend, q, k, v, causal, dout) for name, attend in providers.items()}
    for direction, calls, work in (
        ("forward", forwards, forward_flops),
        ("backward", backwards, flops.BACKWARD * forward_flops),
    ):
        result = compare(calls, settings)
        for name, seconds in result.seconds.items():
            yield {
                **case,
                "dtype": dtype_name(case["dtype"]),
                "direction": direction,
                "provider": name,
                "seconds": seconds._asdict(),
                "tflops": work / seconds.median / 1e12,
                "roof_tflops": roof / 1e12,
                "flash4_over_this": result.ratios[name]._asdict(),
            }


def _forward(attend: Attend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
    def call() -> None:
        with torch.no_grad():
            attend(q, k, v, causal)

    return call


def _backward(attend: Attend, q: Tensor, k: Tensor, v: Tensor, causal: bool, dout: Tensor) -> Any:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attend(q, k, v, causal)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def text(rows: list[Row]) -> str:
    cases = ["dtype", "D", "causal", "S", "direction", "provider"]
    return table(
        [*cases, "ms", "TFLOP/s", "of matmul", "flash4 / this"],
        [
            [
                *(row[name] for name in cases),
                f"{1e3 * row['seconds']['median']:.2f}",
                f"{row['tflops']:.3f}",
                f"{row['tflops'] / row['roof_tflops']:.0%}",
                "" if row["provider"] == "flash4" else ratio(row["flash4_over_this"]),
            ]
            for row in rows
        ],
    )
