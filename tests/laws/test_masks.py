"""`Band` against its definition, pair by pair."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from flash4_torch.masks import Band

BOUND = st.one_of(st.none(), st.integers(-12, 12))
LENGTH = st.integers(0, 10)


def visible(band: Band, Sq: int, Sk: int) -> list[list[bool]]:
    """The sentence in the documentation, as a table."""
    shift = Sk - Sq
    left = float("inf") if band.left is None else band.left
    right = float("inf") if band.right is None else band.right
    return [[i + shift - left <= j <= i + shift + right for j in range(Sk)] for i in range(Sq)]


@given(BOUND, BOUND, LENGTH, LENGTH)
def test_visible_and_pairs(left: int | None, right: int | None, Sq: int, Sk: int) -> None:
    band = Band(left, right)
    table = visible(band, Sq, Sk)
    assert [[bool(band.visible(i, j, Sq, Sk)) for j in range(Sk)] for i in range(Sq)] == table
    tensor = torch.as_tensor(band.visible(torch.arange(Sq)[:, None], torch.arange(Sk), Sq, Sk))
    assert tensor.broadcast_to(Sq, Sk).tolist() == table
    assert band.pairs(Sq, Sk) == sum(map(sum, table))


@given(BOUND, BOUND, LENGTH, LENGTH, LENGTH, LENGTH)
def test_tiles(left: int | None, right: int | None, Sq: int, Sk: int, a: int, b: int) -> None:
    band = Band(left, right)
    table = visible(band, Sq, Sk)
    rows = range(min(a, Sq), min(max(a, b), Sq))
    seen = band.keys(rows, Sq, Sk)
    assert 0 <= seen.start <= seen.stop <= Sk
    assert all(j in seen for i in rows for j in range(Sk) if table[i][j])
    keys = range(min(a, Sk), min(a + 3, Sk))
    if rows and keys:
        assert band.covers(rows, keys, Sq, Sk) == all(table[i][j] for i in rows for j in keys)
    if Sq and Sk:
        assert band.hides_nothing(Sq, Sk) == all(map(all, table))


@given(BOUND, BOUND, st.integers(1, 10), st.integers(1, 10))
def test_blocks(left: int | None, right: int | None, Sq: int, Sk: int) -> None:
    band = Band(left, right)
    table = visible(band, Sq, Sk)
    seen = [i for i in range(Sq) if any(table[i])]
    rows = band.rows(Sq, Sk)
    assert list(rows) == seen
    if seen:
        keys = band.keys(rows, Sq, Sk)
        of_block = band.of_block(rows, keys, Sq, Sk)
        assert visible(of_block, len(rows), len(keys)) == [[table[i][j] for j in keys] for i in rows]
