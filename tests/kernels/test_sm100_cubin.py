"""The Blackwell forward as ptxas compiles it: nothing spills, memory suffices, the instructions are there."""

from __future__ import annotations

import pytest

import compiled_files
import cubin
from blackwell_code import assert_code_is_as_planned
from everything import EVERYTHING, one_of
from flash4_torch.compile import Key
from flash4_torch.configs import sm100, sm100_splits, sm103
from flash4_torch.configs.sizes import Sizes
from flash4_torch.configs.types import SHARED_MEMORY, Features, Mods, Sm100Forward
from flex_mods import of_kernels

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from flash4_torch.kernels.sm100.fwd.plan import Plan
from flash4_torch.kernels.sm100.umma import DEPTH

ENTRY = "flash4_torch.kernels.sm100.fwd.launch:compile_forward"
CAUSAL = {"right": True}
WINDOW = {"left": True, "right": True}
SOFTCAP = {"softcap": True, "scaled": True}
USES: tuple[dict[str, object], ...] = (
    {},
    CAUSAL,
    WINDOW,
    {**SOFTCAP, **CAUSAL},
    {"mask": "bool"},
    {"mask": "float32", "scaled": True},
    {"dropout": True},
    {"dropout": True, **CAUSAL},
    {"dropout": True, **SOFTCAP},
    {"varlen": True},
    {"varlen": True, **CAUSAL},
)
HEADS = ((64, 64), (128, 128), (192, 128), (256, 256))
FEW = (
    Features("bfloat16", 128, 128),
    Features("float16", 64, 64, right=True),
    Features("bfloat16", 192, 128, right=True),
)
"""The features that CI has time for."""
ODD = (
    Features("bfloat16", 80, 80),
    Features("float16", 112, 112, right=True, dropout=True),
    Features("bfloat16", 96, 96, dropout=True),
)
"""These spilled an address that all roles share, as TMA copies of many boxes took the uniform registers;
the last one spilled dropout's keep bits."""
ULTRA = Features("bfloat16", 256, 256, dropout=True)
"""The first block's rescale factor, which nothing needs, made it spill
on sm_103a, where Sk ends with a block."""
Kernel = tuple[Features, Sm100Forward]


def features() -> list[Features]:
    if not EVERYTHING:
        return [*FEW, ODD[-1]]
    return [*(Features("bfloat16", D, Dv)._replace(**uses) for D, Dv in HEADS for uses in USES), *ODD]


def kernels() -> list[Kernel]:
    """Kernels for long sequences, whose end is inside a tile."""
    whole = [(f, sm100.forward(f, Sizes(4095, 4095))) for f in features()]
    every = (Features("bfloat16", 128, 128, right=True), Features("float16", 64, 64, mask="bool"))
    split = [(f._replace(splits=True), c) for f in every for c in sm100_splits.SPLITS.reachable(f, 2)]
    return whole + one_of(2, split)


def of_programs() -> list[Kernel]:
    """Programs and states of single keys: a row of scores and what is loaded for each of them did not fit in
    registers.
    """
    of_table, *others = of_kernels(gradients=False)
    found = []
    for mods in (of_table._replace(blocks="scores"), of_table, Mods(blocks="scores"), *others):
        for D, uses in ((128, {}), (64, CAUSAL), (256, WINDOW)):
            features = Features("bfloat16", D, D, mods=mods, scaled=mods.makes_large_scores)._replace(**uses)
            found.append((features, sm100.forward(features, Sizes(4095, 4095))))
    return one_of(len(found), found)


def keys() -> list[Key]:
    ultra = Key(ENTRY, (ULTRA, sm103.forward(ULTRA, Sizes(4096, 4096))), "sm_103a")
    return [*(Key(ENTRY, kernel, "sm_100a") for kernel in (*kernels(), *of_programs())), ultra]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, cubin.Code]:
    return compiled_files.codes(keys(), tmp_path_factory)


def test_nothing_spills(compiled: dict[Key, cubin.Code]) -> None:
    spilling = {key: code for key, code in compiled.items() if code.stack or code.spills}
    assert not spilling, "\n".join(map(str, spilling.items()))


def test_instructions_are_as_planned(compiled: dict[Key, cubin.Code]) -> None:
    for key, code in compiled.items():
        plan = Plan(*key.static)
        assert_code_is_as_planned(code, plan, (plan.D + plan.keys) // DEPTH)


@pytest.mark.parametrize("D", range(8, 257, 24))
@pytest.mark.parametrize("Dv", range(8, 257, 31 * 8))
def test_every_row_fits_the_machine(D: int, Dv: int) -> None:
    for uses in USES:
        f = Features("bfloat16", D, Dv)._replace(**uses)
        for config in sm100.reachable(f):
            plan = Plan(f, config)
            plan.check()
            assert config.shared_memory(f) <= SHARED_MEMORY and config.tensor_memory(f) <= 512
