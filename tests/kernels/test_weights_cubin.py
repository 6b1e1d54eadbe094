"""The weights kernel as ptxas compiles it: nothing spills, and its registers suffice."""

from __future__ import annotations

import pytest

import compiled_files
import cubin
from everything import one_of
from flash4_torch.backends.compiled import WEIGHTS
from flash4_torch.compile import Key
from flash4_torch.configs.types import Features

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from flash4_torch.kernels.common.warps import registers_suffice
from flash4_torch.kernels.weights.plan import CONSUMER_REGISTERS, PRODUCER_REGISTERS, WeightsPlan

BAND = {"left": True, "right": True}
USES: tuple[dict[str, object], ...] = (
    {"mask": "float32", "scaled": True, "dropout": True, **BAND},
    {},
    {"dropout": True, "right": True},
    {"mask": "bool", "dropout": True, **BAND},
    {"softcap": True, "scaled": True, "large_softcap": True, "mask": "bfloat16", **BAND},
    {"right": True},
)
KEYS = [
    Key(WEIGHTS, (Features("bfloat16", D, 0)._replace(**uses), average), arch)
    for uses in USES
    for D in (64, 256)
    for arch in ("sm_90a", "sm_100a")
    for average in (True, False)
]
KEYS_RELEASED_EARLY = [
    Key(WEIGHTS, (Features("float16", D, 0)._replace(**uses), True), arch)
    for arch in ("sm_90a", "sm_100a")
    for D in (64, 128)
    for uses in ({"mask": "float16", "scaled": True, "dropout": D == 64}, {"mask": "bool"}, {})
]
"""Kernels whose stages ptxas released while they were read: all by CUDA 13, some by CUDA 12."""
KEYS_SM80 = [
    Key(WEIGHTS, (*key.static, False), arch)
    for key in KEYS
    if key.arch == "sm_90a"
    for arch in ("sm_80", "sm_86", "sm_89", "sm_120a")
]
KEYS_FLOAT32 = [
    Key(WEIGHTS, (Features("float32", D, 0, tf32=tf32)._replace(**uses), average, False), arch)
    for uses in USES
    for D in (64, 256)
    for tf32 in (False, True)
    for arch in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
    for average in (True, False)
]

KEYS_SIGNED = [
    Key(WEIGHTS, (*key.static[:2], key.static[2] if len(key.static) > 2 else True, True), key.arch)
    for key in (*KEYS, *KEYS_SM80, *KEYS_FLOAT32)
    if key.static[0].dropout and not key.static[1]
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, cubin.Code]:
    return compiled_files.codes(
        [
            *one_of(29, KEYS),
            *one_of(7, KEYS_RELEASED_EARLY),
            *one_of(99, KEYS_SM80),
            *one_of(299, KEYS_FLOAT32[::-1]),
            *one_of(59, KEYS_SIGNED),
        ],
        tmp_path_factory,
    )


def allowed(key: Key) -> int:
    """Spilling instructions that are left in averaged weights: by TMA two with all that a score may need, and
    with three products four next to a bool mask and dropout.
    """
    features, average, *_ = key.static
    masked = features.large_softcap and features.float_mask
    if features.is_exact and average and features.dropout and features.mask == "bool":
        return 4
    return 2 if key in KEYS and masked and average and features.D > 64 else 0


def test_nothing_spills(compiled: dict[Key, cubin.Code]) -> None:
    spilling = {key: code for key, code in compiled.items() if code.spills > allowed(key)}
    assert not spilling, "\n".join(map(str, spilling.items()))


def test_no_stage_is_released_while_it_is_read(compiled: dict[Key, cubin.Code]) -> None:
    early = {key: code for key, code in compiled.items() if code.early_arrivals}
    assert not early, "\n".join(map(str, early.items()))


def test_registers_suffice(compiled: dict[Key, cubin.Code]) -> None:
    wanted = 2 * CONSUMER_REGISTERS + PRODUCER_REGISTERS
    for key, code in compiled.items():
        if not WeightsPlan(*key.static).tma:
            assert not code.budgets
            continue
        assert code.budgets == {CONSUMER_REGISTERS, PRODUCER_REGISTERS}
        assert registers_suffice(WeightsPlan(*key.static).threads, wanted)
