"""A call's attn_mask, as the kernels take it: a view, and the tables that another kernel makes of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.common import mask_tables
from ...kernels.common.mask_tables import MaskPlan
from ..views import Layout
from .targets import MASK_BLOCKS, Find
from .tensors import Allocator

MaskArgs = tuple[Tensor, Tensor]
"""The mask and its tables."""
Read = Callable[[Tensor | None], MaskArgs | None]
"""Function that launches the kernel that makes the tables of a mask."""
View = Callable[[Tensor], Tensor]

_FEW = 1 << 16


def reader(find: Find, plan: MaskPlan, mask: Tensor | None, view: View, allocator: Allocator) -> Read:
    """What reads masks of this one's sizes and strides; `view` gives the attention kernel's view of one."""
    if mask is None:
        return lambda mask: None
    words = mask_tables.place(plan, *view(mask).shape).words
    examine, new_tables = find(MASK_BLOCKS, (plan,)), allocator((words,), torch.int32)

    def read(mask: Tensor | None) -> MaskArgs | None:
        if mask is None:
            raise AssertionError("the call has a mask")
        seen, tables = view(mask), new_tables()
        examine(seen, tables)
        return seen, tables

    return read


def prepared_reader(
    find: Find, plan: MaskPlan, mask: Tensor | None, view: View, allocator: Allocator
) -> Read:
    """A `reader` for masks as callers have them: `mask` is a 4-D view of such."""
    read = reader(find, plan, mask, view, allocator)
    if mask is None:
        return read
    seen = view(mask)
    if seen.data_ptr() != mask.data_ptr():
        four = Layout.of(mask)
        return lambda mask: None if mask is None else read(four.view(mask))
    return reader(find, plan, mask, Layout.of(seen).view, allocator)


def over_keys(Sk: int) -> View:
    """The view of the forward: all keys, with a stride of 0 where the mask broadcasts over them."""

    def view(mask: Tensor) -> Tensor:
        return mask if mask.shape[3] == Sk else mask.expand(*mask.shape[:3], Sk)

    return view


def transposed(Sq: int, plan: MaskPlan) -> View:
    """The view of the backward: keys as rows, expanded over all queries.

    It is copied if queries would not be contiguous otherwise, because they are loaded together; but not where
    there are so few numbers that the launch of a copy takes longer. Of a column-major mask either keys or
    queries have to be: keys are loaded together, and a copy is slower than queries that are loaded singly.
    """

    def view(mask: Tensor) -> Tensor:
        if plan.column_major and all(mask.shape[d] > 1 and mask.stride(d) != 1 for d in (2, 3)):
            mask = mask.contiguous()
        x = mask.transpose(2, 3)
        if not plan.column_major and x.numel() > _FEW and x.shape[3] > 1 and x.stride(3) != 1:
            return x.contiguous()
        return x if x.shape[3] == Sq else x.expand(*x.shape[:3], Sq)

    return view
