"""The forward by mma.sync in the emulator, with its race checks: every switch, against exact results."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from everything import examples, one_of
from flash4_torch import testing
from flash4_torch.configs.types import Sm80Forward
from kernel_calls import drawn
from kernel_calls import static as static_of
from kernel_runs import blind_rows_are_zero, empty_splits_have_nothing, is_right, run, sequences_are_alone
from kernel_traits import few, of_few
from sm80_kernels import forwards

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

static = partial(static_of, Sm80Forward)
CAUSAL = {"right": True}
WINDOW = {"left": True, "right": True}
# (warps, MMAs of 16 rows that a warp has, keys, K and V stages)
STATICS = {
    "one stage": static(64, 64, (4, 2, 64, 1)),
    "three stages": static(64, 64, (2, 1, 32, 3), "float16", **WINDOW),
    "two MMAs of rows": static(128, 128, (4, 2, 32, 2), **CAUSAL),
    "two MMAs of rows, one stage": static(96, 96, (4, 2, 48, 1), "float16"),
    "no tail": static(64, 64, (4, 2, 64, 2), ragged_k=False),
    "no tail, causal": static(64, 64, (4, 2, 64, 2), "float16", ragged_k=False, **CAUSAL),
    "lazy": static(128, 128, (4, 2, 64, 1), lazy_rescale=True, **CAUSAL),
    "lazy, seven parts": static(112, 104, (4, 2, 64, 1), "float16", lazy_rescale=True, **WINDOW),
    "lazy, bool mask": static(
        128, 128, (4, 2, 64, 1), lazy_rescale=True, mask="bool", dropout=True, sinks="float32", **CAUSAL
    ),
    "lazy, packed bool mask": static(
        72, 128, (4, 2, 64, 1), "float16", lazy_rescale=True, mask="bool", pack_gqa=4, **WINDOW
    ),
    "lazy, varlen": static(
        128, 128, (4, 2, 64, 1), lazy_rescale=True, varlen=True, softcap=True, scaled=True, **WINDOW
    ),
    "eight warps": static(128, 128, (8, 1, 64, 2), "float16", **WINDOW),
    "eight warps, narrow chunks": static(48, 80, (8, 1, 32, 2), lazy_rescale=True),
    "odd keys": static(96, 64, (4, 1, 80, 2), "float16", **CAUSAL),
    "wide": static(256, 256, (4, 1, 64, 1), **CAUSAL),
    "wider O": static(64, 256, (4, 1, 32, 1), "float16", **CAUSAL),
    "narrower O": static(192, 64, (4, 1, 64, 2), **WINDOW),
    "few columns": static(8, 24, (4, 1, 80, 1), "float16", **CAUSAL),
    "left only": static(40, 136, (4, 1, 64, 1), left=True),
    "packed": static(64, 64, (4, 2, 64, 2), pack_gqa=4, **CAUSAL),
    "packed, one row": static(64, 64, (4, 1, 64, 2), "float16", pack_gqa=64, **CAUSAL),
    "sinks": static(64, 64, (4, 2, 64, 2), sinks="bfloat16", lazy_rescale=True, **CAUSAL),
    "sinks, packed": static(128, 64, (4, 1, 48, 1), "float16", sinks="float32", pack_gqa=4, varlen=True),
    "sinks, float32 mask": static(64, 64, (4, 2, 64, 1), sinks="float32", mask="float32", scaled=True),
    "softcap": static(64, 64, (4, 2, 64, 2), softcap=True, scaled=True, **WINDOW),
    "large softcap": static(64, 64, (4, 1, 64, 1), softcap=True, large_softcap=True, scaled=True),
    "scaled": static(96, 40, (4, 1, 64, 2), "float16", scaled=True),
    "bool mask": static(64, 64, (4, 2, 64, 2), mask="bool"),
    "bool mask, dropout": static(64, 64, (4, 1, 144, 1), mask="bool", dropout=True, **CAUSAL),
    "bfloat16 mask": static(128, 128, (4, 1, 64, 1), mask="bfloat16", scaled=True, **WINDOW),
    "float16 mask": static(64, 64, (4, 1, 64, 2), "float16", mask="float16", scaled=True),
    "float32 mask": static(
        64, 64, (4, 1, 64, 1), mask="float32", softcap=True, scaled=True, dropout=True, **CAUSAL
    ),
    "dropout": static(64, 64, (4, 2, 64, 2), "float16", dropout=True),
    "dropout, lazy": static(64, 48, (4, 2, 64, 2), dropout=True, lazy_rescale=True, **CAUSAL),
    "dropout, two MMAs of 32 keys": static(96, 96, (4, 2, 32, 2), "float16", dropout=True, varlen=True),
    "dropout, three strips": static(40, 64, (4, 1, 96, 1), dropout=True, **CAUSAL),
    "dropout, few strips": static(64, 64, (4, 1, 32, 2), "float16", dropout=True, **CAUSAL),
    "dropout, wide": static(256, 256, (4, 1, 32, 1), dropout=True, lazy_rescale=True, **CAUSAL),
    "sixteen keys": static(
        192, 256, (8, 1, 16, 2), "float16", mask="bool", dropout=True, softcap=True, scaled=True, **WINDOW
    ),
    "varlen": static(64, 64, (4, 2, 64, 2), varlen=True, **CAUSAL),
    "varlen, packed": static(64, 64, (4, 1, 64, 1), "float16", varlen=True, pack_gqa=2),
    "varlen, everything": static(
        128, 64, (4, 1, 64, 2), varlen=True, softcap=True, scaled=True, dropout=True, **WINDOW
    ),
    "splits": static(64, 64, (4, 1, 64, 2), "float16", splits=True, **CAUSAL),
    "splits, packed": static(96, 80, (4, 2, 64, 1), splits=True, pack_gqa=4, **WINDOW),
    "splits, bool mask": static(64, 80, (4, 1, 64, 1), splits=True, mask="bool", **WINDOW),
    "splits, lazy": static(
        128, 128, (4, 2, 64, 1), splits=True, lazy_rescale=True, softcap=True, scaled=True, **WINDOW
    ),
    "splits, varlen, sinks": static(
        256, 256, (8, 1, 64, 1), "float16", splits=True, varlen=True, sinks="float32", **CAUSAL
    ),
}
SHARED = {"column_warps": 2}
STATICS.update(
    {
        "shared rows": static(64, 64, (4, 1, 64, 2), **SHARED, **CAUSAL),
        "shared rows, 512 columns": static(
            512, 512, (4, 1, 32, 1), "float16", mask="bool", dropout=True, **SHARED
        ),
        "shared rows, 320 columns": static(
            320, 328, (8, 1, 64, 1), pack_gqa=4, sinks="bfloat16", **SHARED, **CAUSAL
        ),
        "shared rows, varlen": static(264, 64, (4, 1, 32, 2), varlen=True, dropout=True, **SHARED, **WINDOW),
        "shared rows, float mask": static(
            64,
            512,
            (2, 1, 32, 1),
            "float16",
            mask="float32",
            scaled=True,
            softcap=True,
            ragged_k=False,
            **SHARED,
        ),
    }
)
FLOAT32 = {
    "shared rows": static(256, 256, (8, 1, 32, 1), "float32", **SHARED, **CAUSAL),
    "shared rows, everything": static(
        192,
        256,
        (8, 1, 32, 1),
        "float32",
        mask="float32",
        dropout=True,
        sinks="float32",
        softcap=True,
        scaled=True,
        **SHARED,
    ),
    "shared rows, TF32": static(
        192, 160, (4, 1, 64, 1), "float32", tf32=True, dropout=True, mask="bool", varlen=False, **SHARED
    ),
    "float32": static(64, 64, (4, 1, 64, 2), "float32", **CAUSAL),
    "split Q": static(128, 72, (8, 1, 32, 2), "float32", splits_q=True, mask="bool", **WINDOW),
    "read ahead": static(128, 128, (8, 1, 32, 2), "float32", reads_ahead=True, splits_q=True),
    "read ahead, 96 columns": static(
        96, 40, (4, 1, 32, 2), "float32", reads_ahead=True, pack_gqa=4, **CAUSAL
    ),
    "read ahead, TF32": static(256, 192, (8, 1, 32, 1), "float32", reads_ahead=True, tf32=True, **SHARED),
    "split Q, packed": static(
        40, 64, (4, 1, 64, 2), "float32", splits_q=True, pack_gqa=4, sinks="float32", varlen=True
    ),
    "split Q, shared rows": static(
        192, 256, (8, 1, 32, 1), "float32", splits_q=True, reads_ahead=True, **SHARED, **CAUSAL
    ),
    "TF32": static(64, 64, (4, 2, 32, 2), "float32", tf32=True),
    "128 columns": static(128, 128, (8, 1, 32, 2), "float32", **WINDOW),
    "128 columns, TF32": static(128, 128, (4, 1, 32, 2), "float32", tf32=True, ragged_k=False, **CAUSAL),
    "sixteen keys": static(128, 72, (8, 1, 16, 2), "float32", mask="bool", dropout=True, **CAUSAL),
    "few columns": static(8, 40, (4, 1, 80, 1), "float32", left=True),
    "packed": static(96, 64, (4, 1, 32, 2), "float32", pack_gqa=4, sinks="float32", varlen=True),
    "float32 mask": static(
        64,
        64,
        (4, 1, 32, 1),
        "float32",
        mask="float32",
        softcap=True,
        large_softcap=True,
        scaled=True,
        dropout=True,
    ),
    "varlen": static(64, 128, (4, 1, 32, 1), "float32", varlen=True, tf32=True, dropout=True, **WINDOW),
    "splits": static(64, 72, (4, 2, 32, 2), "float32", splits=True, tf32=True, sinks="float32", **CAUSAL),
    "splits, float32 mask": static(
        64, 64, (4, 1, 32, 1), "float32", splits=True, mask="float32", scaled=True, pack_gqa=2, **CAUSAL
    ),
    "splits, shared rows": static(256, 200, (8, 1, 32, 1), "float32", splits=True, varlen=True, **SHARED),
}
STATICS.update({f"float32: {name}": kernel for name, kernel in FLOAT32.items()})
PLACED = forwards()
FEW = few(
    STATICS,
    "no tail",
    "eight warps, narrow chunks",
    "float32: packed",
    "float32: split Q, shared rows",
    "float32: shared rows, everything",
    "splits, varlen, sinks",
    "float32: splits, shared rows",
)

SPLITS = [name for name, (features, _) in STATICS.items() if features.splits]


@pytest.mark.parametrize("name", FEW)
# No shrinking: a launch is slow, and its error says what is wrong.
@settings(max_examples=examples(2, 6), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_values(name: str, data: st.DataObject) -> None:
    is_right(STATICS[name], data)


AHEAD = [name for name, (_, config) in STATICS.items() if config.reads_ahead]


@pytest.mark.parametrize("name", of_few(FEW, AHEAD))
def test_reading_ahead_changes_no_bit(name: str) -> None:
    features, config = STATICS[name]
    kernels = ((features, config._replace(reads_ahead=ahead)) for ahead in (True, False))
    now, then = (run(kernel, drawn(kernel)) for kernel in kernels)
    assert torch.equal(now.out, then.out) and torch.equal(now.lse, then.lse)


@pytest.mark.parametrize("name", one_of(98, list(PLACED)))
@settings(max_examples=examples(2, 3), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_every_config_of_the_tables(name: str, data: st.DataObject) -> None:
    """Whatever a table takes is right on a GPU that the table is for."""
    arch, kernel = PLACED[name]
    is_right(kernel, data, arch)


@pytest.mark.parametrize("p, state", one_of(2, [(0.7, (5, 7, 32, 48, 3, 8, 2)), (0.25, (5, 7))]))
@pytest.mark.parametrize("name", one_of(2, ["dropout", "dropout, few strips"]))
def test_dropout_keeps_the_weights_that_the_reference_keeps(
    name: str, p: float, state: tuple[int, ...]
) -> None:
    """One-hot values make the output the weights themselves, in a part of a larger call, too."""
    features, config = STATICS[name]
    kernel = features._replace(dropout_of_part=len(state) > 2), config
    Sq = 64 if features.right else 130  # causal: all rows but the last would see less than all keys
    call = drawn(kernel, lengths=((Sq,) * 2, (64,) * 2), p=p, rng_state=torch.tensor(state), right=64)
    call.v[:] = torch.eye(64)[:, None].to(call.v.dtype)
    kept = testing.dropout_mask(call.rng_state, 2, 2, Sq, 64, p)
    assert torch.equal(run(kernel, call).out.transpose(1, 2) != 0, kept)


@pytest.mark.parametrize(
    "name",
    of_few(FEW, ["lazy, packed bool mask", "no tail, causal", "varlen, everything", "bool mask, dropout"]),
)
def test_rows_that_see_nothing_are_zero_whatever_the_values(name: str) -> None:
    blind_rows_are_zero(STATICS[name])


@pytest.mark.parametrize("name", of_few(FEW, SPLITS))
def test_splits_without_blocks_have_nothing(name: str) -> None:
    empty_splits_have_nothing(STATICS[name])


@pytest.mark.parametrize("name", [name for name in FEW if STATICS[name][0].varlen])
@pytest.mark.parametrize("poison", one_of(2, [math.nan, math.inf]))
def test_sequences_do_not_see_their_neighbours(name: str, poison: float) -> None:
    sequences_are_alone(STATICS[name], poison)
