"""How a problem scores its tensors, and what is left of an lse that was rounded."""

from __future__ import annotations

from torch import Tensor

from ..problem import Inputs, Problem, has_float_mask
from ..reference import tiled
from ..reference.dropout import Dropout
from ..reference.scoring import Scoring


def scoring(inputs: Inputs, problem: Problem) -> Scoring:
    """The problem's scoring, with its tensors."""
    dropout = None
    if inputs.rng_state is not None:
        dropout = Dropout(inputs.rng_state, problem.dropout_p, inputs.first_batch)
    return Scoring(problem.scale, problem.band, problem.softcap, inputs.attn_mask, dropout)


def low_of(lse: Tensor, inputs: Inputs, problem: Problem) -> Tensor | None:
    """The rounding error of a forward's lse, None if it does not matter to the backward."""
    if not has_float_mask(inputs.attn_mask):
        return None
    # Kernels for a GPU read it in any case.
    if lse.device.type == "cpu" and tiled.is_faithful(lse):
        return None
    return tiled.lse_low(inputs.q, inputs.k, lse, scoring(inputs, problem), sinks=inputs.sinks)


def known_low(low: Tensor | None, lse: Tensor, inputs: Inputs, problem: Problem) -> Tensor | None:
    """The error of a launch's lse: None says that it is to be found on a CPU, and elsewhere that it does not
    matter.
    """
    return low_of(lse, inputs, problem) if low is None and lse.is_cpu else low
