"""Masks of one function that are made again and again, as in training on packed documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
import flash4_torch
from flash4_torch.backends import emulator as emulator_backend
from flash4_torch.backends.compiled.targets import BLOCK_BITS, BLOCK_LISTS, BLOCK_ROWS, ROW_INTERVALS
from flash4_torch.backends.emulator import emulated_find
from flash4_torch.backends.flex import dispatch, new_masks
from flash4_torch.reference.flex import EMPTY, FULL
from flex_calls import SCHEDULES, check, check_gradients, made, tensors, with_blocks, with_intervals
from flex_mods import Mod

S = 200
KERNELS = (BLOCK_BITS, BLOCK_LISTS, BLOCK_ROWS, ROW_INTERVALS)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that evaluate masks, in the emulator, as they are launched."""
    entries: list[str] = []
    original = emulator_backend._launch

    def launch(entry: str, static: tuple[object, ...], *args: Any) -> None:
        if entry in KERNELS:
            entries.append(entry)
        original(entry, static, *args)

    monkeypatch.setattr(emulator_backend, "_launch", launch)
    monkeypatch.setattr(new_masks, "_DEVICES", ("cpu",))
    monkeypatch.setattr(new_masks, "_known", set())
    monkeypatch.setattr(dispatch, "find_on", lambda device: emulated_find)
    return entries


def documents(seed: int, *, is_causal: bool) -> Mod:
    torch.manual_seed(seed)
    document = torch.randint(0, 4, (S,)).sort().values

    def together(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same = document[i] == document[j]
        return same & (i >= j) if is_causal else same

    return together


def thirds(seed: int) -> Mod:
    document = torch.arange(S) // (50 + seed)
    return lambda b, h, i, j: (document[i] == document[j]) & ((i - j) % 3 != 1)


def test_the_first_mask_of_a_function_is_left_to_torch(launched: list[str]) -> None:
    i = torch.arange(S)
    for n in range(3):
        mask_mod = documents(n, is_causal=True)
        mask = flash4_torch.create_block_mask(mask_mod, None, None, S, S, "cpu", 64)
        assert launched == [BLOCK_LISTS] * n
        shown = (
            pad(mask_mod(i, i, i[:, None], i), (0, 56, 0, 56)).unflatten(1, (-1, 64)).unflatten(0, (-1, 64))
        )
        assert torch.equal(mask.to_dense()[0, 0], shown.any(3).any(1).int())
    # Another function, though it reads the same.
    flash4_torch.create_block_mask(documents(0, is_causal=False), None, None, S, S, "cpu", 64)
    assert launched == [BLOCK_LISTS] * 2
    # A larger mask has bounds of its blocks.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(new_masks, "_MOST", S * S - 1)
        flash4_torch.create_block_mask(documents(0, is_causal=True), None, None, S, S, "cpu", 64)
    assert launched == [BLOCK_LISTS] * 2


@pytest.mark.parametrize("kind", ["documents", "thirds"])
def test_results_and_gradients_of_new_masks(kind: str, launched: list[str]) -> None:
    """Rows are judged by kernels, from the second mask on those of the function; what shows no intervals
    becomes bits.
    """
    for n in range(2):
        mask_mod = documents(n, is_causal=True) if kind == "documents" else thirds(n)
        call = with_intervals(made(tensors(S, S), None, mask_mod), mask_mod)
        del launched[:]
        check(call, "sm_90a", SCHEDULES[n % 2])
        check_gradients(call, "sm_90a", SCHEDULES[n % 2])
        rows = [BLOCK_ROWS] * (n > 0) + [ROW_INTERVALS]
        assert launched == rows + [BLOCK_BITS] * 2 * (kind == "thirds")


def test_rows_of_large_masks_are_left_to_torch(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operators know how much of them is partial before they evaluate it."""
    monkeypatch.setattr(new_masks, "_MOST_OF_ROWS", S * S - 1)
    for n in range(2):
        mask_mod = documents(n, is_causal=True)
        check(with_intervals(made(tensors(S, S), None, mask_mod), mask_mod), "sm_90a", SCHEDULES[0])
    assert launched == [ROW_INTERVALS] * 2


def test_lists_without_a_function_are_looked_at_once(launched: list[str]) -> None:
    """Such as of attention that chooses blocks in each call: the next ones are visited as they are listed."""
    for n in range(2):
        torch.manual_seed(n)
        states = torch.where(torch.rand(1, 1, 4, 4) < 0.6, FULL, EMPTY)
        states[..., 0, 0] = FULL
        call = with_blocks(made(tensors(S, S), None, None), states, 64, 64)
        check(call, "sm_90a", SCHEDULES[n % 2])
        check_gradients(call, "sm_90a", SCHEDULES[n % 2])
        assert launched == [ROW_INTERVALS] + [BLOCK_BITS] * 2
