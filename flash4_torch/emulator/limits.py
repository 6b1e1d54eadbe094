"""The launches that a GPU's launch call refuses.

CUDA C++ Programming Guide: Technical Specifications per Compute Capability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flash4_torch.emulator.errors import LaunchError

Dim3 = tuple[int, int, int]

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_BLOCK_THREADS = 1024
MAX_CLUSTER = 16
MAX_SHARED = 227 << 10  # bytes of a CTA, in addition to what the system reserves
_MAX_SHARED_BELOW = {80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 120: 99 << 10, 121: 99 << 10}
_FIRST_CLUSTERS = 90


def max_shared(arch: int) -> int:
    """Bytes of shared memory that a CTA can have on an architecture, 86 for sm_86."""
    return _MAX_SHARED_BELOW.get(arch, MAX_SHARED)


def refuse_impossible(
    grid: Dim3,
    block: Dim3,
    cluster: Dim3,
    dynamic_shared: int,
    static_shared: int = 0,
    arch: int = _FIRST_CLUSTERS,
) -> None:
    """Raises LaunchError for a launch that no GPU of the architecture would accept.

    grid, block: in CTAs and threads. cluster: in CTAs. dynamic_shared, static_shared: in bytes of a CTA.
    """
    for name, sizes in (("grid", grid), ("block", block), ("cluster", cluster)):
        if not _is_dim3(sizes):
            raise LaunchError(f"{name} is {sizes!r}; it must be three integers")
    threads, ctas = math.prod(block), math.prod(cluster)
    if min(block) < 1 or threads > MAX_BLOCK_THREADS or _beyond(block, MAX_BLOCK):
        limit = f"1 to {MAX_BLOCK_THREADS} are allowed, at most {MAX_BLOCK} by axis"
        raise LaunchError(f"block {block} has {threads} threads; {limit}")
    if min(cluster) < 1 or ctas > MAX_CLUSTER:
        raise LaunchError(f"cluster {cluster} has {ctas} CTAs; 1 to {MAX_CLUSTER} are allowed")
    if ctas > 1 and arch < _FIRST_CLUSTERS:
        raise LaunchError(f"cluster {cluster} has {ctas} CTAs; there are no clusters before sm_90")
    if min(grid) < 1 or any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise LaunchError(f"grid {grid} must be a positive multiple of cluster {cluster}")
    if _beyond(grid, MAX_GRID):
        raise LaunchError(f"grid {grid} is larger than {MAX_GRID}")
    most = max_shared(arch)
    if not isinstance(dynamic_shared, int) or not 0 <= dynamic_shared <= most - static_shared:
        beside = f" beside {static_shared} static ones" if static_shared else ""
        raise LaunchError(f"{dynamic_shared} bytes of shared memory{beside}; a CTA can have {most}")


def _is_dim3(sizes: object) -> bool:
    if not isinstance(sizes, Sequence) or len(sizes) != 3:
        return False
    return all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)


def _beyond(sizes: Dim3, limits: Dim3) -> bool:
    return any(size > limit for size, limit in zip(sizes, limits, strict=True))
