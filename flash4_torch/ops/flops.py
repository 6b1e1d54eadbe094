"""FLOP counts of the two (forward) or five (backward) matmuls, as torch counts its own attention.

All pairs of a query and a key count, whatever a band, a mask or blocks hide: torch's formulas do so, and a
model counts the same before and after a swap. Packed sequences count pairs inside of each; where lengths are
unknown (fake and meta tensors), sequences count as equally long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..flex_problem import Mods


class _Matmuls:
    """FLOPs of one matmul over D (q k^T), and of one over Dv (weights v)."""

    def __init__(self, q: Tensor, v: Tensor, pairs: int):
        """pairs: of queries and keys, of all batch entries or sequences, for one head."""
        *_, Hq, D = q.shape
        self._over_D, self._over_Dv = 2 * Hq * pairs * D, 2 * Hq * pairs * v.shape[-1]

    @property
    def forward(self) -> int:
        return self._over_D + self._over_Dv

    @property
    def backward(self) -> int:
        """q k^T again, dq and dk over D; dv and dout v^T over Dv."""
        return 3 * self._over_D + 2 * self._over_Dv

    @property
    def scores(self) -> int:
        """q k^T alone."""
        return self._over_D


def _dense(q: Tensor, k: Tensor, v: Tensor) -> _Matmuls:
    return _Matmuls(q, v, q.shape[0] * q.shape[1] * k.shape[1])


def _packed(q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor) -> _Matmuls:
    return _Matmuls(q, v, _pairs(ends_q, ends_k, q.shape[0], k.shape[0]))


def _pairs(ends_q: Tensor, ends_k: Tensor, Tq: int, Tk: int) -> int:
    """The number of pairs inside of packed sequences."""
    if _is_known(ends_q) and _is_known(ends_k):
        # On a GPU the host waits for the lengths, as it does in torch's formula.
        lengths = ([b - a for a, b in pairwise(ends.tolist())] for ends in (ends_q, ends_k))
        return sum(n * m for n, m in zip(*lengths, strict=True))
    return Tq * Tk // max(1, ends_q.shape[0] - 1)


def _is_known(x: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return not isinstance(x, (FakeTensor, FunctionalTensor)) and x.device.type != "meta"


def attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **kwargs: Any) -> int:
    return _dense(q, k, v).forward


def attention_backward(
    dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **kwargs: Any
) -> int:
    return _dense(q, k, v).backward


def attention_weights(q: Tensor, k: Tensor, *rest: Any, **kwargs: Any) -> int:
    return _dense(q, k, k).scores


def attention_weights_signed(q: Tensor, k: Tensor, *rest: Any, **kwargs: Any) -> int:
    return _dense(q, k, k).scores


def attention_weights_backward(dweights: Any, q: Tensor, k: Tensor, *rest: Any, **kwargs: Any) -> int:
    """q k^T again, dq and dk."""
    return 3 * _dense(q, k, k).scores


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, *rest: Any, **kwargs: Any
) -> int:
    return _packed(q, k, v, ends_q, ends_k).forward


def attention_varlen_backward(
    dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, *rest: Any, **kwargs: Any
) -> int:
    ends_q, ends_k, *_ = rest
    return _packed(q, k, v, ends_q, ends_k).backward


def flex_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **kwargs: Any) -> int:
    """Forward; what score_mod computes does not count."""
    return _flex(q, k, v, rest).forward


def flex_attention_backward(
    dout: Any,
    dlse: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Any,
    lse: Any,
    low: Any,
    *rest: Any,
    **kwargs: Any,
) -> int:
    return _flex(q, k, v, rest).backward


def _flex(q: Tensor, k: Tensor, v: Tensor, given: Sequence[Any]) -> _Matmuls:
    """given: what follows v."""
    mods = Mods(*given[: len(Mods._fields)])
    if mods.cu_seqlens_q is not None and mods.cu_seqlens_k is not None:
        return _packed(q, k, v, mods.cu_seqlens_q, mods.cu_seqlens_k)
    return _dense(q, k, v)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **kwargs: Any) -> int:
    """A rank's share of the whole sequence's count, which a layout divides evenly or nearly so."""
    return _of_ring(q, k, v, *rest[2:4]).forward


def ring_attention_backward(
    dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, *rest: Any, **kwargs: Any
) -> int:
    return _of_ring(q, k, v, *rest[2:4]).backward


def _of_ring(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, group: str) -> _Matmuls:
    from torch.distributed.distributed_c10d import _resolve_process_group

    size = _resolve_process_group(group).size()  # type: ignore[arg-type]
    if cu_seqlens is None:
        return _Matmuls(q, v, q.shape[0] * q.shape[1] * k.shape[1] * size)
    T = q.shape[0] * size
    return _Matmuls(q, v, _pairs(cu_seqlens, cu_seqlens, T, T) // size)


PLAIN = (
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    attention_weights,
    attention_weights_signed,
    attention_weights_backward,
)
FLEX = (flex_attention, flex_attention_backward)
RING = (ring_attention, ring_attention_backward)


def register(formulas: Sequence[Callable[..., int]] = PLAIN) -> None:
    """Registers formulas with torch.utils.flop_counter, which this imports; each operator has its name."""
    from torch.utils.flop_counter import register_flop_formula

    for formula in formulas:
        register_flop_formula(getattr(torch.ops.flash4, formula.__name__), get_raw=True)(formula)
