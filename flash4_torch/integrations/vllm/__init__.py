"""An attention backend for vLLM::

    vllm serve MODEL --attention-backend FLASH4      # vLLM 0.33
    vllm serve MODEL --attention-backend CUSTOM      # versions that know no names of others, as 0.26

vLLM finds the plugin by itself, through the entry point group `vllm.general_plugins`, in each of its
processes. Nothing here imports vLLM before it is asked to.

It serves decoder and encoder-only attention over paged caches in the model's dtype or float8_e4m3fn, with
GQA, sliding windows, soft caps and sinks, causal or not (also by request), any block size that is a multiple
of 16, and any order of the cache in memory. Full CUDA graphs hold any mix of prefill and decode. With
VLLM_BATCH_INVARIANT=1 a token's bits do not depend on the batch. What it does not serve it says in a sentence
before weights are loaded: ALiBi, MLA, float8_e5m2 caches, heads above 256, GPUs without kernels of ours.

The engine itself is tested with vLLM 0.20, 0.26 and 0.33, on a CPU; with 0.26 it has run on an H200.
"""

from __future__ import annotations

import logging

NAME = "FLASH4"
"""The backend's name, where vLLM lets a plugin choose one."""

BACKEND = f"{__name__}.backend.Flash4Backend"

_SHARED = "CUSTOM"
"""The name that vLLM keeps for one backend of others."""


def register() -> None:
    """Registers the backend with vLLM, which calls this as a plugin, perhaps several times.

    It logs a warning and changes nothing if another plugin has the one name that this vLLM gives away.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if registered_name() == NAME:
        if NAME not in AttentionBackendEnum.__members__:
            register_backend(NAME, BACKEND)
        return
    shared = AttentionBackendEnum[_SHARED]
    if shared.is_overridden() and shared.get_path() != BACKEND:
        message = "attention backend %s is %s already; VLLM_PLUGINS says which plugins to load"
        logging.getLogger(__name__).warning(message, _SHARED, shared.get_path())
        return
    register_backend(shared, BACKEND)


def registered_name() -> str:
    """The name under which this vLLM knows the backend after `register`."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return NAME if hasattr(AttentionBackendEnum, "register") else _SHARED
