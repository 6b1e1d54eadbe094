"""PyTorch's memory-efficient CUDA attention: float32, wide heads and masks, if nothing better serves."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import Inputs, Problem, Saved, has_float_mask
from ..reference import sinks
from . import sequences
from .base import CallsTorch, Grads, Results, WithoutWeights
from .compiled.params import dtype_name
from .cpu import beyond_plain, heads_first, is_causal, not_top_left, sees_nothing
from .tiled import Tiled, sinks_gradient

_forward = torch.ops.aten._scaled_dot_product_efficient_attention.default
_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ALIGNMENT = 16
"""Bytes to a multiple of which rows of q, k and v must be padded."""
_MASK_STEP = 16
"""Keys to a multiple of which rows of a mask are padded in memory."""
_LEAST_SHIFT = 1024.0
"""The least size of a row's largest mask number in 16 bits that is subtracted from the row. Below it float32
sums are exact enough, and beyond it differences are rounded only where the weights are 0."""
_LSE_STEP = 32
"""Rows to a multiple of which the kernel's lse is padded."""
_MOST = 65535
"""Batch entries and heads: the kernel's grid has no more."""


class Efficient(CallsTorch, WithoutWeights):
    """The `efficient` backend.

    Causal is aligned to the top left. A row that attends to nothing gives 0, but its lse has to be mended. KV
    heads are repeated for the query heads that share them.

    The kernel multiplies a floating mask by log2(e), so a row's largest number is subtracted before, if it is
    large, and added to lse after. Scores then count even next to numbers that would round them away.

    Varlen runs one sequence at a time; sequences that the kernel cannot serve run on `Tiled`.
    """

    name = "efficient"

    def why_not(self, problem: Problem) -> list[str]:
        spec, extent = problem.spec, problem.extent
        if spec.device != "cuda":
            return [f"the tensors are on {spec.device}, and it serves cuda"]
        if spec.weights:
            return ["it has no attention weights"]
        why = beyond_plain(problem)
        mask = spec.mask.partition(":")[0]
        if mask not in ("", "bool", *_mask_dtypes(spec.dtype)):
            own = " and ".join(_mask_dtypes(spec.dtype))
            why.append(f"attn_mask is {mask}, and next to {spec.dtype} it takes bool and {own}")
        if not spec.varlen:
            why += not_top_left(problem)
        elif not problem.band.is_full and not problem.band.is_causal:
            why.append(f"the window is {tuple(problem.band)}, and it serves full and causal sequences")
        if spec.dtype not in _DTYPES:
            why.append(f"the dtype is {spec.dtype}, and it serves float32, float16 and bfloat16")
        if spec.deterministic and spec.backward:
            why.append("its backward is not deterministic")
        if spec.dtype == torch.bfloat16 and spec.capability < (8, 0):
            why.append(f"the GPU's compute capability is {spec.capability}, and bfloat16 needs (8, 0)")
        if 0 in extent:
            why.append("the problem is empty")
        if max(extent.B, extent.Hq) > _MOST:
            why.append(f"B is {extent.B} and Hq is {extent.Hq}, and it serves up to {_MOST}")
        return why

    def forward(self, inputs: Inputs, problem: Problem) -> Results:
        if problem.spec.varlen:
            return sequences.forward(inputs, problem, self._or_tiled)
        q, k, v = _per_query_head(inputs, problem)
        (bias, shift), causal = _bias_of(inputs, problem), is_causal(problem)
        out, padded, *_ = _forward(q, k, v, bias, True, 0.0, causal, scale=problem.scale)
        lse, low = padded[..., : problem.extent.Sq].contiguous(), None
        if bias is not None:
            lse.masked_fill_(sees_nothing(bias, causal, problem.extent.Sq), -torch.inf)
        if shift is not None:
            lse, low = _sum_with_error(lse, shift)
        out = out[..., : problem.spec.Dv].transpose(1, 2).contiguous()
        results = Results(out, lse, low)
        return results if inputs.sinks is None else Results(*sinks.join(*results[:3], inputs.sinks))

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> Grads:
        if problem.spec.varlen:
            return sequences.backward(saved, inputs, problem, self._or_tiled)
        q, k, v = _per_query_head(inputs, problem)
        dout, out = heads_first(*(aligned(_padded(x)) for x in (saved.dout, saved.out)))
        (bias, shift), (Sq, Sk) = _bias_of(inputs, problem), problem.extent[1:3]
        of_kernel = saved.lse if shift is None else saved.lse - shift
        if saved.lse_low is not None:
            of_kernel = of_kernel + saved.lse_low
        # The kernel's own lse of a row that sees nothing is 0, as is that of padding.
        lse = F.pad(of_kernel.masked_fill(saved.lse == -torch.inf, 0.0), (0, -Sq % _LSE_STEP))
        # Without dropout the kernel does not read the RNG state.
        seed = offset = torch.empty((), dtype=torch.int64, device=q.device)
        wanted = [True, True, True, saved.mask_grad]
        grads = _backward(
            dout,
            q,
            k,
            v,
            bias,
            out,
            lse,
            seed,
            offset,
            0.0,
            wanted,
            is_causal(problem),
            scale=problem.scale,
        )
        widths = problem.spec.D, problem.spec.D, problem.spec.Dv
        dq, dk, dv = (g[..., :width].transpose(1, 2) for g, width in zip(grads, widths, strict=False))
        if problem.spec.group > 1:
            dk, dv = (_sum_of_group(g, problem) for g in (dk, dv))
        mask, dmask = inputs.attn_mask, None
        if saved.mask_grad and mask is not None:
            dmask = grads[3][..., :Sk].float().sum_to_size(mask.shape).to(mask.dtype)
        return Grads(dq, dk, dv, dmask, sinks_gradient(saved, inputs))

    def _or_tiled(self, problem: Problem) -> Efficient | Tiled:
        return Tiled() if self.why_not(problem) else self


def _per_query_head(inputs: Inputs, problem: Problem) -> list[Tensor]:
    """q, k and v as (B, Hq, S, D)."""
    q, k, v = heads_first(*(aligned(_padded(x)) for x in inputs[:3]))
    group = problem.spec.group
    return [q, k, v] if group == 1 else [q, *(x.repeat_interleave(group, 1) for x in (k, v))]


def _padded(x: Tensor) -> Tensor:
    """The tensor with columns of zeros up to a multiple of 16 bytes."""
    more = -x.shape[-1] % (_ALIGNMENT // x.element_size())
    return F.pad(x, (0, more)) if more else x


def aligned(x: Tensor) -> Tensor:
    """`x` itself if its rows begin at multiples of 16 bytes, else a copy: the kernel takes no others."""
    steps = [x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1])]
    is_aligned = all(step % _ALIGNMENT == 0 for step in steps)
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def _sum_of_group(grad: Tensor, problem: Problem) -> Tensor:
    """(B, Sk, Hq, D) summed up to (B, Sk, Hk, D)."""
    return grad.unflatten(2, (-1, problem.spec.group)).sum(3, dtype=torch.float32).to(grad.dtype)


def _mask_dtypes(dtype: torch.dtype) -> tuple[str, ...]:
    """Dtypes of floating masks next to q's: those that q's holds."""
    own = dtype_name(dtype)
    return (own, "bfloat16", "float16") if dtype == torch.float32 else (own,)


class _Bias(NamedTuple):
    """What is added to scores, (B, Hq, Sq, Sk), and what has been subtracted of its rows before."""

    bias: Tensor | None
    shift: Tensor | None
    """float32, broadcastable to (B, Hq, Sq); None without a floating mask."""


def _bias_of(inputs: Inputs, problem: Problem) -> _Bias:
    """A mask as the kernel takes it: numbers of q's dtype, with rows at multiples of 16 keys."""
    mask, q = inputs.attn_mask, inputs.q
    if mask is None:
        return _Bias(None, None)
    B, Sq, Sk, Hq, _ = problem.extent
    mask, shift, width = mask.expand(*mask.shape[:3], Sk), None, Sk + -Sk % _MASK_STEP
    if has_float_mask(mask):
        mask = mask.to(q.dtype)
        if is_causal(problem):
            # What the row does not see may be larger than all that it sees.
            hidden = torch.ones(Sq, Sk, dtype=torch.bool, device=q.device).triu(1)
            mask = mask.masked_fill(hidden, -torch.inf)
        shift = _shift_of(mask)
        bias = q.new_zeros(*mask.shape[:3], width)[..., :Sk].copy_(mask - shift)
        shift = shift[..., 0].float()
    else:
        bias = q.new_zeros(*mask.shape[:3], width)[..., :Sk].masked_fill_(~mask, -torch.inf)
    return _Bias(bias.expand(B, Hq, Sq, Sk), shift)


def _shift_of(mask: Tensor) -> Tensor:
    """What is subtracted of each row: its largest number, if that is finite and large, else 0."""
    top = mask.detach().amax(-1, keepdim=True)
    least = 0.0 if mask.dtype == torch.float32 else _LEAST_SHIFT
    return torch.where(top.isfinite() & (top.abs() >= least), top, 0.0)


def _sum_with_error(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x + y as float32 rounds it, and what rounding took from it, 0 where the sum is infinite."""
    total = x + y
    other = total - x
    error = (x - (total - other)) + (y - other)
    return total, error.masked_fill(total.isinf(), 0.0)
