"""Parts of packed documents for each rank, such that tokens are equal and work is nearly so.

A long document is divided into two chunks for each rank, and rank r of N holds chunks r and 2 N - 1 - r: the
same work for everybody. A short one stays whole, on the rank that has least work so far, and no message
brings its keys anywhere. Every rank has equally many tokens in the end; for that a few short ones are cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

SHARES = (1, 2, 4, 8, 16)
"""A document is long if its work is more than one part in so many of a rank's mean work. Whole documents cost
no messages and give long calls, so that the first of these counts which leaves ranks even enough."""
EVEN = 1.05
"""The most work of a rank over the mean that is even enough."""

Chunks = tuple[tuple[range, ...], ...]


@lru_cache(maxsize=256)
def chunks_of_documents(ends: tuple[int, ...], ranks: int) -> Chunks:
    """Positions of each rank's chunks, in their order on the rank; none is empty.

    First come all first chunks of long documents, then all second ones, then whole documents: a rank's calls
    can then take those of all documents as packed sequences. `ends` begins with 0, and the ranks divide its
    last number.
    """
    documents = [range(a, b) for a, b in pairwise(ends) if a < b]
    mean = sum(_pairs(len(x)) for x in documents) / ranks
    for share in SHARES:
        chunks, most = _divided(documents, ranks, mean / share)
        if most <= EVEN * mean:
            break
    return chunks


def _divided(documents: list[range], ranks: int, most_of_short: float) -> tuple[Chunks, int]:
    """The chunks of each rank, and the most work of a rank. most_of_short: the work of a short document."""
    short: list[range] = []
    early: list[list[range]] = [[] for _ in range(ranks)]
    late: list[list[range]] = [[] for _ in range(ranks)]
    work = [0] * ranks
    first_extra = 0
    for document in documents:
        if len(document) < 2 * ranks or _pairs(len(document)) <= most_of_short:
            short.append(document)
            continue
        chunks = _zigzag(document, ranks, first_extra)
        first_extra = (first_extra + len(document)) % ranks
        for rank in range(ranks):
            mine = chunks[rank], chunks[2 * ranks - 1 - rank]
            early[rank].append(mine[0])
            late[rank].append(mine[1])
            work[rank] += sum(_work(document, chunk) for chunk in mine)
    each = sum(map(len, documents)) // ranks
    room = [each - sum(map(len, (*a, *b))) for a, b in zip(early, late, strict=True)]
    whole = _placed(short, room, work)
    return tuple(tuple((*early[r], *late[r], *whole[r])) for r in range(ranks)), max(work)


def _pairs(S: int) -> int:
    """Scores of a causal document."""
    return S * (S + 1) // 2


def _work(document: range, chunk: range) -> int:
    """Scores of a chunk's rows, which see the document from its start on."""
    return _pairs(chunk.stop - document.start) - _pairs(chunk.start - document.start)


def _zigzag(document: range, ranks: int, first_extra: int) -> list[range]:
    """A document's chunks, in its order. Ranks from `first_extra` on get one token more, until all are given.

    So that numbers of tokens stay even, the next document begins with the rank after the last.
    """
    each, extras = divmod(len(document), 2 * ranks)
    sizes = [each] * (2 * ranks)
    for n in range(extras):
        rank = (first_extra + n) % ranks
        sizes[2 * ranks - 1 - rank if n < ranks else rank] += 1
    return list(_cut(document, sizes))


def _cut(document: range, sizes: Iterable[int]) -> Iterable[range]:
    start = document.start
    for size in sizes:
        yield range(start, start + size)
        start += size


def _placed(documents: list[range], room: list[int], work: list[int]) -> list[list[range]]:
    """Documents of each rank, which has room for so many tokens: largest first, to the rank of least work.

    What fits nowhere is cut. Their work is added to `work`.
    """
    found: list[list[range]] = [[] for _ in room]
    left = list(room)
    for document in sorted(documents, key=len, reverse=True):
        rest = document
        while rest:
            fitting = [r for r in range(len(left)) if left[r] >= len(rest)]
            rank = min(fitting, key=lambda r: (work[r], -left[r])) if fitting else left.index(max(left))
            taken = rest[: left[rank]]
            found[rank].append(taken)
            left[rank] -= len(taken)
            work[rank] += _work(document, taken)
            rest = rest[len(taken) :]
    return [sorted(chunks, key=lambda x: x.start) for chunks in found]
