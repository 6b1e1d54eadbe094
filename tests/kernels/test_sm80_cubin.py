"""The forward by mma.sync as ptxas compiles it: nothing spills, whatever is asked for, on any of its GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

import pytest

import compiled_files
import cubin
from everything import one_of
from flash4_torch.compile import Key
from flash4_torch.configs import sm80, sm80_splits
from flash4_torch.configs.sizes import Sizes
from flash4_torch.configs.types import Features, Sm80Forward
from flex_mods import of_kernels

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

ENTRY = "flash4_torch.kernels.sm80.fwd.launch:compile_forward"
TABLES = {
    "sm_80": sm80.LARGE,
    "sm_86": sm80.SMALL,
    "sm_89": sm80.SMALL,
    "sm_90a": sm80.ON_REQUEST,
    "sm_120a": sm80.SMALL,
}
"""The table of each architecture; sm_87, sm_121a and, on request, sm_100a have others'."""
SPLITS = {
    sm80.LARGE: sm80_splits.LARGE,
    sm80.SMALL: sm80_splits.SMALL,
    sm80.ON_REQUEST: sm80_splits.ON_REQUEST,
}
HEADS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (64, 256), (40, 24))
WIDE = ((320, 320), (384, 384), (512, 512))
DTYPES = ("bfloat16", "float16")
BETWEEN = ((72, 72), (80, 80), (104, 104), (112, 112))
"""Heads that are narrower than those their row is made for."""
CAUSAL = {"right": True}
WINDOW = {"left": True, "right": True}
SOFTCAP = {"softcap": True, "scaled": True}
USES: tuple[dict[str, object], ...] = (
    {},
    {"mask": "float32", "dropout": True, "sinks": "float32", "large_softcap": True, **SOFTCAP, **WINDOW},
    {"dropout": True, **WINDOW},
    CAUSAL,
    {"varlen": True, "dropout": True, "large_softcap": True, **SOFTCAP, **WINDOW},
    {"mask": "bool", "dropout": True, **SOFTCAP, **WINDOW},
    {"varlen": True, "sinks": "bfloat16", **WINDOW},
    {"mask": "bfloat16", "scaled": True, **CAUSAL},
    {"large_softcap": True, **SOFTCAP, **WINDOW},
    {"mask": "bool", "sinks": "float16", **CAUSAL},
    {"mask": "float16", "scaled": True, **SOFTCAP},
)
FUNCTIONS = tuple(of_kernels(gradients=False))
Kernel = tuple[Features, Sm80Forward]
FULL = tuple(
    (Features(dtype, 128, 128, **uses), Sm80Forward(4, 2, 64, 1, lazy_rescale=True, pack_gqa=pack))
    for dtype, pack, uses in (("bfloat16", 8, CAUSAL), ("float16", 8, {"mask": "bool", **WINDOW}))
)
"""Kernels of the row whose accumulators take the most registers."""
EXACT = Features("float32", 128, 128, right=True)
PACKED = EXACT._replace(right=False, varlen=True)
"""Three products, 128 columns: O spills without branches around some of its chunks, for sm_120a, and for
sm_80 next to packed sequences."""
FEW_ROWS = Features("bfloat16", 256, 256)
TF32 = Features("float32", 112, 112, tf32=True, mask="float32", dropout=True, sinks="float32")._replace(
    large_softcap=True, **SOFTCAP, **WINDOW
)
"""They spill for sm_86 with a kernel for whole blocks, and for sm_120a with 32 keys."""
DROPPED = tuple(Features("bfloat16", D, D, dropout=True) for D in (96, 112, 256))
"""Dropout alone spills for sm_80 with kernels for whole blocks, and without a branch around rescaling."""
MASKED = EXACT._replace(mask="bool")
"""32 keys spill for sm_80 without branches around chunks of O."""
SPILLS = Features("bfloat16", 128, 128, mask="float32", scaled=True), Sm80Forward(4, 2, 64, 1)


def reachable(table: sm80.Table) -> Iterator[Kernel]:
    """Kernels that calls with these head sizes and features can ask for.

    Of GPUs with kernels of their own not those that serve on request only, but for the first ones.
    """
    yield from _of_heads(table, HEADS)
    yield from _of_heads(table, WIDE)
    if table is not sm80.ON_REQUEST:
        yield from _of_heads(table, BETWEEN)
        yield from _whole(table)
        yield from _of_functions(table)
        yield from _of_heads(table, HEADS, DTYPES[::-1])
    yield from _of_splits(table)


def _of_heads(
    table: sm80.Table, heads: Sequence[tuple[int, int]], dtypes: Sequence[str] = DTYPES
) -> Iterator[Kernel]:
    """Kernels with every use; the dtypes take turns."""
    turns = cycle(dtypes)
    for uses in USES:
        for D, Dv in heads:
            features = Features(next(turns), D, Dv)._replace(**uses)
            yield from _of(table, features)
            for tf32 in (False, True):
                yield from _of(table, features._replace(dtype="float32", tf32=tf32))


def _of_splits(table: sm80.Table) -> Iterator[Kernel]:
    """Splits of keys, of few features and of many, masks among them."""
    for uses in (*USES[:1], *USES[3:4], *USES[6:]):
        for D, Dv in HEADS:
            for dtype, tf32 in (("bfloat16", False), ("float32", False), ("float32", True)):
                features = Features(dtype, D, Dv, tf32=tf32)._replace(**uses)
                if not table.limits(features):
                    for config in SPLITS[table].reachable(features, 8):
                        if config.pack_gqa in (1, 8):
                            yield features._replace(splits=True), config


def _whole(table: sm80.Table) -> Iterator[Kernel]:
    """Kernels whose Sk ends with a block, with few features, whose loops differ most by it."""
    for uses in ({}, CAUSAL, {"dropout": True}, {"mask": "bool"}):
        for D, Dv in (*HEADS, *BETWEEN):
            yield from _of(table, Features("bfloat16", D, Dv)._replace(**uses), ragged_k=False)


def _of_functions(table: sm80.Table) -> Iterator[Kernel]:
    for mods in FUNCTIONS:
        for D, Dv in HEADS[:6]:
            for uses in ({}, {"dropout": True, **CAUSAL}, {**SOFTCAP, **WINDOW, "sinks": "bfloat16"}):
                scaled = mods.makes_large_scores or "softcap" in uses
                features = Features("bfloat16", D, Dv)._replace(**uses)
                yield from _of(table, features._replace(scaled=scaled, mods=mods))


def _of(table: sm80.Table, features: Features, ragged_k: bool = True) -> Iterator[Kernel]:
    if not table.limits(features):
        for config in table.reachable(features, 8):
            if config.pack_gqa in (1, 8) and config.ragged_k == ragged_k:
                yield features, config


def keys() -> list[Key]:
    """All kernels that are compiled; the last one spills."""
    found = one_of(3046, [key for arch in TABLES for key in everything(arch)])
    full = one_of(3, [Key(ENTRY, kernel, arch) for kernel in FULL for arch in ("sm_80", "sm_90a")])
    full.append(Key(ENTRY, (EXACT, sm80.SMALL.forward(EXACT, Sizes(4096, 4095))), "sm_120a"))
    full.append(Key(ENTRY, (FEW_ROWS, sm80.SMALL.forward(FEW_ROWS, Sizes(64, 4096))), "sm_86"))
    full.append(Key(ENTRY, (TF32, sm80.SMALL.forward(TF32, Sizes(4096, 4095))), "sm_120a"))
    whole = [(f, sm80.LARGE.forward(f, Sizes(4096, 4096))) for f in (*one_of(3, DROPPED), MASKED)]
    full += [Key(ENTRY, kernel, "sm_80") for kernel in whole]
    full.append(Key(ENTRY, (PACKED, sm80.LARGE.forward(PACKED, Sizes(4096, 4095))), "sm_80"))
    return list(dict.fromkeys([*found, *full, Key(ENTRY, SPILLS, "sm_80")]))


def everything(arch: str) -> list[Key]:
    """The kernels of an architecture that do not spill."""
    return list(dict.fromkeys(Key(ENTRY, kernel, arch) for kernel in reachable(TABLES[arch])))


KEYS = keys()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, cubin.Code]:
    return compiled_files.codes(KEYS, tmp_path_factory)


def test_nothing_that_can_be_asked_for_spills(compiled: dict[Key, cubin.Code]) -> None:
    """The kernel that is known to spill shows that a spill is seen."""
    assert all(sm80.LARGE.fits(*kernel) for kernel in FULL)
    assert not sm80.LARGE.fits(*SPILLS)
    spilling = {key: code for key, code in compiled.items() if code.stack or code.spills}
    assert set(spilling) == {KEYS[-1]}, "\n".join(f"{key}: {code}" for key, code in spilling.items())


def test_every_architecture_and_dtype_is_compiled() -> None:
    assert {key.arch for key in KEYS} == set(TABLES)
    kernels = [key.static for key in KEYS]
    assert {features.dtype for features, _ in kernels} == {"bfloat16", "float16", "float32"}
    assert {config.row_mmas for _, config in kernels} == {1, 2}
