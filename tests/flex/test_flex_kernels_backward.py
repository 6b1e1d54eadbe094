"""flex_attention's gradients by our kernels, in the emulator with its race checks, against float64."""

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
from flash4_torch.backends import emulator as emulator_backend
from flash4_torch.backends.flex import bits
from flash4_torch.bench.flex_cases import each
from flash4_torch.ops import draw_rng_state
from flash4_torch.reference.flex import EMPTY
from flash4_torch.testing import assert_close_as_peer, backends_used
from flex_calls import ARCHS, SCHEDULES, check_gradients, drawn_blocks, emulated, made, tensors, with_blocks
from flex_mods import MASKS, MODS, H, Parts, Sizes, drawn_mask

PHASES = [Phase.explicit, Phase.generate] if EVERYTHING else [Phase.explicit]
"""The first calls that hypothesis draws show little: CI has examples."""
seeds = st.integers(0, 1 << 20)


class Learned:
    """Tensors that gathers read by every kind of place: head, row, column and both."""

    def __init__(self, Sq: int, Sk: int) -> None:
        self.slopes, self.rows, self.columns, self.table = (
            torch.randn(shape).requires_grad_() for shape in ((H,), (Sq,), (Sk, 1), (7, 2))
        )
        self.Sq, self.is_safe = Sq, False

    @property
    def all(self) -> list[Tensor]:
        return [self.slopes, self.rows, self.columns, self.table]

    def mod(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score * self.slopes[h] + self.rows[i] * self.columns[j, 0] + self.table[(i + j) & 3, b]
        # -inf, for all of some rows, where the derivative is NaN; beyond the end scores are infinite.
        hidden = (i & 7 == 4) | (score < -0.9)
        if self.is_safe:
            score = score.clamp(min=-0.95)
        return torch.where(hidden, -float("inf"), (score + 1).sqrt() + 1e-3 / (self.Sq - i))


@pytest.mark.parametrize("arch", one_of(3, ("sm_80", "sm_100a", "sm_90a")))
def test_gradients_of_everything_without_a_new_kernel(arch: str) -> None:
    """Captured tensors of every kind and lse, and blocks; tensors, numbers and lengths are arguments.

    Fewer queries would share tiles with other heads.
    """
    before: list[int] = []

    @settings(max_examples=20, phases=PHASES)
    @given(seeds, st.integers(130, 200), st.integers(130, 260), st.sampled_from(SCHEDULES))
    @example(3, 160, 150, SCHEDULES[0])
    @example(6, 130, 201, SCHEDULES[1])
    def run(seed: int, Sq: int, Sk: int, schedule: dict[str, Any]) -> None:
        torch.manual_seed(seed)
        Sk, period = Sk + (Sk % 128 == 0), 2 + seed % 5
        learned, blocks = Learned(Sq, Sk), (128, 48)
        call = made(tensors(Sq, Sk), learned.mod, lambda b, h, i, j: (i - j) % period != h, learned.all)
        # The definition would multiply 0 by NaN.
        learned.is_safe = True
        states = drawn_blocks(seed, Sq, Sk, *blocks)
        check_gradients(with_blocks(call, states, *blocks), arch, schedule, has_dlse=True)
        before.append(emulator_backend._compiled.cache_info().misses)

    run()
    assert len(set(before)) == 1


PROGRAMS = ["alibi", "cap", "bias", "gained", "same_document"]


@pytest.mark.parametrize("D, name", one_of(10, [(D, name) for D in (64, 128) for name in PROGRAMS]))
def test_programs_without_gradients_of_their_own(D: int, name: str) -> None:
    """Next to a band, where the tiles are those of calls without programs."""
    parts = Parts(torch.float32)
    parts.table, parts.document = torch.randn(H, 300), torch.arange(300) // 50
    call = made(tensors(190, 233, D), parts.score_mod([name], 3.0), None, window_right=0)
    check_gradients(call, "sm_90a", SCHEDULES[1])
    if EVERYTHING:
        both = made(tensors(300, 279, D), parts.score_mod([name], 3.0), None, window_left=90, window_right=7)
        check_gradients(both, "sm_90a", SCHEDULES[0])
        check_gradients(both, "sm_100a", SCHEDULES[1])


OPTIONS: list[dict[str, Any]] = [
    {"softcap": 2.0, "window_right": 4},
    {},
    {"window_left": 40, "window_right": 5},
    {"softcap": 2.0, "dropout_p": 0.3},
    {"deterministic": True, "window_right": 0},
]
WIDE = [
    (D, Dv, options)
    for D, Dv in ([(192, 192), (256, 256), (64, 256), (136, 200)] if EVERYTHING else [(192, 192)])
    for options in (OPTIONS if EVERYTHING else OPTIONS[:1])
]


@pytest.mark.parametrize("D, Dv, options", WIDE, ids=str)
def test_derivatives_that_read_scores_of_wide_heads(D: int, Dv: int, options: dict[str, Any]) -> None:
    """Hopper's warpgroup that computes dS has scores only where the other one hands them over."""
    Sq, Sk = 70, 135
    slopes, rows, columns = (torch.randn(n).requires_grad_() for n in (H, Sq, Sk))

    def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score * score * 0.3 - score * slopes[h] * rows[i] + score * columns[j]

    call = made(
        tensors(Sq, Sk, D, torch.bfloat16, Dv), mod, drawn_mask(30, 2, 20), [slopes, rows, columns], **options
    )
    if "dropout_p" in options:
        call = replace(call, mods=call.mods._replace(rng_state=draw_rng_state(call.q.device)))
    states = drawn_blocks(7, Sq, Sk, 64, 48)
    check_gradients(with_blocks(call, states, 64, 48), "sm_90a", SCHEDULES[1], has_dlse=True)
    if EVERYTHING:
        check_gradients(call, "sm_90a", SCHEDULES[0])


if EVERYTHING:

    @pytest.mark.parametrize("arch", ARCHS)
    @pytest.mark.parametrize("by_row", [True, False])
    @settings(max_examples=20, phases=PHASES)
    @given(seeds, st.integers(130, 300), st.integers(260, 400), st.sampled_from(SCHEDULES))
    def test_block_masks(
        arch: str, by_row: bool, seed: int, Sq: int, Sk: int, schedule: dict[str, Any]
    ) -> None:
        """Tables whose blocks contradict mask_mod, where all of a row or of a column may be empty.

        By mask_mod, not by bits.
        """
        torch.manual_seed(seed)
        Sk += Sk % 128 == 0
        q_block = [128, 256, 1 << 20][seed % 3] if by_row else 33
        kv_block = [128, 64, 1 << 20, 48][seed % 4]
        call = made(tensors(Sq, Sk), None, lambda b, h, i, j: (3 * i + j + h) % 4 != b)
        states = drawn_blocks(seed, Sq, Sk, q_block, kv_block)
        if seed % 2:
            states[..., -1] = EMPTY
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bits, "_MOST", 0)
            check_gradients(with_blocks(call, states, q_block, kv_block), arch, schedule)

    def test_plain_torch_differentiates_what_kernels_computed() -> None:
        """A call whose gradients kernels do not serve leaves them to the next backend."""
        q, k, v = (x.requires_grad_() for x in tensors(70, 79))
        slopes = torch.randn(H).requires_grad_()
        call = made([q, k, v], lambda score, b, h, i, j: score * slopes[h], None)
        with backends_used() as used:
            results = emulated(call.results, "sm_90a", SCHEDULES[0])
            found = torch.autograd.grad(results[0].float().sum(), [q, k, v, slopes])
        assert used == {("flex_attention", "emulator"): 1, ("flex_attention_backward", "tiled"): 1}
        exact, peer = (
            torch.autograd.grad(call.by_definition(dtype)[0].sum(), [q, k, v, slopes])
            for dtype in (torch.float64, q.dtype)
        )
        for x, truth, plain in zip(found, exact, peer, strict=True):
            assert_close_as_peer(x, truth.double(), plain, noise=0.05)

    @pytest.mark.parametrize("arch", ARCHS)
    @pytest.mark.parametrize("mask", MASKS, ids=lambda f: f.__name__)
    def test_masks_that_researchers_use(mask: Any, arch: str) -> None:
        S = 96
        check_gradients(made(tensors(S, S), None, mask(Sizes(S))), arch, SCHEDULES[0])

    @pytest.mark.parametrize("arch", ARCHS)
    @pytest.mark.parametrize("mod", MODS, ids=lambda f: f.__name__)
    def test_mods_that_researchers_use(mod: Any, arch: str) -> None:
        S = 96
        found = mod(Sizes(S, dtype=torch.float32))
        call = made(tensors(S, S), found.mod, None, found.learned)
        check_gradients(replace(call, score_mod=each(found.mod)), arch, SCHEDULES[1])

    @pytest.mark.parametrize("arch", ARCHS)
    @pytest.mark.parametrize(
        "options",
        [
            {"window_right": 0},
            {"window_left": 9, "window_right": 3},
            {"softcap": 2.0},
            {"dropout_p": 0.3},
            {"deterministic": True, "window_right": 5},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("D, Dv", [(64, 64), (96, 40), (128, 128), (192, 192), (256, 128)])
    def test_beside_other_options(D: int, Dv: int, options: dict[str, Any], arch: str) -> None:
        parts = Parts(torch.float32)
        names = ["bias", "gained"]
        for x in parts.learned:
            x.requires_grad_(x is parts.table)
        qkv = tensors(70, 79, D, torch.float16, Dv)
        call = made(qkv, parts.score_mod(names, 3.0), drawn_mask(30, 2, 20), [parts.table], **options)
        state = draw_rng_state(call.q.device) if "dropout_p" in options else None
        call = replace(call, mods=call.mods._replace(sinks=torch.randn(H), rng_state=state))
        check_gradients(call, arch, SCHEDULES[0], has_dlse=True)
        states = torch.randint(0, 3, (1, H, 2, 2))
        check_gradients(with_blocks(call, states, 64, 64), arch, SCHEDULES[1])
