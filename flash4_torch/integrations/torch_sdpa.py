"""Our kernels behind `F.scaled_dot_product_attention`, through torch's flash attention registry::

    flash4_torch.integrations.torch_sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("FLASH4")
    ...
    torch.nn.attention.restore_flash_attention_impl()

While it is active, torch runs our kernels wherever it chooses flash attention: under
`F.scaled_dot_product_attention`, stock `nn.MultiheadAttention`, `torch.nn.attention.varlen`, DTensor, and on
CUDA `context_parallel`, whose ring calls only the aten operators. Calls for which torch does not choose flash
attention (by its rules about dtypes, masks and, on a CPU, dropout and Dv) do not reach our kernels either;
`flash4_torch.attention` has no such limits.

With block_table, seqused_k or num_splits `varlen_attn` and `varlen_attn_out` run `attention_kvcache`.
What torch promises of num_splits=1, bits that do not depend on the batch, holds: it is `batch_invariant`.

Nothing is registered or active on import.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import register_flash_attention_impl

from .. import ops
from ..errors import ArgumentError
from ..fast_path import graphs
from ..kvcache import attention_kvcache
from ..kvcache.packed import packed_as_pages
from ..problem import CallOptions

NAME = "FLASH4"

_attention = graphs.attention
_attention_backward = graphs.attention_backward
_attention_varlen = torch.ops.flash4.attention_varlen.default
_attention_varlen_backward = torch.ops.flash4.attention_varlen_backward.default

Window = tuple[int | None, int | None]
Kernel = Callable[..., Any]


def register(name: str = NAME) -> None:
    """Adds `name` to `torch.nn.attention.list_flash_attention_impls()`, for the user to activate."""
    register_flash_attention_impl(name, register_fn=activate)


class Activation:
    """Keeps our kernels in torch's dispatcher until `remove()`."""

    def __init__(self, kernels: dict[str, dict[str, Kernel]]):
        """Replaces aten operators. kernels: for each dispatch key, the operators' names and our functions."""
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        for key, replacements in kernels.items():
            for name, ours in replacements.items():
                _replace(self._library, name, key, ours)

    def remove(self) -> None:
        """Restores torch's own kernels; calling it again does no harm."""
        # The registrations live as long as the library object.
        self._library = None


def activate() -> Activation:
    """Installs our kernels; torch calls this in `activate_flash_attention_impl`."""
    kernels = {"CPU": CPU_KERNELS}
    if torch.backends.cuda.is_built():
        kernels["CUDA"] = {name: k for name, k in CUDA_KERNELS.items() if hasattr(torch.ops.aten, name)}
    return Activation(kernels)


class _Serving(threading.local):
    """A flag per thread: whether it is inside one of our kernels."""

    now = False


_serving = _Serving()


def _replace(library: torch.library.Library, name: str, key: str, ours: Kernel) -> None:
    """Replaces torch's kernel by `ours`, except for calls made from inside `ours`.

    Those come from our backends that pass plain problems to torch's kernel: they get torch's kernel.
    """
    stock = _stock_kernel(name, key)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if _serving.now and stock is not None:
            return stock.call_boxed(keys, *args, **kwargs)
        before, _serving.now = _serving.now, True
        try:
            return ours(*args, **kwargs)
        finally:
            _serving.now = before

    with warnings.catch_warnings():
        # Overriding is the purpose of the registry; torch's warning about it would reach users.
        warnings.simplefilter("ignore")
        library.impl(name, kernel, key, with_keyset=True)


def _stock_kernel(name: str, key: str) -> Any:
    try:
        return torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:
        return None


def _refuse(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            shown = tuple(value.shape) if isinstance(value, Tensor) else value
            raise ArgumentError(name, shown, f"{NAME} under torch's flash attention does not take it")


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def _swapped(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Views with dimensions 1 and 2 exchanged: (B, H, S, D) from (B, S, H, D), and back."""
    return tuple(t.transpose(1, 2) for t in tensors)


def _laid_out_like(model: Tensor, result: Tensor) -> Tensor:
    """`result` with the strides that torch's meta kernels promise: those of `empty_like(model)`."""
    promised = torch.empty_like(model)
    return result if result.stride() == promised.stride() else promised.copy_(result)


# CPU: causal is aligned to the top left, there is no dropout, and lse is stored as (B, S, H).


def _cpu_window(query: Tensor, key: Tensor, is_causal: bool) -> Window:
    return None, query.shape[2] - key.shape[2] if is_causal else None


def _cpu_mask(attn_mask: Tensor | None) -> Tensor | None:
    return None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]


def _sdpa_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_for_cpu, tensors (B, H, S, D)."""
    _refuse(dropout_p=dropout_p or None)
    out, lse, _ = _attention(
        *_swapped(query, key, value),
        _cpu_mask(attn_mask),
        None,
        None,
        _scale(query, scale),
        *_cpu_window(query, key, is_causal),
        0.0,
        0.0,
        _deterministic(),
    )
    lse_as_promised = lse.transpose(1, 2).contiguous().transpose(1, 2)
    return _laid_out_like(query, out.transpose(1, 2)), lse_as_promised


def _sdpa_cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_for_cpu_backward; gradients are stored as (B, S, H, D)."""
    _refuse(dropout_p=dropout_p or None)
    dout, q, k, v, out = _swapped(grad_out, query, key, value, out)
    dq, dk, dv, *_ = _attention_backward(
        dout,
        None,
        q,
        k,
        v,
        out,
        logsumexp.contiguous(),
        None,
        _cpu_mask(attn_mask),
        None,
        None,
        _scale(query, scale),
        *_cpu_window(query, key, is_causal),
        0.0,
        0.0,
        _deterministic(),
        False,
    )
    return _swapped(dq, dk, dv)


# CUDA: causal is aligned to the bottom right; dropout's (seed, offset) goes from forward to backward.


def _cuda_window(is_causal: bool, left: int | None, right: int | None) -> Window:
    """The window as ours: torch writes -1 for an unbounded side, and causal bounds the right one."""
    left, right = (None if side is None or side < 0 else side for side in (left, right))
    return left, 0 if is_causal else right


def _draw_rng_state(query: Tensor, dropout_p: float) -> Tensor | None:
    return ops.draw_rng_state(query.device) if dropout_p > 0.0 else None


def _as_philox(rng_state: Tensor | None, query: Tensor) -> Tensor:
    """Our int64 (seed, offset) in the uint64 slot that torch keeps for the backward."""
    if rng_state is None:
        return torch.zeros(2, dtype=torch.uint64, device=query.device)
    return rng_state.view(torch.uint64)


def _from_philox(philox: Tensor, dropout_p: float) -> Tensor | None:
    return philox.view(torch.int64) if dropout_p > 0.0 else None


def _both_or_neither(cum_seq_q: Tensor | None, cum_seq_k: Tensor | None) -> None:
    if (cum_seq_q is None) != (cum_seq_k is None):
        missing = "cum_seq_q" if cum_seq_q is None else "cum_seq_k"
        raise ArgumentError(missing, None, "a ragged call needs both cum_seq_q and cum_seq_k")


class _Call(NamedTuple):
    """The arguments of the CUDA operators that describe a call, besides q, k and v."""

    cum_seq_q: Tensor | None
    cum_seq_k: Tensor | None
    max_q: int
    max_k: int
    scale: float
    window: Window
    dropout_p: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rng_state: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse) of dense (B, S, H, D) or, with cum_seq, ragged (T, H, D)."""
        if self.cum_seq_q is None:
            return _attention(q, k, v, None, None, rng_state, *self._options())[:2]
        return _attention_varlen(q, k, v, *self._sequences(rng_state), *self._options())

    def backward(self, *saved: Tensor | None, rng_state: Tensor | None) -> tuple[Tensor, ...]:
        """(dq, dk, dv); `saved` is (dout, dlse, q, k, v, out, lse)."""
        if self.cum_seq_q is None:
            return _attention_backward(*saved, None, None, None, rng_state, *self._options(), False)[:3]
        return _attention_varlen_backward(*saved, *self._sequences(rng_state), *self._options())[:3]

    def _options(self) -> CallOptions:
        return CallOptions(self.scale, *self.window, dropout_p=self.dropout_p, deterministic=_deterministic())

    def _sequences(self, rng_state: Tensor | None) -> tuple[Any, ...]:
        return self.cum_seq_q, self.cum_seq_k, None, rng_state, self.max_q, self.max_k


class _Cache(NamedTuple):
    """The arguments of the CUDA forward that describe a KV cache."""

    seqused_k: Tensor | None
    block_table: Tensor | None
    num_splits: int | None

    @property
    def is_asked_for(self) -> bool:
        return any(value is not None for value in self)

    def forward(
        self, call: _Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of (B, S, H, D) or, with cum_seq_q, (T, H, D); k and v may be pages."""
        if call.dropout_p > 0.0:
            limit = "with seqused_k, block_table or num_splits it must be 0: they serve inference"
            raise ArgumentError("dropout_p", call.dropout_p, limit)
        table, lengths = self.block_table, self.seqused_k
        if table is None and call.cum_seq_k is not None:
            k, v, table, lengths = packed_as_pages(k, v, call.cum_seq_k, call.max_k, lengths)
        result, lse = attention_kvcache(
            q,
            k,
            v,
            seqused_k=lengths,
            block_table=table,
            cu_seqlens_q=call.cum_seq_q,
            max_seqlen_q=call.max_q,
            max_seqlen_k=call.max_k,
            window=call.window,
            scale=call.scale,
            num_splits=self.num_splits or None,
            batch_invariant=self.num_splits == 1,
            out=out,
            return_lse=True,
        )
        return result, lse.contiguous()


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_forward: dense (B, S, H, D), or ragged (T, H, D) with both cum_seq.

    out: what the result is written to, which the operator itself does not have.
    """
    _refuse(return_debug_mask=return_debug_mask or None, alibi_slopes=alibi_slopes)
    window = _cuda_window(is_causal, window_size_left, window_size_right)
    call = _Call(cum_seq_q, cum_seq_k, max_q, max_k, _scale(query, scale), window, dropout_p)
    cache, rng_state = _Cache(seqused_k, block_table, num_splits), None
    if cache.is_asked_for:
        # A dense result is written in one piece, as not every `out` can be.
        into = out if query.dim() == 3 else None
        result, lse = cache.forward(call, query, key, value, into)
    else:
        _both_or_neither(cum_seq_q, cum_seq_k)
        rng_state = _draw_rng_state(query, dropout_p)
        result, lse = call.forward(query, key, value, rng_state)
    if out is None:
        out = _laid_out_like(query, result)
    elif out is not result:
        out.copy_(result)
    return out, lse, *_auxiliary(query, rng_state)


def _flash_forward_inplace(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace: `_flash_forward` into `out`, returning lse."""
    _, lse, *_ = _flash_forward(*args, **kwargs, out=out)
    return lse


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_backward, laid out as its forward."""
    window = _cuda_window(is_causal, window_size_left, window_size_right)
    call = _Call(cum_seq_q, cum_seq_k, max_q, max_k, _scale(query, scale), window, dropout_p)
    saved = (grad_out, None, query, key, value, out, logsumexp.contiguous())
    grads = call.backward(*saved, rng_state=_from_philox(rng_state, dropout_p))
    return tuple(map(_laid_out_like, (query, key, value), grads))


def _sdpa_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention, tensors (B, H, S, D)."""
    _refuse(return_debug_mask=return_debug_mask or None)
    call = _dense_call(query, key, dropout_p, is_causal, scale)
    rng_state = _draw_rng_state(query, dropout_p)
    q, k, v = _swapped(query, key, value)
    out, lse = call.forward(q, k, v, rng_state)
    laid_out = _laid_out_like(query, out.transpose(1, 2))
    return laid_out, lse, None, None, call.max_q, call.max_k, *_auxiliary(query, rng_state)


def _sdpa_cuda_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_backward. Always dense: `_sdpa_cuda` returns no cum_seq."""
    call = _dense_call(query, key, dropout_p, is_causal, scale)
    dout, q, k, v, out = _swapped(grad_out, query, key, value, out)
    saved = (dout, None, q, k, v, out, logsumexp.contiguous())
    grads = call.backward(*saved, rng_state=_from_philox(philox_seed, dropout_p))
    return tuple(map(_laid_out_like, (query, key, value), _swapped(*grads)))


def _dense_call(query: Tensor, key: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> _Call:
    """A call with tensors (B, H, S, D)."""
    window = _cuda_window(is_causal, None, None)
    return _Call(None, None, query.shape[2], key.shape[2], _scale(query, scale), window, dropout_p)


def _auxiliary(query: Tensor, rng_state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(rng_state, unused, debug_attn_mask) as the CUDA operators return them."""
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    return _as_philox(rng_state, query), unused, query.new_empty(0)


CPU_KERNELS: dict[str, Kernel] = {
    "_scaled_dot_product_flash_attention_for_cpu": _sdpa_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _sdpa_cpu_backward,
}

CUDA_KERNELS: dict[str, Kernel] = {
    "_scaled_dot_product_flash_attention": _sdpa_cuda,
    "_scaled_dot_product_flash_attention_backward": _sdpa_cuda_backward,
    "_flash_attention_forward": _flash_forward,
    # PyTorch 2.11 has no such operator yet.
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_inplace,
    "_flash_attention_backward": _flash_backward,
}
