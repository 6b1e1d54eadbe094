"""PyTorch's own ModuleInfo samples: the modules as torch tests them, stock against swapped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import ModuleInput, module_db

from flash4_torch.nn import MultiheadAttention, replace_attention

SAMPLED = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.Transformer,
)
INFOS = {info.module_cls.__name__: info for info in module_db if info.module_cls in SAMPLED}


def samples(name: str, dtype: torch.dtype, training: bool) -> list[ModuleInput]:
    torch.manual_seed(0)
    info = INFOS[name]
    return info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)


def leaf(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor | None]:
    """Outputs, and the gradients of all inputs and parameters for a loss that looks at every output."""
    args = tuple(map(leaf, args))
    kwargs = {name: leaf(x) for name, x in kwargs.items()}
    result = module(*args, **kwargs)
    outputs = [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]
    if not any(x.requires_grad for x in outputs):
        return outputs
    loss = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in outputs)
    inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.requires_grad]
    leaves = [*inputs, *module.parameters()]
    return [*outputs, *torch.autograd.grad(loss, leaves, allow_unused=True)]


def test_torch_has_samples_of_all_four() -> None:
    assert len(INFOS) == len(SAMPLED)
    assert all(len(samples(name, torch.float32, True)) > 30 for name in INFOS)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but self.use_nested_tensor is False")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
@pytest.mark.parametrize("name", INFOS)
def test_swapped_computes_the_same(name: str, mode: str, dtype: torch.dtype) -> None:
    for sample in samples(name, dtype, mode == "train"):
        constructor, call = sample.constructor_input, sample.forward_input
        stock = INFOS[name].module_cls(*constructor.args, **constructor.kwargs, dtype=dtype)
        stock.train(mode == "train")
        swapped = copy.deepcopy(stock)
        assert replace_attention(swapped)
        with torch.set_grad_enabled(mode != "no_grad"):
            expected = run(stock, call.args, call.kwargs)
            actual = run(swapped, call.args, call.kwargs)
        # Samples lie in [-9, 9], and large scores amplify rounding.
        tolerance = 1e-4 if dtype == torch.float32 else 1e-9
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_unbatched_is_a_batch_of_one(mode: str) -> None:
    """Torch's reference for its samples of MultiheadAttention, with our module made by its constructor."""
    for sample in samples("MultiheadAttention", torch.float64, mode == "train"):
        constructor, call = sample.constructor_input, sample.forward_input
        module = MultiheadAttention(*constructor.args, **constructor.kwargs, dtype=torch.float64)
        module.train(mode == "train")
        expected = sample.reference_fn(module, *call.args, **call.kwargs)
        torch.testing.assert_close(module(*call.args, **call.kwargs), expected)
