"""Block masks that show no intervals: their bits are what blocks and mask_mod show, by one kernel for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
import flash4_torch
from everything import EVERYTHING, one_of
from flash4_torch.backends import emulator as emulator_backend
from flash4_torch.backends.compiled import TARGETS
from flash4_torch.backends.compiled.targets import BLOCK_BITS
from flash4_torch.backends.flex import bits, compiled, intervals, partial_blocks
from flash4_torch.flex.attention import traced
from flash4_torch.flex_problem import FlexInputs, FlexProblem
from flash4_torch.ops import CallOptions
from flash4_torch.ops.flex import describe
from flash4_torch.reference.flex import EMPTY
from flex_calls import (
    ARCHS,
    SCHEDULES,
    Call,
    check,
    check_gradients,
    drawn_blocks,
    emulated,
    made,
    tensors,
    with_blocks,
)
from flex_mods import H, Mod

Drawn = tuple[FlexInputs, FlexProblem, Call]


def given_call(seed: int, Sq: int, Sk: int, size: tuple[int, int], mask_mod: Mod | None) -> Drawn:
    call = made(tensors(Sq, Sk, 8), None, mask_mod)
    call = with_blocks(call, drawn_blocks(seed, Sq, Sk, *size), *size)
    inputs = FlexInputs(call.q, call.k, call.v, call.mods)
    return inputs, describe(inputs, call.options), call


@given(
    seed=st.integers(0, 1 << 20),
    Sq=st.integers(1, 90),
    Sk=st.integers(1, 90),
    size=st.sampled_from([(1, 1), (16, 16), (64, 32), (33, 80), (1 << 20, 24)]),
    reads=st.sampled_from(["b", "h", "", None]),
    at_once=st.sampled_from([1 << 23, 16 * 16 * 3]),
)
def test_bits_are_what_blocks_and_mask_mod_show(
    seed: int, Sq: int, Sk: int, size: tuple[int, int], reads: str | None, at_once: int
) -> None:
    torch.manual_seed(seed)
    mods: dict[str | None, Mod | None] = {
        "b": lambda b, h, i, j: (3 * i + j) % 4 != b,
        "h": lambda b, h, i, j: (i * j + h) % 3 != 0,
        "": lambda b, h, i, j: (i ^ j) % 3 != 0,
        None: None,
    }
    inputs, problem, call = given_call(seed, Sq, Sk, size, mods[reads])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partial_blocks, "_SCORES", max(at_once, min(size[0], Sq) * min(size[1], Sk)))
        mask = partial_blocks.mask_of(inputs, problem)
        assert mask is not None
        by_rows, by_columns = (
            torch.cat(
                [bits.shown_by(mask, dim, n, n + 1) for n in range(mask.blocks.state.shape[2 + dim])], 2 + dim
            )
            for dim in (0, 1)
        )
    lanes = [
        torch.arange(n).view([-1 if at == d else 1 for d in range(4)]) for at, n in enumerate((2, H, Sq, Sk))
    ]
    wanted = call.shown(*lanes).expand(2, H, Sq, Sk)
    assert torch.equal(by_rows.expand(2, H, Sq, Sk), wanted)
    assert torch.equal(by_columns.expand(2, H, Sq, Sk), wanted)


def odd(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i + j) % 2 == 1


def reduced(mask_mod: Mod = odd, score_mod: Mod | None = None, **how: Any) -> intervals.Reduced:
    q = torch.empty(1, 90, H, 8)
    mask = flash4_torch.create_block_mask(mask_mod, None, None, 90, 90, "cpu", 16)
    inputs = FlexInputs(q, q, q, traced(q, q, score_mod, mask_mod, mask))
    return intervals.reduced(inputs, describe(inputs, CallOptions(1.0)), **{"has_bits": True, **how})


def test_bits_stand_for_masks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for intervals, which are cheaper, nor next to a score_mod, nor where kernels have none."""
    found = reduced()
    assert found.problem.spec.bits == 16 and found.bits is not None
    assert found.problem.spec.block is None and not found.problem.spec.mask_mod
    assert found.inputs.mods.kv_num_blocks is None
    causal: Mod = lambda b, h, i, j: i >= j  # noqa: E731
    for other in (
        reduced(causal),
        reduced(score_mod=lambda s, b, h, i, j: s * 2.0),
        reduced(has_bits=False),
    ):
        assert other.bits is None and not other.problem.spec.bits
    monkeypatch.setattr(bits, "_MOST", 90 * 90 - 1)
    assert reduced().bits is None


def test_masks_of_tensors_made_for_each_call_have_bits_if_they_are_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So have those of few queries; the first one is evaluated whatever its size."""
    width = torch.tensor([2])
    mask_mod: Mod = lambda b, h, i, j: (i + j) % (width + 0)[0 * b] == 1  # noqa: E731
    mask = flash4_torch.create_block_mask(mask_mod, None, None, 90, 90, "cpu", 16)

    def served() -> intervals.Reduced:
        q = torch.empty(1, 90, H, 8)
        inputs = FlexInputs(q, q, q, traced(q, q, None, mask_mod, mask))
        return intervals.reduced(inputs, describe(inputs, CallOptions(1.0)), has_bits=True)

    assert served().bits is not None
    assert all(served().bits is None and served().problem.spec.mask_mod for _ in range(2))
    for name, value in (("_LEAST", 90 * 90 * H), ("_FEW_QUERIES", 90)):
        with monkeypatch.context() as patch:
            patch.setattr(bits, name, value)
            assert served().bits is not None and served().problem.spec.block is None
    monkeypatch.setattr(bits, "_LEAST", 90 * 90 * H + 1)
    assert served().bits is None


def test_documents_have_bits_next_to_dropout() -> None:
    """Bounds of rows are not served there."""
    q, document = torch.empty(1, 90, H, 8), torch.arange(90) // 17
    mask_mod: Mod = lambda b, h, i, j: document[i] == document[j]  # noqa: E731
    mask = flash4_torch.create_block_mask(mask_mod, None, None, 90, 90, "cpu", 16)
    inputs = FlexInputs(q, q, q, traced(q, q, None, mask_mod, mask))
    problem = describe(inputs, CallOptions(1.0))
    assert intervals.reduced(inputs, problem, True, True).problem.spec.bounds
    dropped = problem._replace(spec=problem.spec._replace(dropout=True))
    assert intervals.reduced(inputs, dropped, True, True).problem.spec.bits


@pytest.mark.parametrize("D", [64, 128])
def test_tiles_do_not_lie_across_a_masks_blocks(D: int) -> None:
    """Tiles of 192 rows, which attn_mask's kernels prefer on Hopper, would visit more of the mask. At D 64
    they have as many keys and are faster all the same.
    """
    q = torch.empty(1, 8192, H, D, dtype=torch.bfloat16)
    inputs = FlexInputs(q, q, q, traced(q, q, None, None))
    problem, rows = describe(inputs, CallOptions(1.0)), {}
    for block in (64, 96, 128, 192, 1 << 13):
        spec = problem.spec._replace(bits=block)
        features, config = compiled.chosen(TARGETS["sm_90a"], problem._replace(spec=spec))
        assert features.mask == "bool" and not any(features.mods)
        rows[block] = config.queries
    across = 192 if D == 64 else 128
    assert rows == {64: 192, 96: 192, 128: across, 192: 192, 1 << 13: across}


MASKS: list[Mod] = [
    lambda b, h, i, j: (3 * i + j + h) % 4 != b,
    lambda b, h, i, j: (i ^ j) % 5 != 0,
]


def blocked(seed: int, Sq: int, Sk: int, mask_mod: Mod, **options: Any) -> Call:
    torch.manual_seed(seed)
    q_block, kv_block = [(128, 128), (64, 48)][seed % 2]
    states = drawn_blocks(seed, Sq, Sk, q_block, kv_block)
    states[..., -1] = EMPTY
    return with_blocks(made(tensors(Sq, Sk), None, mask_mod, **options), states, q_block, kv_block)


@pytest.mark.parametrize("arch", one_of(3, ARCHS))
def test_gradients_of_masks_by_one_kernel(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that differ by head and entry, and that do not; nobody sees the last keys. One kernel for
    attention serves all functions.
    """
    of_calls: list[set[Any]] = []
    original = emulator_backend._compiled

    def compiled(arch: str, entry: str, static: tuple[object, ...]) -> Any:
        of_calls[-1].add((entry, static))
        return original(arch, entry, static)

    monkeypatch.setattr(emulator_backend, "_compiled", compiled)
    sizes = [(261, 390), (150, 279), (300, 300), (96, 200)][: 4 if EVERYTHING else 2]
    for seed, (Sq, Sk) in enumerate(sizes, 12):
        of_calls.append(set())
        check_gradients(blocked(seed, Sq, Sk, MASKS[seed % 2]), arch, SCHEDULES[seed % 2])
    if not EVERYTHING:
        first, last = ({kernel for kernel in own if kernel[0] != BLOCK_BITS} for own in of_calls)
        assert first == last and len(first) > 1


def test_keys_that_nobody_sees_are_not_read_for_gradients() -> None:
    """Neither are they in the forward: what stands there, NaN or else, changes no gradient."""
    call = blocked(12, 150, 390, MASKS[0])

    def gradients(poison: float) -> list[Tensor]:
        q, k, v = (x.detach().clone() for x in (call.q, call.k, call.v))
        k[:, 384:], v[:, 384:] = poison, poison
        qkv = [x.requires_grad_() for x in (q, k, v)]
        own = replace(call, q=q, k=k, v=v)

        def run() -> list[Tensor]:
            return list(torch.autograd.grad(own.results()[0].float().square().sum(), qkv))

        return emulated(run, "sm_90a", SCHEDULES[0])

    whole, poisoned = gradients(0.0), gradients(torch.nan)
    assert all(torch.equal(x, y) for x, y in zip(whole, poisoned, strict=True))
    assert not poisoned[1][:, 384:].any() and not poisoned[2][:, 384:].any()


@pytest.mark.parametrize(
    "options", one_of(2, [{"softcap": 2.0, "window_left": 40}, {"window_right": 5}]), ids=str
)
def test_bits_next_to_options(options: dict[str, Any]) -> None:
    call = blocked(12, 200, 233, MASKS[0], **options)
    check(call, "sm_90a", SCHEDULES[1])
    if EVERYTHING:
        check_gradients(call, "sm_90a", SCHEDULES[0])


def test_tables_are_made_once_and_again_after_a_change() -> None:
    call = blocked(12, 150, 150, MASKS[1])
    count: list[Any] = []
    original = bits._tables
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bits, "_tables", lambda *args: count.append(args) or original(*args))
        check(call, "sm_90a", SCHEDULES[0])
        check(call, "sm_90a", SCHEDULES[1])
        assert len(count) == 1
        assert call.mods.kv_num_blocks is not None and call.states is not None
        call.mods.kv_num_blocks[0, 0, 0] = 0
        call.states[0, 0, 0] = torch.where(call.states[0, 0, 0] == 1, EMPTY, call.states[0, 0, 0])
        check(call, "sm_90a", SCHEDULES[0])
        assert len(count) == 2
