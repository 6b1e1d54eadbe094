"""Section `module`: a training step of our MultiheadAttention against torch's, time and peak memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import MultiheadAttention
from .peak import peak_mib
from .report import Row, dtype_name, ratio, table
from .settings import Settings, usual_dtype
from .timing import compare

TITLE = "training step of MultiheadAttention, time and peak memory on top of the inputs, against torch's"

EMBED, HEADS, BATCH = 512, 8, 4
_SMALL = 32

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout 0.1": {"dropout": 0.1},
    "causal": {"causal": True},
    "key_padding_mask": {"padding": True},
    "need_weights": {"need_weights": True},
    "need_weights, dropout 0.1": {"need_weights": True, "dropout": 0.1},
}
CLASSES = {"flash4": MultiheadAttention, "torch": nn.MultiheadAttention}


def measure(settings: Settings) -> Iterator[Row]:
    S = _length(settings)
    for case, options in CASES.items():
        steps = {who: prepare(S, settings.device, who, **options) for who in CLASSES}
        result = compare(steps, settings)
        peaks = {who: peak_mib(settings, _prepare_case, S, _SMALL, who, case) for who in CLASSES}
        yield {
            "case": case,
            "embed_dim": EMBED,
            "num_heads": HEADS,
            "B": BATCH,
            "S": S,
            "dtype": dtype_name(usual_dtype(settings.device)),
            "seconds": {who: seconds._asdict() for who, seconds in result.seconds.items()},
            "flash4_over_torch": result.ratio("flash4", "torch")._asdict(),
            "peak_mib": peaks,
        }


def _length(settings: Settings) -> int:
    if settings.on_gpu:
        return 4096
    return 256 if settings.quick else 512


def prepare(
    S: int,
    device: str,
    who: str,
    *,
    need_weights: bool = False,
    dropout: float = 0.0,
    causal: bool = False,
    padding: bool = False,
) -> Callable[[], Any]:
    """The step of a self-attention module in training, on random inputs that want gradients, too."""
    dtype = usual_dtype(device)
    module = CLASSES[who](EMBED, HEADS, dropout=dropout, batch_first=True, device=device, dtype=dtype)
    x = torch.randn(BATCH, S, EMBED, device=device, dtype=dtype, requires_grad=True)
    dout = torch.randn_like(x)
    options: dict[str, Any] = {"need_weights": need_weights}
    if causal:
        mask = nn.Transformer.generate_square_subsequent_mask(S, torch.device(device), dtype)
        options |= {"attn_mask": mask, "is_causal": True}
    if padding:
        # The last eighth of every sequence.
        options["key_padding_mask"] = (torch.arange(S, device=device) >= S - S // 8).expand(BATCH, S)
    return partial(_step, module, x, dout, options)


def _prepare_case(S: int, device: str, who: str, case: str) -> Callable[[], Any]:
    return prepare(S, device, who, **CASES[case])


def _step(module: nn.MultiheadAttention, x: Tensor, dout: Tensor, options: dict[str, Any]) -> Any:
    out, weights = module(x, x, x, **options)
    return out, weights, torch.autograd.grad(out, (x, *module.parameters()), dout)


def text(rows: list[Row]) -> str:
    return table(
        ["case", "S", "flash4 ms", "torch ms", "flash4 / torch", "flash4 MiB", "torch MiB"],
        [
            [
                row["case"],
                row["S"],
                f"{1e3 * row['seconds']['flash4']['median']:.1f}",
                f"{1e3 * row['seconds']['torch']['median']:.1f}",
                ratio(row["flash4_over_torch"]),
                f"{row['peak_mib']['flash4']:.0f}",
                f"{row['peak_mib']['torch']:.0f}",
            ]
            for row in rows
        ],
    )
