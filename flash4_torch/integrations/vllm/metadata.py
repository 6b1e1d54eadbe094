"""What the layers of a step share: references to vLLM's tensors, and bounds that the host knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder

from .. import ahead_of_steps


@dataclass(frozen=True)
class Flash4Metadata(AttentionMetadata):
    """A step's batch of B requests with T tokens, some of them padding."""

    num_actual_tokens: int
    """T, or fewer: those without padding, as far as the host knows."""
    query_start_loc: Tensor
    """(B + 1,) int32: request b has tokens query_start_loc[b] to query_start_loc[b + 1] - 1."""
    seq_lens: Tensor
    """(B,) int32: keys of each request, those of the new tokens included; 0 for padding."""
    block_table: Tensor
    """(B, blocks) int32."""
    max_query_len: int
    max_seq_len: int
    """A bound, as max_query_len may be one."""
    causal: bool | Tensor
    """A flag, or one for each request, (B,) int32."""


class Example(NamedTuple):
    """What steps have in common, for those who describe them before the first one."""

    device: torch.device
    block_size: int
    """Keys in a block of the cache."""
    most_tokens: int
    """Tokens of a step."""
    most_keys: int
    """Keys of a request."""


class Flash4MetadataBuilder(AttentionMetadataBuilder[Flash4Metadata]):
    """Takes vLLM's tensors as they are: nothing is read, copied or planned on the host.

    The kernels read lengths and tables on the GPU, so a CUDA graph may be replayed with others, also with
    another mix of prefill and decode within the bounds at its capture.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    reorder_batch_threshold: int | None = None
    supports_update_block_table: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any):
        """Prepares the kernels of the layers' steps: vLLM makes builders before it captures graphs."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._max_model_len: int = vllm_config.model_config.max_model_len
        device = torch.device(device)
        ahead_of_steps.prepare(_steps(kv_cache_spec, layer_names, vllm_config, device), device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Flash4Metadata:
        """The step's metadata. common_prefix_len is 0, for we ask for no cascade; fast_build has no say."""
        common = common_attn_metadata
        return Flash4Metadata(
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            causal=common.causal,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Flash4Metadata:
        """Metadata whose bounds hold for every replay."""
        return replace(self.build(0, common_attn_metadata), max_seq_len=self._max_model_len)

    def update_block_table(
        self, metadata: Flash4Metadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> Flash4Metadata:
        """The same for another group of layers, whose keys are in other blocks."""
        return replace(metadata, block_table=blk_table)


def _steps(spec: Any, layer_names: list[str], config: Any, device: torch.device) -> Iterator[Any]:
    """Calls of the layers of a group, which the engine has made by now."""
    example = Example(
        device,
        spec.block_size,
        config.scheduler_config.max_num_batched_tokens,
        config.model_config.max_model_len,
    )
    layers = config.compilation_config.static_forward_context
    for name in layer_names:
        layer = layers.get(name)
        # Only our own implementations, which import this module, describe steps.
        describe = getattr(getattr(layer, "impl", None), "steps", None)
        if describe is not None:
            yield from describe(layer, config.model_config.dtype, example)
