"""The backend of our compiled kernels: the calls that it serves, and their launches."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache, partial

import torch
from torch import Tensor

from ...kernels.common.mask_tables import MaskPlan
from ...problem import Inputs, Problem, Saved, SavedWeights, has_float_mask
from ...reference.weights import WeightsGradients
from .. import tile_counters
from ..base import SEQUENCE_FIRST, BackwardLaunch, Grads, Launch, Order, Results, WeightsLaunch
from ..tiled import sinks_gradient
from . import backward, forward, prepared, stacks
from . import weights as weights_launch
from .backward import Kernels
from .dq_sums import CompiledDqSums
from .explain import explain
from .forward import Kernel
from .masks import (
    Read,
    View,
    over_keys,
    prepared_reader,
    prepared_transposed_reader,
    reader,
    transposed_reader,
)
from .params import FARTHEST, mask_dtype
from .running import CompiledRunningOut
from .served import OnTargets
from .targets import BackwardConfig, Find, ForwardConfig, Target
from .tensors import Allocator, allocator_like, is_empty, is_readable, past_dispatcher, readable, unpad

_DTYPES = (torch.bfloat16, torch.float16)
_MASK_DTYPES = ("", "bool", "bfloat16", "float16", "float32")
_MOST_TILES = (1 << 31) - 1


class Compiled(OnTargets):
    """The backend that serves the GPUs of its targets.

    unasked: whether a call is served by targets on request, too, though FLASH4_BACKEND does not ask for it.
    """

    def __init__(
        self,
        name: str,
        *targets: Target,
        on_request: tuple[Target, ...] = (),
        unasked: Callable[[Problem], bool] = lambda problem: False,
    ):
        super().__init__(name, *targets, on_request=on_request)
        self._unasked = unasked

    def why_not(self, problem: Problem) -> list[str]:
        spec = problem.spec
        if spec.device != "cuda":
            return [f"the tensors are on {spec.device}, and it serves cuda"]
        why = self._why_not_here(spec.capability, self._unasked(problem))
        return [*why, *limits(self._any_target(spec.capability), problem)]

    def forward(self, inputs: Inputs, problem: Problem) -> Results:
        q, k, v = (readable(x) for x in inputs[:3])
        shapes = forward.shapes_of(q, v)
        if is_empty(inputs, problem):
            return _of_nothing(inputs, problem, shapes)
        index = q.get_device()
        problem = self._stacked(problem, q, k, v)
        kernel, allocator = self.kernel(problem, index), allocator_like(q)
        read_mask = self._mask_reader(inputs, problem, kernel.config, allocator)
        launch = forward.sequence(kernel, shapes, q.dtype, kernel.params, read_mask, allocator)
        results = launch(inputs._replace(q=q, k=k, v=v), self.counter(index))
        return results._replace(out=unpad(results.out, problem.spec.Dv))

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> Grads:
        if is_empty(inputs, problem):
            return _grads_of_nothing(saved, inputs)
        q, k, v, out, dout = (readable(x) for x in (*inputs[:3], saved.out, saved.dout))
        mask, dmask = inputs.attn_mask, None
        if mask is not None and saved.mask_grad:
            shape = backward.dmask_shape(problem, mask.shape)
            dmask = mask.new_zeros(shape, dtype=torch.float32)
        index = q.get_device()
        problem = self._stacked(problem, q, k, v, out, dout)
        kernels, allocator = self.backward_kernels(problem, index), allocator_like(q)
        readable_inputs = inputs._replace(q=q, k=k, v=v)
        launch = backward.sequence(
            kernels,
            backward.shapes_of(q, k, v, inputs.cu_seqlens_q, kernels),
            q.dtype,
            problem.scale,
            kernels.params,
            self._transposed_mask_reader(inputs, problem, kernels.config, allocator),
            allocator,
        )
        readable_saved = saved._replace(
            dout=dout,
            out=out,
            lse=saved.lse.contiguous(),
            lse_low=None if saved.lse_low is None else saved.lse_low.contiguous(),
            dlse=None if saved.dlse is None else saved.dlse.contiguous(),
        )
        grads = launch(readable_saved, readable_inputs, dmask, self.counter(index))
        D, Dv = problem.spec.D, problem.spec.Dv
        if dmask is not None and mask is not None:
            dmask = dmask.sum_to_size(mask.shape).to(mask.dtype)
        return Grads(unpad(grads.dq, D), unpad(grads.dk, D), unpad(grads.dv, Dv), dmask, grads.dsinks)

    def running_out(self, q: Tensor, Dv: int) -> CompiledRunningOut:
        return CompiledRunningOut(self, q, Dv)

    def dq_sums(self, q: Tensor, saved: Saved) -> CompiledDqSums:
        return CompiledDqSums(self, q, saved)

    def weights(self, saved: SavedWeights, inputs: Inputs, problem: Problem) -> Tensor:
        return self._launch_weights(saved, inputs, problem, saved.average_heads)

    def weights_backward(self, saved: SavedWeights, inputs: Inputs, problem: Problem) -> WeightsGradients:
        return weights_launch.backward(
            saved, inputs, problem, partial(self._launch_weights, average_heads=False)
        )

    def _launch_weights(
        self, saved: SavedWeights, inputs: Inputs, problem: Problem, average_heads: bool
    ) -> Tensor:
        q, k = readable(inputs.q), readable(inputs.k)
        allocator = allocator_like(q)
        shape = weights_launch.shape_of(problem, average_heads)
        if 0 in shape:
            return allocator(shape, q.dtype)()
        kernel = self.weights_kernel(problem, average_heads)
        read_mask = self._reader(problem, kernel.mask_plan, inputs, over_keys(problem.extent.Sk), allocator)
        launch = weights_launch.sequence(kernel, shape, q.dtype, kernel.params, read_mask, allocator)
        lse_low = None if saved.lse_low is None else saved.lse_low.contiguous()
        readable_saved = saved._replace(lse=saved.lse.contiguous(), lse_low=lse_low)
        rng_state = inputs.rng_state if problem.spec.dropout else None
        return launch(readable_saved, inputs._replace(q=q, k=k, rng_state=rng_state))

    def prepare(self, inputs: Inputs, problem: Problem, order: Order = SEQUENCE_FIRST) -> Launch | None:
        """`forward`, prepared for tensors of these sizes and strides if none of q, k and v needs a copy."""
        if is_empty(inputs, problem) or not all(map(is_readable, inputs[:3])):
            return None
        index = inputs.q.get_device()
        problem = self._stacked(problem, *inputs[:3])
        kernel = self.kernel(problem, index)
        plan = forward.mask_plan(mask_dtype(problem), kernel.config)
        allocator, see = past_dispatcher(problem.spec.device), over_keys(problem.extent.Sk)
        read_mask = prepared_reader(self.find(problem), plan, inputs.attn_mask, see, allocator, problem)
        return prepared.forward(kernel, inputs, problem, index, read_mask, order)

    def prepare_backward(
        self, saved: Saved, inputs: Inputs, problem: Problem, order: Order = SEQUENCE_FIRST
    ) -> BackwardLaunch | None:
        """`backward`, prepared for the calls that `prepare` accepts; lse and attn_mask get no gradients."""
        if is_empty(inputs, problem) or problem.spec.dlse or problem.spec.dmask:
            return None
        if not all(map(is_readable, (*inputs[:3], saved.out))) or not saved.lse.is_contiguous():
            return None
        index = inputs.q.get_device()
        if is_readable(saved.dout):
            problem = self._stacked(problem, *inputs[:3], saved.out, saved.dout)
        kernels = self.backward_kernels(problem, index)
        plan = backward.mask_plan(mask_dtype(problem), kernels.config)
        allocator, Sq = past_dispatcher(problem.spec.device), problem.extent.Sq
        read_mask = prepared_transposed_reader(
            self.find(problem), plan, inputs.attn_mask, Sq, allocator, problem
        )
        return prepared.backward(kernels, inputs, problem, index, read_mask, saved.dout, order)

    def prepare_weights(self, inputs: Inputs, problem: Problem, average_heads: bool) -> WeightsLaunch | None:
        """`weights`, prepared for the calls that `prepare` accepts, after whose launch it runs."""
        if is_empty(inputs, problem) or not all(map(is_readable, inputs[:2])):
            return None
        index, allocator = inputs.q.get_device(), past_dispatcher(problem.spec.device)
        kernel = self.weights_kernel(problem, average_heads)
        read_mask = self._reader(problem, kernel.mask_plan, inputs, over_keys(problem.extent.Sk), allocator)
        shape, params = weights_launch.shape_of(problem, average_heads), prepared.converted(kernel.params)
        run = weights_launch.sequence(kernel, shape, problem.spec.dtype, params, read_mask, allocator)
        current_device = tile_counters.current_device

        def launch(saved: SavedWeights, inputs: Inputs) -> Tensor:
            if current_device() != index:
                with torch.cuda.device(index):
                    return run(saved, inputs)
            return run(saved, inputs)

        return launch

    def _mask_reader(
        self, inputs: Inputs, problem: Problem, config: ForwardConfig, allocator: Allocator
    ) -> Read:
        plan = forward.mask_plan(mask_dtype(problem), config)
        return self._reader(problem, plan, inputs, over_keys(problem.extent.Sk), allocator)

    def _transposed_mask_reader(
        self, inputs: Inputs, problem: Problem, config: BackwardConfig, allocator: Allocator
    ) -> Read:
        plan = backward.mask_plan(mask_dtype(problem), config)
        if problem.entries > 1:
            return self._reader(problem, plan, inputs, over_keys(problem.extent.Sk), allocator)
        find, Sq = self.find(problem), problem.extent.Sq
        return transposed_reader(find, plan, inputs.attn_mask, Sq, allocator, problem)

    def _stacked(self, problem: Problem, *tensors: Tensor) -> Problem:
        """The problem as one of stacks of batch entries, if kernels are faster so and tensors can be read."""
        if problem.spec.varlen or not stacks.may_be_stacked(problem.extent, *tensors):
            return problem
        return stacks.stacked(self.target(problem), problem, self.sms(tensors[0].get_device()))

    def _reader(
        self, problem: Problem, plan: MaskPlan, inputs: Inputs, view: View, allocator: Allocator
    ) -> Read:
        if problem.entries > 1:
            stack = stacks.arguments(problem)
            return lambda mask: stack
        return reader(self.find(problem), plan, inputs.attn_mask, view, allocator, problem)

    def explain(self, problem: Problem) -> list[str]:
        """The row, config, plan and launch that serve the problem, a line each."""
        return explain(self.target(problem), problem, self.sms())

    # The emulator's backend overrides the following methods.

    def sms(self, index: int | None = None) -> int:
        """SMs of a device, by default of the current one."""
        return num_sms(torch.cuda.current_device() if index is None else index)

    def target(self, problem: Problem) -> Target:
        """The target for the problem's GPU."""
        return self._targets[problem.spec.capability]

    def limits(self, problem: Problem) -> tuple[str, ...]:
        """The reasons why its kernels cannot serve the problem."""
        return limits(self.target(problem), problem)

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
    if spec.dtype not in _DTYPES and not (target.has_float32 and spec.dtype == torch.float32):
        served = "bfloat16, float16 and float32" if target.has_float32 else "bfloat16 and float16"
        why.append(f"the dtype is {spec.dtype}, and it serves {served}")
    if spec.weights:
        why += weights_launch.limits(target, problem)
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


def _of_nothing(inputs: Inputs, problem: Problem, shapes: forward.Shapes) -> Results:
    """Results of a call without queries or without keys."""
    q, sinks = inputs.q, inputs.sinks
    lse = q.new_full(shapes.lse, -math.inf, dtype=torch.float32)
    if sinks is not None:
        lse = lse.copy_(sinks[:, None].expand(lse.shape))
    low = torch.zeros_like(lse) if has_float_mask(inputs.attn_mask) else None
    return Results(q.new_zeros(*shapes.out[:-1], problem.spec.Dv), lse, low)


def _grads_of_nothing(saved: Saved, inputs: Inputs) -> Grads:
    dq, dk, dv = (x.new_zeros(x.shape) for x in inputs[:3])
    mask = inputs.attn_mask
    dmask = mask.new_zeros(mask.shape) if mask is not None and saved.mask_grad else None
    return Grads(dq, dk, dv, dmask, sinks_gradient(saved, inputs))


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
