"""The backward by mma.sync as ptxas compiles it: nothing spills, whatever is asked for, on any GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest
import torch

import compiled_files
import cubin
from everything import one_of
from flash4_torch.backends.flex.compiled import derivative_of
from flash4_torch.compile import Key
from flash4_torch.configs import sm80_backward
from flash4_torch.configs.types import Features, Mods, Sm80Backward
from flash4_torch.flex.attention import traced

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

ENTRY = "flash4_torch.kernels.sm80.bwd.launch:compile_backward"
LARGE, SMALL = sm80_backward.LARGE, sm80_backward.SMALL
TABLES = {"sm_80": LARGE, "sm_86": SMALL, "sm_89": SMALL, "sm_90a": LARGE, "sm_120a": SMALL}
"""The table of each architecture; sm_87, sm_121a and, on request, sm_100a have others'."""
HEADS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (64, 256), (40, 24))
CAUSAL = {"right": True}
WINDOW = {"left": True, "right": True}
SOFTCAP = {"softcap": True, "scaled": True}
FLOAT = {"mask": "float32", "dmask": True}
USES: tuple[dict[str, object], ...] = (
    {},
    {**FLOAT, "dropout": True, "large_softcap": True, "deterministic": True, **SOFTCAP, **WINDOW},
    {"dropout": True, **WINDOW},
    CAUSAL,
    {"varlen": True, "dropout": True, "large_softcap": True, "deterministic": True, **SOFTCAP, **WINDOW},
    {"mask": "bool", "dropout": True, **SOFTCAP, **WINDOW},
    {"varlen": True, **WINDOW},
    {"mask": "bfloat16", "scaled": True, **CAUSAL},
    {"large_softcap": True, **SOFTCAP, **WINDOW},
    {"mask": "bool", **CAUSAL},
    {"mask": "float16", "dmask": True, "scaled": True, **SOFTCAP},
    {"deterministic": True, **CAUSAL},
    {**FLOAT, "scaled": True, **WINDOW},
    {"mask": "bool", **WINDOW},
    {"dropout": True},
    {"varlen": True, "dropout": True},
    {"deterministic": True, **WINDOW},
)
Kernel = tuple[Features, Sm80Backward]


def functions() -> Iterator[Mods]:
    """Functions of a score with gradients of captured tensors, with none, with a mask; and a mask alone."""
    q, slopes, table = torch.empty(1, 64, 2, 64), torch.ones(2), torch.ones(64)
    for score_mod, mask_mod, wanted in (
        (lambda s, b, h, i, j: s + table[(i - j).clamp(0, 63)], None, (True,)),
        (lambda s, b, h, i, j: 30 * torch.tanh(s / 30), None, ()),
        (lambda s, b, h, i, j: s + slopes[h] * (j - i), lambda b, h, i, j: (i - j) % 3 < 2, (True,)),
        (None, lambda b, h, i, j: (i - j) % 3 < 2, ()),
    ):
        mods = traced(q, q, score_mod, mask_mod)
        derivative = derivative_of(mods.score_mod, wanted).text() if score_mod else ""
        for blocks in ("", "rows"):
            yield Mods(mods.score_mod, mods.mask_mod, blocks, derivative)


FUNCTIONS = tuple(functions())


DROPOUT = {"dropout": True, "scaled": True}
TIGHT = (
    (Features("float16", 256, 256, dropout=True), "sm_86"),
    (Features("bfloat16", 96, 96, right=True, mods=FUNCTIONS[0])._replace(**DROPOUT), "sm_120a"),
    (Features("bfloat16", 96, 96, softcap=True, mods=FUNCTIONS[4])._replace(**DROPOUT, **WINDOW), "sm_120a"),
)
"""Features of kernels that spill without dQ's halves, with rounded weights, and with two warps to 16 keys."""
WHOLE = Features("bfloat16", 112, 112, dropout=True)
"""Features of a kernel that spills for sm_80 if blocks overlap and Sk fills its tiles."""


def reachable(table: sm80_backward.Table) -> Iterator[Kernel]:
    """Kernels that calls with these head sizes and features can ask for, with alternating dtypes."""
    dtypes = cycle(("bfloat16", "float16"))
    for uses in USES:
        for D, Dv in HEADS:
            features = Features(next(dtypes), D, Dv)._replace(**uses)
            yield from _of(table, features)
            for tf32 in (False, True):
                yield from _of(table, features._replace(dtype="float32", tf32=tf32))
    for mods in FUNCTIONS:
        for D, Dv in HEADS[:5]:
            for uses in ({}, {"dropout": True, **CAUSAL}, {**SOFTCAP, **WINDOW}):
                scaled = bool(mods.score_mod) or "softcap" in uses
                features = Features("bfloat16", D, Dv)._replace(**uses)
                yield from _of(table, features._replace(scaled=scaled, mods=mods))


def _of(table: sm80_backward.Table, features: Features) -> Iterator[Kernel]:
    if not table.limits(features):
        # Of parts of queries those without a ragged end have as few registers.
        configs = table.reachable(features)
        yield from ((features, c) for c in configs if c.ragged_k or c.query_parts > 1)


def everything(arch: str) -> list[Key]:
    """The kernels of an architecture, which do not spill."""
    return [Key(ENTRY, kernel, arch) for kernel in reachable(TABLES[arch])]


def keys() -> list[Key]:
    """All kernels that are compiled."""
    found = [key for arch in TABLES for key in one_of(112, everything(arch))] + one_of(16, parts())
    tight = [Key(ENTRY, (features, SMALL.config(features)), arch) for features, arch in TIGHT]
    tight.append(Key(ENTRY, (WHOLE, LARGE.config(WHOLE, ragged_k=False)), "sm_80"))
    return list(dict.fromkeys([*found, *tight]))


def parts() -> list[Key]:
    """Kernels with parts of queries, which have hardly a register to spare."""
    kernels = ((arch, kernel) for arch, table in TABLES.items() for kernel in reachable(table))
    return [Key(ENTRY, kernel, arch) for arch, kernel in kernels if kernel[1].query_parts > 1]


KEYS = keys()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, cubin.Code]:
    return compiled_files.codes(KEYS, tmp_path_factory)


def test_nothing_that_can_be_asked_for_spills(compiled: dict[Key, cubin.Code]) -> None:
    spilling = {key: code for key, code in compiled.items() if code.stack or code.spills}
    assert not spilling, "\n".join(f"{key}: {code}" for key, code in spilling.items())
