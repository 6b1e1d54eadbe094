"""The tiles of the backward by mma.sync: which to take for which call, and why.

As for the forward (`configs.sm80`) there are tables by how much shared memory a CTA may have, and one for
GPUs with kernels of their own. The first row that admits the call serves it. No GPU of the family has timed
any of them: what a row says is what ptxas and an H200 said, and what follows from the sizes of shared memory
and of the register file.
"""

from __future__ import annotations

from typing import NamedTuple

from .sections import Section, Workload, bounded_backward
from .sizes import BackwardSizes, may_end_inside
from .types import LARGE_BYTES, SHARED_MEMORY, SMALL_BYTES, Features, Sm80Backward, tile_dim

_ORDERED, _ORDERED_IF_BOUNDED = 12, 32
"""KV heads of a section of the deterministic backward: those that Hopper was measured with."""


MAX_D, MAX_FLOAT32_D = 512, 256
"""The widest heads of all."""
_NARROW, _NARROW_FLOAT32 = 256, 128
"""Wider heads than these have rows of their own."""
MAX_D_WITH_MORE = 192
"""The widest heads with features for which wider ones have no registers in blocks of 64 queries."""


class Row(NamedTuple):
    """A row for head sizes up to (D, Dv)."""

    D: int
    Dv: int
    config: Sm80Backward
    why: str
    least: int = 0
    """Bytes of shared memory that a CTA must be allowed, though it may need less."""

    def config_of(self, features: Features, shared_memory: int, ragged_k: bool = True) -> Sm80Backward | None:
        """The config that serves the features, with rounded weights if they need registers, or None."""
        if features.D > self.D or features.Dv > self.Dv or shared_memory < self.least:
            return None
        config = _with_tail(features, self.config, ragged_k)
        both = (config._replace(round_weights=rounded) for rounded in (False, True))
        return next((config for config in both if fits(features, config, shared_memory)), None)


_Tiles = Sm80Backward
_PARTS = _Tiles(4, 1, 64, 2, key_mmas=2, query_parts=2, dq_row_mmas=2)
_TWO_MMAS = _Tiles(8, 2, 64, 2, key_mmas=2)
_OWN_IN_REGS = _TWO_MMAS._replace(own_in_regs=True, dq_row_mmas=2)

# fmt: off
_TABLE = (
    # D   Dv
    Row(64, 64, _PARTS, "81 KiB: two CTAs to an SM; on an H200 1.19 to 1.25 times as fast as 16 keys a warp",
        LARGE_BYTES),
    Row(64, 64, _PARTS._replace(scores_by_parts=True),
        "what spills without the loop; on an H200 1.03 to 1.18 times as fast as 16 keys a warp",
        LARGE_BYTES),
    Row(64, 64, _Tiles(4, 1, 64, 2), "56 KiB: two CTAs to an SM; on an H200 1.01 to 1.08 times as fast",
        LARGE_BYTES),
    Row(64, 64, _Tiles(8, 1, 64, 2), "80 KiB: 128 keys for each block of rows, two warps a tensor core"),
    Row(64, 64, _TWO_MMAS,
        "masks, 98 to 162 KiB: of 64 queries and keys 320 ldmatrix, where 16 keys to a warp have 496"),
    Row(64, 64, _Tiles(8, 2, 64, 2), "features that need registers: 2 to 31 spills with 128 keys"),
    Row(128, 128, _OWN_IN_REGS._replace(copies_after_scores=True),
        "162 KiB, as the next one; a warp begins S before all warps have used the block before"),
    Row(128, 128, _OWN_IN_REGS,
        "162 KiB: a warp has 136 ldmatrix a block at D 128, 108 at D 96; with its own P and dS from SMEM, "
        "and 16 rows of dQ, 160 and 120"),
    Row(128, 128, _TWO_MMAS,
        "what spills then: Q and dO are read for 32 keys; on an H200 1.24 to 1.46 times as fast as for 16"),
    Row(128, 128, _TWO_MMAS._replace(stages=1),
        "floating masks, 145 KiB: of 64 queries and keys 656 ldmatrix, where 16 keys to a warp have 880",
        LARGE_BYTES),
    Row(128, 128, _Tiles(8, 2, 64, 2), "112 KiB; with 16 keys to a warp, 4 to 62 spills from 96 columns on"),
    Row(128, 128, _Tiles(8, 2, 64, 1), "80 KiB: two stages have no room"),
    Row(192, 192, _Tiles(8, 4, 64, 2, key_mmas=2, own_in_regs=True, copies_after_scores=True, dq_row_mmas=2),
        "162 KiB: Q and dO are read for 32 keys; on an H200 1.10 to 1.17 times as fast as for 16"),
    Row(192, 192, _Tiles(8, 4, 64, 2, key_mmas=2), "162 KiB: masks; on an H200 1.09 to 1.15 times as fast"),
    Row(192, 192, _Tiles(8, 2, 64, 2), "160 KiB: dK and dV of 16 keys fit the registers of two warps"),
    Row(256, 256, _Tiles(8, 4, 64, 1, key_mmas=2, own_in_regs=True),
        "145 KiB; with its own P and dS from SMEM 0.97 times as fast"),
    Row(256, 256, _Tiles(8, 4, 64, 1, key_mmas=2),
        "145 KiB: Q and dO are read for 32 keys; on an H200 1.46 to 1.54 times as fast as for 16"),
    Row(256, 256, _Tiles(8, 4, 64, 1), "104 KiB, 80 KiB up to 192 columns; with 64 keys 7 to 36 spills"),
    Row(256, 256, _Tiles(4, 4, 64, 1), "84 KiB: 32 keys have no room"),
    Row(256, 256, _Tiles(8, 4, 32, 1), "68 KiB: features that need registers"),
)
_FLOAT32 = (
    Row(64, 64, _Tiles(8, 2, 64, 2), "128 KiB; with 16 keys to a warp, 160 spills and more"),
    Row(64, 64, _Tiles(8, 2, 64, 1), "96 KiB: two stages have no room"),
    Row(64, 64, _Tiles(4, 2, 64, 1), "73 KiB: nor have 64 keys and a floating mask"),
    Row(128, 128, _Tiles(8, 4, 64, 1, key_mmas=2),
        "162 KiB, 178 with a floating mask: numbers of Q and dO are split for 32 keys; on an H200 1.15 to "
        "1.2 times as fast as for 16"),
    Row(128, 128, _Tiles(8, 4, 64, 1), "112 KiB; two warps to 16 keys 2 to 36 spills"),
    Row(128, 128, _Tiles(8, 4, 32, 1), "73 KiB: 64 queries have no room"),
)
_WIDE = (
    Row(320, 320, _Tiles(8, 4, 64, 1, key_mmas=2),
        "176 KiB: Q, dO and dQ move once for 64 keys, and of 64 queries and keys there are 1900 ldmatrix; "
        "with 32 keys 2500"),
    Row(512, 512, _Tiles(8, 4, 64, 1),
        "200 KiB, 152 KiB up to 384 columns: registers have room for dK and dV of 32 keys"),
    Row(512, 512, _Tiles(8, 4, 32, 1), "133 KiB, 84 KiB up to 320 columns: 64 queries have no room"),
    Row(512, 512, _Tiles(4, 4, 32, 1), "99 KiB: nor have 32 keys"),
)
_WIDE_FLOAT32 = (
    Row(192, 192, _Tiles(8, 2, 32, 1),
        "184 KiB: columns of two warps are not padded to 256; on an H200 1.15 to 1.21 times as fast as the "
        "next one"),
    Row(256, 256, _Tiles(8, 4, 64, 1), "209 KiB, and 177 KiB up to 128 columns of one of both"),
    Row(256, 256, _Tiles(8, 4, 32, 1), "136 KiB: 64 queries have no room"),
    Row(192, 192, _Tiles(2, 2, 32, 1),
        "80 KiB: nor have 32 keys, and columns of four warps are padded to 256"),
)
# fmt: on
_ACCUMULATORS = {1: 128, 2: 144, 4: 144}
"""Registers that dK, dV, S and dP may take, by `column_warps`: fitted to what spilled."""
_ACCUMULATORS_WITH_MORE, _ROUNDED = 72, 96
"""The same with masks and softcap, or dropout where warps share keys; and with rounded weights."""
_ACCUMULATORS_WITH_MODS, _ROUNDED_WITH_MODS = 64, 80
"""The same with score_mod, mask_mod or a block mask, and with rounded weights: with dropout the second for
both, with softcap as well the first."""
_ACCUMULATORS_OF_TWO_MMAS = 192
"""The same with two MMAs of keys to a warp, without any of these features but dropout."""
_ORDER = 64
"""Registers that sums in order take next to these, where warps share keys."""


class Table(NamedTuple):
    shared_memory: int
    """Bytes that a CTA may have."""
    shared_memory_unasked: int
    """The same for calls that GPUs with kernels of their own have no others for: float32 and wide heads."""
    reads_ahead: bool = False
    """Whether float32 operands are read a step ahead of their MMAs."""

    def backward(self, features: Features, sizes: BackwardSizes) -> Sm80Backward:
        """The config of a call: see `configs.sm90_backward.backward`."""
        config = self.config(features, ragged_k=False)
        if may_end_inside(features, sizes, config.keys):
            config = self.config(features)
        return _with_tail(features, config, may_end_inside(features, sizes, config.keys))

    def row(self, features: Features, kv_head_rows: int = 0) -> Row:
        """The row that serves a call."""
        return next(row for row in rows_of(features) if row.config_of(features, self.memory(features)))

    def config(self, features: Features, ragged_k: bool = True) -> Sm80Backward:
        """The config that serves the features, where Sk may end inside a tile or not."""
        memory = self.memory(features)
        configs = (row.config_of(features, memory, ragged_k) for row in rows_of(features))
        config = next(config for config in configs if config is not None)
        ahead = self.reads_ahead and features.is_float32 and _has_registers_ahead(features, config)
        return config._replace(reads_ahead=ahead)

    def memory(self, features: Features) -> int:
        """Bytes of shared memory that a CTA may have."""
        unasked = features.is_float32 or is_wide(features)
        return self.shared_memory_unasked if unasked else self.shared_memory

    def reachable(self, features: Features, group: int | None = None) -> tuple[Sm80Backward, ...]:
        """Every config that `backward` returns for some sizes."""
        ragged = self.config(features)
        configs = [_with_tail(features, ragged, True)]
        if features.right or not features.varlen:
            even = self.config(features, ragged_k=False)
            # Keys of a ragged tile may fill smaller ones.
            configs = [_with_tail(features, c, False) for c in (even, ragged)] + configs
        return tuple(dict.fromkeys(configs))

    def section(self, features: Features, config: Sm80Backward, work: Workload) -> Section:
        """The order of tiles: see `configs.sm90_backward.section`."""
        bounded = features.left or features.right
        if features.deterministic:
            return Section(min(_ORDERED_IF_BOUNDED if bounded else _ORDERED, work.heads))
        if not bounded:
            return Section(1)
        tiles = -(-work.Sk // config.keys)
        return bounded_backward(work, features.D, features.Dv, tiles, left=features.left)

    def limits(self, features: Features) -> list[str]:
        """Why no row serves the features, whose head sizes may be any."""
        f = features
        most = self._widest(f)
        if max(f.D, f.Dv) > most:
            which = f"gradients of {f.dtype} " if f.is_float32 else ""
            return [f"D is {f.D} and Dv is {f.Dv}, and it serves {which}up to {most}"]
        if self._fits_some(f):
            return []
        asked = {
            "softcap": f.softcap,
            "dropout": f.dropout,
            "attn_mask": f.mask,
            "score_mod or mask_mod": any(f.mods),
        }
        what = ", ".join(name for name, is_asked in asked.items() if is_asked)
        heads = f"D is {f.D} and Dv is {f.Dv}"
        return [f"{heads}, and {f.dtype} with these features ({what}) has no room for gradients of so many"]

    def _widest(self, features: Features) -> int:
        """The widest heads of which some features are served."""
        if not features.is_float32:
            return MAX_D
        plain = Features("float32", 0, 0, tf32=features.tf32)
        widths = (0, 64, _NARROW_FLOAT32, 192, MAX_FLOAT32_D)
        return max(n for n in widths if self._fits_some(plain._replace(D=n, Dv=n)))

    def _fits_some(self, features: Features) -> bool:
        return any(row.config_of(features, self.memory(features)) for row in rows_of(features))


def rows_of(features: Features) -> tuple[Row, ...]:
    """The rows for the features' dtype and head sizes."""
    if is_wide(features):
        return _WIDE_FLOAT32 if features.is_float32 else _WIDE
    return _FLOAT32 if features.is_float32 else _TABLE


def is_wide(features: Features) -> bool:
    """Whether a head is so wide that it has rows of its own."""
    return max(features.D, features.Dv) > (_NARROW_FLOAT32 if features.is_float32 else _NARROW)


LARGE, SMALL = (Table(size, size) for size in (LARGE_BYTES, SMALL_BYTES))
ON_REQUEST = LARGE._replace(shared_memory_unasked=SHARED_MEMORY, reads_ahead=True)
"""The table of GPUs with kernels of their own: 16-bit calls that ask for these have the tiles of an A100."""


def fits(features: Features, config: Sm80Backward, shared_memory: int) -> bool:
    """Whether the GPU has room for it, in shared memory and in registers."""
    return has_registers(features, config) and config.shared_memory(features) <= shared_memory


def _mask_spills(features: Features) -> bool:
    """Whether a mask has no registers next to two MMAs of keys: the words of four keys of a bool mask, the
    addresses of a float32 one, or those of dmask in a window. Heads above 128 columns have more warps to as
    many keys.
    """
    f, widest = features, max(features.D, features.Dv)
    words = f.mask == "bool" and (f.left or widest <= 96)
    return 64 < widest <= 128 and (words or f.mask == "float32" or (f.dmask and f.left))


def _with_tail(features: Features, config: Sm80Backward, ragged_k: bool) -> Sm80Backward:
    """The config for a ragged Sk or not. Queries in parts have one kernel for both without the loop, and next
    to dropout and a band, and so have packed sequences with `own_in_regs`: without `ragged_k` they spill 8, 2
    to 6, and 2 times.
    """
    f, c = features, config
    of_parts = c.query_parts > 1 and (not c.scores_by_parts or (f.dropout and (f.left or f.right)))
    always = of_parts or (c.own_in_regs and f.varlen)
    return config._replace(ragged_k=ragged_k or always)


def _parts_have_registers(features: Features, config: Sm80Backward) -> bool:
    """Whether queries in parts have registers: those that were compiled for sm_80 and sm_90a without a spill.

    They have none for masks, functions, softcap and scales below 0, nor without the loop for bands and packed
    sequences. Dropout has some with the loop, 64 columns and nothing else, where Sk fills its tiles. Other
    heads have 56 or 64 columns; of narrower ones some spill.
    """
    f, c = features, config
    if c.round_weights or f.mask or f.scaled or any(f.mods) or {tile_dim(f.D), tile_dim(f.Dv)} != {64}:
        return False
    if f.dropout:
        alone = not (f.varlen or f.deterministic or f.dropout_of_part) and f.D == f.Dv == 64
        return c.scores_by_parts and alone and (f.right or not (f.left or c.ragged_k))
    return c.scores_by_parts or not (f.left or f.right or f.varlen)


def _own_has_registers(features: Features, config: Sm80Backward) -> bool:
    """Whether a warp's own P and dS have registers where several warps share keys: 6 to 424 spills at D 128
    otherwise.
    """
    f = features
    has_band = f.left or f.right
    bare = not (f.varlen or f.deterministic or f.dropout_of_part) and (has_band or not config.ragged_k)
    if f.dropout and config.copies_after_scores and not has_band and {tile_dim(f.D), tile_dim(f.Dv)} == {112}:
        return False  # 2 spills for sm_80
    return not f.mask and (not f.dropout or bare)


def _two_mmas_have_registers(features: Features) -> bool:
    """Whether float32 has registers for two MMAs of keys: 4 spills for sm_90a with dmask and a window."""
    f = features
    return not (f.softcap or (f.mask and f.dropout) or (f.is_exact and f.dmask and f.left))


def _has_registers_ahead(features: Features, config: Sm80Backward) -> bool:
    """Whether there are registers for operands that are read ahead: for three products not next to the words
    of a bool mask where a warp has dK and dV of 32 keys, or of 96 columns (26 to 128 spills for sm_90a).
    Other GPUs' kernels spill without masks, too (6 to 118 for sm_80).
    """
    f, c = features, config
    has_most = c.key_mmas > 1 or tile_dim(max(f.D, f.Dv)) // c.column_warps > 64
    return not (f.is_exact and f.mask == "bool" and has_most)


def _wide_has_registers(features: Features, config: Sm80Backward) -> bool:
    """Whether a thread of a wide head has registers: dQ has its columns in turns, so that dK and dV, which
    take 128 or 160, leave enough for all features. Functions have not been compiled.
    """
    f, c = features, config
    if c.warps == 2 and (f.is_exact or f.mask == "float32"):
        return False  # 24 to 51 spills for sm_86, and 6
    if c.column_warps == 2 and f.is_exact and f.float_mask:
        return False  # 4 to 10 spills for sm_90a
    return not (any(f.mods) or c.round_weights or (c.key_mmas > 1 and f.mask and f.dropout))


def has_registers(features: Features, config: Sm80Backward) -> bool:
    """Whether a thread has registers for it.

    16 rows are a warp's, or those of several that share them, so that each column costs half a register.
    """
    f, c = features, config
    if is_wide(f):
        return _wide_has_registers(f, c)
    if c.queries < 64:
        return not c.round_weights
    if f.is_float32:
        if c.key_mmas > 1 and not _two_mmas_have_registers(f):
            return False
        return not (c.round_weights or (f.softcap and f.dropout))
    if c.query_parts > 1:
        return _parts_have_registers(f, c)
    if c.own_in_regs and not _own_has_registers(f, c):
        return False
    rows, shared = 2 * c.queries, c.column_warps
    if c.dq_warps == 1 and f.D > MAX_D_WITH_MORE and (f.mask or f.deterministic or any(f.mods)):
        return False  # dQ takes as many registers as all others together
    accumulators = c.key_mmas * (tile_dim(f.D) + tile_dim(f.Dv) + rows) // (2 * shared)
    if c.key_mmas > 1:
        plain = not (f.softcap or (f.mask and f.dropout) or any(f.mods) or c.round_weights)
        ordered = f.deterministic and max(f.D, f.Dv) > 128
        return plain and not (ordered or _mask_spills(f)) and accumulators <= _ACCUMULATORS_OF_TWO_MMAS
    if any(f.mods):
        # With dropout rounded weights spill at D 96, 29 times for sm_120a, and unrounded ones do not; with
        # softcap as well both do, 2 to 64 times.
        has_more = (c.round_weights or f.dropout) and not (f.dropout and f.softcap)
        return shared > 1 and accumulators <= (_ROUNDED_WITH_MODS if has_more else _ACCUMULATORS_WITH_MODS)
    if f.dropout and shared == 1:
        # Sums in order, and dQ that is too narrow for a loop over its columns: 2 spills in causal kernels.
        is_narrow = f.D <= 16 * c.dq_warps and (f.left or f.right)
        if is_narrow or (f.deterministic and c.dq_warps > 1):
            return False
    if not (f.mask or f.softcap or (f.dropout and shared > 1)):
        accumulators += _ORDER * (f.deterministic and shared > 1)
        return not c.round_weights and accumulators <= _ACCUMULATORS[shared]
    if f.softcap and f.dropout and max(f.D, f.Dv) > 64:
        return shared > 2 and c.round_weights and max(f.D, f.Dv) <= MAX_D_WITH_MORE
    return shared > 1 and accumulators <= (_ROUNDED if c.round_weights else _ACCUMULATORS_WITH_MORE)
