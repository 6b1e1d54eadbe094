"""`merge_states`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import flash4_torch
import garbage
from bad_inputs.attention import Row, cases
from flash4_torch.errors import ArgumentError, DeviceError, DtypeError, LayoutError, ShapeError

OUTS, LSES = torch.randn(3, 5, 2, 8), torch.randn(3, 2, 5)


def rows() -> Iterator[Row]:
    for name in ("outs", "lses"):
        for called, value in {**garbage.NO_TENSORS, "NoneType": None}.items():
            if called not in ("list", "tuple"):
                words = f"{name} is {called}, but it must be a tensor, or a list or tuple of at least one"
                yield Row({name: value}, ArgumentError, words)
                yield Row({name: [value]}, ArgumentError, f"{name} is {called}, but it must be a tensor")
        yield Row({name: []}, ArgumentError, f"{name} is empty, but it must be a tensor, or a list or tuple")
    for called, x in garbage.other_layouts(OUTS).items():
        yield Row({"outs": x}, LayoutError, f"outs is {called}, but it must be a dense one")
    for x in garbage.nested(OUTS).values():
        yield Row({"outs": x}, LayoutError, "outs is a nested tensor, but it must be a dense one")
    for x in garbage.other_dtypes(OUTS):
        words = f"outs is {x.dtype}, but it must be bfloat16, float16, float32 or float64"
        yield Row({"outs": x}, DtypeError, words)
    words = "outs is (5, 2, 8), but it must be (N, T, Hq, Dv) or (N, B, Sq, Hq, Dv)"
    yield Row({"outs": OUTS[0]}, ShapeError, words)
    words = "outs is (2, 8), but each must be (T, Hq, Dv) or (B, Sq, Hq, Dv)"
    yield Row({"outs": list(OUTS[0])}, ShapeError, words)
    yield Row({"lses": list(LSES[:2])}, ArgumentError, "lses is 2, but there must be as many as outs, 3")
    yield Row({"lses": LSES[:2]}, ShapeError, "lses is (2, 2, 5), but it must be (N, Hq, T) = (3, 2, 5)")
    yield Row({"lses": LSES.mT}, ShapeError, "lses is (3, 5, 2), but it must be (N, Hq, T) = (3, 2, 5)")
    yield Row({"lses": LSES.double()}, DtypeError, "lses is torch.float64, but it must be float32")
    yield Row({"outs": OUTS.double()}, DtypeError, "lses is torch.float32, but it must be float64")
    yield Row({"lses": LSES.to("meta")}, DeviceError, "lses is meta, but it must be on outs' device, cpu")
    mixed = {"outs": [OUTS[0], OUTS[1].half(), OUTS[2]]}
    yield Row(
        mixed, DtypeError, "outs is torch.float16, but all must have the first one's dtype, torch.float32"
    )
    uneven = {"outs": [OUTS[0], OUTS[1, :4], OUTS[2]]}
    yield Row(uneven, ShapeError, "outs is (4, 2, 8), but all must have the first one's shape, (5, 2, 8)")
    apart = {"outs": [OUTS[0], OUTS[1].to("meta"), OUTS[2]]}
    yield Row(apart, DeviceError, "outs is meta, but it must be on the first one's device, cpu")


CASES = tuple(cases(flash4_torch.merge_states, {"outs": OUTS, "lses": LSES}, rows()))
