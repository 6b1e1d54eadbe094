"""The Hopper backward of wide heads in the emulator: warpgroups that share keys, alone or in clusters."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flash4_torch.configs.types import Scope, Sm90Backward
from kernel_calls import static as static_of
from kernel_runs import (
    every_tile_is_drawn_once,
    gradients_are_alone,
    gradients_are_right,
    sums_have_an_order,
    unseen_keys_have_no_gradient,
)
from kernel_traits import few, of_few

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
import test_sm90_backward_kernel

static = partial(static_of, Sm90Backward)
ALONE = {"role_split": True, "dq_passes": 2, "do_stages": 1}
PAIR = {"role_split": True, "cluster": 2, "do_stages": 1}
CAUSAL = {"right": True}
WINDOW = {"left": True, "right": True}
SOFTCAP = {"softcap": True, "scaled": True}
STATICS = {
    "full": static(256, 256, (64,), **ALONE),
    "causal": static(256, 256, (64,), "float16", ds_stages=2, **ALONE, **CAUSAL),
    "narrow values": static(192, 128, (64,), role_split=True, kv_stages=2, **CAUSAL),
    "narrow keys": static(64, 256, (64,), "float16", role_split=True, left=True),
    "varlen": static(256, 256, (64,), varlen=True, **ALONE, **CAUSAL),
    "in order": static(192, 192, (64,), role_split=True, deterministic=True, **WINDOW),
    "in order, packed": static(
        256, 256, (64,), varlen=True, dropout=True, deterministic=True, **SOFTCAP, **ALONE, **WINDOW
    ),
    "softcap": static(256, 256, (64,), **SOFTCAP, **ALONE, **CAUSAL),
    "bool mask": static(256, 256, (64,), mask="bool", **ALONE),
    "float32 mask": static(136, 200, (64,), mask="float32", dmask=True, role_split=True, **SOFTCAP),
    "dropout": static(256, 256, (64,), dropout=True, **ALONE),
    "pair, full": static(256, 256, (64,), **PAIR),
    "pair, no tail": static(256, 256, (64,), ragged_k=False, **PAIR, **CAUSAL),
    "pair, causal": static(192, 128, (64,), "float16", kv_stages=2, ds_stages=2, **PAIR, **CAUSAL),
    "pair, apart": static(192, 128, (64,), scope=Scope.Q_HEAD, **PAIR, **CAUSAL),
    "pair, V of 128 columns": static(192, 128, (64,), **PAIR, **CAUSAL),
    "pair, one held": static(192, 192, (64,), "float16", v_in_regs=True, **PAIR),
    "pair, window": static(136, 200, (64,), q_stages=1, **PAIR, **WINDOW),
    "pair, in order": static(256, 256, (64,), "float16", deterministic=True, **PAIR, **CAUSAL),
    "pair, in order, inside": static(
        192, 192, (64,), deterministic=True, heads_inner=True, v_in_regs=True, **PAIR, **CAUSAL
    ),
    "pair, in order, two slots": static(
        192, 128, (64,), deterministic=True, heads_inner=True, dq_stages=2, **PAIR, **CAUSAL
    ),
    "two slots": static(128, 64, (64,), "float16", role_split=True, dq_stages=2, **WINDOW),
    "pair, softcap": static(256, 256, (64,), **SOFTCAP, **PAIR),
    "pair, bool mask": static(192, 192, (64,), mask="bool", **PAIR, **CAUSAL),
    "pair, float16 mask": static(
        192, 40, (64,), "float16", mask="float16", dmask=True, deterministic=True, **SOFTCAP, **PAIR
    ),
    "pair, dropout": static(256, 256, (64,), dropout=True, **PAIR),
    "pair, everything": static(
        192, 128, (64,), mask="bool", dropout=True, deterministic=True, **SOFTCAP, **WINDOW, **PAIR
    ),
}
FEW = few(
    STATICS,
    "pair, full",
    "pair, apart",
    "pair, in order, inside",
    "in order, packed",
    elsewhere=test_sm90_backward_kernel.FEW.values(),
)


@pytest.mark.parametrize("name", FEW)
# No shrinking: a launch is slow, and its error says what is wrong.
@settings(max_examples=2, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_values(name: str, data: st.DataObject) -> None:
    gradients_are_right(STATICS[name], data)


@pytest.mark.parametrize("tiles", [1, 2, 3])
@pytest.mark.parametrize("name", of_few(FEW, ["pair, full", "pair, causal"]))
def test_pairs_draw_every_tile_once(name: str, tiles: int) -> None:
    every_tile_is_drawn_once(STATICS[name], tiles)


@pytest.mark.parametrize(
    "name", of_few(FEW, ["pair, in order", "pair, in order, inside", "pair, in order, two slots"])
)
def test_sums_have_an_order(name: str) -> None:
    sums_have_an_order(STATICS[name])


@pytest.mark.parametrize("name", of_few(FEW, ["pair, window", "pair, everything", "in order, packed"]))
def test_keys_that_nobody_sees_have_no_gradient(name: str) -> None:
    unseen_keys_have_no_gradient(STATICS[name])


@pytest.mark.parametrize("name", [name for name in FEW if STATICS[name][0].varlen])
def test_sequences_do_not_see_their_neighbours(name: str) -> None:
    gradients_are_alone(STATICS[name], math.nan)
