"""The platform that `vllm_on_cpu` names; only vLLM imports this module."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.import_utils import resolve_obj_by_qualname


class Platform(CpuPlatform):
    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, *rest: Any, **more: Any
    ) -> str:
        """The chosen backend, if it has no reason against it, as on a GPU; the CPU's ignores the choice."""
        path: str = selected_backend.get_path()
        backend = resolve_obj_by_qualname(path)
        reasons = backend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"{selected_backend} is not valid for this configuration: {reasons}")
        return path

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """The CPU's, but the worker stays in this process, and the cache's dtype is the backend's affair."""
        cache = vllm_config.cache_config
        cache_dtype, cache.cache_dtype = cache.cache_dtype, "auto"
        super().check_and_update_config(vllm_config)
        cache.cache_dtype = cache_dtype
        vllm_config.parallel_config.distributed_executor_backend = "uni"

    @classmethod
    def import_kernels(cls) -> None:
        """Nothing: the wheel's compiled code is for GPUs."""


def _slots(query_start_loc: Tensor, positions: Tensor, block_table: Tensor, slots: Tensor, size: int) -> None:
    """The slot of each token of a batch, -1 after the last one."""
    start = query_start_loc.tolist()
    slots.fill_(-1)
    for b, (first, end) in enumerate(pairwise(start)):
        where = positions[first:end]
        slots[first:end] = block_table[b].long()[where // size] * size + where % size


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], None]:
    def write(out: Tensor, x: Tensor) -> None:
        gate, up = x.chunk(2, dim=-1)
        out.copy_(activation(gate) * up)

    return write


# vLLM packs weights of 16 bits for AMX by compiled code.
torch.cpu._is_amx_tile_supported = lambda: False
_LIBRARY = torch.library.Library("_C", "FRAGMENT")
_OPERATORS: dict[str, Callable[..., Any]] = {
    "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
    "init_cpu_threads_env(str cores) -> str": lambda cores: "",
    "compute_slot_mapping_kernel_impl(Tensor q, Tensor p, Tensor t, Tensor(a!) s, int n) -> ()": _slots,
    "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(-1),
    "silu_and_mul(Tensor(a!) out, Tensor x) -> ()": _gated(functional.silu),
    "gelu_tanh_and_mul(Tensor(a!) out, Tensor x) -> ()": _gated(
        lambda x: functional.gelu(x, approximate="tanh")
    ),
}
for _schema, _function in _OPERATORS.items():
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")
