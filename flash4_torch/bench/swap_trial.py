"""One cell of section `swap`: a stock module, ours with its parameters, their calls, and what is right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import MultiheadAttention
from ..testing import assert_close_as_peer, dropout_mask
from . import swap_ways
from .swap_cases import SwapCase

Results = tuple[Tensor | None, ...]
"""Output, weights or None, and in training the gradients of the input and of the parameters."""

NAMES = ("stock", "flash4")


@dataclass(frozen=True)
class Trial:
    """Both modules of a cell, which share their parameters, and the arguments of their calls."""

    case: SwapCase
    modules: dict[str, Callable[..., Any]]
    stock: nn.MultiheadAttention
    leaves: tuple[Tensor, ...]
    """The inputs, each one once."""
    dout: Tensor
    arguments: dict[str, Any]

    @property
    def calls(self) -> dict[str, Callable[[], Results]]:
        return {who: partial(self.call, who) for who in self.modules}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of inputs and parameters."""
        return self.leaves[0].dtype

    def call(self, who: str) -> Results:
        """A whole call: the forward, and in training also the gradients."""
        if self.case.mode == "evaluation":
            with torch.no_grad():
                results: Results = self._forward(who)
                return results
        return self._with_gradients(*self._forward(who))

    def _forward(self, who: str) -> Any:
        inputs = swap_ways.inputs(self.case, self.leaves)
        if not self.case.is_cast:
            return self.modules[who](*inputs, **self.arguments)
        with torch.autocast(self.leaves[0].device.type, torch.bfloat16):
            return self.modules[who](*inputs, **self.arguments)

    def _with_gradients(self, out: Tensor, weights: Tensor | None) -> Results:
        inputs = (*self.leaves, *self.stock.parameters())
        return out, weights, *torch.autograd.grad(out, inputs, self.dout)

    def call_and_replay(self, who: str) -> tuple[Results, Tensor | None]:
        """A call's results, and which weights ours kept: bool (B, H, Sq, Sk), None without dropout."""
        if not (self.case.mode == "training" and self.stock.dropout):
            return self.call(who), None
        out, weights = self._forward(who)
        kept = _kept(out, swap_ways.shape_of_weights(self.case), self.stock.dropout)
        return self._with_gradients(out, weights), kept

    def definition(self, dtype: torch.dtype, kept: Tensor | None) -> Results:
        """The results by plain torch in `dtype`, which materialises the weights."""
        module, case = copy.deepcopy(self.stock).to(dtype), self.case
        leaves = tuple(x.detach().to(dtype).requires_grad_() for x in self.leaves)
        is_cast = case.is_cast and dtype != torch.float64
        casting = torch.autocast(leaves[0].device.type, torch.bfloat16, enabled=is_cast)
        with torch.set_grad_enabled(case.mode == "training"), casting:
            q, k, v = swap_ways.heads(case, module, leaves)
            scores = q @ k.transpose(2, 3) * module.head_dim**-0.5
            if (mask := self.arguments.get("attn_mask")) is not None:
                scores = scores + _as_bias(mask, dtype)
            if (mask := self.arguments.get("key_padding_mask")) is not None:
                scores = scores + _as_bias(mask, dtype)[..., None, None, :]
            weights = scores.softmax(-1)
            if kept is not None:
                weights = weights * kept / (1 - module.dropout)
            out = module.out_proj(swap_ways.rows(case, weights @ v))
            averaged = weights.mean(1) if case.need_weights else None
            if averaged is not None and case.way == swap_ways.UNBATCHED:
                averaged = averaged.squeeze(0)
        if case.mode == "evaluation":
            return out, averaged
        wanted = (*leaves, *module.parameters())
        return out, averaged, *torch.autograd.grad(out, wanted, self.dout.to(out.dtype))

    def what_differs(self) -> dict[str, str]:
        """A sentence for each module whose results are further from exact ones than twice plain torch's are.

        Stock's own dropout masks cannot be replayed; with dropout only ours is compared.
        """
        ours, kept = self.call_and_replay("flash4")
        found = {"flash4": ours} if kept is not None else {"flash4": ours, "stock": self.call("stock")}
        exact = self.definition(torch.float64, kept)
        peer = self.definition(self.dtype, kept)
        return {
            who: sentence
            for who, results in found.items()
            if (sentence := self._differs(results, exact, peer))
        }

    def _differs(self, results: Results, exact: Results, peer: Results) -> str:
        inputs = ["input", "second input", "third input"][: len(self.leaves)]
        gradients = (*inputs, *(name for name, _ in self.stock.named_parameters()))
        names = ("output", "weights", *(f"gradient of {name}" for name in gradients))[: len(exact)]
        for name, a, e, p in zip(names, results, exact, peer, strict=True):
            if a is None or e is None or p is None:
                continue
            if self.case.is_cast:
                # Their errors are those of 16 bits, whatever dtype they are returned in.
                a, p = a.bfloat16(), p.bfloat16()
            try:
                assert_close_as_peer(a, e, p, what=name)
            except AssertionError as error:
                return str(error)
        return ""


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to the scores."""
    if mask.is_floating_point():
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)


def prepare(case: SwapCase, device: str) -> Trial:
    """Makes the modules and random inputs of a cell, the same ones whenever it is called."""
    if case.compiled:
        # A function is compiled for a few kinds of calls only before torch gives up.
        torch.compiler.reset()
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    training = case.mode == "training"
    stock = swap_ways.module(case, device).train(training)
    for bias in (stock.in_proj_bias, stock.out_proj.bias):
        nn.init.normal_(bias, std=0.02)
    modules: dict[str, Callable[..., Any]] = dict(
        zip(NAMES, (stock, MultiheadAttention.from_torch(stock)), strict=True)
    )
    if case.compiled:
        modules = {
            who: torch.compile(module, fullgraph=True, dynamic=False) for who, module in modules.items()
        }
    leaves = tuple(
        torch.randn(shape, device=device, dtype=dtype, requires_grad=training)
        for shape in swap_ways.shapes(case)
    )
    arguments = {"need_weights": case.need_weights} | _masks(case, device)
    dout = torch.randn_like(leaves[0], dtype=torch.bfloat16 if case.is_cast else dtype)
    return Trial(case, modules, stock, leaves, dout, arguments)


def _masks(case: SwapCase, device: str) -> dict[str, Any]:
    """The masks, in the form that torch's documentation gives them; every row may attend to key 0."""
    B, _, Sq, Sk = swap_ways.shape_of_weights(case)
    dtype = getattr(torch, case.dtype)
    later = torch.ones(Sq, Sk, dtype=torch.bool, device=device).triu(1)
    padding = torch.arange(Sk, device=device) >= torch.linspace(Sk // 2 + 1, Sk, B, device=device)[:, None]
    padding = padding[0] if case.way == swap_ways.UNBATCHED else padding
    if case.mask == "causal":
        mask = torch.zeros(Sq, Sk, dtype=dtype, device=device).masked_fill(later, -torch.inf)
        return {"attn_mask": mask, "is_causal": True}
    if case.mask == "padding":
        return {"key_padding_mask": padding}
    if case.mask == "padding+causal":
        # Both bool: torch warns of masks of two kinds.
        return {"key_padding_mask": padding, "attn_mask": later, "is_causal": True}
    if case.mask == "float":
        return {"attn_mask": torch.randn(Sq, Sk, device=device, dtype=dtype)}
    if case.mask == "bool":
        mask = torch.rand(Sq, Sk, device=device) < 0.3
        mask[:, 0] = False
        return {"attn_mask": mask}
    return {}


def _kept(out: Tensor, shape: tuple[int, int, int, int], p: float) -> Tensor:
    """The weights that dropout kept, bool, from what autograd's graph of `out` saved.

    Graphs that compute output and weights together save just that; others save the weights of each head,
    whose signs say it, or dropout's state.
    """
    kept = _saved(out, torch.bool, shape)
    if kept is None and (bytes_kept := _saved(out, torch.uint8, shape)) is not None:
        kept = bytes_kept.bool()
    for dtype in (out.dtype, torch.float32):
        if kept is None and (signed := _saved(out, dtype, shape)) is not None:
            kept = ~signed.signbit()
    return dropout_mask(saved_rng_state(out), *shape, p) if kept is None else kept


def saved_rng_state(out: Tensor) -> Tensor:
    """The state (seed, offset) of the dropout that made `out`, as autograd's graph saved it."""
    state = _saved(out, torch.int64, (2,))
    if state is None:
        raise LookupError("autograd saved no state of dropout")
    return state


def _saved(out: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor | None:
    """A tensor of that dtype and shape that autograd's graph of `out` saved."""
    waiting, seen = [out.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for saved in getattr(node, "saved_tensors", ()):
            if saved is not None and saved.dtype == dtype and saved.shape == shape:
                found: Tensor = saved
                return found
        waiting += [next_node for next_node, _ in node.next_functions]
    return None
