"""Tiles and splits of the decode kernel, on every architecture; `kernels/decode/NOTES.md` has the times.

Decoding is bound by HBM, so what counts is how many bytes of K and V an SM has in flight: Little's law asks
for 35 KB (4.5 TB/s over 132 SMs, a microsecond of latency).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .types import Features, tile_dim


class DecodeForm(NamedTuple):
    """The tensors that a launch of the decode kernel has, how K and V are stored, and what multiplies."""

    paged: bool
    """Whether a block table says where keys are; otherwise sequence b has entry b of the cache."""
    cluster: int
    """CTAs of a cluster, which share the keys of a tile: 1, 2, 4 or 8."""
    ragged: bool
    """Whether cu_seqlens_q says which tokens a sequence has; otherwise all have max_seqlen_q of them."""
    lengths: bool
    """Whether seqused_k says how many keys a sequence has; otherwise as many as there is room for."""
    causal_flags: bool = False
    """Whether a flag of each sequence says if the right bound holds for it."""
    cache_dtype: str = ""
    """The cache's dtype, `FP8`; '' for that of Q."""
    parts: bool = False
    """Whether a tile's results may have several parts in global memory, of clusters with `CLUSTER` CTAs or of
    groups."""
    groups: bool = False
    """Whether a CTA has whole groups of splits of a fixed length; clusters have one CTA then."""
    wgmma: bool = False
    """Whether warpgroup MMAs multiply, in tiles of `wgmma_rows`; else warp-level ones, in tiles of `ROWS`.
    Not with `groups` or an FP8 cache."""
    runs: bool = False
    """Whether a page has a multiple of `RUN` keys; False without pages, whose keys are one run."""


FP8 = "float8_e4m3fn"
MAX_D = 256
_VECTOR = 16
"""Bytes that a lane copies at a time: rows of the cache are multiples of them."""


WARPS = 4
CHUNK = 64
"""Columns that the widest swizzle spans."""
KEYS = 64
"""Keys in a block: the order of sums, and so the bits of a result, depend on it."""
RUN = 16
"""Keys of a block that a warp copies, from a multiple of 16 on: cheap where they are in one page."""
MMA_ROWS = 16
"""Rows of a warp-level MMA."""
ROWS = (16, 32, 64)
"""Rows that a tile may have: query tokens times the query heads of a KV head."""
WARPGROUP_ROWS = 64
"""Rows of a warpgroup MMA."""
_WGMMA_ROWS = (64, 128)
_OTHER_ROW_BYTES, _OTHER_BYTES = 216, 3 * 1024
"""More than a CTA with warp-level MMAs has in SMEM besides Q, K, V and O: of each row, and of none."""
_SMALL_BYTES = 2048
"""More than a CTA with warpgroup MMAs has in SMEM besides Q, K and V."""
TWO_CTAS_BYTES, ONE_CTA_BYTES = 113 * 1024, 227 * 1024
"""SMEM of a CTA where two share an SM, and where it has the SM for itself."""
LEAST_STAGES, MOST_STAGES = 3, 8
CTAS_PER_SM = 2
MOST_TOKENS = 64
"""Tokens of a sequence up to which this kernel, which splits keys, serves where the forward could."""
CLUSTER = 8
"""CTAs of the largest cluster that every GPU launches."""
LEAST_BLOCKS = 2
"""Blocks that a split has at least, if its sequence has several: shorter ones cost more in the merge than
they save. Splits of a fixed length may be shorter."""
GROUP = CLUSTER
"""Splits of a group, which are merged first: those of a cluster."""
SPLIT_KEYS, SHORT_SPLITS, LONGER = 256, 2 * GROUP, 4
"""Keys of each of the first `SHORT_SPLITS` splits where results must not depend on a batch, and how many
times as many the others have: the longer splits are, the fewer have to be merged; the shorter, the more SMs
serve one sequence."""


def limits(features: Features, form: DecodeForm) -> list[str]:
    """Why the kernel does not serve the features, whose head sizes may be any."""
    found, multiple = [], _VECTOR if form.cache_dtype else _VECTOR // 2
    sizes = f"D is {features.D} and Dv is {features.Dv}"
    if max(features.D, features.Dv) > MAX_D:
        found.append(f"{sizes}, and it serves up to {MAX_D}")
    if features.D % multiple or features.Dv % multiple:
        found.append(f"{sizes}, and of such a cache it serves multiples of {multiple}")
    if form.cache_dtype not in ("", FP8):
        found.append(f"the cache is {form.cache_dtype}, and it serves {FP8} and q's dtype")
    return found


def rows(max_seqlen_q: int, group: int, choice: Sequence[int] = ROWS) -> int:
    """Rows of a tile: the fewest that hold a sequence's rows of one KV head, or the most there are."""
    return next((number for number in choice if max_seqlen_q * group <= number), choice[-1])


def wgmma_rows(features: Features) -> tuple[int, ...]:
    """Rows that a tile may have with warpgroup MMAs: so many that K and V have stages next to Q."""
    D, Dv = tile_dim(features.D), tile_dim(features.Dv)
    return tuple(
        number
        for number in _WGMMA_ROWS
        if stages(2 * KEYS * (D + Dv), 2 * number * D + _SMALL_BYTES, number) >= LEAST_STAGES
    )


def group_rows(features: Features, cache_dtype: str) -> tuple[int, ...]:
    """Rows that a tile may have if a CTA has groups of splits: so many that K and V have stages next to O."""
    width = 1 if cache_dtype else 2
    D, Dv = tile_dim(features.D), part_columns(features.Dv)
    row_bytes, stage_bytes = 2 * D + 4 * Dv + _OTHER_ROW_BYTES, width * KEYS * (D + Dv)
    return tuple(
        number
        for number in ROWS
        if stages(stage_bytes, number * row_bytes + _OTHER_BYTES, number) >= LEAST_STAGES
    )


def rows_of(features: Features, form: DecodeForm) -> tuple[int, ...]:
    """Rows that a tile of such a kernel may have."""
    if form.wgmma:
        return wgmma_rows(features)
    return group_rows(features, form.cache_dtype) if form.groups else ROWS


def may_use_wgmma(form: DecodeForm, max_seqlen_q: int, group: int) -> bool:
    """Whether warpgroup MMAs are faster, if the GPU has them and the launch need not be batch invariant.

    Tiles of up to 32 rows are bound by memory. An FP8 cache is widened to float16 in registers, where
    warpgroup MMAs take none of K and V from.
    """
    return not form.cache_dtype and max_seqlen_q * group > WARPGROUP_ROWS // 2


def most_ctas_per_sm(rows: int) -> int:
    """CTAs that may share an SM: two warpgroups have it for themselves, as 16 warps would have 128 registers
    a thread."""
    return CTAS_PER_SM if rows <= WARPGROUP_ROWS else 1


def ctas_per_sm(stage_bytes: int, other_bytes: int, rows: int) -> int:
    """CTAs that share an SM: two, if each then has stages enough next to what else it has in SMEM."""
    has_room = (TWO_CTAS_BYTES - other_bytes) // stage_bytes >= LEAST_STAGES
    return most_ctas_per_sm(rows) if has_room else 1


def stages(stage_bytes: int, other_bytes: int, rows: int) -> int:
    """Stages of K and V, as many as there is room for."""
    room = ONE_CTA_BYTES if ctas_per_sm(stage_bytes, other_bytes, rows) == 1 else TWO_CTAS_BYTES
    return min((room - other_bytes) // stage_bytes, MOST_STAGES)


def num_splits(tiles: int, max_seqlen_k: int, num_sms: int, rows: int) -> int:
    """Splits that give nearly every SM a CTA, if `tiles` tiles of `rows` rows share them: a bound, of which
    the kernel takes fewer where a sequence is so short that they had less than `LEAST_BLOCKS` blocks.

    CTAs that have an SM for themselves are not more than SMs: a few of them would wait for all others' end.
    tiles: those of all heads and sequences. max_seqlen_k: a bound on the keys of a sequence.
    """
    blocks, tiles = -(-max_seqlen_k // KEYS), max(tiles, 1)
    fewest = -(-num_sms * 7 // (8 * tiles))
    if most_ctas_per_sm(rows) == 1:
        fewest = min(fewest, num_sms // tiles)
    return max(1, min(fewest, blocks // LEAST_BLOCKS))


def clusters(num_splits: int) -> tuple[int, int]:
    """CTAs of a cluster, and clusters, that share up to so many splits of a tile."""
    size = next((size for size in (1, 2, 4, CLUSTER) if size >= num_splits), CLUSTER)
    return size, -(-num_splits // size)


def part_columns(Dv: int) -> int:
    """Columns of a row of a cluster's part of the results: of 16 rows or 64, the columns in the kernel."""
    return -(-Dv // CHUNK) * CHUNK


def invariant_splits(max_seqlen_k: int, split_keys: int = SPLIT_KEYS) -> int:
    """Splits of a fixed length that hold any sequence up to `max_seqlen_k` keys.

    split_keys: keys of a short one, a multiple of `KEYS`.
    """
    longer = max_seqlen_k - SHORT_SPLITS * split_keys
    if longer <= 0:
        return max(1, -(-max_seqlen_k // split_keys))
    return SHORT_SPLITS + -(-longer // (LONGER * split_keys))


def group_ctas(tiles: int, groups: int, num_sms: int) -> int:
    """CTAs that share the groups of a tile, or 0 if their splits are for clusters, which keep more SMs busy.

    One CTA for each tile balances best, if there are tiles enough; else each takes a group in turn.
    """
    least = num_sms * 7 // 8
    if tiles >= least:
        return 1
    return min(groups, -(-num_sms * CTAS_PER_SM // tiles)) if tiles * groups >= least else 0
