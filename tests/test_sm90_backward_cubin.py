"""What ptxas makes of the Hopper backward: nothing spills, and wgmmas overlap, whatever is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import cubin
from flash4_torch import env
from flash4_torch.backends.compiled import POSTPROCESS, PREPROCESS, SM90A
from flash4_torch.backends.compiled.backward import row_plans
from flash4_torch.compile import Key, pool
from flash4_torch.configs import sm90_backward as configs
from flash4_torch.configs.types import Features
from test_sm90_cubin import USES, code_of

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

HEADS = ((64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (40, 24))
MORE: tuple[dict[str, object], ...] = (
    {"deterministic": True},
    {"deterministic": True, "right": True},
    {"mask": "float32", "scaled": True, "dmask": True},
)


def reachable() -> Iterator[Features]:
    """What calls can ask for with these head sizes: by turns, as compiling takes seconds."""
    for i, (D, Dv) in enumerate(HEADS):
        for j, uses in enumerate((*USES, *MORE)):
            features = Features(("bfloat16", "float16")[(i + j) % 2], D, Dv)._replace(**uses)
            if (2 * i + j) % 3 == 0 or not uses:
                yield features


def main_kernels() -> list[Key]:
    """Where Sk may end inside a tile: it takes more registers."""
    return [
        Key(SM90A.backward, (f, config), SM90A.arch)
        for f in reachable()
        for config in configs.reachable(f)
        if config.tail
    ]


def kernels_of_rows() -> list[Key]:
    found: dict[Key, None] = {}
    for features in reachable():
        before, behind = row_plans(features, configs.reachable(features)[-1], dlse=features.right)
        for entry, plan in ((PREPROCESS, before), (POSTPROCESS, behind)):
            found[Key(entry, (plan,), SM90A.arch)] = None
    return list(found)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Key, cubin.Code]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(env.CACHE_DIR.name, str(tmp_path_factory.mktemp("kernels")))
        keys = [*main_kernels(), *kernels_of_rows()]
        pool.prepare(keys, len(os.sched_getaffinity(0)), lambda done, total: None)
        yield {key: code_of(key) for key in keys}


def test_nothing_spills(compiled: dict[Key, cubin.Code]) -> None:
    spilling = {str(key): code for key, code in compiled.items() if code.stack or code.spills}
    assert not spilling, "\n".join(map(str, spilling.items()))


def test_wgmmas_overlap(compiled: dict[Key, cubin.Code]) -> None:
    """ptxas waits for each of them where it cannot tell that registers are left alone meanwhile."""
    serial = [str(key) for key, code in compiled.items() if code.wgmmas and code.signalled == code.wgmmas]
    assert not serial, "\n".join(serial)


def test_the_table_is_covered() -> None:
    configs_of = {config._replace(tail=True) for _, config in (key.static for key in main_kernels())}
    assert configs_of == {row.config for row in configs.TABLE}
