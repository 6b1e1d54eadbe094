"""MultiheadAttention against torch's own module: values, gradients, layouts, errors, memory, and who calls it."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from flash4_torch import ops
from flash4_torch.errors import ArgumentError
from flash4_torch.nn import MultiheadAttention, replace_attention

laws = settings(derandomize=True, deadline=None, max_examples=150)


@dataclass(frozen=True)
class Case:
    """One module and one call of it."""

    N: int = 2
    L: int = 4
    S: int = 5
    H: int = 2
    D: int = 3
    batched: bool = True
    batch_first: bool = False
    bias: bool = True
    bias_kv: bool = False
    zero_attn: bool = False
    kdim: int | None = None
    vdim: int | None = None
    sharing: str = "none"
    padding: str = "none"
    mask: str = "none"
    need_weights: bool = True
    average: bool = True
    dtype: torch.dtype = torch.float64
    seed: int = 0

    @property
    def E(self) -> int:
        return self.H * self.D

    def module(self, cls: type[nn.MultiheadAttention], **options: Any) -> nn.MultiheadAttention:
        module = cls(
            self.E,
            self.H,
            bias=self.bias,
            add_bias_kv=self.bias_kv,
            add_zero_attn=self.zero_attn,
            kdim=self.kdim,
            vdim=self.vdim,
            batch_first=self.batch_first,
            dtype=self.dtype,
            **options,
        )
        generator = torch.Generator().manual_seed(self.seed)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)
        return module

    def call(self) -> dict[str, Any]:
        """Arguments of forward; every row may attend to key 0 at least, where stock's paths agree."""
        generator = torch.Generator().manual_seed(self.seed + 1)

        def floats(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype)

        def tokens(length: int, width: int) -> Tensor:
            if not self.batched:
                return floats(length, width)
            return floats(self.N, length, width) if self.batch_first else floats(length, self.N, width)

        def ignored(*shape: int) -> Tensor:
            mask = torch.rand(*shape, generator=generator) < 0.4
            mask[..., :1] = False
            return mask

        def as_kind(mask: Tensor, kind: str) -> Tensor:
            return mask if kind == "bool" else floats(*mask.shape).masked_fill(mask, -torch.inf)

        query = tokens(self.L, self.E)
        key = query if self.sharing == "all" else tokens(self.S, self.kdim or self.E)
        value = key if self.sharing in ("all", "kv") else tokens(self.S, self.vdim or self.E)
        call: dict[str, Any] = {"query": query, "key": key, "value": value}
        if self.padding != "none":
            shape = (self.N, self.S) if self.batched else (self.S,)
            call["key_padding_mask"] = as_kind(ignored(*shape), self.padding)
        if self.mask != "none":
            kind, form = self.mask.split()
            if form == "causal":
                later = torch.ones(self.L, self.S, dtype=torch.bool).triu(1)
                zeros = torch.zeros(self.L, self.S, dtype=self.dtype)
                call["attn_mask"] = later if kind == "bool" else zeros.masked_fill(later, -torch.inf)
                call["is_causal"] = True
            else:
                planes = self.H * (self.N if self.batched else 1)
                shape = (self.L, self.S) if form == "2d" else (planes, self.L, self.S)
                call["attn_mask"] = as_kind(ignored(*shape), kind)
        return call | {"need_weights": self.need_weights, "average_attn_weights": self.average}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sharing = draw(st.sampled_from(["none", "kv", "all"]))
    L = draw(st.integers(0, 5))
    kdim = None if sharing == "all" else draw(st.sampled_from([None, None, 1, 7]))
    return Case(
        N=draw(st.integers(0, 3)),
        L=L,
        S=L if sharing == "all" else draw(st.integers(0, 6)),
        H=draw(st.integers(1, 3)),
        D=draw(st.sampled_from([1, 4, 5, 8])),
        batched=draw(st.booleans()),
        batch_first=draw(st.booleans()),
        bias=draw(st.booleans()),
        bias_kv=draw(st.booleans()),
        zero_attn=draw(st.booleans()),
        kdim=kdim,
        vdim=kdim if sharing != "none" else draw(st.sampled_from([None, None, 2, 9])),
        sharing=sharing,
        padding=draw(st.sampled_from(["none", "bool", "float"])),
        mask=draw(
            st.sampled_from(
                ["none", "bool 2d", "float 2d", "bool 3d", "float 3d", "bool causal", "float causal"]
            )
        ),
        need_weights=draw(st.booleans()),
        average=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])),
        seed=draw(st.integers(0, 9)),
    )


def stock_serves(case: Case) -> bool:
    """False where stock cannot tell the sizes of an empty mask for each head."""
    N = case.N if case.batched else 1
    per_head = "3d" in case.mask or case.padding != "none"
    return not per_head or case.need_weights or N * case.L * case.S > 0


def run(module: nn.MultiheadAttention, call: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs and, for one random loss of them, the gradients of all floating inputs and parameters."""
    call = dict(call)
    leaves: dict[int, Tensor] = {}
    for name, x in call.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            call[name] = leaves.setdefault(id(x), x.detach().clone().requires_grad_())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched")
        out, weights = module(**call)
    results = {"out": out} if weights is None else {"out": out, "weights": weights}
    generator = torch.Generator().manual_seed(99)
    loss = torch.zeros((), dtype=torch.float64)
    for x in results.values():
        loss = loss + (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
    module.zero_grad()
    loss.backward()
    for name, x in [*call.items(), *module.named_parameters()]:
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
            results[f"d {name}"] = torch.zeros_like(x) if x.grad is None else x.grad
    return results


def in_float64(module: nn.MultiheadAttention, call: dict[str, Any]) -> dict[str, Tensor]:
    memo: dict[int, Tensor] = {}

    def widen(x: Any) -> Any:
        is_float = isinstance(x, Tensor) and x.is_floating_point()
        return memo.setdefault(id(x), x.double()) if is_float else x

    return run(copy.deepcopy(module).double(), {name: widen(x) for name, x in call.items()})


def assert_as_exact(ours: dict[str, Tensor], stock: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Ours is as near to the float64 result as stock in the same dtype is, give or take a factor."""
    assert ours.keys() == stock.keys()
    # Some results are differences of others, and may be near zero.
    magnitude = max([1.0, *(x.abs().max().item() for x in exact.values() if x.numel())])
    for name, x in ours.items():
        assert x.shape == stock[name].shape and x.dtype == stock[name].dtype, name
        if x.numel() == 0:
            continue
        truth = exact[name]
        noise = 16 * torch.finfo(x.dtype).eps * magnitude
        allowed = 3 * (stock[name].double() - truth).abs().max().item() + noise
        assert (x.double() - truth).abs().max().item() <= allowed, name
        assert x.isfinite().all(), name


@laws
@given(cases())
def test_matches_stock(case: Case) -> None:
    assume(stock_serves(case))
    stock, ours = case.module(nn.MultiheadAttention), case.module(MultiheadAttention)
    call = case.call()
    # The mask that is_causal promises, read: the definition that stock's is_causal paths approximate.
    read = {name: x for name, x in call.items() if name != "is_causal"}
    expected, exact = run(stock, read), in_float64(stock, read)
    actual = run(ours, call)
    if case.mask == "float causal" and not (case.bias_kv or case.zero_attn):
        # Ours takes is_causal at its word and never reads this mask.
        for results in (actual, expected, exact):
            results.pop("d attn_mask", None)
    assert_as_exact(actual, expected, exact)
    assert actual["out"].stride() == expected["out"].stride()
    if case.need_weights:
        assert actual["weights"].stride() == expected["weights"].stride()
