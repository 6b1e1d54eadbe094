"""Attention for callers inside the package, whose options are complete: the fast path, or operators."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import fast_path, ops
from .fast_path import Door, FastCall, Returned
from .problem import CallOptions, Inputs


class Request(NamedTuple):
    """An attention call; its tensors are (B, S, H, D)."""

    door: Door
    q: Tensor
    k: Tensor
    v: Tensor
    attn_mask: Tensor | None
    options: CallOptions
    average_heads: bool | None = None
    """True or False: the weights are returned, too, averaged or of each head."""

    def prepared(self) -> FastCall | None:
        """What serves the call by the fast path, if it is prepared."""
        return self._lookup()[1]

    def served(self) -> tuple[Tensor, ...]:
        """(out, lse), or (out, lse, weights)."""
        if is_dynamo_compiling():
            # The fast path is not for graphs, and each function that one is traced through is compared in
            # every call of the graph.
            return self._by_operators()[0]
        signature, call = self._lookup()
        if call is None and self.average_heads is not None:
            # A launch of output and weights in one go may differ by a rounding from the operators, so that it
            # serves the first call, too.
            self._record(signature, self.q, self.k, self.v)
            call = self._lookup()[1]
        if call is not None:
            results: tuple[Tensor, ...] = call.run(self.q, self.k, self.v, self.attn_mask, None)
            return results
        results, qkv = self._by_operators()
        self._record(signature, *qkv)
        return results

    def _by_operators(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor, Tensor]]:
        """What is returned, and q, k and v as the operators take them."""
        q, k, v = ops.autocast_inputs(self.q, self.k, self.v)
        rng_state = ops.draw_rng_state(q.device) if self.options.dropout_p > 0.0 else None
        scored_by = self.attn_mask, None, rng_state
        if self.average_heads is None:
            return ops.attention(q, k, v, *scored_by, self.options), (q, k, v)
        both = ops.attention_and_weights(q, k, v, *scored_by, self.options, self.average_heads)
        return both, (q, k, v)

    def _lookup(self) -> tuple[fast_path.Signature | None, FastCall | None]:
        flags = (*self.options, self.average_heads)
        return fast_path.lookup(self.door, self.q, self.k, self.v, (self.attn_mask, None), flags)

    def _record(self, signature: fast_path.Signature | None, q: Tensor, k: Tensor, v: Tensor) -> None:
        inputs = Inputs(q, k, v, self.attn_mask)
        returned = Returned(average_heads=self.average_heads)
        fast_path.record(signature, self.door, inputs, self.options, returned=returned)


class PackedRequest(NamedTuple):
    """An attention call of packed sequences; its tensors are (T, H, D)."""

    door: Door
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    options: CallOptions

    def served(self) -> Tensor:
        """The output (Tq, H, D)."""
        if is_dynamo_compiling() or self.q.is_cpu:
            return self._by_operators()[0]  # a CPU's backends prepare no such calls
        given = self.cu_seqlens_q, self.cu_seqlens_k, None
        max_seqlens = self.max_seqlen_q, self.max_seqlen_k
        signature, call = fast_path.lookup(
            self.door, self.q, self.k, self.v, given, (*self.options, *max_seqlens)
        )
        if call is not None:
            out: Tensor = call.run(self.q, self.k, self.v, *given)
            return out
        out, (q, k, v) = self._by_operators()
        inputs = Inputs(q, k, v, cu_seqlens_q=self.cu_seqlens_q, cu_seqlens_k=self.cu_seqlens_k)
        returned = Returned(lse=False)
        fast_path.record(signature, self.door, inputs, self.options, max_seqlens, returned)
        return out

    def _by_operators(self) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The output, and q, k and v as the operator takes them."""
        q, k, v = ops.autocast_inputs(self.q, self.k, self.v)
        rng_state = ops.draw_rng_state(q.device) if self.options.dropout_p > 0.0 else None
        beside = self.cu_seqlens_q, self.cu_seqlens_k, None, rng_state, self.max_seqlen_q, self.max_seqlen_k
        return ops.attention_varlen(q, k, v, *beside, self.options)[0], (q, k, v)
