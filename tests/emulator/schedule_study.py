"""Study: do our kernels for sm_100a give the same bits, and no finding, whatever the schedule?

    PYTHONPATH=.:tests/support:tests/emulator python tests/emulator/schedule_study.py result.json [part ...]

Only kernels with one of the parts in their names are studied; without any, all are. Each runs eagerly, late
and under 48 fuzz seeds, with race checks and with `strict` "exit" and "lanes". dQ of all kernels but
deterministic ones, and dmask where rows of a mask are shared, are sums in any order: for these the largest
difference is recorded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flash4_torch import info
from flash4_torch.configs import sm100, sm100_backward
from flash4_torch.configs.sizes import BackwardSizes, Sizes
from flash4_torch.configs.types import Features, Sm100Backward
from kernel_calls import Call, Kernel, drawn
from kernel_runs import run, run_backward

STRICT = frozenset({"exit", "lanes"})
SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "eager"},
    {"schedule": "late"},
    *({"schedule": "fuzz", "seed": seed} for seed in range(48)),
]
CAUSAL = {"right": True}
FORWARD = {
    "D64 full": (64, {}),
    "D128 causal": (128, CAUSAL),
    "D256": (256, CAUSAL),
    "dropout and mask": (64, {"dropout": True, "mask": "float32", "scaled": True}),
    "varlen": (128, {"varlen": True, **CAUSAL}),
}
BACKWARD = {
    "D64": (64, {}),
    "D128 pair": (128, CAUSAL),
    "D256 pair": (256, CAUSAL),
    "deterministic": (128, {"deterministic": True, **CAUSAL}),
    "dmask": (64, {"mask": "float32", "dmask": True, "scaled": True}),
}


def main(arguments: Sequence[str]) -> None:
    path, *parts = arguments
    file = Path(path)
    known = json.loads(file.read_text())["kernels"] if file.exists() else []
    rows = {(row["direction"], row["name"]): row for row in known}
    for direction, cases in (("forward", FORWARD), ("backward", BACKWARD)):
        for name, (D, uses) in cases.items():
            if parts and not any(part in f"{direction} {name}" for part in parts):
                continue
            rows[direction, name] = study(direction, name, D, uses)
            text = {"versions": info.versions(), "kernels": list(rows.values())}
            file.write_text(json.dumps(text, indent=1) + "\n")
            print(rows[direction, name], flush=True)


def study(direction: str, name: str, D: int, uses: dict[str, Any]) -> dict[str, Any]:
    """Runs one kernel; raises for any finding, and where bits differ that must not."""
    features, forward = Features("bfloat16", D, D, **uses), direction == "forward"
    backward = sm100_backward.backward(features, BackwardSizes(500))
    config = sm100.forward(features, Sizes(300, 500)) if forward else backward
    kernel: Kernel = (features, config)
    call = call_of(kernel)
    first: dict[str, Tensor] = {}
    apart: dict[str, float] = {}
    for options in SCHEDULES:
        result = (run if forward else run_backward)(kernel, call, strict=STRICT, **options)
        for field, value in result._asdict().items():
            if value is None:
                continue
            before = first.setdefault(field, value)
            if any_order(features, field):
                difference = (before.double() - value.double()).abs().max().item()
                apart[field] = max(apart.get(field, 0.0), difference)
            else:
                same = torch.equal(before.nan_to_num(7.0), value.nan_to_num(7.0))
                assert same, f"{direction} {name}: {field} differs, {options}"
    return {
        "direction": direction,
        "name": name,
        "features": str(features),
        "config": str(config),
        "call": repr(call),
        "schedules": len(SCHEDULES),
        "findings": 0,
        "same_bits": [field for field in first if field not in apart],
        "largest_difference": apart,
    }


def call_of(kernel: Kernel) -> Call:
    """A call in which both CTAs, or CTA pairs, have several tiles; rings wrap."""
    features, config = kernel
    pairs = isinstance(config, Sm100Backward) and config.cluster > 1
    changes: dict[str, Any] = {"lengths": ((300,), (500,)), "num_sms": 4 if pairs else 2}
    if features.varlen:
        changes["lengths"] = ((1, 0, 200, 130), (70, 5, 260, 150))
    if features.dropout:
        changes["p"] = 0.3
    call = drawn(kernel, Hk=2, **changes)
    if features.mask:
        generator = torch.Generator().manual_seed(1)
        call.mask = torch.randn(1, 4, 300, 500, generator=generator)
    return call


def any_order(features: Features, field: str) -> bool:
    return field == "dq" and not features.deterministic


if __name__ == "__main__":
    main(sys.argv[1:])
