"""The plan of a ring: every visible pair of positions in one tile, no key without a reader, even work."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everything import examples
from flash4_torch.distributed.layout import LAYOUTS, Shards
from flash4_torch.distributed.plan import ORIGIN_MULTIPLE, Hop, Problem, Tile, hop, pairs
from flash4_torch.masks import Band


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    ranks, layout = draw(st.integers(1, 5)), draw(st.sampled_from(LAYOUTS))
    unit = ranks * (2 if layout == "zigzag" else 1)
    S = unit * draw(st.integers(1, 20))
    bound = st.one_of(st.none(), st.integers(-9, 40))
    left, right = draw(bound), draw(bound)
    if left is not None and right is not None and left + right < 0:
        left, right = -left, -right
    queries = Shards(layout, ranks, S)
    keys, ends = queries, ()
    if draw(st.booleans()):
        ends = (0, *sorted(draw(st.lists(st.integers(0, S), max_size=6))), S)
    elif draw(st.booleans()):
        keys = Shards(layout, ranks, unit * draw(st.integers(1, 20)))
    return Problem(queries, keys, Band(left, right), ends, draw(st.booleans()))


def visible(problem: Problem) -> Tensor:
    """(Sq, Sk), True where a row sees a key."""
    Sq, Sk = problem.queries.S, problem.keys.S
    i, j = torch.arange(Sq)[:, None], torch.arange(Sk)
    seen = torch.ones(Sq, Sk, dtype=torch.bool) & problem.band.visible(i, j, Sq, Sk)
    if problem.ends:
        document = torch.bucketize(torch.arange(Sq), torch.tensor(problem.ends[1:-1] or [Sq]), right=True)
        seen &= document[:, None] == document
    return seen


def cells(tile: Tile) -> Tensor:
    """(rows, keys) of a tile, True where its call sees a key."""
    n, m = len(tile.rows), len(tile.keys)
    found = torch.zeros(n, m, dtype=torch.bool)
    ends = ((0, 0), (n, m))
    if tile.documents is not None:
        assert n == m == tile.documents.ends[-1]
        assert tile.documents.longest == max(b - a for a, b in pairwise(tile.documents.ends))
        ends = tuple((e, e) for e in tile.documents.ends)
    for (i0, j0), (i1, j1) in pairwise(ends):
        i, j = torch.arange(i1 - i0)[:, None], torch.arange(j1 - j0)
        found[i0:i1, j0:j1] |= torch.as_tensor(tile.band.visible(i, j, i1 - i0, j1 - j0))
    return found


def positions(shards: Shards, rank: int) -> Tensor:
    return torch.cat([torch.arange(c.start, c.stop) for c in shards.chunks(rank)])


def all_hops(problem: Problem) -> list[tuple[int, Hop]]:
    ranks = range(problem.queries.ranks)
    return [(rank, hop(problem, rank, source)) for rank in ranks for source in ranks]


@settings(max_examples=examples(150, 3000))
@given(problem=problems())
def test_tiles_cover_what_is_visible_once(problem: Problem) -> None:
    count = torch.zeros(problem.queries.S, problem.keys.S, dtype=torch.int64)
    for rank, step in all_hops(problem):
        queries, keys = positions(problem.queries, rank), positions(problem.keys, step.source)
        for tile in step.tiles:
            rows, columns = queries[tile.rows.start : tile.rows.stop], keys[tile.keys.start : tile.keys.stop]
            assert len(rows) == len(tile.rows) and len(columns) == len(tile.keys)
            count[rows[:, None], columns] += cells(tile)
    assert torch.equal(count, visible(problem).long())


@settings(max_examples=examples(150, 3000))
@given(problem=problems())
def test_tiles_begin_where_they_say(problem: Problem) -> None:
    """A tile's first row and key are where it says in their document, and that is the one it names."""
    if not problem.needs_origins:
        return
    for rank, step in all_hops(problem):
        queries, keys = positions(problem.queries, rank), positions(problem.keys, step.source)
        for tile in step.tiles:
            starts = problem.ends or (0,)
            start = starts[tile.first_document]
            first_row, first_key = queries[tile.rows.start].item(), keys[tile.keys.start].item()
            assert (first_row - start, first_key - start) == (tile.first_row, tile.first_key)
            # Positions inside of a tile are neighbours, as kernels count them.
            for x, span in ((queries, tile.rows), (keys, tile.keys)):
                assert (x[span.start : span.stop].diff() == 1).all()


def test_windows_keep_the_multiples_of_positions() -> None:
    shards = Shards("zigzag", 4, 8 * 64)
    for _, step in all_hops(Problem(shards, shards, Band(37, 0), (), True)):
        for tile in step.tiles:
            assert tile.first_row % ORIGIN_MULTIPLE == tile.first_key % ORIGIN_MULTIPLE == 0


@settings(max_examples=examples(100, 2000))
@given(problem=problems())
def test_every_key_that_travels_is_seen(problem: Problem) -> None:
    """Up to the multiples that dropout needs; the parts are what tiles read."""
    if problem.needs_origins:
        return
    seen = visible(problem)
    for rank, step in all_hops(problem):
        queries, keys = positions(problem.queries, rank), positions(problem.keys, step.source)
        read = torch.zeros(len(keys), dtype=torch.bool)
        for part in step.parts:
            read[part.start : part.stop] = True
        if rank != step.source:
            assert torch.equal(read, seen[queries][:, keys].any(0))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_zigzag_has_even_work(ranks: int) -> None:
    shards, line = (Shards(layout, ranks, 96 * ranks) for layout in ("zigzag", "contiguous"))
    work = {pairs(Problem(shards, shards, Band(None, 0)), rank) for rank in range(ranks)}
    assert len(work) == 1
    uneven = [pairs(Problem(line, line, Band(None, 0)), rank) for rank in range(ranks)]
    assert max(uneven) > 1.4 * min(uneven)


def test_causal_hops_are_single_calls_without_a_band() -> None:
    shards = Shards("zigzag", 4, 8 * 16)
    problem = Problem(shards, shards, Band(None, 0))
    for rank, step in all_hops(problem):
        (tile,) = step.tiles
        assert tile.band == (Band(None, 0) if rank == step.source else Band())
