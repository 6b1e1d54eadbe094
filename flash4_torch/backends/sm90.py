"""Our kernels for Hopper GPUs: from a call to a launch.

The problem gives the features, the features and sizes a config; both together name the compiled kernel, and
what is left of the call travels in a tuple of numbers, its rule.
"""

from __future__ import annotations

import importlib.util
import math
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .. import compile, env
from ..configs import sm90 as configs
from ..configs.types import Features, Sm90Forward
from ..kernels.common import mask_tables
from ..kernels.common.mask_tables import MaskPlan
from ..problem import Inputs, Problem, Saved
from ..reference.dropout import thresholds
from . import tickets
from .base import Grads, Launch, Results

ARCH = "sm_90a"
FORWARD = "flash4_torch.kernels.sm90.fwd.launch:compile_forward"
MASK_BLOCKS = "flash4_torch.kernels.shared.mask_blocks:compile_mask_blocks"

_CAPABILITY = (9, 0)
_DTYPES = (torch.bfloat16, torch.float16)
_MASK_DTYPES = ("", "bool", "bfloat16", "float16", "float32")
_MAX_D = 256
_FARTHEST = 1 << 30
"""The kernels' largest position and bound: sums of two stay within 32 bits."""
_MOST_TILES = (1 << 31) - 1
_TO_RUN = {"tvm_ffi": "apache-tvm-ffi"}
_TO_COMPILE = {**_TO_RUN, "nvidia_cutlass_dsl": "nvidia-cutlass-dsl"}
_ALIGNMENT = 16
"""Bytes; what the copy engine wants of addresses and strides, and eight of our elements."""
_STEP = _ALIGNMENT // 2
_L2_BYTES = 32 << 20
"""K and V that stay in the L2 cache while the queries of their heads pass by."""
_TILES_IN_SECTION = 4
"""For each multiprocessor; with fewer, some would idle where one section of heads ends."""
_LONG = 8192
"""Keys."""
_MOST_IN_SECTION = 32
"""Packs of heads, before sections are made even."""

Rule = tuple[float, float, int, int, int, int, int, int, int, float]
"""The fields of `kernels.common.args.Rule`: scale, softcap, left, right, longest Sq, packs in a section,
multiprocessors, drop byte, drop fraction, keep scale."""


class Kernel(NamedTuple):
    """A compiled kernel, and what it is told besides tensors."""

    function: compile.Function
    config: Sm90Forward
    rule: Rule


class Sm90:
    name = "sm90"

    def why_not(self, problem: Problem) -> list[str]:
        spec = problem.spec
        if spec.device != "cuda":
            return [f"the tensors are on {spec.device}, and it serves cuda"]
        why = []
        if spec.capability != _CAPABILITY:
            why.append(f"the GPU's compute capability is {spec.capability}, and it serves {_CAPABILITY}")
        if missing := _missing(exported=bool(env.AOT_DIR.get())):
            why.append(f"{' and '.join(missing)} must be installed (pip install 'flash4_torch[kernels]')")
        return why + limits(problem)

    def forward(self, inputs: Inputs, problem: Problem) -> Results:
        q, k, v = (readable(x) for x in inputs[:3])
        out, lse = _results(q, v)
        if _is_empty(inputs, problem):
            return _cut(out.zero_(), problem.spec.Dv), lse.fill_(-math.inf)
        index = q.get_device()
        kernel = self.kernel(problem, index)
        kernel.function(
            q,
            k,
            v,
            out,
            lse,
            self.counter(index),
            _lengths(inputs.cu_seqlens_q),
            _lengths(inputs.cu_seqlens_k),
            self._mask_args(inputs.attn_mask, problem, kernel.config),
            inputs.rng_state,
            kernel.rule,
        )
        return _cut(out, problem.spec.Dv), lse

    def prepare(self, inputs: Inputs, problem: Problem) -> Launch | None:
        """`forward` for dense tensors alone, of these sizes and strides, that need no copy."""
        spec = problem.spec
        alone = not (spec.varlen or spec.mask or spec.dropout)
        if not alone or _is_empty(inputs, problem) or not all(map(is_readable, inputs[:3])):
            return None
        import tvm_ffi

        B, Sq, _, Hq, _ = problem.extent
        shape, strides = (B, Sq, Hq, spec.Dv), (Sq * Hq * spec.Dv, Hq * spec.Dv, spec.Dv, 1)
        lse_shape, lse_strides = (B, Hq, Sq), (Hq * Sq, Sq, 1)
        index, dtype, float32 = inputs.q.get_device(), spec.dtype, torch.float32
        function, _, numbers = _kernel(problem, index)
        # A tuple would be converted anew at every launch.
        rule = tvm_ffi.convert(numbers)
        counter, current_device = tickets.counter, tickets.current_device
        # Torch's compiled graphs allocate so: past the dispatcher, on the current device.
        empty = getattr(torch._C._dynamo.guards, f"_empty_strided_{spec.device}")

        def launch(q: Tensor, k: Tensor, v: Tensor) -> Results:
            if current_device() != index:
                with torch.cuda.device(index):
                    return launch(q, k, v)
            out, lse = empty(shape, strides, dtype), empty(lse_shape, lse_strides, float32)
            function(q, k, v, out, lse, counter(index), None, None, None, None, rule)
            return out, lse

        return launch

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> Grads:
        raise AssertionError("why_not refuses every backward")

    def _mask_args(
        self, mask: Tensor | None, problem: Problem, config: Sm90Forward
    ) -> tuple[Tensor, Tensor] | None:
        """The mask with all of its keys, and the tables that a kernel before ours makes of it."""
        if mask is None:
            return None
        mask = mask.expand(*mask.shape[:3], problem.extent.Sk)
        plan = mask_plan(_mask_dtype(problem), config)
        tables = mask.new_empty(mask_tables.place(plan, *mask.shape).words, dtype=torch.int32)
        self.function(MASK_BLOCKS, (plan,))(mask, tables)
        return mask, tables

    # What the emulator has another of.

    def function(self, entry: str, static: tuple[object, ...]) -> compile.Function:
        """A compiled kernel."""
        return compile.function(entry, static, ARCH)

    def kernel(self, problem: Problem, index: int) -> Kernel:
        """The kernel that serves the problem on device `index`."""
        return _kernel(problem, index)

    def counter(self, index: int) -> Tensor:
        """A launch's counter of tiles, int32 (1,) and 0."""
        return tickets.counter(index)


def limits(problem: Problem) -> list[str]:
    """Why the kernels cannot serve the problem, wherever it is."""
    spec, extent = problem.spec, problem.extent
    why = []
    if spec.backward:
        why.append("it has no backward")
    if spec.dtype not in _DTYPES:
        why.append(f"the dtype is {spec.dtype}, and it serves bfloat16 and float16")
    if max(spec.D, spec.Dv) > _MAX_D:
        why.append(f"D is {spec.D} and Dv is {spec.Dv}, and it serves up to {_MAX_D}")
    if _mask_dtype(problem) not in _MASK_DTYPES:
        why.append(f"attn_mask is {_mask_dtype(problem)}, and it takes bool and up to float32")
    if max(extent) > _FARTHEST or extent.B * extent.Hq * -(-extent.Sq // 64) > _MOST_TILES:
        why.append(f"the sizes are {tuple(extent)}, and it counts positions and tiles in 32 bits")
    return why


@cache
def _missing(exported: bool) -> list[str]:
    """Packages that are needed and not installed; kernels that were exported need no compiler."""
    needed = _TO_RUN if exported else _TO_COMPILE
    return [package for module, package in needed.items() if not importlib.util.find_spec(module)]


def is_readable(x: Tensor) -> bool:
    """Whether the copy engine reads `x` in place: rows of neighbours, at multiples of 16 bytes.

    A stride of 0, as `expand` makes it, is none that it promises to take.
    """
    *outer, last = x.stride()
    in_steps = all(stride > 0 and stride % _STEP == 0 for stride in outer)
    return last == 1 and in_steps and x.shape[-1] % _STEP == 0 and x.data_ptr() % _ALIGNMENT == 0


def readable(x: Tensor) -> Tensor:
    """`x` itself if the copy engine reads it in place, else a copy; zeros fill its head size up to eights."""
    if is_readable(x):
        return x
    D = x.shape[-1]
    # Not `contiguous`: that returns dimensions of 1 with the strides they have.
    copy = x.new_empty(*x.shape[:-1], _filled_up(D))
    copy[..., :D] = x
    copy[..., D:] = 0.0
    return copy


def _filled_up(D: int) -> int:
    return -(-D // _STEP) * _STEP


def _results(q: Tensor, v: Tensor) -> Results:
    """Room for out and lse."""
    *batch, Sq, Hq, _ = q.shape
    out = q.new_empty(*batch, Sq, Hq, v.shape[-1])
    return out, q.new_empty(*batch, Hq, Sq, dtype=torch.float32)


def _cut(out: Tensor, Dv: int) -> Tensor:
    return out if out.shape[-1] == Dv else out[..., :Dv].contiguous()


def _is_empty(inputs: Inputs, problem: Problem) -> bool:
    """Whether there is nothing to attend from, or nothing to attend to."""
    return 0 in problem.extent or not (inputs.q.numel() and inputs.k.numel())


def _lengths(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.to(torch.int32).contiguous()


@lru_cache(maxsize=1024)
def _kernel(problem: Problem, index: int) -> Kernel:
    """The kernel that serves the problem on CUDA device `index`."""
    features, config = features_of(problem), config_of(problem)
    function = compile.function(FORWARD, (features, config), ARCH)
    return Kernel(function, config, rule_of(problem, config, _multiprocessors(index)))


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def features_of(problem: Problem) -> Features:
    """What the kernel has to compute; a bound that hides nothing is none."""
    spec, band, extent = problem.spec, problem.band, problem.extent
    mask = _mask_dtype(problem)
    return Features(
        dtype=str(spec.dtype).removeprefix("torch."),
        D=_filled_up(spec.D),
        Dv=_filled_up(spec.Dv),
        varlen=spec.varlen,
        left=band.left is not None and band.left < extent.Sk - 1,
        right=band.right is not None and band.right < extent.Sq - 1,
        softcap=spec.softcap,
        scaled=spec.softcap or mask not in ("", "bool") or problem.scale <= 0.0,
        mask=mask,
        dropout=spec.dropout,
    )


def mask_plan(dtype: str, config: Sm90Forward) -> MaskPlan:
    """How a mask of that dtype is cut into blocks: as the config's tiles are."""
    return MaskPlan(dtype, config.queries, config.keys, config.pack)


def _mask_dtype(problem: Problem) -> str:
    return problem.spec.mask.partition(":")[0]


def config_of(problem: Problem) -> Sm90Forward:
    band, extent = problem.band, problem.extent
    seen = None
    if band.left is not None and band.right is not None:
        seen = max(band.left + band.right + 1, 1)
    end_hidden = band.right is not None and band.right <= 0
    return configs.forward(features_of(problem), extent.Sq, extent.Sk, problem.spec.group, seen, end_hidden)


def rule_of(problem: Problem, config: Sm90Forward, multiprocessors: int) -> Rule:
    left, right = (0 if b is None else max(-_FARTHEST, min(b, _FARTHEST)) for b in problem.band)
    drop_byte, drop_fraction = thresholds(problem.dropout_p)
    keep_scale = 0.0 if problem.dropout_p >= 1.0 else 1.0 / (1.0 - problem.dropout_p)
    return (
        problem.scale,
        problem.softcap,
        left,
        right,
        problem.extent.Sq,
        _section(problem, config, multiprocessors),
        multiprocessors,
        drop_byte,
        drop_fraction,
        keep_scale,
    )


def _section(problem: Problem, config: Sm90Forward, multiprocessors: int) -> int:
    """How many packs of heads take turns: long tiles come first while their K and V stay in the cache.

    Without a bound to the right all tiles are equally long, and heads follow one another. Long key heads do
    so by twos: where all multiprocessors read the same K and V, D 64 is now and then slower by a tenth.
    """
    spec, extent = problem.spec, problem.extent
    packs = -(-spec.group // config.pack)
    if not features_of(problem).right:
        return 1 if extent.Sk <= _LONG else 2 * packs
    cached = _L2_BYTES // (extent.Sk * (spec.D + spec.Dv) * spec.dtype.itemsize)
    tiles = packs * -(-extent.Sq // config.queries)
    enough = -(-_TILES_IN_SECTION * multiprocessors // tiles)
    wanted = min(max(cached, enough), max(_MOST_IN_SECTION // packs, 1), extent.B * extent.Hk)
    return _evenly(extent.B * extent.Hk, wanted) * packs


def _evenly(heads: int, wanted: int) -> int:
    """A section's heads near those wanted, such that the last section is not much smaller than the others."""
    near = range(-(-wanted * 3 // 4), min(wanted * 3 // 2, heads) + 1)
    return min(near, key=lambda n: (-heads % n / n, abs(n - wanted)))
