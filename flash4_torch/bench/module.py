"""Section `module`: a training step of our MultiheadAttention against torch's, time and peak memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import MultiheadAttention
from .peak import peak_mib
from .report import Row, dtype_name, ratio, table
from .settings import Settings, usual_dtype
from .timing import compare

TITLE = "training step of MultiheadAttention, time and peak memory on top of the inputs, against torch's"


class Size(NamedTuple):
    """Sizes of a module's input: embed_dim, heads, batch and sequence length."""

    E: int
    H: int
    B: int
    S: int


CPU_SIZE = Size(512, 8, 4, 512)
GPU_SIZES = (
    Size(2048, 16, 4, 4096),
    Size(1024, 16, 8, 2048),
    Size(768, 12, 32, 512),
    Size(2048, 16, 1, 16384),
)
_SMALL = 32

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "dropout 0.1": {"dropout": 0.1},
    "causal, dropout 0.1": {"causal": True, "dropout": 0.1},
    "key_padding_mask": {"padding": True},
    "need_weights": {"need_weights": True},
    "need_weights, dropout 0.1": {"need_weights": True, "dropout": 0.1},
}
_AT_EVERY_SIZE = ("plain", "causal", "dropout 0.1", "causal, dropout 0.1")
"""Cases that run at every size; the others run at the first only: torch's 16384-key weights would not fit."""
CLASSES = {"flash4": MultiheadAttention, "torch": nn.MultiheadAttention}


def measure(settings: Settings) -> Iterator[Row]:
    for size, case in _cases(settings):
        steps = {who: prepare(size.S, settings.device, who, size, **CASES[case]) for who in CLASSES}
        result = compare(steps, settings)
        peaks = {who: peak_mib(settings, _prepare_case, size.S, _SMALL, who, size, case) for who in CLASSES}
        yield {
            "case": case,
            "embed_dim": size.E,
            "num_heads": size.H,
            "B": size.B,
            "S": size.S,
            "dtype": dtype_name(usual_dtype(settings.device)),
            "seconds": {who: seconds._asdict() for who, seconds in result.seconds.items()},
            "flash4_over_torch": result.ratio("flash4", "torch")._asdict(),
            "peak_mib": peaks,
        }


def _cases(settings: Settings) -> Iterator[tuple[Size, str]]:
    sizes = GPU_SIZES if settings.on_gpu else (CPU_SIZE._replace(S=256) if settings.quick else CPU_SIZE,)
    for size in sizes:
        for case in CASES if size is sizes[0] else _AT_EVERY_SIZE:
            if settings.selection.takes({"S": size.S, "feature": case}):
                yield size, case


def prepare(
    S: int,
    device: str,
    who: str,
    size: Size = CPU_SIZE,
    *,
    need_weights: bool = False,
    dropout: float = 0.0,
    causal: bool = False,
    padding: bool = False,
) -> Callable[[], Any]:
    """A training step of a self-attention module, on S random tokens that also require gradients."""
    dtype = usual_dtype(device)
    module = CLASSES[who](size.E, size.H, dropout=dropout, batch_first=True, device=device, dtype=dtype)
    x = torch.randn(size.B, S, size.E, device=device, dtype=dtype, requires_grad=True)
    dout = torch.randn_like(x)
    options: dict[str, Any] = {"need_weights": need_weights}
    if causal:
        mask = nn.Transformer.generate_square_subsequent_mask(S, torch.device(device), dtype)
        options |= {"attn_mask": mask, "is_causal": True}
    if padding:
        # The last eighth of every sequence.
        options["key_padding_mask"] = (torch.arange(S, device=device) >= S - S // 8).expand(size.B, S)
    return partial(_step, module, x, dout, options)


def _prepare_case(S: int, device: str, who: str, size: Size, case: str) -> Callable[[], Any]:
    return prepare(S, device, who, size, **CASES[case])


def _step(module: nn.MultiheadAttention, x: Tensor, dout: Tensor, options: dict[str, Any]) -> Any:
    out, weights = module(x, x, x, **options)
    return out, weights, torch.autograd.grad(out, (x, *module.parameters()), dout)


def text(rows: list[Row]) -> str:
    return table(
        ["case", "E", "H", "B", "S", "flash4 ms", "torch ms", "flash4 / torch", "flash4 MiB", "torch MiB"],
        [
            [
                row["case"],
                *(row[name] for name in ("embed_dim", "num_heads", "B", "S")),
                f"{1e3 * row['seconds']['flash4']['median']:.1f}",
                f"{1e3 * row['seconds']['torch']['median']:.1f}",
                ratio(row["flash4_over_torch"]),
                f"{row['peak_mib']['flash4']:.0f}",
                f"{row['peak_mib']['torch']:.0f}",
            ]
            for row in rows
        ],
    )
