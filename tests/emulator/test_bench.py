"""The kernels of the benchmark's section `emulator` do what it says they do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flash4_torch.bench.emulator import CHECKERS, LOOPS, WARPS
from flash4_torch.emulator.report import Report

TURNS = 3


def run(name: str, turns: int) -> Report:
    report = replace(LOOPS[name], turns=turns).launcher()(options=CHECKERS["races on"])
    report.raise_findings()
    return report


@pytest.mark.parametrize("name", LOOPS)
def test_every_turn_executes_the_same(name: str) -> None:
    one, two, three = (run(name, turns).counters for turns in range(1, 4))
    assert three.instructions - two.instructions == two.instructions - one.instructions >= 4 * WARPS
    assert three.mma_flops == 3 * one.mma_flops


@pytest.mark.parametrize(
    ("name", "flops"),
    [("wgmma m64n256k16", 4 * 2 * 64 * 256 * 16), ("tcgen05.mma m128n256k16", 4 * 2 * 128 * 256 * 16)],
)
def test_products_are_counted(name: str, flops: int) -> None:
    assert run(name, TURNS).counters.mma_flops == TURNS * flops
