"""Score mods that are recognised: ramps like ALiBi, whose coefficients go into the softmax, and softcap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from everything import EVERYTHING, one_of
from flash4_torch.backends.flex.compiled import has_ramp
from flash4_torch.flex import ramp, softcap
from flash4_torch.flex.program import parse
from flash4_torch.flex.trace import SCORE, trace
from flash4_torch.flex_problem import FlexInputs, FlexProblem
from flash4_torch.ops import CallOptions, draw_rng_state
from flash4_torch.ops import flex as ops
from flash4_torch.reference import programs
from flex_calls import ARCHS, SCHEDULES, Call, check, check_gradients, made, tensors
from flex_mods import H, Mod

CPU = torch.device("cpu")
SLOPES, BIASES, LONG = torch.rand(H), torch.randn(H), torch.arange(H)


def _traced(score_mod: Mod) -> Any:
    return trace(score_mod, SCORE, CPU)


def _at(text: str, traced: Any, *places: Tensor) -> list[Tensor]:
    """A program's results for scores and places, which broadcast."""
    program = parse(text)
    lanes = [x.view(-1, 1, 1, 1) for x in places]
    scalars = programs.scalar_tensors(program, traced.scalars, CPU)
    return [x.flatten() for x in programs.evaluate(program, lanes, traced.tensors, scalars)]


Added = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_ADDED: list[Added] = [
    lambda b, h, i, j: SLOPES[h] * (j - i),
    lambda b, h, i, j: -SLOPES[h] * (i - j).float(),
    lambda b, h, i, j: BIASES[h] * j,
    lambda b, h, i, j: 0.3 * i.float() / BIASES[h],
    lambda b, h, i, j: BIASES[h],
    lambda b, h, i, j: (j + b - i) * 0.7,
    lambda b, h, i, j: (j - i - H) * SLOPES[h],
    lambda b, h, i, j: -(2.0 - SLOPES[h] * (j + h)),
    lambda b, h, i, j: 0.5 * -(i - j - h + b),
    lambda b, h, i, j: 0.5 * ((j - i + h).long() + LONG[h]),
    lambda b, h, i, j: 0.25 * (j + i - (h - i)),
]
ramps = st.lists(st.tuples(st.sampled_from(_ADDED), st.sampled_from([1, -1])), min_size=1, max_size=4)


def _adding(parts: list[tuple[Added, int]]) -> Mod:
    def modify(score: Tensor, *places: Tensor) -> Tensor:
        for part, sign in parts:
            score = score + part(*places) if sign > 0 else score - part(*places)
        return score

    return modify


@settings(max_examples=60)
@given(parts=ramps, seed=st.integers(0, 1 << 16))
def test_a_ramp_is_its_coefficients(parts: list[tuple[Added, int]], seed: int) -> None:
    traced = _traced(_adding(parts))
    text = ramp.of(traced.text)
    assert text
    generator = torch.Generator().manual_seed(seed)
    score = torch.randn(50, generator=generator)
    b, h, i, j = (torch.randint(0, n, (50,), generator=generator, dtype=torch.int32) for n in (2, H, 90, 90))
    distance, key, query, rest = _at(text, traced, score, b, h, i, j)
    found = score + distance * (j - i) + key * j + query * i + rest
    (exact,) = _at(traced.text, traced, score, b, h, i, j)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-4)


def test_a_distance_has_no_other_coefficients() -> None:
    """A distance alone is what lets long calls have it: see `has_ramp`."""
    alone: list[Mod] = [
        lambda s, b, h, i, j: s - SLOPES[h] * (i - j),
        lambda s, b, h, i, j: (j - i) * 0.5 + s + BIASES[h],
    ]
    for score_mod in alone:
        assert ramp.depends_on_distance_alone(ramp.of(_traced(score_mod).text))
    for score_mod in (lambda s, b, h, i, j: s + SLOPES[h] * j, lambda s, b, h, i, j: s + 0.5 * (i + j)):
        assert not ramp.depends_on_distance_alone(ramp.of(_traced(score_mod).text))


NO_RAMPS: list[Mod] = [
    lambda s, b, h, i, j: 2 * s + SLOPES[h] * (j - i),
    lambda s, b, h, i, j: SLOPES[h] * (j - i) - s,
    lambda s, b, h, i, j: s + s,
    lambda s, b, h, i, j: s + SLOPES[h] * (j - i).abs(),
    lambda s, b, h, i, j: s + (SLOPES.bfloat16()[h] * (j - i)),
    lambda s, b, h, i, j: s + torch.ones(90)[i],
    lambda s, b, h, i, j: s + (i * j),
    lambda s, b, h, i, j: s + (j // 2),
    lambda s, b, h, i, j: torch.where(i > j, s, s + 1),
    lambda s, b, h, i, j: SLOPES[h] * (j - i),
    lambda s, b, h, i, j: (s + SLOPES[h] * (j - i)).bfloat16(),
]


@pytest.mark.parametrize("case", range(len(NO_RAMPS)))
def test_others_are_no_ramps(case: int) -> None:
    assert not ramp.of(_traced(NO_RAMPS[case]).text)


def _problem(call: Call) -> FlexProblem:
    return ops.describe(FlexInputs(call.q, call.k, call.v, call.mods), call.options)


def test_calls_that_a_ramp_does_not_serve() -> None:
    """Scales of 0 and below, and long calls whose rows may have large maxima."""
    distance, key = (
        _problem(made(tensors(60, 60), mod, None))
        for mod in (lambda s, b, h, i, j: s + SLOPES[h] * (j - i), lambda s, b, h, i, j: s + SLOPES[h] * j)
    )
    assert has_ramp(distance) and has_ramp(key)
    assert not any(has_ramp(distance._replace(scale=scale)) for scale in (0.0, -1.0, 1e-30))
    long = distance.extent._replace(Sk=1 << 17)
    assert has_ramp(distance._replace(extent=long)) and not has_ramp(key._replace(extent=long))


KINDS: dict[str, Mod] = {
    "distance": lambda s, b, h, i, j: s + SLOPES[h] * (j - i),
    "key": lambda s, b, h, i, j: s + SLOPES[h] * j - 3.0,
    "all": lambda s, b, h, i, j: s + (BIASES[h] * j - SLOPES[h] * i) / 3 + BIASES[b] - 2.0 * (i - j),
    "steep": lambda s, b, h, i, j: s + 100 * SLOPES[h] * (j - i),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"window_right": 0},
    "window": {"window_left": 40, "window_right": 3},
    "softcap": {"softcap": 2.0},
    "dropout": {"dropout_p": 0.3},
}
CALLS = (
    [(arch, kind, options, D) for arch in ARCHS for kind in KINDS for options in OPTIONS for D in (64, 128)]
    if EVERYTHING
    else [
        ("sm_90a", "distance", "causal", 64),
        ("sm_80", "steep", "window", 64),
    ]
)


def _ramped(kind: str, options: str, D: int, Sq: int = 150, Sk: int = 170) -> Call:
    torch.manual_seed(1)
    some: Mod | None = None if options == "softcap" else lambda b, h, i, j: i % 7 != 3
    call = made(tensors(Sq, Sk, D), KINDS[kind], some, **OPTIONS[options])
    state = draw_rng_state(CPU) if "dropout_p" in OPTIONS[options] else None
    call = replace(call, mods=call.mods._replace(sinks=torch.randn(H), rng_state=state))
    assert has_ramp(_problem(call))
    return call


@pytest.mark.parametrize("arch, kind, options, D", CALLS)
def test_kernels_add_ramps(arch: str, kind: str, options: str, D: int) -> None:
    call = _ramped(kind, options, D)
    check(call, arch, SCHEDULES[0])
    check_gradients(call, arch, SCHEDULES[1], has_dlse=True)


@pytest.mark.parametrize("arch", one_of(3, ("sm_100a", "sm_90a", "sm_80")))
def test_heads_of_a_tile_have_their_own_ramps(arch: str) -> None:
    """Few queries: a tile's rows are of several heads."""
    check(_ramped("all", "plain", 64, Sq=3), arch, SCHEDULES[0])


def test_a_scale_below_0_has_no_ramp() -> None:
    call = _ramped("distance", "plain", 64, Sq=40)
    call = replace(call, options=call.options._replace(scale=-call.options.scale))
    assert not has_ramp(_problem(call))
    check(call, "sm_90a", SCHEDULES[0])


@pytest.mark.parametrize("slope", [1e4, -1e4, 3e34])
def test_large_ramps(slope: float) -> None:
    call = made(tensors(40, 90), lambda s, b, h, i, j: s + slope * j, None)
    assert has_ramp(_problem(call))
    check(call, "sm_90a", SCHEDULES[0])


@pytest.mark.parametrize("arch", one_of(3, ("sm_100a", "sm_90a", "sm_80")))
def test_slopes_learn(arch: str) -> None:
    """A mask hides whole rows; slopes get their gradients by score_mod's derivative."""
    torch.manual_seed(2)
    slopes = torch.randn(H).requires_grad_()
    score_mod: Mod = lambda s, b, h, i, j: s + slopes[h] * (j - i) * 0.1  # noqa: E731
    call = made(tensors(140, 150), score_mod, lambda b, h, i, j: (i % 5 != 3) & ((i + j) % 3 != 0), [slopes])
    assert has_ramp(_problem(call))
    check_gradients(call, arch, SCHEDULES[0], has_dlse=True)


CAPS: list[Mod] = [
    lambda s, b, h, i, j: 3.0 * torch.tanh(s / 3.0),
    lambda s, b, h, i, j: torch.tanh(s * (1 / 3)) * 3,
    lambda s, b, h, i, j: -3 * torch.tanh(s / -3),
    lambda s, b, h, i, j: torch.tanh(s / 3) / (1 / 3),
    lambda s, b, h, i, j: 3 * (2 * torch.tanh(0.5 * (s / 1.5))) / 2,
]
NO_CAPS: list[Mod] = [
    lambda s, b, h, i, j: 3.0 * torch.tanh(s / 3.001),
    lambda s, b, h, i, j: 3.0 * torch.tanh(s / 3) + 1,
    lambda s, b, h, i, j: 3.0 * torch.tanh((s + 1) / 3),
    lambda s, b, h, i, j: 3.0 * torch.tanh(s / 3) * SLOPES[h],
    lambda s, b, h, i, j: 3.0 * torch.sigmoid(s / 3),
    lambda s, b, h, i, j: torch.tanh(3 * torch.tanh(s / 3)),
    lambda s, b, h, i, j: torch.tanh(s.bfloat16() / 3) * 3,
    lambda s, b, h, i, j: torch.where(i > j, 3.0 * torch.tanh(s / 3), s),
    lambda s, b, h, i, j: torch.tanh(j / 3) * 3,
]


@pytest.mark.parametrize("case", range(len(CAPS)))
def test_softcap_is_recognised(case: int) -> None:
    traced = _traced(CAPS[case])
    assert softcap.of(traced.text, traced.scalars) == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize("case", range(len(NO_CAPS)))
def test_others_are_no_softcap(case: int) -> None:
    traced = _traced(NO_CAPS[case])
    assert softcap.of(traced.text, traced.scalars) == 0.0


def test_a_captured_cap_is_an_argument() -> None:
    """Values decide: one program is softcap with these numbers, and none with those."""
    traced = _traced(lambda s, b, h, i, j: 3.0 * torch.tanh(s / 3.0))
    assert softcap.of(traced.text, (30.0, 30.0)) == 30.0
    for scalars in ((30.0, 29.0), (0.0, 0.0), (float("inf"), float("inf")), (1e-40, 1e-40)):
        assert softcap.of(traced.text, scalars) == 0.0


def test_a_softcap_is_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option serves beside a mask with a scalar of its own, both directions, not beside itself."""
    served: list[tuple[float, str]] = []
    choose = ops.backends.choose

    def counted(problem: FlexProblem) -> Any:
        served.append((problem.softcap, problem.spec.score_mod))
        return choose(problem)

    monkeypatch.setattr(ops.backends, "choose", counted)
    period = 3
    call = made(tensors(40, 50), CAPS[1], lambda b, h, i, j: (i + j) % period != 0, window_right=4)
    q = call.q.double().requires_grad_()
    call = replace(call, q=q, k=call.k.double(), v=call.v.double())
    out, lse = call.results()
    exact, exact_lse = call.by_definition(torch.float64)
    (found,) = torch.autograd.grad(out.sum() + lse.sum(), [q])
    (truth,) = torch.autograd.grad(exact.sum() + exact_lse.sum(), [q])
    assert served == [(3.0, ""), (3.0, "")]
    for x, y in ((out, exact), (lse, exact_lse), (found, truth)):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)
    both = made(tensors(40, 50), CAPS[1], None, softcap=5.0)
    both.results()
    assert served[-1] == (5.0, both.mods.score_mod) and both.mods.score_mod
    assert isinstance(both.options, CallOptions)
