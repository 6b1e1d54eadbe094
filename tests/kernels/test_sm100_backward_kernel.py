"""The Blackwell backward kernel in the emulator, with its race checks: every switch, and exact results."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from blackwell_code import assert_ptx_is_as_planned
from everything import examples, one_of
from flash4_torch.configs.types import Sm100Backward
from kernel_calls import check_gradients, drawn
from kernel_calls import static as static_of
from kernel_runs import (
    every_tile_is_drawn_once,
    gradients_are_alone,
    gradients_are_right,
    launches,
    run_backward,
    sums_have_an_order,
    unseen_keys_have_no_gradient,
)
from kernel_traits import few, of_few

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from flash4_torch.kernels.sm100.bwd.plan import Plan

static = partial(static_of, Sm100Backward)
CAUSAL = {"right": True}
WINDOW = {"left": True, "right": True}
TWOS = (2, 2, 2)
SOFTCAP = {"softcap": True, "scaled": True}
PAIR = {"cluster": 2, "half_block_stages": 5, "dq_slots": 1}
EVERYTHING = {"mask": "float32", "dmask": True, "dropout": True, **SOFTCAP, **WINDOW}
WIDE = {**PAIR, "keys": 64}
# (q_stages, do_stages, kv_stages)
STATICS = {
    "full": static(128, 128, ()),
    "causal": static(128, 128, (), "float16", **CAUSAL),
    "no tail": static(128, 128, (), ragged_k=False, **CAUSAL),
    "full, apart": static(64, 64, ()),
    "all in twos": static(64, 64, TWOS, **CAUSAL),
    "all in threes": static(32, 32, (3, 3, 2), "float16", dq_slots=3, **CAUSAL),
    "odd heads": static(72, 104, (), "float16", **CAUSAL),
    "few columns": static(8, 24, (), **WINDOW),
    "three pieces": static(96, 96, (2, 2), **CAUSAL),
    "wide values": static(64, 128, (), left=True),
    "window": static(64, 64, TWOS, **WINDOW),
    "window, wide": static(128, 64, (), "float16", **WINDOW),
    "varlen": static(128, 128, (), varlen=True),
    "varlen, causal": static(64, 64, TWOS, varlen=True, **CAUSAL),
    "in order": static(128, 128, (), deterministic=True, **CAUSAL),
    "in order, window": static(64, 64, TWOS, deterministic=True, **WINDOW),
    "in order, packed": static(64, 40, (), varlen=True, deterministic=True, **WINDOW),
    "softcap": static(128, 128, (), **SOFTCAP, **CAUSAL),
    "scaled": static(64, 64, (), "float16", scaled=True),
    "bool mask": static(128, 128, (), mask="bool"),
    "bool mask, causal": static(64, 64, TWOS, mask="bool", **CAUSAL),
    "bfloat16 mask": static(128, 128, (), mask="bfloat16", scaled=True, **WINDOW),
    "float16 mask": static(64, 64, (), "float16", mask="float16", scaled=True, dmask=True),
    "float32 mask": static(64, 64, (), mask="float32", dmask=True, deterministic=True, **SOFTCAP),
    "dropout": static(128, 128, (), dropout=True),
    "dropout, causal": static(64, 64, TWOS, "float16", dropout=True, **CAUSAL),
    "dropout, bool mask": static(64, 64, (), dropout=True, mask="bool"),
    "varlen, everything": static(
        128, 64, (), varlen=True, dropout=True, deterministic=True, **SOFTCAP, **WINDOW
    ),
    "pair": static(128, 128, (), **PAIR),
    "pair, causal": static(104, 128, (), "float16", **PAIR, **CAUSAL),
    "pair, no tail": static(128, 128, (), ragged_k=False, **PAIR, **WINDOW),
    "pair, in order": static(128, 128, (), deterministic=True, **{**PAIR, "half_block_stages": 4}, **CAUSAL),
    "pair, bool mask": static(128, 128, (), mask="bool", dropout=True, **PAIR),
    "pair, everything": static(128, 128, (), **EVERYTHING, deterministic=True, **PAIR),
    "pair, varlen": static(128, 104, (), "float16", varlen=True, **PAIR, **WINDOW),
    "wide": static(192, 128, (), **{**WIDE, "half_block_stages": 4}),
    "wide, causal": static(192, 192, (), "float16", **{**WIDE, "half_block_stages": 3}, **CAUSAL),
    "widest": static(256, 256, (), **{**WIDE, "half_block_stages": 2}, **CAUSAL),
    "odd wide heads": static(200, 8, (), "float16", **{**WIDE, "half_block_stages": 2}, **WINDOW),
    "wide, in order": static(256, 200, (), deterministic=True, **{**WIDE, "half_block_stages": 2}, **CAUSAL),
    "wide, dropout": static(192, 128, (), dropout=True, mask="bool", **{**WIDE, "half_block_stages": 4}),
    "wide, varlen": static(256, 256, (), varlen=True, **{**WIDE, "half_block_stages": 2}, **CAUSAL),
    "wide, varlen, everything": static(
        192,
        128,
        (),
        varlen=True,
        deterministic=True,
        dropout=True,
        **SOFTCAP,
        **WINDOW,
        **{**WIDE, "half_block_stages": 4},
    ),
    "wide, everything": static(256, 256, (), **EVERYTHING, **{**WIDE, "half_block_stages": 2}),
}
FEW = few(STATICS, "full", "causal", "pair, in order", "widest")


@pytest.mark.parametrize("name", FEW)
# No shrinking: a launch is slow, and its error says what is wrong.
@settings(max_examples=examples(2, 3), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_values(name: str, data: st.DataObject) -> None:
    gradients_are_right(STATICS[name], data)


@pytest.mark.parametrize("name", of_few(FEW, ["full", "causal", "pair, no tail", "wide, varlen", "widest"]))
def test_ptx_is_as_planned(name: str) -> None:
    kernel = STATICS[name]
    with launches() as asked:
        run_backward(kernel, drawn(kernel, lengths=((5,), (128,))))
    plan = Plan(*kernel)
    assert_ptx_is_as_planned(asked[-1], plan, plan.cluster_size, stores=not plan.wide)


@pytest.mark.parametrize("name", of_few(FEW, ["in order, packed", "pair, in order"]))
def test_sums_have_an_order(name: str) -> None:
    sums_have_an_order(STATICS[name])


@pytest.mark.parametrize(
    "name", of_few(FEW, ["few columns", "bool mask, causal", "varlen, causal", "pair, no tail"])
)
def test_keys_that_nobody_sees_have_no_gradient(name: str) -> None:
    unseen_keys_have_no_gradient(STATICS[name])


@pytest.mark.parametrize("name", [name for name in FEW if STATICS[name][0].varlen])
@pytest.mark.parametrize("poison", one_of(2, [math.nan, math.inf]))
def test_sequences_do_not_see_their_neighbours(name: str, poison: float) -> None:
    gradients_are_alone(STATICS[name], poison)


@pytest.mark.parametrize("name", of_few(FEW, ["causal", "all in twos", "pair, causal", "widest"]))
def test_every_tile_is_drawn_once(name: str) -> None:
    every_tile_is_drawn_once(STATICS[name], 3)


def test_gradients_of_a_part_have_its_dropout() -> None:
    features, config = STATICS["dropout, causal"]
    kernel = features._replace(dropout_of_part=True), config
    state = torch.tensor([5, 7, 32, 48, 3, 8, 2])
    call = drawn(kernel, lengths=((130,) * 2, (150,) * 2), p=0.4, rng_state=state)
    check_gradients(kernel, call, run_backward(kernel, call))
