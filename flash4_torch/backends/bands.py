"""Bands on torch's CPU kernel: what a band leaves of a problem, and what hides the rest of that."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _DisableTorchDispatch

from ..masks import Band
from ..problem import Inputs, Problem, Saved
from ..reference import at_once, sinks
from .base import BackwardLaunch, Grads, Launch, Order, Prepares, Results

_MOST = 1 << 20
"""Scores of a head up to which a band may be a mask: beyond these nothing would be linear in the length, and
tiles are faster."""
_HIDDEN = 9 << 14
"""Hidden scores of a head up to which computing them takes less time than leaving out tiles does."""
_SHOWN = 0.7
"""The share of a head's scores from which on few tiles could be left out."""
_FEW = 1 << 13
"""Scores of a call up to which the kernel is faster in a dtype that this CPU does not multiply."""
_KEPT = 4
"""Masks to keep, of 4 MiB each at most in float32."""


class Block(NamedTuple):
    """The rows of a dense problem that see a key, and the keys that one of them sees.

    Every row sees one of these keys. Rows and keys that are left out give and get zeros.
    """

    rows: slice
    keys: slice

    @classmethod
    def of(cls, problem: Problem) -> Block | None:
        """The block of a problem; None if that is all of it, or the kernel has a flag for the band."""
        if is_flag(problem):
            return None
        (_, Sq, Sk, _, _), band = problem.extent, problem.band
        rows = band.rows(Sq, Sk)
        keys = band.keys(rows, Sq, Sk)
        if (len(rows), len(keys)) == (Sq, Sk):
            return None
        return cls(slice(rows.start, rows.stop), slice(keys.start, keys.stop))

    def of_problem(self, problem: Problem) -> Problem:
        """The block as a problem of its own."""
        extent, (rows, keys) = problem.extent, (range(at.start, at.stop) for at in self)
        band = problem.band.of_block(rows, keys, extent.Sq, extent.Sk)
        return problem._replace(extent=extent._replace(Sq=len(rows), Sk=len(keys)), band=band)

    def of_inputs(self, inputs: Inputs) -> Inputs:
        q, k, v = self._qkv(*inputs[:3], 1)
        return inputs._replace(q=q, k=k, v=v, attn_mask=self.of_mask(inputs.attn_mask))

    def of_saved(self, saved: Saved) -> Saved:
        dout, dlse, out, lse, mask_grad, low = saved
        dlse, low = (None if x is None else x[..., self.rows] for x in (dlse, low))
        return Saved(dout[:, self.rows], dlse, out[:, self.rows], lse[..., self.rows], mask_grad, low)

    def of_mask(self, mask: Tensor | None) -> Tensor | None:
        """The part of a mask of up to four dimensions; those of size 1 stay 1."""
        if mask is None:
            return None
        for dim, at in ((-1, self.keys), (-2, self.rows)):
            if mask.dim() >= -dim and mask.shape[dim] != 1:
                mask = mask.narrow(dim, at.start, at.stop - at.start)
        return mask

    def forward(self, inputs: Inputs, problem: Problem, backend: Prepares) -> Results:
        """A problem's results, of which the backend computes the block's."""
        of_block = self.of_inputs(inputs)._replace(sinks=None)
        found = Results(
            *self._among_rows(problem.extent.Sq, *backend.forward(of_block, self.of_problem(problem)))
        )
        # Rows that see no key give everything to the sinks.
        return found if inputs.sinks is None else Results(*sinks.join(*found[:3], inputs.sinks))

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem, backend: Prepares) -> Grads:
        """A problem's gradients, without one of its mask."""
        found = backend.backward(self.of_saved(saved), self.of_inputs(inputs), self.of_problem(problem))
        return Grads(*self._among_all(problem, found[:3], 1), None, found.dsinks)

    def prepare(self, inputs: Inputs, problem: Problem, order: Order, backend: Prepares) -> Launch | None:
        launch_block = backend.prepare(self.of_inputs(inputs), self.of_problem(problem), order)
        if launch_block is None:
            return None
        dim, out_dim = (2 if first else 1 for first in order)

        def launch(
            q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *others: Any
        ) -> tuple[Any, ...]:
            qkv = self._qkv(q, k, v, dim)
            found = launch_block(*qkv, self.of_mask(attn_mask), *others)
            return self._among_rows(problem.extent.Sq, *found, dim=out_dim)

        return launch

    def prepare_backward(
        self, saved: Saved, inputs: Inputs, problem: Problem, order: Order, backend: Prepares
    ) -> BackwardLaunch | None:
        given = self.of_saved(saved), self.of_inputs(inputs), self.of_problem(problem)
        launch_block = backend.prepare_backward(*given, order)
        if launch_block is None:
            return None
        dim, out_dim = (2 if first else 1 for first in order)

        def launch(
            dout: Tensor,
            out: Tensor,
            lse: Tensor,
            low: Tensor | None,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            attn_mask: Tensor | None = None,
            *others: Any,
        ) -> tuple[Any, ...]:
            dout, out = (_cut(x, out_dim, self.rows) for x in (dout, out))
            lse = _cut(lse, 2, self.rows)
            low = None if low is None else _cut(low, 2, self.rows)
            qkv = self._qkv(q, k, v, dim)
            *grads, dsinks = launch_block(dout, out, lse, low, *qkv, self.of_mask(attn_mask), *others)
            return *self._among_all(problem, grads, dim), dsinks

        return launch

    def _qkv(self, q: Tensor, k: Tensor, v: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """The block's part of q, k and v, whose sequences are along `dim`."""
        return _cut(q, dim, self.rows), _cut(k, dim, self.keys), _cut(v, dim, self.keys)

    def _among_rows(
        self, Sq: int, out: Tensor, lse: Tensor, low: Tensor | None, *others: Any, dim: int = 1
    ) -> tuple[Any, ...]:
        """Results of the block's rows as those of all rows; the others see nothing."""
        if low is not None:
            low = _among(low, self.rows, Sq, 2)
        return _among(out, self.rows, Sq, dim), _among(lse, self.rows, Sq, 2, -torch.inf), low, *others

    def _among_all(self, problem: Problem, grads: Any, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the block's q, k and v as those of all rows and keys."""
        (_, Sq, Sk, _, _), (dq, dk, dv) = problem.extent, grads
        dk, dv = (_among(x, self.keys, Sk, dim) for x in (dk, dv))
        return _among(dq, self.rows, Sq, dim), dk, dv


def is_flag(problem: Problem) -> bool:
    """Whether torch's kernel has a flag for a dense problem's band: it is full, or causal aligned to the top
    left."""
    (left, right), (_, Sq, Sk, _, _) = problem.band, problem.extent
    is_top_left = right == Sq - Sk and (left is None or left >= Sk - 1)
    return is_top_left or problem.band.hides_nothing(Sq, Sk)


def _cut(x: Tensor, dim: int, at: slice) -> Tensor:
    size = at.stop - at.start
    return x if x.shape[dim] == size else x.narrow(dim, at.start, size)


def _among(x: Tensor, at: slice, size: int, dim: int, other: float = 0.0) -> Tensor:
    """A tensor of some rows, which are along `dim`, as one of all: contiguous as (B, S, H, D)."""
    if at.stop - at.start == size:
        return x
    is_heads_first = dim == 2 and x.dim() == 4
    if is_heads_first:
        x = x.transpose(1, 2)
        dim = 1
    sizes = list(x.shape)
    sizes[dim] = size
    found = x.new_full(sizes, other)
    _cut(found, dim, at).copy_(x)
    return found.transpose(1, 2) if is_heads_first else found


class Hidden(NamedTuple):
    """What a mask has to hide of Sq rows and Sk keys."""

    dtype: torch.dtype
    Sq: int
    Sk: int
    band: Band

    @classmethod
    def of(cls, problem: Problem) -> Hidden | None:
        """What the kernel's flag does not hide; None if there is nothing."""
        return None if is_flag(problem) else cls(problem.spec.dtype, *problem.extent[1:3], problem.band)


@lru_cache(maxsize=_KEPT)
def bias(hidden: Hidden) -> Tensor:
    """What is added to scores, (Sq, Sk): 0, or -inf where the band hides a key."""
    dtype, Sq, Sk, band = hidden
    # Whatever device or mode is active in the call that needs it first.
    with torch.inference_mode(False), _DisableTorchDispatch():
        return at_once.outside(band, Sq, Sk, dtype)


def beyond(problem: Problem) -> list[str]:
    """The reason if another backend is faster for a dense problem's band; empty if the kernel serves it."""
    band, (_, Sq, Sk, _, _) = problem.band, problem.extent
    if not band.rows(Sq, Sk):
        why = "it hides every key"
    elif is_flag(problem) or _is_fast(problem):
        return []
    else:
        why = "plain torch is faster, which skips keys that it hides"
    return [f"the window is {tuple(band)} for Sq={Sq}, Sk={Sk}, and {why}"]


def is_slow(problem: Problem) -> bool:
    """Whether a dense problem's band leaves so many scores that the kernel, which multiplies number by number
    in a dtype that this CPU does not know, takes longer than tiles in float32."""
    dtype = problem.spec.dtype
    return not is_flag(problem) and problem.extent.scores > _FEW and at_once.products_dtype(dtype) != dtype


def _is_fast(problem: Problem) -> bool:
    """Whether the kernel, which computes hidden scores, too, takes less time than tiles that are left out."""
    if (block := Block.of(problem)) is not None:
        problem = block.of_problem(problem)
    if is_flag(problem):
        return True
    _, Sq, Sk, _, _ = problem.extent
    scores, shown = Sq * Sk, problem.band.pairs(Sq, Sk)
    return scores <= _MOST and (scores - shown <= _HIDDEN or shown >= _SHOWN * scores)
