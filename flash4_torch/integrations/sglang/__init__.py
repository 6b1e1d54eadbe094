"""An attention backend for SGLang::

    python -m sglang.launch_server --model MODEL --attention-backend flash4

SGLang finds the plugin by itself, through the entry point group `sglang.srt.plugins`. Nothing here imports
SGLang before it is asked to.

It serves models with GQA, sliding windows, soft caps and sinks, any page size (1 included), caches in the
model's dtype or float8_e4m3fn, CUDA graphs of decoding, and verification of drafts, in a chain or in a tree.
SGLang lets no plugin serve the draft model: name another backend for it with
--speculative-draft-attention-backend.

The engine itself is tested with SGLang 0.5.23, on a CPU; on a GPU it has not been run.
"""

from __future__ import annotations

from typing import Any

NAME = "flash4"


def register() -> None:
    """Registers the backend with SGLang, which calls this as a plugin, perhaps several times."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    for names, add in (
        (choices.ATTENTION_BACKEND_CHOICES, choices.add_attention_backend_choices),
        (
            choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
            choices.add_deterministic_attention_backend_choices,
        ),
        (
            choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
            choices.add_radix_supported_deterministic_attention_backend_choices,
        ),
    ):
        if NAME not in names:
            add([NAME])
    register_attention_backend(NAME)(_create)


def _create(model_runner: Any) -> Any:
    from .backend import Flash4Backend

    return Flash4Backend(model_runner)
