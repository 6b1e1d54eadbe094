"""The operators of programmable attention: schema, implementation, fake, autograd.

q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), then what `flex_problem.Mods` holds. out is
(B, Sq, Hq, Dv); lse (B, Hq, Sq), natural, and its rounding error lse_low, float32 (float64 for float64).
With cu_seqlens sequences are packed: q (Tq, Hq, D), k (Tk, Hk, D), out (Tq, Hq, Dv), lse (Hq, Tq).
`wanted` says which of score_mod's tensors get a gradient; the others' have no elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ..backends import flex as backends
from ..backends.flex import tiled
from ..backends.flex.tiled import program_of
from ..backends.views import no_view
from ..flex import softcap
from ..flex_problem import NUM_TENSORS, FlexInputs, FlexProblem, FlexSaved, FlexSpec, Mods, new_out
from ..problem import CallOptions, Extent, as_gradient, capability_of, dtype_key, new_gradient
from ..reference.scoring import working_dtype
from .after_import import after_import
from .autocast import DEVICES, casting
from .autograd import below_autograd, function, wants_grad
from .check import cu_seqlens_values
from .schema import LIBRARY, define, refuse_double_backward, save_nothing
from .vmap import flex_rule

_OPTIONS = (
    "float scale, SymInt? window_left, SymInt? window_right, float softcap, float dropout_p, "
    "bool deterministic"
)
_ARGUMENTS = (
    "Tensor[] captured, Tensor? kv_num_blocks, Tensor? kv_indices, Tensor? full_kv_num_blocks, "
    "Tensor? full_kv_indices, Tensor? sinks, Tensor? rng_state, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "str score_mod, str mask_mod, float[] scalars, SymInt q_block, SymInt kv_block, "
    f"SymInt max_seqlen_q, SymInt max_seqlen_k, {_OPTIONS}"
)
SCHEMAS = {
    "flex_attention": (
        f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor out, Tensor lse, Tensor lse_low)"
    ),
    "flex_attention_backward": (
        "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor lse_low, "
        f"{_ARGUMENTS}, bool[] wanted) "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor[] dcaptured)"
    ),
    "flex_max_scores": f"(Tensor q, Tensor k, {_ARGUMENTS}) -> Tensor max_scores",
}


_MODS = len(Mods._fields)
_INDICES = 4
"""b, h, q_idx and kv_idx."""
_SINKS, _SCALARS = Mods._fields.index("sinks"), Mods._fields.index("scalars")


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, mods: Mods, options: CallOptions
) -> tuple[Tensor, Tensor]:
    """(out (B, Sq, Hq, Dv), lse (B, Hq, Sq)), or packed; q, k and v come from `autocast_inputs`."""
    beside = mods._replace(captured=list(mods.captured), scalars=list(mods.scalars))
    arguments = q, k, v, *beside, *options
    if torch.compiler.is_compiling():
        out, lse, _ = _forward_op(*arguments)
    elif torch._C._are_functorch_transforms_active():
        out, lse, _ = _through(_Transformed, 3, arguments)
    elif wants_grad((q, k, v, mods.sinks, *mods.captured)):
        # As in `autograd`: half of the host time that the operator's own gradient takes.
        out, lse, _ = _through(_Recorded, 3, arguments)
    else:
        out, lse, _ = below_autograd(_forward_op, arguments)
    return out, lse


def flex_attention_backward(*arguments: Any) -> tuple[Any, ...]:
    """(dq, dk, dv, dsinks, dcaptured) by the operator, whose arguments these are; they have no gradient."""
    # Gradients of gradients are requested where grad mode is on.
    if torch.is_grad_enabled():
        return _backward_through(_RecordedBackward, *arguments)
    found: tuple[Any, ...] = below_autograd(_backward_op, arguments)
    return found


def flex_max_scores(q: Tensor, k: Tensor, mods: Mods, options: CallOptions) -> Tensor:
    """The largest score of each row (B, Hq, Sq), after score_mod and masks, without a gradient.

    Kernels do not have it: plain torch computes the scores once more, tile by tile.
    """
    captured = [x.detach() for x in mods.captured]
    beside = mods._replace(captured=captured, scalars=list(mods.scalars), sinks=None, rng_state=None)
    with torch.no_grad():
        found: Tensor = torch.ops.flash4.flex_max_scores.default(q.detach(), k.detach(), *beside, *options)
    return found


def _split(rest: Sequence[Any]) -> tuple[Mods, CallOptions]:
    return Mods(*rest[:_MODS]), CallOptions(*rest[_MODS:])


def describe(inputs: FlexInputs, options: CallOptions) -> FlexProblem:
    """The forward problem of a call."""
    q, _, v, mods = inputs
    D, extent = q.shape[-1], _extent(inputs)
    spec = FlexSpec(
        device=q.device.type,
        dtype=q.dtype,
        D=D,
        Dv=v.shape[-1],
        group=extent.Hq // extent.Hk,
        score_mod=mods.score_mod,
        mask_mod=mods.mask_mod,
        block=None if mods.kv_num_blocks is None else (mods.q_block, mods.kv_block),
        full_blocks=mods.full_kv_num_blocks is not None,
        left=options.window_left is not None,
        right=options.window_right is not None,
        softcap=options.softcap != 0.0,
        dropout=options.dropout_p > 0.0,
        deterministic=options.deterministic,
        sinks=dtype_key(mods.sinks),
        varlen=mods.cu_seqlens_q is not None,
        capability=capability_of(q.device),
    )
    return FlexProblem(spec, extent, options.scale, options.band, options.softcap, options.dropout_p)


def backward_of(problem: FlexProblem, mods: Mods, wanted: tuple[bool, ...], has_dlse: bool) -> FlexProblem:
    """The backward problem of a forward's; wanted: which captured tensors want a gradient."""
    elements = 0
    if problem.spec.deterministic:
        elements = sum(x.numel() for x, wants in zip(mods.captured, wanted, strict=False) if wants)
    spec = problem.spec._replace(backward=True, dlse=has_dlse, dcaptured=wanted, dcaptured_elements=elements)
    return problem._replace(spec=spec)


def with_softcap(inputs: FlexInputs, options: CallOptions) -> tuple[FlexInputs, CallOptions]:
    """The call with the option softcap instead of a score_mod that is one."""
    mods = inputs.mods
    if not mods.score_mod or options.softcap != 0.0:
        return inputs, options
    count = len(program_of(mods.score_mod).scalars)
    cap = softcap.of(mods.score_mod, mods.scalars[:count])
    if cap == 0.0:
        return inputs, options
    mods = mods._replace(score_mod="", scalars=mods.scalars[count:])
    return inputs._replace(mods=mods), options._replace(softcap=cap)


def _extent(inputs: FlexInputs) -> Extent:
    (*_, Hq, _), (*_, Hk, _), ends = inputs.q.shape, inputs.k.shape, inputs.mods.cu_seqlens_q
    if ends is None:
        return Extent(inputs.q.shape[0], inputs.q.shape[1], inputs.k.shape[1], Hq, Hk)
    return Extent(ends.shape[0] - 1, inputs.mods.max_seqlen_q, inputs.mods.max_seqlen_k, Hq, Hk)


def reasons(inputs: FlexInputs, options: CallOptions, has_lse: bool) -> dict[str, list[str]]:
    """The reasons why each backend does not serve a call, and its backward if an input wants a gradient."""
    inputs, options = with_softcap(inputs, options)
    q, k, v, mods = inputs
    problem = describe(inputs, options)
    found = backends.reasons(problem)
    wanted = tuple(x.requires_grad for x in mods.captured[: tensors_of_score(mods)])
    differentiable = (q, k, v) if mods.sinks is None else (q, k, v, mods.sinks)
    if any(wanted) or any(x.requires_grad for x in differentiable):
        for name, why in backends.reasons(backward_of(problem, mods, wanted, has_lse)).items():
            found[name] += [f"backward: {sentence}" for sentence in why if sentence not in found[name]]
    return found


def tensors_of_score(mods: Mods) -> int:
    """The number of score_mod's tensors: those of mask_mod, which have no gradient, come last."""
    return len(program_of(mods.score_mod).tensors) if mods.score_mod else 0


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    mods, options = _split(rest)
    inputs = FlexInputs(q, k, v, mods)
    if mods.cu_seqlens_q is not None and mods.cu_seqlens_k is not None:
        cu_seqlens_values("cu_seqlens_q", mods.cu_seqlens_q, q.shape[0], mods.max_seqlen_q)
        cu_seqlens_values("cu_seqlens_k", mods.cu_seqlens_k, k.shape[0], mods.max_seqlen_k)
    inputs, options = with_softcap(inputs, options)
    problem = describe(inputs, options)
    out, lse, low = backends.choose(problem).forward(inputs, problem)
    return no_view(out), lse, low


def _max_scores(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    mods, options = _split(rest)
    inputs = FlexInputs(q, k, k, mods)
    return tiled.max_scores(inputs, describe(inputs, options))


def _backward(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Any, ...]:
    (q, k, v, out, lse, low), rest, wanted = arguments[:6], arguments[6:-1], arguments[-1]
    mods, options = _split(rest)
    saved = FlexSaved(dout, dlse, out, lse, low)
    inputs, options = with_softcap(FlexInputs(q, k, v, mods), options)
    problem = backward_of(describe(inputs, options), inputs.mods, tuple(wanted), dlse is not None)
    grads = backends.choose(problem).backward(saved, inputs, problem)
    others = [grads.dsinks, *grads.dcaptured]
    dsinks, *dcaptured = (q.new_empty(0) if x is None else x for x in others)
    return *map(as_gradient, grads[:3], (q, k, v)), dsinks, dcaptured


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *batch, Sq, Hq, _ = q.shape
    lse = q.new_empty(*batch, Hq, Sq, dtype=working_dtype(q.dtype))
    return new_out(q, v.shape[-1]), lse, torch.empty_like(lse)


def _fake_max_scores(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    B, Sq, Hq, _ = q.shape
    return q.new_empty(B, Hq, Sq, dtype=working_dtype(q.dtype))


def _fake_backward(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Any, ...]:
    (q, k, v), wanted = arguments[:3], arguments[-1]
    mods = Mods(*arguments[6 : 6 + _MODS])
    dq, dk, dv = map(new_gradient, (q, k, v))
    dsinks = q.new_empty(0) if mods.sinks is None else mods.sinks.new_empty(mods.sinks.shape)
    dcaptured = [
        x.new_empty(x.shape) if wants else q.new_empty(0)
        for x, wants in zip(mods.captured, wanted, strict=False)
    ]
    return dq, dk, dv, dsinks, dcaptured


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (q, k, v), (mods, options) = inputs[:3], _split(inputs[3:])
    ctx.save_for_backward(q, k, v, *output, *mods.tensors, *mods.captured)
    ctx.mods, ctx.options = mods.of_tensors((), [None] * NUM_TENSORS), options
    ctx.set_materialize_grads(False)


def _grads(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    return _gradients(ctx, dout, dlse, list(ctx.needs_input_grad[3]), _backward_op)


def _gradients(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, needed: Sequence[bool], op: Callable[..., Any]
) -> tuple[Any, ...]:
    """Gradients of the operator's arguments; `needed` says which captured tensors want one."""
    q, k, v, out, lse, low, *others = ctx.saved_tensors
    tensors, captured = others[:NUM_TENSORS], others[NUM_TENSORS:]
    mods = ctx.mods.of_tensors(captured, tensors)
    wanted = [bool(x) for x in needed[: tensors_of_score(mods)]]
    dout = torch.zeros_like(out) if dout is None else dout
    saved = q, k, v, out, lse, low
    dq, dk, dv, dsinks, dcaptured = op(dout, dlse, *saved, *mods, *ctx.options, wanted)
    found = [x if wants else None for x, wants in zip(dcaptured, wanted, strict=True)]
    found += [None] * (len(captured) - len(found))
    beside: list[Any] = [None] * (_MODS - 1 + len(CallOptions._fields))
    beside[_SINKS - 1] = None if mods.sinks is None else dsinks
    # torch takes an empty list of numbers for one of tensors.
    beside[_SCALARS - 1] = None if mods.scalars else []
    return dq, dk, dv, found, *beside


# An autograd.Function takes no lists of tensors. Each function has the number of captured tensors first, and
# these in the place of their list. As in `autograd` there are two forms: one for torch.func's transforms,
# which want `setup_context`, and the classic one.


def _flat_forward(n: int, *arguments: Any) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = _forward_op(*_with_list(n, 3, arguments))
    return results


def _recorded_forward(ctx: Any, n: int, *arguments: Any) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = below_autograd(_forward_op, tuple(_with_list(n, 3, arguments)))
    _flat_save(ctx, (n, *arguments), results)
    return results


def _flat_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    n, *arguments = inputs
    ctx.n = n
    _save(ctx, tuple(_with_list(n, 3, arguments)), output)


def _flat_grads(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    return _flat_gradients(ctx, dout, dlse, partial(_backward_through, _TransformedBackward))


def _recorded_grads(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    return _flat_gradients(ctx, dout, dlse, flex_attention_backward)


def _flat_gradients(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, op: Callable[..., Any]
) -> tuple[Any, ...]:
    needed = ctx.needs_input_grad[4 : 4 + ctx.n]
    dq, dk, dv, found, *beside = _gradients(ctx, dout, dlse, needed, op)
    beside[_SCALARS - 1] = None
    return None, dq, dk, dv, *found, *beside


def _flat_backward(n: int, *arguments: Any) -> tuple[Tensor, ...]:
    *grads, dcaptured = _backward_op(*_with_list(n, 8, arguments))
    return *grads, *dcaptured


def _recorded_backward(ctx: Any, n: int, *arguments: Any) -> tuple[Tensor, ...]:
    *grads, dcaptured = below_autograd(_backward_op, tuple(_with_list(n, 8, arguments)))
    return *grads, *dcaptured


def _with_list(n: int, at: int, arguments: Sequence[Any]) -> list[Any]:
    return [*arguments[:at], list(arguments[at : at + n]), *arguments[at + n :]]


_Recorded = function("flex_attention", _recorded_forward, _recorded_grads)
_RecordedBackward = function("flex_attention_backward", _recorded_backward, refuse_double_backward)
_Transformed = function(
    "flex_attention",
    _flat_forward,
    _flat_grads,
    setup_context=staticmethod(_flat_save),
    generate_vmap_rule=True,
)
_TransformedBackward = function(
    "flex_attention_backward",
    _flat_backward,
    refuse_double_backward,
    setup_context=staticmethod(save_nothing),
    generate_vmap_rule=True,
)


def _through(kind: type[torch.autograd.Function], at: int, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Applies a function to an operator's arguments, whose captured tensors are number `at`."""
    captured = arguments[at]
    results: tuple[Tensor, ...] = kind.apply(len(captured), *arguments[:at], *captured, *arguments[at + 1 :])
    return results


def _backward_through(kind: type[torch.autograd.Function], *arguments: Any) -> tuple[Any, ...]:
    dq, dk, dv, dsinks, *dcaptured = _through(kind, 8, arguments)
    return dq, dk, dv, dsinks, dcaptured


@lru_cache(maxsize=256)
def _reads_batch(text: str) -> bool:
    """Whether a program, given by its text or '', reads the batch index."""
    if not text:
        return False
    program = program_of(text)
    # b comes after the score; a mask has none.
    return program.reads(len(program.inputs) - _INDICES)


for _name, _kernel, _fake, _autograd, _n, _mapped in (
    ("flex_attention", _forward, _fake_forward, (_grads, _save), 3, 3),
    ("flex_attention_backward", _backward, _fake_backward, (refuse_double_backward, save_nothing), 0, 8),
    ("flex_max_scores", _max_scores, _fake_max_scores, (refuse_double_backward, save_nothing), 2, 2),
):
    define(_name, SCHEMAS[_name])
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash4::{_name}", _fake, lib=LIBRARY)
    torch.library.register_autograd(f"flash4::{_name}", _autograd[0], setup_context=_autograd[1], lib=LIBRARY)
    for _key, _device in DEVICES.items():
        _op = getattr(torch.ops.flash4, _name).default
        LIBRARY.impl(_name, casting(_op, _n, _device), _key)
    torch.library.register_vmap(f"flash4::{_name}", flex_rule(_op, _mapped, _reads_batch), lib=LIBRARY)
_forward_op = torch.ops.flash4.flex_attention.default
_backward_op = torch.ops.flash4.flex_attention_backward.default


def _use_flop_formulas() -> None:
    from . import flops

    flops.register(flops.FLEX)


after_import("torch.utils.flop_counter", _use_flop_formulas)
