"""How dQ is summed up in global memory: blocks of query rows in float32, in the order of accumulators.

A block is `queries` rows of one head. In the order of Hopper's accumulators it is divided into `pieces`,
which are added one by one: bands of 64 rows with all columns, or, where there is one band, ranges of columns.
A piece is what one warpgroup holds as the accumulator of a 64 x `piece_columns` MMA; its floats lie as the
threads hold them (a block of 32 rows is one band, of 64 threads instead of 128):

    float ((piece * registers / 4 + j) * 128 + thread) * 4 + c    is register 4 j + c of that thread,

row `thread // 32 * 16 + thread % 32 // 4 + 8 * (c // 2)` and column `8 * j + thread % 4 * 2 + c % 2` of the
piece. So a piece is one copy of neighbouring bytes, and a warp stores 512 of them at once.

Threads that add their registers themselves add one at a time, each warp to 128 neighbouring bytes:

    float (piece * registers + i) * 128 + thread              is register i of that thread.

In TMEM a thread has neighbouring columns of one row, and a warp has 32 rows, a band. There

    float ((band * columns / 4 + j) * 32 + row % 32) * 4 + c      is column 4 j + c of the row,

and any range of columns of a band is one copy. Nothing here needs a compiler.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

ROWS = 64
"""Rows of a piece."""
THREADS = 128
"""Threads that hold a piece, of at least as many rows."""


LANE_ROWS = 32
"""Rows of a band in TMEM's order."""
VECTOR = 4
"""Neighbouring floats of a row in that order."""


def bands_of(queries: int) -> int:
    """Bands of a block of so many rows."""
    return max(queries // ROWS, 1)


def threads_of(queries: int) -> int:
    """Threads that hold a piece of a block of so many rows."""
    return THREADS * min(queries, ROWS) // ROWS


class DqBlocks(NamedTuple):
    """Blocks of dQ in the order of Hopper's accumulators."""

    D: int
    """Head size of q."""
    queries: int
    """Rows of a block, a multiple of 64, or 32."""
    pieces: int
    by_register: bool = False
    """Whether neighbouring floats are the same register of neighbouring threads."""
    step: int = 16
    """The columns of a part are a multiple of this. If it is 32, for float32, a thread's columns of every 32
    are neighbours, as in `warp_tf32.accumulate`."""

    @property
    def bands(self) -> int:
        return bands_of(self.queries)

    @property
    def threads(self) -> int:
        """Threads that hold a piece."""
        return threads_of(self.queries)

    @property
    def parts(self) -> int:
        """Ranges of columns of a band."""
        return max(self.pieces // self.bands, 1)

    @property
    def columns(self) -> int:
        """D, padded so that every part is a multiple of `step` columns."""
        return -(-self.D // (self.step * self.parts)) * self.step * self.parts

    @property
    def piece_columns(self) -> int:
        return self.columns // self.parts

    @property
    def filled_parts(self) -> int:
        """Parts that have columns of q, and not only padding."""
        return -(-self.D // self.piece_columns)

    @property
    def registers(self) -> int:
        """Registers of a piece, in each thread."""
        return ROWS * self.piece_columns // THREADS  # of 32 rows half as many threads have as many

    @property
    def floats(self) -> int:
        """Floats of a block."""
        return self.queries * self.columns

    def place(self, row: int, column: int) -> int:
        """Index in the block of the number at this row and column."""
        band, row = divmod(row, ROWS)
        part, column = divmod(column, self.piece_columns)
        warp, row = divmod(row, 16)
        lower, group = divmod(row, 8)
        if self.step == 32:
            chunk, column = divmod(column, 32)
            own, column = divmod(column, 8)
            column = chunk * 32 + column % 4 * 8 + 2 * own + column // 4
        j, column = divmod(column, 8)
        thread = warp * 32 + group * 4 + column // 2
        piece = band * self.parts + part
        if self.by_register:
            return (piece * self.registers + 4 * j + 2 * lower + column % 2) * self.threads + thread
        return ((piece * (self.registers // 4) + j) * self.threads + thread) * 4 + 2 * lower + column % 2


class DqLanes(NamedTuple):
    """Blocks of dQ in TMEM's order."""

    D: int
    """Head size of q."""
    queries: int
    """Rows of a block, a multiple of 32."""
    step: int = 16
    """`columns` is a multiple of this."""

    @property
    def columns(self) -> int:
        """D, padded."""
        return -(-self.D // self.step) * self.step

    @property
    def floats(self) -> int:
        """Floats of a block."""
        return self.queries * self.columns

    def place(self, row: int, column: int) -> int:
        """Index in the block of the number at this row and column."""
        band, row = divmod(row, LANE_ROWS)
        j, c = divmod(column, VECTOR)
        return ((band * (self.columns // VECTOR) + j) * LANE_ROWS + row) * VECTOR + c


class DqConfig(Protocol):
    """What the layout depends on: with wgmma's order `dq_pieces`, too, with TMEM's `column_step`."""

    @property
    def tmem_order(self) -> bool: ...

    @property
    def dq_by_register(self) -> bool: ...

    @property
    def queries(self) -> int: ...


def sums_of(D: int, config: DqConfig, step: int = 16) -> DqBlocks | DqLanes:
    """The layout in which a backward kernel of that config sums up dQ, for head size D.

    step: what the columns of a part are a multiple of, in the order of accumulators.
    """
    if config.tmem_order:
        return DqLanes(D, config.queries, config.column_step)
    return DqBlocks(D, config.queries, config.dq_pieces, config.dq_by_register, step)
