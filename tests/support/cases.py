"""Strategies for attention calls: sizes, dtypes, layouts and features for the property tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from flash4_torch.testing import reference

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "heads_first", "sliced", "broadcast_batch", "strided_last", "unfolded")


@dataclass
class Case:
    """One generated call of `attention`: tensors that require grad, and keyword arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def differentiable(self) -> list[Tensor]:
        more = (self.kwargs.get(name) for name in ("attn_mask", "sinks"))
        return [self.q, self.k, self.v, *(x for x in more if x is not None and x.requires_grad)]

    def exact(self, dtype: torch.dtype = torch.float64, **more: Any) -> tuple[Tensor, Tensor]:
        return reference(self.q, self.k, self.v, **self.kwargs, **more, dtype=dtype)

    def __repr__(self) -> str:
        shapes = " ".join(f"{n}{tuple(getattr(self, n).shape)}{getattr(self, n).stride()}" for n in "qkv")
        kwargs = {
            n: f"{x.dtype}{tuple(x.shape)}" if isinstance(x, Tensor) else x for n, x in self.kwargs.items()
        }
        return f"Case({shapes} {self.q.dtype} {kwargs})"


def laid_out(shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str, seed: int) -> Tensor:
    """Random (B, S, H, D) with the strides of `layout`, as a leaf that requires grad."""
    generator = torch.Generator().manual_seed(seed)
    B, S, H, D = shape

    def randn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype)

    if layout == "heads_first":
        x = randn(B, H, S, D).transpose(1, 2)
    elif layout == "sliced":
        x = randn(B, S + 2, H + 1, D + 3)[:, 1 : S + 1, :H, 2 : D + 2]
    elif layout == "broadcast_batch":
        x = randn(1, S, H, D).expand(B, S, H, D)
    elif layout == "strided_last":
        x = randn(B, S, H, 2 * D)[..., ::2]
    elif layout == "unfolded":
        x = randn(B, H, max(S, 1) + D - 1).unfold(-1, D, 1)[:, :, :S].transpose(1, 2)
    else:
        x = randn(B, S, H, D)
    return x.detach().requires_grad_()


@st.composite
def sizes(draw: st.DrawFn, longest: int = 40) -> tuple[int, int, int, int, int, int, int]:
    """(B, Sq, Sk, Hq, Hk, D, Dv); lengths may be 0, unequal and odd, D and Dv anything from 1."""
    Hk = draw(st.integers(1, 2))
    S = st.one_of(st.integers(0, 3), st.integers(4, longest))
    Sq = draw(S)
    Sk = draw(st.one_of(st.just(Sq), S))
    D = draw(st.sampled_from([1, 3, 8, 16, 20]))
    Dv = draw(st.one_of(st.just(D), st.sampled_from([1, 5, 8])))
    return draw(st.integers(0, 3)), Sq, Sk, Hk * draw(st.integers(1, 3)), Hk, D, Dv


@st.composite
def masks(draw: st.DrawFn, full: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor | None:
    """None, a bool mask, or a float mask that requires grad; of 2 to 4 dimensions, any of them broadcast."""
    kind = draw(st.sampled_from(["none", "bool", "float"]))
    if kind == "none":
        return None
    shape = tuple(draw(st.sampled_from([1, n])) for n in full)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    hidden = torch.rand(shape, generator=generator) < 0.4
    hidden = hidden[(0,) * draw(st.integers(0, sum(n == 1 for n in shape[:2]) if shape[0] == 1 else 0))]
    if kind == "bool":
        return ~hidden
    bias = torch.randn(hidden.shape, generator=generator, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    return bias.to(draw(st.sampled_from([dtype, torch.float32]))).requires_grad_()


@st.composite
def sinks(draw: st.DrawFn, Hq: int, dtype: torch.dtype) -> Tensor | None:
    """None, or (Hq,) numbers that require grad."""
    size = draw(st.sampled_from([None, None, 1.0, 20.0]))
    if size is None:
        return None
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = size * torch.randn(Hq, generator=generator, dtype=torch.float64)
    return values.to(draw(st.sampled_from([dtype, torch.float32]))).requires_grad_()


@st.composite
def windows(draw: st.DrawFn, causal: bool, most: int = 45) -> tuple[int | None, int | None]:
    """A band that holds some diagonal: the main one if causal, else perhaps only others beside it."""
    bound = st.one_of(st.none(), st.integers(0, most), st.integers(0 if causal else -most // 3, most))
    left, right = draw(bound), draw(bound)
    if left is not None and right is not None and left + right < 0:
        return -left, -right
    return left, right


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES, **fixed: Any) -> Case:
    """Calls of `attention` over every feature but dropout; `fixed` pins keyword arguments."""
    B, Sq, Sk, Hq, Hk, D, Dv = draw(sizes())
    dtype = draw(st.sampled_from(dtypes))
    layout = st.sampled_from(LAYOUTS)
    seed = draw(st.integers(0, 999))
    causal = draw(st.booleans())
    kwargs = {
        "causal": causal,
        "window": draw(windows(fixed.get("causal", causal))),
        "scale": draw(st.sampled_from([None, 0.3, -0.7])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 1.5])),
        "attn_mask": draw(masks((B, Hq, Sq, Sk), dtype)),
        "sinks": draw(sinks(Hq, dtype)),
    }
    return Case(
        laid_out((B, Sq, Hq, D), dtype, draw(layout), seed),
        laid_out((B, Sk, Hk, D), dtype, draw(layout), seed + 1),
        laid_out((B, Sk, Hk, Dv), dtype, draw(layout), seed + 2),
        {**kwargs, **fixed},
    )


def finite_sum(lse: Tensor, weights: Tensor) -> Tensor:
    """A scalar of lse that ignores rows which attend to nothing."""
    return (lse.masked_fill(torch.isinf(lse), 0.0) * weights).sum()
