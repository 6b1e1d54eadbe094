"""flex_attention's forward by our kernels, in the emulator with its race checks, against plain torch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
import flex_mods
from everything import EVERYTHING, examples, one_of
from flash4_torch.backends import emulator as emulated
from flash4_torch.backends.flex.tiled import Tiled
from flash4_torch.flex.attention import traced
from flash4_torch.flex_problem import FlexInputs, Mods
from flash4_torch.ops import CallOptions, draw_rng_state
from flash4_torch.ops.flex import describe, flex_attention
from flash4_torch.reference.attention import attention as definition
from flash4_torch.reference.flex import EMPTY, FULL, PARTIAL
from flash4_torch.reference.scoring import Scoring
from flash4_torch.testing import assert_close_as_peer, backends_used, emulate
from flex_mods import MASKS, MODS, H, Mod, Parts, drawn_mask

ARCHS = ["sm_90a", "sm_100a"]
SCHEDULES = [{"schedule": "late"}, {"schedule": "fuzz", "seed": 3}]
HK = H // 2
seeds = st.integers(0, 1 << 20)


class Call(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    mods: Mods
    options: CallOptions


def tensors(Sq: int, Sk: int, D: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    shapes = (2, Sq, H, D), (2, Sk, HK, D), (2, Sk, HK, D)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def made(qkv: list[Tensor], score_mod: Mod | None, mask_mod: Mod | None, **options: Any) -> Call:
    q, k, v = qkv
    mods = traced(q, k, score_mod, mask_mod)
    return Call(q, k, v, mods, CallOptions(1 / math.sqrt(q.shape[-1]), **options))


def with_blocks(call: Call, states: Tensor, q_block: int, kv_block: int) -> Call:
    """The call with a table of blocks (B or 1, H or 1, rows, columns) that are empty, partial or full."""

    def listed(state: int) -> tuple[Tensor, Tensor]:
        is_listed = states == state
        # What stands behind a list may be anything.
        order = torch.argsort((~is_listed).int(), dim=-1, stable=True)
        counts = is_listed.sum(-1)
        behind = torch.arange(order.shape[-1]) >= counts[..., None]
        return counts.int(), order.masked_fill(behind, -77).int()

    (partial, indices), (full, full_indices) = listed(PARTIAL), listed(FULL)
    mods = call.mods._replace(
        kv_num_blocks=partial,
        kv_indices=indices,
        full_kv_num_blocks=full,
        full_kv_indices=full_indices,
        q_block=q_block,
        kv_block=kv_block,
    )
    return call._replace(mods=mods)


def plain(call: Call, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) in float32, by the reference."""
    inputs = FlexInputs(call.q.float(), call.k.float(), v, call.mods)
    out, lse, _ = Tiled().forward(inputs, describe(inputs, call.options))
    return out, lse


def check(call: Call, arch: str, schedule: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch, emulate.device(arch, num_sms=3, **schedule):
        patch.setenv("FLASH4_BACKEND", "emulator")
        out, lse = flex_attention(*call)
    exact, exact_lse = plain(call, call.v.float())
    # Each weight and each result is rounded to 16 bits, by half a unit each; a weight's own error is 1e-4.
    sizes, _ = plain(call, call.v.float().abs())
    error, bound = (out.float() - exact).abs(), (torch.finfo(out.dtype).eps + 2e-4) * sizes + 1e-30
    assert bool((error <= bound).all()), f"out: {(error / bound).max():.2f} of what it may be"
    nothing = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, nothing)
    assert bool((out.transpose(1, 2)[nothing] == 0).all())
    away = (lse - exact_lse)[~nothing].abs()
    assert bool((away <= 2e-4 + 1e-6 * exact_lse[~nothing].abs()).all()), f"lse: {away.max():.2e}"


@pytest.mark.parametrize("arch", ARCHS)
def test_compositions_and_new_values_without_a_new_kernel(arch: str) -> None:
    """score_mod and mask_mod together; tensors, numbers and lengths are arguments."""
    before: list[int] = []

    @settings(max_examples=examples(3, 30), phases=[Phase.generate])
    @given(
        seeds,
        st.integers(130, 300),
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
        parts.table = torch.randn(H, 300)
        parts.document = torch.arange(300) // (Sk // 3)
        names = ["alibi", "same_document", *(["bias", "gained"] if EVERYTHING else [])]
        width, period, length = mask
        mask_mod = (
            drawn_mask(width, period, length) if EVERYTHING else lambda b, h, i, j: (i - j) % period != h
        )
        check(made(tensors(Sq, Sk), parts.score_mod(names, number), mask_mod), arch, schedule)
        before.append(emulated._compiled.cache_info().misses)

    run()
    assert len(set(before)) == 1


@pytest.mark.parametrize("arch", one_of(2, ARCHS))
def test_plain_torch_differentiates_what_kernels_computed(arch: str) -> None:
    """A backend that serves the forward alone leaves the gradients to the next one."""
    slopes = torch.randn(H).requires_grad_()
    q, k, v = (x.requires_grad_() for x in tensors(70, 79))
    dout, wanted = torch.randn(q.shape).to(q.dtype), [q, k, v, slopes]

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (score + slopes[h] * (j - i)).to(score.dtype)

    with backends_used() as used:
        with pytest.MonkeyPatch.context() as patch, emulate.device(arch, num_sms=3):
            patch.setenv("FLASH4_BACKEND", "emulator")
            out, _ = flex_attention(*made([q, k, v], alibi, None))
        found = torch.autograd.grad(out, wanted, dout)
    assert used == {("flex_attention", "emulator"): 1, ("flex_attention_backward", "tiled"): 1}

    def by_definition(dtype: torch.dtype) -> tuple[Tensor, ...]:
        out, _ = definition(*(x.to(dtype) for x in (q, k, v)), Scoring(q.shape[-1] ** -0.5), None, alibi)
        return torch.autograd.grad(out, wanted, dout.to(dtype))

    exact, peer = by_definition(torch.float64), by_definition(q.dtype)
    for x, truth, plain_torchs in zip(found, exact, peer, strict=True):
        assert_close_as_peer(x, truth.double(), plain_torchs)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("by_row", one_of(2, [True, False]))
def test_block_masks(arch: str, by_row: bool) -> None:
    """Tables whose blocks contradict mask_mod, for every kernel's tiles, where all of a row may be empty."""

    @settings(max_examples=examples(3, 30), phases=[Phase.generate])
    @given(seeds, st.integers(260, 400), st.integers(260, 400), st.sampled_from(SCHEDULES))
    def run(seed: int, Sq: int, Sk: int, schedule: dict[str, Any]) -> None:
        torch.manual_seed(seed)
        Sk += Sk % 128 == 0
        q_block = [128, 64, 1 << 20, 33][seed % 4]
        kv_block = [128, 256, 1 << 20][seed % 3] if by_row else 48
        B, Hm = [1, 2][seed % 2], [1, H][seed // 2 % 2]
        states = torch.randint(0, 3, (B, Hm, -(-Sq // q_block), -(-Sk // kv_block)))
        if seed % 5 == 0:
            states[:, :, -1] = EMPTY
        call = made(tensors(Sq, Sk), None, lambda b, h, i, j: (3 * i + j + h) % 4 != b)
        check(with_blocks(call, states, q_block, kv_block), arch, schedule)

    run()


if EVERYTHING:

    @pytest.mark.parametrize("arch", ARCHS)
    @pytest.mark.parametrize("mask", MASKS, ids=lambda f: f.__name__)
    def test_masks_that_researchers_use(mask: Any, arch: str) -> None:
        S = 96
        check(made(tensors(S, S), None, mask(S)), arch, SCHEDULES[0])

    @pytest.mark.parametrize("arch", ARCHS)
    @pytest.mark.parametrize("mod", MODS, ids=lambda f: f.__name__)
    def test_mods_that_researchers_use(mod: Any, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flex_mods, "parameter", lambda *shape: torch.randn(shape))
        S = 96
        check(made(tensors(S, S), mod(S).mod, None), arch, SCHEDULES[1])

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
        call = call._replace(mods=call.mods._replace(sinks=torch.randn(H), rng_state=state))
        check(call, arch, SCHEDULES[0])
        states = torch.randint(0, 3, (1, H, 2, 2))
        check(with_blocks(call, states, 64, 64), arch, SCHEDULES[1])
