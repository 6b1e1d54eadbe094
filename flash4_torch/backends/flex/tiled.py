"""The reference, `reference.flex`, in plain torch: any device, dtype, program and table of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from ...flex.program import Program, parse
from ...flex_problem import FlexGradients, FlexInputs, FlexProblem, FlexSaved, Mods
from ...reference import flex as reference
from ...reference import sinks
from ...reference.dropout import Dropout
from ...reference.scoring import Scoring, working_dtype


class Tiled:
    name = "tiled"

    def why_not(self, problem: FlexProblem) -> list[str]:
        return []

    def forward(self, inputs: FlexInputs, problem: FlexProblem) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, mods = inputs
        flex = described(inputs, problem)
        if not problem.spec.varlen:
            return reference.forward(q, k, v, flex, mods.sinks)
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=working_dtype(q.dtype))
        low = torch.zeros_like(lse)
        for each, rows, keys in _sequences(flex, mods):
            tensors = q[None, rows], k[None, keys], v[None, keys]
            results = reference.forward(*tensors, each, mods.sinks)
            out[rows], lse[:, rows], low[:, rows] = (x[0] for x in results)
        return out, lse, low

    def backward(self, saved: FlexSaved, inputs: FlexInputs, problem: FlexProblem) -> FlexGradients:
        # Deriving needs make_fx, which not every import of the package should load.
        from ...flex.derive import derivative

        q, k, v, mods = inputs
        dout, dlse, out, lse, low = saved
        flex = described(inputs, problem)
        work = working_dtype(q.dtype)
        captured = reference.Captured.of(flex.score_mod, derivative, problem.spec.dcaptured, work)
        if problem.spec.varlen:
            dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
            for each, rows, keys in _sequences(flex, mods):
                results = (
                    dout[None, rows],
                    None if dlse is None else dlse[None, :, rows],
                    q[None, rows],
                    k[None, keys],
                    v[None, keys],
                    out[None, rows],
                    lse[None, :, rows],
                    low[None, :, rows],
                )
                grads = reference.backward(*results, each, captured)
                dq[rows], dk[keys], dv[keys] = (x[0] for x in grads)
        else:
            dq, dk, dv = reference.backward(dout, dlse, q, k, v, out, lse, low, flex, captured)
        dsinks = None
        if mods.sinks is not None:
            dsinks = sinks.gradient(sinks.delta(dout, out, dlse, work), lse, mods.sinks)
        return FlexGradients(dq, dk, dv, [] if captured is None else captured.gradients(), dsinks)


def max_scores(inputs: FlexInputs, problem: FlexProblem) -> Tensor:
    """The largest score of each row (B, Hq, Sq), in plain torch, whoever serves the call itself."""
    return reference.max_scores(inputs.q, inputs.k, described(inputs, problem))


def _sequences(flex: reference.Flex, mods: Mods) -> Iterator[tuple[reference.Flex, slice, slice]]:
    """Each of packed sequences, with its rows and keys. Waits for a GPU's lengths."""
    if mods.cu_seqlens_q is None or mods.cu_seqlens_k is None:
        raise AssertionError("packed sequences have cu_seqlens")
    spans = ([slice(*ends) for ends in pairwise(x.tolist())] for x in (mods.cu_seqlens_q, mods.cu_seqlens_k))
    for b, (rows, keys) in enumerate(zip(*spans, strict=True)):
        yield flex.of_sequence(b), rows, keys


@lru_cache(maxsize=256)
def program_of(text: str) -> Program:
    return parse(text)


def described(inputs: FlexInputs, problem: FlexProblem) -> reference.Flex:
    """A call's scores, with its tensors."""
    dropout = None if inputs.mods.rng_state is None else Dropout(inputs.mods.rng_state, problem.dropout_p)
    scoring = Scoring(problem.scale, problem.band, problem.softcap, None, dropout)
    return reference.Flex(scoring, *mods_of(inputs), blocks_of(inputs))


def mods_of(inputs: FlexInputs) -> tuple[reference.Mod | None, reference.Mod | None]:
    """score_mod and mask_mod, with their tensors."""
    mods = inputs.mods
    captured, scalars = iter(mods.captured), iter(mods.scalars)

    def mod(text: str) -> reference.Mod | None:
        if not text:
            return None
        program = program_of(text)
        tensors = tuple(itertools.islice(captured, len(program.tensors)))
        numbers = tuple(itertools.islice(scalars, len(program.scalars)))
        return reference.Mod(program, tensors, numbers, inputs.q.device)

    return mod(mods.score_mod), mod(mods.mask_mod)


def blocks_of(inputs: FlexInputs) -> reference.Blocks | None:
    """The block mask."""
    mods = inputs.mods
    counts, columns, full_counts, full_columns = mods.lists
    if counts is None or columns is None:
        return None
    return reference.Blocks.of(counts, columns, full_counts, full_columns, (mods.q_block, mods.kv_block))
