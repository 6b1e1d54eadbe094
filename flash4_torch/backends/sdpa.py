"""PyTorch's fused CUDA flash attention: 16-bit calls without masks that none of our kernels serves better."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import Inputs, Problem, Saved
from ..reference import sinks
from . import batches
from .base import SEQUENCE_FIRST, BackwardLaunch, CallsTorch, Grads, Order, Results, WithoutWeights
from .cpu import beyond_plain
from .efficient import aligned
from .tiled import sinks_gradient

_forward = torch.ops.aten._flash_attention_forward.default
_backward = torch.ops.aten._flash_attention_backward.default

_DTYPES = (torch.float16, torch.bfloat16)
_MAX_D, _STEP = 256, 8
"""The widest heads, and what widths are multiples of."""
_ANY_WIDTH = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Compute capabilities of GPUs with shared memory for a backward of every width."""
_GAP = (192, 232)
"""Heads wider than the first number become at least as wide as the second on other GPUs, where torch does not
train widths up to 224."""


class Sdpa(CallsTorch, WithoutWeights):
    """The `sdpa` backend: torch's FlashAttention-2, by the operators below `scaled_dot_product_attention`, so
    that packed sequences, windows and grouped heads are served, too.

    Heads become zero-padded to one width. A row that attends to nothing gives 0, but its lse is +inf there.

    Its backward repeats the order of sums only where torch's switch asks for that, which is the process's, so
    that no call may turn it for itself: other threads would see it.
    """

    name = "sdpa"

    def why_not(self, problem: Problem) -> list[str]:
        spec = problem.spec
        if spec.device != "cuda":
            return [f"the tensors are on {spec.device}, and it serves cuda"]
        if spec.weights:
            return ["it has no attention weights"]
        why = beyond_plain(problem)
        if spec.mask:
            why.append("it takes no attn_mask in our sense (a row that attends to nothing gives 0)")
        if any(bound is not None and bound < 0 for bound in _bounds(problem)):
            why.append(f"the window is {tuple(problem.band)}, and its bounds are 0 or more")
        right = _bounds(problem)[1]
        if right is not None and right >= problem.extent.Sk > 0:
            # The kernel takes such a bound for none, though it hides keys from early queries if Sq is larger.
            why.append(
                f"the window's right bound is {right}, and it serves those below Sk={problem.extent.Sk}"
            )
        if spec.dtype not in _DTYPES:
            why.append(f"the dtype is {spec.dtype}, and it serves float16 and bfloat16")
        if max(spec.D, spec.Dv) > _MAX_D:
            why.append(f"D is {spec.D} and Dv is {spec.Dv}, and it serves up to {_MAX_D}")
        if spec.deterministic and spec.backward and not _repeats():
            why.append("its backward is deterministic under torch.use_deterministic_algorithms(True) only")
        if spec.capability < (8, 0):
            why.append(f"the GPU's compute capability is {spec.capability}, and it needs (8, 0)")
        if 0 in problem.extent:
            why.append("the problem is empty")
        B, Hq = problem.extent.B if spec.varlen else 0, problem.extent.Hq
        if max(B, Hq) > batches.MOST:
            why.append(f"{B} packed sequences or {Hq} heads are more than the {batches.MOST} that it serves")
        return why

    def forward(self, inputs: Inputs, problem: Problem) -> Results:
        if problem.extent.B > batches.MOST:
            return batches.forward(inputs, problem, self.forward)
        call, beyond = _Call.of(inputs, problem), _beyond(inputs.q, inputs.cu_seqlens_q)
        q, k, v = (_padded(x, problem) for x in inputs[:3])
        found, lse, *_ = _forward(q, k, v, *call.lengths, 0.0, call.causal, False, **call.options)
        out = found[..., : problem.spec.Dv].contiguous()
        if beyond is not None:
            out.masked_fill_(beyond[:, None, None], 0.0)
            lse = lse.masked_fill(beyond, -torch.inf)
        if _may_hide_rows(problem):
            lse = lse.masked_fill(lse == torch.inf, -torch.inf)
        results = Results(out, lse.contiguous())
        return results if inputs.sinks is None else Results(*sinks.join(*results[:3], inputs.sinks))

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> Grads:
        if problem.extent.B > batches.MOST:
            return batches.backward(saved, inputs, problem, self.backward)
        call, spec = _Call.of(inputs, problem), problem.spec
        tensors = saved.dout, *inputs[:3], saved.out
        dout, q, k, v, out = (_padded(x, problem) for x in tensors)
        lse = saved.lse.contiguous()
        if _may_hide_rows(problem):
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        # Without dropout the kernel does not read the RNG state.
        seed = offset = torch.empty((), dtype=torch.uint64, device=q.device)
        rest = *call.lengths, 0.0, call.causal, seed, offset
        grads = _backward(dout, q, k, v, out, lse, *rest, **call.options)
        widths = spec.D, spec.D, spec.Dv
        dq, dk, dv = (x[..., :width] for x, width in zip(grads, widths, strict=True))
        of_q, of_k = (_beyond(x, ends) for x, ends in ((dq, call.ends[0]), (dk, call.ends[1])))
        for x, beyond in ((dq, of_q), (dk, of_k), (dv, of_k)):
            if beyond is not None:
                x.masked_fill_(beyond[:, None, None], 0.0)
        return Grads(dq, dk, dv, None, sinks_gradient(saved, inputs))

    def prepare_backward(
        self, saved: Saved, inputs: Inputs, problem: Problem, order: Order = SEQUENCE_FIRST
    ) -> BackwardLaunch | None:
        # Torch's switch may have been turned before the next call.
        return None if problem.spec.deterministic else super().prepare_backward(saved, inputs, problem, order)


class _Call(NamedTuple):
    """Arguments of both operators."""

    ends: tuple[Tensor | None, Tensor | None]
    """cu_seqlens, int32."""
    sizes: tuple[int, int]
    causal: bool
    options: dict[str, float]

    @classmethod
    def of(cls, inputs: Inputs, problem: Problem) -> _Call:
        left, right = _bounds(problem)
        ends = tuple(
            None if x is None else x.to(torch.int32).contiguous()
            for x in (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
        )
        causal = left is None and right == 0
        options = {"scale": problem.scale, "window_size_left": -1, "window_size_right": -1}
        if not causal:
            options["window_size_left"] = -1 if left is None else left
            options["window_size_right"] = -1 if right is None else right
        sizes = problem.extent.Sq, problem.extent.Sk
        return cls((ends[0], ends[1]), sizes, causal, options)

    @property
    def lengths(self) -> tuple[Tensor | None, Tensor | None, int, int]:
        return *self.ends, *self.sizes


def _repeats() -> bool:
    """Whether torch's switch makes the backward deterministic; under `warn_only` it does not."""
    return torch.are_deterministic_algorithms_enabled() and not (
        torch.is_deterministic_algorithms_warn_only_enabled()
    )


def _bounds(problem: Problem) -> tuple[int | None, int | None]:
    """The band's bounds, without those that hide nothing of any sequence."""
    (left, right), extent = problem.band, problem.extent
    return (
        None if left is None or left >= extent.Sk - 1 else left,
        None if right is None or right >= extent.Sq - 1 else right,
    )


def _may_hide_rows(problem: Problem) -> bool:
    """Whether a row may see no key: every bound is 0 or more."""
    is_bounded = any(bound is not None for bound in _bounds(problem))
    return problem.spec.varlen or (is_bounded and problem.extent.Sq > problem.extent.Sk)


def _beyond(x: Tensor, ends: Tensor | None) -> Tensor | None:
    """Rows of packed tensors that are of no sequence, which the kernels leave as they are."""
    return None if ends is None else torch.arange(x.shape[0], device=x.device) >= ends[-1]


def _padded(x: Tensor, problem: Problem) -> Tensor:
    """The tensor with columns of zeros up to the width of all; rows begin at multiples of 16 bytes."""
    spec = problem.spec
    width = -(-max(spec.D, spec.Dv) // _STEP) * _STEP
    if spec.backward and width > _GAP[0] and spec.capability not in _ANY_WIDTH:
        width = max(width, _GAP[1])
    more = width - x.shape[-1]
    if more:
        return F.pad(x, (0, more))
    return aligned(x if x.stride(-1) == 1 else x.contiguous())
