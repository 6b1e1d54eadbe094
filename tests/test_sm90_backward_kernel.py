"""The Hopper backward kernel in the emulator, with its race checks: every switch, against exact results."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flash4_torch import testing
from sm90_backward_kernels import calls, check, drawn, run, static

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")


CAUSAL = {"right": True}
WINDOW = {"left": True, "right": True}
NEXT_TILE = {"kv_stages": 2, "next_tile": True}
ROUNDED = {"round_weights": True}
SOFTCAP = {"softcap": True, "scaled": True, **ROUNDED}
# (warpgroups, queries)
STATICS = {
    "full": static(128, 128, (2, 64)),
    "no tail": static(128, 128, (2, 64), tail=False, scores_first=False, **CAUSAL),
    "causal": static(128, 128, (2, 64), "float16", ds_stages=2, dq_stages=2, **CAUSAL),
    "two tiles": static(128, 96, (2, 64), kv_stages=2, **CAUSAL),
    "next tile": static(128, 128, (2, 64), do_stages=1, **NEXT_TILE, **CAUSAL),
    "next tile, in order": static(64, 64, (2, 128), "float16", deterministic=True, **ROUNDED, **NEXT_TILE),
    "next tile, packed": static(64, 64, (2, 64), varlen=True, **NEXT_TILE, **WINDOW),
    "next tile, mask": static(64, 128, (2, 64), mask="bool", dropout=True, **NEXT_TILE),
    "two bands": static(64, 64, (2, 128), dq_stages=2, **ROUNDED),
    "all in twos": static(64, 64, (2, 128), kv_stages=2, ds_stages=2, next_tile=True, **ROUNDED, **CAUSAL),
    "two bands, causal": static(64, 64, (2, 128), "float16", kv_stages=2, **ROUNDED, **CAUSAL),
    "one warpgroup": static(64, 64, (1, 64), q_stages=1, do_stages=1, **CAUSAL),
    "three warpgroups": static(48, 48, (3, 64), **CAUSAL),
    "odd heads": static(72, 104, (2, 64), "float16", **CAUSAL),
    "few columns": static(8, 24, (2, 64), **WINDOW),
    "narrow parts": static(96, 96, (2, 64), **CAUSAL),
    "left only": static(64, 128, (2, 64), left=True),
    "window": static(64, 64, (2, 128), **ROUNDED, **WINDOW),
    "window, wide": static(128, 64, (2, 64), "float16", **WINDOW),
    "varlen": static(128, 128, (2, 64), varlen=True, ds_stages=2),
    "varlen, causal": static(64, 64, (2, 128), varlen=True, **ROUNDED, **CAUSAL),
    "in order": static(128, 128, (2, 64), deterministic=True, dq_stages=2, **CAUSAL),
    "in order, window": static(64, 64, (2, 128), deterministic=True, **ROUNDED, **WINDOW),
    "in order, packed": static(64, 40, (2, 64), varlen=True, deterministic=True, **WINDOW),
    "softcap": static(128, 128, (2, 64), **SOFTCAP, **CAUSAL),
    "scaled": static(64, 64, (2, 64), "float16", scaled=True),
    "bool mask": static(128, 128, (2, 64), mask="bool"),
    "bool mask, bands": static(64, 64, (2, 128), mask="bool", **ROUNDED, **CAUSAL),
    "bfloat16 mask": static(128, 128, (2, 64), mask="bfloat16", scaled=True, **WINDOW),
    "float16 mask": static(64, 64, (2, 64), "float16", mask="float16", scaled=True, dmask=True),
    "float32 mask": static(64, 64, (2, 64), mask="float32", dmask=True, deterministic=True, **SOFTCAP),
    "dropout": static(128, 128, (2, 64), dropout=True, dq_stages=2),
    "dropout, bands": static(64, 64, (2, 128), "float16", dropout=True, **CAUSAL),
    "dropout, bool mask": static(64, 64, (2, 64), dropout=True, mask="bool"),
    "varlen, everything": static(
        128, 64, (2, 64), varlen=True, dropout=True, deterministic=True, **SOFTCAP, **WINDOW
    ),
}


@pytest.mark.parametrize("name", STATICS)
# No shrinking: a launch is slow, and says itself what is wrong.
@settings(max_examples=5, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_values(name: str, data: st.DataObject) -> None:
    kernel = STATICS[name]
    call = data.draw(calls(*kernel))
    found = run(kernel, call, schedule="late")
    check(kernel, call, found)
    schedule, seed = data.draw(st.sampled_from(["eager", "fuzz"])), data.draw(st.integers(0, 9))
    again = run(kernel, call, schedule=schedule, seed=seed)
    assert torch.equal(found.dk, again.dk) and torch.equal(found.dv, again.dv)
    if kernel[0].deterministic:
        assert torch.equal(found.dq, again.dq)
    else:
        check(kernel, call, again)


@pytest.mark.parametrize("name", ["window", "window, wide", "left only", "bool mask", "varlen"])
def test_keys_that_nobody_sees_have_no_gradient(name: str) -> None:
    kernel = STATICS[name]
    call = drawn(
        kernel, right=-400, left=-400, lengths=((150, 0), (300, 70)) if name == "varlen" else ((150,), (300,))
    )
    if kernel[0].mask:
        call = replace(call, mask=torch.zeros(1, 1, 150, 300, dtype=torch.bool))
    dq, dk, dv, _ = run(kernel, call)
    last = slice(300, None) if name == "varlen" else slice(None)
    assert (dk[last] == 0).all() and (dv[last] == 0).all()
    assert name == "varlen" or (dq == 0).all()


@pytest.mark.parametrize("name", [name for name in STATICS if STATICS[name][0].varlen])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_sequences_do_not_see_their_neighbours(name: str, poison: float) -> None:
    kernel, lengths = STATICS[name], ((40, 70, 9), (50, 101, 133))
    more = {"left": 60, "right": 20, "p": 0.2 if kernel[0].dropout else 0.0}
    call = drawn(kernel, lengths=lengths, **more)
    clean = run(kernel, call)
    ends = [list(pairwise([0, *torch.tensor(n).cumsum(0).tolist()])) for n in lengths]
    for b in range(3):
        spoiled = {}
        for which, names in ((0, ("q", "dout")), (1, ("k", "v"))):
            others = torch.ones(ends[which][-1][1], dtype=torch.bool)
            others[slice(*ends[which][b])] = False
            spoiled |= {n: getattr(call, n).masked_fill(others[:, None, None], poison) for n in names}
        found = run(kernel, replace(call, **spoiled), stats_of=call)
        rows, keys = slice(*ends[0][b]), slice(*ends[1][b])
        assert torch.equal(found.dk[keys], clean.dk[keys]) and torch.equal(found.dv[keys], clean.dv[keys])
        testing.assert_close_as_peer(found.dq[rows], clean.dq[rows].double(), clean.dq[rows], what="dq")
