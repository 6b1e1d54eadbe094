"""The Hopper forward kernel in the emulator, with its race checks: every switch, against exact results."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from everything import examples, one_of
from flash4_torch import testing
from flash4_torch.configs.types import Sm90Forward
from flash4_torch.testing import emulate
from kernel_calls import drawn
from kernel_calls import static as static_of
from kernel_runs import (
    blind_rows_are_zero,
    compiled,
    empty_splits_have_nothing,
    every_tile_is_drawn_once,
    is_right,
    run,
    sequences_are_alone,
)
from kernel_traits import few, of_few
from sm90_kernels import SM90

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

static = partial(static_of, Sm90Forward)
CAUSAL = {"right": True}
WINDOW = {"left": True, "right": True}
# (warpgroups, keys, K and V stages, Q stages)
STATICS = {
    "one warpgroup": static(64, 64, (1, 128, 4, 2)),
    "no tail": static(64, 64, (2, 64, 2, 2), "float16", ragged_k=False, **CAUSAL),
    "four warpgroups": static(64, 64, (4, 64, 4, 2), "float16", **CAUSAL),
    "next tile": static(
        64, 64, (4, 64, 4, 2), next_tile=True, lazy_rescale=True, exp_quarters_before_pv=2, **CAUSAL
    ),
    "turns": static(64, 64, (3, 112, 3, 2), pingpong=True, exp_quarters_before_pv=1, **WINDOW),
    "turns, half": static(64, 64, (3, 128, 3, 2), pingpong=True, half_block=True, **CAUSAL),
    "turns, next tile": static(
        128, 128, (2, 128, 2, 2), "float16", pingpong=True, next_tile=True, k_ahead=True
    ),
    "half": static(96, 96, (2, 128, 3, 2), "float16", k_ahead=True, half_block=True, **CAUSAL),
    "narrow": static(128, 128, (3, 80, 2, 2), k_ahead=True, lazy_rescale=True, **CAUSAL),
    "polynomial": static(128, 64, (2, 96, 2, 2), **CAUSAL),
    "wide": static(256, 256, (2, 48, 2, 1), k_ahead=True, lazy_rescale=True, **CAUSAL),
    "O over Q": static(256, 256, (2, 80, 2, 1), k_ahead=True, lazy_rescale=True, o_over_q=True, **CAUSAL),
    "O over one of two Q": static(192, 64, (2, 96, 2, 2), o_over_q=True, **CAUSAL),
    "O over Q, next tile": static(64, 64, (4, 64, 4, 2), next_tile=True, o_over_q=True, **CAUSAL),
    "few columns": static(8, 24, (1, 80, 2, 2), "float16", **CAUSAL),
    "left only": static(40, 136, (2, 80, 2, 2), left=True),
    "packed": static(64, 64, (2, 128, 2, 2), pack_gqa=4, **CAUSAL),
    "packed, one row": static(64, 64, (1, 128, 4, 2), "float16", pack_gqa=64, **CAUSAL),
    "pair": static(64, 64, (3, 128, 3, 2), pingpong=True, k_ahead=True, half_block=True, cluster=2, **CAUSAL),
    "pair, full": static(128, 128, (3, 80, 2, 2), "float16", k_ahead=True, lazy_rescale=True, cluster=2),
    "pair, many passed": static(
        128, 128, (3, 80, 2, 2), k_ahead=True, lazy_rescale=True, cluster=2, **CAUSAL
    ),
    "pair, window": static(96, 80, (2, 48, 2, 2), "float16", pingpong=True, cluster=2, **WINDOW),
    "pair, next tile": static(
        128, 128, (2, 128, 2, 2), pingpong=True, next_tile=True, k_ahead=True, cluster=2, **CAUSAL
    ),
    "pair, O over Q": static(
        256, 256, (2, 64, 2, 1), pingpong=True, k_ahead=True, o_over_q=True, cluster=2, **CAUSAL
    ),
    "pair, packed": static(64, 64, (1, 64, 2, 2), k_ahead=True, pack_gqa=4, cluster=2, **CAUSAL),
    "sinks": static(64, 64, (2, 128, 2, 2), sinks="bfloat16", lazy_rescale=True, **CAUSAL),
    "sinks, packed": static(128, 64, (1, 80, 2, 2), "float16", sinks="float32", pack_gqa=4, varlen=True),
    "sinks, float32 mask": static(64, 64, (2, 64, 2, 2), sinks="float32", mask="float32", scaled=True),
    "softcap": static(64, 64, (2, 128, 2, 2), softcap=True, scaled=True, **WINDOW),
    "scaled": static(96, 40, (2, 80, 2, 2), "float16", scaled=True, next_tile=True, k_ahead=True),
    "bool mask": static(64, 64, (2, 128, 2, 2), mask="bool"),
    "bool mask, dropout": static(64, 64, (2, 96, 2, 2), mask="bool", dropout=True, pingpong=True, **CAUSAL),
    "bfloat16 mask": static(128, 128, (2, 80, 2, 2), mask="bfloat16", scaled=True, k_ahead=True, **WINDOW),
    "float16 mask": static(64, 64, (1, 64, 2, 2), "float16", mask="float16", scaled=True),
    "float32 mask": static(
        64, 64, (2, 64, 2, 2), mask="float32", softcap=True, scaled=True, dropout=True, **CAUSAL
    ),
    "dropout": static(64, 64, (2, 128, 2, 2), "float16", dropout=True, next_tile=True, k_ahead=True),
    "dropout, wide": static(
        256, 256, (2, 64, 2, 1), dropout=True, k_ahead=True, lazy_rescale=True, o_over_q=True, **CAUSAL
    ),
    "varlen": static(64, 64, (2, 128, 2, 2), varlen=True, k_ahead=True, **CAUSAL),
    "varlen, packed": static(64, 64, (1, 128, 2, 2), "float16", varlen=True, pack_gqa=2),
    "varlen, next tile": static(64, 64, (4, 64, 4, 2), varlen=True, next_tile=True, lazy_rescale=True),
    "varlen, next tile, causal": static(
        128, 128, (2, 128, 2, 2), varlen=True, pingpong=True, next_tile=True, k_ahead=True, **CAUSAL
    ),
    "varlen, everything": static(
        128, 64, (2, 80, 2, 2), varlen=True, softcap=True, scaled=True, dropout=True, **WINDOW
    ),
    "splits": static(64, 64, (1, 128, 4, 2), "float16", splits=True, next_tile=True, k_ahead=True, **CAUSAL),
    "splits, packed": static(96, 80, (2, 48, 2, 2), splits=True, pingpong=True, pack_gqa=4, **WINDOW),
    "splits, varlen, sinks": static(
        128, 128, (2, 80, 2, 2), splits=True, varlen=True, k_ahead=True, sinks="float32", **CAUSAL
    ),
    "splits, O over Q": static(
        192, 192, (2, 64, 2, 1), splits=True, k_ahead=True, o_over_q=True, softcap=True, scaled=True
    ),
    "splits, two CTAs": static(
        96, 96, (1, 64, 3, 1), splits=True, at_once=2, k_ahead=True, softcap=True, scaled=True, **CAUSAL
    ),
    "splits, bool mask": static(
        64, 64, (2, 128, 4, 2), splits=True, mask="bool", k_ahead=True, sinks="bfloat16", **WINDOW
    ),
    "splits, float32 mask": static(
        64, 72, (1, 64, 2, 2), "float16", splits=True, mask="float32", scaled=True, pack_gqa=2
    ),
    "varlen, O over Q": static(192, 192, (2, 80, 2, 1), varlen=True, o_over_q=True, k_ahead=True, **CAUSAL),
}
STATICS |= SM90.covering(STATICS.values())
FEW = few(STATICS, "half", "turns, half", "pair", "varlen", "splits, varlen, sinks")

SPLITS = [name for name, (features, _) in STATICS.items() if features.splits]


@pytest.mark.parametrize("name", FEW)
# No shrinking: a launch is slow, and its error says what is wrong.
@settings(max_examples=examples(2, 6), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_values(name: str, data: st.DataObject) -> None:
    is_right(STATICS[name], data)


@pytest.mark.parametrize("p, state", one_of(2, [(0.7, (5, 7, 32, 48, 3, 8, 2)), (0.25, (5, 7))]))
def test_dropout_keeps_the_weights_that_the_reference_keeps(p: float, state: tuple[int, ...]) -> None:
    """One-hot values make the output the weights themselves, in a part of a larger call, too."""
    features, config = STATICS["dropout"]
    kernel = features._replace(dropout_of_part=len(state) > 2), config
    call = drawn(kernel, lengths=((130,) * 2, (64,) * 2), p=p, rng_state=torch.tensor(state))
    call.v[:] = torch.eye(64)[:, None].to(call.v.dtype)
    kept = testing.dropout_mask(call.rng_state, 2, 2, 130, 64, p)
    assert torch.equal(run(kernel, call).out.transpose(1, 2) != 0, kept)


@pytest.mark.parametrize("tiles", [1, 2, 3, 5])
@pytest.mark.parametrize("name", [name for name in FEW if "pair" in name])
def test_pairs_draw_every_tile_once(name: str, tiles: int) -> None:
    every_tile_is_drawn_once(STATICS[name], tiles)


@pytest.mark.parametrize(
    "name", of_few(FEW, ["turns, half", "turns", "pair", "pair, window", "bool mask, dropout"])
)
def test_rows_that_see_nothing_are_zero_whatever_the_values(name: str) -> None:
    blind_rows_are_zero(STATICS[name])


@pytest.mark.parametrize("name", [name for name in FEW if "varlen" in name])
@pytest.mark.parametrize("poison", one_of(2, [math.nan, math.inf]))
def test_sequences_do_not_see_their_neighbours(name: str, poison: float) -> None:
    sequences_are_alone(STATICS[name], poison)


@pytest.mark.parametrize("name", of_few(FEW, SPLITS))
def test_splits_without_blocks_have_nothing(name: str) -> None:
    empty_splits_have_nothing(STATICS[name])


def test_a_wrong_launch_is_found() -> None:
    """The other tests rely on this check: memory beyond the tensors must not be touched."""
    features, config = kernel = STATICS["one warpgroup"]
    call = drawn(kernel)
    out, lse = torch.empty(1, 150, 2, 64, dtype=torch.bfloat16), torch.empty(1, 2, 150)
    tile_counter = torch.zeros(1, dtype=torch.int32)
    params = (0.1, 0.0, 0, 0, 150, 1, 1, 0, 0, 1.0, 0, 0, 0)
    with emulate.device("sm_90a") as device, device.touching(call.q, call.k, call.v, out, tile_counter):
        function = compiled(features, config)
        with pytest.raises(emulate.EmulationError, match="out-of-bounds"):
            function(
                call.q, call.k, call.v, out, lse, None, tile_counter, None, None, None, None, None, params
            )
