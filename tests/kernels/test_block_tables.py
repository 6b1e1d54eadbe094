"""The tables that are made of a block mask's lists, against what each tile sees by brute force."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from everything import examples, one_of
from flash4_torch.backends.flex import tables
from flash4_torch.backends.flex.tables import Tables, TileSize
from flash4_torch.compile import jit
from flash4_torch.errors import ShapeError
from flash4_torch.reference.flex import EMPTY, FULL, PARTIAL
from flash4_torch.testing import emulate

POISON = -77


class Mask(NamedTuple):
    """The states of a mask's blocks (B or 1, Hq or 1, rows, columns), and where these blocks lie."""

    state: Tensor
    block: tuple[int, int]
    lengths: tuple[int, int]


@st.composite
def masks(draw: Callable[..., Any], heads: int) -> Mask:
    lengths = draw(st.tuples(st.integers(1, 400), st.integers(1, 400)))
    sizes = st.sampled_from([16, 48, 64, 128, 1000]) | st.integers(5, 90)
    block = draw(st.tuples(sizes, sizes))
    B, H = draw(st.integers(1, 2)), draw(st.sampled_from([1, heads, 2 * heads]))
    torch.manual_seed(draw(st.integers(0, 99)))
    counts = [-(-n // own) for n, own in zip(lengths, block, strict=True)]
    return Mask(torch.randint(0, 3, (B, H, *counts)), block, lengths)


def lists_of(state: Tensor, which: int, more: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The blocks in that state, in any order; behind them, and in rows beyond the last, lies anything.

    more: rows and places that the lists have more than the mask has blocks.
    """
    *outer, rows, columns = state.shape
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-5, 2 * columns, (*outer, rows + more[0], columns + more[1]), generator=generator)
    counts = torch.full((*outer, rows + more[0]), 3)
    for at in torch.cartesian_prod(*map(torch.arange, (*outer, rows))).view(-1, 3).tolist():
        own = (state[tuple(at)] == which).nonzero()[:, 0]
        counts[tuple(at)] = len(own)
        numbers[tuple(at)][: len(own)] = own[torch.randperm(len(own), generator=generator)]
    return counts.to(dtype), numbers.to(dtype)


@functools.cache
def compiled(arch: str, entry: str, static: tuple[object, ...]) -> Any:
    return jit.resolve(entry)(*static)


def made(
    arch: str, lists: Any, mask: Mask, tile: TileSize, schedule: str = "eager", seed: int = 0, **how: bool
) -> Tables:
    """Makes the tables, in memory that had something else."""

    def find(entry: str, static: tuple[object, ...]) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            listed, full, _, by_lists, _, visible, rank, _ = args
            by_lists.fill_(77)
            visible.fill_(POISON)
            rank.fill_(POISON)
            with (
                emulate.device(arch, schedule=schedule, seed=seed) as device,
                device.touching(*listed, *(full or ()), by_lists, visible, rank),
            ):
                compiled(arch, entry, static)(*args)

        return launch

    return tables.tables(lists, mask.block, mask.lengths, tile, find, **how)


@pytest.mark.parametrize("arch", one_of(1, ["sm_90a", "sm_100a", "sm_80"]))
@pytest.mark.parametrize("has_full", [True, False])
@settings(max_examples=examples(25, 300), deadline=None, derandomize=True)
@given(
    data=st.data(),
    tile=st.tuples(st.sampled_from([16, 64, 192]), st.sampled_from([32, 48, 64, 128])),
    heads=st.sampled_from([1, 2, 4]),
    is_transposed=st.booleans(),
    is_decided=st.booleans(),
    more=st.tuples(st.integers(0, 2), st.integers(0, 3)),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_tables_list_what_tiles_see(
    arch: str,
    has_full: bool,
    data: st.DataObject,
    tile: tuple[int, int],
    heads: int,
    is_transposed: bool,
    is_decided: bool,
    more: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    """Blocks that any of a tile's rows and heads sees, in order, and whether any does not see all of it."""
    mask = data.draw(masks(heads))
    state = mask.state if has_full else mask.state.clamp(max=PARTIAL)
    full = lists_of(state, FULL, more, dtype) if has_full else (None, None)
    lists = *lists_of(state, PARTIAL, more, dtype), *full
    how = {"is_decided": is_decided, "is_transposed": is_transposed}
    found = made(arch, lists, mask, TileSize(*tile, heads), **how)

    if is_decided:
        state = torch.where(state == EMPTY, EMPTY, FULL)
    block, lengths = mask.block, mask.lengths
    if is_transposed:
        state, block, lengths = state.transpose(2, 3), block[::-1], lengths[::-1]
    assert torch.equal(found.states.long(), state) and (found.rows, found.columns) == block
    # The state of each row and column, by head.
    i, j = (torch.arange(n) // own for n, own in zip(lengths, block, strict=True))
    whole = state[:, :, i[:, None], j]
    heads = min(heads, state.shape[1])
    counts = [-(-n // own) for n, own in zip(lengths, tile, strict=True)]
    assert found.visible.shape == (len(state), state.shape[1] // heads, *counts)
    for b, n, m in torch.cartesian_prod(*map(torch.arange, found.visible.shape[:3])).view(-1, 3).tolist():
        own = whole[b, n * heads : (n + 1) * heads, m * tile[0] : (m + 1) * tile[0]]
        parts = own.split(tile[1], 2)
        seen = [2 * c + bool((x != FULL).any()) for c, x in enumerate(parts) if bool((x != EMPTY).any())]
        assert found.visible[b, n, m, : len(seen)].tolist() == seen
        before = [sum(entry // 2 < c for entry in seen) for c in range(len(parts) + 1)]
        assert found.rank[b, n, m].tolist() == before


@settings(max_examples=examples(15, 100), deadline=None, derandomize=True)
@given(data=st.data())
def test_lists_may_hold_anything(data: st.DataObject) -> None:
    """Blocks in both lists are full; numbers of blocks that are not there, and of too many, do no harm."""
    rows, columns, places = 3, data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    of_blocks = st.lists(st.integers(-3, columns + 2), min_size=places, max_size=places)
    of_rows = st.lists(st.integers(-2, places + 3), min_size=rows, max_size=rows)
    lists, wanted = [], torch.zeros(1, 1, rows, columns, dtype=torch.long)
    for state in (PARTIAL, FULL):
        counts = data.draw(of_rows)
        numbers = data.draw(st.lists(of_blocks, min_size=rows, max_size=rows))
        # What lies around a list is not read.
        room = torch.full((rows + 2, places + 2), columns - 1, dtype=torch.int32)
        room[1:-1, 1:-1] = torch.tensor(numbers)
        lists += [torch.tensor(counts, dtype=torch.int32)[None, None], room[None, None, 1:-1, 1:-1]]
        for row, (count, own) in enumerate(zip(counts, numbers, strict=True)):
            for n in own[: max(count, 0)]:
                if 0 <= n < columns:
                    wanted[0, 0, row, n] = state
    mask = Mask(wanted, (64, 64), (64 * rows, 64 * columns))
    how = {"is_decided": False, "is_transposed": False}
    found = made("sm_90a", tuple(lists), mask, TileSize(64, 64), **how)
    assert torch.equal(found.states.long(), wanted)


@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_both_lists_are_full_whichever_warp_is_first(seed: int) -> None:
    columns, lists = 120, []
    for order in (torch.arange(columns), torch.arange(columns).flip(0)):
        lists += [torch.tensor([[[columns]]], dtype=torch.int32), order.int()[None, None, None]]
    mask = Mask(torch.full((1, 1, 1, columns), FULL), (1, 16), (1, columns * 16))
    how = {"is_decided": False, "is_transposed": False}
    found = made("sm_90a", tuple(lists), mask, TileSize(64, 16), "fuzz", seed, **how)
    assert torch.equal(found.states.long(), mask.state)


@pytest.mark.parametrize("has_heads", [(True, False), (False, True)])
def test_lists_of_full_blocks_may_be_those_of_all_heads(has_heads: tuple[bool, bool]) -> None:
    """Partial ones may be so, too; the other ones differ by head."""
    torch.manual_seed(0)
    partial, full = (torch.rand(1, 2 if own else 1, 3, 5) < 0.4 for own in has_heads)
    lists = tuple(x for own in (partial, full) for x in lists_of(own.long(), 1, (0, 0), torch.int32))
    mask = Mask(partial, (64, 64), (192, 320))
    how = {"is_decided": False, "is_transposed": False}
    found = made("sm_90a", lists, mask, TileSize(64, 64), **how)
    wanted = torch.where(full, FULL, torch.where(partial, PARTIAL, EMPTY))
    assert torch.equal(found.states.long(), wanted)


def test_lists_that_end_before_the_queries_do_are_refused() -> None:
    lists = lists_of(torch.ones(1, 1, 2, 3, dtype=torch.long), PARTIAL, (0, 0), torch.int32)
    how = {"is_decided": False, "is_transposed": False}
    with pytest.raises(ShapeError, match="block_mask is lists of 2 rows of 64 queries, but they must have 3"):
        tables.tables((*lists, None, None), (64, 64), (129, 192), TileSize(64, 64), pytest.fail, **how)


def test_more_tiles_than_threads() -> None:
    columns = 1100
    state = torch.zeros(1, 1, 1, columns, dtype=torch.long)
    state[..., 3:900:2], state[..., 1000], state[..., -1] = PARTIAL, FULL, FULL
    lists = *lists_of(state, PARTIAL, (0, 0), torch.int32), *lists_of(state, FULL, (0, 0), torch.int32)
    mask = Mask(state, (1, 16), (1, columns * 16))
    how = {"is_decided": False, "is_transposed": False}
    found = made("sm_100a", lists, mask, TileSize(64, 16), **how)
    own = state[0, 0, 0]
    seen = own.nonzero()[:, 0]
    assert torch.equal(found.visible[0, 0, 0, : len(seen)], (2 * seen + (own[seen] == PARTIAL)).int())
    wanted = torch.nn.functional.pad((own != EMPTY).cumsum(0), (1, 0))
    assert torch.equal(found.rank[0, 0, 0], wanted.int())
