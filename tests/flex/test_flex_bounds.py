"""Masks whose rows see intervals, by kernels that read bounds, in the emulator with its race checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from everything import EVERYTHING, one_of
from flash4_torch.backends.flex import compiled
from flex_calls import ARCHS, SCHEDULES, Call, check, check_gradients, made, tensors, with_intervals
from flex_mods import H, Mod, Parts

BOUNDED = ARCHS[:2]
"""Architectures whose kernels read bounds."""
PHASES = [Phase.explicit, Phase.generate] if EVERYTHING else [Phase.explicit]
"""The first calls that hypothesis draws show little: CI has examples."""
seeds = st.integers(0, 1 << 20)


def intervals(seed: int, Sq: int, Sk: int, sides: str) -> Mod:
    """Intervals in order, for each batch entry: long ones, short ones, and rows that see nothing."""
    torch.manual_seed(seed)
    first, last = (torch.randint(-Sk // 3, Sk * 4 // 3, (2, Sq)).sort(-1).values for _ in range(2))
    last[0] += Sk // 4
    if sides == "right":
        first = torch.zeros_like(first)
    if sides == "left":
        last = torch.full_like(last, Sk)
    return lambda b, h, i, j: (first[b, i] <= j) & (j <= last[b, i])


def drawn(
    seed: int, Sq: int, Sk: int, sides: str, D: int = 64, score_mod: Mod | None = None, **options: Any
) -> Call:
    mask_mod = intervals(seed, Sq, Sk, sides)
    return with_intervals(made(tensors(Sq, Sk, D), score_mod, mask_mod, **options), mask_mod)


@pytest.fixture(autouse=True)
def only_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call has its kernels read bounds, not blocks."""
    original = compiled._arguments

    def arguments(*args: Any, **kwargs: Any) -> Any:
        of_captured = original(*args, **kwargs)

        def checked(*args: Any) -> Any:
            found = of_captured(*args)
            assert found[2] is None
            assert found[4] is not None
            return found

        return checked

    monkeypatch.setattr(compiled, "_arguments", arguments)


@pytest.mark.parametrize("arch", one_of(2, BOUNDED[::-1]))
def test_results_and_gradients(arch: str) -> None:
    @settings(max_examples=20, phases=PHASES)
    @given(seeds, st.integers(130, 400), st.integers(130, 400), st.sampled_from(SCHEDULES))
    @example(400, 400, 400, SCHEDULES[0])
    def run(seed: int, Sq: int, Sk: int, schedule: dict[str, Any]) -> None:
        Sk += Sk % 128 == 0
        # Scores of keys beyond the end would be infinite weights.
        call = drawn(seed, Sq, Sk, "both", 64, lambda s, b, h, i, j: s + (j - i) * 2.0)
        check(call, arch, schedule)
        check_gradients(call, arch, schedule)

    run()


if EVERYTHING:

    @pytest.mark.parametrize("arch", BOUNDED)
    @pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
    @pytest.mark.parametrize("sides", ["left", "right", "both"])
    def test_sides_and_head_sizes(sides: str, D: int, arch: str) -> None:
        call = drawn(D, 390, 290, sides, D)
        check(call, arch, SCHEDULES[0])
        check_gradients(call, arch, SCHEDULES[1])

    @pytest.mark.parametrize("arch", BOUNDED)
    @pytest.mark.parametrize(
        "options",
        [
            {"softcap": 2.0},
            {"deterministic": True},
            {"window_left": 90},
            {"window_left": 70, "window_right": 20},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("has_mod", [False, True])
    def test_beside_other_options(has_mod: bool, options: dict[str, Any], arch: str) -> None:
        slopes = torch.randn(H)
        score_mod: Mod | None = (lambda s, b, h, i, j: s + slopes[h] * (j - i)) if has_mod else None
        call = drawn(5, 270, 300, "both", 64, score_mod, **options)
        call = replace(call, mods=call.mods._replace(sinks=torch.randn(H)))
        check(call, arch, SCHEDULES[0])
        check_gradients(call, arch, SCHEDULES[1])

    @pytest.mark.parametrize("arch", BOUNDED)
    @pytest.mark.parametrize("name", ["cap", "bias", "gained"])
    def test_beside_programs(name: str, arch: str) -> None:
        parts = Parts(torch.float32)
        parts.table = torch.randn(H, 300)
        call = drawn(6, 270, 290, "both", 128, parts.score_mod([name], 3.0))
        check(call, arch, SCHEDULES[0])
        check_gradients(call, arch, SCHEDULES[1])

    @pytest.mark.parametrize("arch", BOUNDED)
    def test_packed_heads(arch: str) -> None:
        check(drawn(7, 5, 300, "both"), arch, SCHEDULES[0])


def test_what_is_drawn_hides_whole_rows() -> None:
    seen = intervals(1, 300, 333, "both")(
        torch.arange(2)[:, None, None], Tensor(), torch.arange(300)[:, None], torch.arange(333)
    )
    assert not seen.any(-1).all()
    assert seen.any()
