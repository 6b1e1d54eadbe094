"""One layer's attention: tokens into the cache, and attention over it, written into vLLM's output."""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from ...api import attention_varlen
from ...errors import ArgumentError
from ...kvcache import append_kvcache, attention_kvcache, steps
from .layout import FLOAT8, keys_and_values, kv_cache_shape
from .metadata import Example, Flash4Metadata
from .support import FLOAT8_NAMES


class Flash4Impl(AttentionImpl[Flash4Metadata]):
    """The attention of one layer; vLLM writes new keys and values into the cache before each forward."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ):
        """Keeps what vLLM says of the layer.

        Raises:
            ArgumentError: something that is not served; vLLM has loaded no weights yet.
        """
        if alibi_slopes is not None:
            raise ArgumentError("alibi_slopes", f"{len(alibi_slopes)} slopes", "FLASH4 does not take them")
        if attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
            raise ArgumentError("attn_type", attn_type, "FLASH4 serves decoder and encoder_only")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._softcap = logits_soft_cap or 0.0
        side = None if sliding_window is None else sliding_window - 1
        self._window = (side, side)
        """A window of w keys is the token itself and w - 1 before it; not causal, as many behind it."""
        self._float8 = kv_cache_dtype in FLOAT8_NAMES
        self._batch_invariant = bool(vllm.envs.VLLM_BATCH_INVARIANT)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes the keys and values (T, Hk, D) of tokens that have a slot; there may be padding behind."""
        if self.attn_type == AttentionType.ENCODER_ONLY:
            return
        k_cache, v_cache = keys_and_values(kv_cache, self.head_size, self._float8)
        k_scale, v_scale = self._scales(layer)
        T = slot_mapping.shape[0]
        append_kvcache(
            key[:T],
            value[:T],
            k_cache,
            v_cache,
            slot_mapping=slot_mapping,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Flash4Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes the attention of query (T, Hq, D) into output (T, Hq, Dv); rows of padding may be anything.

        attn_metadata: None while vLLM measures memory; the result is 0 then.
        """
        if output_scale is not None or output_block_scale is not None:
            raise ArgumentError("output_scale", "a tensor", "FLASH4 does not quantize its output")
        if attn_metadata is None:
            return output.fill_(0)
        if self.attn_type == AttentionType.ENCODER_ONLY:
            return self._encode(query, key, value, attn_metadata, output)
        k_cache, v_cache = keys_and_values(kv_cache, self.head_size, self._float8)
        causal = attn_metadata.causal
        options: dict[str, Any] = {
            "seqused_k": attn_metadata.seq_lens,
            "block_table": attn_metadata.block_table,
            "cu_seqlens_q": attn_metadata.query_start_loc,
            "max_seqlen_q": attn_metadata.max_query_len,
            "max_seqlen_k": attn_metadata.max_seq_len,
            **self._options(layer),
        }
        if isinstance(causal, Tensor) and self._window[1] is not None:
            # A flag lifts the bound on the right, but a request that is not causal has a window there.
            attention_kvcache(query, k_cache, v_cache, causal=True, out=output, **options)
            both_sides = attention_kvcache(query, k_cache, v_cache, causal=False, **options)
            is_causal = _of_tokens(causal, attn_metadata.query_start_loc, query.shape[0])
            return output.copy_(torch.where(is_causal[:, None, None], output, both_sides))
        attention_kvcache(query, k_cache, v_cache, causal=causal, out=output, **options)
        return output

    def _encode(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: Flash4Metadata, output: Tensor
    ) -> Tensor:
        """Attention of whole sequences, whose keys are in no cache."""
        T = metadata.num_actual_tokens
        result = attention_varlen(
            query[:T],
            key[:T],
            value[:T],
            cu_seqlens_q=metadata.query_start_loc,
            cu_seqlens_k=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_query_len,
            window=self._window,
            scale=self.scale,
            softcap=self._softcap,
            sinks=self.sinks,
        )
        output[:T].copy_(result)
        return output

    def steps(self, layer: Any, dtype: torch.dtype, example: Example) -> list[Any]:
        """Calls that the layer makes in steps of tokens in the model's dtype, as large as they become.

        Requests that are not causal, and encoders, make others.
        """
        if self.attn_type == AttentionType.ENCODER_ONLY:
            return []

        def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=of, device=example.device)

        shape = kv_cache_shape(2, example.block_size, self.num_kv_heads, self.head_size)
        kv_cache = empty(*shape, of=FLOAT8 if self._float8 else dtype)
        k_cache, v_cache = keys_and_values(kv_cache, self.head_size, self._float8)
        query = empty(1, self.num_heads, self.head_size)
        key, value = empty(2, 1, self.num_kv_heads, self.head_size)
        k_scale, v_scale = self._scales(layer)
        attend = steps.attend(
            query,
            k_cache,
            v_cache,
            # Each has a token, or pads a batch whose tokens are padded, too.
            most_sequences=example.most_tokens,
            most_tokens=example.most_tokens,
            most_keys=example.most_keys,
            seqused_k=empty(1, of=torch.int32),
            block_table=empty(1, 1, of=torch.int32),
            cu_seqlens_q=empty(2, of=torch.int32),
            causal=True,
            **self._options(layer),
        )
        slots = empty(1, of=torch.int64)
        append = steps.append(
            key, value, k_cache, v_cache, slot_mapping=slots, k_scale=k_scale, v_scale=v_scale
        )
        return [attend, append]

    def _options(self, layer: Any) -> dict[str, Any]:
        """Options of all calls of `attention_kvcache`."""
        k_scale, v_scale = self._scales(layer)
        return {
            "window": self._window,
            "scale": self.scale,
            "softcap": self._softcap,
            "sinks": self.sinks,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "batch_invariant": self._batch_invariant,
        }

    def _scales(self, layer: Any) -> tuple[Tensor | None, Tensor | None]:
        """Factors of the layer's cache, () or (Hk,); vLLM may change their values later."""
        return (layer._k_scale, layer._v_scale) if self._float8 else (None, None)


def _of_tokens(flags: Tensor, query_start_loc: Tensor, T: int) -> Tensor:
    """The flag (B,) of each token's request as bool (T,); that of padding may be anything."""
    tokens = torch.arange(T, device=flags.device)
    request = torch.searchsorted(query_start_loc[1:].long(), tokens, right=True)
    return flags.bool()[request.clamp(max=flags.shape[0] - 1)]
