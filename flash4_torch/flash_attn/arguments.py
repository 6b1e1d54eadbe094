"""flash-attn's arguments in our words, and errors for those that cannot be served."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError, DeviceError, DtypeError, RangeError, ShapeError
from ..ops import check
from ..ops.keywords import no_argument

Window = tuple[int | None, int | None]

NO_WINDOW = (-1, -1)

_SPEED = (
    "num_splits",
    "pack_gqa",
    "sm_margin",
    "min_seqlen_k",
    "seqlen_k_per_split",
    "scheduler_metadata",
    "disable_scheduler_metadata",
)
"""Arguments about how to compute, which do not change what is computed."""

_OPTIONS = {
    "scale": "softmax_scale",
    "window": "window_size",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
}
"""Our names of options over KV caches, and flash-attn's."""

_NO_MODS = "it is not served here; flash4_torch.attention takes score_mod, mask_mod and block_mask"
_CACHES = "flash_attn_varlen_func and flash_attn_with_kvcache take it, for a cache"
_UNSERVED: dict[str, str] = {
    "learnable_sink": "flash_attn_func, flash_attn_varlen_func and flash_attn_with_kvcache take it",
    "block_table": _CACHES,
    "page_table": _CACHES,
    "cache_leftpad": "a sequence's keys begin with the first row of its entry or pages",
    "seqused_q": "sequences end where cu_seqlens_q says",
    "seqused_k": "flash_attn_varlen_func takes it",
    "score_mod": _NO_MODS,
    "score_mod_bwd": _NO_MODS,
    "mask_mod": _NO_MODS,
    "aux_tensors": _NO_MODS,
    "aux_scalars": _NO_MODS,
    "block_sparse_tensors": _NO_MODS,
    "block_sparse_tensors_bwd": _NO_MODS,
    "qv": "latent attention with absorbed weights is not served",
    "gather_kv_indices": "a choice of keys for each query is not served",
    "attention_chunk": "chunks of attention are not served",
    "q_descale": "q is not served in float8; caches are",
    "k_descale": _CACHES,
    "v_descale": _CACHES,
}
"""Arguments that change the results in a way that we cannot serve, and why."""


def refuse(function: Callable[..., Any], others: Mapping[str, Any]) -> None:
    """Raises an error for the first keyword that `function` neither serves nor may ignore."""
    for name, value in others.items():
        if name in _UNSERVED:
            if not (value is None or (name == "attention_chunk" and value == 0)):
                raise ArgumentError(name, shown(value), f"it must be left out: {_UNSERVED[name]}")
        elif name not in _SPEED:
            raise no_argument(function, [name])


def shown(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else reprlib.repr(value)


def renamed(error: ArgumentError, names: Mapping[str, str]) -> ArgumentError:
    """The same error about the argument as it is called here: our name for it is replaced by flash-attn's."""
    name = (_OPTIONS | dict(names)).get(error.argument, error.argument)
    return type(error)(name, error.value, error.limit)


class Options(NamedTuple):
    """Arguments that all of flash-attn's functions share, and that need no tensor."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float
    deterministic: bool
    return_attn_probs: bool
    return_lse: bool

    def ours(self) -> dict[str, Any]:
        """Keywords of `attention`, and of `attention_varlen`."""
        check.flag("return_lse", self.return_lse)
        dropout_p, scale = check.probability(self.dropout_p), self.softmax_scale
        if check.flag("return_attn_probs", self.return_attn_probs) and dropout_p > 0.0:
            limit = (
                "with dropout_p > 0 it must be False: weights are never stored; return_lse=True gives lse, "
                "and flash4_torch.testing.dropout_mask which weights are dropped"
            )
            raise ArgumentError("return_attn_probs", True, limit)
        return {
            "causal": self.causal,
            "window": window(self.window_size),
            "scale": None if scale is None else check.scale(scale, 1, "softmax_scale"),
            "softcap": self.softcap,
            "dropout_p": dropout_p,
            # flash-attn knows no global switch; ours is torch's, unless the caller asks.
            "deterministic": check.flag("deterministic", self.deterministic) or None,
            "return_lse": True,
        }

    def ours_without_dropout(self) -> dict[str, Any]:
        """Keywords of `attention_kvcache`."""
        ours = self.ours()
        if ours.pop("dropout_p") > 0.0:
            limit = "with block_table or seqused_k it must be 0: they serve inference"
            raise ArgumentError("dropout_p", self.dropout_p, limit)
        del ours["deterministic"], ours["return_lse"]
        return ours

    def results(self, out: Tensor, lse: Tensor) -> Any:
        if self.return_attn_probs:
            return out, lse, out.new_empty(0)
        return (out, lse) if self.return_lse else out


def window(size: Window) -> Window:
    """window_size as `attention` has it, where -1 is a bound."""
    if not isinstance(size, (tuple, list)) or len(size) != 2:
        raise ArgumentError("window_size", reprlib.repr(size), "it must be a pair (left, right)")
    for side in size:
        if side is not None and (isinstance(side, bool) or not isinstance(side, (int, torch.SymInt))):
            raise ArgumentError("window_size", reprlib.repr(size), "its sizes must be ints or None")
    least = 0 if size[0] is None or size[1] is None else -1
    if any(side is not None and side < least for side in size):
        limit = (
            f"its sizes must be at least {least}: others are no bound to flash-attn 2 and a bound to "
            "FlashAttention-4; flash4_torch.attention takes them as window"
        )
        raise RangeError("window_size", reprlib.repr(size), limit)
    left, right = (None if side is None or side == -1 else side for side in size)
    return left, right


class Alibi(NamedTuple):
    """A bias of -slope * |i + Sk - Sq - j| as an attn_mask and what its rows lack: a constant, for lse."""

    attn_mask: Tensor | None = None
    of_row: Tensor | None = None

    def lse(self, lse: Tensor) -> Tensor:
        return lse if self.of_row is None else lse + self.of_row


def alibi(
    slopes: Tensor | None, q: Tensor, k: Tensor, options: dict[str, Any], sinks: Tensor | None
) -> Alibi:
    """The bias of (Hq,) or (B, Hq) slopes, which get no gradient."""
    if slopes is None:
        return Alibi()
    check.tensors(q, k, k)
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 4:
            raise ShapeError(name, tuple(x.shape), "it must be (B, S, H, D), 4 dimensions")
    Sq, Hq = q.shape[1:3]
    _check_slopes(slopes, q)
    Sk, dtype = k.shape[1], torch.promote_types(q.dtype, torch.float32)
    slope = slopes.detach().to(dtype).reshape(-1, Hq, 1, 1)
    i = torch.arange(Sq, device=q.device, dtype=dtype)[:, None]
    j = torch.arange(Sk, device=q.device, dtype=dtype)
    if (options["causal"] or options["window"][1] == 0) and sinks is None:
        # No visible key is after the diagonal, so the distance is a number of the row less one of the key.
        # Sinks would have to lack the row's number, too.
        return Alibi(slope * (j - (Sk - 1)), (slope * (Sq - 1 - i)).squeeze(-1))
    return Alibi(-slope * (i + (Sk - Sq) - j).abs())


def _check_slopes(slopes: Tensor, q: Tensor) -> None:
    B, Hq = q.shape[0], q.shape[2]
    if not isinstance(slopes, Tensor):
        raise ArgumentError("alibi_slopes", reprlib.repr(slopes), "it must be a tensor or None")
    if not slopes.is_floating_point():
        raise DtypeError("alibi_slopes", slopes.dtype, "it must be floating")
    if slopes.device != q.device:
        raise DeviceError("alibi_slopes", slopes.device, f"it must be on q's device, {q.device}")
    if not check.is_one_of(tuple(slopes.shape), (Hq,), (B, Hq)):
        raise ShapeError("alibi_slopes", tuple(slopes.shape), f"it must be ({Hq},) or ({B}, {Hq})")


def learnable_sink(sinks: Tensor | None, q: Tensor) -> Tensor | None:
    """The sinks of q (..., Hq, D), checked under their name here."""
    return check.sinks(sinks, q, "learnable_sink") if isinstance(q, Tensor) and q.dim() > 2 else sinks


def no_alibi(slopes: Tensor | None) -> None:
    if slopes is not None:
        limit = "it must be None: packed sequences take no bias"
        raise ArgumentError("alibi_slopes", shown(slopes), limit)


def no_descale(**scales: Tensor | None) -> None:
    for name, value in scales.items():
        if value is not None:
            limit = "it must be None: it belongs to a float8 cache, with block_table or seqused_k"
            raise ArgumentError(name, shown(value), limit)


def unpacked(name: str, tensor: Tensor, layout: str) -> tuple[Tensor, ...]:
    """Views of a tensor's parts; `layout`, as in '(T, 2, H, D)', says where they are and how many."""
    sizes = layout.strip("()").split(", ")
    at = next(i for i, size in enumerate(sizes) if size.isdigit())
    if not isinstance(tensor, Tensor):
        raise ArgumentError(name, reprlib.repr(tensor), "it must be a tensor")
    if tensor.dim() != len(sizes) or tensor.shape[at] != int(sizes[at]):
        raise ShapeError(name, tuple(tensor.shape), f"it must be {layout}")
    return tensor.unbind(at)
