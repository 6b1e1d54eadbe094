"""The plan of a ring: every visible pair of positions in one tile, no key without a reader, even work."""

from __future__ import annotations

from itertools import accumulate, pairwise
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everything import examples
from flash4_torch.distributed.documents import chunks_of_documents
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
    if layout == "documents" or draw(st.booleans()):
        ends = (0, *sorted(draw(st.lists(st.integers(0, S), max_size=6))), S)
        if layout == "documents":
            keys = queries = queries._replace(ends=ends)
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
        ends_k, longest_k = tile.documents.of_keys()
        for ends_of, longest in ((tile.documents.ends, tile.documents.longest), (ends_k, longest_k)):
            assert longest == max(b - a for a, b in pairwise(ends_of))
        ends = tuple(zip(tile.documents.ends, ends_k, strict=True))
        assert ends[-1] == (n, m)
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


@st.composite
def packed(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    """Ends of documents of drawn lengths, short and long, and ranks that divide the last one."""
    ranks = draw(st.integers(1, 8))
    lengths = draw(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 400)), max_size=30))
    lengths.append(-sum(lengths) % ranks)
    return (0, *accumulate(lengths)), ranks


@settings(max_examples=examples(100, 2000))
@given(packed())
def test_documents_are_divided_once_and_evenly(packed: tuple[tuple[int, ...], int]) -> None:
    """Every token has one place; ranks have equally many; no chunk is empty or in two documents."""
    ends, ranks = packed
    chunks = chunks_of_documents(ends, ranks)
    assert sorted(i for of_rank in chunks for chunk in of_rank for i in chunk) == list(range(ends[-1]))
    assert {sum(map(len, of_rank)) for of_rank in chunks} == {ends[-1] // ranks}
    for chunk in (chunk for of_rank in chunks for chunk in of_rank):
        assert any(a <= chunk.start < chunk.stop <= b for a, b in pairwise(ends))


def balance(ends: tuple[int, ...], ranks: int, layout: str) -> float:
    """The most work of a rank over the mean."""
    shards = Shards(layout, ranks, ends[-1], ends if layout == "documents" else ())
    work = [pairs(Problem(shards, shards, Band(None, 0), ends), rank) for rank in range(ranks)]
    return max(work) * ranks / sum(work)


@settings(max_examples=examples(60, 1000), deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([2, 3, 4, 8]))
def test_documents_have_even_work(seed: int, ranks: int) -> None:
    """Lengths as in text: most documents are short, and a few hold most of the work."""
    random = Random(seed)
    lengths = [1 + int(random.lognormvariate(4, 1.3)) for _ in range(40 * ranks)]
    lengths.append(-sum(lengths) % ranks)
    assert balance((0, *accumulate(lengths)), ranks, "documents") < 1.2


def test_a_long_document_among_short_ones() -> None:
    """What the layout is for: a zigzag of the whole gives this document to few ranks."""
    ends = (0, *accumulate([4096, *[64] * 448]))
    assert balance(ends, 8, "documents") < 1.01
    assert balance(ends, 8, "zigzag") > 3


def test_causal_documents_are_few_calls() -> None:
    """Two calls a hop, however many documents; keys of short ones do not travel."""
    ends = (0, *accumulate([512, 1024, 768, *[16] * 48]))
    shards = Shards("documents", 4, ends[-1], ends)
    for rank, step in all_hops(Problem(shards, shards, Band(None, 0), ends)):
        assert len(step.tiles) == 2
        if rank != step.source:
            assert sum(map(len, step.parts)) <= 2304 // 4
