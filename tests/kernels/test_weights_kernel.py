"""The weights kernel in the emulator, with its race checks: every feature, against exact results."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everything import examples, one_of
from flash4_torch import testing
from flash4_torch.compile import jit
from flash4_torch.configs.types import Features
from flash4_torch.kernels.common.mask_tables import place
from flash4_torch.masks import Band
from flash4_torch.reference.attention import attention, attention_weights
from flash4_torch.reference.dropout import Dropout, thresholds
from flash4_torch.reference.scoring import Scoring
from flash4_torch.testing import emulate
from kernel_calls import Call, calls, of_peer
from kernel_runs import compiled_tables

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

ARCHS = ("sm_90a", "sm_100a")
WITHOUT_TMA = ("sm_80", "sm_86", "sm_89", "sm_120a")
FEATURES = {
    "plain": Features("bfloat16", 64, 0),
    "causal": Features("float16", 40, 0, right=True),
    "window": Features("bfloat16", 128, 0, left=True, right=True),
    "wide": Features("bfloat16", 256, 0, left=True),
    "narrow": Features("float16", 8, 0),
    "softcap": Features("bfloat16", 72, 0, softcap=True, scaled=True),
    "bool mask": Features("bfloat16", 64, 0, mask="bool"),
    "bool mask, causal, dropout": Features("float16", 16, 0, right=True, mask="bool", dropout=True),
    "float mask": Features("bfloat16", 64, 0, mask="bfloat16", scaled=True),
    "float32 mask, dropout": Features("bfloat16", 64, 0, mask="float32", scaled=True, dropout=True),
    "dropout": Features("bfloat16", 64, 0, dropout=True),
}
STATICS = [(name, arch, average) for name in FEATURES for arch in ARCHS for average in (True, False)]
STATICS_SM80 = [
    (name, arch, average) for name in FEATURES for arch in WITHOUT_TMA for average in (True, False)
]
FLOAT32 = {
    "float32": Features("float32", 64, 0),
    "float32, TF32": Features("float32", 64, 0, tf32=True),
    "float32, narrow, causal": Features("float32", 8, 0, right=True),
    "float32, odd, window": Features("float32", 72, 0, left=True, right=True),
    "float32, TF32, wide": Features("float32", 256, 0, tf32=True, left=True),
    "float32, softcap": Features("float32", 40, 0, softcap=True, scaled=True),
    "float32, bool mask, causal, dropout": Features("float32", 96, 0, right=True, mask="bool", dropout=True),
    "float32, float mask": Features("float32", 64, 0, mask="float32", scaled=True),
}
STATICS_FLOAT32 = [
    (name, arch, average)
    for name in FLOAT32
    for arch in (*WITHOUT_TMA, "sm_90a", "sm_100a")
    for average in (True, False)
]
FEATURES |= FLOAT32


STATICS_SIGNED = [
    (name, arch) for name in FEATURES if FEATURES[name].dropout for arch in (*ARCHS, *WITHOUT_TMA)
]


@functools.cache
def compiled(arch: str, features: Features, average: bool, signed: bool = False):
    from flash4_torch.kernels.weights.launch import compile_weights

    with jit.quiet():
        return compile_weights(features, average, arch in ARCHS and not features.is_float32, signed)


def scoring_of(features: Features, call: Call) -> Scoring:
    band = Band(call.left if features.left else None, call.right if features.right else None)
    dropout = Dropout(call.rng_state, call.p) if features.dropout else None
    return Scoring(call.scale, band, call.softcap, call.mask, dropout)


def expected(features: Features, call: Call, average: bool, dtype: torch.dtype) -> Tensor:
    weights = attention_weights(call.q.to(dtype), call.k.to(dtype), scoring_of(features, call))
    return weights.mean(1) if average else weights


@contextmanager
def poisoned(
    arch: str, call: Call, average: bool, **schedule: object
) -> Iterator[tuple[emulate.Device, Tensor]]:
    """A device, and memory for weights, full of NaN."""
    (B, Sq, Hq, _), Sk = call.q.shape, call.k.shape[1]
    weights = torch.full((B, Sq, Sk) if average else (B, Hq, Sq, Sk), math.nan, dtype=call.q.dtype)
    with emulate.device(arch, **schedule) as device:
        yield device, weights


def run(
    arch: str, features: Features, call: Call, average: bool, signed: bool = False, **schedule: object
) -> Tensor:
    """A launch; raises for whatever the emulator finds wrong."""
    given, _ = of_peer(features, call)  # lse is of products as the kernel has them
    _, exact = attention(
        *(x.double() for x in (given.q, given.k, given.v)), replace_dropout(scoring_of(features, call))
    )
    lse = exact.float()
    low = (exact - lse.double()).nan_to_num(0.0).float() if features.float_mask else None
    byte, fraction = thresholds(call.p)
    numbers = (call.scale, call.softcap, call.left, call.right, call.q.shape[1], 1, 1)
    params = (*numbers, byte, fraction, 1.0 / (1.0 - call.p), 0, 0, 0)
    rng_state = call.rng_state if features.dropout else None
    with poisoned(arch, call, average, **schedule) as (device, weights):
        kernel, mask_args = compiled(arch, features, average, signed), None
        if call.mask is not None:
            from flash4_torch.kernels.weights.plan import WeightsPlan

            mask = call.mask.expand(*call.mask.shape[:3], call.k.shape[1])
            plan = WeightsPlan(features, average).mask
            tables = torch.full((place(plan, *mask.shape).words,), -7, dtype=torch.int32)
            with device.touching(mask, tables):
                compiled_tables(plan)(mask, tables)
            mask_args = (mask, tables)
        tensors = (call.q, call.k, lse, low, weights)
        touched = (*tensors, *(mask_args or ()), rng_state)
        with device.touching(*(x for x in touched if x is not None)):
            kernel(*tensors, mask_args, rng_state, params)
    return weights


def replace_dropout(scoring: Scoring) -> Scoring:
    return Scoring(scoring.scale, scoring.band, scoring.softcap, scoring.attn_mask)


@pytest.mark.parametrize(
    ("name", "arch", "average"),
    [*one_of(29, STATICS), *one_of(91, STATICS_SM80), *one_of(61, STATICS_FLOAT32)],
)
@given(data=st.data())
@settings(max_examples=examples(2, 12))
def test_weights_are_right_whatever_the_schedule(
    name: str, arch: str, average: bool, data: st.DataObject
) -> None:
    features = FEATURES[name]
    call = data.draw(calls(features._replace(Dv=8)))
    found = run(arch, features, call, average, schedule="late")
    exact = expected(features, call, average, torch.float64)
    peer = expected(features, of_peer(features, call)[0], average, call.q.dtype)
    testing.assert_close_as_peer(found, exact, peer, what="weights")
    again = run(arch, features, call, average, schedule="fuzz", seed=1)
    assert torch.equal(found, again)


@pytest.mark.parametrize(("name", "arch"), one_of(13, STATICS_SIGNED))
@given(data=st.data())
@settings(max_examples=examples(2, 12))
def test_signs_are_the_mask_of_dropout(name: str, arch: str, data: st.DataObject) -> None:
    """Weights are those without dropout, and what it takes of them is negative, bit for bit."""
    features = FEATURES[name]
    call = data.draw(calls(features._replace(Dv=8)))
    signed = run(arch, features, call, False, signed=True, schedule="late")
    assert torch.equal(
        signed.abs(), run(arch, features._replace(dropout=False), dataclasses.replace(call, p=0.0), False)
    )
    (B, Sq, Hq, _), Sk = call.q.shape, call.k.shape[1]
    kept = Dropout(call.rng_state, call.p).keep(range(B), Hq, range(Sq), range(Sk))
    assert torch.equal(signed > 0, kept & (signed != 0))
    assert torch.equal(signed, run(arch, features, call, False, signed=True, schedule="fuzz", seed=1))
