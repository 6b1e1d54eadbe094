"""What most calls ask for as ptxas of CUDA 13 compiles it: the laws that hold of CUDA 12's code."""

from __future__ import annotations

import pytest

import cubin
import cuda13
import test_decode_cubin
import test_sm90_backward_cubin
import test_sm90_cubin
import test_sm100_backward_cubin
import test_sm100_cubin
import test_weights_cubin
from everything import one_of
from flash4_torch.compile import Key

pytestmark = pytest.mark.skipif(not cuda13.FOLDER.exists(), reason="make test puts CUDA 13's compiler there")

WEIGHTS = [*one_of(7, test_weights_cubin.KEYS_RELEASED_EARLY), *one_of(2, test_weights_cubin.KEYS[1::24])]
FORWARD = [Key(test_sm90_cubin.ENTRY, kernel, "sm_90a") for kernel in test_sm90_cubin.common()]
HOPPER = [*one_of(4, FORWARD), *one_of(4, test_sm90_backward_cubin.common()[::-1])]
DECODE = [*test_decode_cubin.KEYS, *test_decode_cubin.KEYS_WGMMA]
OTHERS = [
    *test_sm100_cubin.keys()[:1],
    *test_sm100_backward_cubin.keys()[:1],
    *one_of(600, [key for key in DECODE if key.static[0].right and not key.static[0].softcap]),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, cubin.Code]:
    return cuda13.codes([*WEIGHTS, *HOPPER, *OTHERS], tmp_path_factory.mktemp("cuda13"))


def test_nothing_spills(compiled: dict[Key, cubin.Code]) -> None:
    spilling = {key: code for key, code in compiled.items() if code.spills}
    assert not spilling, "\n".join(map(str, spilling.items()))


def test_wgmmas_overlap(compiled: dict[Key, cubin.Code]) -> None:
    serial = [key for key in HOPPER if compiled[key].signalled == compiled[key].wgmmas]
    assert not serial, "\n".join(map(str, serial))


def test_no_stage_is_released_while_it_is_read(compiled: dict[Key, cubin.Code]) -> None:
    early = [key for key in WEIGHTS if compiled[key].early_arrivals]
    assert not early, "\n".join(map(str, early))
