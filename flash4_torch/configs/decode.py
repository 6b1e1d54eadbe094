"""Tiles and splits of the decode kernel, on every architecture; `kernels/decode/NOTES.md` has the times.

Decoding is bound by HBM, so what counts is how many bytes of K and V an SM has in flight: Little's law asks
for 35 KB (4.5 TB/s over 132 SMs, a microsecond of latency).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .types import LARGE_BYTES, RESERVED_BYTES, SHARED_MEMORY, SMALL_BYTES, Features, tile_dim

CLUSTERS = (1, 2, 4, 8)
"""CTAs that a cluster may have; every GPU that has clusters launches these."""


class Gpu(NamedTuple):
    """What of a GPU the kernel is made for."""

    smem_bytes: int
    """Bytes of shared memory that a CTA may have; an SM has 1 KiB more, and each CTA takes 1 KiB of it."""
    clusters: tuple[int, ...] = (1,)
    """CTAs that a cluster may have. Where there are clusters, there is also stmatrix."""
    converts_fp8: bool = True
    """Whether one instruction converts two FP8 numbers."""
    least_stages: int = 1
    """Stages of K and V that a launch has at least."""

    @property
    def has_clusters(self) -> bool:
        return len(self.clusters) > 1


HOPPER = Gpu(SHARED_MEMORY, CLUSTERS, least_stages=3)
"""Hopper and Blackwell."""
AMPERE = Gpu(LARGE_BYTES, converts_fp8=False)
"""Compute capability 8.0 and 8.7."""
GA102 = Gpu(SMALL_BYTES, converts_fp8=False)
"""Compute capability 8.6."""
ADA = Gpu(SMALL_BYTES)
"""Compute capability 8.9, 12.0 and 12.1."""


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
    """Whether a tile's results may have several parts in global memory, of clusters or of groups."""
    groups: bool = False
    """Whether splits have a fixed length, and a cluster has groups of `GROUP` of them."""
    alone: bool = False
    """Whether each CTA of a cluster has groups alone, and the cluster merges those of a tile. With tiles of
    `SHARED_ROWS` it is so in any case."""
    wgmma: bool = False
    """Whether warpgroup MMAs multiply, in tiles of `WARPGROUP_ROWS` or `SHARED_ROWS`; else warp-level ones,
    in tiles of `ROWS`. Not with an FP8 cache."""
    runs: bool = False
    """Whether a page has a multiple of `RUN` keys; False without pages, whose keys are one run."""
    gpu: Gpu = HOPPER
    keys: int = 64
    """Keys in a block: `KEYS`, or `MORE_KEYS`."""
    q_in_regs: bool = False
    """Whether warpgroup MMAs take Q from registers when they multiply it by K."""
    group_in_regs: bool = False
    """Whether a CTA that has groups alone merges their splits in registers, not in shared memory. One
    that has two splits of its cluster's group holds the first one there."""
    ctas: int = 2
    """CTAs that share an SM, if there is room for them."""
    few_rows: bool = False
    """Whether a tile has `FEW_ROWS` rows or fewer, of 16: the others are multiplied, and nothing else is done
    to them. Bits of the rows stay the same."""

    @property
    def has_runs(self) -> bool:
        """Whether the keys that a warp copies of a block are one stride from each other."""
        return self.runs or not self.paged


FP8 = "float8_e4m3fn"
MAX_D = 256
_VECTOR = 16
"""Bytes that a lane copies at a time: rows of the cache are multiples of them."""


WARPS = 4
CHUNK = 64
"""Columns that the widest swizzle spans."""
KEYS = 64
"""Keys in a block, unless it has `MORE_KEYS`: the order of sums, and so a result's bits, depend on it."""
RUN = 16
"""Keys of a block that a warp copies, from a multiple of 16 on: cheap where they are in one page."""
MMA_ROWS = 16
"""Rows of a warp-level MMA."""
FEW_ROWS = MMA_ROWS // 2
"""Rows up to which a tile leaves half of each MMA alone, so that a lane has one row instead of two; 0 for
never. That is a fifth of the instructions of a warp for a block."""
ROWS = (16, 32, 64)
"""Rows that a tile may have: query tokens times the query heads of a KV head."""
_COLUMNS = {
    # FP8, runs:  rows
    (False, True): {64: 192, 32: 256},
    (False, False): {64: 128, 32: 256},
    (True, True): {64: 128, 32: 256},
    (True, False): {64: 64, 32: 128},
}
"""Columns up to which tiles of so many rows have registers for other GPUs than Hopper and Blackwell, whose
code ptxas orders differently: the next ones spill 2 to 53 times. Without runs each key has an address of its
own, and warps widen FP8 numbers."""
WARPGROUP_ROWS = 64
"""Rows of a warpgroup MMA."""
SHARED_ROWS = 2 * WARPGROUP_ROWS
"""Rows of a tile of two warpgroups that share K and V, which other warps load for them."""
MORE_KEYS = 2 * KEYS
"""Keys in a block that tiles of the fewest rows and of the most may have."""
_MORE_KEYS_COLUMNS = 128
"""Columns up to which tiles have registers for that, and for Q where warpgroup MMAs take it from them."""
_NARROW_COLUMNS = 64
"""Columns up to which a block of `KEYS` keys is so short that its latency counts, as an H200 measured."""
SHARED_LEAST_KEYS, SHARED_LEAST_BLOCKS = 4096, 3
"""Keys of a sequence, and blocks for each SM, from which such tiles are faster, as an H200 measured."""
SHARED_MANY_BLOCKS = 12
"""Blocks of `KEYS` keys for each SM from which such tiles are faster with `MORE_KEYS`, as it measured."""
_LEAST_SHARED_GROUPS = 0.5
"""Groups of splits for each SM from which tiles of `SHARED_ROWS` have them, as an H200 measured. With fewer,
each tile of half as many rows has an SM for itself."""
REGISTERS, GROUP_REGISTERS = (56, 224), (40, 232)
"""Registers of a thread that loads, and of one that computes, in tiles of `SHARED_ROWS`: and where CTAs merge
splits of a group in them."""
GROUP_COLUMNS = 128
"""Columns of V up to which CTAs with warpgroup MMAs have registers for results of a group's splits besides O;
0 for never. On an H200 calls take 4 to 8 % less than with them in shared memory."""
_OTHER_ROW_BYTES, _OTHER_BYTES = 216, 3 * 1024
"""More than a CTA with warp-level MMAs has in SMEM besides Q, K, V and O: of each row, and of none."""
_SHARED_OTHER_BYTES = 2 * 1024
"""The same of a CTA with a tile of `SHARED_ROWS`, whose rows have their lse there."""
STAGES_OF_TWO_CTAS, MOST_STAGES = 3, 8
"""Stages that each of two CTAs of an SM has at least, and that a CTA has at most."""
CTAS_PER_SM = 2
MOST_ROWS = 64
"""Query rows of a KV head up to which this kernel serves where the forward could: those of a tile. An H200
took 0.5 to 1.14 of the time for more by the forward, 0.86 in the mean."""
CLUSTER = CLUSTERS[-1]
LEAST_BLOCKS = 2
"""Blocks of `KEYS` keys that a split has at least, if its sequence has several: shorter ones cost more in the
merge than they save. The last split of a fixed length may be shorter."""
GROUP = CLUSTER
"""Splits of a fixed length that are a group, which is merged first."""
SPLIT_KEYS = 256
"""Keys of a split where results must not depend on a batch."""


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


def merges_in_regs(features: Features, form: DecodeForm, rows: int, cluster: int) -> bool:
    """Whether CTAs of such a cluster, which has groups, merge or hold results of splits in registers."""
    D, Dv = features.D, features.Dv
    # Softcap has no registers left with more columns of K.
    if Dv > GROUP_COLUMNS or (D > GROUP_COLUMNS and features.softcap):
        return False
    # Two results have to fit into three stages.
    may_hold = GROUP // cluster == 2 and 3 * D >= part_columns(Dv)
    return rows == SHARED_ROWS or (form.wgmma and (cluster == 1 or form.alone or may_hold))


def group_bytes(rows: int, Dv: int, cluster: int, in_regs: bool) -> int:
    """Bytes of shared memory for results of a CTA's splits: one alone merges them as they come, others keep
    them, but for the last one, which takes the place of K and V. None of it with registers for them."""
    if in_regs:
        return 0
    cluster = 1 if rows == SHARED_ROWS else cluster
    return 4 * rows * part_columns(Dv) * (max(GROUP // cluster - 1, 0) if cluster > 1 else 1)


def group_clusters(features: Features, form: DecodeForm, rows: int) -> list[int]:
    """CTAs that a cluster may have which shares groups: so many that K and V have stages next to results.

    Load warps of tiles of `SHARED_ROWS` do not wait for a cluster's merge: there each CTA has groups alone,
    and two merge all groups of a tile together.
    """
    gpu, width = form.gpu, 1 if form.cache_dtype else 2
    D, Dv = tile_dim(features.D), part_columns(features.Dv)
    other = rows * (2 * D + _OTHER_ROW_BYTES) + _OTHER_BYTES

    def has_room(size: int) -> bool:
        results = group_bytes(rows, Dv, size, merges_in_regs(features, form, rows, size))
        return stages(gpu, rows, width * KEYS * (D + Dv), other + results) >= gpu.least_stages

    return [size for size in gpu.clusters[: 2 if rows == SHARED_ROWS else None] if has_room(size)]


def group_rows(features: Features, form: DecodeForm) -> tuple[int, ...]:
    """Rows that a tile may have if clusters have groups of splits."""
    own = rows_of(features, form._replace(groups=False, wgmma=False))
    return tuple(number for number in own if group_clusters(features, form, number))


def rows_of(features: Features, form: DecodeForm) -> tuple[int, ...]:
    """Rows that a tile of such a kernel may have."""
    if form.wgmma:
        return wgmma_rows(features, form)
    if form.groups:
        own = rows_of(features, form._replace(groups=False))
        return tuple(n for n in own if form.cluster in group_clusters(features, form, n))
    if form.gpu.has_clusters:
        return ROWS
    columns = _COLUMNS[form.cache_dtype != "", form.has_runs]
    return tuple(n for n in ROWS if max(features.D, features.Dv) <= columns.get(n, MAX_D))


def wgmma_rows(features: Features, form: DecodeForm) -> tuple[int, ...]:
    """Rows that a tile may have by warpgroup MMAs. Bits do not depend on the number, if blocks have as many
    keys."""
    D, Dv = tile_dim(features.D), tile_dim(features.Dv)
    other = SHARED_ROWS * (2 * D + _OTHER_ROW_BYTES) + _OTHER_BYTES
    has_room = (form.gpu.smem_bytes - other) // (2 * KEYS * (D + Dv)) >= form.gpu.least_stages
    if form.groups:
        has_room = form.cluster in group_clusters(features, form, SHARED_ROWS)
    return (WARPGROUP_ROWS, SHARED_ROWS) if has_room else (WARPGROUP_ROWS,)


def block_keys(features: Features, form: DecodeForm, rows: int) -> tuple[int, ...]:
    """Keys that a block may have: so many that there is room for stages enough. Bits of results depend on the
    number, so launches with groups have `KEYS`.
    """
    D, Dv = tile_dim(features.D), part_columns(features.Dv)
    may_have_more = rows in (ROWS[0], SHARED_ROWS) and form.gpu.has_clusters and not form.groups
    may_have_more = may_have_more and max(D, Dv) <= _MORE_KEYS_COLUMNS
    width = 1 if form.cache_dtype else 2

    def has_room(keys: int) -> bool:
        other = rows * (2 * D + _OTHER_ROW_BYTES + 2 * (keys - KEYS)) + _OTHER_BYTES
        if rows == SHARED_ROWS:
            other = 2 * rows * D + _SHARED_OTHER_BYTES
        return (form.gpu.smem_bytes - other) // (width * keys * (D + Dv)) >= form.gpu.least_stages

    return tuple(keys for keys in ((KEYS, MORE_KEYS) if may_have_more else (KEYS,)) if has_room(keys))


def with_blocks(features: Features, form: DecodeForm, rows: int, has_many: bool = False) -> DecodeForm:
    """The form with the keys in a block, the CTAs on an SM and the place of Q that an H200 found fastest.

    has_many: whether each SM has `SHARED_MANY_BLOCKS`.
    """
    columns, is_fp8 = max(features.D, features.Dv), form.cache_dtype != ""
    is_short = columns <= _NARROW_COLUMNS
    pays = has_many if rows == SHARED_ROWS else is_short or is_fp8
    keys = MORE_KEYS if pays and MORE_KEYS in block_keys(features, form, rows) else KEYS
    more = (2 if form.few_rows else 1) if keys > KEYS and is_short and is_fp8 else 0
    # Softcap has no registers left with more keys; groups of narrower tiles have not been measured.
    may_keep_q = form.wgmma and not (keys > KEYS and features.softcap)
    may_keep_q = may_keep_q and (rows == SHARED_ROWS or not form.groups)
    q_in_regs = may_keep_q and features.D > _NARROW_COLUMNS and columns <= _MORE_KEYS_COLUMNS
    merges = form.groups and merges_in_regs(features, form, rows, form.cluster)
    q_in_regs = q_in_regs and not merges
    return form._replace(keys=keys, ctas=CTAS_PER_SM + more, q_in_regs=q_in_regs, group_in_regs=merges)


def shares_kv(max_seqlen_k: int, blocks: int, num_sms: int) -> bool:
    """Whether tiles of `SHARED_ROWS` are faster than two tiles of half as many rows.

    They read K and V from the L2 cache once, and start and merge later. blocks: those of all such tiles.
    """
    return max_seqlen_k >= SHARED_LEAST_KEYS and blocks >= SHARED_LEAST_BLOCKS * num_sms


def shares_kv_in_groups(max_seqlen_k: int, tiles: int, num_sms: int) -> bool:
    """The same where bits must not depend on a batch: CTAs of tiles of `SHARED_ROWS` do not share a group, so
    that groups have to be as many as SMs, or nearly.
    """
    return tiles * -(-max_seqlen_k // (GROUP * SPLIT_KEYS)) >= _LEAST_SHARED_GROUPS * num_sms


def has_few_rows(tile_rows: int, rows: int) -> bool:
    """Whether a tile of so many rows, of which a sequence has `rows`, leaves half of its MMAs alone."""
    return tile_rows == MMA_ROWS and rows <= FEW_ROWS


def may_use_wgmma(form: DecodeForm, tile_rows: int, group: int, batch_invariant: bool) -> bool:
    """Whether warpgroup MMAs are faster, if the GPU has them.

    Tiles of up to 32 rows are bound by memory. An FP8 cache is widened to float16 in registers, where
    warpgroup MMAs take none of K and V from. Their sums have an order of their own, and bits must not depend
    on the rows of a tile: with `batch_invariant`, one token alone must fill such a tile.
    """
    own = min(tile_rows, rows(1, group)) if batch_invariant else tile_rows
    return not form.cache_dtype and own == WARPGROUP_ROWS


def cta_bytes(gpu: Gpu, ctas: int) -> int:
    """Bytes of shared memory of a CTA, where so many share an SM."""
    return (gpu.smem_bytes + RESERVED_BYTES) // ctas - RESERVED_BYTES


def ctas_per_sm(gpu: Gpu, rows: int, stage_bytes: int, other_bytes: int, most: int = CTAS_PER_SM) -> int:
    """CTAs that share an SM: up to `most`, if each then has stages enough next to what else it has in SMEM.
    One with a tile of `SHARED_ROWS` has all registers.
    """
    if rows == SHARED_ROWS:
        return 1

    def has_room(ctas: int) -> bool:
        return (cta_bytes(gpu, ctas) - other_bytes) // stage_bytes >= STAGES_OF_TWO_CTAS

    return next((ctas for ctas in range(most, 1, -1) if has_room(ctas)), 1)


def stages(gpu: Gpu, rows: int, stage_bytes: int, other_bytes: int, most_ctas: int = CTAS_PER_SM) -> int:
    """Stages of K and V, as many as there is room for."""
    room = cta_bytes(gpu, ctas_per_sm(gpu, rows, stage_bytes, other_bytes, most_ctas))
    return min((room - other_bytes) // stage_bytes, MOST_STAGES)


def part_columns(Dv: int) -> int:
    """Columns of a row of a cluster's part of the results: of 16 rows or 64, the columns in the kernel."""
    return -(-Dv // CHUNK) * CHUNK
