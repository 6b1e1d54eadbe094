"""The forward over paged caches as ptxas compiles it: nothing spills, and wgmmas overlap, on either GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest

import compiled_files
import cubin
from everything import one_of
from flash4_torch.backends.compiled import SM90A, SM100A
from flash4_torch.compile import Key
from flash4_torch.configs import sm90, sm100
from flash4_torch.configs.sizes import Sizes
from flash4_torch.configs.types import Features, Sm90Forward, widest_box

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

CAUSAL = {"right": True}
SOFTCAP = {"softcap": True, "scaled": True}
HEADS = ((128, 128), (64, 64), (256, 256), (96, 96), (192, 128), (192, 192), (40, 240))
USES: tuple[dict[str, object], ...] = (CAUSAL, {**SOFTCAP, **CAUSAL, "sinks": "float32"}, {})
WIDE_SOFTCAP = {**SOFTCAP, **CAUSAL, "left": True, "sinks": "float32", "large_softcap": True}
"""It spills on Blackwell, with packed keys as well."""
PAGE_SIZES = (16, 64, 256)
TIGHT = Key(
    SM90A.forward,
    (
        Features("bfloat16", 128, 128, varlen=True, right=True, page_box=16),
        Sm90Forward(3, 80, 2, 2, pingpong=True, k_ahead=True, lazy_rescale=True),
    ),
    SM90A.arch,
)
"""Its load warp has 32 registers a thread. It kept the room of a row of the table for all tiles, a product of
64 bits, and spilled it."""


def hopper() -> Iterator[Key]:
    """Kernels that calls can ask for, with alternating dtypes."""
    for features, page_size in product(_features((*USES, WIDE_SOFTCAP)), PAGE_SIZES):
        for config in sm90.reachable(features._replace(page_box=widest_box(page_size)), 1):
            own = features._replace(page_box=widest_box(page_size, config.keys))
            yield Key(SM90A.forward, (own, config), SM90A.arch)


def blackwell() -> Iterator[Key]:
    """Kernels for long sequences, whose end is inside a tile."""
    for features, page_size in product(_features(USES), PAGE_SIZES):
        own = features._replace(page_box=widest_box(page_size))
        yield Key(SM100A.forward, (own, sm100.forward(own, Sizes(4095, 4095))), SM100A.arch)


def _features(uses: Sequence[dict[str, object]]) -> Iterator[Features]:
    for (D, Dv), (i, use) in product(HEADS, enumerate(uses)):
        yield Features(("bfloat16", "float16")[i % 2], D, Dv, varlen=True)._replace(**use)


KEYS = list(dict.fromkeys([TIGHT, *one_of(193, list(hopper())), *one_of(64, list(blackwell()))]))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, cubin.Code]:
    return compiled_files.codes(KEYS, tmp_path_factory)


def test_nothing_spills(compiled: dict[Key, cubin.Code]) -> None:
    spilling = {key: code for key, code in compiled.items() if code.spills or code.stack}
    assert not spilling, "\n".join(map(str, spilling.items()))


def test_wgmmas_overlap(compiled: dict[Key, cubin.Code]) -> None:
    """ptxas waits for each wgmma where it cannot tell that its registers are left alone meanwhile."""
    serial = [key for key, code in compiled.items() if code.wgmmas and code.signalled == code.wgmmas]
    assert not serial, "\n".join(map(str, serial))


def test_both_architectures_are_compiled() -> None:
    assert {key.arch for key in KEYS} == {SM90A.arch, SM100A.arch}
