"""Ahead-of-time compilation: into the cache (`warmup`), or into a folder to ship (`export`)."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import product
from numbers import Integral
from os import PathLike, fspath
from pathlib import Path
from typing import NoReturn, TextIO

import torch
from torch import Tensor

from .backends.compiled import (
    APPEND_KVCACHE,
    DECODE,
    GROUP_REDUCE,
    MASK_BLOCKS,
    MASK_TRANSPOSE,
    MERGE_STATES,
    POSTPROCESS,
    PREPROCESS,
    SINKS_GRADIENT,
    TARGETS,
    WEIGHTS,
    WIDEST,
    Target,
    backward,
    forward,
    paged,
    serving,
    stacks,
    weights,
)
from .backends.compiled.backend import num_sms
from .backends.compiled.served import missing_packages
from .backends.kvcache import append, choose, decode_kernel, merge
from .backends.kvcache import compiled as kvcache
from .backends.kvcache.choice import find_kernels
from .compile import Key, aot, function, pool
from .compile.arch import checked
from .compile.pool import Prepared
from .configs.types import Features, Scope
from .errors import ArgumentError, ExportError, RangeError, hint
from .kvcache_problem import CacheExtent, CacheProblem
from .progress import Bar, Lines, Notes
from .reference.kvcache import Append

Step = CacheProblem | Append | tuple[Tensor, ...]
"""A call that a server's steps make: of attention over a cache, an append, or tensors of parts (N, B, Sq, Hq,
Dv) to merge."""

DTYPES = ("bfloat16", "float16")
ALL_DTYPES = (*DTYPES, "float32")
HEAD_DIMS = (64, 128)
FEATURES = ("plain", "causal")
MAX_D = 512
MAX_GROUP = 1024
"""More query heads per KV head than any model has; kernels compiled for 64 serve all larger groups."""

WORDS: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": {"right": True},
    "window": {"left": True, "right": True},
    "softcap": {"softcap": True, "scaled": True},
    "large-softcap": {"softcap": True, "scaled": True, "large_softcap": True},
    "varlen": {"varlen": True},
    "dropout": {"dropout": True},
    "mask": {"mask": "bool"},
    "float-mask": {"mask": "", "scaled": True},
    "sinks": {"sinks": ""},
    "weights": {},
    "kvcache": {},
    "deterministic": {},
    "ring": {},
}
"""Fields of `Features` that each word sets; floating masks and sinks have the call's dtype; deterministic:
gradients; weights: the attention weights, too; kvcache: what is done around a KV cache, too; ring: what ranks
that share a sequence call, too."""


def warmup(
    arch: str | None = None,
    *,
    head_dims: Sequence[int | tuple[int, int]] = HEAD_DIMS,
    dtypes: Sequence[str] = DTYPES,
    features: Sequence[str] = FEATURES,
    groups: Sequence[int] = (1,),
    gradients: bool = True,
    jobs: int | None = None,
    log: TextIO | None = None,
) -> list[Prepared]:
    """Compiles the kernels that later calls need, so that no call waits for the compiler; needs no GPU.

    Every combination of the arguments is prepared, for all sizes. Kernels go to FLASH4_CACHE_DIR.

    Args:
        arch: "sm_90a" for Hopper, "sm_100a" for Blackwell (B200), "sm_103a" for its Ultra (B300); "sm_80",
            "sm_86", "sm_87", "sm_89", "sm_120a" and "sm_121a" for GPUs of these compute capabilities.
            Default: the current GPU's.
        head_dims: D, or (D, Dv) where they differ; multiples of 8 up to 512 (other head sizes are padded).
            Above 256 the words weights and kvcache are errors. Default: 64 and 128.
        dtypes: "bfloat16", "float16" and "float32"; the latter with and without TF32, up to 256 columns (192
            where `arch` has 99 KiB of shared memory), without kvcache. Default: the first two.
        features: words joined by "+", such as "causal+dropout", of plain, causal, window, softcap,
            large-softcap (above 64 in 16 bits), varlen, dropout, mask (boolean), float-mask and sinks (both
            in the call's dtype), weights (for `need_weights=True`), kvcache (`attention_kvcache` over pages
            of 16, 64, 256 and dense caches, of this dtype or float8; `append_kvcache` to these by int64
            slots, by table and lengths, by slots also with rotary of all columns; `merge_states`),
            deterministic and ring (for ranks that share a sequence: results of many parts, and dropout in a
            part).
        groups: query heads per KV head, from 1 to 1024; kernels compiled for 64 serve all larger groups.
        gradients: also compile the backward's kernels, where it has some.
        jobs: processes that compile at the same time, at least 1. Default: one per processor.
        log: a text file that gets a line for each kernel as soon as it is there: its number and the total,
            the seconds that it took, its name, and an estimate of the time left. Default: a progress bar on
            stderr, if that is a terminal.

    Returns:
        The kernels, and the seconds that each took, 0.0 for those that were there before.

    Raises:
        ArgumentError: an argument is not one of the above (RangeError: of that type, but outside its range),
            or the cache cannot be written to. Nothing has been compiled then.
        CompileError: some kernels failed; the others are prepared nevertheless.
    """
    keys = kernels(arch, head_dims, dtypes, features, groups, gradients)
    return pool.prepare(keys, _jobs(jobs), *_shown(log))


def warmup_steps(steps: Sequence[Step], index: int, log: TextIO | None = None) -> list[Prepared]:
    """Compiles and loads the kernels that a server's steps may need, so that no request waits for them.

    Args:
        steps: calls with the largest sizes that they become, of tensors on device `index`: what
            `kvcache.steps` describes, or parts of results that are merged.
        index: that of a CUDA device.
        log: a text file that gets a line now and then. Default: stderr; a progress bar if that is a terminal.

    Returns:
        The kernels, as `warmup` does: none where kernels were exported, or where no compiler is installed.

    Raises:
        Flash4Error: some kernels failed, or the cache cannot be written to. Steps then compile what they
            need.
    """
    if missing_packages(exported=False):
        return []
    served = find_kernels("attention_kvcache", torch.device("cuda", index), [])
    if served is None:
        return []
    keys = [key for key in kernels_of_steps(steps, served.target, num_sms(index)) if aot.find(key) is None]
    if not keys:
        return []
    log = sys.stderr if log is None else log
    prepared = pool.prepare(keys, None, Bar(log) if log.isatty() else Notes(log))
    for key in keys:
        function(*key)
    return prepared


def kernels_of_steps(steps: Sequence[Step], target: Target, num_sms: int) -> list[Key]:
    """Every kernel that calls like these with sizes up to theirs look for, on a GPU of so many SMs, once."""
    # Layers of a model are alike.
    different = dict.fromkeys(steps)
    found = {kernel: None for step in different for kernel in _of_step(step, target, num_sms)}
    return [Key(entry, static, target.arch) for entry, static in found]


def _of_step(step: Step, target: Target, num_sms: int) -> Iterator[tuple[str, tuple[object, ...]]]:
    if isinstance(step, Append):
        yield from append.reachable(step, target)
    elif isinstance(step, CacheProblem):
        # Who serves the smallest call serves all but those whose sizes nobody's kernels take.
        *_, Hq, Hk, page_size = step.extent
        backend = choose(step.of_sizes(CacheExtent(1, 1, 1, 1, Hq, Hk, page_size)))
        if isinstance(backend, kvcache.Compiled):
            yield from backend.reachable(step, num_sms)
    else:
        yield from merge.reachable(step)


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
    log: TextIO | None = None,
) -> Path:
    """Writes the kernels that `warmup` would prepare to `folder`, which FLASH4_AOT_DIR can then name.

    Args:
        folder: created if it does not exist.
        runtime: also copy the compiler's runtime library (43 MB), for machines without nvidia-cutlass-dsl.
        arch, head_dims, dtypes, features, groups, gradients, jobs, log: as in `warmup`.

    Returns:
        The path of the manifest.

    Raises:
        ArgumentError, CompileError: as in `warmup`.
        ExportError: the folder cannot be written to (checked before anything is compiled), or there is no
            linker.
    """
    keys = kernels(arch, head_dims, dtypes, features, groups, gradients)
    _check_switch("runtime", runtime)
    jobs, shown, path = _jobs(jobs), _shown(log), _writable(folder)
    prepared = pool.prepare(keys, jobs, *shown)
    return aot.export(path, [kernel for kernel, _ in prepared], runtime=runtime)


def _jobs(jobs: int | None) -> int | None:
    if jobs is None:
        return None
    found = _whole_number("jobs", jobs, "it must be an int of at least 1, or None")
    if found < 1:
        raise RangeError("jobs", found, "it must be at least 1")
    return found


def _shown(log: TextIO | None) -> tuple[Callable[..., None], ...]:
    """Callbacks for `pool.prepare`."""
    if log is None:
        return (Bar(sys.stderr) if sys.stderr.isatty() else _show_nothing,)
    if not hasattr(log, "write"):
        raise ArgumentError("log", repr(log), "it must be a text file, or None")
    lines = Lines(log)
    return lines.begin, lines.made


def _show_nothing(done: int, total: int) -> None:
    pass


def _writable(folder: str | PathLike[str]) -> Path:
    """`folder`, created if necessary and probed with a write. Raises ArgumentError and ExportError."""
    name = fspath(folder) if isinstance(folder, (str, PathLike)) else None
    if not name or not isinstance(name, str):
        raise ArgumentError("folder", repr(folder), "it must be the path of a folder, a str or os.PathLike")
    aot.require_writable(Path(name))
    if reason := why_not_writable(Path(name)):
        raise ExportError(name, f"the folder cannot be written to ({reason})")
    return Path(name)


def why_not_writable(folder: Path) -> str:
    """The reason why `folder`, created if necessary, cannot be written to; empty if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)


def kernels(
    arch: str | None,
    head_dims: Sequence[int | tuple[int, int]],
    dtypes: Sequence[str],
    features: Sequence[str],
    groups: Sequence[int],
    gradients: bool = True,
) -> list[Key]:
    """Every kernel that a call with these properties can need, each once. Raises ArgumentError."""
    target = TARGETS[checked(arch)]
    _check_switch("gradients", gradients)
    lists = {"head_dims": head_dims, "dtypes": dtypes, "features": features, "groups": groups}
    for name, values in lists.items():
        _check_list(name, values)
    found: dict[Key, None] = {}
    for D, dtype, words, group in product(head_dims, dtypes, features, map(_group, groups)):
        chosen, asked = features_of(D, dtype, words), words.split("+")
        own, precisions = serving(target, chosen), _precisions(chosen)
        entries = [entry for each in precisions for entry in _of(own, each, group)]
        if "weights" in asked:
            _require_narrow(target, chosen, "weights")
            entries += [entry for each in precisions for entry in _of_weights(own, each)]
        if "kvcache" in asked:
            _require_16_bits(target, chosen)
            entries += _of_kvcache(target, chosen, group)
        in_order = "deterministic" in asked
        for each in (precise._replace(deterministic=in_order) for precise in precisions):
            if gradients:
                entries += _of_gradients(own, each, group)
            entries += _of_stacks(own, each, group, gradients)
            if "ring" in asked:
                entries += _of_ring(own, each, group, gradients)
        found |= {Key(entry, static, target.arch): None for entry, static in entries}
    return list(found)


def _precisions(features: Features) -> tuple[Features, ...]:
    """The features with each precision that a call of their dtype can have."""
    return (features, features._replace(tf32=True)) if features.is_float32 else (features,)


def _require_narrow(target: Target, features: Features, word: str) -> None:
    if max(features.D, features.Dv) > WIDEST:
        heads = f"D is {features.D} and Dv is {features.Dv}"
        _refuse(target, word, f"{heads}, and it serves up to {WIDEST}")


def _require_16_bits(target: Target, features: Features) -> None:
    _require_narrow(target, features, "kvcache")
    if features.is_float32:
        _refuse(target, "kvcache", f"the dtype is {features.dtype}, and it serves 16-bit dtypes")


def features_of(head_dim: int | tuple[int, int], dtype: str, words: str) -> Features:
    """`Features` from the words of `warmup`."""
    sizes = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    if len(sizes) != 2:
        raise ArgumentError("head_dims", repr(head_dim), "each must be D or a pair (D, Dv)")
    D, Dv = map(_size, sizes)
    if dtype not in ALL_DTYPES:
        limit = f"each must be one of {', '.join(ALL_DTYPES)}{hint(str(dtype), ALL_DTYPES)}"
        raise RangeError("dtypes", repr(dtype), limit)
    if not isinstance(words, str):
        raise ArgumentError("features", repr(words), "each must be a str, such as 'causal+dropout'")
    parts = words.split("+")
    if "mask" in parts and "float-mask" in parts:
        raise RangeError("features", repr(words), "a call has one mask, a boolean or a floating one")
    chosen: dict[str, object] = {}
    for word in parts:
        if word not in WORDS:
            limit = f"each must be one of {', '.join(WORDS)}{hint(word, WORDS)}"
            raise RangeError("features", repr(word), limit)
        chosen |= WORDS[word]
        if word in ("float-mask", "sinks"):
            chosen["mask" if word == "float-mask" else word] = dtype
    # What a kernel of float32 does to scores is exact for every softcap.
    if dtype == "float32" and "softcap" in parts:
        chosen["large_softcap"] = True
    return Features(dtype, D, Dv)._replace(**chosen)  # type: ignore[arg-type]


def _size(size: object) -> int:
    found = _whole_number("head_dims", size, "each must be an int, or a pair (D, Dv) of them")
    if not (0 < found <= MAX_D and found % 8 == 0):
        raise RangeError("head_dims", found, f"each must be a multiple of 8 up to {MAX_D}")
    return found


def _group(group: object) -> int:
    found = _whole_number("groups", group, "each must be an int, the query heads to a KV head")
    if not 1 <= found <= MAX_GROUP:
        raise RangeError("groups", found, f"each must be from 1 to {MAX_GROUP}")
    return found


def _whole_number(argument: str, value: object, limit: str) -> int:
    """The value as Python's own int: a kernel's name uses its repr, and NumPy's ints have another."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentError(argument, repr(value), limit)
    return int(value)


def _check_list(argument: str, values: object) -> None:
    if isinstance(values, (str, bytes)) or not isinstance(values, (Sequence, Set)):
        raise ArgumentError(argument, repr(values), "it must be a list or another sequence")
    if not values:
        raise RangeError(argument, repr(values), "it must have at least one element")


def _check_switch(argument: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ArgumentError(argument, repr(value), "it must be True or False")


def _of(target: Target, features: Features, group: int) -> Iterator[tuple[str, tuple[object, ...]]]:
    """The forward's entries, each with the arguments that it is compiled for."""
    for reason in target.forward_configs.limits(features):
        _refuse(target, features, reason)
    for own, config in forward.reachable(target, features, group):
        yield target.forward, (own, config)
        if own.mask:
            yield MASK_BLOCKS, (forward.mask_plan(own.mask, config),)


def _of_stacks(
    target: Target, features: Features, group: int, gradients: bool
) -> Iterator[tuple[str, tuple[object, ...]]]:
    """The same of batches of short sequences."""
    own = stacks.features_of(target, features)
    if own is not None:
        yield from _of(target, own._replace(deterministic=False), group)
        if gradients:
            yield from _of_gradients(target, own, group)


def _refuse(target: Target, features: object, reason: str) -> NoReturn:
    raise RangeError("features", features, f"there is no kernel for {target.arch}: {reason}")


def _of_weights(target: Target, features: Features) -> Iterator[tuple[str, tuple[object, ...]]]:
    own = weights.features_of_weights(features)
    yield from ((WEIGHTS, weights.statics(target, own, average_heads)) for average_heads in (True, False))
    if own.dropout:
        yield WEIGHTS, weights.statics(target, own, average_heads=False, signed=True)
    if own.mask:
        yield MASK_BLOCKS, (weights.mask_plan(own.mask),)


def _of_kvcache(target: Target, features: Features, group: int) -> Iterator[tuple[str, tuple[object, ...]]]:
    dtype, D, Dv = features.dtype, features.D, features.Dv
    plans = append.common_plans(dtype, D, Dv, target.decode.converts_fp8)
    yield from ((APPEND_KVCACHE, (plan,)) for plan in plans)
    yield from ((MERGE_STATES, (plan,)) for plan in merge.common_plans(dtype, Dv))
    # One token alone sees all keys before it, causal or not.
    for each in {features, features._replace(right=False)}:
        yield from ((DECODE, static) for static in decode_kernel.common_kernels(target, each, group))
    if target.has_pages and not target.forward_configs.limits(features):
        for own, config in paged.common_kernels(target, features, group):
            yield target.forward, (own, config)


def _of_ring(
    target: Target, features: Features, group: int, gradients: bool
) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Forwards and gradients of parts, whose sinks join last."""
    part = features._replace(sinks="", dropout_of_part=features.dropout)
    in_parts = () if part.mask or part.varlen else ("begin", "add")
    for running in ("", *in_parts):
        yield from _of(target, part._replace(deterministic=False, running=running), group)
    yield from ((MERGE_STATES, (plan,)) for plan in merge.common_plans(part.dtype, part.Dv))
    if gradients:
        yield from _of_gradients(target, part, group)


def _of_gradients(target: Target, features: Features, group: int) -> Iterator[tuple[str, tuple[object, ...]]]:
    """The backward's entries, without and with a floating mask's gradient, without and with one of lse."""
    for dmask in {False, features.float_mask}:
        asked = features._replace(dmask=dmask, sinks="")
        if not target.backward_configs.limits(asked):
            yield from _of_gradients_of(target, asked, group)
            if features.sinks:
                for config in target.backward_configs.reachable(asked, group):
                    yield SINKS_GRADIENT, (backward.sinks_plan(features.sinks, asked, config),)


def _of_gradients_of(
    target: Target, features: Features, group: int
) -> Iterator[tuple[str, tuple[object, ...]]]:
    for config in target.backward_configs.reachable(features, group):
        for dlse in (False, True):
            preprocess, postprocess = backward.row_plans(features, config, dlse=dlse)
            if preprocess is not None:
                yield PREPROCESS, (preprocess,)
        yield target.backward, (backward.main_features(features, config), config)
        if postprocess is not None:
            yield POSTPROCESS, (postprocess,)
        if config.scope == Scope.Q_HEAD:
            yield GROUP_REDUCE, (backward.group_reduce_plan(features),)
        if features.mask:
            plan = backward.mask_plan(features.mask, config)
            yield MASK_BLOCKS, (plan,)
            if not plan.column_major:
                yield MASK_TRANSPOSE, (plan,)
