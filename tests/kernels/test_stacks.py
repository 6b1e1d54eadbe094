"""Batches of short sequences as stacks of entries, in the emulator with its race checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from everything import EVERYTHING, examples
from flash4_torch import ahead, testing
from flash4_torch.backends.compiled import SM90A, SM100A, TARGETS, Target, backward, forward, stacks
from flash4_torch.compile import Key
from flash4_torch.configs import stacks as configs
from flash4_torch.configs.stacks import Batch
from flash4_torch.ops import CallOptions
from flash4_torch.ops.impl import describe_inputs
from flash4_torch.problem import Extent, Inputs, Problem
from stacked_calls import FEATURES, FORMS, made, noted

ARCHS = ["sm_90a", "sm_100a"]
BATCHES = st.builds(
    Batch,
    B=st.integers(1, 100_000),
    Sq=st.integers(1, 200),
    Sk=st.integers(1, 200),
    Hk=st.integers(1, 64),
    columns=st.sampled_from([8, 64, 96, 128, 256]),
    end_masked=st.booleans(),
    num_sms=st.sampled_from([1, 132, 148]),
)


@given(batch=BATCHES)
def test_entries_divide_the_batch(batch: Batch) -> None:
    whole, in_tiles = configs.forward(batch), configs.backward(batch)
    assert whole in (1, batch.B)
    assert batch.B % in_tiles == 0
    assert in_tiles == 1 or in_tiles * batch.longest <= configs._TILE


@given(rows=st.integers(2, 256), data=st.data())
def test_a_product_finds_the_entry_of_every_row(rows: int, data: st.DataObject) -> None:
    """Kernels divide by the number of an entry's rows: all rows of a batch, and those of a tile behind it."""
    last = stacks._MOST_ROWS + 1024
    inverse = -(-(1 << 32) // rows)
    row = data.draw(st.one_of(st.integers(0, last), st.integers(0, last // rows).map(lambda n: n * rows)))
    for each in {row, max(row - 1, 0)}:
        assert each * inverse >> 32 == each // rows


def described(target: Target, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Problem:
    problem = describe_inputs(Inputs(q, k, v), CallOptions(scale=0.1, **options))
    return problem._replace(spec=problem.spec._replace(device="cuda", capability=target.capability))


@given(
    target=st.sampled_from([SM90A, SM100A]),
    D=st.sampled_from([64, 128, (192, 128)]),
    B=st.sampled_from([500, 6000, 20011]),
    Sq=st.integers(2, 64),
    Sk=st.integers(2, 64),
    right=st.sampled_from([None, 0]),
    group=st.sampled_from([1, 4]),
    is_backward=st.booleans(),
)
def test_warm_up_prepares_the_kernels_of_stacks(
    target: Target, D: Any, B: int, Sq: int, Sk: int, right: int | None, group: int, is_backward: bool
) -> None:
    heads = D if isinstance(D, tuple) else (D, D)
    sizes = (Sq, 2 * group, heads[0]), (Sk, 2, heads[0]), (Sk, 2, heads[1])
    tensors = [torch.empty(B, *size, dtype=torch.bfloat16, device="meta") for size in sizes]
    call = described(target, *tensors, window_right=right)
    call = stacks.stacked(target, call._replace(spec=call.spec._replace(backward=is_backward)), 132)
    asked: list[Key] = []

    def find(entry: str, static: tuple[object, ...]) -> Any:
        asked.append(Key(entry, static, target.arch))
        return print

    (backward if is_backward else forward).decide(target, call, 132, find)
    words = "plain" if right is None else "causal"
    assert set(asked) <= set(ahead.kernels(target.arch, [D], ["bfloat16"], [words], [group]))


def test_only_plain_calls_are_stacked() -> None:
    """Masks and dropout belong to one entry, the mma.sync family has no bounds of rows, and next to softcap
    bounds spill.
    """
    q = torch.empty(6000, 16, 2, 64, dtype=torch.bfloat16, device="meta")
    plain = described(SM90A, q, q, q)
    assert stacks.stacked(SM90A, plain, 132).entries == 6000
    dropped = described(SM90A, q, q, q, dropout_p=0.1)
    assert stacks.stacked(SM90A, dropped, 132) is dropped
    masked = plain._replace(spec=plain.spec._replace(mask="bool:11.."))
    assert stacks.stacked(SM90A, masked, 132) is masked
    assert stacks.stacked(TARGETS["sm_80"], plain, 132) is plain
    capped = described(SM90A, q, q, q, softcap=30.0)
    assert stacks.stacked(SM90A, capped, 132) is capped
    few = described(SM90A, *[q[:100]] * 3)
    assert stacks.stacked(SM90A, few, 132) is few
    long = described(SM90A, *[torch.empty(6000, 65, 2, 64, dtype=torch.bfloat16, device="meta")] * 3)
    assert stacks.stacked(SM90A, long, 132) is long


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Entries of the stacks that calls of any number of heads became."""
    monkeypatch.setattr(configs, "_ANY", configs.Row(40, 0))
    monkeypatch.setattr(configs, "_TURNS", 0)
    monkeypatch.setenv("FLASH4_BACKEND", "emulator")
    return noted(monkeypatch)


@pytest.mark.parametrize("arch", ARCHS)
@given(
    feature=st.sampled_from(list(FEATURES)),
    form=st.sampled_from(list(FORMS)),
    B=st.sampled_from([2, 4, 5, 12, 40]),
    Sq=st.integers(2, 40),
    Sk=st.integers(2, 40),
    Hk=st.integers(1, 2),
    group=st.sampled_from([1, 3]),
    sinks=st.booleans(),
    shared=st.booleans(),
    seed=st.integers(0, 999),
)
@example("causal", "64", 12, 24, 24, 2, 2, True, True, 0)
@example("window", "unequal", 10, 12, 20, 1, 1, False, False, 1)
@settings(
    max_examples=examples(1, 40),
    phases=[Phase.explicit, *[Phase.generate] * EVERYTHING],
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_stacks_are_right(
    arch: str,
    stacked: list[int],
    monkeypatch: pytest.MonkeyPatch,
    feature: str,
    form: str,
    B: int,
    Sq: int,
    Sk: int,
    Hk: int,
    group: int,
    sinks: bool,
    shared: bool,
    seed: int,
) -> None:
    """Results and gradients, next to a gradient of lse, too; q, k and v may be parts of one projection."""
    monkeypatch.setenv("FLASH4_ARCH", arch)
    stacked.clear()
    call = made(feature, form, B, Sq, Sk, Hk, group, sinks=sinks, shared=shared, seed=seed)
    with testing.poisoned_memory():
        results = call.run()
    assert stacked[0] == B and len(stacked) <= 2
    call.check(results)


def test_gradients_of_rows_that_see_nothing_are_zeros(
    stacked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of keys stores dQ of all rows of its entries, here in a block for each, whoever sees it."""
    monkeypatch.setenv("FLASH4_ARCH", "sm_90a")
    call = made("nothing", "128", 8, 64, 20, 1, 1)
    with testing.poisoned_memory():
        results = call.run()
    assert stacked == [2]
    call.check(results)


def test_rows_that_see_nothing_hide_no_keys_of_rows_before_them(
    stacked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks end with the last row's keys: here it may see nothing, and entries before it another block."""
    monkeypatch.setenv("FLASH4_ARCH", "sm_90a")
    call = made("causal", "64", 40, 23, 4, 1, 1)
    with testing.poisoned_memory():
        results = call.run()
    assert stacked == [40, 5]
    call.check(results)


def test_rows_first_are_right(stacked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read them as they lie, a tile for each."""
    monkeypatch.setenv("FLASH4_ARCH", "sm_90a")
    call = made("causal", "64", 4, 20, 20, 1, 1, rows_first=True)
    with testing.poisoned_memory():
        results = call.run()
    assert not stacked
    call.check(results)


def test_entries_apart_are_no_stack() -> None:
    """Sequences first, or every second entry: no entry follows the one before it."""
    first = torch.randn(16, 8, 2, 32, dtype=torch.bfloat16).transpose(0, 1)
    second = torch.randn(16, 16, 2, 32, dtype=torch.bfloat16)[::2]
    together = torch.randn(8, 16, 2, 32, dtype=torch.bfloat16)
    extent = Extent(8, 16, 16, 2, 2)
    assert not stacks.may_be_stacked(extent, first) and not stacks.may_be_stacked(extent, together, second)
    assert stacks.may_be_stacked(extent, together, together[1:], together[:, :, :1])
    assert not stacks.may_be_stacked(extent._replace(Sk=300), together)
