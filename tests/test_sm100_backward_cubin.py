"""What ptxas makes of the Blackwell backward: what spills."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import cubin
from flash4_torch import env
from flash4_torch.compile import Key, pool
from flash4_torch.configs import sm100_backward as configs
from flash4_torch.configs.types import Features
from test_sm90_backward_cubin import HEADS, MORE
from test_sm90_cubin import USES, code_of

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

ENTRY = "flash4_torch.kernels.sm100.bwd.launch:compile_backward"
ARCH = "sm_100a"


EVERY = 5 if os.environ.get("FLASH4_TEST_ALL") else 10
"""Of so many kernels one is compiled, besides the plain ones: it takes seconds."""


def reachable() -> Iterator[Features]:
    """What calls can ask for with these head sizes, by turns."""
    for i, (D, Dv) in enumerate((*HEADS, (192, 192))):
        for j, uses in enumerate((*USES, *MORE)):
            features = Features(("bfloat16", "float16")[(i + j) % 2], D, Dv)._replace(**uses)
            if ((2 * i + j) % EVERY == 0 or not uses) and not configs.limits(features):
                yield features


def main_kernels() -> list[Key]:
    """Where Sk may end inside a tile: it takes more registers."""
    return [
        Key(ENTRY, (f, config), ARCH) for f in reachable() for config in configs.reachable(f) if config.tail
    ]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Key, cubin.Code]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(env.CACHE_DIR.name, str(tmp_path_factory.mktemp("kernels")))
        keys = main_kernels()
        pool.prepare(keys, len(os.sched_getaffinity(0)), lambda done, total: None)
        yield {key: code_of(key) for key in keys}


def test_nothing_spills(compiled: dict[Key, cubin.Code]) -> None:
    """But some of those with softcap: see the kernels' notes."""
    spilling = {
        str(key): code
        for key, code in compiled.items()
        if (code.stack or code.spills) and not key.static[0].softcap
    }
    assert not spilling, "\n".join(map(str, spilling.items()))


def test_the_table_is_covered() -> None:
    configs_of = {config._replace(tail=True) for _, config in (key.static for key in main_kernels())}
    assert configs_of == {row.config for row in configs.TABLE}
