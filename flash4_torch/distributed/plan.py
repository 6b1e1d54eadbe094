"""Attention calls that a rank makes on the keys of each rank: plain numbers, the same on every rank.

Rank r's queries meet the keys of rank s in tiles, rectangles of positions in which one call of an operator
serves what its rows see. Tiles are as few and as small as the band and the documents allow: keys that nobody
sees do not travel, and a tile that hides nothing has no band.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from ..masks import Band
from .layout import Shards

Span = range
"""Positions from start to stop, in the whole sequence or in a rank's tensor; the step is 1."""


ORIGIN_MULTIPLE = 16
"""What the kernels need the first row and key of a tile to be a multiple of, with dropout."""


class Problem(NamedTuple):
    """What the calls of all ranks follow from."""

    queries: Shards
    keys: Shards
    band: Band
    """Aligned to the bottom right of the whole sequence."""
    ends: tuple[int, ...] = ()
    """Starts of packed documents, and the end of the last one; empty for a dense sequence."""
    needs_origins: bool = False
    """Every tile's weights have to have a position (dropout), so that no tile may join chunks."""


class Documents(NamedTuple):
    """Packed sequences inside of a tile."""

    ends: tuple[int, ...]
    """Cumulative lengths of queries from the tile's start on."""
    longest: int
    ends_k: tuple[int, ...] = ()
    """Those of keys; empty: the same, because queries and keys are the same positions."""
    longest_k: int = 0

    def of_keys(self) -> tuple[tuple[int, ...], int]:
        """Cumulative lengths of keys, and the largest."""
        return (self.ends_k, self.longest_k) if self.ends_k else (self.ends, self.longest)


class Tile(NamedTuple):
    """One call of an operator."""

    rows: Span
    """Queries, by index in the rank's tensor."""
    keys: Span
    """Keys, by index in the tensor of their rank."""
    band: Band
    """Aligned to the bottom right of the tile, or in each of its documents."""
    documents: Documents | None = None
    first_row: int = 0
    first_key: int = 0
    """Positions in their document, or sequence, of the first row and key: dropout depends on them."""
    first_document: int = 0


class Hop(NamedTuple):
    """What a rank does with the keys of one rank, perhaps its own."""

    source: int
    tiles: tuple[Tile, ...]

    @property
    def parts(self) -> tuple[Span, ...]:
        """Parts of the source's keys that the tiles read: disjoint, ascending, not adjacent."""
        return _united(tile.keys for tile in self.tiles)

    @property
    def reads_once(self) -> bool:
        """Whether no key is in two tiles, so that each has one gradient."""
        return sum(len(tile.keys) for tile in self.tiles) == sum(len(part) for part in self.parts)


@lru_cache(maxsize=4096)
def hop(problem: Problem, rank: int, source: int) -> Hop:
    """The calls of `rank` on the keys of rank `source`."""
    joined = _joined(problem) if rank == source else ()
    if joined:
        return Hop(source, joined)
    tiles = list(_tiles(problem, rank, source))
    if problem.needs_origins:
        return Hop(source, tuple(tiles))
    return Hop(source, tuple((_in_sequences if problem.queries.layout == "documents" else _merged)(tiles)))


def pairs(problem: Problem, rank: int) -> int:
    """Number of scores that a rank computes: what its time follows."""
    ranks = problem.queries.ranks
    return sum(
        sum(tile.band.pairs(n, m) for n, m in _sizes(tile))
        for source in range(ranks)
        for tile in hop(problem, rank, source).tiles
    )


def _sizes(tile: Tile) -> list[tuple[int, int]]:
    if tile.documents is None:
        return [(len(tile.rows), len(tile.keys))]
    ends = tile.documents.ends, tile.documents.of_keys()[0]
    return list(zip(*([b - a for a, b in pairwise(x)] for x in ends), strict=True))


def _joined(problem: Problem) -> tuple[Tile, ...]:
    """The rank's own keys in one tile, where local positions are in the same order as global ones."""
    band, queries = problem.band, problem.queries
    keeps_order = band.is_full or band.is_causal
    if not keeps_order or problem.keys != queries or problem.needs_origins or problem.ends:
        return ()
    everything = range(queries.S // queries.ranks)
    return (Tile(everything, everything, band),) if everything else ()


def _tiles(problem: Problem, rank: int, source: int) -> Iterator[Tile]:
    for (q_chunk, first_row), (k_chunk, first_key) in _pairs_of_chunks(problem, rank, source):
        if problem.ends:
            found = _packed_tiles(problem, q_chunk, k_chunk)
        else:
            found = _dense_tile(problem, q_chunk, k_chunk)
        for tile in found:
            yield tile._replace(
                rows=_moved(tile.rows, first_row - q_chunk.start),
                keys=_moved(tile.keys, first_key - k_chunk.start),
            )


Located = tuple[Span, int]
"""A chunk's positions, and the index of its first one in the rank's tensor."""


def _pairs_of_chunks(problem: Problem, rank: int, source: int) -> Iterator[tuple[Located, Located]]:
    """Chunks of queries, and those of keys that they might see."""
    queries, keys = _located(problem.queries, rank), _located(problem.keys, source)
    if problem.queries.layout != "documents":
        yield from product(queries, keys)
        return
    # A chunk lies in one document. There may be thousands, so that not all pairs can be tried.
    of_document: dict[int, list[Located]] = {}
    for chunk in keys:
        of_document.setdefault(bisect_right(problem.ends, chunk[0].start), []).append(chunk)
    for chunk in queries:
        for other in of_document.get(bisect_right(problem.ends, chunk[0].start), ()):
            yield chunk, other


def _located(shards: Shards, rank: int) -> list[Located]:
    chunks = shards.chunks(rank)
    return list(zip(chunks, accumulate(map(len, chunks), initial=0), strict=False))


def _dense_tile(problem: Problem, rows: Span, keys: Span) -> Iterator[Tile]:
    """The tile of two chunks of one sequence, with global positions."""
    shift = problem.keys.S - problem.queries.S
    yield from _seen(problem, shift, rows, keys, 0, 0)


def _packed_tiles(problem: Problem, rows: Span, keys: Span) -> Iterator[Tile]:
    """The same of packed documents. Only one document reaches into two chunks that do not overlap."""
    ends = problem.ends
    if rows != keys:
        later = max(rows.start, keys.start)
        document = bisect_right(ends, later) - 1
        start, stop = ends[document], ends[document + 1]
        inside_rows, inside_keys = _within(rows, start, stop), _within(keys, start, stop)
        yield from _seen(problem, 0, inside_rows, inside_keys, start, document)
        return
    first = bisect_right(ends, rows.start) - 1
    inside = [e for e in ends[first + 1 :] if e < rows.stop]
    cuts = [rows.start, *inside, rows.stop] if rows else []
    continues = rows and ends[first] < rows.start
    if problem.needs_origins and continues:
        # Positions in the document count from a place before the chunk.
        head, cuts = range(cuts[0], cuts[1]), cuts[1:]
        yield from _seen(problem, 0, head, head, ends[first], first)
        first += 1
    if len(cuts) > 1:
        span = range(cuts[0], cuts[-1])
        lengths = [b - a for a, b in pairwise(cuts)]
        documents = Documents(tuple(c - cuts[0] for c in cuts), max(lengths))
        yield Tile(span, span, problem.band, documents, first_document=first)


def _seen(problem: Problem, shift: int, rows: Span, keys: Span, start: int, document: int) -> Iterator[Tile]:
    """The tile of what rows and keys see of each other, of a document that begins at `start`.

    Row i sees keys from i + shift - left to i + shift + right.
    """
    left, right = problem.band

    def aligned(position: int) -> int:
        """A first position, moved such that kernels can count dropout's positions from it."""
        return position - (position - start) % ORIGIN_MULTIPLE if problem.needs_origins else position

    if left is not None:
        keys = _within(keys, aligned(rows.start + shift - left), keys.stop)
        rows = _within(rows, rows.start, keys.stop - shift + left)
    if right is not None:
        keys = _within(keys, keys.start, rows.stop + shift + right)
        rows = _within(rows, aligned(keys.start - shift - right), rows.stop)
    if not rows or not keys:
        return
    # Bottom right: the tile's last row would see up to its last key.
    ahead = (rows.stop + shift) - keys.stop
    inner = Band(None if left is None else left - ahead, None if right is None else right + ahead)
    n, m = len(rows), len(keys)
    if inner.left is not None and inner.left >= m - 1:
        inner = inner._replace(left=None)
    if inner.right is not None and inner.right >= n - 1:
        inner = inner._replace(right=None)
    yield Tile(rows, keys, inner, None, rows.start - start, keys.start - start, document)


def _in_sequences(tiles: list[Tile]) -> list[Tile]:
    """Tiles of documents that follow one another in queries and keys, as packed sequences of one tile.

    Squares on the diagonal share a band. Other tiles must hide nothing: where a band hides something it
    differs from document to document.
    """
    apart: list[Tile] = []
    runs: dict[tuple[bool, int, int], list[Tile]] = {}
    for tile in sorted(tiles, key=lambda t: (t.rows.start, t.keys.start)):
        is_square = tile.documents is not None
        if not (is_square or tile.band.is_full):
            apart.append(tile)
            continue
        run = runs.pop((is_square, tile.rows.start, tile.keys.start), [])
        runs[is_square, tile.rows.stop, tile.keys.stop] = [*run, tile]
    return [*(_in_one(run) if len(run) > 1 else run[0] for run in runs.values()), *apart]


def _in_one(run: list[Tile]) -> Tile:
    """Tiles of a document each, one after another."""
    first, last = run[0], run[-1]
    lengths, lengths_k = [len(t.rows) for t in run], [len(t.keys) for t in run]
    documents = Documents((0, *accumulate(lengths)), max(lengths))
    if first.documents is None:
        documents = documents._replace(ends_k=(0, *accumulate(lengths_k)), longest_k=max(lengths_k))
    rows, keys = range(first.rows.start, last.rows.stop), range(first.keys.start, last.keys.stop)
    return first._replace(rows=rows, keys=keys, documents=documents)


def _merged(tiles: list[Tile]) -> list[Tile]:
    """Tiles that hide nothing, joined where together they are a rectangle of the two tensors."""
    merged: list[Tile] = []
    for tile in sorted(tiles, key=lambda t: (t.rows.start, t.keys.start)):
        for n, other in enumerate(merged):
            if (one := _union(other, tile)) is not None:
                merged[n] = one
                break
        else:
            merged.append(tile)
    return merged if len(merged) == len(tiles) else _merged(merged)


def _union(a: Tile, b: Tile) -> Tile | None:
    if a.documents and b.documents and a.band == b.band and a.rows.stop == b.rows.start:
        # Both are squares on the diagonal.
        inside = (*a.documents.ends, *(len(a.rows) + end for end in b.documents.ends[1:]))
        together = range(a.rows.start, b.rows.stop)
        documents = Documents(inside, max(a.documents.longest, b.documents.longest))
        return a._replace(rows=together, keys=together, documents=documents)
    if not (a.band.is_full and b.band.is_full and a.documents is None and b.documents is None):
        return None
    if a.rows == b.rows and a.keys.stop == b.keys.start:
        return a._replace(keys=range(a.keys.start, b.keys.stop))
    if a.keys == b.keys and a.rows.stop == b.rows.start:
        return a._replace(rows=range(a.rows.start, b.rows.stop))
    return None


def _united(spans: Iterable[Span]) -> tuple[Span, ...]:
    united: list[Span] = []
    for span in sorted(spans, key=lambda s: s.start):
        if united and span.start <= united[-1].stop:
            united[-1] = range(united[-1].start, max(united[-1].stop, span.stop))
        else:
            united.append(span)
    return tuple(united)


def _within(span: Span, start: int, stop: int) -> Span:
    first = max(span.start, start)
    return range(first, max(min(span.stop, stop), first))


def _moved(span: Span, by: int) -> Span:
    return range(span.start + by, span.stop + by)
