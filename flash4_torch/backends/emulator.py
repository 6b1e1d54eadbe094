"""Our compiled kernels, run on CPU tensors by the emulator: slow, for tests and for looking at kernels without a GPU.

It serves only where FLASH4_BACKEND=emulator asks for it. FLASH4_ARCH says which GPU's kernels run.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from .. import env
from ..problem import Inputs, Problem, Saved
from . import sequences
from .base import Grads, Results

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_D = 128
_UNBOUNDED = 1 << 30
"""A bound that no key lies beyond, where the plan does not look at it."""


class Emulator:
    name = "emulator"

    def why_not(self, problem: Problem) -> list[str]:
        spec = problem.spec
        why = []
        if env.BACKEND.get() != self.name:
            why.append(f"it serves only where {env.BACKEND.name}={self.name} asks for it")
        if not importlib.util.find_spec("cutlass"):
            why.append("nvidia-cutlass-dsl is not installed (pip install flash4_torch[kernels])")
        if spec.device != "cpu":
            why.append(f"the tensors are on {spec.device}, and it serves cpu")
        if spec.dtype not in _DTYPES:
            why.append(f"the dtype is {spec.dtype}, and it serves bfloat16, float16 and float32")
        if max(spec.D, spec.Dv) > _MAX_D:
            why.append(f"D is {spec.D} and Dv is {spec.Dv}; it serves up to {_MAX_D}")
        if spec.mask:
            why.append("it takes no attn_mask")
        if spec.dropout:
            why.append("it has no dropout")
        return why

    def forward(self, inputs: Inputs, problem: Problem) -> Results:
        if problem.spec.varlen:
            return sequences.forward(inputs, problem, lambda dense: self)
        q, k, v = map(unit_stride, inputs[:3])
        e, s = problem.extent, problem.spec
        out = q.new_empty(e.B, e.Sq, e.Hq, s.Dv)
        lse = q.new_empty(e.B, e.Hq, e.Sq, dtype=torch.float32)
        if lse.numel():
            _rowwise().forward(q, k, v, out, lse, problem)
        return out, lse

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> Grads:
        if problem.spec.varlen:
            return sequences.backward(saved, inputs, problem, lambda dense: self)
        q, k, v = map(unit_stride, inputs[:3])
        dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
        if 0 in problem.extent:
            return dq.zero_(), dk.zero_(), dv.zero_(), None
        ...
        return dq, dk, dv, None
