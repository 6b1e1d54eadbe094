"""Section `models`: whole models, stock and swapped: wall-clock time of a step, and errors of the logits."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import replace_attention
from ..testing import backends_used
from .report import Row, dtype_name, ratio, table
from .settings import Settings
from .timing import Call, CpuTimer, compare

TITLE = "whole models, stock and swapped: steps by wall clock, and the distance of the logits"

MODES = ("training", "evaluation")


class Pair(NamedTuple):
    """A model before and after the swap, with the same parameters."""

    stock: nn.Module
    flash4: nn.Module
    arguments: dict[str, Tensor]
    """What both are called with."""


def vit_b_16(device: str, small: bool) -> Pair:
    """torchvision's, whose blocks are `nn.MultiheadAttention`."""
    VisionTransformer = importlib.import_module("torchvision.models").VisionTransformer

    sizes = (32, 2, 4, 64, 128) if small else (224, 12, 12, 768, 3072)
    image, layers, heads, hidden, mlp = sizes
    model = VisionTransformer(image, 16, layers, heads, hidden, mlp)
    # Its last layer is all zeros before training, and so would be everything that is compared.
    nn.init.normal_(model.heads.head.weight, std=0.02)
    swapped = copy.deepcopy(model)
    replace_attention(swapped)
    images = torch.randn(2 if small else 64, 3, image, image, device=device)
    return Pair(model, swapped, {"x": images})


def _transformers(kind: str, config: dict[str, Any], stock: str, shape: tuple[int, int], pad: bool) -> Pair:
    """A model of transformers with random weights, under its own attention `stock` and under ours."""
    import transformers

    from ..integrations.transformers import register

    register()
    head = getattr(transformers, f"{kind}ForMaskedLM" if kind == "Bert" else f"{kind}ForCausalLM")
    # A model keeps its config, which names its attention.
    model, swapped = (
        head._from_config(getattr(transformers, f"{kind}Config")(**config), attn_implementation=name)
        for name in (stock, "fa4")
    )
    swapped.load_state_dict(model.state_dict())
    arguments = {"input_ids": torch.randint(3, config["vocab_size"], shape)}
    if pad:
        B, S = shape
        lengths = torch.linspace(S // 2, S, B).long()
        arguments["attention_mask"] = (torch.arange(S) < lengths[:, None]).long()
    return Pair(model, swapped, arguments)


def llama(device: str, small: bool) -> Pair:
    """A decoder with 4 query heads to a KV head, and torch's SDPA before the swap."""
    sizes = (64, 128, 2, 4, 1) if small else (2048, 5632, 8, 32, 8)
    shape = (2, 16) if small else (4, 2048)
    return _transformers("Llama", _decoder(*sizes), "sdpa", shape, pad=False)


def bert_padded(device: str, small: bool) -> Pair:
    """An encoder on sequences padded to twice the shortest length, and torch's SDPA before the swap."""
    hidden, mlp, layers, heads = (64, 128, 2, 4) if small else (768, 3072, 12, 12)
    config = {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 128 if small else 30522,
        "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
    }
    return _transformers("Bert", config, "sdpa", (2, 16) if small else (32, 512), pad=True)


def gpt_oss(device: str, small: bool) -> Pair:
    """A decoder with sinks and windows in turns, which transformers serves without fused kernels."""
    sizes = (64, 64, 2, 4, 1) if small else (1024, 1024, 4, 16, 2)
    config = _decoder(*sizes) | {
        "head_dim": sizes[0] // sizes[3],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": 8 if small else 128,
    }
    return _transformers("GptOss", config, "eager", (2, 16) if small else (4, 2048), pad=False)


def _decoder(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 128 if hidden < 100 else 32000,
    }


MODELS: dict[str, tuple[str, Callable[[str, bool], Pair]]] = {
    "torchvision ViT": ("torchvision", vit_b_16),
    "transformers Llama": ("transformers", llama),
    "transformers BERT, padded": ("transformers", bert_padded),
    "transformers GPT-OSS": ("transformers", gpt_oss),
}
"""Models by name: the package that has it, and what makes the pair."""


def measure(settings: Settings) -> Iterator[Row]:
    """A row for each model and mode; models whose package is not installed are left out."""
    small = settings.quick or not settings.on_gpu
    dtype = torch.bfloat16 if settings.on_gpu else torch.float32
    for name, (package, make) in MODELS.items():
        if find_spec(package) is None:
            print(f"  left out {name}: {package} is not installed")
            continue
        torch.manual_seed(0)
        pair = make(settings.device, small)
        for mode in MODES:
            case = {"model": name, "mode": mode, "dtype": dtype_name(dtype)}
            if settings.selection.takes(case):
                yield case | _row(pair, mode, dtype, settings)


def _row(pair: Pair, mode: str, dtype: torch.dtype, settings: Settings) -> Row:
    arguments = {
        name: x.to(settings.device, dtype if x.is_floating_point() else x.dtype)
        for name, x in pair.arguments.items()
    }
    models = {"torch": pair.stock, "flash4": pair.flash4}
    calls: dict[str, Call] = {}
    logits = {}
    for who, model in models.items():
        model.to(settings.device, dtype)
        calls[who] = _call(model, arguments, mode, settings)
        with torch.no_grad():
            logits[who] = _logits(model.eval(), arguments).double()
    exact = copy.deepcopy(pair.stock).eval().float()
    with torch.no_grad():
        wanted = _logits(exact, {n: x.float() if x.is_floating_point() else x for n, x in arguments.items()})
    del exact
    for model in models.values():
        model.train(mode == "training")
    with backends_used() as used:
        calls["flash4"]()
    timer = CpuTimer(calls, settings.clock, torch.cuda.synchronize if settings.on_gpu else None)
    result = compare(calls, settings, timer)
    return {
        "served_by": dict(used.keys()),
        "seconds": {who: seconds._asdict() for who, seconds in result.seconds.items()},
        "torch_over_flash4": result.ratio("torch", "flash4")._asdict(),
        "error": {who: ((x - wanted).norm() / wanted.norm()).item() for who, x in logits.items()},
    }


def _logits(model: nn.Module, arguments: dict[str, Tensor]) -> Tensor:
    found = model(**arguments)
    logits: Tensor = found if isinstance(found, Tensor) else found.logits
    return logits


def _call(model: nn.Module, arguments: dict[str, Tensor], mode: str, settings: Settings) -> Call:
    settle = torch.cuda.synchronize if settings.on_gpu else (lambda: None)

    def evaluate() -> None:
        with torch.no_grad():
            _logits(model, arguments)
        settle()

    def train() -> None:
        _logits(model, arguments).float().square().mean().backward()
        model.zero_grad()
        settle()

    return train if mode == "training" else evaluate


def text(rows: list[Row]) -> str:
    return table(
        ["model", "mode", "dtype", "stock ms", "flash4 ms", "stock / flash4", "error of stock", "of flash4"],
        [
            [
                row["model"],
                row["mode"],
                row["dtype"],
                f"{1e3 * row['seconds']['torch']['median']:.2f}",
                f"{1e3 * row['seconds']['flash4']['median']:.2f}",
                ratio(row["torch_over_flash4"]),
                f"{row['error']['torch']:.1e}",
                f"{row['error']['flash4']:.1e}",
            ]
            for row in rows
        ],
    )
