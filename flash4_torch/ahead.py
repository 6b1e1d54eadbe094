"""Compiling before the first call: into the cache (`warmup`), or into a folder to ship (`export`)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from os import PathLike
from pathlib import Path

from .backends.compiled import (
    GROUP_SUMS,
    MASK_BLOCKS,
    POSTPROCESS,
    PREPROCESS,
    TARGETS,
    Target,
    backward,
    forward,
)
from .compile import Key, aot, pool
from .compile.arch import checked
from .compile.pool import Prepared
from .configs.types import Features
from .errors import RangeError

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)
FEATURES = ("plain", "causal")
MAX_D = 256

WORDS: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": {"right": True},
    "window": {"left": True, "right": True},
    "softcap": {"softcap": True, "scaled": True},
    "varlen": {"varlen": True},
    "dropout": {"dropout": True},
    "mask": {"mask": "bool"},
    "float-mask": {"mask": "", "scaled": True},
    "deterministic": {},
}
"""What each adds to `Features`; a float mask has the dtype of the call, deterministic are gradients."""

_WIDTH = 40
"""Of the progress bar, in characters."""


def warmup(
    arch: str | None = None,
    *,
    head_dims: Sequence[int | tuple[int, int]] = HEAD_DIMS,
    dtypes: Sequence[str] = DTYPES,
    features: Sequence[str] = FEATURES,
    groups: Sequence[int] = (1,),
    gradients: bool = True,
    jobs: int | None = None,
) -> list[Prepared]:
    """Compiles the kernels that calls will ask for, so that none of them waits; needs no GPU.

    Every combination of the arguments is prepared, for all sizes. Kernels go to FLASH4_CACHE_DIR. A progress
    bar is drawn where stderr is a terminal.

    Args:
        arch: "sm_90a" for Hopper, "sm_100a" for Blackwell (B200), "sm_103a" for its Ultra (B300). Default:
            the current GPU's.
        head_dims: D, or (D, Dv) where they differ; multiples of 8 up to 256, as other head sizes are padded.
        dtypes: "bfloat16" and "float16".
        features: words joined by "+", such as "causal+dropout", of plain, causal, window, softcap, varlen,
            dropout, mask (boolean), float-mask (in the call's dtype) and deterministic.
        groups: query heads to a key head.
        gradients: also the kernels of the backward, where it has some.
        jobs: processes that compile at the same time. Default: one for each processor.

    Returns:
        The kernels, and the seconds that each took, 0.0 for those that were there before.

    Raises:
        RangeError: an argument is none of the above, or the cache cannot be written to.
        CompileError: some kernels failed; the others are prepared all the same.
    """
    keys = kernels(arch, head_dims, dtypes, features, groups, gradients)
    return pool.prepare(keys, jobs, _draw if sys.stderr.isatty() else _draw_nothing)


def export(
    folder: str | PathLike[str],
    arch: str | None = None,
    *,
    head_dims: Sequence[int | tuple[int, int]] = HEAD_DIMS,
    dtypes: Sequence[str] = DTYPES,
    features: Sequence[str] = FEATURES,
    groups: Sequence[int] = (1,),
    gradients: bool = True,
    jobs: int | None = None,
    runtime: bool = False,
) -> Path:
    """Writes the kernels that `warmup` would prepare to `folder`, for FLASH4_AOT_DIR to name.

    runtime: also copy the compiler's runtime library (43 MB), for machines that lack nvidia-cutlass-dsl.
    Returns the path of the manifest. Raises what `warmup` raises, and ExportError without a linker.
    """
    prepared = warmup(
        arch,
        head_dims=head_dims,
        dtypes=dtypes,
        features=features,
        groups=groups,
        gradients=gradients,
        jobs=jobs,
    )
    return aot.export(Path(folder), [kernel for kernel, _ in prepared], runtime=runtime)


def kernels(
    arch: str | None,
    head_dims: Sequence[int | tuple[int, int]],
    dtypes: Sequence[str],
    features: Sequence[str],
    groups: Sequence[int],
    gradients: bool = True,
) -> list[Key]:
    """Every kernel that a call with these properties can ask for, each once. Raises RangeError."""
    target = TARGETS[checked(arch)]
    found: dict[Key, None] = {}
    for D, dtype, words, group in product(head_dims, dtypes, features, groups):
        chosen = features_of(D, dtype, words)
        entries = list(_of(target, chosen, group))
        if gradients:
            ordered = "deterministic" in words.split("+")
            entries += _of_gradients(target, chosen._replace(deterministic=ordered), group)
        found |= {Key(entry, static, target.arch): None for entry, static in entries}
    return list(found)


def features_of(head_dim: int | tuple[int, int], dtype: str, words: str) -> Features:
    """`Features` from their names in `warmup`."""
    D, Dv = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    for size in (D, Dv):
        if not (0 < size <= MAX_D and size % 8 == 0):
            raise RangeError("head_dims", size, f"each must be a multiple of 8 up to {MAX_D}")
    if dtype not in DTYPES:
        raise RangeError("dtypes", repr(dtype), f"each must be one of {', '.join(DTYPES)}")
    chosen: dict[str, object] = {}
    for word in words.split("+"):
        if word not in WORDS:
            raise RangeError("features", repr(word), f"each must be one of {', '.join(WORDS)}")
        chosen |= WORDS[word]
        if word == "float-mask":
            chosen["mask"] = dtype
    return Features(dtype, D, Dv)._replace(**chosen)  # type: ignore[arg-type]


def _of(target: Target, features: Features, group: int) -> Iterator[tuple[str, tuple[object, ...]]]:
    """The entries and what they are compiled for."""
    for reason in target.forward_configs.limits(features):
        raise RangeError("features", features, f"there is no kernel for {target.arch}: {reason}")
    for config in target.forward_configs.reachable(features, group):
        yield target.forward, (features, config)
        if features.mask:
            yield MASK_BLOCKS, (forward.mask_plan(features.mask, config),)


def _of_gradients(target: Target, features: Features, group: int) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Of the inputs, and of a floating mask, too; with and without one that arrives at lse."""
    for dmask in {False, features.float_mask}:
        asked = features._replace(dmask=dmask)
        if not target.backward_configs.limits(asked):
            yield from _of_gradients_of(target, asked, group)


def _of_gradients_of(
    target: Target, features: Features, group: int
) -> Iterator[tuple[str, tuple[object, ...]]]:
    for config in target.backward_configs.reachable(features, group):
        for dlse in (False, True):
            before, behind = backward.row_plans(features, config, dlse=dlse)
            yield PREPROCESS, (before,)
        yield target.backward, (backward.main_features(features, config), config)
        if behind is not None:
            yield POSTPROCESS, (behind,)
        if config.heads_apart:
            yield GROUP_SUMS, (backward.group_sums_plan(features),)
        if features.mask:
            yield MASK_BLOCKS, (backward.mask_plan(features.mask, config),)


def _draw(done: int, total: int) -> None:
    filled = _WIDTH * done // max(total, 1)
    bar = "#" * filled + "." * (_WIDTH - filled)
    end = "\n" if done == total else ""
    print(f"\rflash4_torch: [{bar}] {done} of {total} kernels{end}", end="", file=sys.stderr, flush=True)


def _draw_nothing(done: int, total: int) -> None:
    pass


def as_text(prepared: Iterable[Prepared]) -> str:
    """A line for each kernel, and a last one with their number."""
    lines = [f"{seconds:6.2f} s  {kernel}" for kernel, seconds in prepared]
    return "\n".join([*lines, f"{len(lines)} kernels"])
