"""The projections of a module: inputs that are one tensor share a product, and autocast casts beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled, nn
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import is_legacy_batchedtensor

from ..fast_path import view
from ..ops.autocast import autocast_dtype
from .contract import Call


class Parameters(NamedTuple):
    """The parameters of a module, or what a wrapper has in their place."""

    weights: tuple[Any, ...]
    """`in_proj_weight`, or the weights of queries, keys and values."""
    bias: Any
    out_weight: Any
    out_bias: Any

    @classmethod
    def of(cls, module: nn.MultiheadAttention) -> Parameters:
        """Those of a module, past `Module.__getattr__` where they are plain: it takes a microsecond each."""
        own = module._parameters
        try:
            of_out: Any = module._modules["out_proj"]._parameters  # type: ignore[union-attr]
            weight = own["in_proj_weight"]
            weights = (weight,) if weight is not None else tuple([own[name] for name in _SEPARATE])
            return cls(weights, own["in_proj_bias"], of_out["weight"], of_out["bias"])
        except KeyError:
            # Parametrised, or put in place by a wrapper.
            weight = module.in_proj_weight
            weights = (weight,) if weight is not None else tuple([getattr(module, x) for x in _SEPARATE])
            return cls(weights, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias)

    def in_order(self) -> tuple[Any, ...]:
        """All of them, None in the place of missing biases."""
        return *self.weights, self.bias, self.out_weight, self.out_bias


_FEW = 1 << 15
"""Numbers of a gradient that take less time to copy than another call takes to sum them."""
_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class Projection(NamedTuple):
    """What the calls of one signature do to their inputs, and to the rows of the heads."""

    parts: tuple[int, ...]
    """How many of queries, keys and values each product makes: (3,), (1, 2), (2, 1) or (1, 1, 1)."""
    num_weights: int
    """1, or 3 if those of queries, keys and values are separate."""
    num_heads: int
    batch_first: bool
    """True as well for inputs without a batch, which are seen as a batch of one."""
    is_batched: bool
    cast: torch.dtype | None
    """The dtype that autocast gives inputs and parameters, None if it is off."""

    @classmethod
    def of(cls, module: nn.MultiheadAttention, call: Call) -> Projection:
        num_weights, is_batched = 1 if module.in_proj_weight is not None else 3, call.query.dim() == 3
        parts = (1, 1, 1) if num_weights == 3 else parts_of(*call[:3])
        batch_first = module.batch_first or not is_batched
        cast = autocast_dtype(call.query.device.type)
        return cls(parts, num_weights, module.num_heads, batch_first, is_batched, cast)

    def inputs(self, call: Call) -> tuple[Tensor, ...]:
        """The input of each product."""
        if len(self.parts) == 1:
            return (call.query,)
        if len(self.parts) == 3:
            return call[:3]
        return call.query, call.value

    def apart(self, tensors: Sequence[Any]) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Any]]:
        """The inputs of products, the weights, and the tensors that follow."""
        first = len(self.parts)
        end = first + self.num_weights
        return tensors[:first], tensors[first:end], tensors[end:]

    def casts(self, *tensors: Tensor | None) -> tuple[Any, ...]:
        """The tensors as autocast casts them."""
        if self.cast is None:
            return tensors
        return tuple([x if x is None else x.to(self.cast) for x in tensors])

    def of_each(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """The weight of each product."""
        return weights if self.num_weights == len(self.parts) else self._split(weights[0])

    def _split(self, x: Tensor) -> Sequence[Tensor]:
        """Rows of a weight, or numbers of a bias, for each product."""
        E = len(x) // 3
        # Not views to autograd: half the time.
        return torch.unsafe_split_with_sizes(x, [E * n for n in self.parts])

    def products(
        self, inputs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None
    ) -> list[Tensor]:
        """The projections (..., parts * embed_dim), one for each product."""
        if len(inputs) == 1:
            return [F.linear(inputs[0], weights[0], bias)]
        biases: Any = (None,) * len(self.parts) if bias is None else self._split(bias)
        return list(map(F.linear, inputs, self.of_each(weights), biases))

    def sizes(self, x: Tensor) -> tuple[int, int]:
        """Batch and sequence length of an input."""
        if not self.is_batched:
            return 1, x.shape[0]
        return (x.shape[0], x.shape[1]) if self.batch_first else (x.shape[1], x.shape[0])

    def heads(self, products: Sequence[Tensor]) -> list[Tensor]:
        """q, k and v (N, S, H, D), views of the products."""
        found: list[Tensor] = []
        for x, n in zip(products, self.parts, strict=True):
            x = x if self.is_batched else x[None]
            heads = x.view(*x.shape[:2], n, self.num_heads, x.shape[2] // (n * self.num_heads))
            found += (heads if self.batch_first else heads.transpose(0, 1)).unbind(2)
        return found

    def heads_past_dispatcher(self, products: Sequence[Tensor]) -> list[Tensor]:
        """The same past autograd, sooner where products have no gaps."""
        if not all([x.is_contiguous() for x in products]):
            return self.heads(products)
        found, H = [], self.num_heads
        for x, n in zip(products, self.parts, strict=True):
            N, S = self.sizes(x)
            width = x.shape[-1]
            E = width // n
            sizes, strides = (N, S, H, E // H), (S * width, width, E // H, 1)
            if not self.batch_first:
                strides = (width, N * width, E // H, 1)
            for part in range(n):
                found.append(view(x, sizes, strides, part * E))
        return found

    def heads_of_one(self, products: Sequence[Tensor]) -> list[Tensor]:
        """q, k and v (H, S, D) of a batch of one, views of products without gaps past autograd."""
        found, H = [], self.num_heads
        for x, n in zip(products, self.parts, strict=True):
            width = x.shape[-1]
            E = width // n
            D = E // H
            found += [view(x, (H, x.numel() // width, D), (D, width, 1), part * E) for part in range(n)]
        return found

    def rows(self, out: Tensor) -> Tensor:
        """out (N, Sq, H, D) in the layout of the module's inputs, (..., embed_dim)."""
        rows = out.flatten(2)
        if not self.batch_first:
            return rows.transpose(0, 1).contiguous()
        return rows if self.is_batched else rows.squeeze(0)

    def heads_of_rows(self, rows: Tensor, N: int, S: int) -> Tensor:
        """Rows (N * S, embed_dim), ordered as an input, as a view (N, S, H, D)."""
        if self.batch_first:
            return rows.view(N, S, self.num_heads, -1)
        return rows.view(S, N, self.num_heads, -1).transpose(0, 1)

    def rows_of_grads(self, grads: list[Tensor]) -> list[Tensor]:
        """Gradients of q, k and v (N, S, H, D) as those of the products, (rows, parts * embed_dim).

        Empties the list: each is freed as soon as it is copied.
        """
        found: list[Tensor] = []
        for n in self.parts:
            parts = [grads.pop(0) for _ in range(n)]
            if self.batch_first:
                parts = [x.reshape(-1, x.shape[2] * x.shape[3]) for x in parts]
            else:
                parts = [x.reshape(*x.shape[:2], -1).transpose(0, 1) for x in parts]
            rows = parts[0] if n == 1 else torch.cat(parts, -1)
            found.append(rows if self.batch_first else rows.reshape(-1, rows.shape[-1]))
        return found

    def backward(
        self,
        grads: Sequence[Tensor],
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        wanted: Sequence[bool],
        sum_of_rows: Callable[[Tensor], Tensor],
    ) -> list[Tensor | None]:
        """The wanted gradients of inputs, weights and bias, None in the place of others.

        grads: those of the products, (rows, parts * embed_dim).
        """
        of_inputs, of_weights = wanted[: len(inputs)], wanted[len(inputs) : -1]
        found: list[Tensor | None] = []
        for dy, x, weight, wants in zip(grads, inputs, self.of_each(weights), of_inputs, strict=True):
            found.append((dy @ weight).view(x.shape) if wants else None)
        rows = [x.reshape(-1, x.shape[-1]) for x in inputs] if any(of_weights) else []
        if self.num_weights == 3:
            pairs = zip(grads, rows or inputs, of_weights, strict=True)
            found += [dy.t() @ x if wants else None for dy, x, wants in pairs]
        else:
            found.append(_products_of_rows(grads, rows) if rows else None)
        found.append(_sums(grads, sum_of_rows) if wanted[-1] else None)
        return found


def parts_of(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """The parts of products if one weight has those of queries, keys and values."""
    if query is key:
        return (3,) if key is value else (2, 1)
    return (1, 2) if key is value else (1, 1, 1)


def distinct(call: Call) -> tuple[Tensor, ...]:
    """The inputs, each one once."""
    query, key, value = call[:3]
    if key is value or query is value:
        return (query,) if query is key else (query, key)
    return (query, value) if query is key else (query, key, value)


def is_vmapped(x: Tensor) -> bool:
    """Whether vmap has many of this tensor, so that no call may write it into given memory."""
    return is_legacy_batchedtensor(x) or _are_functorch_transforms_active()


def _sums(grads: Sequence[Tensor], sum_of_rows: Callable[[Tensor], Tensor]) -> Tensor:
    """The sums of rows of all gradients, one after the other."""
    few = grads[0].numel() <= _FEW
    if len(grads) > 1 and few and all([len(x) == len(grads[0]) for x in grads]):
        return sum_of_rows(torch.cat(tuple(grads), -1))
    return _joined([sum_of_rows(x) for x in grads])


def _products_of_rows(grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
    """The gradients of all rows of one weight, dy^T x, one after the other."""
    pairs = list(zip(grads, inputs, strict=True))
    if len(pairs) == 1 or is_grad_enabled() or is_vmapped(grads[0]):
        return _joined([dy.t() @ x for dy, x in pairs])
    made = grads[0].new_empty(sum([x.shape[1] for x in grads]), inputs[0].shape[1])
    parts = made.split([x.shape[1] for x in grads])
    for part, (dy, x) in zip(parts, pairs, strict=True):
        torch.mm(dy.t(), x, out=part)
    return made


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
