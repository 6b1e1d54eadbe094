"""Calls with functions like one before: their prepared launches, as `fast_path` has them.

A call is like another one if `reader` finds that its functions read the same, tensors' values aside, and
`fast_path.lookup` finds that its tensors are alike. Captured tensors are then those of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import fast_path
from ..fast_path import Door, FastCall, Memory, Signature
from ..fast_path import flex as fast_flex
from ..fast_path.conditions import must_take_slow_path
from ..fast_path.flex import FlexCall
from ..flex_problem import FlexInputs
from ..ops import CallOptions
from ..reference.scoring import working_dtype
from . import reader
from .reader import Found
from .reads import reads_of
from .recipe import Recipe

_SCALES = (float, int, type(None))


class Request(NamedTuple):
    """A call as the caller makes it; query, key and value should be in the door's order of dimensions."""

    query: Any
    key: Any
    value: Any
    score_mod: Any
    block_mask: Any
    scale: Any
    enable_gqa: Any
    has_lse: Any
    mask_mod: Any = None
    """None, or the block mask's, if there is one."""
    options: tuple[Any, ...] = ()
    """Further numbers and flags of the call."""
    door: Door = fast_flex.DOOR

    @property
    def functions(self) -> tuple[Any, Any]:
        """score_mod and mask_mod."""
        return self.score_mod, self.mask_mod if self.block_mask is None else self.block_mask.mask_mod


class Asked(NamedTuple):
    """What is known of a call."""

    signature: Signature | None = None
    """None if it must take the slow path, or if it needs none to be found."""
    call: FastCall | None = None
    captured: Sequence[Tensor] = ()
    """What both functions read, score_mod's tensors first."""
    score: Found | None = None
    mask: Found | None = None
    lists: fast_flex.Lists = ()
    memory: Memory = fast_path.MEMORY


_NOTHING = Asked()


def lookup(request: Request) -> Asked:
    """The prepared call, if there is one."""
    query, key, value, score_mod, block_mask, scale, enable_gqa, has_lse, mask_mod, options, door = request
    if type(query) is not Tensor or type(scale) not in _SCALES or type(enable_gqa) is not bool:
        return _NOTHING
    if must_take_slow_path():
        return _NOTHING
    flags: tuple[Any, ...] = scale, enable_gqa, has_lse, torch.get_default_dtype(), *options
    lists: fast_flex.Lists = ()
    memory = fast_path.MEMORY
    if block_mask is not None:
        try:
            if mask_mod is not None and mask_mod is not block_mask.mask_mod:
                return _NOTHING
            mask_mod = block_mask.mask_mod
            lists = (
                block_mask.kv_num_blocks,
                block_mask.kv_indices,
                block_mask.full_kv_num_blocks,
                block_mask.full_kv_indices,
            )
            stream, of_mask = fast_flex.stream_of(query), fast_flex.memory_of(lists)
            flags += type(block_mask), stream, block_mask.BLOCK_SIZE, block_mask.seq_lengths
        except (AttributeError, TypeError):
            # What is no tensor, or no block mask: the slow path reports it.
            return _NOTHING
        if of_mask is None or stream is None:
            return _NOTHING
        memory = of_mask
    score = mask = None
    captured: tuple[Any, ...] = ()
    if score_mod is not None:
        if (score := reader.read(score_mod)) is None:
            return _NOTHING
        flags += score.reader, *score.numbers
        captured = (*score.tensors,)
    if mask_mod is not None:
        if (mask := reader.read(mask_mod)) is None:
            return _NOTHING
        # Numbers of both are told apart by the reader between them.
        flags += mask.reader, *mask.numbers
        captured += (*mask.tensors,)
    others = captured if len(captured) > 1 else (*captured, None, None)
    signature, call = fast_path.lookup(door, query, key, value, others, flags, memory)
    if isinstance(call, FlexCall) and not call.is_of(captured):
        memory.clear()
        signature, call = fast_path.lookup(door, query, key, value, others, flags, memory)
    return Asked(signature, call, captured, score, mask, lists, memory)


def record(request: Request, asked: Asked, inputs: FlexInputs, options: CallOptions) -> None:
    """Prepares calls like this one, which the slow path has served; q, k and v are (B, S, H, D) views of the
    caller's.
    """
    functions = request.functions
    if asked.signature is None:
        if must_take_slow_path():
            return
        for function in functions:
            if function is not None and reader.read(function) is None and reads_of(function) is not None:
                reader.add(function)
        asked = lookup(request)
    signature, memory = asked.signature, asked.memory
    if signature is None or signature in memory.calls:
        return
    call, of_captured = None, _of_captured(inputs, functions, asked)
    first = 0 if asked.score is None else len(asked.score.tensors)
    evaluated = asked.captured[first:] if asked.lists else ()
    # Those of inference mode do not tell whether they were changed.
    if of_captured is not None and not any(x.is_inference() for x in evaluated):
        data = tuple([(place, fast_flex.data_of(x)) for place, x in enumerate(evaluated, first)])
        served = fast_flex.Served(inputs, options, request.has_lse, of_captured, data, request.door.order)
        call = fast_flex.prepared(served, fast_path.wants_grad(signature))
    fast_path.keep(signature, call, memory)


def _of_captured(inputs: FlexInputs, functions: tuple[Any, Any], asked: Asked) -> fast_flex.OfCaptured | None:
    """How the programs' tensors come from those that functions read, if they come from nothing else."""
    # Tracing needs make_fx, which not every import of the package should load.
    from .trace import MASK, SCORE, recipe_of, without_autocast

    q, mods = inputs.q, inputs.mods
    if any(x.device != q.device for x in asked.captured):
        return None
    parts: list[tuple[Recipe, list[int]]] = []
    first = 0
    for function, kind, found, text in zip(
        functions, (SCORE, MASK), (asked.score, asked.mask), (mods.score_mod, mods.mask_mod), strict=True
    ):
        if found is None:
            continue
        known = recipe_of(function, kind, q.device, working_dtype(q.dtype))
        if known is None or (kind == MASK and known[0].steps):
            # What is new in each call is evaluated in none, or in each.
            return None
        recipe, read = known
        if text:
            parts.append((recipe, [first + _place(x, found.tensors) for x in read]))
        first += len(found.tensors)
    if not any(recipe.steps for recipe, _ in parts):
        places = [order[value.number] for recipe, order in parts for value in recipe.wanted]
        return lambda captured: tuple([captured[place] for place in places])
    device = q.device

    def of_captured(captured: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with without_autocast(device):
            return tuple([x for recipe, order in parts for x in recipe.tensors([captured[i] for i in order])])

    return of_captured


def _place(x: Tensor, tensors: Sequence[Tensor]) -> int:
    return next(i for i, y in enumerate(tensors) if y is x)
