"""The Blackwell backward as ptxas compiles it: nothing spills, and the instructions are there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import compiled_files
import cubin
from blackwell_code import assert_code_is_as_planned
from everything import EVERYTHING
from flash4_torch.compile import Key
from flash4_torch.configs import sm100_backward as configs
from flash4_torch.configs.types import Features
from test_sm90_backward_cubin import HEADS, MORE
from test_sm90_cubin import USES

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from flash4_torch.kernels.sm100.bwd.plan import Plan

ENTRY = "flash4_torch.kernels.sm100.bwd.launch:compile_backward"
ARCH = "sm_100a"

SCARCE = (
    Features("float16", 192, 128, scaled=True, mask="float16", dropout=True),
    Features("bfloat16", 256, 256, right=True, scaled=True, mask="float32", dropout=True, dmask=True),
)
"""Dropout and a mask leave wide heads few registers: the one that
spilled most, and the one that spilled longest."""
ODD = Features("bfloat16", 80, 80, dropout=True), Features("float16", 112, 112, right=True, dropout=True)
"""TMA copies of many boxes took the uniform registers, and an address that all roles share was spilled."""

EVERY = 5 if EVERYTHING else 13
"""One of this many combinations of heads and features is compiled, besides the plain ones: each takes
seconds."""


def reachable() -> Iterator[Features]:
    """A rotating choice of the features that calls can ask for with these head sizes."""
    for i, (D, Dv) in enumerate((*HEADS, (192, 192))):
        for j, uses in enumerate((*USES, *MORE)):
            features = Features(("bfloat16", "float16")[(i + j) % 2], D, Dv)._replace(**uses)
            if ((2 * i + j) % EVERY == 0 or not uses) and not configs.limits(features):
                yield features
    yield from (*SCARCE, *ODD)


def keys() -> list[Key]:
    """Kernels whose Sk may end inside a tile, which takes more registers; without FLASH4_TEST_ALL, of each
    config the one with the most features, and some that spilled.
    """
    kernels = [
        Key(ENTRY, (f, config), ARCH)
        for f in reachable()
        for config in configs.reachable(f)
        if config.ragged_k
    ]
    if EVERYTHING:
        return kernels
    by_config = {key.static[1]: key for key in sorted(kernels, key=lambda key: sum(map(bool, key.static[0])))}
    spilled = [key for key in kernels if key.static[0] in (SCARCE[0], ODD[0])]
    return list(dict.fromkeys([*by_config.values(), *spilled]))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, cubin.Code]:
    return compiled_files.codes(keys(), tmp_path_factory)


def test_nothing_spills(compiled: dict[Key, cubin.Code]) -> None:
    spilling = {str(key): code for key, code in compiled.items() if code.stack or code.spills}
    assert not spilling, "\n".join(map(str, spilling.items()))


def test_instructions_are_as_planned(compiled: dict[Key, cubin.Code]) -> None:
    for key, code in compiled.items():
        plan = Plan(*key.static)
        products = (plan.op_s, plan.op_dp, plan.op_dv, plan.op_dk, plan.op_dq)
        stores = not plan.wide or plan.features.mask not in ("", "bool")
        assert_code_is_as_planned(code, plan, sum(product.steps for product in products), stores)
        assert code.kinds["UBLKRED"]


def test_the_table_is_covered() -> None:
    configs_of = {config._replace(ragged_k=True) for _, config in (key.static for key in keys())}
    assert configs_of == {row.config for row in configs.TABLE}
