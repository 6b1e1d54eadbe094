"""Integrations with other libraries; each is opt-in, and importing this package imports none of them.

- `sglang`: the attention backend "flash4" of SGLang, which finds it by itself.
- `torch_flex`: torch's `flex_attention`, in models that call it by that name.
- `torch_sdpa`: `F.scaled_dot_product_attention` and stock modules, through torch's flash attention registry.
- `transformers`: Hugging Face models, through `AttentionInterface`.
- `vllm`: the attention backend "FLASH4" of vLLM, which finds it by itself.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["sglang", "torch_flex", "torch_sdpa", "transformers", "vllm"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
