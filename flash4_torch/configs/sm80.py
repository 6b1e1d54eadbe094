"""The tiles of the forward by mma.sync: which to take for which call, and why.

There are three tables: `ON_REQUEST` for GPUs with kernels of their own, and two by how much shared memory a
CTA may have: `LARGE` (compute capability 8.0, 8.7 and all that have more) and `SMALL` (8.6, 8.9, 12.0, 12.1).
A table's rows are read from the top: the first one that admits the call serves it. No GPU of the family has
timed any of them, an H200 some. What a row says is what these times and ptxas said, and what follows from
these numbers of an SM: 64 K registers; of shared memory 164 KiB (8.0, 8.7) or 100 KiB, of which each CTA
takes 1 KiB more than it asks for; and 4 tensor cores, which want at least two warps each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .packing import best_pack, possible_packs, rows_that_share_keys
from .sizes import Sizes, may_end_inside, possible_ends
from .types import (
    LARGE_BYTES,
    RESERVED_BYTES,
    SHARED_MEMORY,
    SMALL_BYTES,
    Features,
    Sm80Forward,
    tile_dim,
)

_ACCUMULATORS = 160
_ACCUMULATORS_WITH_MORE = 144
_ACCUMULATORS_WITH_MODS, _KEYS_WITH_MODS, _KEYS_WITH_MODS_AND_DROPOUT = 128, 3, 5
_ACCUMULATORS_OF_TWO_MMAS, _ACCUMULATORS_OF_TWO_MMAS_WITH_MORE = 160, 128
_ACCUMULATORS_OF_TWO_MMAS_WITH_DROPOUT, _KEYS_OF_TWO_MMAS_WITH_DROPOUT = 144, 32
_ACCUMULATORS_WITH_LAZY_RESCALE = 192
_ACCUMULATORS_AND_KEYS = 160
"""Registers that O and S may take next to what else a thread needs: fitted to what spilled. The last limit is
for dropout, where a block's keys count three times."""


_FEWEST_KEYS = 16
"""Keys of the tiles that admit all features."""


class Row(NamedTuple):
    """A row for head sizes up to (D, Dv). None: whatever the call has."""

    D: int
    Dv: int
    rows: int | None
    """Up to this many query rows that share keys: Sq, times the heads of a group where these are packed."""
    config: Sm80Forward
    why: str

    def admits(self, features: Features, rows: int) -> bool:
        return self.admits_features(features) and (self.rows is None or rows <= self.rows)

    def admits_features(self, features: Features) -> bool:
        return features.D <= self.D and features.Dv <= self.Dv and has_registers(features, self.config)


# fmt: off
_Tiles = Sm80Forward
_FEW = "rows of further warps would be empty"
_OF_64 = (
    # D   Dv   rows
    Row(64, 64, 64, _Tiles(4, 1, 64, 2), _FEW),
    Row(64, 64, None, _Tiles(4, 2, 64, 2),
        "what is read of K and V serves 32 rows: SMEM is read half as much; 48 KiB, two CTAs to an SM"),
    Row(64, 64, None, _Tiles(4, 2, 64, 2, lazy_rescale=True),
        "dropout: 848 instructions and 42 ldmatrix for 32 x 64 scores, 960 and 74 with 16 rows to a warp; on "
        "an H200 1.05 to 1.08 times as fast as where O is always rescaled"),
    Row(64, 64, None, _Tiles(4, 1, 64, 2), "features that need registers: 32 rows of a warp spill"),
)
_OF_96 = (
    Row(96, 96, 64, _Tiles(4, 1, 64, 2), _FEW),
    Row(96, 96, None, _Tiles(4, 2, 64, 2),
        "72 KiB, two CTAs to an SM; on an H200 causal 1.03 times as fast as the next one, full 0.98, 1.01"),
    Row(96, 96, None, _Tiles(4, 2, 64, 1),
        "48 KiB, two CTAs to an SM, on an H200 1.03 to 1.11 of FlashAttention-2; 8 warps 0.77 to 0.84"),
)
_OF_128 = (
    Row(128, 128, 64, _Tiles(4, 1, 64, 2), _FEW),
    Row(128, 128, None, _Tiles(8, 1, 64, 2), "96 KiB; features that need registers: 32 rows of a warp spill"),
)
_TWO_MMAS_OF_128 = (
    Row(128, 128, None, _Tiles(4, 2, 64, 1, lazy_rescale=True),
        "64 KiB, two CTAs to an SM; on an H200 1.00 to 1.24 of FlashAttention-2, where 32 keys have 0.94 to "
        "1.06 and 8 warps 0.87 to 0.94"),
    Row(112, 128, None, _Tiles(4, 2, 32, 2),
        "64 KiB, too: at this D 64 keys spill in causal kernels, and with dropout already at D 96"),
)
_DROPOUT_AND_MORE = Row(
    256, 256, None, _Tiles(8, 1, 16, 2), "dropout with more: 32 keys spill in some kernels"
)
_WHY_LAZY = "dropout: up to 16 spills where O is always rescaled; with fewer keys 1.2 to 1.5 times as slow"
_WHY_SHARED, _WHY_128 = (f"a warp has registers for {n} columns of O" for n in (256, 128))
_LARGE = (
    *_OF_64,
    *_OF_96,
    _OF_128[0],
    *_TWO_MMAS_OF_128,
    *_OF_128[1:],
    Row(192, 192, 64, _Tiles(4, 1, 64, 1), _FEW),
    Row(192, 192, None, _Tiles(8, 1, 64, 2), "144 KiB: one CTA to an SM, with one stage as with two"),
    Row(192, 192, None, _Tiles(8, 1, 64, 2, lazy_rescale=True), _WHY_LAZY),
    Row(256, 256, 64, _Tiles(4, 1, 64, 1), _FEW),
    Row(256, 256, None, _Tiles(8, 1, 64, 1), "128 KiB; two stages have no room"),
    Row(256, 256, None, _Tiles(8, 1, 32, 2), "features that need registers: 64 and 48 keys spill"),
    Row(256, 256, None, _Tiles(8, 1, 64, 1, lazy_rescale=True), _WHY_LAZY),
    _DROPOUT_AND_MORE,
    Row(384, 384, None, _Tiles(8, 1, 32, 2, column_warps=2), f"148 KiB; {_WHY_SHARED}"),
    Row(512, 512, None, _Tiles(8, 1, 32, 1, column_warps=2), f"132 KiB; {_WHY_SHARED}"),
)
_SMALL = (
    *_OF_64,
    _OF_96[0],
    Row(96, 96, None, _Tiles(4, 2, 32, 2),
        "48 KiB, two CTAs to an SM; with 64 keys 2 spills for sm_120a; on an H200 0.94 to 1.01"),
    *_OF_128,
    Row(192, 192, 64, _Tiles(4, 1, 64, 1), _FEW),
    Row(192, 192, None, _Tiles(8, 1, 64, 1), "96 KiB: two stages have no room"),
    Row(256, 256, 64, _Tiles(4, 1, 32, 1), _FEW),
    Row(256, 256, None, _Tiles(8, 1, 32, 1), "96 KiB; 64 keys have room only in tiles of 64 rows"),
    Row(256, 256, None, _Tiles(8, 1, 32, 1, lazy_rescale=True), _WHY_LAZY),
    _DROPOUT_AND_MORE,
    Row(512, 512, None, _Tiles(4, 1, 32, 1, column_warps=2), f"98 KiB; {_WHY_SHARED}"),
)

_WHY_FEWEST = "TF32 with a floating mask, softcap and dropout: 25 spills of 32 keys for sm_120a"
_FLOAT32_64 = (
    Row(64, 64, None, _Tiles(4, 2, 32, 2), "TF32: what is read of K and V serves 32 rows; 64 keys spill"),
    Row(64, 64, None, _Tiles(4, 1, 64, 2), "80 KiB; with three products 32 rows of a warp spill"),
    Row(64, 64, None, _Tiles(4, 1, 32, 2), "features that need registers"),
)
_FLOAT32_LARGE = (
    *_FLOAT32_64,
    Row(128, 128, 64, _Tiles(4, 1, 32, 2), _FEW),
    Row(128, 128, None, _Tiles(8, 1, 32, 2), "128 KiB; 64 keys spill with three products"),
    Row(128, 128, None, _Tiles(8, 1, 16, 2), _WHY_FEWEST),
    Row(192, 192, None, _Tiles(8, 1, 32, 2, column_warps=2), _WHY_128),
    Row(256, 256, None, _Tiles(8, 1, 32, 1, column_warps=2), _WHY_128),
)
_FLOAT32_SMALL = (
    *_FLOAT32_64,
    Row(128, 128, None, _Tiles(4, 1, 32, 2), "96 KiB"),
    Row(128, 128, None, _Tiles(4, 1, 16, 2), _WHY_FEWEST),
    Row(192, 192, None, _Tiles(4, 1, 32, 1, column_warps=2), _WHY_128),
)
# fmt: on


class Table(NamedTuple):
    rows: tuple[Row, ...]
    float32: tuple[Row, ...]
    shared_memory: int
    """Bytes that a CTA may have."""
    keeps_chunks_apart: bool = True
    """Whether kernels of three products that spill otherwise have `chunks_apart`."""
    splits_q_within: int = 0
    """Bytes of an SM's shared memory in which Q of three products is split once for a tile, where as many
    CTAs have room as without."""
    reads_ahead: bool = False
    """Whether float32 operands are read a step ahead of their MMAs where that is faster."""

    def forward(self, features: Features, sizes: Sizes) -> Sm80Forward:
        """The config of a call, whatever the number of tiles: see `configs.sm90.forward`."""
        config = self.row(features, sizes).config
        ragged_k = may_end_inside(features, sizes, config.keys)
        return self.completed(features, config, ragged_k, best_pack(features, config.rows, sizes))

    def row(self, features: Features, sizes: Sizes) -> Row:
        """The row that serves a call: see `forward`."""
        rows = rows_that_share_keys(features, sizes)
        return next(r for r in self.rows_of(features) if r.admits(features, rows))

    def rows_of(self, features: Features) -> tuple[Row, ...]:
        """The rows for the features' dtype."""
        return self.float32 if features.is_float32 else self.rows

    def limits(self, features: Features) -> list[str]:
        """Why no row serves the features, whose head sizes may be any."""
        most = max(row.D for row in self.rows_of(features))
        heads = f"D is {features.D} and Dv is {features.Dv}"
        if max(features.D, features.Dv) > most:
            return [f"{heads}, and it serves up to {most}" + " of float32" * features.is_float32]
        if any(row.admits_features(features) for row in self.rows_of(features)):
            return []
        asked = {"softcap": features.softcap, "dropout": features.dropout, "attn_mask": features.mask}
        what = ", ".join(name for name, is_asked in asked.items() if is_asked)
        return [f"{heads}, and {features.dtype} with these features ({what}) has no registers for so many"]

    def reachable(self, features: Features, group: int | None = None) -> tuple[Sm80Forward, ...]:
        """Every config that `forward` returns for some sizes; with `group`, for that many heads of a KV
        head.
        """
        ragged = possible_ends(features)
        found = {
            self.completed(features, row.config, ragged_k, pack_gqa): None
            for row in self.rows_that_serve(features)
            for ragged_k in ragged
            for pack_gqa in possible_packs(features, group)
        }
        return tuple(found)

    def completed(
        self, features: Features, config: Sm80Forward, ragged_k: bool, pack_gqa: int
    ) -> Sm80Forward:
        """A row's config for one call."""
        f, ragged_k = features, ragged_k or _serves_any_length(features, config)
        config = config._replace(ragged_k=ragged_k, pack_gqa=pack_gqa)
        # Others have eight warps: for sm_80 none spills.
        may_spill = config.warps < 8 or pack_gqa > 1 or (f.varlen and not (f.left or f.right))
        apart = self.keeps_chunks_apart and may_spill
        # Next to these 32 keys have no registers otherwise, on no GPU; 16 take 1.2 times as long.
        has_more = bool(f.mask or f.softcap or f.dropout or f.sinks)
        is_wide = f.is_exact and config.column_warps == 1 and tile_dim(f.Dv) > 64
        ahead = self.reads_ahead and _is_faster_ahead(f, config)
        config = config._replace(chunks_apart=is_wide and (apart or has_more), reads_ahead=ahead)
        split = config._replace(splits_q=True)
        # Of threads of three products an SM has registers for eight warps.
        ctas, ctas_if_split = (
            min(self.splits_q_within // (c.shared_memory(f) + RESERVED_BYTES), 8 // c.warps)
            for c in (config, split)
        )
        # 64 keys leave no registers for masks next to sinks.
        can_split = f.is_exact and config.keys <= 32
        return split if can_split and ctas_if_split and ctas_if_split >= ctas else config

    def fits(self, features: Features, config: Sm80Forward) -> bool:
        """Whether the GPU has room for it, in shared memory and in registers."""
        return has_registers(features, config) and config.shared_memory(features) <= self.shared_memory

    def rows_that_serve(self, features: Features) -> Iterator[Row]:
        """The rows that admit the features, up to the first one that admits any number of rows."""
        for row in self.rows_of(features):
            if row.admits_features(features):
                yield row
                if row.rows is None:
                    return


LARGE = Table(_LARGE, _FLOAT32_LARGE, LARGE_BYTES)
SMALL = Table(_SMALL, _FLOAT32_SMALL, SMALL_BYTES)
ON_REQUEST = LARGE._replace(
    keeps_chunks_apart=False, splits_q_within=SHARED_MEMORY + RESERVED_BYTES, reads_ahead=True
)
"""The table of GPUs with kernels of their own: on an H200 branches cost 6 to 20 % of a forward."""


def _is_faster_ahead(features: Features, config: Sm80Forward) -> bool:
    """Whether operands that are read ahead make a forward faster: not with scores of up to 64 columns, which
    have no loop, nor for single products of up to 128, which took 2 to 5 % longer. Splits of up to 128 spill
    5 to 10 times for sm_100a.
    """
    f = features
    has_loop = f.is_exact and f.D > 64 and not f.splits
    return f.is_float32 and (config.column_warps > 1 or has_loop)


def _serves_any_length(features: Features, config: Sm80Forward) -> bool:
    """Whether one kernel (with ragged_k) serves every Sk. Without the branch that masks the ragged end, few
    warps at Dv 256 spill 2 times (sm_86, sm_89), and dropout with 32 rows to a warp 16 to 67 times.
    """
    f, c = features, config
    has_few_warps = c.warps < 8 and c.column_warps == 1 and c.keys == 32 and f.Dv > 192
    drops = f.dropout and c.row_mmas > 1 and not c.lazy_rescale and not (f.left or f.right)
    return has_few_warps or drops


def _drops_many_keys(features: Features, config: Sm80Forward) -> bool:
    """Whether it is a kernel of dropout, a band and no other feature, which has registers for more keys than
    others with dropout; above 128 columns next to a branch around rescaling.
    """
    f, c, D, Dv = features, config, tile_dim(features.D), tile_dim(features.Dv)
    others = f.mask or f.softcap or f.sinks or f.varlen or f.scaled or f.dropout_of_part or any(f.mods)
    if not f.dropout or f.is_float32 or others:
        return False
    if c.row_mmas > 1:
        return D == Dv == 96 and (c.keys, c.kv_stages) == (64, 1) and not c.lazy_rescale
    return c.lazy_rescale and D == Dv > 128


def has_registers(features: Features, config: Sm80Forward) -> bool:
    """Whether a thread has registers for it.

    16 rows are a warp's, so that each column of O and of S costs half a register.
    """
    if features.is_float32:
        return _has_registers_float32(features, config)
    if _drops_many_keys(features, config):
        return True
    f, Dv, keys = features, tile_dim(features.Dv) // config.column_warps, config.own_keys
    if config.column_warps > 1 and Dv > 192 and f.dropout and f.mask and f.softcap:
        return False
    if config.row_mmas > 1:
        plain = not (f.mask or f.softcap or any(f.mods))
        if config.kv_stages > 1 and keys > 32 and max(tile_dim(f.D), Dv) > 64 and (f.dropout or f.varlen):
            return False  # 4 to 26 spills
        accumulators = config.row_mmas * (Dv + keys) // 2
        if config.lazy_rescale and max(tile_dim(f.D), Dv) <= 64:
            return plain
        if config.lazy_rescale:
            spills = f.float_mask or any(f.mods) or bool(f.mask and f.softcap and f.dropout)
            spills = spills or tile_dim(f.D) < 128 or (Dv < 128 and (f.scaled or f.dropout))
            return not spills and accumulators <= _ACCUMULATORS_WITH_LAZY_RESCALE
        if f.dropout:
            few_keys = keys <= _KEYS_OF_TWO_MMAS_WITH_DROPOUT
            return plain and few_keys and accumulators <= _ACCUMULATORS_OF_TWO_MMAS_WITH_DROPOUT
        if f.varlen and f.sinks:
            return plain and accumulators <= _ACCUMULATORS_OF_TWO_MMAS_WITH_MORE
        return plain and accumulators <= _ACCUMULATORS_OF_TWO_MMAS
    if config.lazy_rescale:
        return False
    if any(f.mods):
        times = _KEYS_WITH_MODS_AND_DROPOUT if f.dropout else _KEYS_WITH_MODS
        return (Dv + times * keys) // 2 <= _ACCUMULATORS_WITH_MODS or keys == _FEWEST_KEYS
    if f.dropout:
        fits = (Dv + 3 * keys) // 2 <= _ACCUMULATORS_AND_KEYS
        return fits and not ((f.float_mask or (f.mask and f.softcap)) and Dv > 128 and keys > 16)
    if f.float_mask and f.right and (config.warps < 8 or config.kv_stages == 1) and Dv > 128 and keys > 32:
        return False  # 6 and 13 spills; four warps copy twice as many rows each
    if f.float_mask and f.softcap and Dv > 192 and keys > 16:
        return False  # 8 spills for sm_80
    if f.right and not f.left and config.warps < 8 and Dv > 192 and keys == 32:
        return False  # 8 and 10 spills for sm_86 and sm_89
    more = f.float_mask or f.softcap or (f.varlen and f.sinks)
    return (Dv + keys) // 2 <= (_ACCUMULATORS_WITH_MORE if more else _ACCUMULATORS)


def _has_registers_float32(features: Features, config: Sm80Forward) -> bool:
    """The same for float32, of which three products take twice as many sums: what did not spill."""
    shared = config.column_warps
    f, keys, wide = features, config.own_keys, max(features.D // shared, features.Dv // shared) > 64
    if config.row_mmas > 1:
        return f.tf32 and keys <= 32 and not (wide or f.dropout or (f.mask and f.sinks))
    if f.tf32:
        # 25 spills for sm_120a at D 112 with all three.
        return keys <= (16 if f.float_mask and f.softcap and f.dropout else 32) or not wide
    if not wide:
        return keys <= 32 or not f.dropout
    plain = shared == 1 or not (f.mask or f.dropout or f.sinks)
    return keys <= 16 + 16 * plain
