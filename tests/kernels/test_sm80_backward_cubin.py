"""The backward by mma.sync as ptxas compiles it: nothing spills, whatever is asked for, on any GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

import pytest

import compiled_files
import cubin
from everything import one_of
from flash4_torch.compile import Key
from flash4_torch.configs import sm80_backward
from flash4_torch.configs.types import Features, Sm80Backward
from flex_mods import of_kernels

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

ENTRY = "flash4_torch.kernels.sm80.bwd.launch:compile_backward"
LARGE, SMALL, LARGEST = sm80_backward.LARGE, sm80_backward.SMALL, sm80_backward.ON_REQUEST
TABLES = {"sm_80": LARGE, "sm_86": SMALL, "sm_89": SMALL, "sm_90a": LARGEST, "sm_120a": SMALL}
"""The table of each architecture; sm_87, sm_121a and, on request, sm_100a have others'."""
HEADS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (64, 256), (40, 24))
DTYPES = ("bfloat16", "float16")
BETWEEN = ((72, 72), (80, 80), (104, 104), (112, 112))
"""Heads that are narrower than those their row is made for."""
WIDE = ((320, 320), (512, 512), (384, 384), (264, 448), (512, 64), (64, 320))
WIDE_FLOAT32 = ((256, 256), (192, 192), (136, 64))
"""Heads with rows of their own."""
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


FUNCTIONS = tuple(of_kernels(gradients=True))


DROPOUT = {"dropout": True, "scaled": True}
TIGHT = (
    (Features("float16", 256, 256, dropout=True), "sm_86"),
    (Features("bfloat16", 96, 96, right=True, mods=FUNCTIONS[0])._replace(**DROPOUT), "sm_120a"),
    (Features("bfloat16", 96, 96, softcap=True, mods=FUNCTIONS[4])._replace(**DROPOUT, **WINDOW), "sm_120a"),
)
"""Features of kernels that spill without dQ's halves, with rounded weights, and with two warps to 16 keys."""
WHOLE = Features("bfloat16", 112, 112, dropout=True)
"""Features of a kernel that spills for sm_80 if blocks overlap and Sk fills its tiles."""
CAUSAL_DROPOUT = Features("bfloat16", 64, 64, right=True, dropout=True)
"""Features of a kernel that spills for sm_80 unless it is that of a ragged Sk."""
EXACT = Features("float32", 128, 128, dropout=True)
"""Features of the kernel whose three products take the most registers."""
EXACT_MASK = Features("float32", 128, 128, right=True, mask="bool")
"""Features of a kernel that spills for sm_90a if operands are read ahead."""


def reachable(arch: str) -> Iterator[Kernel]:
    """Kernels that calls with these head sizes and features can ask for.

    Of GPUs with kernels of their own not those that serve on request only, but for the first ones.
    """
    table, has_others = TABLES[arch], arch == "sm_90a"
    # Of parts of queries those without a ragged end have as few registers.
    yield from (k for k in _of_heads(table, HEADS) if k[1].ragged_k or k[1].query_parts > 1)
    yield from (k for k in _of_functions(table) if k[1].ragged_k)
    yield from _of_heads(table, WIDE)
    yield from (k for k in _of_heads(table, WIDE_FLOAT32) if k[0].is_float32)
    if not has_others:
        yield from _of_heads(table, BETWEEN)
        yield from (k for k in _of_heads(table, HEADS) if not k[1].ragged_k)
        yield from (k for k in _of_functions(table) if not k[1].ragged_k)
        yield from _of_heads(table, HEADS, DTYPES[::-1])


def _of_heads(
    table: sm80_backward.Table, heads: Sequence[tuple[int, int]], dtypes: Sequence[str] = DTYPES
) -> Iterator[Kernel]:
    """Kernels with every use; the dtypes take turns."""
    turns = cycle(dtypes)
    for uses in USES:
        for D, Dv in heads:
            features = Features(next(turns), D, Dv)._replace(**uses)
            yield from _of(table, features)
            for tf32 in (False, True):
                yield from _of(table, features._replace(dtype="float32", tf32=tf32))


def _of_functions(table: sm80_backward.Table) -> Iterator[Kernel]:
    for mods in FUNCTIONS:
        for D, Dv in HEADS[:6]:
            for uses in ({}, {"dropout": True, **CAUSAL}, {**SOFTCAP, **WINDOW}):
                scaled = mods.makes_large_scores or "softcap" in uses
                features = Features("bfloat16", D, Dv)._replace(**uses)
                yield from _of(table, features._replace(scaled=scaled, mods=mods))


def _of(table: sm80_backward.Table, features: Features) -> Iterator[Kernel]:
    if not table.limits(features):
        yield from ((features, config) for config in table.reachable(features))


def everything(arch: str) -> list[Key]:
    """The kernels of an architecture, which do not spill."""
    return list(dict.fromkeys(Key(ENTRY, kernel, arch) for kernel in reachable(arch)))


def keys() -> list[Key]:
    """All kernels that are compiled."""
    found = one_of(3902, [key for arch in TABLES for key in everything(arch)]) + one_of(64, parts())
    tight = [Key(ENTRY, (features, SMALL.config(features)), arch) for features, arch in TIGHT]
    for features in (WHOLE, CAUSAL_DROPOUT, EXACT):
        tight.append(Key(ENTRY, (features, LARGE.config(features, ragged_k=False)), "sm_80"))
    tight.append(Key(ENTRY, (EXACT_MASK, LARGEST.config(EXACT_MASK)), "sm_90a"))
    return list(dict.fromkeys([*found, *tight]))


def parts() -> list[Key]:
    """Kernels with parts of queries, which have hardly a register to spare."""
    return [key for arch in TABLES for key in everything(arch) if key.static[1].query_parts > 1]


KEYS = keys()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, cubin.Code]:
    return compiled_files.codes(KEYS, tmp_path_factory)


def test_nothing_that_can_be_asked_for_spills(compiled: dict[Key, cubin.Code]) -> None:
    spilling = {key: code for key, code in compiled.items() if code.stack or code.spills}
    assert not spilling, "\n".join(f"{key}: {code}" for key, code in spilling.items())
