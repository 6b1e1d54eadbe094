"""Conversion of nested tensors to the packed sequences that `ops.attention_varlen` takes, and back."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, is_grad_enabled
from torch.nn.utils.rnn import pad_sequence

from ..errors import ArgumentError, ShapeError


class Ragged:
    """A batch of N sequences in one nested tensor, (N, *, E), strided or jagged.

    Attributes:
        values: the sequences one after the other, (T, E).
        max_seqlen: length of the longest sequence.
    """

    def __init__(self, name: str, nested: Tensor):
        if nested.dim() != 3:
            raise ArgumentError(
                name, f"a nested tensor of {nested.dim()} dimensions", "it must have 3: (N, *, E)"
            )
        self._nested = cast(Any, nested)  # jagged tensors have methods that Tensor does not declare
        if self._is_jagged:
            if not nested.is_contiguous():
                raise ArgumentError(name, "a jagged tensor with gaps or transposed", "it must be contiguous")
            self.values = nested.values()
            self.cu_seqlens = self._nested.offsets().to(torch.int32)
            self.max_seqlen = self._nested._get_max_seqlen()
        else:
            rows = _rows_in_place(nested)
            self._is_in_place = rows is not None
            self.values = torch.cat(nested.unbind()) if rows is None else rows
            self.max_seqlen = max(self.lengths)

    @property
    def _is_jagged(self) -> bool:
        return self._nested.layout == torch.jagged

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Start of each sequence and end of the last one, int32 (N + 1,)."""
        ends = list(accumulate(self.lengths, initial=0))
        return torch.tensor(ends, dtype=torch.int32, device=self.values.device)

    @property
    def length(self) -> int | None:
        """The length of all sequences, if the host knows that they have the same, and it is not 0."""
        if self._is_jagged or not self.max_seqlen or min(self.lengths) < self.max_seqlen:
            return None
        return self.max_seqlen

    @cached_property
    def lengths(self) -> list[int]:
        """Length of each sequence; for a jagged tensor this reads from the device."""
        if self._is_jagged:
            return self._nested.offsets().diff().tolist()
        return [length for length, _ in self._nested._nested_tensor_size().tolist()]

    def check_lengths_of(self, name: str, other: Ragged) -> None:
        """Raises ShapeError unless `other`, named `name`, has the same lengths as this one.

        The lengths of jagged tensors that do not share offsets are read from the device, which no graph can.
        """
        if self._is_jagged and self._nested.shape[:2] == other._nested.shape[:2]:
            return
        if torch.compiler.is_compiling():
            raise ShapeError(
                name, "a nested tensor made apart from key", "in a compiled graph it must share key's offsets"
            )
        if self.lengths != other.lengths:
            raise ShapeError(name, "a nested tensor of other lengths than key", "they must be the same")

    def rewrap(self, values: Tensor) -> Tensor:
        """Values (T, E) as a nested tensor with the lengths and the layout of this one."""
        if self._is_jagged:
            return torch.nested.nested_tensor_from_jagged(
                values,
                self._nested.offsets(),
                min_seqlen=self._nested._get_min_seqlen(),
                max_seqlen=self.max_seqlen,
            )
        if self._is_in_place:
            x = self._nested
            layout = x._nested_tensor_size(), x._nested_tensor_strides(), x._nested_tensor_storage_offsets()
            # Not a view: who made it without gradients could not change it in place where there are some.
            return torch._nested_view_from_buffer_copy(values.view(-1), *layout)
        return torch.nested.as_nested_tensor(list(values.split(self.lengths)))

    def padded(self, values: Tensor) -> Tensor:
        """(T, H, D) as (N, max_seqlen, H, D), with zeros after each sequence."""
        return pad_sequence(list(values.split(self.lengths)), batch_first=True)

    def is_real(self) -> Tensor:
        """Bool (N, max_seqlen), False where `padded` has zeros."""
        positions = torch.arange(self.max_seqlen, device=self.values.device)
        return positions < self.cu_seqlens.diff()[:, None]


def _rows_in_place(nested: Tensor) -> Tensor | None:
    """The sequences of a strided nested tensor one after the other, in its own memory; None if that has gaps.

    Gradients are left to torch's functions of sequences.
    """
    if is_grad_enabled() or not nested.is_contiguous():
        return None
    buffer, widths = nested.values(), {width for _, width in nested._nested_tensor_size().tolist()}
    if len(widths) > 1 or buffer.numel() != nested.numel():
        return None
    return buffer.view(-1, *widths)
