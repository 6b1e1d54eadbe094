"""Ways to call nn.MultiheadAttention, drawn: which inputs are one tensor, and how they are laid out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import flash4_torch


class Way(NamedTuple):
    """A way to call a module."""

    shared: str
    """Inputs that are one tensor: 'qkv', 'kv', 'qk', 'qv' or ''."""
    separate: bool
    """Whether keys and values have widths, and so weights, of their own."""
    batched: bool
    batch_first: bool

    def sizes(self, N: int, Sq: int, Sk: int) -> tuple[int, int, int]:
        """Those of a call of this way, as close to the given ones as it can be."""
        return N if self.batched else 1, Sq, Sk if self.shared in ("kv", "") else Sq

    def module(self, E: int, H: int, dtype: torch.dtype, **more: Any) -> nn.MultiheadAttention:
        torch.manual_seed(0)
        widths = {"kdim": E // 2, "vdim": E // 4} if self.separate else {}
        return flash4_torch.MultiheadAttention(
            E, H, batch_first=self.batch_first, dtype=dtype, **widths, **more
        )

    def leaves(self, sizes: tuple[int, int, int], E: int) -> list[Tensor]:
        """The inputs, each one once, in float64."""
        N, Sq, Sk = sizes
        generator = torch.Generator().manual_seed(1)

        def tokens(S: int, width: int) -> Tensor:
            shape = (S,) if not self.batched else (N, S) if self.batch_first else (S, N)
            return torch.randn(*shape, width, generator=generator, dtype=torch.float64)

        widths = (E, E // 2, E // 4) if self.separate else (E, E, E)
        count = {"qkv": 1, "": 3}.get(self.shared, 2)
        lengths = (Sq, Sk, Sk)
        return [tokens(S, width) for S, width in zip(lengths[:count], widths[:count], strict=True)]

    def inputs(self, leaves: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """query, key and value."""
        at = {"qkv": (0, 0, 0), "kv": (0, 1, 1), "qk": (0, 0, 1), "qv": (0, 1, 0), "": (0, 1, 2)}[self.shared]
        query, key, value = (leaves[i] for i in at)
        return query, key, value


@st.composite
def ways(draw: st.DrawFn) -> Way:
    shared = draw(st.sampled_from(["qkv", "kv", "qk", "qv", ""]))
    return Way(shared, shared == "" and draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))
