"""New keys and values, appended to a KV cache: the kernel that serves a call, and its launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...kernels.common.kvcache import AppendPlan, RotaryPlan
from ...reference import kvcache as reference
from ...reference.kvcache import FLOAT8, Append
from ..compiled.params import dtype_name
from ..compiled.targets import APPEND_KVCACHE, Target
from .choice import find_kernels, launch_on
from .layout import copied_to_rows, in_rows

_DTYPES = (torch.bfloat16, torch.float16)
_STEP = 8
"""Elements of K, V, Q and caches that a thread moves at a time."""
_MAX_D = 1024
_MOST_TOKENS = (1 << 31) - 1


AppendLaunch = Callable[[Append], None]
"""Function that appends."""


def append(x: Append) -> None:
    """Appends by the backend that serves the call.

    Raises:
        BackendError: FLASH4_BACKEND forces one that cannot.
    """
    prepare(x)(x)


def prepare(x: Append) -> AppendLaunch:
    """`append`, decided for tensors of the sizes, strides, dtypes, device and remainders of addresses by 16
    of these.

    Raises:
        BackendError: FLASH4_BACKEND forces a backend that cannot serve the call.
    """
    if not x.k.shape[0] * x.k.shape[1]:
        return lambda x: None
    plan = plan_of(x)
    written = _written(x, plan.rotary)
    kernels = find_kernels("append_kvcache", x.k.device, limits(x, written))
    if kernels is None:
        return reference.append
    kernel = kernels.find(APPEND_KVCACHE, (_plan_on(kernels.target, plan),))
    in_place = all(a is b for a, b in zip(_as_read(x, plan.rotary), x, strict=True))
    device, float8 = x.k.device, x.k_cache.dtype == FLOAT8

    def launch(x: Append) -> None:
        if not in_place:
            x = _as_read(x, plan.rotary)
        k_cache, v_cache = x.k_cache, x.v_cache
        if float8:
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        where = x.slot_mapping, x.block_table, x.seqused_k, x.cu_seqlens
        rotary = x.positions, x.cos, x.sin
        q = None if x.q_out is None else x.q
        launch_on(
            device, kernel, x.k, x.v, k_cache, v_cache, *where, *rotary, x.k_scale, x.v_scale, q, x.q_out
        )

    return launch


def _as_read(x: Append, rotary: RotaryPlan | None) -> Append:
    """The same call, of tensors that the kernel reads and writes in place: views of what is written."""
    k_cache, v_cache, q_out, cos, sin = _written(x, rotary)
    assert k_cache is not None and v_cache is not None, "limits has nothing against them"
    k, v, q = (None if rows is None else copied_to_rows(rows, _STEP) for rows in (x.k, x.v, x.q))
    assert k is not None and v is not None
    return x._replace(k=k, v=v, q=q, k_cache=k_cache, v_cache=v_cache, q_out=q_out, cos=cos, sin=sin)


def reachable(x: Append, target: Target) -> Iterator[tuple[str, tuple[object, ...]]]:
    """The entry, and what it is compiled for: the kernel that serves calls like `x` on a target, if one
    does."""
    plan = plan_of(x)
    if not limits(x, _written(x, plan.rotary)):
        yield APPEND_KVCACHE, (_plan_on(target, plan),)


def _plan_on(target: Target, plan: AppendPlan) -> AppendPlan:
    return plan._replace(converts_fp8=target.decode.converts_fp8) if plan.float8 else plan


def _written(x: Append, rotary: RotaryPlan | None) -> tuple[Tensor | None, ...]:
    """The caches, q_out, cos and sin as the kernel takes them; None for those that are not there, or that it
    cannot take."""
    step = rotary.vector if rotary else 1
    tensors = (x.k_cache, _STEP), (x.v_cache, _STEP), (x.q_out, _STEP), (x.cos, step), (x.sin, step)
    return tuple(None if tensor is None else in_rows(tensor, step) for tensor, step in tensors)


def limits(x: Append, written: tuple[Tensor | None, ...]) -> list[str]:
    """The reasons why the kernel cannot serve the call, on whatever device it is."""
    why = []
    n, S, _, D = x.k.shape
    Dv = x.v.shape[-1]
    if x.k.dtype not in _DTYPES:
        why.append(f"the dtype is {x.k.dtype}, and it serves bfloat16 and float16")
    if D % _STEP or Dv % _STEP or max(D, Dv) > _MAX_D:
        why.append(f"D is {D} and Dv is {Dv}, and it serves multiples of {_STEP} up to {_MAX_D}")
    if n * S > _MOST_TOKENS:
        why.append(f"there are {n * S} tokens, and it counts them in 32 bits")
    given = (x.k_cache, x.v_cache, x.q_out, x.cos, x.sin)
    for name, tensor, found in zip(
        ("k_cache", "v_cache", "q_out", "cos", "sin"), given, written, strict=True
    ):
        if tensor is not None and found is None:
            why.append(f"rows of {name} are not contiguous, or do not begin at whole vectors")
    if not (x.k_cache.numel() and x.v_cache.numel()):
        why.append("it takes no empty cache")
    if x.cos is not None:
        R, step = 2 * x.cos.shape[1], _STEP if x.interleaved else 2 * _STEP
        if R % step or not R:
            why.append(f"{R} columns are rotated, and it serves multiples of {step}")
        if x.cos.dtype not in (*_DTYPES, torch.float32):
            why.append(f"cos and sin are {x.cos.dtype}, and it serves 16 bits and float32")
    return why


def plan_of(x: Append) -> AppendPlan:
    """What the kernel is compiled for."""
    float8 = x.k_cache.dtype == FLOAT8
    return AppendPlan(
        dtype=dtype_name(x.k.dtype),
        D=x.k.shape[-1],
        Dv=x.v.shape[-1],
        cache_dtype=dtype_name(FLOAT8) if float8 else "",
        slots="" if x.slot_mapping is None else dtype_name(x.slot_mapping.dtype),
        paged=x.block_table is not None,
        packed=x.cu_seqlens is not None,
        k_scaled=x.k_scale is not None,
        v_scaled=x.v_scale is not None,
        rotary=_rotary(x),
    )


def common_plans(dtype: str, D: int, Dv: int, converts_fp8: bool = True) -> Iterator[AppendPlan]:
    """Kernels for the calls that serving engines make: by slots, rotated here or before, by pages, and to a
    dense cache. converts_fp8: whether the GPU has an instruction for it."""
    rotary = RotaryPlan(D, False, dtype, "int64", True)
    for cache_dtype in ("", dtype_name(FLOAT8)):
        is_scaled = cache_dtype != ""
        plan = AppendPlan(dtype, D, Dv, cache_dtype, k_scaled=is_scaled, v_scaled=is_scaled)
        plan = plan._replace(converts_fp8=converts_fp8 or not is_scaled)
        yield plan._replace(slots="int64")
        if not D % (2 * _STEP):
            yield plan._replace(slots="int64", rotary=rotary)
        yield plan._replace(paged=True)
        yield plan


def _rotary(x: Append) -> RotaryPlan | None:
    if x.cos is None:
        return None
    positions = "" if x.positions is None else dtype_name(x.positions.dtype)
    return RotaryPlan(
        2 * x.cos.shape[1], x.interleaved, dtype_name(x.cos.dtype), positions, x.q_out is not None
    )
