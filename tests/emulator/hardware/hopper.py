"""A model of how a Hopper GPU sums in wgmma, where PTX leaves order and width open; fitted to its results."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16  # products (of one element of A and one of B) that are added to a sum at once
FRACTION_BITS = 25  # kept of each addend, below the largest exponent among them
_NONE = -(1 << 20)  # exponent of zero


def product(a: Tensor, b: Tensor) -> Tensor:
    """A B^T in float32; a (M, K), b (N, K), float16 or bfloat16, K a multiple of 16.

    The product of two numbers 2^i (1.x) and 2^j (1.y) counts as one of exponent i + j, even if it is larger.
    """
    a, b = a.double(), b.double()
    sums = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64)
    for start in range(0, a.shape[1], BLOCK):
        columns = slice(start, start + BLOCK)
        sums = _block_added(sums, a[:, None, columns], b[None, :, columns])
    return sums.float()


def _block_added(sums: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Truncates the addends at one common digit, sums exactly, truncates the sum to float32's 24 digits."""
    products = a * b
    exponents = torch.where(products == 0, _NONE, _exponent(a) + _exponent(b))
    unit = _power(torch.maximum(exponents.amax(-1), _exponent(sums)) - FRACTION_BITS)
    total = _cut(products, unit[..., None]).sum(-1) + _cut(sums, unit)
    return _cut(total, _power(_exponent(total) - 23))


def _exponent(x: Tensor) -> Tensor:
    return torch.where(x == 0, _NONE, torch.frexp(x).exponent.long() - 1)


def _power(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent.clamp(-1000, 1000))


def _cut(x: Tensor, unit: Tensor) -> Tensor:
    return (x / unit).trunc() * unit
