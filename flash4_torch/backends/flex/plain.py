"""A call as one of plain attention: what is left where functions and blocks are served otherwise."""

from __future__ import annotations

from functools import lru_cache

from ...flex_problem import FlexInputs, FlexProblem
from ...problem import Inputs, Problem, Spec


@lru_cache(maxsize=1024)
def plain_problem(problem: FlexProblem) -> Problem:
    """The problem without its programs and blocks; bits are an attn_mask."""
    s = problem.spec
    spec = Spec(
        device=s.device,
        dtype=s.dtype,
        D=s.D,
        Dv=s.Dv,
        group=s.group,
        varlen=s.varlen,
        left=s.left,
        right=s.right,
        softcap=s.softcap,
        mask="bool" if s.bits else "",
        dropout=s.dropout,
        deterministic=s.deterministic,
        sinks=s.sinks,
        capability=s.capability,
        backward=s.backward,
        dlse=s.dlse,
        segments=s.segments,
    )
    return Problem(spec, problem.extent, problem.scale, problem.band, problem.softcap, problem.dropout_p)


def plain_inputs(inputs: FlexInputs) -> Inputs:
    """The tensors of a call without its programs and blocks."""
    mods = inputs.mods
    beside = None, mods.sinks, mods.rng_state, mods.cu_seqlens_q, mods.cu_seqlens_k
    return Inputs(*inputs[:3], *beside)
