"""The Blackwell forward kernel in the emulator, with its race checks: every switch, against exact results."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from blackwell_code import assert_ptx_is_as_planned
from everything import EVERYTHING, examples, one_of
from flash4_torch import testing
from flash4_torch.bench.instruction_counts import opcode
from flash4_torch.configs.types import Sm100Forward
from kernel_calls import check_results, drawn
from kernel_calls import static as static_of
from kernel_runs import (
    blind_rows_are_zero,
    empty_splits_have_nothing,
    emulated,
    every_tile_is_drawn_once,
    is_right,
    launches,
    run,
    sequences_are_alone,
)
from kernel_traits import few, of_few
from sm100_kernels import SM100

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from flash4_torch.kernels.common.warps import WARP
from flash4_torch.kernels.sm100.fwd.plan import Plan

static = partial(static_of, Sm100Forward)
CAUSAL = {"right": True}
WINDOW = {"left": True, "right": True}
# (Q tiles, K and V stages)
STATICS = {
    "plain": static(128, 128, (2, 3)),
    "causal": static(64, 64, (2, 8), **CAUSAL),
    "odd sizes": static(72, 40, (2, 4), **WINDOW),
    "dropout": static(64, 64, (2, 6), "float16", dropout=True, **CAUSAL),
    "bool mask": static(64, 64, (2, 6), mask="bool", **CAUSAL),
    "varlen": static(96, 96, (2, 5), "float16", varlen=True, **CAUSAL),
    "few columns": static(8, 24, (2, 4), "float16", **CAUSAL),
    "no tail": static(64, 64, (2, 4), "float16", ragged_k=False, **CAUSAL),
    "no polynomial": static(96, 96, (2, 4), "float16", early=64, polynomial=0),
    "window": static(128, 128, (2, 3), "float16", **WINDOW),
    "left only": static(40, 120, (2, 4), left=True),
    "packed": static(64, 64, (2, 6), pack_gqa=4, **CAUSAL),
    "packed, two rows": static(64, 64, (2, 6), "float16", pack_gqa=64, **CAUSAL),
    "one tile": static(64, 64, (1, 6), **CAUSAL),
    "one tile, packed": static(128, 128, (1, 3), "float16", pack_gqa=2),
    "sinks": static(64, 64, (2, 6), sinks="bfloat16", **CAUSAL),
    "sinks, varlen": static(128, 128, (2, 3), "float16", sinks="float32", varlen=True),
    "sinks, float32 mask": static(64, 64, (2, 6), sinks="float32", mask="float32", scaled=True),
    "softcap": static(64, 64, (2, 6), softcap=True, scaled=True, **WINDOW),
    "scaled": static(96, 40, (2, 4), "float16", scaled=True),
    "bfloat16 mask": static(128, 128, (2, 3), mask="bfloat16", scaled=True, **WINDOW),
    "float16 mask": static(64, 64, (1, 4), "float16", mask="float16", scaled=True),
    "float32 mask": static(64, 64, (2, 4), mask="float32", softcap=True, scaled=True, dropout=True, **CAUSAL),
    "varlen, packed": static(64, 64, (2, 6), "float16", varlen=True, pack_gqa=2),
    "varlen, everything": static(
        128, 64, (2, 3), varlen=True, softcap=True, scaled=True, dropout=True, **WINDOW
    ),
    "O over Q": static(128, 128, (2, 4), o_over_q=True, **CAUSAL),
    "O over Q, varlen": static(128, 64, (2, 4), o_over_q=True, varlen=True, **CAUSAL),
    "192": static(192, 128, (2, 2), o_over_q=True),
    "192, causal": static(192, 128, (2, 2), "float16", o_over_q=True, **CAUSAL),
    "256": static(256, 256, (1, 2), o_over_q=True, **CAUSAL),
    "256, wide O": static(200, 256, (1, 1), "float16"),
    "pair": static(128, 128, (2, 6), cluster=2),
    "pair, one tile": static(256, 256, (1, 5), "float16", o_over_q=True, ragged_k=False, cluster=2),
    "pair, odd sizes": static(136, 96, (2, 5), o_over_q=True, softcap=True, scaled=True, cluster=2),
    "pair, dropout": static(64, 128, (2, 3), "float16", dropout=True, cluster=2),
    "pair, one tile, dropout": static(256, 256, (1, 5), dropout=True, polynomial=0, o_over_q=True, cluster=2),
    "splits": static(64, 64, (1, 8), "float16", splits=True, **CAUSAL),
    "splits, packed": static(128, 120, (2, 3), splits=True, pack_gqa=4, **WINDOW),
    "splits, varlen, sinks": static(96, 80, (2, 5), splits=True, varlen=True, sinks="float32", **CAUSAL),
    "splits, bool mask": static(128, 128, (2, 3), splits=True, mask="bool", **CAUSAL),
    "splits, float16 mask": static(
        64, 64, (1, 6), "float16", splits=True, mask="float16", scaled=True, sinks="float32", pack_gqa=2
    ),
    "splits, O over Q": static(
        192, 128, (2, 2), "float16", splits=True, o_over_q=True, softcap=True, scaled=True
    ),
}
if EVERYTHING:
    STATICS |= SM100.covering(STATICS.values())
FEW = few(STATICS, "plain", "causal", "pair", "splits, varlen, sinks")

SPLITS = [name for name, (features, _) in STATICS.items() if features.splits]


@pytest.mark.parametrize("name", FEW)
# No shrinking: a launch is slow, and its error says what is wrong.
@settings(max_examples=examples(2, 4), phases=(Phase.explicit, Phase.reuse, Phase.generate), deadline=None)
@given(data=st.data())
def test_values(name: str, data: st.DataObject) -> None:
    is_right(STATICS[name], data)


@pytest.mark.parametrize("name", of_few(FEW, ["plain", "causal", "192, causal", "256", "pair"]))
def test_ptx_is_as_planned(name: str) -> None:
    kernel = STATICS[name]
    with launches() as asked:
        run(kernel, drawn(kernel, lengths=((5,), (9,))))
    assert_ptx_is_as_planned(asked[-1], Plan(*kernel), kernel[1].cluster)


@pytest.mark.parametrize("shift", [0, 1, 31])
@pytest.mark.parametrize("name", of_few(FEW, ["causal", "odd sizes"]))
def test_bands_begin_anywhere_in_a_piece_of_columns(name: str, shift: int) -> None:
    """Each piece of columns is fully masked for a warp, full, or partial."""
    kernel = STATICS[name]
    call = drawn(kernel, lengths=((140,), (300,)), right=shift - 191, left=193)  # few keys, so each counts
    check_results(kernel, call, run(kernel, call, schedule="late"))


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", ["plain", "pair"])
def test_exponentials_are_those_of_weights_and_of_factors_between_blocks(name: str, blocks: int) -> None:
    features, config = kernel = STATICS[name]
    plan = Plan(features, config)
    call = drawn(kernel, lengths=((plan.queries,), (blocks * plan.keys,)))
    with emulated(kernel, call) as device:
        run(kernel, call, nullcontext(device))
    lines = device.reports[-1].lines
    made = sum(sum(line.counts) for line in lines if opcode(line.ptx).startswith("ex2"))
    warps = call.q.shape[0] * call.q.shape[2] * plan.queries // WARP
    weights = plan.keys * (32 - config.polynomial) // 32
    assert made == warps * (blocks * weights + blocks - 1)


@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("name", ["plain", "causal", "pair"])
def test_every_tile_is_drawn_once(name: str, tiles: int) -> None:
    every_tile_is_drawn_once(STATICS[name], tiles)


@pytest.mark.parametrize("name", of_few(FEW, ["odd sizes", "bool mask", "varlen"]))
def test_rows_that_see_nothing_are_zero_whatever_the_values(name: str) -> None:
    blind_rows_are_zero(STATICS[name])


@pytest.mark.parametrize("name", of_few(FEW, ["varlen", "varlen, everything"]))
@pytest.mark.parametrize("poison", one_of(2, [math.nan, math.inf]))
def test_sequences_do_not_see_their_neighbours(name: str, poison: float) -> None:
    sequences_are_alone(STATICS[name], poison)


@pytest.mark.parametrize("name", of_few(FEW, SPLITS))
def test_splits_without_blocks_have_nothing(name: str) -> None:
    empty_splits_have_nothing(STATICS[name])


@pytest.mark.parametrize("p, state", one_of(2, [(0.7, (5, 7, 32, 48, 3, 8, 2)), (0.25, (5, 7))]))
def test_dropout_keeps_the_weights_that_the_reference_keeps(p: float, state: tuple[int, ...]) -> None:
    """One-hot values make the output the weights themselves, in a part of a larger call, too."""
    features, config = STATICS["dropout"]
    kernel = features._replace(dropout_of_part=len(state) > 2), config
    call = drawn(kernel, lengths=((130,) * 2, (64,) * 2), p=p, rng_state=torch.tensor(state), right=1000)
    call.v[:] = torch.eye(64)[:, None].to(call.v.dtype)
    out, _ = run(kernel, call)
    kept = testing.dropout_mask(call.rng_state, 2, call.q.shape[2], 130, 64, p)
    assert torch.equal(out.transpose(1, 2) != 0, kept)
