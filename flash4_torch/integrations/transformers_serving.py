"""Continuous batching of transformers, `model.generate_batch`, on `flash4_torch.flash_attn`.

It packs the tokens of all requests, keeps keys and values in pages, and takes only implementations whose name
contains "flash": their functions it gets by the name, as flash-attn's or as a kernel's. Ours are such
functions, so that `SERVED` is registered like a kernel that is already here, and a model under one of our
other names has `SERVED` for as long as it serves a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from types import ModuleType
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.integrations import hub_kernels
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

from .. import flash_attn

SERVED = "flash4_torch_as_flash_attn_3"
"""The `attn_implementation` of models that serve a batch. Requests that are decoded go to
`flash_attn_with_kvcache` if the name contains "flash" and after it a 2 or a 3."""


def install(names: Collection[str]) -> None:
    """Registers `SERVED`, and has models under one of `names` switched to it by `generate_batch`.

    A transformers in which one of the two wrapped functions is missing keeps refusing `names` for batches.
    """
    if not (
        hasattr(hub_kernels, "load_and_register_attn_kernel")
        and hasattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn")
    ):
        return
    AttentionInterface.register(SERVED, flash_attention_forward)
    AttentionMaskInterface.register(SERVED, flash_attention_mask)
    hub_kernels.load_and_register_attn_kernel = _having_ours(hub_kernels.load_and_register_attn_kernel)
    ContinuousBatchingManager.switch_to_cb_friendly_attn = _switching(  # type: ignore[method-assign]
        ContinuousBatchingManager.switch_to_cb_friendly_attn, names
    )


def _having_ours(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps transformers' loading of a kernel's functions by a name: those of `SERVED` are ours."""

    @wraps(load)
    def load_and_register_attn_kernel(
        attn_implementation: str, *args: Any, **kwargs: Any
    ) -> ModuleType | None:
        if attn_implementation == SERVED:
            return flash_attn
        kernel: ModuleType | None = load(attn_implementation, *args, **kwargs)
        return kernel

    return load_and_register_attn_kernel


def _switching(choose: Callable[..., None], names: Collection[str]) -> Callable[..., None]:
    """Wraps the choice of an implementation that can serve batches; the manager restores the model's own."""

    @wraps(choose)
    def switch_to_cb_friendly_attn(
        self: ContinuousBatchingManager, model: PreTrainedModel, *args: Any, **kwargs: Any
    ) -> None:
        own = model.config._attn_implementation
        if own in names:
            # Not set_attn_implementation: some models list the kernels that they know, and take one of these.
            model.config._attn_implementation = SERVED
        choose(self, model, *args, **kwargs)
        if own in names:
            self._original_attn_impl = own

    return switch_to_cb_friendly_attn
