"""The fast path of compiled graphs: Inductor's code calls the functions here instead of the operators.

In an operator's call the dispatcher, its autograd kernel, the description of the problem and the choice of a
backend take several times as long as a launch. In a graph that Inductor compiled there is nothing left for
them to do but the last, whose result is the same for the same sizes, strides, dtypes and options. The law is
that of `flash4_torch.fast_path`: wherever somebody might tell the difference, the operator is called.

The functions are attributes of `torch.ops.flash4`, a name that every compiled graph can resolve, also one
from Inductor's cache on disk. Graphs in C++ (AOTInductor) call the operators, and so do calls of packed
sequences and gradients of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled

from ..backends import ALIGNMENT
from ..backends.scoring import known_low, low_of
from ..ops import schema
from ..ops.after_import import after_import
from ..ops.impl import backward_of, describe_inputs, signed_weights_of, weights_of
from ..problem import CallOptions, Inputs, Problem, Saved, SavedWeights, allows_tf32, has_float_mask
from . import recent
from .conditions import must_take_slow_path, prepares

Results = tuple[Tensor, ...]
Launch = Callable[..., Results]
"""What serves an operator's calls of one signature, given their arguments."""
Prepare = Callable[..., Launch | None]
"""Makes the launch for calls like one, from its arguments and results; None if there is none."""

_MOST = 1024
"""Signatures to remember; when the memory is full, it is cleared."""
_launches: dict[tuple[Any, ...], Launch | None] = {}
_recent: recent.Known[Launch] = {}


def clear() -> None:
    """Forgets all signatures."""
    _launches.clear()
    _recent.clear()


def _direct(op: Any, num_tensors: int, prepare: Prepare) -> Callable[..., Any]:
    """The operator as compiled graphs call it; its first arguments are tensors or None, others scalars."""

    def call(*args: Any) -> Any:
        # Graphs run without autocast, except a backward inside a context that its forward was not in.
        if must_take_slow_path() or _is_any_autocast_enabled():
            return op(*args)
        given = args[:num_tensors]
        tensors = tuple([x for x in given if x is not None])
        tf32 = allows_tf32(tensors[0].dtype)
        place = (op, tf32, args[num_tensors:], *[x is None for x in given])
        for guards, launch in _recent.get(place, ()):
            if guards.check(*tensors):
                return launch(*args) if _are_in_place(tensors) else op(*args)
        key = _signature(op, tf32, args)
        if key is None:
            return op(*args)
        prepared = _launches.get(key)
        if prepared is not None:
            recent.remember(_recent, place, tensors, prepared)
            return prepared(*args)
        results = op(*args)
        if key not in _launches:
            if len(_launches) >= _MOST:
                _launches.clear()
            _launches[key] = prepare(results, *args)
        return results

    return call


def _are_in_place(tensors: tuple[Tensor, ...]) -> bool:
    """Whether all tensors have memory, at multiples of `ALIGNMENT`."""
    place = 0
    for x in tensors:
        at = x.data_ptr()
        if not at:
            return False
        place |= at
    return place % ALIGNMENT == 0


def _signature(op: Any, tf32: bool, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Everything that decides how the call is served; None if that is not enough."""
    key: list[Any] = [op, tf32]
    for x in args:
        if isinstance(x, Tensor):
            at = x.data_ptr() if type(x) is Tensor else 0
            if at % ALIGNMENT or not at or x.is_neg():
                return None
            key += x.shape, x.stride(), x.dtype, x.get_device()
        else:
            key.append(x)
    return tuple(key)


def _attention(results: Results, *args: Any) -> Launch | None:
    q, k, v, attn_mask, sinks, rng_state, *options = args
    inputs = Inputs(q, k, v, attn_mask, sinks, rng_state)
    problem = describe_inputs(inputs, CallOptions(*options))
    backend = prepares(problem)
    launch = None if backend is None else backend.prepare(inputs, problem)
    if launch is None:
        return None
    # Without a floating mask it has no elements, and all calls share it.
    no_low = None if has_float_mask(attn_mask) else results[2]

    def attention(*args: Any) -> Results:
        out, lse, low, _ = launch(*args[:6])
        low = no_low if low is None else low
        if low is None:
            low = known_low(low, lse, Inputs(*args[:6]), problem)
        return out, lse, torch.zeros_like(lse) if low is None else low

    return attention


def _attention_backward(results: Results, *args: Any) -> Launch | None:
    dout, dlse, q, k, v, out, lse, low, *masked_by = args
    attn_mask, sinks, rng_state, *options, mask_grad = masked_by
    if dlse is not None or mask_grad:
        return None
    if low is not None and not low.is_contiguous():
        return None
    inputs = Inputs(q, k, v, attn_mask, sinks, rng_state)
    problem = backward_of(describe_inputs(inputs, CallOptions(*options)), None)
    backend, saved = prepares(problem), Saved(dout, None, out, lse, False, low)
    launch = None if backend is None else backend.prepare_backward(saved, inputs, problem)
    if launch is None:
        return None
    no_dmask, no_dsinks = results[3:]
    has_no_low = low is None and has_float_mask(attn_mask)

    def backward(*args: Any) -> Results:
        dout, _, q, k, v, out, lse, low, attn_mask, sinks, rng_state, *_ = args
        if has_no_low:
            low = low_of(lse, Inputs(q, k, v, attn_mask, sinks, rng_state), problem)
        dq, dk, dv, dsinks = launch(dout, out, lse, low, q, k, v, attn_mask, sinks, rng_state)
        return dq, dk, dv, no_dmask, no_dsinks if dsinks is None else dsinks

    return backward


def _attention_weights(results: Tensor, *args: Any) -> Launch | None:
    *args_of_each, average_heads = args
    return _weights_launch(args, _weights_problem(args_of_each), average_heads)


def _weights_problem(args: Sequence[Any]) -> Problem:
    q, k, _, _, attn_mask, sinks, rng_state, *scores = args
    inputs = Inputs(q, k, k, attn_mask, sinks, rng_state)
    return weights_of(describe_inputs(inputs, CallOptions(*scores)))


def _weights_launch(args: Sequence[Any], problem: Problem, average_heads: bool) -> Launch | None:
    q, k, lse, low, attn_mask, sinks, rng_state, *_ = args
    inputs = Inputs(q, k, k, attn_mask, sinks, rng_state)
    if not lse.is_contiguous() or not (low is None or low.is_contiguous()):
        return None
    backend = prepares(problem)
    launch = None if backend is None else backend.prepare_weights(inputs, problem, average_heads)
    if launch is None:
        return None

    def weights(*args: Any) -> Any:
        q, k, lse, low, attn_mask, sinks, rng_state, *_ = args
        saved = SavedWeights(lse, low, average_heads)
        return launch(saved, Inputs(q, k, k, attn_mask, sinks, rng_state))

    return weights


def _attention_weights_signed(results: Tensor, *args: Any) -> Launch | None:
    return _weights_launch(args, signed_weights_of(_weights_problem(args)), average_heads=False)


_PREPARES: dict[str, tuple[int, Prepare]] = {
    "attention": (6, _attention),
    "attention_backward": (11, _attention_backward),
    "attention_weights": (7, _attention_weights),
    "attention_weights_signed": (7, _attention_weights_signed),
}
"""How many arguments of an operator are tensors, and what prepares its launches."""


def _in_inductor() -> None:
    """Teaches Inductor which function to call for an operator."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    def lower(op: Any, direct: str) -> None:
        class Direct(ir.FallbackKernel):
            def __init__(self, *args: Any, **kwargs: Any):
                super().__init__(*args, **kwargs)
                if not (V.graph.cpp_wrapper or getattr(V.graph, "fx_wrapper", False)):
                    self.python_kernel_name = direct

        def handler(*args: Any, **kwargs: Any) -> Any:
            found = Direct.create(op, *args, **kwargs)
            return torch.utils._pytree.tree_map(
                lambda x: ir.TensorBox.create(x) if isinstance(x, ir.IRNode) else x, found
            )

        exact_strides = lowering.tag_to_layout_constraint(torch.Tag.needs_exact_strides)
        lowering.make_fallback(op, exact_strides, warn=False, override_decomp=True)
        lowering.lowerings[op] = handler

    for name in _PREPARES:
        lower(getattr(schema, name), f"torch.ops.flash4.direct_{name}")


attention, attention_backward, attention_weights, attention_weights_signed = (
    _direct(getattr(schema, name), *how) for name, how in _PREPARES.items()
)
"""The operators for callers below autograd: they take the fast path where nobody can tell the difference."""
for _name in _PREPARES:
    setattr(torch.ops.flash4, f"direct_{_name}", globals()[_name])
after_import("torch._inductor.lowering", _in_inductor)
