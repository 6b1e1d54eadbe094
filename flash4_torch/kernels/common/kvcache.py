"""What the kernels around a KV cache are compiled for.

Nothing here needs a compiler: hosts make these plans.
"""

from __future__ import annotations

from typing import NamedTuple

FLOAT8 = "float8_e4m3fn"
NUMBERS_STEP = 8
"""Numbers of float32 that the widest load has, Blackwell's: results of a split begin at a multiple of it."""


class RotaryPlan(NamedTuple):
    """The rotary embedding of K, and of Q if there is one."""

    columns: int
    """The first columns of a head, which it rotates: a multiple of 16, interleaved of 8."""
    interleaved: bool
    """Whether neighbouring columns are a pair; else column i and i + columns / 2 are."""
    dtype: str
    """Dtype of cos and sin."""
    positions: str = ""
    """Dtype of positions; without them a key's place in its sequence is its position."""
    q: bool = False
    """Whether Q is rotated, too."""

    @property
    def vector(self) -> int:
        """Cosines that a load brings, at most 16 bytes: rows of cos and sin begin at multiples of it."""
        return 4 if self.interleaved or self.dtype == "float32" else 8


class AppendPlan(NamedTuple):
    """What the kernel that appends to a KV cache is compiled for."""

    dtype: str
    """Dtype of K, V and Q, 16 bits wide."""
    D: int
    Dv: int
    cache_dtype: str = ""
    """`FLOAT8`, or empty if the cache has the dtype of K."""
    slots: str = ""
    """Dtype of slot_mapping; empty if sequences and their lengths say where keys go."""
    paged: bool = False
    """Whether a block table names the pages of a sequence; only without slots."""
    packed: bool = False
    """Whether cu_seqlens divides the tokens among sequences; only without slots."""
    k_scaled: bool = False
    """Whether K is divided by a scale of its head; only for `FLOAT8`."""
    v_scaled: bool = False
    rotary: RotaryPlan | None = None
    converts_fp8: bool = True
    """Whether one instruction rounds two numbers to `FLOAT8`; True without it."""

    @property
    def float8(self) -> bool:
        return self.cache_dtype == FLOAT8


class MergePlan(NamedTuple):
    """What the kernel that merges partial results is compiled for."""

    dtype: str
    Dv: int
    tensors: int = 1
    """Tensors that the parts come in, each with any number of them."""
    out_dtype: str = ""
    """Dtype of the result; empty if it is that of the parts."""
    varlen: bool = False
    """Whether rows are those of packed sequences; others are left alone."""
    lanes: int = 1
    """Threads that divide the parts of a vector of the result, a power of two up to 32."""
    has_low: bool = False
    """Whether each lse comes with its rounding error, and the result's leaves with its own."""
