"""Conversion of nested tensors to the packed sequences that `ops.attention_varlen` takes, and back."""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import ArgumentError, ShapeError


class Ragged:
    """A batch of N sequences in one nested tensor, (N, *, E), strided or jagged.

    Attributes:
        values: the sequences one after the other, (T, E).
        cu_seqlens: start of each sequence and end of the last one, int32 (N + 1,).
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
            self.values = torch.cat(nested.unbind())
            ends = torch.tensor([0, *self.lengths]).cumsum(0)
            self.cu_seqlens = ends.to(nested.device, torch.int32)
            self.max_seqlen = max(self.lengths)

    @property
    def _is_jagged(self) -> bool:
        return self._nested.layout == torch.jagged

    @cached_property
    def lengths(self) -> list[int]:
        """Length of each sequence; for a jagged tensor this reads from the device."""
        if self._is_jagged:
            return self._nested.offsets().diff().tolist()
        return [sequence.shape[0] for sequence in self._nested.unbind()]

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
        """Values (T, E') as a nested tensor with the lengths and the layout of this one."""
        if self._is_jagged:
            return torch.nested.nested_tensor_from_jagged(
                values,
                self._nested.offsets(),
                min_seqlen=self._nested._get_min_seqlen(),
                max_seqlen=self.max_seqlen,
            )
        return torch.nested.as_nested_tensor(list(values.split(self.lengths)))

    def padded(self, values: Tensor) -> Tensor:
        """(T, H, D) as (N, max_seqlen, H, D), with zeros after each sequence."""
        return pad_sequence(list(values.split(self.lengths)), batch_first=True)

    def is_real(self) -> Tensor:
        """Bool (N, max_seqlen), False where `padded` has zeros."""
        positions = torch.arange(self.max_seqlen, device=self.values.device)
        return positions < self.cu_seqlens.diff()[:, None]
