"""2^x in the kernels: accuracy of the polynomial, results of masked scores, columns that take it."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import from_dlpack

from flash4_torch.emulator.device import as_device
from flash4_torch.kernels.common.exponent import Exponent
from flash4_torch.testing import emulate

THREADS = 256
COLUMNS = 16
ERROR = 8.8e-5
HARDWARE, POLYNOMIAL, SHARE = Exponent(), Exponent(1, 1), Exponent(4, 16)
CASES = [("sm_90a", False), ("sm_100a", False), ("sm_100a", True)]


@cute.jit
def powers(x: cute.Tensor, y: cute.Tensor, exponent: cutlass.Constexpr, packed: cutlass.Constexpr) -> None:
    """y (THREADS, COLUMNS) = 2^x."""
    powers_kernel(x, y, exponent, packed).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


@cute.kernel
def powers_kernel(
    x: cute.Tensor, y: cute.Tensor, exponent: cutlass.Constexpr, packed: cutlass.Constexpr
) -> None:
    row, _, _ = cute.arch.thread_idx()
    for c in cutlass.range_constexpr(0, COLUMNS, 2):
        if cutlass.const_expr(packed):
            y[row, c], y[row, c + 1] = exponent.of_pair((x[row, c], x[row, c + 1]), c)
        else:
            y[row, c], y[row, c + 1] = exponent.of(x[row, c], c), exponent.of(x[row, c + 1], c + 1)


@functools.cache
def compiled(arch: str, exponent: Exponent, packed: bool) -> Any:
    """The kernel compiled for an active device of that architecture."""
    like = cute.runtime.make_fake_compact_tensor(Float32, (THREADS, COLUMNS), stride_order=(1, 0))
    return cute.compile(powers, like, like, exponent, packed, options=f"--gpu-arch {arch}")


def power(x: Tensor, arch: str, exponent: Exponent, packed: bool) -> Tensor:
    y = torch.full_like(x, torch.nan)
    with emulate.device(arch):
        compiled(arch, exponent, packed)(from_dlpack(as_device(x)), from_dlpack(as_device(y)))
    return y


def draw(seed: int, low: float, high: float) -> Tensor:
    numbers = torch.empty(THREADS, COLUMNS)
    return numbers.uniform_(low, high, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("arch, packed", CASES)
@pytest.mark.parametrize("exponent", [HARDWARE, POLYNOMIAL, SHARE], ids=["hardware", "polynomial", "share"])
@settings(max_examples=8)
@given(
    seed=st.integers(0, 1000),
    low=st.sampled_from([-126.0, -20.0, -1.0, -1e-3]),
    high=st.sampled_from([0.0, 8.0]),
)
def test_relative_error(arch, packed, exponent, seed, low, high):
    x = draw(seed, low, high)
    x[0] = torch.arange(COLUMNS) - 15.0
    exact = x.double().exp2()
    error = (power(x, arch, exponent, packed) - exact).abs() / exact
    assert error.max() <= ERROR


@pytest.mark.parametrize("arch, packed", CASES)
def test_whole_numbers_are_exact(arch, packed):
    x = (torch.arange(THREADS * COLUMNS) % 253 - 126.0).view(THREADS, COLUMNS)
    assert torch.equal(power(x, arch, POLYNOMIAL, packed), x.exp2())


@pytest.mark.parametrize("arch, packed", CASES)
@pytest.mark.parametrize("exponent", [HARDWARE, POLYNOMIAL, SHARE], ids=["hardware", "polynomial", "share"])
def test_what_is_masked_vanishes(arch, packed, exponent):
    x = draw(0, -1000.0, -127.0)
    x[::2], x[1] = -torch.inf, torch.finfo(torch.float32).min
    assert not power(x, arch, exponent, packed).any()


@pytest.mark.parametrize("arch, packed", CASES)
def test_below_the_normal_numbers_it_is_tiny(arch, packed):
    y = power(draw(0, -127.0, -126.0), arch, POLYNOMIAL, packed)
    assert (y >= 0).all() and (y <= 2.0**-126).all()


@pytest.mark.parametrize("arch, packed", CASES)
def test_only_the_named_columns_take_the_polynomial(arch, packed):
    x = draw(0, -20.0, 0.0)
    shared, polynomial, hardware = (power(x, arch, e, packed) for e in (SHARE, POLYNOMIAL, HARDWARE))
    assert torch.equal(shared[:, 12:], polynomial[:, 12:]) and torch.equal(shared[:, :12], hardware[:, :12])
    assert (polynomial != hardware).any(0).all()
