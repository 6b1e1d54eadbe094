"""PyTorch's own CPU flash kernel, for the dense and causal problems it was made for."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import Inputs, Problem, Saved
from .base import Grads, Results

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Cpu:
    name = "cpu"

    def why_not(self, problem: Problem) -> list[str]:
        spec = problem.spec
        if spec.device != "cpu":
            return [f"the tensors are on {spec.device}, and it serves cpu"]
        why = plain_problem(problem)
        if spec.D != spec.Dv:
            why.append(f"D is {spec.D} and Dv is {spec.Dv}, and it needs them equal")
        if 0 in problem.extent:
            why.append("the problem is empty, and PyTorch's kernel divides by its sizes")
        return why

    def forward(self, inputs: Inputs, problem: Problem) -> Results:
        q, k, v = heads_first(inputs.q, inputs.k, inputs.v)
        out, lse = _forward(q, k, v, 0.0, is_causal(problem), scale=problem.scale)
        return out.transpose(1, 2).contiguous(), lse.contiguous()

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> Grads:
        dout, q, k, v, out = heads_first(saved.dout, inputs.q, inputs.k, inputs.v, saved.out)
        grads = _backward(dout, q, k, v, out, saved.lse, 0.0, is_causal(problem), scale=problem.scale)
        dq, dk, dv = (g.transpose(1, 2).contiguous() for g in grads)
        return dq, dk, dv, None


def plain_problem(problem: Problem) -> list[str]:
    """Why PyTorch's fused kernels cannot serve what `problem` asks beyond dense and causal attention."""
    spec, band, extent = problem.spec, problem.band, problem.extent
    why = [
        sentence
        for sentence, asked in {
            "it has no varlen": spec.varlen,
            f"softcap is {problem.softcap}, and it has none": spec.softcap,
            "it takes no attn_mask in our sense (a row that attends to nothing gives 0)": bool(spec.mask),
            f"dropout_p is {problem.dropout_p}, and its masks are not ours": spec.dropout,
            "it has no gradient for lse": spec.dlse,
            # It scales -inf too, which turns hidden keys into NaN or +inf.
            f"scale is {problem.scale}, and its masks need a positive one": problem.scale <= 0.0,
        }.items()
        if asked
    ]
    square_causal = band.is_causal and extent.Sq == extent.Sk
    if not spec.varlen and not square_causal and not band.hides_nothing(extent.Sq, extent.Sk):
        why.append(
            f"the window is {tuple(band)} for Sq={extent.Sq}, Sk={extent.Sk}, "
            "and it serves full attention, and causal where Sq equals Sk"
        )
    return why


def is_causal(problem: Problem) -> bool:
    return not problem.band.hides_nothing(problem.extent.Sq, problem.extent.Sk)


def heads_first(*tensors: Tensor) -> list[Tensor]:
    """(B, S, H, D) as views (B, H, S, D); copies only what has no unit stride along D."""
    return [(t if t.stride(-1) == 1 else t.contiguous()).transpose(1, 2) for t in tensors]
