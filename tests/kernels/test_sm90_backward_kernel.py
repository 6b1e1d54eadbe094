"""The Hopper backward kernel in the emulator, with its race checks: every switch, against exact results."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from everything import examples, one_of
from flash4_torch.configs.types import Scope, Sm90Backward
from kernel_calls import check_gradients, drawn
from kernel_calls import static as static_of
from kernel_runs import (
    gradients_are_alone,
    gradients_are_right,
    one_launch_has_the_bits_of_two,
    run_backward,
    sums_have_an_order,
    unseen_keys_have_no_gradient,
)
from kernel_traits import few, of_few

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

static = partial(static_of, Sm90Backward)
CAUSAL = {"right": True}
WINDOW = {"left": True, "right": True}
NEXT_TILE = {"kv_stages": 2, "next_tile": True}
INSIDE = {"heads_inner": True, "load_q_first": True}
ASIDE = {"dkv_via_dq_smem": True, "dq_stages": 2}
STAGES = {**INSIDE, "unroll_stages": True}
ROUNDED = {"round_weights": True}
WHOLE = {"scope": Scope.KV_HEAD, "heads_inner": True}
APART = {"scope": Scope.Q_HEAD}
SOFTCAP = {"softcap": True, "scaled": True, **ROUNDED}
# (queries,)
STATICS = {
    "full": static(128, 128, (64,)),
    "no tail": static(128, 128, (64,), ragged_k=False, **CAUSAL),
    "causal": static(128, 128, (64,), "float16", ds_stages=2, dq_stages=2, **CAUSAL),
    "two tiles": static(128, 96, (64,), kv_stages=2, **CAUSAL),
    "next tile": static(128, 128, (64,), do_stages=1, **NEXT_TILE, **CAUSAL),
    "next tile, in order": static(64, 64, (128,), "float16", deterministic=True, **ROUNDED, **NEXT_TILE),
    "next tile, packed": static(64, 64, (64,), varlen=True, **NEXT_TILE, **WINDOW),
    "next tile, mask": static(64, 128, (64,), mask="bool", dropout=True, **NEXT_TILE),
    "two bands": static(64, 64, (128,), dq_stages=2, **ROUNDED),
    "all in twos": static(64, 64, (128,), kv_stages=2, ds_stages=2, next_tile=True, **ROUNDED, **CAUSAL),
    "two bands, causal": static(64, 64, (128,), "float16", kv_stages=2, **ROUNDED, **CAUSAL),
    "one stage of Q and dO": static(64, 64, (64,), q_stages=1, do_stages=1, **CAUSAL),
    "48 columns": static(48, 48, (64,), **CAUSAL),
    "odd heads": static(72, 104, (64,), "float16", **CAUSAL),
    "few columns": static(8, 24, (64,), **WINDOW),
    "narrow parts": static(96, 96, (64,), **CAUSAL),
    "left only": static(64, 128, (64,), left=True),
    "window": static(64, 64, (128,), **ROUNDED, **WINDOW),
    "window, wide": static(128, 64, (64,), "float16", **WINDOW),
    "varlen": static(128, 128, (64,), varlen=True, ds_stages=2),
    "varlen, causal": static(64, 64, (128,), varlen=True, **ROUNDED, **CAUSAL),
    "in order": static(128, 128, (64,), deterministic=True, dq_stages=2, **CAUSAL),
    "in order, window": static(64, 64, (128,), deterministic=True, **ROUNDED, **WINDOW),
    "in order, packed": static(64, 40, (64,), varlen=True, deterministic=True, dq_stages=2, **WINDOW),
    "inside": static(128, 128, (64,), **INSIDE, **CAUSAL),
    "inside, no tail": static(64, 64, (64,), ragged_k=False, **INSIDE, **CAUSAL),
    "inside, next tile": static(64, 64, (128,), **INSIDE, **ROUNDED, **NEXT_TILE, **CAUSAL),
    "inside, window": static(64, 64, (64,), "float16", heads_inner=True, **WINDOW),
    "inside, packed": static(128, 128, (64,), varlen=True, **INSIDE, **ASIDE, **CAUSAL),
    "inside, in order": static(64, 64, (64,), deterministic=True, **INSIDE, **ASIDE, **CAUSAL),
    "inside, dropout": static(64, 64, (128,), dropout=True, **INSIDE, **CAUSAL),
    "inside, mask": static(128, 128, (64,), "float16", mask="bool", **INSIDE, **ASIDE),
    "aside": static(128, 128, (64,), "float16", **ASIDE, **CAUSAL),
    "aside, narrow": static(96, 80, (64,), ds_stages=2, **INSIDE, **ASIDE),
    "aside, dropout": static(64, 64, (64,), dropout=True, **ASIDE, **INSIDE, **WINDOW),
    "static stages": static(128, 128, (64,), **STAGES, **ASIDE),
    "static stages, causal": static(128, 128, (64,), "float16", ragged_k=False, **STAGES, **ASIDE, **CAUSAL),
    "static stages, window": static(96, 80, (64,), ds_stages=2, **STAGES, **SOFTCAP, **WINDOW),
    "static stages, packed": static(64, 64, (64,), varlen=True, **STAGES, **ASIDE, **CAUSAL),
    "static stages, in order": static(96, 96, (64,), deterministic=True, **STAGES, **ASIDE, **CAUSAL),
    "apart": static(128, 128, (64,), ragged_k=False, **STAGES, **ASIDE, **APART, **CAUSAL),
    "apart, packed": static(64, 128, (64,), "float16", varlen=True, **APART, **CAUSAL),
    "apart, in order": static(64, 64, (128,), deterministic=True, **NEXT_TILE, **ROUNDED, **APART),
    "apart, dropout": static(128, 128, (64,), dropout=True, **APART, **SOFTCAP),
    "whole": static(128, 128, (64,), "float16", **{**STAGES, **WHOLE}, **ASIDE),
    "whole, causal": static(
        96, 80, (64,), ragged_k=False, ds_stages=2, **{**STAGES, **WHOLE}, **ASIDE, **CAUSAL
    ),
    "whole, next tile": static(64, 64, (128,), **WHOLE, **ROUNDED, **NEXT_TILE, **CAUSAL),
    "whole, dropout": static(128, 128, (64,), ds_stages=2, dropout=True, **WHOLE, **ROUNDED, **CAUSAL),
    "whole, few columns": static(16, 24, (64,), dropout=True, **WHOLE, **ROUNDED, **CAUSAL),
    "whole, softcap": static(32, 64, (128,), "float16", **WHOLE, **SOFTCAP, **NEXT_TILE),
    "whole, 72 and 40 columns": static(72, 40, (64,), **WHOLE, **CAUSAL),
    "softcap": static(128, 128, (64,), **SOFTCAP, **CAUSAL),
    "scaled": static(64, 64, (64,), "float16", scaled=True),
    "bool mask": static(128, 128, (64,), mask="bool"),
    "bool mask, bands": static(64, 64, (128,), mask="bool", **ROUNDED, **CAUSAL),
    "bfloat16 mask": static(128, 128, (64,), mask="bfloat16", scaled=True, **WINDOW),
    "bfloat16 mask, full": static(128, 128, (64,), mask="bfloat16", scaled=True, dq_stages=2),
    "float16 mask": static(64, 64, (64,), "float16", mask="float16", scaled=True, dmask=True),
    "float32 mask": static(64, 64, (64,), mask="float32", dmask=True, deterministic=True, **SOFTCAP),
    "dropout": static(128, 128, (64,), dropout=True, dq_stages=2),
    "dropout, bands": static(64, 64, (128,), "float16", dropout=True, **CAUSAL),
    "dropout, bool mask": static(64, 64, (64,), dropout=True, mask="bool"),
    "varlen, everything": static(
        128, 64, (64,), varlen=True, dropout=True, deterministic=True, **SOFTCAP, **WINDOW
    ),
}
ALONE = {
    name: (features, config._replace(preprocesses=True))
    for name, (features, config) in STATICS.items()
    if config.scope == Scope.KV_HEAD
}
"""Small calls, which are one launch."""
FEW = few(STATICS, "full", "causal", "static stages, causal", "apart, in order", "whole, few columns")


@pytest.mark.parametrize("name", FEW)
# No shrinking: a launch is slow, and its error says what is wrong.
@settings(max_examples=examples(2, 5), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_values(name: str, data: st.DataObject) -> None:
    gradients_are_right(STATICS[name], data)


@pytest.mark.parametrize(
    "name",
    of_few(
        FEW,
        [
            "next tile, in order",
            "in order, packed",
            "inside, in order",
            "static stages, in order",
            "apart, in order",
            "whole, causal",
            "whole, few columns",
        ],
    ),
)
def test_sums_have_an_order(name: str) -> None:
    sums_have_an_order(STATICS[name])


@pytest.mark.parametrize("name", of_few(FEW, list(ALONE)))
@settings(max_examples=examples(2, 5), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_one_launch_has_the_bits_of_two(name: str, data: st.DataObject) -> None:
    one_launch_has_the_bits_of_two(ALONE[name], data)


@pytest.mark.parametrize("name", of_few(FEW, ["static stages, causal", "inside, no tail"]))
@pytest.mark.parametrize("lengths", one_of(2, [(300, 300), (200, 450), (450, 130), (128, 128), (200, 264)]))
def test_the_diagonal_hides_what_follows_the_last_key(name: str, lengths: tuple[int, int]) -> None:
    Sq, Sk = lengths
    call = drawn(STATICS[name], Hk=2, lengths=((Sq,), (Sk,)), run_length=1)
    check_gradients(STATICS[name], call, run_backward(STATICS[name], call, schedule="late"))


def test_a_warpgroup_that_sees_nothing_of_its_only_block_has_no_gradient() -> None:
    """Its registers still hold the previous tile's sums."""
    kernel = STATICS["static stages, causal"]
    call = drawn(kernel, lengths=((192,), (256,)), right=-64, num_sms=1)
    call = replace(call, q=call.q[:, :, :1].contiguous(), dout=call.dout[:, :, :1].contiguous())
    found = run_backward(kernel, call, schedule="late")
    check_gradients(kernel, call, found)
    assert (found.dk[:, 192:] == 0).all() and (found.dv[:, 192:] == 0).all()


@pytest.mark.parametrize(
    "name",
    one_of(2, of_few(FEW, ["inside, packed", "next tile, mask", "window", "varlen", "inside, window"])),
)
def test_keys_that_nobody_sees_have_no_gradient(name: str) -> None:
    unseen_keys_have_no_gradient(STATICS[name])


@pytest.mark.parametrize("name", [name for name in FEW if STATICS[name][0].varlen])
@pytest.mark.parametrize("poison", one_of(2, [math.nan, math.inf]))
def test_sequences_do_not_see_their_neighbours(name: str, poison: float) -> None:
    gradients_are_alone(STATICS[name], poison)


def test_gradients_of_a_part_have_its_dropout() -> None:
    features, config = STATICS["dropout, bands"]
    kernel = features._replace(dropout_of_part=True), config
    state = torch.tensor([5, 7, 32, 48, 3, 8, 2])
    call = drawn(kernel, lengths=((130,) * 2, (150,) * 2), p=0.4, rng_state=state)
    check_gradients(kernel, call, run_backward(kernel, call))
