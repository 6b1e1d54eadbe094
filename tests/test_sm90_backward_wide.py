"""The Hopper backward of wide heads in the emulator: warpgroups that share keys, alone or in clusters."""

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

ALONE = {"split": True, "dq_passes": 2, "do_stages": 1}
PAIR = {"split": True, "cluster": 2, "do_stages": 1}
CAUSAL = {"right": True}
WINDOW = {"left": True, "right": True}
SOFTCAP = {"softcap": True, "scaled": True}
STATICS = {
    "full": static(256, 256, (2, 64), **ALONE),
    "causal": static(256, 256, (2, 64), "float16", ds_stages=2, **ALONE, **CAUSAL),
    "narrow values": static(192, 128, (2, 64), split=True, kv_stages=2, **CAUSAL),
    "narrow keys": static(64, 256, (2, 64), "float16", split=True, left=True),
    "varlen": static(256, 256, (2, 64), varlen=True, **ALONE, **CAUSAL),
    "in order": static(192, 192, (2, 64), split=True, deterministic=True, **WINDOW),
    "in order, packed": static(
        256, 256, (2, 64), varlen=True, dropout=True, deterministic=True, **SOFTCAP, **ALONE, **WINDOW
    ),
    "softcap": static(256, 256, (2, 64), **SOFTCAP, **ALONE, **CAUSAL),
    "bool mask": static(256, 256, (2, 64), mask="bool", **ALONE),
    "float32 mask": static(136, 200, (2, 64), mask="float32", dmask=True, split=True, **SOFTCAP),
    "dropout": static(256, 256, (2, 64), dropout=True, **ALONE),
    "pair, full": static(256, 256, (2, 64), **PAIR),
    "pair, no tail": static(256, 256, (2, 64), tail=False, **PAIR, **CAUSAL),
    "pair, causal": static(192, 128, (2, 64), "float16", kv_stages=2, ds_stages=2, **PAIR, **CAUSAL),
    "pair, held": static(192, 128, (2, 64), holds=2, **PAIR, **CAUSAL),
    "pair, one held": static(192, 192, (2, 64), "float16", holds=1, **PAIR),
    "pair, window": static(136, 200, (2, 64), q_stages=1, **PAIR, **WINDOW),
    "pair, in order": static(256, 256, (2, 64), "float16", deterministic=True, **PAIR, **CAUSAL),
    "pair, softcap": static(256, 256, (2, 64), **SOFTCAP, **PAIR),
    "pair, bool mask": static(192, 192, (2, 64), mask="bool", **PAIR, **CAUSAL),
    "pair, float16 mask": static(
        192, 40, (2, 64), "float16", mask="float16", dmask=True, deterministic=True, **SOFTCAP, **PAIR
    ),
    "pair, dropout": static(256, 256, (2, 64), dropout=True, **PAIR),
    "pair, everything": static(
        192, 128, (2, 64), mask="bool", dropout=True, deterministic=True, **SOFTCAP, **WINDOW, **PAIR
    ),
}


@pytest.mark.parametrize("name", STATICS)
# No shrinking: a launch is slow, and says itself what is wrong.
@settings(max_examples=3, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_values(name: str, data: st.DataObject) -> None:
    kernel = STATICS[name]
    call = data.draw(calls(*kernel))
    schedule, seed = data.draw(st.sampled_from(["late", "fuzz", "eager"])), data.draw(st.integers(0, 9))
    found = run(kernel, call, schedule=schedule, seed=seed)
    check(kernel, call, found)
    if kernel[0].deterministic:
        again = run(kernel, call, schedule="late")
        assert all(torch.equal(*both) for both in zip(found[:3], again[:3], strict=True))


@pytest.mark.parametrize("tiles", [1, 2, 3])
@pytest.mark.parametrize("name", ["pair, full", "pair, causal"])
def test_pairs_draw_every_tile_once(name: str, tiles: int) -> None:
    """Odd numbers of tiles leave a CTA without keys; fewer than two multiprocessors still are a cluster."""
    kernel, lengths = STATICS[name], ((150,) * 2, (64 * tiles - 7,) * 2)
    for multiprocessors, schedule in ((1, "late"), (5, "fuzz")):
        call = drawn(kernel, lengths=lengths, multiprocessors=multiprocessors, right=9)
        check(kernel, call, run(kernel, call, schedule=schedule))


@pytest.mark.parametrize("name", ["narrow keys", "pair, window", "pair, bool mask"])
def test_keys_that_nobody_sees_have_no_gradient(name: str) -> None:
    kernel = STATICS[name]
    call = drawn(kernel, right=-400, left=-400)
    if kernel[0].mask:
        call = replace(call, mask=torch.zeros(1, 1, 150, 300, dtype=torch.bool))
    assert all((x == 0).all() for x in run(kernel, call)[:3])


@pytest.mark.parametrize("name", [name for name in STATICS if STATICS[name][0].varlen])
def test_sequences_do_not_see_their_neighbours(name: str) -> None:
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
            spoiled |= {n: getattr(call, n).masked_fill(others[:, None, None], math.nan) for n in names}
        found = run(kernel, replace(call, **spoiled), stats_of=call)
        rows, keys = slice(*ends[0][b]), slice(*ends[1][b])
        assert torch.equal(found.dk[keys], clean.dk[keys]) and torch.equal(found.dv[keys], clean.dv[keys])
        testing.assert_close_as_peer(found.dq[rows], clean.dq[rows].double(), clean.dq[rows], what="dq")
