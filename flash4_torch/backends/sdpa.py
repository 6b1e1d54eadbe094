"""PyTorch's fused CUDA flash attention, for plain problems on GPUs that none of our kernels serves."""

from __future__ import annotations

import torch

from ..problem import Inputs, Problem, Saved
from ..reference import sinks
from .base import CallsTorch, Grads, Results, WithoutWeights
from .cpu import beyond_plain, heads_first, is_causal
from .tiled import sinks_gradient

_forward = torch.ops.aten._scaled_dot_product_flash_attention.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default

_DTYPES = (torch.float16, torch.bfloat16)
_MAX_D = 256


class Sdpa(CallsTorch, WithoutWeights):
    name = "sdpa"

    def why_not(self, problem: Problem) -> list[str]:
        spec = problem.spec
        if spec.device != "cuda":
            return [f"the tensors are on {spec.device}, and it serves cuda"]
        if spec.weights:
            return ["it has no attention weights"]
        why = beyond_plain(problem)
        band, extent = problem.band, problem.extent
        if spec.varlen:
            why.append("it has no varlen")
        if spec.mask:
            why.append("it takes no attn_mask in our sense (a row that attends to nothing gives 0)")
        square_causal = band.is_causal and extent.Sq == extent.Sk
        if not spec.varlen and not square_causal and not band.hides_nothing(extent.Sq, extent.Sk):
            why.append(
                f"the window is {tuple(band)} for Sq={extent.Sq}, Sk={extent.Sk}, "
                "and it serves full attention, and causal where Sq equals Sk"
            )
        if spec.dtype not in _DTYPES:
            why.append(f"the dtype is {spec.dtype}, and it serves float16 and bfloat16")
        if spec.D != spec.Dv or spec.D % 8 or spec.D > _MAX_D:
            why.append(
                f"D is {spec.D} and Dv is {spec.Dv}; it needs them equal, a multiple of 8, up to {_MAX_D}"
            )
        if spec.group != 1:
            why.append(f"each KV head serves {spec.group} query heads, and it needs one")
        if spec.deterministic and spec.backward:
            why.append("its backward is not deterministic")
        if spec.capability < (8, 0):
            why.append(f"the GPU's compute capability is {spec.capability}, and it needs (8, 0)")
        if 0 in problem.extent:
            why.append("the problem is empty")
        return why

    def forward(self, inputs: Inputs, problem: Problem) -> Results:
        q, k, v = heads_first(inputs.q, inputs.k, inputs.v)
        out, lse, *_ = _forward(q, k, v, 0.0, is_causal(problem), scale=problem.scale)
        results = Results(out.transpose(1, 2).contiguous(), lse.contiguous())
        return results if inputs.sinks is None else Results(*sinks.join(*results[:3], inputs.sinks))

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> Grads:
        dout, q, k, v, out = heads_first(saved.dout, inputs.q, inputs.k, inputs.v, saved.out)
        # Without dropout the kernel does not read the RNG state.
        seed = offset = torch.empty((), dtype=torch.uint64, device=q.device)
        grads = _backward(
            dout,
            q,
            k,
            v,
            out,
            saved.lse,
            None,
            None,
            problem.extent.Sq,
            problem.extent.Sk,
            0.0,
            is_causal(problem),
            seed,
            offset,
            scale=problem.scale,
        )
        dq, dk, dv = (g.transpose(1, 2).contiguous() for g in grads)
        return Grads(dq, dk, dv, None, sinks_gradient(saved, inputs))
