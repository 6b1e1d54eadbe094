"""The backend of our compiled kernels: the calls that it serves, and their launches."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import cache, lru_cache, partial

import torch
from torch import Tensor

from ... import env
from ...kernels.common import mask_tables
from ...kernels.common.mask_tables import MaskPlan
from ...problem import Inputs, Problem, Saved, SavedWeights, has_float_mask
from ...reference.weights import WeightsGradients
from .. import tile_counters
from ..base import BackwardLaunch, Grads, Launch, OutAndLse, Results
from ..tiled import sinks_gradient
from . import backward, forward
from . import weights as weights_launch
from .backward import Allocator, Kernels, Operands
from .explain import explain
from .forward import Kernel
from .params import FARTHEST, mask_dtype
from .targets import MASK_BLOCKS, Find, Target
from .tensors import contiguous_strides, is_empty, is_readable, lengths, readable, unpad

_DTYPES = (torch.bfloat16, torch.float16)
_MASK_DTYPES = ("", "bool", "bfloat16", "float16", "float32")
_MOST_TILES = (1 << 31) - 1
_TO_RUN = {"tvm_ffi": "apache-tvm-ffi"}
_TO_COMPILE = {**_TO_RUN, "nvidia_cutlass_dsl": "nvidia-cutlass-dsl"}


class Compiled:
    """The backend that serves the GPUs of its targets."""

    def __init__(self, name: str, *targets: Target):
        self.name = name
        self._targets = {target.capability: target for target in targets}

    def why_not(self, problem: Problem) -> list[str]:
        spec = problem.spec
        if spec.device != "cuda":
            return [f"the tensors are on {spec.device}, and it serves cuda"]
        why = []
        target = self._targets.get(spec.capability)
        if target is None:
            served = " and ".join(map(str, self._targets))
            why.append(f"the GPU's compute capability is {spec.capability}, and it serves {served}")
        if missing := _missing(exported=bool(env.AOT_DIR.get())):
            why.append(f"{' and '.join(missing)} must be installed (pip install 'flash4_torch[kernels]')")
        return [*why, *limits(target or next(iter(self._targets.values())), problem)]

    def forward(self, inputs: Inputs, problem: Problem) -> Results:
        q, k, v = (readable(x) for x in inputs[:3])
        out, lse, low = _results(q, v, inputs.attn_mask)
        if is_empty(inputs, problem):
            low = None if low is None else low.zero_()
            lse.fill_(-math.inf)
            if inputs.sinks is not None:
                lse.copy_(inputs.sinks[:, None].expand(lse.shape))
            return Results(unpad(out.zero_(), problem.spec.Dv), lse, low)
        index = q.get_device()
        kernel = self.kernel(problem, index)
        mask = inputs.attn_mask
        if mask is not None:
            mask = mask.expand(*mask.shape[:3], problem.extent.Sk)
        kernel.function(
            q,
            k,
            v,
            out,
            lse,
            low,
            self.counter(index),
            lengths(inputs.cu_seqlens_q),
            lengths(inputs.cu_seqlens_k),
            self._mask_args(problem, mask, forward.mask_plan(mask_dtype(problem), kernel.config)),
            inputs.rng_state,
            None if inputs.sinks is None else inputs.sinks.contiguous(),
            kernel.params,
        )
        return Results(unpad(out, problem.spec.Dv), lse, low)

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> Grads:
        q, k, v, out, dout = (readable(x) for x in (*inputs[:3], saved.out, saved.dout))
        mask, dmask = inputs.attn_mask, None
        if mask is not None and saved.mask_grad:
            dmask = mask.new_zeros(mask.shape, dtype=torch.float32)
        dsinks = None if inputs.sinks is None else torch.zeros_like(inputs.sinks)
        if is_empty(inputs, problem):
            dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
            if dsinks is not None:
                dsinks = sinks_gradient(saved, inputs)
        else:
            kernels = self.backward_kernels(problem, q.get_device())
            ends_q, ends_k = lengths(inputs.cu_seqlens_q), lengths(inputs.cu_seqlens_k)
            shapes = backward.shapes_of(q, k, v, ends_q, kernels)
            if mask is not None:
                mask = backward.transposed(mask, problem.extent.Sq)
            operands = Operands(
                q,
                k,
                v,
                out,
                dout,
                lse=saved.lse.contiguous(),
                lse_low=None if saved.lse_low is None else saved.lse_low.contiguous(),
                dlse=None if saved.dlse is None else saved.dlse.contiguous(),
                cu_seqlens_q=ends_q,
                cu_seqlens_k=ends_k,
                mask=self._mask_args(problem, mask, backward.mask_plan(mask_dtype(problem), kernels.config)),
                dmask=None if dmask is None else dmask.transpose(2, 3),
                rng_state=inputs.rng_state,
            )

            def allocator(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
                return partial(q.new_empty, shape, dtype=dtype)

            launch = backward.sequence(kernels, shapes, q.dtype, problem.scale, kernels.params, allocator)
            dq, dk, dv, stats = launch(operands, self.counter(q.get_device()))
            if inputs.sinks is not None:
                dsinks = backward.sinks_gradient(stats, inputs.sinks, kernels)
        D, Dv = problem.spec.D, problem.spec.Dv
        if dmask is not None and inputs.attn_mask is not None:
            dmask = dmask.to(inputs.attn_mask.dtype)
        return Grads(unpad(dq, D), unpad(dk, D), unpad(dv, Dv), dmask, dsinks)

    def weights(self, saved: SavedWeights, inputs: Inputs, problem: Problem) -> Tensor:
        return self._weigh(inputs, saved, problem, saved.average_heads)

    def weights_backward(self, saved: SavedWeights, inputs: Inputs, problem: Problem) -> WeightsGradients:
        return weights_launch.backward(saved, inputs, problem, partial(self._weigh, average_heads=False))

    def _weigh(self, inputs: Inputs, saved: SavedWeights, problem: Problem, average_heads: bool) -> Tensor:
        q, k = readable(inputs.q), readable(inputs.k)
        B, Sq, Sk, Hq, _ = problem.extent
        result = q.new_empty((B, Sq, Sk) if average_heads else (B, Hq, Sq, Sk))
        if not result.numel():
            return result
        kernel = self.weights_kernel(problem, average_heads)
        mask = inputs.attn_mask
        if mask is not None:
            mask = mask.expand(*mask.shape[:3], Sk)
        kernel.function(
            q,
            k,
            saved.lse.contiguous(),
            None if saved.lse_low is None else saved.lse_low.contiguous(),
            result,
            self._mask_args(problem, mask, kernel.mask_plan),
            inputs.rng_state if problem.spec.dropout else None,
            kernel.params,
        )
        return result

    def prepare(self, inputs: Inputs, problem: Problem) -> Launch | None:
        """`forward`, prepared for dense, unmasked tensors of these sizes and strides if none needs a copy."""
        if not _is_plain(problem) or is_empty(inputs, problem) or not all(map(is_readable, inputs[:3])):
            return None
        import tvm_ffi

        spec = problem.spec
        B, Sq, _, Hq, _ = problem.extent
        index = inputs.q.get_device()
        function, _, numbers = self.kernel(problem, index)
        # A tuple would be converted again at every launch.
        params = tvm_ffi.convert(numbers)
        counter, current_device = tile_counters.counter, tile_counters.current_device
        allocator = _past_dispatcher(spec.device)
        new_out = allocator((B, Sq, Hq, spec.Dv), spec.dtype)
        new_lse = allocator((B, Hq, Sq), torch.float32)

        def launch(q: Tensor, k: Tensor, v: Tensor, rng_state: Tensor | None = None) -> OutAndLse:
            if current_device() != index:
                with torch.cuda.device(index):
                    return launch(q, k, v, rng_state)
            out, lse = new_out(), new_lse()
            function(q, k, v, out, lse, None, counter(index), None, None, None, rng_state, None, params)
            return out, lse

        return launch

    def prepare_backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> BackwardLaunch | None:
        """`backward`, prepared for the calls that `prepare` accepts, without a gradient of lse.

        Only dout may need a copy: the gradient of a sum is an expanded tensor.
        """
        read = (*inputs[:3], saved.out)
        if not _is_plain(problem) or problem.spec.dlse or is_empty(inputs, problem):
            return None
        if not all(map(is_readable, read)) or not saved.lse.is_contiguous():
            return None
        import tvm_ffi

        index = inputs.q.get_device()
        kernels = self.backward_kernels(problem, index)
        shapes = backward.shapes_of(*inputs[:3], None, kernels)
        params = tvm_ffi.convert(kernels.params)
        launch_all = backward.sequence(
            kernels, shapes, problem.spec.dtype, problem.scale, params, _past_dispatcher(problem.spec.device)
        )
        copied = not is_readable(saved.dout)
        counter, current_device = tile_counters.counter, tile_counters.current_device

        def launch(
            dout: Tensor,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            out: Tensor,
            lse: Tensor,
            rng_state: Tensor | None,
        ) -> tuple[Tensor, Tensor, Tensor]:
            if current_device() != index:
                with torch.cuda.device(index):
                    return launch(dout, q, k, v, out, lse, rng_state)
            if copied:
                dout = readable(dout)
            return launch_all(Operands(q, k, v, out, dout, lse, rng_state=rng_state), counter(index))[:3]

        return launch

    def _mask_args(
        self, problem: Problem, mask: Tensor | None, plan: MaskPlan
    ) -> tuple[Tensor, Tensor] | None:
        """The mask, and the tables that the mask kernel computes from it before ours runs."""
        if mask is None:
            return None
        tables = mask.new_empty(mask_tables.place(plan, *mask.shape).words, dtype=torch.int32)
        self.find(problem)(MASK_BLOCKS, (plan,))(mask, tables)
        return mask, tables

    def explain(self, problem: Problem) -> list[str]:
        """The row, config, plan and launch that serve the problem, a line each."""
        return explain(self.target(problem), problem, self.sms())

    # The emulator's backend overrides the following methods.

    def sms(self) -> int:
        """SMs of the current device."""
        return num_sms(torch.cuda.current_device())

    def target(self, problem: Problem) -> Target:
        """The target for the problem's GPU."""
        return self._targets[problem.spec.capability]

    def find(self, problem: Problem) -> Find:
        """The function that gets compiled kernels."""
        return self.target(problem).find

    def kernel(self, problem: Problem, index: int) -> Kernel:
        """The kernel that serves the problem on device `index`."""
        return _kernel(self.target(problem), problem, index)

    def backward_kernels(self, problem: Problem, index: int) -> Kernels:
        return _backward_kernels(self.target(problem), problem, index)

    def weights_kernel(self, problem: Problem, average_heads: bool) -> weights_launch.Kernel:
        """The kernel that computes the weights."""
        return _weights_kernel(self.target(problem), problem, average_heads)

    def counter(self, index: int) -> Tensor:
        """The tile counter of a launch, int32 (1,), which is 0."""
        return tile_counters.counter(index)


@lru_cache(maxsize=1024)
def limits(target: Target, problem: Problem) -> tuple[str, ...]:
    """The reasons why the target's kernels cannot serve the problem, on whatever device it is."""
    spec, extent = problem.spec, problem.extent
    why = []
    if spec.dtype not in _DTYPES:
        why.append(f"the dtype is {spec.dtype}, and it serves bfloat16 and float16")
    if spec.weights:
        why += weights_launch.limits(problem)
    else:
        why += (backward if spec.backward else forward).limits(target, problem)
    if spec.sinks not in _MASK_DTYPES or spec.sinks == "bool":
        why.append(f"sinks are {spec.sinks}, and it takes up to float32")
    if mask_dtype(problem) not in _MASK_DTYPES:
        why.append(f"attn_mask is {mask_dtype(problem)}, and it takes bool and up to float32")
    blocks = max(extent.Sq, extent.Sk if spec.backward else 0) // 64 + 1
    if max(extent) > FARTHEST or extent.B * extent.Hq * blocks > _MOST_TILES:
        why.append(f"the sizes are {tuple(extent)}, and it counts positions and tiles in 32 bits")
    return tuple(why)


@cache
def _missing(exported: bool) -> list[str]:
    """Required packages that are not installed; exported kernels need no compiler."""
    needed = _TO_RUN if exported else _TO_COMPILE
    return [package for module, package in needed.items() if not importlib.util.find_spec(module)]


def _is_plain(problem: Problem) -> bool:
    """Whether q, k, v and dropout's RNG state are the call's only tensors."""
    return not (problem.spec.varlen or problem.spec.mask or problem.spec.sinks or problem.spec.weights)


def _results(q: Tensor, v: Tensor, attn_mask: Tensor | None) -> Results:
    """Uninitialised out, lse and, with a floating mask, lse_low."""
    *batch, Sq, Hq, _ = q.shape
    out = q.new_empty(*batch, Sq, Hq, v.shape[-1])
    lse = q.new_empty(*batch, Hq, Sq, dtype=torch.float32)
    return Results(out, lse, torch.empty_like(lse) if has_float_mask(attn_mask) else None)


def _past_dispatcher(device: str) -> Allocator:
    """Allocates on the current device as torch's compiled graphs do."""
    empty = getattr(torch._C._dynamo.guards, f"_empty_strided_{device}")
    return lambda shape, dtype: partial(empty, shape, contiguous_strides(shape), dtype)


@lru_cache(maxsize=1024)
def _kernel(target: Target, problem: Problem, index: int) -> Kernel:
    return forward.decide(target, problem, num_sms(index), target.find)


@lru_cache(maxsize=1024)
def _backward_kernels(target: Target, problem: Problem, index: int) -> Kernels:
    return backward.decide(target, problem, num_sms(index), target.find)


@lru_cache(maxsize=1024)
def _weights_kernel(target: Target, problem: Problem, average_heads: bool) -> weights_launch.Kernel:
    return weights_launch.decide(target, problem, average_heads, target.find)


@cache
def num_sms(index: int) -> int:
    """Number of SMs of CUDA device `index`."""
    return torch.cuda.get_device_properties(index).multi_processor_count
