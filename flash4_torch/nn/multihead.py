"""`MultiheadAttention`: torch's module of that name, computed by this package's attention."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.utils import parametrize

from .. import ops
from ..attend import PackedRequest, Request
from ..errors import ScriptError
from ..fast_path import Door
from ..ops.check import is_stock_sdpa, not_in_torchs_context_parallel
from ..problem import CallOptions
from . import contract, encoder, padding, prepared, tracing
from .contract import Call
from .projection import Parameters, parts_of
from .ragged import Ragged

_DOOR = Door("MultiheadAttention")
_PACKED_DOOR = Door("MultiheadAttention of sequences", varlen=True)
Self = TypeVar("Self", bound="MultiheadAttention")


class MultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` with FlashAttention inside: same constructor, parameters, forward and errors.

    Memory is linear in the sequence lengths; `need_weights=True` adds the weights it returns and one tile.
    Small training steps on a CPU that return weights, or drop some, save those of each head, as stock does.
    Dropout, padding, masks, `add_bias_kv`, `add_zero_attn`, `kdim`, `vdim`, unbatched and nested inputs,
    autocast, torch.compile and torch.export work in training and in evaluation, on the same code path.

    Some results of the stock module depend on the path that it takes; this module has one answer for each:

    - a query that may attend to nothing gets weights 0, and so the bias of `out_proj` (stock: that, or NaN);
    - `is_causal=True` means that row i sees keys 0 to i, and `attn_mask` is not read (stock reads it when
      there is a `key_padding_mask` or weights are needed). It is read only with `add_bias_kv` or
      `add_zero_attn`, because every row sees the keys that they append (stock may mask them);
    - outputs are contiguous (stock: in training, with `batch_first=True`, transposed views);
    - nested inputs work in training too, and nested keys may have other lengths than the queries.

    torch.fx records the module as one call, as it does stock's. torch.jit.script, which is deprecated, is not
    supported.
    """

    flash4_context_parallel: Callable[..., Tensor] | None = None
    """Attention over other ranks' tokens, too, if `distributed.parallelize_attention` said so."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Creates a new module; `from_torch` and `replace_attention` convert an existing one.

        Args:
            embed_dim: width of queries and outputs, over all heads.
            num_heads: number of heads that share `embed_dim`; it divides `embed_dim`.
            dropout: probability of dropping a weight in training. Default: 0.
            bias: whether the projections add biases. Default: True.
            add_bias_kv: whether a learned key and value follow the given ones. Default: False.
            add_zero_attn: whether a key and a value of zeros follow all others. Default: False.
            kdim: width of keys. Default: `embed_dim`.
            vdim: width of values. Default: `embed_dim`.
            batch_first: whether batches are (N, S, E) instead of (S, N, E). Default: False.
            device: device of the parameters. Default: torch's default device.
            dtype: dtype of the parameters. Default: torch's default dtype.

        Raises:
            ArgumentError: an argument has the wrong type.
            ValueError, AssertionError: sizes are not positive, or `num_heads` does not divide `embed_dim`.
        """
        contract.check_constructor(
            {"embed_dim": embed_dim, "num_heads": num_heads, "kdim": kdim, "vdim": vdim},
            {
                "bias": bias,
                "add_bias_kv": add_bias_kv,
                "add_zero_attn": add_zero_attn,
                "batch_first": batch_first,
            },
            dropout,
        )
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )

    def extra_repr(self) -> str:
        return f"flash4_torch, embed_dim={self.embed_dim}, num_heads={self.num_heads}"

    def __prepare_scriptable__(self) -> NoReturn:
        """The first thing that torch.jit.script calls on a module."""
        raise ScriptError

    @classmethod
    def from_torch(cls: type[Self], module: nn.MultiheadAttention) -> Self:
        """A new module with the parameters, submodules, hooks, settings and training flag of `module`.

        Parameters, submodules and hooks are shared, not copied: optimizers, tied weights and the handles of
        hooks stay valid. Raises TypeError if `module` is not an nn.MultiheadAttention, or has a forward of
        its own, which would be lost.
        """
        if not has_stock_forward(module):
            raise TypeError(
                f"module is {type(module).__name__}, but it must be an nn.MultiheadAttention "
                "that does not override forward"
            )
        adopted = adopted_class(module, cls)
        new = adopted.__new__(adopted)
        # Not module.__dict__: __getstate__ leaves out a compiled call, which would go on calling `module`.
        new.__dict__.update(nn.Module.__getstate__(module))
        for own in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            new.__dict__[own] = copy.copy(module.__dict__[own])
        return new

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """The stock value, except for callers that would then call a fused kernel instead of this module.

        nn.TransformerEncoderLayer in evaluation, and code modelled on it, reads no other property of its
        attention that this class could change without giving every reader a wrong value. `encoder` says where
        its kernel is the fastest.
        """
        if is_dynamo_compiling():  # dynamo cannot trace the stack query, and traces no other reader
            return False
        if not self.__dict__["_qkv_same_embed_dim"]:
            return False
        asker = sys._getframe(1)
        if asker.f_code is encoder.FORWARD:
            return self._may_be_bypassed(asker)
        return not _would_bypass(asker)

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, value: bool) -> None:
        self.__dict__["_qkv_same_embed_dim"] = value

    def _may_be_bypassed(self, asker: FrameType) -> bool:
        is_usual = type(self) is MultiheadAttention and "forward" not in self.__dict__
        return is_usual and self.flash4_context_parallel is None and encoder.serves(self, asker)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of L queries over S keys in a batch of N; masks, flags and results as in stock.

        Args:
            query: (L, N, embed_dim), with `batch_first` (N, L, embed_dim), or unbatched (L, embed_dim).
            key: (S, N, kdim), (N, S, kdim) or (S, kdim).
            value: (S, N, vdim), (N, S, vdim) or (S, vdim).
            key_padding_mask: (N, S), unbatched (S,). Bool: True keys are ignored; float: added to the scores.
            need_weights: return the attention weights, after dropout, as well. Default: True.
            attn_mask: (L, S) or (N * num_heads, L, S), bool or float like `key_padding_mask`.
            average_attn_weights: average the returned weights over the heads. Default: True.
            is_causal: a promise that `attn_mask` is the causal mask and need not be read. Default: False.

        Returns:
            The output, shaped like `query`, and the weights or None. Weights are (N, L, S), with
            `average_attn_weights=False` (N, num_heads, L, S), both without N if unbatched.

        If `batch_first`, query, key and value may be nested tensors `(N, *, E)` of one layout, without masks,
        `add_bias_kv` and `add_zero_attn`. Then the output is nested and the weights are padded with zeros.

        Raises:
            AssertionError, RuntimeError: sizes or dtypes that do not fit; the stock module's own errors.
            ArgumentError: a nested call outside these limits, or an argument of the wrong type.
        """
        call = Call(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )
        parameters = None
        if type(self) is MultiheadAttention and not is_dynamo_compiling():
            parameters = Parameters.of(self)
            if self.flash4_context_parallel is None and is_stock_sdpa():
                known = prepared.recall(self, call, parameters)
                if known is not None:
                    return prepared.run(known, call, parameters)
        if not contract.has_kinds(call):
            if ops.is_recorded(*call):
                return tracing.record(self, call)
            contract.check_kinds(call)
        if torch.is_grad_enabled() and not is_dynamo_compiling():
            call = contract.with_gradients(call)
            query, key, value, key_padding_mask, _, attn_mask, *_ = call
        if self.flash4_context_parallel is not None:
            return self._forward_shared(call, self.flash4_context_parallel)
        not_in_torchs_context_parallel("query")
        if query.is_nested or key.is_nested or value.is_nested:
            return self._forward_nested(call)
        signature = None
        if parameters is not None:
            signature, known = prepared.lookup(self, call, parameters)
            if known is not None:
                return prepared.run(known, call, parameters)
        contract.check(self, call)

        by_rule = contract.is_causal_by_rule(self, call)
        if parameters is not None and signature is not None:
            # Its results may differ by a rounding, so that it serves the first call, too.
            options = self._options(0 if by_rule else None)
            materialized = prepared.record_materialized(signature, self, call, options)
            if materialized is not None:
                return prepared.run(materialized, call, parameters)
        q, k, v = (self._heads(x) for x in self._project(query, key, value))
        # Stock aligns causal to the top left; our windows are aligned to the bottom right.
        window_right = q.shape[1] - k.shape[1] if by_rule else None
        mask = padding.merge(
            key_padding_mask,
            None if by_rule else attn_mask,
            self.num_heads,
            contract.appended_keys(self),
        )
        k, v = self._append(k, self.bias_k), self._append(v, self.bias_v)
        average_heads = average_attn_weights if need_weights else None
        request = Request(_DOOR, q, k, v, mask, self._options(window_right), average_heads)
        out, _, *weights = request.served()
        if parameters is not None and signature is not None:
            known = prepared.record(signature, request.prepared(), self, call, not by_rule)
            if known is not None and known.is_fused:
                # Its results may differ by a rounding, so that it serves the first call, too.
                return prepared.run(known, call, parameters)
        return self._assemble(out, weights[0] if weights else None, is_batched=query.dim() == 3)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """The three input projections, (..., embed_dim) each; inputs that are the same tensor share one GEMM.

        The projections are views of its result; torch's own helper copies them into separate tensors.
        """
        weight, bias = self.in_proj_weight, self.in_proj_bias
        weights_dtype = (self.q_proj_weight if weight is None else weight).dtype
        if bias is not None and bias.dtype != weights_dtype and self.batch_first and query.dim() == 3:
            # torch's linear adds a bias of another dtype only to transposed inputs, which stock has here.
            unbiased = self._project_without_bias(query, key, value)
            return [(x + b).to(x.dtype) for x, b in zip(unbiased, bias.chunk(3), strict=True)]
        if weight is None:
            biases = (None, None, None) if bias is None else bias.chunk(3)
            return F._in_projection(
                query, key, value, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight, *biases
            )
        parts = parts_of(query, key, value)
        if len(parts) == 1:
            return F.linear(query, weight, bias).chunk(3, -1)
        sizes = [self.embed_dim * n for n in parts]
        biases = [None] * len(parts) if bias is None else bias.split(sizes)
        inputs = (query, value) if len(parts) == 2 else (query, key, value)
        found: list[Tensor] = []
        for x, own, b, n in zip(inputs, weight.split(sizes), biases, parts, strict=True):
            found += F.linear(x, own, b).chunk(n, -1)
        return found

    def _project_without_bias(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        if self.in_proj_weight is not None:
            return F._in_projection_packed(query, key, value, self.in_proj_weight)  # type: ignore[attr-defined]
        return F._in_projection(query, key, value, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)

    def _heads(self, x: Tensor) -> Tensor:
        """A projection, in the layout of the inputs, as a view (N, S, H, D)."""
        # Not unflatten: torch.onnx.export without dynamo would fix the sizes of its result.
        heads = x.view(*x.shape[:-1], self.num_heads, self.head_dim)
        if heads.dim() == 3:
            return heads[None]
        return heads if self.batch_first else heads.transpose(0, 1)

    def _append(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Keys or values (N, S, H, D), followed by the learned and the zero one if the module has them."""
        N, _, H, D = x.shape
        appended = []
        if bias is not None:
            appended.append(bias.view(1, 1, H, D).expand(N, 1, H, D))
        if self.add_zero_attn:
            appended.append(x.new_zeros(N, 1, H, D))
        return torch.cat([x, *appended], dim=1) if appended else x

    def _options(self, window_right: int | None) -> CallOptions:
        """Options of a call, which the weights of `need_weights` share."""
        return CallOptions(
            scale=self.head_dim**-0.5,
            window_right=window_right,
            dropout_p=self.dropout if self.training else 0.0,
            deterministic=_deterministic(),
        )

    def _draw_rng_state(self, x: Tensor) -> Tensor | None:
        return ops.draw_rng_state(x.device) if self.training and self.dropout else None

    def _assemble(
        self, out: Tensor, weights: Tensor | None, is_batched: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The output projection of (N, L, H, D), returned in the layout of the inputs."""
        rows = out.flatten(2)
        if is_batched and not self.batch_first:
            rows = rows.transpose(0, 1).contiguous()
        out = F.linear(rows, self.out_proj.weight, self.out_proj.bias)
        if not is_batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out, weights

    def _forward_shared(self, call: Call, attend: Callable[..., Tensor]) -> tuple[Tensor, None]:
        """The forward of this rank's part of sequences that ranks share: `attend` knows the others."""
        contract.check_shared(self, call)
        contract.check(self, call)
        q, k, v = (self._heads(x) for x in self._project(call.query, call.key, call.value))
        out = attend(
            q,
            k,
            v,
            causal=call.is_causal,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.head_dim**-0.5,
        )
        return self._assemble(out, None, is_batched=call.query.dim() == 3)[0], None

    def _forward_nested(self, call: Call) -> tuple[Tensor, Tensor | None]:
        contract.check_nested(self, call)
        query = Ragged("query", call.query)
        key = query if call.key is call.query else Ragged("key", call.key)
        value = key if call.value is call.key else Ragged("value", call.value)
        key.check_lengths_of("value", value)
        projected = self._project(query.values, key.values, value.values)
        out, weights = self._attend_sequences(query, key, projected, call)
        rows = out.reshape(-1, self.embed_dim)
        return query.rewrap(F.linear(rows, self.out_proj.weight, self.out_proj.bias)), weights

    def _attend_sequences(
        self, query: Ragged, key: Ragged, projected: Sequence[Tensor], call: Call
    ) -> tuple[Tensor, Tensor | None]:
        """The heads' rows of all sequences, one after the other, and the weights or None."""
        options, heads = self._options(None), (self.num_heads, self.head_dim)
        has_more = call.need_weights or torch.is_grad_enabled() or options.dropout_p
        if query.length and key.length and not has_more:
            # Sequences of one length are a batch.
            lengths = query.length, key.length, key.length
            q, k, v = (x.view(-1, S, *heads) for x, S in zip(projected, lengths, strict=True))
            return Request(_DOOR, q, k, v, None, options).served()[0], None
        q, k, v = (x.unflatten(-1, heads) for x in projected)
        if not call.need_weights:
            sequences = query.cu_seqlens, key.cu_seqlens, query.max_seqlen, key.max_seqlen
            return PackedRequest(_PACKED_DOOR, q, k, v, *sequences, options).served(), None
        # The weights of all sequences fit one tensor only when padded; stock pads them too.
        q, k, v = ops.autocast_inputs(q, k, v)
        real = query.is_real()
        both_real = real[:, None, :, None] & key.is_real()[:, None, None, :]
        scored_by = both_real, None, self._draw_rng_state(q)
        padded = query.padded(q), key.padded(k), key.padded(v)
        out, _, weights = ops.attention_and_weights(*padded, *scored_by, options, call.average_attn_weights)
        return out[real], weights


def _would_bypass(asker: FrameType | None) -> bool:
    """Whether the calling function uses the fused encoder layer; properties of wrappers are skipped."""
    while asker is not None and asker.f_code.co_name == "_qkv_same_embed_dim":
        asker = asker.f_back
    return asker is not None and "_transformer_encoder_layer_fwd" in asker.f_code.co_names


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def has_stock_forward(module: object) -> bool:
    """Whether `module` is an nn.MultiheadAttention whose class or instance does not override forward."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward in (nn.MultiheadAttention.forward, MultiheadAttention.forward)
        and "forward" not in vars(module)
    )


def adopted_class(module: nn.Module, new: type[Self]) -> type[Self]:
    """`new`, or a subclass with the properties that a parametrized `module` has in its own class."""
    if not parametrize.is_parametrized(module):
        return new
    own = type(module)
    return type(own.__name__, (new,), dict(vars(own)))
