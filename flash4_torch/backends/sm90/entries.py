"""The kernels' names, and what all of them are told alike."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ... import compile
from ...problem import Problem
from ...reference.dropout import thresholds

ARCH = "sm_90a"
FORWARD = "flash4_torch.kernels.sm90.fwd.launch:compile_forward"
BACKWARD = "flash4_torch.kernels.sm90.bwd.launch:compile_backward"
PREPROCESS = "flash4_torch.kernels.shared.bwd_preprocess:compile_preprocess"
POSTPROCESS = "flash4_torch.kernels.shared.bwd_postprocess:compile_postprocess"
MASK_BLOCKS = "flash4_torch.kernels.shared.mask_blocks:compile_mask_blocks"

FARTHEST = 1 << 30
"""The kernels' largest position and bound: sums of two stay within 32 bits."""
_L2_BYTES = 32 << 20
"""What stays in the L2 cache while the tiles that share it pass by."""
_TILES_IN_SECTION = 4
"""For each multiprocessor; with fewer, some would idle where one section of heads ends."""

Rule = tuple[float, float, int, int, int, int, int, int, int, float]
"""The fields of `kernels.common.args.Rule` and of `BackwardRule`: scale, softcap, left, right, longest Sq (or
Sk), heads in a section, multiprocessors, drop byte, drop fraction, keep scale."""

Find = Callable[[str, tuple[object, ...]], compile.Function]
"""From an entry and what it is compiled for to the kernel."""


def find(entry: str, static: tuple[object, ...]) -> compile.Function:
    return compile.function(entry, static, ARCH)


def rule(problem: Problem, longest: int, section: int, multiprocessors: int) -> Rule:
    left, right = (0 if b is None else max(-FARTHEST, min(b, FARTHEST)) for b in problem.band)
    drop_byte, drop_fraction = thresholds(problem.dropout_p)
    keep_scale = 0.0 if problem.dropout_p >= 1.0 else 1.0 / (1.0 - problem.dropout_p)
    return (
        problem.scale,
        problem.softcap,
        left,
        right,
        longest,
        section,
        multiprocessors,
        drop_byte,
        drop_fraction,
        keep_scale,
    )


def heads_in_section(heads: int, each: int, tiles: int, most: int, multiprocessors: int) -> int:
    """How many of the heads take turns, so that long tiles come first while what they share stays cached.

    Args:
        heads: key heads of all batch entries.
        each: bytes that the tiles of one share.
        tiles: of one.
        most: before sections are made even.
        multiprocessors: of the GPU.
    """
    enough = -(-_TILES_IN_SECTION * multiprocessors // tiles)
    return evenly(heads, min(max(_L2_BYTES // each, enough), most, heads))


def evenly(heads: int, wanted: int) -> int:
    """A section's heads near those wanted, such that the last section is not much smaller than the others."""
    near = range(-(-wanted * 3 // 4), min(wanted * 3 // 2, heads) + 1)
    return min(near, key=lambda n: (-heads % n / n, abs(n - wanted)))


def mask_dtype(problem: Problem) -> str:
    return problem.spec.mask.partition(":")[0]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
