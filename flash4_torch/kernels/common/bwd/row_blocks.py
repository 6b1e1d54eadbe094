"""How the backward's workspaces lie in memory, by blocks of query rows of one head.

Three kernels share them. Each block has, in float32, two or four numbers of each row and the sums of dQ, in
the order that `dq_blocks` gives, and for the deterministic backward an int32, the dQ semaphore.

Rows are padded to whole blocks. Packed sequences begin at whole blocks: sequence b, whose first token is
`start`, at block start // queries + b, which leaves room enough for each of them. So do segments, whose rows
are counted through all batch entries.

Nothing here needs a compiler: hosts use it with ints, kernels with registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .dq_blocks import LANE_ROWS, DqBlocks, DqLanes, bands_of, threads_of

CHUNK = 8
"""Columns of which a thread has two, in each of two rows."""
VECTOR = 4
"""Floats that a thread has of a chunk."""


class RowBlocks(NamedTuple):
    queries: int
    """Rows of a block, a multiple of 64, or 32."""
    columns: int
    """Columns of dQ's sums: D, padded to at least a multiple of 16."""
    tmem_order: bool = False
    """Whether dQ is summed up in TMEM's order."""
    by_register: bool = False
    """Whether neighbouring floats are the same register of neighbouring threads; in Hopper's order."""

    @classmethod
    def of(cls, sums: DqBlocks | DqLanes) -> RowBlocks:
        if isinstance(sums, DqLanes):
            return cls(sums.queries, sums.columns, True)
        return cls(sums.queries, sums.columns, by_register=sums.by_register)

    @property
    def bands(self) -> int:
        return bands_of(self.queries)

    @property
    def threads(self) -> int:
        """Threads that hold a band."""
        return threads_of(self.queries)

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return self.columns // CHUNK

    @property
    def floats(self) -> int:
        """Floats of a block's sums."""
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
        """Index in its block of the four floats that a thread of a band has of a chunk, in Hopper's order.

        Pieces of columns follow one another, so it makes no difference here how many of them a band has.
        """
        return ((band * self.chunks + chunk) * self.threads + thread) * VECTOR

    def register(self, band: Any, chunk: Any, i: int, thread: Any) -> Any:
        """Index in its block of the i-th of these four floats, where the order is `by_register`."""
        return ((band * self.chunks + chunk) * VECTOR + i) * self.threads + thread

    def lane_vector(self, row: Any, j: Any) -> Any:
        """Index in its block of the j-th four columns of a row, in TMEM's order."""
        band = row // LANE_ROWS
        return ((band * (self.columns // VECTOR) + j) * LANE_ROWS + row % LANE_ROWS) * VECTOR


class PreprocessPlan(NamedTuple):
    """What the preprocess kernel is compiled for."""

    dtype: str
    Dv: int
    blocks: RowBlocks
    varlen: bool = False
    dlse: bool = False
    """Whether a gradient arrives at lse."""
    is_ordered: bool = False
    """Whether dQ is summed up in a fixed order: deterministic."""
    negated: bool = False
    """Whether the numbers of a row change sign, so that the main kernel adds them: packed instructions do not
    subtract."""
    clears: bool = True
    """Whether the kernel clears the sums of dQ."""
    large_scores: bool = False
    """Whether a floating mask was added, or score_mod applied. Then each row has two numbers more: lse in
    natural units, and what its rounding took (lse_low)."""
    segments: bool = False
    """Whether sequences are parts of batch entries, and tensors have a batch dimension."""
    stacked: bool = False
    """Whether workspaces have batch entries one after another, as many as make one of theirs."""

    @property
    def is_packed(self) -> bool:
        """Whether tensors have no batch dimension."""
        return self.varlen and not self.segments

    @property
    def stats(self) -> int:
        """Numbers of each row."""
        return 4 if self.large_scores else 2


class PostprocessPlan(NamedTuple):
    """What the postprocess kernel is compiled for."""

    dtype: str
    D: int
    blocks: RowBlocks
    varlen: bool = False
    segments: bool = False
    """Whether sequences are parts of batch entries, and dq has a batch dimension."""
    stacked: bool = False
    """`PreprocessPlan.stacked`."""

    @property
    def is_packed(self) -> bool:
        """Whether tensors have no batch dimension."""
        return self.varlen and not self.segments


class GroupReducePlan(NamedTuple):
    """What the group-reduce kernel, which sums up dK and dV of a group's heads, is compiled for."""

    dtype: str
    D: int
    Dv: int
    varlen: bool = False


class SinksPlan(NamedTuple):
    """What the kernel of the sinks' gradients is compiled for."""

    dtype: str
    """Dtype of the sinks and of their gradients."""
    varlen: bool = False
    negated: bool = False
    """Whether the preprocess kernel has changed the sign of its numbers."""
