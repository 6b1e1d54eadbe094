"""PyTorch's own CPU flash kernel, with masks, and bands as masks; varlen one sequence at a time."""

from __future__ import annotations

import math
import sys
from ctypes import string_at
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..problem import Inputs, Problem, Saved, has_float_mask
from ..reference import at_once, sinks, tiled
from ..reference.host import bias_of
from ..reference.scoring import working_dtype
from . import bands, sequences
from .bands import Block, Hidden
from .base import (
    SEQUENCE_FIRST,
    BackwardLaunch,
    CallsTorch,
    Grads,
    Launch,
    Order,
    Results,
    Views,
    WithoutWeights,
)
from .compiled.tensors import contiguous_strides
from .scoring import known_low, scoring
from .tiled import Tiled, prepare_both, sinks_gradient
from .views import Layout, view

# torch's own binding, which takes half the time of `torch.ops`.
_forward = torch._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_RANKS = (2, 4)
"""Numbers of dimensions that a mask of the kernel may have."""
_MANY = 1 << 11
"""Scores from which on the products of a backward take less time than the calls that make them."""
_FEW_ROWS, _NARROW = 192, 64
"""Rows below which torch's backward in 16 bits takes blocks of 32, and columns up to which others are faster
then."""
_FEW = 1 << 15
"""Bytes that Python examines in less time than torch, whose operators a long kernel leaves cold."""
_FROM_SIGN = 1 if sys.byteorder == "big" else -1
"""The step from a number's byte of the sign, which has the most of its exponent, to the next number's: bytes
begin or end with one."""
_ORDINARY = bytes({*range(256)} - {0x00, 0x7F, 0x80, 0xFF})
"""Such bytes but for those of 0, infinity and NaN, and of numbers next to the smallest and the largest."""


class Cpu(CallsTorch, WithoutWeights):
    """The `cpu` backend.

    Of a band the kernel gets the rows and keys that are not hidden altogether (`bands.Block`). What it has no
    flag for is a mask; it goes to `Tiled`, which leaves tiles out, if that is faster.

    Varlen runs one sequence at a time; sequences that the kernel does not serve, as empty ones, run on
    `Tiled`. So do calls with a score that is NaN or infinite: the kernel turns some of those into zeros where
    NaN should propagate."""

    name = "cpu"

    def why_not(self, problem: Problem) -> list[str]:
        spec, band, extent = problem.spec, problem.band, problem.extent
        if spec.device != "cpu":
            return [f"the tensors are on {spec.device}, and it serves cpu"]
        if spec.weights:
            return ["it has no attention weights"]
        why = beyond_plain(problem)
        if spec.D != spec.Dv:
            why.append(f"D is {spec.D} and Dv is {spec.Dv}, and it needs them equal")
        if spec.dmask:
            why.append("it has no gradient for attn_mask")
        if spec.varlen:
            if not band.is_full and not band.is_causal:
                why.append(f"the window is {tuple(band)}, and it serves full and causal sequences")
            return why
        if 0 in extent:
            why.append("the problem is empty, and PyTorch's kernel divides by its sizes")
        else:
            why += bands.beyond(problem)
        return why

    def forward(self, inputs: Inputs, problem: Problem) -> Results:
        if problem.spec.varlen:
            return sequences.forward(inputs, problem, self._or_tiled)
        if bands.is_slow(problem):
            return Tiled().forward(inputs, problem)
        if (block := Block.of(problem)) is not None:
            return block.forward(inputs, problem, self)
        q, k, v = heads_first(inputs.q, inputs.k, inputs.v)
        mask = _added(inputs.attn_mask, Hidden.of(problem), q.dtype)
        out, lse = _forward(q, k, v, 0.0, is_causal(problem), attn_mask=mask, scale=problem.scale)
        lse = lse.contiguous()
        if _is_odd(lse) and not _is_explained(lse, inputs, problem):
            return Tiled().forward(inputs, problem)
        low = None
        if has_float_mask(inputs.attn_mask):
            low = tiled.lse_low(inputs.q, inputs.k, lse, scoring(inputs, problem))
        results = Results(out.transpose(1, 2).contiguous(), lse, low)
        return results if inputs.sinks is None else Results(*sinks.join(*results[:3], inputs.sinks))

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> Grads:
        if problem.spec.varlen:
            return sequences.backward(saved, inputs, problem, self._or_tiled)
        if bands.is_slow(problem):
            return Tiled().backward(saved, inputs, problem)
        if (block := Block.of(problem)) is not None:
            return block.backward(saved, inputs, problem, self)
        if _is_faster_at_once(inputs, problem):
            return Tiled().backward(saved, inputs, problem)
        dout, q, k, v, out = heads_first(saved.dout, inputs.q, inputs.k, inputs.v, saved.out)
        if saved.lse_low is not None:
            dout = _corrected(dout, saved.lse_low)
        mask, lse = _added(inputs.attn_mask, Hidden.of(problem), q.dtype), saved.lse
        if inputs.attn_mask is not None:
            lse = _without_infinity(lse)
        grads = _backward(
            dout, q, k, v, out, lse, 0.0, is_causal(problem), attn_mask=mask, scale=problem.scale
        )
        dq, dk, dv = (g.transpose(1, 2).contiguous() for g in grads)
        return Grads(dq, dk, dv, None, sinks_gradient(saved, inputs))

    def prepare(self, inputs: Inputs, problem: Problem, order: Order = SEQUENCE_FIRST) -> Launch | None:
        careful = super().prepare(inputs, problem, order)
        if careful is None or not _is_simple(inputs, problem):
            return careful
        if (block := Block.of(problem)) is not None:
            return block.prepare(inputs, problem, order, self)
        causal, scale, hidden, dtype = is_causal(problem), problem.scale, Hidden.of(problem), inputs.q.dtype
        heads_first, out_heads_first = order
        q_layout, k_layout, v_layout = (Layout.of(x.transpose(1, 2)) for x in inputs[:3])
        out_made = _Made.of(inputs.q)  # D and Dv are equal
        seen = Views.of(inputs, order)

        def launch(
            q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *others: None
        ) -> tuple[Any, ...]:
            given = q, k, v
            if not heads_first:
                q, k, v = view(q, *q_layout), view(k, *k_layout), view(v, *v_layout)
            if attn_mask is None and hidden is None:
                out, lse = _forward(q, k, v, 0.0, causal, scale=scale)
            else:
                mask = _added(attn_mask, hidden, dtype)
                out, lse = _forward(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
            if _is_odd(lse) and not _is_explained(lse, seen(*given, attn_mask), problem):
                return careful(*given, attn_mask)
            return out if out_heads_first else out_made.returned(out, False), lse, None, None

        return launch

    def prepare_backward(
        self, saved: Saved, inputs: Inputs, problem: Problem, order: Order = SEQUENCE_FIRST
    ) -> BackwardLaunch | None:
        careful = super().prepare_backward(saved, inputs, problem, order)
        in_place = _is_in_place(saved.dout) and _is_in_place(saved.out)
        if not in_place or not _is_simple(inputs, problem):
            return careful
        if (block := Block.of(problem)) is not None:
            return block.prepare_backward(saved, inputs, problem, order, self)
        if _is_faster_at_once(inputs, problem):
            return careful
        causal, scale, hidden, dtype = is_causal(problem), problem.scale, Hidden.of(problem), inputs.q.dtype
        heads_first, out_heads_first = order
        seen = Views.of(inputs, order)
        given = saved.dout, saved.out, *inputs[:3]
        dout_layout, out_layout, *layouts = (Layout.of(x.transpose(1, 2)) for x in given)
        q_layout, k_layout, v_layout = layouts
        q_made, k_made, v_made = (_Made.of(x) for x in inputs[:3])

        def launch(
            dout: Tensor,
            out: Tensor,
            lse: Tensor,
            low: Tensor | None,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            attn_mask: Tensor | None = None,
            *others: None,
        ) -> tuple[Any, ...]:
            if attn_mask is not None:
                low = known_low(low, lse, seen(q, k, v, attn_mask), problem)
            if not out_heads_first:
                dout, out = view(dout, *dout_layout), view(out, *out_layout)
            if not heads_first:
                q, k, v = view(q, *q_layout), view(k, *k_layout), view(v, *v_layout)
            if attn_mask is None and hidden is None:
                grads = _backward(dout, q, k, v, out, lse, 0.0, causal, scale=scale)
            else:
                mask = _added(attn_mask, hidden, dtype)
                lse = lse if attn_mask is None else _without_infinity(lse)
                dout = dout if low is None else _corrected(dout, low)
                grads = _backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
            dq, dk, dv = grads
            return (
                q_made.returned(dq, heads_first),
                k_made.returned(dk, heads_first),
                v_made.returned(dv, heads_first),
                None,
            )

        return launch

    def prepare_both(self, inputs: Inputs, problem: Problem, average_heads: bool) -> Launch | None:
        return prepare_both(inputs, problem, average_heads)

    def _or_tiled(self, problem: Problem) -> Cpu | Tiled:
        return Tiled() if self.why_not(problem) else self


class _Made(NamedTuple):
    """What the kernel makes for a tensor (B, S, H, D): heads first, but in memory as the tensor would be."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    kernel_strides: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> _Made:
        batch, row, head, column = contiguous_strides(x.shape)
        return cls(tuple(x.shape), (batch, row, head, column), (batch, head, row, column))

    def returned(self, made: Tensor, heads_first: bool) -> Tensor:
        """The tensor in the caller's order, and contiguous as (B, S, H, D)."""
        if made.stride() == self.kernel_strides:
            if heads_first:
                return made
            seen: Tensor = view(made, self.sizes, self.strides)
            return seen
        result = made.transpose(1, 2).contiguous()
        return result.transpose(1, 2) if heads_first else result


def _added(mask: Tensor | None, hidden: Hidden | None, dtype: torch.dtype) -> Tensor | None:
    """What the kernel adds to scores: an attn_mask, and a band for which it has no flag."""
    added = None if mask is None else _floating(mask, dtype)
    if hidden is None:
        return added
    band = bands.bias(hidden)
    return band if added is None else added + band


def _floating(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """An attn_mask in the form that the kernel takes: floating, in q's dtype or the dtype of its sums, and
    with two or four dimensions."""
    if mask.dim() not in _RANKS:
        mask = mask[(None,) * (2 - mask.dim() % 2)]
    if mask.dtype == dtype:
        return mask
    if mask.dtype == torch.bool:
        return bias_of(mask, dtype)
    return mask.to(working_dtype(dtype))


def _is_simple(inputs: Inputs, problem: Problem) -> bool:
    """Whether torch's kernel takes q, k and v in place, and there is nothing else than a mask and a band."""
    in_place = all(_is_in_place(x) for x in inputs[:3])
    return in_place and inputs.sinks is None and not problem.spec.varlen and not bands.is_slow(problem)


def _is_faster_at_once(inputs: Inputs, problem: Problem) -> bool:
    """Whether a backward in 16 bits is best written in torch's products."""
    dtype, extent = inputs.q.dtype, problem.extent
    if dtype not in (torch.bfloat16, torch.float16) or extent.scores < _MANY or inputs.sinks is not None:
        return False
    if at_once.products_dtype(dtype) != dtype:
        return True  # the kernel multiplies number by number
    is_small = at_once.is_small(inputs.q, inputs.k, scoring(inputs, problem))
    return is_small and extent.Sq < _FEW_ROWS and problem.spec.D <= _NARROW


def _corrected(dout: Tensor, low: Tensor) -> Tensor:
    """dout (B, H, S, D) for an lse with the rounding error `low`: the kernel's weights, exp(scores - lse),
    all multiply dout, which can take the factor."""
    return dout * torch.exp(-low)[..., None].to(dout.dtype)


def _without_infinity(lse: Tensor) -> Tensor:
    """lse for the backward's kernel, 0 in rows that see nothing: exp(-inf - -inf) would be NaN, and the
    kernel itself gives such a row 0."""
    return lse.nan_to_num(torch.nan, torch.inf, 0.0)


def _is_explained(lse: Tensor, inputs: Inputs, problem: Problem) -> bool:
    """Whether an odd lse is right. Rows that see nothing have 0, and get -inf here."""
    mask = inputs.attn_mask
    if mask is not None:
        if (hidden := Hidden.of(problem)) is not None:
            mask = _floating(mask, inputs.q.dtype) + bands.bias(hidden)
        nothing = sees_nothing(mask, is_causal(problem), problem.extent.Sq)
        if nothing.any():
            if _is_odd(lse.masked_fill_(nothing, 1.0)) and not _has_finite_scores(inputs, problem):
                return False
            lse.masked_fill_(nothing, -torch.inf)
            return True
    return _has_finite_scores(inputs, problem)


def _is_odd(lse: Tensor) -> bool:
    """Whether a row has an lse of 0, infinity or NaN, the only traces of bad scores; so has one that sees
    nothing. Numbers beyond 1e38, or closer to 0 than 1e-37, may count as these.

    lse: without gaps in memory.
    """
    count = lse.nbytes
    if count <= _FEW:
        exponents = string_at(lse.data_ptr(), count)[:: _FROM_SIGN * lse.itemsize]
        return exponents.translate(None, _ORDINARY) != b""
    return math.isnan((lse / lse).sum().item())


def _has_finite_scores(inputs: Inputs, problem: Problem) -> bool:
    """Whether neither the largest elements of q and k nor attn_mask can make a score NaN or infinite."""
    largest = torch.finfo(working_dtype(inputs.q.dtype)).max
    q, k = (x.abs().amax().item() for x in (inputs.q, inputs.k))
    product = q * k * problem.spec.D
    mask = inputs.attn_mask
    if mask is not None and mask.is_floating_point() and not mask.amax().item() < torch.inf:
        return False
    return product < largest and product * problem.scale < largest


def sees_nothing(mask: Tensor, causal: bool, Sq: int, diagonal: int = 0) -> Tensor:
    """Rows for which the mask, and causal if set, leave no key: bool, broadcastable to (B, Hq, Sq).

    Causal hides keys after i + diagonal of row i.
    """
    visible = mask if mask.dtype == torch.bool else mask != -torch.inf
    nothing = ~visible.any(-1)
    if causal:
        nothing = nothing | (
            visible.byte().argmax(-1) > torch.arange(diagonal, diagonal + Sq, device=mask.device)
        )
    return nothing


def beyond_plain(problem: Problem) -> list[str]:
    """Reasons why none of PyTorch's fused kernels can serve `problem`."""
    spec, why = problem.spec, []
    if spec.softcap:
        why.append(f"softcap is {problem.softcap}, and it has none")
    if spec.dropout:
        why.append(f"dropout_p is {problem.dropout_p}, and its masks are not ours")
    if spec.dlse:
        why.append("it has no gradient for lse")
    if problem.scale < torch.finfo(torch.float32).tiny:
        # It scales -inf too, which turns masked keys into NaN or +inf; a scale too small for float32 is 0.
        why.append(f"scale is {problem.scale}, and its masks need a positive one")
    return why


def is_causal(problem: Problem) -> bool:
    """Whether the band hides every key after i of row i, and one at all."""
    band, (_, Sq, Sk, _, _) = problem.band, problem.extent
    return band.right is not None and band.right <= Sq - Sk and not band.hides_nothing(Sq, Sk)


def heads_first(*tensors: Tensor) -> list[Tensor]:
    """(B, S, H, D) as views (B, H, S, D), of copies where torch's kernel does not take a tensor in place."""
    return [(x if _is_in_place(x) else x.contiguous()).transpose(1, 2) for x in tensors]


def _is_in_place(x: Tensor) -> bool:
    """Whether torch's kernel takes x (B, S, H, D) as it is: rows have no gaps, and none begins inside of the
    one before, as in views of `unfold`. It reads such rows wrongly, or refuses them."""
    return x.stride(-1) == 1 and not 0 < x.stride(1) < x.shape[-1]
