"""The backend as vLLM asks for it: what it supports, and the classes that do the work."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

from . import layout, registered_name, support
from .impl import Flash4Impl
from .metadata import Flash4MetadataBuilder


class Flash4Backend(AttentionBackend):
    """flash4_torch as an attention backend of vLLM."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16", *support.FLOAT8_NAMES]
    forward_includes_kv_cache_update: bool = False
    supports_kv_cache_update_bypass: bool = True

    @staticmethod
    def get_name() -> str:
        return registered_name()

    @staticmethod
    def get_impl_cls() -> type[Flash4Impl]:
        return Flash4Impl

    @staticmethod
    def get_builder_cls() -> type[Flash4MetadataBuilder]:
        return Flash4MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(support.BLOCK_STEP)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return layout.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        orders = layout.ORDERS_OF_LAYERS if include_num_layers_dimension else layout.ORDERS
        return orders[get_kv_cache_layout()]

    @classmethod
    def validate_configuration(cls, *args: Any, **configuration: Any) -> list[str]:
        """Sentences why the configuration cannot be served; vLLM's own are shorter, and some say the same."""
        reasons: list[str] = super().validate_configuration(*args, **configuration)
        return [*reasons, *support.why_not(configuration)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % support.HEAD_STEP == 0 and 0 < head_size <= support.MAX_HEAD

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True
