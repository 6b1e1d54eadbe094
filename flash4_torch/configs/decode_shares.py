"""How CTAs of the decode kernel share the keys of a tile: what takes the least time, by a guess of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .decode import (
    AMPERE,
    CTAS_PER_SM,
    GROUP,
    KEYS,
    LEAST_BLOCKS,
    MMA_ROWS,
    SHARED_ROWS,
    SPLIT_KEYS,
    WARPGROUP_ROWS,
    DecodeForm,
    Gpu,
    ctas_per_sm,
    group_bytes,
    merges_in_regs,
)
from .types import Features, tile_dim

_BLOCK_US, _COLUMN_US, _MORE_ROWS, _TWO_CTAS = 0.22, 0.0016, 1.25, 1.8
"""Time of a block in a CTA that has an SM for itself: without columns, and for each column of K and V.
Factors of it: with more than 16 rows, and where two CTAs share the SM."""
_WAVE_US, _GROUP_US = 3.0, 4.0
"""Time until the first block's scores are there: of all CTAs that run at once, and of a cluster's next group,
whose merge ends with nothing under way."""
_SM_BYTES_PER_US, _LARGE_SM_BYTES_PER_US, _SMALL_SM_BYTES_PER_US = 35e3, 16e3, 8e3
"""Bytes that an SM reads where all of them read: of an H200 as measured; of an A100, and of GPUs with GDDR,
what their data sheets say of memory for each SM."""
_LEAST_UNEVEN = 1.05
"""Factor of the time to read, if not every SM has two CTAs all the time."""
_KEPT_FACTOR, _UNEVEN_GROUPS, _SEVERAL_GROUPS_US = 1.35, 0.5, 2.5
"""A factor, where there are groups, of the time of a CTA that keeps four splits for its cluster; one of the
time to read, for SMs with one CTA where others have two; and what a CTA loses that has several groups."""
_MERGE_US, _PARTS_US, _VECTOR_US = 1.1, 1.5, 0.07
"""Time of a merge in a cluster; of one through global memory, and for each vector of it that a thread loads.
"""
_THREADS, _VECTOR_COLUMNS = 128, 4

Uneven = Callable[[int, tuple[int, int]], float]
"""A factor of the time to read; see `_uneven`."""


class Work(NamedTuple):
    """What a launch has to do, for a guess of its time."""

    tiles: int
    """Those of all heads and sequences."""
    blocks: int
    """A bound on the blocks of keys of a tile."""
    rows: int
    columns: int
    """Those of K and V."""
    Dv: int
    stage_bytes: int
    """Bytes of a block of K and V."""
    num_sms: int
    gpu: Gpu
    sizes_in_regs: tuple[int, ...] = ()
    """Clusters whose CTAs merge or hold results of a group's splits in registers."""


class Shares(NamedTuple):
    """How CTAs share the keys of a tile."""

    num_splits: int
    """Splits, at most; with groups the clusters that have a tile."""
    cluster: int
    parts: int
    """Clusters, or groups, whose results are merged through global memory if they are several."""
    alone: bool = False
    """Whether each CTA of a cluster has groups alone, where it might share them."""


def work_of(
    features: Features, form: DecodeForm, rows: int, tiles: int, max_seqlen_k: int, num_sms: int
) -> Work:
    columns = tile_dim(features.D) + tile_dim(features.Dv)
    stage_bytes = KEYS * columns * (1 if form.cache_dtype else 2)
    return Work(
        max(tiles, 1),
        max(-(-max_seqlen_k // KEYS), 1),
        rows,
        columns,
        features.Dv,
        stage_bytes,
        num_sms,
        form.gpu,
        tuple(size for size in form.gpu.clusters if merges_in_regs(features, form, rows, size)),
    )


def possible_shares(work: Work) -> set[tuple[int, bool, bool]]:
    """Clusters, whether there are several parts, and whether each CTA has groups alone, of all that
    `even_shares` returns where tiles are at least as many, and blocks at most; and of some more.
    """
    most, found = _most_splits(work), {(1, False, False)}
    for size in _sizes(work.gpu):
        parts = _parts_at_once(work, size)
        if parts and most > size // 2:
            found.add((size, False, False))
        if parts > 1 and most > size:
            found.add((size, True, False))
    return found


def _most_splits(work: Work) -> int:
    return max(work.blocks // LEAST_BLOCKS, 1)


def _sizes(gpu: Gpu) -> tuple[int, ...]:
    """CTAs of clusters that may share a tile by numbers of splits."""
    return gpu.clusters[1:] or (1,)


def _parts_at_once(work: Work, size: int) -> int:
    """Clusters of that size that each tile may have, if all are to run at once."""
    return _clusters_at_once(work, size, _ctas(work)) // work.tiles


def even_shares(work: Work, num_splits: int = 0) -> Shares:
    """The splits that take the least time: a bound, of which the kernel takes fewer where a sequence is so
    short that they had less than `LEAST_BLOCKS` blocks.

    num_splits: how many to take, if not 0.
    """
    most = _most_splits(work)
    choice = [Shares(1, 1, 1)]
    if num_splits:
        sizes = _clusters_of(work.gpu, num_splits)
        choice = [Shares(num_splits, size, -(-num_splits // size)) for size in sizes]
    else:
        for size in _sizes(work.gpu):
            numbers = {min(size * n, most) for n in range(1, _parts_at_once(work, size) + 1)}
            choice += [Shares(n, size, -(-n // size)) for n in sorted(numbers) if n > size // 2]

    def time(shares: Shares) -> float:
        own = -(-work.blocks // shares.num_splits) * _block_us(work)
        return _microseconds(work, shares, own, shares.parts, _ctas(work))

    return min(choice, key=time)


def possible_group_shares(work: Work, sizes: Sequence[int]) -> set[tuple[int, bool, bool]]:
    """The same of `group_shares`, with any tiles."""
    may_have_parts = {False, _fixed_splits(work) > GROUP}
    found = {(size, has_parts, False) for size in sizes for has_parts in may_have_parts}
    return found | ({(2, True, True)} if True in may_have_parts and _may_be_pairs(work) else set())


def _fixed_splits(work: Work) -> int:
    """Splits of a fixed length."""
    return -(-work.blocks * KEYS // SPLIT_KEYS)


def group_shares(work: Work, sizes: Sequence[int]) -> Shares:
    """The same of groups, for clusters of one of these sizes.

    CTAs that have groups alone are clusters of two, which merge a tile's groups, if their number is even.
    """
    are_alone = work.rows == SHARED_ROWS
    shares = _group_shares(work, (1,) if are_alone else sizes)
    may_be_pairs = 2 in sizes if are_alone else shares.cluster == 1 and _may_be_pairs(work)
    if may_be_pairs and shares.num_splits % 2 == 0:
        return Shares(shares.num_splits // 2, 2, shares.parts, not are_alone)
    return shares


def _may_be_pairs(work: Work) -> bool:
    """Whether CTAs that have groups alone may be clusters of two, where tiles leave them a choice."""
    return work.rows == WARPGROUP_ROWS and 1 in work.sizes_in_regs


def _group_shares(work: Work, sizes: Sequence[int]) -> Shares:
    splits = _fixed_splits(work)
    groups = -(-splits // GROUP)
    # Results of splits take room from stages.
    ctas = {size: _ctas(work, _group_bytes(work, size)) for size in sizes}
    choice = [
        Shares(clusters, size, groups)
        for size in sizes
        for clusters in range(1, groups + 1)
        if clusters == 1 or clusters * work.tiles <= _clusters_at_once(work, size, ctas[size])
    ]

    def time(shares: Shares) -> float:
        each = -(-min(splits, GROUP) // shares.cluster) * SPLIT_KEYS // KEYS
        turns = -(-groups // shares.num_splits)
        own = turns * each * _block_us(work) * (_KEPT_FACTOR if shares.cluster == 2 else 1.0)
        stops = (turns - 1) * _GROUP_US if shares.cluster > 1 else (turns > 1) * _SEVERAL_GROUPS_US
        at_once = ctas[shares.cluster]
        return stops + _microseconds(work, shares, own, shares.num_splits, at_once, _uneven_in_groups)

    return min(choice, key=time)


def _group_bytes(work: Work, size: int) -> int:
    """Bytes of shared memory for results of splits in a CTA of a cluster of so many."""
    return group_bytes(work.rows, work.Dv, size, size in work.sizes_in_regs)


def _clusters_of(gpu: Gpu, num_splits: int) -> list[int]:
    """Sizes of clusters that share so many splits; that of one CTA has none to share them with."""
    return [size for size in gpu.clusters if 1 < size < 2 * num_splits] or [1]


def _clusters_at_once(work: Work, size: int, ctas: int) -> int:
    """Clusters that run at the same time, if an SM has so many CTAs.

    A cluster of more than two needs SMs of one GPC, whose number is not a multiple of it in each: an H200 of
    132 SMs runs 30 of four, or 15 of eight.
    """
    return work.num_sms * ctas // size if size <= 2 else work.num_sms * 10 // 11 * ctas // size


def _ctas(work: Work, more_bytes: int = 0) -> int:
    """CTAs that may share an SM, with so many bytes of SMEM besides Q, K and V."""
    return ctas_per_sm(work.gpu, work.rows, work.stage_bytes, work.rows * work.columns + more_bytes)


def _sm_bytes_per_us(gpu: Gpu) -> float:
    if gpu.has_clusters:
        return _SM_BYTES_PER_US
    return _LARGE_SM_BYTES_PER_US if gpu.smem_bytes == AMPERE.smem_bytes else _SMALL_SM_BYTES_PER_US


def _block_us(work: Work) -> float:
    """The time of a block in a CTA that has an SM for itself."""
    return (_BLOCK_US + _COLUMN_US * work.columns) * (_MORE_ROWS if work.rows > MMA_ROWS else 1.0)


def _uneven(number: int, at_once: tuple[int, int]) -> float:
    """Factor of the time to read if more clusters run than could if each CTA had an SM for itself.

    SMs with two CTAs are done later than those with one.

    at_once: clusters that run at the same time with one CTA on each SM, and with two.
    """
    return max(at_once[1] / number, _LEAST_UNEVEN)


def _uneven_in_groups(number: int, at_once: tuple[int, int]) -> float:
    """The same of groups: it counts most where as many SMs have one CTA as have two."""
    share = min((number - at_once[0]) / max(at_once[1] - at_once[0], 1), 1.0)
    return max(1 + _UNEVEN_GROUPS * share * (1 - share), _LEAST_UNEVEN)


def _microseconds(
    work: Work, shares: Shares, own: float, clusters: int, ctas: int, uneven: Uneven = _uneven
) -> float:
    """A guess of a launch's time, from an H200's times (`kernels/decode/NOTES.md`).

    own: time of a CTA that has an SM for itself. clusters: those of a tile. ctas: those that may share an SM.
    """
    at_once, number = _clusters_at_once(work, shares.cluster, 1), work.tiles * clusters
    read = work.tiles * work.blocks * work.stage_bytes / (_sm_bytes_per_us(work.gpu) * work.num_sms)
    if number > at_once and ctas > 1:
        alone, at_once = at_once, _clusters_at_once(work, shares.cluster, CTAS_PER_SM)
        own, read = own * _TWO_CTAS, read * uneven(number, (alone, at_once))
    waves = -(-number // max(at_once, 1))
    # The nearer both are to each other, the more each one waits for the other.
    time = _WAVE_US * waves + math.hypot((waves * own) ** 3, read**3) ** (1 / 3)
    if shares.cluster > 1:
        time += _MERGE_US
    if shares.parts > 1:
        vectors = work.rows * work.columns // 2 // _VECTOR_COLUMNS // _THREADS
        time += _PARTS_US + _VECTOR_US * -(-vectors // shares.cluster) * shares.parts
    return time
