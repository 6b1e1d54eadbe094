"""Calls on batches of short sequences, and their right results."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import flash4_torch
from flash4_torch import testing
from flash4_torch.backends.compiled import stacks
from flash4_torch.problem import Problem

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "apart": {"window": (-2, 9)},
    "nothing": {"window": (-200, 300)},
    "negative scale": {"scale": -0.2},
    "in order": {"deterministic": True},
}
FORMS = {
    **{"32": (32, 32), "64": (64, 64), "unequal": (40, 24)},
    **{"128": (128, 128), "wide": (192, 128), "256": (256, 256)},
}


def noted(patch: pytest.MonkeyPatch) -> list[int]:
    """Entries of each stack that a call becomes from here on."""
    found: list[int] = []
    original = stacks.of_entries

    def of_entries(problem: Problem, entries: int) -> Problem:
        found.append(entries)
        return original(problem, entries)

    stacks.stacked.cache_clear()
    patch.setattr(stacks, "of_entries", of_entries)
    patch.setattr(stacks, "stacked", stacks.stacked.__wrapped__)
    return found


class Call(NamedTuple):
    """A call, and the gradients of its results."""

    inputs: list[Tensor]
    """q, k, v and the sinks, if there are any."""
    options: dict[str, Any]
    dout: Tensor
    dlse: Tensor

    def run(self) -> tuple[Tensor, ...]:
        """The results, and all inputs' gradients."""
        out, lse = flash4_torch.attention(*self.inputs[:3], return_lse=True, **self.options, **self._sinks())
        dlse = self.dlse.masked_fill(lse == -torch.inf, 0.0)
        return out, lse, *torch.autograd.grad((out, lse), self.inputs, (self.dout, dlse))

    def check(self, results: tuple[Tensor, ...]) -> None:
        """Compares with plain torch in float64, by the error of plain torch in the same dtype."""
        exact, peer = (self._by_definition(dtype) for dtype in (torch.float64, self.dout.dtype))
        for own, truth, plain in zip(results, exact, peer, strict=True):
            testing.assert_close_as_peer(own, truth, plain)

    def _by_definition(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        q, k, v, *sinks = (x.detach().to(dtype).requires_grad_() for x in self.inputs)
        options = {name: x for name, x in self.options.items() if name != "deterministic"}
        given = {"sinks": sinks[0] if sinks else None}
        out, lse = testing.reference(q, k, v, **options, **given, dtype=dtype)
        dlse = self.dlse.masked_fill(lse == -torch.inf, 0.0)
        gradients = self.dout.to(out.dtype), dlse.to(lse.dtype)
        return out, lse, *torch.autograd.grad((out, lse), [q, k, v, *sinks], gradients)

    def _sinks(self) -> dict[str, Tensor | None]:
        return {"sinks": self.inputs[3] if len(self.inputs) > 3 else None}


def made(
    feature: str,
    form: str,
    B: int,
    Sq: int,
    Sk: int,
    Hk: int,
    group: int,
    *,
    sinks: bool = False,
    shared: bool = False,
    rows_first: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> Call:
    """A call; shared: q, k and v are parts of one projection, if they are as long. rows_first: in memory the
    batch is the second dimension of k and of the gradient of out, as in sequences first.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def new(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    (D, Dv), Hq = FORMS[form], Hk * group
    sizes = ((Sq, Hq, D), (Sk, Hk, D), (Sk, Hk, Dv))
    if shared and Sq == Sk:
        joined = new(B, Sq, sum(H * columns for _, H, columns in sizes))
        parts = joined.split([H * columns for _, H, columns in sizes], -1)
        tensors = [x.unflatten(-1, size[1:]) for x, size in zip(parts, sizes, strict=True)]
    else:
        tensors = [new(B, *size) for size in sizes]
    dout = new(B, Sq, Hq, Dv)
    if rows_first:
        tensors[1], dout = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (tensors[1], dout))
    inputs = [x.requires_grad_() for x in (*tensors, *[new(Hq).float()] * sinks)]
    return Call(inputs, FEATURES[feature], dout, new(B, Hq, Sq).float())
