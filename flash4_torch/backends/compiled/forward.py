"""The forward: the kernel that serves a call, and its parameters besides tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import compile
from ...configs.sections import Section, heads_that_fit
from ...configs.sizes import Sizes
from ...configs.splits import Split
from ...configs.types import LARGE_SOFTCAP, Features, Mods
from ...kernels.common.kvcache import NUMBERS_STEP
from ...kernels.common.mask_tables import MaskPlan
from ...problem import Inputs, Problem, Spec, has_float_mask
from ..base import Results
from .masks import Read
from .params import LaunchParams, dtype_name, launch_params, mask_dtype
from .targets import Find, ForwardConfig, Row, Target
from .tensors import Allocator, lengths, padded
from .workspace import Need, allocated

_LONG = 8192
"""Keys beyond which tiles of two KV heads are interleaved even without a bound to the right."""
_MOST_IN_SECTION = 32
"""Packs of heads in a section, before sections are made even."""
_TILES_EACH = 4
"""Tiles in a section for each SM, at least."""
_NO_MODS, _STACKED = Mods(), Mods(bounds="stacked")


class Splits(NamedTuple):
    """Splits of every tile's keys."""

    number: int
    has_low: bool
    """Whether lse has a rounding error that counts."""

    def need(self, shapes: Shapes) -> Need:
        """Memory for out, lse and, if it counts, lse_low of all of them, each at a multiple of 32 bytes."""
        out, lse = map(math.prod, shapes)
        numbers = out + lse * (1 + self.has_low)
        return (self.number, -(-numbers // NUMBERS_STEP) * NUMBERS_STEP), torch.float32


class Kernel(NamedTuple):
    """A compiled kernel, its config, and its parameters besides tensors."""

    function: compile.Function
    config: ForwardConfig
    params: LaunchParams
    splits: Splits | None = None


class Shapes(NamedTuple):
    """Shapes of a call's results."""

    out: tuple[int, ...]
    lse: tuple[int, ...]


def decide(target: Target, problem: Problem, num_sms: int, find: Find) -> Kernel:
    features = features_of(problem)
    split = split_of(target, problem, num_sms, features)
    if split is None:
        config = config_of(target, problem, num_sms)
        function = find(target.forward, (features, config))
        return Kernel(function, config, params_of(target, problem, config, num_sms))
    return with_splits(target, problem, split, features, num_sms, find)


def split_of(
    target: Target, problem: Problem, num_sms: int, features: Features, num_splits: int = 0
) -> Split | None:
    """How to divide the keys of the problem's tiles: in so many splits, or where that is faster."""
    sizes = sizes_of(problem, num_sms)._replace(num_splits=num_splits)
    return target.split_configs.split(features, sizes)


def reachable(
    target: Target, features: Features, group: int | None = None
) -> Iterator[tuple[Features, ForwardConfig]]:
    """Every kernel that serves such calls of some sizes, with the keys split or not."""
    yield from ((features, config) for config in target.forward_configs.reachable(features, group))
    own = features._replace(splits=True)
    yield from ((own, config) for config in target.split_configs.reachable(features, group))


def with_splits(
    target: Target, problem: Problem, split: Split, features: Features, num_sms: int, find: Find
) -> Kernel:
    """The kernels of a problem whose keys are split."""
    config = split.config
    function = find(target.forward, (features._replace(splits=True), config))
    splits = Splits(split.number, features.large_scores)
    return Kernel(function, config, params_of(target, problem, config, num_sms), splits)


Sequence = Callable[[Inputs, Tensor], Results]
"""Function that launches the kernel, given readable tensors and a tile counter."""


def sequence(
    kernel: Kernel, shapes: Shapes, dtype: torch.dtype, params: Any, read_mask: Read, allocator: Allocator
) -> Sequence:
    """The forward's launches, with everything decided but the tensors.

    `params` is what the kernel takes for `kernel.params`: that, or what it was converted to before.
    """
    new_out, new_lse = allocator(shapes.out, dtype), allocator(shapes.lse, torch.float32)
    launch_into = launcher(kernel, shapes, params, allocator)

    def launch(x: Inputs, tile_counter: Tensor) -> Results:
        low = new_lse() if has_float_mask(x.attn_mask) else None
        results = Results(new_out(), new_lse(), low)
        launch_into(results, x, tile_counter, read_mask(x.attn_mask))
        return results

    return launch


Launcher = Callable[[Results, Inputs, Tensor, Any], None]
"""Function that launches the kernel to write results, given tensors, a tile counter and what the kernel takes
for a mask."""


def launcher(kernel: Kernel, shapes: Shapes, params: Any, allocator: Allocator) -> Launcher:
    """The kernel's launch; `params` is as in `sequence`."""
    function, splits = kernel.function, kernel.splits
    new_parts = no_parts if splits is None else allocated((splits.need(shapes),), allocator)

    def launch(results: Results, x: Inputs, tile_counter: Tensor, mask: Any) -> None:
        run(function, x, results, tile_counter, mask, params, *new_parts())

    return launch


def no_parts() -> tuple[Tensor, ...]:
    """What a launch in one piece is given for the results of splits."""
    return ()


def run(
    function: compile.Function,
    x: Inputs,
    results: Results,
    tile_counter: Tensor,
    mask: Any,
    params: Any,
    *parts: Tensor,
) -> None:
    """Launch the kernel, which writes the results.

    mask: what it takes for x.attn_mask. parts: memory for the results of splits, if there are any.
    """
    sinks = x.sinks
    function(
        x.q,
        x.k,
        x.v,
        results.out,
        results.lse,
        results.lse_low,
        tile_counter,
        lengths(x.cu_seqlens_q),
        lengths(x.cu_seqlens_k),
        mask,
        x.rng_state,
        sinks if sinks is None else sinks.contiguous(),
        params,
        *parts,
    )


def shapes_of(q: Tensor, v: Tensor) -> Shapes:
    *batch, Sq, Hq, _ = q.shape
    return Shapes((*batch, Sq, Hq, v.shape[-1]), (*batch, Hq, Sq))


def limits(target: Target, problem: Problem) -> list[str]:
    """The reasons why the target's table has no kernel for the problem."""
    spec = problem.spec
    return target.forward_configs.limits(features_of(problem)._replace(D=spec.D, Dv=spec.Dv))


def features_of(problem: Problem, mods: Mods | None = None) -> Features:
    """The features that the kernel must have; a bound that masks nothing does not count."""
    left, spec = problem.band.left, problem.spec
    return _features_of(
        spec,
        mask_dtype(problem),
        mods or (_NO_MODS if problem.entries == 1 else _STACKED),
        left is not None and left < problem.extent.Sk - 1,
        _masks_right(problem),
        problem.scale <= 0.0,
        problem.softcap > (0.0 if spec.dtype == torch.float32 else LARGE_SOFTCAP),
    )


@lru_cache(maxsize=1024)
def _features_of(
    spec: Spec, mask: str, mods: Mods, left: bool, right: bool, turns_order: bool, large_softcap: bool
) -> Features:
    """The features of a call with such a band, scale and softcap, whose sizes have no say otherwise."""
    return Features(
        dtype=dtype_name(spec.dtype),
        D=padded(spec.D),
        Dv=padded(spec.Dv),
        varlen=spec.varlen,
        left=left,
        right=right,
        softcap=spec.softcap,
        scaled=spec.softcap or mask not in ("", "bool") or mods.makes_large_scores or turns_order,
        mask=mask,
        dropout=spec.dropout,
        dropout_of_part=spec.dropout_of_part,
        running=spec.running,
        large_softcap=large_softcap,
        sinks=spec.sinks,
        mods=mods,
        tf32=spec.tf32,
        segments=spec.segments,
    )


def _masks_right(problem: Problem) -> bool:
    """Whether the band's right bound masks a key of any row."""
    right = problem.band.right
    return right is not None and right < problem.extent.Sq - 1


def mask_plan(dtype: str, config: ForwardConfig) -> MaskPlan:
    """How a mask of that dtype is divided into blocks: like the config's tiles."""
    return MaskPlan(dtype, config.queries, config.keys, config.pack_gqa)


def config_of(
    target: Target, problem: Problem, num_sms: int | None, features: Features | None = None
) -> ForwardConfig:
    """The config of a call: on so many SMs, or as for many tiles; of its own features by default."""
    features = features or features_of(problem)
    return target.forward_configs.forward(features, sizes_of(problem, num_sms))


def row_of(target: Target, problem: Problem, num_sms: int) -> Row:
    """The table's row that serves the problem."""
    return target.forward_configs.row(features_of(problem), sizes_of(problem, num_sms))


def sizes_of(problem: Problem, num_sms: int | None) -> Sizes:
    """What the table goes by: on so many SMs, or as for many tiles."""
    extent, (left, right) = problem.extent, problem.band
    seen = None if left is None or right is None else max(left + right + 1, 1)
    end_masked = right is not None and right <= 0
    sizes = Sizes(extent.Sq, extent.Sk, problem.spec.group, seen, end_masked)
    return sizes if num_sms is None else sizes._replace(heads=extent.B * extent.Hk, num_sms=num_sms)


def params_of(target: Target, problem: Problem, config: ForwardConfig, num_sms: int) -> LaunchParams:
    section = _section(target, problem, config, num_sms)
    return launch_params(problem, problem.extent.Sq, section, num_sms)


def _section(target: Target, problem: Problem, config: ForwardConfig, num_sms: int) -> Section:
    """The section of packs of heads: long tiles come first while the section's K and V stay in the L2 cache.

    Without a bound to the right all tiles are equally long, and heads follow one another. Long KV heads
    follow in pairs: when all SMs read the same K and V, D = 64 is sometimes 10 % slower.
    """
    spec, extent = problem.spec, problem.extent
    packs = -(-spec.group // config.pack_gqa)
    if not _masks_right(problem):
        return Section(1 if extent.Sk <= _LONG else 2 * packs)
    each = extent.Sk * (spec.D + spec.Dv) * spec.dtype.itemsize
    tiles = packs * -(-extent.Sq // config.queries)
    most, heads = max(_MOST_IN_SECTION // packs, 1), extent.B * extent.Hk
    fewest = _TILES_EACH * num_sms
    return Section(heads_that_fit(heads, each, target.l2_bytes, tiles, most, fewest) * packs)
