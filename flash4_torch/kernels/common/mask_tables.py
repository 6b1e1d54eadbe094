"""The tables that describe an attn_mask to the kernels: where they lie in one buffer of 32-bit words.

For a mask (Bm, Hm, Sqm, Sk), whose first three dimensions may be 1, there are three tables, one after the
other:

    bits    (Bm, Hm, Sqm, NB, panels, 4)  bool masks only: which keys a row sees, 128 keys to a panel
    blocks  (Bm, HB, MB, NB)              the visible blocks in ascending order, as 2 n + partial
    rank    (Bm, HB, MB, NB + 1)          rank[n] = how many visible blocks come before block n

Tables of one row of blocks, 2 NB + 1 words, stand for those of a floating mask whose rows are all the same.

A block is a tile of the kernel: `rows` queries of `heads` heads by `keys` keys. It is visible if any of its
query-key pairs is, and partial if the mask masks a pair or adds something other than 0. Keys beyond Sk count
for neither, and their bits are 0.

Word p of a panel holds the keys k of the panel with k % 8 // 2 == p, in bit 2 (k // 8) + k % 2: a thread of a
wgmma accumulator needs one word.

Nothing here needs a compiler: hosts use it with ints, kernels with registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

PANEL = 128
"""Keys whose bits lie together, in four words."""


class MaskPlan(NamedTuple):
    """What the kernels that write and read the tables are compiled for."""

    dtype: str
    """Dtype of the mask: "bool", "bfloat16", "float16" or "float32"."""
    rows: int
    """Queries in a block, any number; if Sqm is 1, one makes the same tables faster."""
    keys: int
    """Keys in a block, a multiple of 16 up to 256."""
    heads: int = 1
    """Query heads in a block, neighbours that divide Hm: more than 1 where heads are packed into a tile."""
    column_major: bool = False
    """Floating masks: whether rows are expected to be neighbours in memory, rather than keys."""

    @property
    def panels(self) -> int:
        return -(-self.keys // PANEL)


class Tables(NamedTuple):
    """Sizes of the tables, and the word at which each starts; ints, or a kernel's registers."""

    HB: Any
    MB: Any
    NB: Any
    bits: Any
    blocks: Any
    rank: Any
    words: Any
    """Words of the whole buffer."""


def place(plan: MaskPlan, Bm: Any, Hm: Any, Sqm: Any, Sk: Any) -> Tables:
    """The tables for a mask of these sizes, all at least 1."""
    HB, MB, NB = _ceil(Hm, plan.heads), _ceil(Sqm, plan.rows), _ceil(Sk, plan.keys)
    blocks = Bm * Hm * Sqm * NB * (4 * plan.panels) if plan.dtype == "bool" else 0
    rank = blocks + Bm * HB * MB * NB
    return Tables(HB, MB, NB, 0, blocks, rank, rank + Bm * HB * MB * (NB + 1))


def _ceil(n: Any, size: int) -> Any:
    return (n + (size - 1)) // size
