"""PyTorch's memory-efficient CUDA attention: float32, wide heads and bool masks, if nothing better serves."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import Inputs, Problem, Saved
from ..reference import sinks
from .base import CallsTorch, Grads, Results, WithoutWeights
from .cpu import beyond_plain, heads_first, is_causal, not_top_left, sees_nothing
from .tiled import sinks_gradient

_forward = torch.ops.aten._scaled_dot_product_efficient_attention.default
_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ALIGNMENT = 16
"""Bytes to a multiple of which rows of q, k and v must be padded."""
_MASK_STEP = 16
"""Keys to a multiple of which rows of a mask are padded in memory."""
_LSE_STEP = 32
"""Rows to a multiple of which the kernel's lse is padded."""
_MOST = 65535
"""Batch entries and heads: the kernel's grid has no more."""


class Efficient(CallsTorch, WithoutWeights):
    """The `efficient` backend.

    Causal is aligned to the top left. A row that attends to nothing gives 0, but its lse has to be mended. KV
    heads are repeated for the query heads that share them.
    """

    name = "efficient"

    def why_not(self, problem: Problem) -> list[str]:
        spec, extent = problem.spec, problem.extent
        if spec.device != "cuda":
            return [f"the tensors are on {spec.device}, and it serves cuda"]
        if spec.weights:
            return ["it has no attention weights"]
        why = beyond_plain(problem)
        if spec.mask and not spec.mask.startswith("bool"):
            why.append(f"attn_mask is {spec.mask.partition(':')[0]}, and large numbers in it are not exact")
        why += ["it has no varlen"] if spec.varlen else not_top_left(problem)
        if spec.dtype not in _DTYPES:
            why.append(f"the dtype is {spec.dtype}, and it serves float32, float16 and bfloat16")
        step = _ALIGNMENT // spec.dtype.itemsize
        if spec.D % step or spec.Dv % step:
            why.append(f"D is {spec.D} and Dv is {spec.Dv}, and it needs multiples of {step}")
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
        q, k, v = _per_query_head(inputs, problem)
        bias, causal = _bias(inputs, problem), is_causal(problem)
        out, padded, *_ = _forward(q, k, v, bias, True, 0.0, causal, scale=problem.scale)
        lse = padded[..., : problem.extent.Sq].contiguous()
        if bias is not None:
            lse.masked_fill_(sees_nothing(bias, causal, problem.extent.Sq), -torch.inf)
        results = Results(out.transpose(1, 2).contiguous(), lse)
        return results if inputs.sinks is None else Results(*sinks.join(*results[:3], inputs.sinks))

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> Grads:
        q, k, v = _per_query_head(inputs, problem)
        dout, out = heads_first(aligned(saved.dout), saved.out)
        Sq = problem.extent.Sq
        # The kernel's own lse of a row that sees nothing is 0, as is that of padding.
        lse = F.pad(saved.lse.masked_fill(saved.lse == -torch.inf, 0.0), (0, -Sq % _LSE_STEP))
        # Without dropout the kernel does not read the RNG state.
        seed = offset = torch.empty((), dtype=torch.int64, device=q.device)
        wanted = [True, True, True, False]
        grads = _backward(
            dout,
            q,
            k,
            v,
            _bias(inputs, problem),
            out,
            lse,
            seed,
            offset,
            0.0,
            wanted,
            is_causal(problem),
            scale=problem.scale,
        )
        dq, dk, dv = (g.transpose(1, 2) for g in grads[:3])
        if problem.spec.group > 1:
            dk, dv = (_sum_of_group(g, problem) for g in (dk, dv))
        dq, dk, dv = (g.contiguous() for g in (dq, dk, dv))
        return Grads(dq, dk, dv, None, sinks_gradient(saved, inputs))


def _per_query_head(inputs: Inputs, problem: Problem) -> list[Tensor]:
    """q, k and v as (B, Hq, S, D)."""
    q, k, v = heads_first(*map(aligned, inputs[:3]))
    group = problem.spec.group
    return [q, k, v] if group == 1 else [q, *(x.repeat_interleave(group, 1) for x in (k, v))]


def aligned(x: Tensor) -> Tensor:
    """`x` itself if its rows begin at multiples of 16 bytes, else a copy: the kernel takes no others."""
    steps = [x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1])]
    is_aligned = all(step % _ALIGNMENT == 0 for step in steps)
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def _sum_of_group(grad: Tensor, problem: Problem) -> Tensor:
    """(B, Sk, Hq, D) summed up to (B, Sk, Hk, D)."""
    return grad.unflatten(2, (-1, problem.spec.group)).sum(3, dtype=torch.float32).to(grad.dtype)


def _bias(inputs: Inputs, problem: Problem) -> Tensor | None:
    """A bool mask as the kernel takes it: 0 and -inf, with rows at multiples of 16 keys."""
    mask = inputs.attn_mask
    if mask is None:
        return None
    B, Sq, Sk, Hq, _ = problem.extent
    mask = mask.expand(*mask.shape[:3], Sk)
    rows = inputs.q.new_zeros(*mask.shape[:3], Sk + -Sk % _MASK_STEP)
    bias = rows[..., :Sk].masked_fill_(~mask, -torch.inf)
    return bias.expand(B, Hq, Sq, Sk)
