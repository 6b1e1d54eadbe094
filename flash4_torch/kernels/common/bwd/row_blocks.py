"""How the backward's workspaces lie in memory, by blocks of query rows of one head.

Three kernels share them. Of every block there are, in float32, two or four numbers of each row and the sums
of dQ, in the order that `dq_blocks` gives them, and for the deterministic backward an int32, whose turn it
is.

Rows are filled up to whole blocks. Packed sequences begin at whole blocks: sequence b, whose first token is
`start`, at block start // queries + b, which leaves each of them room enough.

Nothing here needs a compiler: hosts use it with ints, kernels with registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .dq_blocks import LANE_ROWS, ROWS, THREADS, DqBlocks, DqLanes

CHUNK = 8
"""Columns of which a thread has two, of two rows."""
VECTOR = 4
"""Floats: those."""


class RowBlocks(NamedTuple):
    queries: int
    """Rows of a block, a multiple of 64."""
    columns: int
    """Of the sums of a row: D, filled up to at least a multiple of 16."""
    tmem_order: bool = False
    """Whether dQ is summed up in the order of tensor memory."""

    @classmethod
    def of(cls, sums: DqBlocks | DqLanes) -> RowBlocks:
        return cls(sums.queries, sums.columns, isinstance(sums, DqLanes))

    @property
    def bands(self) -> int:
        return self.queries // ROWS

    @property
    def chunks(self) -> int:
        """Of a row."""
        return self.columns // CHUNK

    @property
    def floats(self) -> int:
        """Of a block's sums."""
        return self.queries * self.columns

    def count(self, Sq: Any) -> Any:
        """Blocks of a sequence."""
        return (Sq + (self.queries - 1)) // self.queries

    def packed_count(self, T: Any, B: Any) -> Any:
        """Room for the blocks of B packed sequences that have T rows together."""
        return T // self.queries + B

    def first(self, start: Any, b: Any) -> Any:
        """The first block of packed sequence b."""
        return start // self.queries + b

    def vector(self, band: Any, chunk: Any, thread: Any) -> Any:
        """Where in its block the four floats start that a thread of 128 has of a chunk, in Hopper's order.

        Pieces of columns follow one another, so it makes no difference here in how many of them a band is.
        """
        return ((band * self.chunks + chunk) * THREADS + thread) * VECTOR

    def lane_vector(self, row: Any, j: Any) -> Any:
        """Where in its block the j-th four columns of a row start, in the order of tensor memory."""
        band = row // LANE_ROWS
        return ((band * (self.columns // VECTOR) + j) * LANE_ROWS + row % LANE_ROWS) * VECTOR


class PreprocessPlan(NamedTuple):
    """What the kernel before the backward's main one is compiled for."""

    dtype: str
    Dv: int
    blocks: RowBlocks
    varlen: bool = False
    dlse: bool = False
    """A gradient arrives at lse."""
    is_ordered: bool = False
    """Sums are added in turns: deterministic."""
    negated: bool = False
    """Both numbers of a row change sign: what is then added, packed instructions do not subtract."""
    clears: bool = True
    """The sums of dQ."""
    float_mask: bool = False
    """A floating mask was added: lse in natural units and what its rounding took are two numbers more."""

    @property
    def stats(self) -> int:
        """Numbers of each row."""
        return 4 if self.float_mask else 2


class PostprocessPlan(NamedTuple):
    """What the kernel behind the main one is compiled for."""

    dtype: str
    D: int
    blocks: RowBlocks
    varlen: bool = False


class GroupReducePlan(NamedTuple):
    """What the kernel that adds up dK and dV of a group's heads is compiled for."""

    dtype: str
    D: int
    Dv: int
    varlen: bool = False
