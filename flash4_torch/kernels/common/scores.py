"""What becomes of S = Q K^T before it is masked: scaling and softcap."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from ...configs.types import Features
from .launch_params import LaunchParams

LOG2E = math.log2(math.e)


_SERIES = (-17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0)
"""Coefficients of y^6, y^4 and y^2 in tanh(y) / y - 1; the terms left out are below 4e-7 up to
`_SERIES_END`."""
_SERIES_END = 0.25


def unit(features: Features) -> float:
    """One natural unit, in the units of scaled scores: base 2, but natural units where scores may be large.

    A floating mask is added in natural units: log2(e) times its lowest finite values would be infinite. So
    might be what score_mod makes.
    """
    return 1.0 if features.large_scores else LOG2E


def softmax_scale(params: LaunchParams, features: Features) -> Float32:
    """The factor by which the softmax still has to multiply scores to have them in base 2."""
    return Float32(LOG2E / unit(features)) if features.scaled else params.scale * LOG2E


def max_scale(params: LaunchParams, features: Features) -> Float32:
    """The factor by which maxima of rows have to be multiplied to have them in base 2."""
    return Float32(1.0) if features.mods.ramp else softmax_scale(params, features)


@cute.jit
def scale_and_cap(scores: cute.Tensor, params: LaunchParams, features: cutlass.Constexpr) -> None:
    """Scale, and cap, scores in place; where `scaled` is not set, scaling is left to the softmax."""
    factor = params.scale * unit(features)
    if cutlass.const_expr(features.softcap):
        # tanh(y) = 1 - 2 / (exp(2 y) + 1): right at both ends, where exp gives 0 and inf.
        inner, cap = params.scale * (2.0 * LOG2E) / params.softcap, params.softcap * unit(features)
        shrink = params.scale / params.softcap
        for i in cutlass.range_constexpr(cute.size(scores)):
            product = scores[i]
            e = cute.math.exp2(product * inner, fastmath=True)
            scores[i] = cap - (2.0 * cap) * cute.arch.rcp_approx(e + 1.0)
            if cutlass.const_expr(features.large_softcap):
                # Near 0 that difference has an error of cap * 2^-24, however small the score is.
                near, excess = tanh_near_zero(product * shrink)
                scaled = product * factor
                scores[i] = cutlass.select_(near, scaled + scaled * excess, scores[i])
    elif cutlass.const_expr(features.scaled):
        for i in cutlass.range_constexpr(cute.size(scores)):
            scores[i] = scores[i] * factor


def tanh(y: Float32) -> Float32:
    """tanh without a branch, to some units in the last place."""
    near, excess = tanh_near_zero(y)
    e = cute.math.exp2(y * (2.0 * LOG2E), fastmath=True)
    return cutlass.select_(near, y + y * excess, 1.0 - 2.0 * cute.arch.rcp_approx(e + 1.0))


def tanh_near_zero(y: Float32) -> tuple[Boolean, Float32]:
    """Whether y is small enough for tanh's series (false for NaN), and tanh(y) / y - 1 by that series."""
    square, excess = y * y, Float32(_SERIES[0])
    for coefficient in _SERIES[1:]:
        excess = excess * square + coefficient
    return square < _SERIES_END**2, excess * square
