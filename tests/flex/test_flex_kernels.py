"""flex_attention's forward by our kernels, in the emulator with its race checks, against plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from everything import EVERYTHING, one_of
from flash4_torch.backends import emulator as emulator_backend
from flash4_torch.backends.flex import bits
from flash4_torch.ops import draw_rng_state
from flex_calls import ARCHS, SCHEDULES, check, drawn_blocks, made, tensors, with_blocks
from flex_mods import MASKS, MODS, H, Parts, Sizes, drawn_mask

PHASES = [Phase.explicit, Phase.generate] if EVERYTHING else [Phase.explicit]
"""The first calls that hypothesis draws show little: CI has examples."""
seeds = st.integers(0, 1 << 20)


@pytest.mark.parametrize("arch", one_of(2, ("sm_90a", "sm_100a", "sm_80")))
def test_compositions_and_new_values_without_a_new_kernel(arch: str) -> None:
    """score_mod and mask_mod together; tensors, numbers and lengths are arguments.

    So many queries take the same tiles, whatever Sk is.
    """
    before: list[int] = []

    @settings(max_examples=30, phases=PHASES)
    @example(1, 193, 301, 0.7, (1, 3, 1), SCHEDULES[0])
    @example(2, 254, 150, 3.0, (9, 5, 33), SCHEDULES[1])
    @given(
        seeds,
        st.integers(193, 256),
        st.integers(130, 300),
        st.floats(0.5, 4.0),
        st.tuples(st.integers(1, 20), st.integers(1, 7), st.integers(1, 90)),
        st.sampled_from(SCHEDULES),
    )
    def run(
        seed: int,
        Sq: int,
        Sk: int,
        number: float,
        mask: tuple[int, int, int],
        schedule: dict[str, Any],
    ) -> None:
        torch.manual_seed(seed)
        Sk += Sk % 128 == 0
        parts = Parts(torch.float32)
        parts.table = torch.randn(H, 301)
        parts.document = torch.arange(301) // (Sk // 3)
        names = ["alibi", "same_document", "bias", "gained"] if EVERYTHING else ["alibi"]
        width, period, length = mask
        mask_mod = (
            drawn_mask(width, period, length) if EVERYTHING else lambda b, h, i, j: (i - j) % period != h
        )
        check(made(tensors(Sq, Sk), parts.score_mod(names, number), mask_mod), arch, schedule)
        before.append(emulator_backend._compiled.cache_info().misses)

    run()
    assert len(set(before)) == 1


@pytest.mark.parametrize("arch", one_of(3, ("sm_100a", "sm_90a", "sm_80")))
@pytest.mark.parametrize("by_row", one_of(2, [True, False]))
def test_block_masks(arch: str, by_row: bool) -> None:
    """Tables whose blocks contradict mask_mod, for every kernel's tiles, where all of a row may be empty.

    By mask_mod: there is no room for bits, which have tests of their own.
    """

    @settings(max_examples=30, phases=PHASES)
    @given(seeds, st.integers(260, 400), st.integers(260, 400), st.sampled_from(SCHEDULES))
    @example(3, 300, 270, SCHEDULES[0])
    @example(6, 261, 390, SCHEDULES[1])
    @example(9, 380, 333, SCHEDULES[0])
    def run(seed: int, Sq: int, Sk: int, schedule: dict[str, Any]) -> None:
        torch.manual_seed(seed)
        Sk += Sk % 128 == 0
        q_block = [128, 64, 1 << 20, 33][seed % 4]
        kv_block = [128, 256, 1 << 20][seed % 3] if by_row else 48
        call = made(tensors(Sq, Sk), None, lambda b, h, i, j: (3 * i + j + h) % 4 != b)
        states = drawn_blocks(seed, Sq, Sk, q_block, kv_block)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bits, "_MOST", 0)
            check(with_blocks(call, states, q_block, kv_block), arch, schedule)

    run()


if EVERYTHING:

    @pytest.mark.parametrize("arch", ARCHS)
    @pytest.mark.parametrize("mask", MASKS, ids=lambda f: f.__name__)
    def test_masks_that_researchers_use(mask: Any, arch: str) -> None:
        S = 96
        check(made(tensors(S, S), None, mask(Sizes(S))), arch, SCHEDULES[0])

    @pytest.mark.parametrize("arch", ARCHS)
    @pytest.mark.parametrize("mod", MODS, ids=lambda f: f.__name__)
    def test_mods_that_researchers_use(mod: Any, arch: str) -> None:
        S = 96
        found = mod(Sizes(S, dtype=torch.float32, learns=False))
        check(made(tensors(S, S), found.mod, None), arch, SCHEDULES[1])

    @pytest.mark.parametrize("arch", ARCHS)
    @pytest.mark.parametrize(
        "options",
        [
            {"window_right": 0},
            {"window_left": 9, "window_right": 3},
            {"softcap": 2.0},
            {"dropout_p": 0.3},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("D", [64, 128, 192])
    def test_beside_other_options(D: int, options: dict[str, Any], arch: str) -> None:
        parts = Parts(torch.float32)
        score_mod, qkv = parts.score_mod(["bias", "cap"], 3.0), tensors(70, 79, D, torch.float16)
        call = made(qkv, score_mod, drawn_mask(30, 2, 20), **options)
        state = draw_rng_state(call.q.device) if "dropout_p" in options else None
        call = replace(call, mods=call.mods._replace(sinks=torch.randn(H), rng_state=state))
        check(call, arch, SCHEDULES[0])
        states = torch.randint(0, 3, (1, H, 2, 2))
        check(with_blocks(call, states, 64, 64), arch, SCHEDULES[1])
