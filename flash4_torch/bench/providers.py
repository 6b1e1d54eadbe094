"""Who is timed: a table of attention functions on (B, S, H, D). To add one, add a row."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import api

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""(q, k, v, causal) -> out"""


@dataclass(frozen=True)
class Provider:
    name: str
    attend: Attend
    gpu_only: bool = False
    optional: bool = False
    """Left out, instead of failing, where it does not serve a case."""


def _flash4(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    out: Tensor = api.attention(q, k, v, causal=causal)
    return out


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def _sdpa_by(backend: SDPBackend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return _sdpa(q, k, v, causal)

    return attend


# The first two are what every ratio is of: ours, and what torch does unless told otherwise.
PROVIDERS = (
    Provider("flash4", _flash4),
    Provider("sdpa", _sdpa),
    Provider("sdpa flash", _sdpa_by(SDPBackend.FLASH_ATTENTION), gpu_only=True, optional=True),
    Provider("sdpa cudnn", _sdpa_by(SDPBackend.CUDNN_ATTENTION), gpu_only=True, optional=True),
    Provider("sdpa efficient", _sdpa_by(SDPBackend.EFFICIENT_ATTENTION), gpu_only=True, optional=True),
)


def serving(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Attend]:
    """The providers that take these inputs, by name; optional ones are asked by calling them."""
    return {
        provider.name: provider.attend
        for provider in PROVIDERS
        if (q.is_cuda or not provider.gpu_only)
        and (not provider.optional or _takes(provider.attend, q, k, v, causal))
    }


def _takes(attend: Attend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            attend(q, k, v, causal)
        except RuntimeError:
            return False
    return True
