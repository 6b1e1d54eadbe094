"""PyTorch's own OpInfo samples of its two attention functions, run against ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput

from flash4_torch import scaled_dot_product_attention
from flash4_torch.nn import MultiheadAttention

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
OPS = {op.name: op for op in op_db}


def samples(name: str, dtype: torch.dtype) -> list[SampleInput]:
    """Torch's samples, scaled from [-9, 9] to [-1, 1]: beyond, softmax shows only the largest score.

    They are made not to require gradients, because only those cover all the cases; the tests ask for the
    gradients nevertheless.
    """
    torch.manual_seed(0)
    op = OPS[f"nn.functional.{name}"]
    assert dtype in op.dtypes
    drawn = op.sample_inputs("cpu", dtype, requires_grad=False)
    return [sample.transform(lambda x: x / 9 if isinstance(x, Tensor) else x) for sample in drawn]


def assert_as_exact(actual: list[Tensor], stock: list[Tensor], exact: list[Tensor]) -> None:
    """Ours is as near to the float64 result as stock in the same dtype is, give or take a factor."""
    for x, y, truth in zip(actual, stock, exact, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        noise = 16 * torch.finfo(x.dtype).eps * max(1.0, *(z.abs().max().item() for z in exact))
        allowed = 3 * (y.double() - truth).abs().max().item() + noise
        assert (x.double() - truth).abs().max().item() <= allowed


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """The output, and the gradients of `inputs` and of a floating attn_mask."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    mask = options.get("attn_mask")
    if mask is not None:
        options["attn_mask"] = mask.detach().clone().requires_grad_()
        leaves.append(options["attn_mask"])
    out = function(*leaves[: len(inputs)], **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, leaves, weights)]


def wide(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.double() if isinstance(x, Tensor) else x for name, x in options.items()}


@every_dtype
def test_scaled_dot_product_attention(dtype: torch.dtype) -> None:
    drawn = samples("scaled_dot_product_attention", dtype)
    assert len(drawn) == 25
    for sample in drawn:
        inputs = [sample.input, *sample.args]
        options = sample.kwargs | {"dropout_p": 0.0}
        stock = with_gradients(F.scaled_dot_product_attention, inputs, **options)
        doubles = [x.double() for x in inputs]
        exact = with_gradients(F.scaled_dot_product_attention, doubles, **wide(options))
        assert_as_exact(with_gradients(scaled_dot_product_attention, inputs, **options), stock, exact)


@every_dtype
def test_scaled_dot_product_attention_with_dropout(dtype: torch.dtype) -> None:
    drawn = [s for s in samples("scaled_dot_product_attention", dtype) if s.kwargs["dropout_p"]]
    assert len(drawn) == 12
    for sample in drawn:
        query, (key, value), options = sample.input, sample.args, sample.kwargs
        # With the identity for values, the output is the weights: each is dropped, or doubled.
        eye = torch.eye(value.shape[-2], dtype=dtype).expand(*value.shape[:-1], -1)
        plain = F.scaled_dot_product_attention(query, key, eye, is_causal=options["is_causal"])
        dropped = scaled_dot_product_attention(query, key, eye, **options)
        kept = dropped != 0
        assert 0.2 < kept.sum() / (plain != 0).sum() < 0.8
        torch.testing.assert_close(dropped[kept], (plain / (1 - options["dropout_p"]))[kept])


def module_of(sample: SampleInput, cls: type[nn.MultiheadAttention]) -> nn.MultiheadAttention:
    """The module that holds the weights which the functional form takes as arguments."""
    _, _, embed_dim, num_heads, in_weight, in_bias, bias_k, bias_v, zero_attn, p, out_weight, out_bias = (
        sample.args
    )
    separate = sample.kwargs["use_separate_proj_weight"]
    module = cls(embed_dim, num_heads, dropout=p, add_zero_attn=zero_attn, dtype=sample.input.dtype)
    given = {
        "in_proj_weight": in_weight,
        "in_proj_bias": in_bias,
        "bias_k": bias_k,
        "bias_v": bias_v,
        **{name: sample.kwargs[name] for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")},
    }
    for name, tensor in given.items():
        setattr(module, name, None if tensor is None else nn.Parameter(tensor.detach().clone()))
    module.out_proj.weight = nn.Parameter(out_weight.detach().clone())
    module.out_proj.bias = nn.Parameter(out_bias.detach().clone())
    assert (module.in_proj_weight is None) == separate
    return module.train(sample.kwargs["training"])


def functional(sample: SampleInput, dtype: torch.dtype) -> list[Tensor]:
    """Torch's function without dropout, and the gradients in the order that `forward` gives them."""

    def leaf(x: Any) -> Any:
        return x.detach().to(dtype).requires_grad_() if isinstance(x, Tensor) else x

    query, args = leaf(sample.input), [leaf(x) for x in sample.args]
    kwargs = {name: leaf(x) for name, x in sample.kwargs.items()}
    outputs = F.multi_head_attention_forward(query, *args, **kwargs | {"training": False})
    named = dict(zip(("in_proj_weight", "in_proj_bias", "bias_k", "bias_v"), args[4:8], strict=True))
    named |= {"out_proj.weight": args[10], "out_proj.bias": args[11]} | kwargs
    return [*outputs, *gradients(outputs, [query, *args[:2], kwargs["attn_mask"]], named)]


def forward(module: nn.MultiheadAttention, sample: SampleInput) -> list[Tensor]:
    query, key, value = (x.detach().requires_grad_() for x in (sample.input, *sample.args[:2]))
    mask = sample.kwargs["attn_mask"]
    mask = None if mask is None else mask.detach().requires_grad_()
    outputs = module(query, key, value, attn_mask=mask)
    return [*outputs, *gradients(outputs, [query, key, value, mask], dict(module.named_parameters()))]


def gradients(
    outputs: tuple[Tensor, ...], inputs: list[Tensor | None], parameters: dict[str, Any]
) -> list[Tensor]:
    names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
    names += ("bias_k", "bias_v", "out_proj.weight", "out_proj.bias")
    leaves = [x for x in (*inputs, *map(parameters.get, names)) if x is not None]
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in outputs]
    return list(torch.autograd.grad(outputs, leaves, weights))


@every_dtype
def test_multi_head_attention_forward(dtype: torch.dtype) -> None:
    drawn = samples("multi_head_attention_forward", dtype)
    assert len(drawn) == 192
    for sample in drawn:
        stock, exact = functional(sample, dtype), functional(sample, torch.float64)
        actual = forward(module_of(sample, MultiheadAttention).eval(), sample)
        assert_as_exact(actual, stock, exact)


def test_multi_head_attention_forward_with_dropout() -> None:
    drawn = [s for s in samples("multi_head_attention_forward", torch.float64) if s.kwargs["training"]]
    assert len(drawn) == 96
    kept = total = 0
    for sample in drawn:
        module = module_of(sample, MultiheadAttention)
        arguments = (sample.input, *sample.args[:2])
        call = {"attn_mask": sample.kwargs["attn_mask"], "average_attn_weights": False}
        _, dropped = module(*arguments, **call)
        plain = functional(sample, torch.float64)[0]
        out, weights = module.eval()(*arguments, **call)
        torch.testing.assert_close(out, plain)
        where = dropped != 0
        torch.testing.assert_close(dropped[where], weights[where] * 2)
        kept, total = kept + where.sum(), total + where.numel()
    assert 0.45 < kept / total < 0.55
