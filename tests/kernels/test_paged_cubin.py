"""The forward over paged caches as ptxas compiles it: nothing spills, and wgmmas overlap, on either GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import compiled_files
import cubin
from everything import one_of
from flash4_torch.backends.compiled import SM90A, SM100A
from flash4_torch.compile import Key
from flash4_torch.configs.types import Features, Sm90Forward, widest_box

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

BAND = {"left": True, "right": True}
SOFTCAP = {"softcap": True, "scaled": True, "large_softcap": True}
HEADS = ((128, 128), (64, 64), (256, 256), (96, 96), (192, 128), (192, 192), (40, 240))
USES: tuple[dict[str, object], ...] = ({"right": True}, {**SOFTCAP, **BAND, "sinks": "float32"}, {})
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


def keys() -> Iterator[Key]:
    """Kernels that calls can ask for, with alternating dtypes."""
    for heads in HEADS:
        for i, uses in enumerate(USES):
            features = Features(("bfloat16", "float16")[i % 2], *heads, varlen=True)._replace(**uses)
            for page_size in PAGE_SIZES:
                for target in (SM90A, SM100A):
                    widest = features._replace(page_box=widest_box(page_size))
                    for config in target.forward_configs.reachable(widest, 1):
                        own = features._replace(page_box=widest_box(page_size, config.keys))
                        yield Key(target.forward, (own, config), target.arch)


KEYS = list(dict.fromkeys([TIGHT, *one_of(97, list(keys()))]))


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
