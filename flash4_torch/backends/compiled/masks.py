"""A call's attn_mask, as the kernels take it: a view, and the tables that another kernel makes of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.common import mask_tables
from ...kernels.common.mask_tables import MaskPlan
from ...problem import Problem
from ..views import Layout
from .mask_kinds import kind_of
from .targets import MASK_BLOCKS, MASK_TRANSPOSE, Find
from .tensors import Allocator, padded

MaskArgs = tuple[Tensor, Tensor]
"""The mask and its tables."""
Read = Callable[[Tensor | None], MaskArgs | None]
"""Function that launches the kernel that makes the tables of a mask."""
View = Callable[[Tensor], Tensor]

_FEW = 1 << 16
"""Numbers of a mask up to which loading them singly takes less time than the launch of another kernel."""
_FEW_ALIGNED = 1 << 12
"""The same of a bool mask that the kernel that transposes loads 16 keys at a time."""
_VECTOR = 16


def reader(
    find: Find, plan: MaskPlan, mask: Tensor | None, view: View, allocator: Allocator, problem: Problem
) -> Read:
    """What reads masks of this one's sizes and strides, in calls of that problem; `view` gives the attention
    kernel's view of one.
    """
    if mask is None:
        return _nothing
    seen, deterministic = view(mask), problem.spec.deterministic
    words = mask_tables.place(plan, *seen.shape).words
    kind = None if plan.dtype == "bool" else kind_of(plan, seen, problem.extent.scores)
    examine, new_tables = find(MASK_BLOCKS, (plan,)), allocator((words,), torch.int32)

    def read(mask: Tensor | None) -> MaskArgs | None:
        if mask is None:
            raise AssertionError("the call has a mask")
        seen = view(mask)
        if kind is not None:
            # The weights' problem does not say whether the call is deterministic.
            always = deterministic or torch.are_deterministic_algorithms_enabled()
            if (known := kind.known_tables(always)) is not None:
                return seen, known
        tables = new_tables()
        examine(seen, tables)
        if kind is not None:
            kind.observe(tables)
        return seen, tables

    return read


def prepared_reader(
    find: Find, plan: MaskPlan, mask: Tensor | None, view: View, allocator: Allocator, problem: Problem
) -> Read:
    """A `reader` for masks as callers have them: `mask` is a 4-D view of such."""
    read = reader(find, plan, mask, view, allocator, problem)
    if mask is None:
        return read
    seen = view(mask)
    if seen.data_ptr() != mask.data_ptr():
        four = Layout.of(mask)
        return lambda mask: None if mask is None else read(four.view(mask))
    return reader(find, plan, mask, Layout.of(seen).view, allocator, problem)


def transposed_reader(
    find: Find, plan: MaskPlan, mask: Tensor | None, Sq: int, allocator: Allocator, problem: Problem
) -> Read:
    """What reads masks of this one's sizes and strides for the backward, whose rows are keys."""
    if mask is None or not _is_transposed(plan, mask):
        return reader(find, plan, mask, transposed(Sq, plan), allocator, problem)
    return _transposing_reader(find, plan, _keys_as_rows(mask), _keys_as_rows, allocator)


def prepared_transposed_reader(
    find: Find, plan: MaskPlan, mask: Tensor | None, Sq: int, allocator: Allocator, problem: Problem
) -> Read:
    """A `transposed_reader` for masks as callers have them: `mask` is a 4-D view of such."""
    if mask is None or not _is_transposed(plan, mask):
        return prepared_reader(find, plan, mask, transposed(Sq, plan), allocator, problem)
    seen = _keys_as_rows(mask)
    return _transposing_reader(find, plan, seen, Layout.of(seen).view, allocator)


def _transposing_reader(find: Find, plan: MaskPlan, seen: Tensor, view: View, allocator: Allocator) -> Read:
    """What reads masks by the kernel that transposes them; `view` gives such as `seen`, whose rows are keys.

    Kernels read the bits of a bool mask, and of itself its sizes alone, so that it needs no copy.
    """
    *outer, Sq = seen.shape
    words = mask_tables.place(plan, *seen.shape).words
    transpose, new_tables = find(MASK_TRANSPOSE, (plan,)), allocator((words,), torch.int32)
    new_copy = None if plan.dtype == "bool" else allocator((*outer, padded(Sq)), seen.dtype)

    def read(mask: Tensor | None) -> MaskArgs | None:
        if mask is None:
            raise AssertionError("the call has a mask")
        seen, tables = view(mask), new_tables()
        if new_copy is None:
            transpose(seen, None, tables)
            return seen, tables
        copy = new_copy()
        transpose(seen, copy, tables)
        return copy if copy.shape[3] == Sq else copy[..., :Sq], tables

    return read


def _nothing(mask: Tensor | None) -> None:
    return None


def over_keys(Sk: int) -> View:
    """The view of the forward: all keys, with a stride of 0 where the mask broadcasts over them."""

    def view(mask: Tensor) -> Tensor:
        return mask if mask.shape[3] == Sk else mask.expand(*mask.shape[:3], Sk)

    return view


def transposed(Sq: int, plan: MaskPlan) -> View:
    """The view of the backward: keys as rows, expanded over all queries.

    Queries of one key that are not contiguous are copied, because they are loaded together; but not where
    there are so few numbers that the launch of a copy takes longer. Of a column-major mask either keys or
    queries have to be: keys are loaded together, and a copy is slower than queries that are loaded singly.
    """

    def view(mask: Tensor) -> Tensor:
        if plan.column_major:
            if all(mask.shape[d] > 1 and mask.stride(d) != 1 for d in (2, 3)):
                mask = mask.contiguous()
            x = mask.transpose(2, 3)
        else:
            x = _keys_as_rows(mask)
            x = x.contiguous() if _scatters_queries(x, _FEW) else x
        return x if x.shape[3] == Sq else x.expand(*x.shape[:3], Sq)

    return view


def _is_transposed(plan: MaskPlan, mask: Tensor) -> bool:
    """Whether the kernel that transposes reads the mask: many keys and queries, and these are apart."""
    if plan.column_major:
        return False
    x = _keys_as_rows(mask)
    few = _FEW_ALIGNED if plan.dtype == "bool" and _has_aligned_keys(x) else _FEW
    return x.shape[2] > 1 and _scatters_queries(x, few)


def _has_aligned_keys(x: Tensor) -> bool:
    """Whether the keys of a bool mask whose rows are keys are neighbours, and each query's begin aligned."""
    apart = [stride for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1 and stride != 1]
    return x.stride(2) == 1 and not any([stride % _VECTOR for stride in apart])


def _scatters_queries(x: Tensor, few: int) -> bool:
    """Whether a mask whose rows are keys has more than a few numbers, and neighbouring queries are apart."""
    return x.numel() > few and x.shape[3] > 1 and x.stride(3) != 1


def _keys_as_rows(mask: Tensor) -> Tensor:
    """The transposed view, without what the mask repeats: an expanded dimension is one of size 1."""
    repeats = [n > 1 and stride == 0 for n, stride in zip(mask.shape, mask.stride(), strict=True)]
    if any(repeats):
        mask = mask[tuple(slice(1) if repeat else slice(None) for repeat in repeats)]
    return mask.transpose(2, 3)
