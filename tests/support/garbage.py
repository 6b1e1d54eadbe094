"""Values that no argument of an operator may have, by kind; each with its name in messages."""

from __future__ import annotations

import math
import warnings
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor


def other_layouts(x: Tensor) -> dict[str, Tensor]:
    """A strided (B, ...) tensor in every layout that has no strides; some keep two dimensions of it only."""
    matrix = x.reshape(-1, x.shape[-1])
    with warnings.catch_warnings():
        # Torch says that it still works on these.
        warnings.simplefilter("ignore")
        layouts = {
            "torch.sparse_coo": x.to_sparse(),
            "torch.sparse_csr": matrix.to_sparse_csr(),
            "torch.sparse_csc": matrix.to_sparse_csc(),
            "torch.sparse_bsr": matrix.to_sparse_bsr((1, 1)),
            "torch.sparse_bsc": matrix.to_sparse_bsc((1, 1)),
        }
        if x.dtype == torch.float32:
            layouts["torch._mkldnn"] = x.to_mkldnn()
        return {f"a tensor of layout {layout}": value for layout, value in layouts.items()}


def nested(x: Tensor) -> dict[str, Tensor]:
    """The entries of a (B, ...) tensor as nested tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            str(layout): torch.nested.nested_tensor(list(x), layout=layout)
            for layout in (torch.strided, torch.jagged)
        }


def other_dtypes(x: Tensor) -> list[Tensor]:
    """A float32 tensor in every dtype that attention does not take."""
    dtypes = "bool uint8 uint16 uint32 int8 int16 int32 int64 complex64 complex128 float8_e4m3fn float8_e5m2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = [torch.quantize_per_tensor(x, 0.1, 0, d) for d in (torch.qint8, torch.quint8)]
    return [*(x.to(getattr(torch, name)) for name in dtypes.split()), *quantized]


NO_TENSORS: dict[str, Any] = {
    "int": 3,
    "float": 1.5,
    "bool": True,
    "str": "x",
    "list": [torch.ones(2, 4, 2, 8)],
    "tuple": (torch.ones(2, 4, 2, 8),),
    "dict": {"x": 1},
    "ndarray": np.ones((2, 4, 2, 8), dtype=np.float32),
    "dtype": torch.float32,
    "type": int,
    "object": object(),
}
"""Objects by the name of their type. None is left out, as it may mean something."""

NO_NUMBERS: list[Any] = [
    "1", b"1", True, False, 1j, [1.0], (1.0,), {}, np.float32(1), np.array(1.0), Decimal(1), Fraction(1, 2),
    torch.tensor(1.0), torch.tensor([1.0]), torch.tensor(1.0, requires_grad=True), float, object(),
]  # fmt: skip

NO_FLOAT32: list[Any] = [
    math.nan, math.inf, -math.inf, 1e39, -1e39, 1.7e308, 10**39, 10**400, -(10**400), 10**5000,
]  # fmt: skip
"""Numbers that no float32 holds."""

NO_FLAGS: list[Any] = [
    "no", "", "True", b"", 0, 1, 2, -1, 0.0, 1.0, math.nan, 1j, [], [0], (), {}, np.True_, np.array([1]),
    torch.tensor(True), torch.tensor([0, 1]), bool, object(),
]  # fmt: skip
"""Values that are neither True nor False, whatever Python takes them for. None is left out."""

NO_SIZES: list[Any] = [
    "1", 1.0, math.nan, math.inf, True, False, 1j, [], [1], (1,), np.int64(1), torch.tensor(1), object(),
]  # fmt: skip
"""Values that are neither an int nor None."""

HUGE_SIZES: list[int] = [2**63, 2**64, 2**70, 10**400, 10**5000]
"""Sizes that are too large to pass to an operator."""

NO_PAIRS: list[Any] = [
    3, -1, 1.5, None, True, "", "ab", b"ab", (), (1,), [1], (1, 2, 3), [None] * 4, {}, {1: 2, 3: 4}, {1, 2},
    range(2), iter([1, 2]), slice(1, 2), np.array([1, 2]), torch.tensor([1, 2]), object(),
]  # fmt: skip
