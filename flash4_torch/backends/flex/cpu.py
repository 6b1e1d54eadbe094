"""Calls without a score_mod on a CPU: attention with a band or a bool mask, by PyTorch's kernel.

A block mask is evaluated once (`intervals`). Where it shows what a window shows, the window is left; else a
bool mask of all scores, if it fits in memory and shows so many blocks that the others may be computed, too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...flex_problem import FlexGradients, FlexInputs, FlexProblem, FlexSaved, new_out
from ...masks import Band
from ...problem import Inputs, Problem, Saved
from ...reference.flex import EMPTY
from ...reference.scoring import working_dtype
from .. import cpu, tiled
from ..base import Backend
from . import bits, intervals
from .partial_blocks import mask_of
from .plain import plain_inputs, plain_problem
from .tiled import Tiled

_MOST_SCORES = 1 << 25
"""Numbers of a bool mask, a byte each; the kernel adds as many in float32."""
_LEAST_SHOWN = 3 / 8
"""The share of blocks that a mask shows at least: `tiled` leaves the others out (`flex/NOTES.md`)."""


class _Plain(NamedTuple):
    """A call without programs and blocks, and who serves it."""

    backend: Backend
    inputs: Inputs
    problem: Problem


class Cpu:
    """The `cpu` backend. `Tiled` serves calls whose mask turns out to be too large, or to show too little,
    and those with NaN in a result: a mask that is added to scores does not hide NaN.

    It computes in float32 at least: in 16 bits lse of PyTorch's kernel has errors of 5e-5, where torch's own
    flex_attention has those of float32.
    """

    name = cpu.Cpu.name

    def __init__(self) -> None:
        self._kernel, self._tiled = cpu.Cpu(), Tiled()

    def why_not(self, problem: FlexProblem) -> list[str]:
        spec = problem.spec
        if spec.device != "cpu":
            return [f"the tensors are on {spec.device}, and it serves cpu"]
        why = ["it has no score_mod"] if spec.score_mod else []
        if spec.mask_mod and spec.block is None:
            why.append("it takes mask_mod with a block mask only")
        if spec.varlen:
            why.append("the sequences are packed, and it serves dense ones")
        # Windows that the kernel does not serve are served too, by `tiled`'s attention.
        return why + self._kernel.why_not(plain_problem(problem._replace(band=Band())))

    def forward(self, inputs: FlexInputs, problem: FlexProblem) -> tuple[Tensor, Tensor, Tensor]:
        plain = self._plain(inputs, problem)
        if plain is None:
            return self._tiled.forward(inputs, problem)
        out, lse, low, _ = plain.backend.forward(plain.inputs, plain.problem)
        if _has_nan(out):
            return self._tiled.forward(inputs, problem)
        own = new_out(inputs.q, problem.spec.Dv)
        out = out if (out.stride(), out.dtype) == (own.stride(), own.dtype) else own.copy_(out)
        return out, lse, torch.zeros_like(lse) if low is None else low

    def backward(self, saved: FlexSaved, inputs: FlexInputs, problem: FlexProblem) -> FlexGradients:
        plain = self._plain(inputs, problem)
        if plain is None:
            return self._tiled.backward(saved, inputs, problem)
        dout, out = (x.to(plain.inputs.q.dtype) for x in (saved.dout, saved.out))
        rows = Saved(dout, saved.dlse, out, saved.lse)
        dq, dk, dv, _, dsinks = plain.backend.backward(rows, plain.inputs, plain.problem)
        if _has_nan(dq, dk, dv):
            return self._tiled.backward(saved, inputs, problem)
        dq, dk, dv = (x.to(inputs.q.dtype) for x in (dq, dk, dv))
        return FlexGradients(dq, dk, dv, [], dsinks)

    @torch.no_grad()
    def _plain(self, inputs: FlexInputs, problem: FlexProblem) -> _Plain | None:
        """The call without its mask, None if that is not worth while."""
        given, spec = plain_inputs(inputs), problem.spec._replace(block=None, mask_mod="")
        if problem.spec.block is None:
            return self._served(given, problem)
        found = intervals.of_call(inputs, problem)
        by_band = None
        if found.band is not None:
            left, right = (x is not None for x in found.band)
            bounded = spec._replace(left=left, right=right)
            by_band = self._served(given, problem._replace(spec=bounded, band=found.band))
            if by_band.backend.name == self.name:
                return by_band
        mask = None if found.made is None else _whole(inputs, problem, found.made)
        if mask is None:
            return by_band
        return self._served(given._replace(attn_mask=mask), problem._replace(spec=spec._replace(bits=1)))

    def _served(self, inputs: Inputs, problem: FlexProblem) -> _Plain:
        work = working_dtype(problem.spec.dtype)
        converted = plain_problem(problem._replace(spec=problem.spec._replace(dtype=work)))
        if self._kernel.why_not(converted):
            return _Plain(tiled.Tiled(), inputs, plain_problem(problem))
        q, k, v = (x.to(work) for x in inputs[:3])
        return _Plain(self._kernel, inputs._replace(q=q, k=k, v=v), converted)


def _has_nan(*results: Tensor) -> bool:
    """Whether a result has NaN, or infinities of both signs."""
    return any(math.isnan(x.sum().item()) for x in results)


class _Whole(NamedTuple):
    """A mask of all scores."""

    mask: Tensor | None
    """(B or 1, Hq or 1, Sq, Sk) bool; None if it is too large."""
    shown: float
    """The share of blocks that it shows."""


def _whole(inputs: FlexInputs, problem: FlexProblem, made: bits.Made) -> Tensor | None:
    """The mask of all scores, kept in `made`; None if it is too large, or shows too little."""
    if _Whole not in made:
        made[_Whole] = _made_whole(inputs, problem)
    whole: _Whole = made[_Whole]
    return whole.mask if whole.shown >= _LEAST_SHOWN else None


def _made_whole(inputs: FlexInputs, problem: FlexProblem) -> _Whole:
    mask = mask_of(inputs, problem)
    assert mask is not None
    state = mask.blocks.state
    shown = (state != EMPTY).float().mean().item()
    if state.shape[0] * state.shape[1] * mask.Sq * mask.Sk > _MOST_SCORES:
        return _Whole(None, shown)
    return _Whole(bits.shown_by(mask, 0, 0, state.shape[2]).contiguous(), shown)
