"""The reference, `reference.flex`, in plain torch: any device, dtype, program and table of blocks."""

from __future__ import annotations

import itertools
from functools import lru_cache

from torch import Tensor

from ...flex.program import Program, parse
from ...flex_problem import FlexGradients, FlexInputs, FlexProblem, FlexSaved
from ...reference import flex as reference
from ...reference.dropout import Dropout
from ...reference.scoring import Scoring


class Tiled:
    name = "tiled"

    def why_not(self, problem: FlexProblem) -> list[str]:
        return []

    def forward(self, inputs: FlexInputs, problem: FlexProblem) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, mods = inputs
        return reference.forward(q, k, v, described(inputs, problem), mods.sinks)

    def backward(self, saved: FlexSaved, inputs: FlexInputs, problem: FlexProblem) -> FlexGradients:
        # Deriving needs make_fx, which not every import of the package should load.
        from ...flex.derive import derivative

        q, k, v, mods = inputs
        return reference.backward(
            saved.dout,
            saved.dlse,
            q,
            k,
            v,
            saved.out,
            saved.lse,
            saved.lse_low,
            described(inputs, problem),
            derivative,
            problem.spec.dcaptured,
            mods.sinks,
        )


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
    if mods.kv_num_blocks is None or mods.kv_indices is None:
        return None
    lists = mods.kv_num_blocks, mods.kv_indices, mods.full_kv_num_blocks, mods.full_kv_indices
    return reference.Blocks.of(*lists, (mods.q_block, mods.kv_block))
