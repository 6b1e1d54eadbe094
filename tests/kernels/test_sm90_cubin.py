"""The Hopper forward as ptxas compiles it: nothing spills, and wgmmas overlap, whatever is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import compiled_files
import cubin
from everything import EVERYTHING, one_of
from flash4_torch.compile import Key
from flash4_torch.configs import sm90, sm90_splits
from flash4_torch.configs.sizes import Sizes
from flash4_torch.configs.types import Features, Mods, Sm90Forward
from flash4_torch.flex.attention import traced
from flex_mods import Mod
from kernel_traits import few

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

ENTRY = "flash4_torch.kernels.sm90.fwd.launch:compile_forward"
HEADS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (64, 128), (40, 24))
CAUSAL = {"right": True}
WINDOW = {"left": True, "right": True}
SOFTCAP = {"softcap": True, "scaled": True}
BLOCKS, STACKED = Mods(blocks="rows"), Mods(bounds="stacked")
USES: tuple[dict[str, object], ...] = (
    {},
    CAUSAL,
    WINDOW,
    SOFTCAP,
    {"mask": "bool"},
    {"mask": "bfloat16", "scaled": True},
    {"mask": "float32", "scaled": True},
    {"dropout": True},
    {"varlen": True},
    {"varlen": True, **CAUSAL},
    {"dropout": True, **CAUSAL},
    {"mask": "bool", **CAUSAL},
    {**SOFTCAP, **CAUSAL},
    {"mask": "bool", "dropout": True},
    {"mask": "float16", "scaled": True, **WINDOW},
    {"varlen": True, "dropout": True, **SOFTCAP, **WINDOW},
    {"mask": "float32", "dropout": True, **SOFTCAP, **WINDOW},
)
Kernel = tuple[Features, Sm90Forward]
ODD = Features("bfloat16", 240, 240, mask="bool"), Sm90Forward(1, 80, 2, 1)
"""TMA copies of 15 boxes took the uniform registers, and an address that all roles share was spilled."""


def reachable() -> Iterator[Kernel]:
    """Kernels that calls with these head sizes and features can ask for, with alternating dtypes."""
    for i, (D, Dv) in enumerate(HEADS):
        for j, uses in enumerate(USES):
            features = Features(("bfloat16", "float16")[(i + j) % 2], D, Dv)._replace(**uses)
            for config in sm90.reachable(features, 1):
                yield features, config


def room(kernel: Kernel) -> int:
    """Registers that the table counts as free."""
    features, config = kernel
    return sm90.available_registers(features, config) - sm90.registers(features, config)


def tightest() -> list[Kernel]:
    """Kernels with the fewest free registers, one for each config; their Sk may end inside a tile. Without
    FLASH4_TEST_ALL a few that have every setting.
    """
    by_config: dict[Sm90Forward, list[Kernel]] = {}
    for kernel in reachable():
        if kernel[1].ragged_k:
            by_config.setdefault(kernel[1], []).append(kernel)
    found = [min(group, key=room) for group in by_config.values()]
    return list(few({str(kernel): kernel for kernel in found}).values())


def covering() -> list[Kernel]:
    """Selected kernels: those of `tightest`, for some features of each head size one by turns, and kinds that
    have a name.
    """
    by_features: dict[Features, list[Kernel]] = {}
    for kernel in reachable():
        by_features.setdefault(kernel[0], []).append(kernel)
    step = 3 if EVERYTHING else 800
    in_turn = [group[i % len(group)] for i, group in enumerate(by_features.values()) if i % step == 0]
    packed = (Features("float16", 128, 128, varlen=True), Features("bfloat16", 64, 64, right=True))
    most = [(features, sm90.reachable(features)[-1]) for features in packed]
    named = [
        *one_of(2, most),
        *one_of(4, common()),
        *one_of(18, split()),
        *ramped(),
        *listed(),
        *stacked(),
        ODD,
    ]
    return list(dict.fromkeys([*tightest(), *in_turn, *named]))


def common() -> list[Kernel]:
    """What most calls ask for: long sequences, causal and full."""
    all_features = [Features("bfloat16", D, D)._replace(**uses) for D in (64, 128) for uses in (CAUSAL, {})]
    return [(features, sm90.forward(features, Sizes(8192, 8192))) for features in all_features]


def split() -> list[Kernel]:
    """Splits of keys: next to half blocks ptxas serialised wgmmas."""
    every = [
        (64, {**CAUSAL, "softcap": True, "scaled": True, "sinks": "bfloat16"}),
        (96, {}),
        (128, {**WINDOW, "varlen": True, "page_box": 16}),
        (192, CAUSAL),
        (64, {**CAUSAL, "mask": "bool"}),
        (128, {"mask": "float32", "scaled": True}),
        (192, {"mask": "bool"}),
        (192, {**WINDOW, "mask": "float16", "scaled": True}),
        (256, WINDOW),
    ]
    all_features = [Features("bfloat16", D, D)._replace(**uses) for D, uses in every]
    return [
        (f._replace(splits=True), config)
        for f in all_features
        for config in sm90_splits.SPLITS.reachable(f, 2)
    ]


def ramped() -> list[Kernel]:
    """Ramps like ALiBi in the widest tiles, with packed heads too: next to half blocks wgmmas were
    serialised, at half the speed.
    """
    q, slopes = torch.empty(1, 64, 2, 64), torch.ones(2)
    distance: Mod = lambda s, b, h, i, j: s + slopes[h] * (j - i)  # noqa: E731
    key: Mod = lambda s, b, h, i, j: s + slopes[h] * j - 3.0  # noqa: E731
    found = []
    for D, mod, uses in (
        (64, distance, CAUSAL),
        (64, key, WINDOW),
        (128, distance, CAUSAL),
        (64, distance, {}),
    ):
        mods = Mods(traced(q, q, mod, None).score_mod, ramp=True)
        features = Features("bfloat16", D, D, mods=mods)._replace(**uses)
        widest = [config for config in sm90.reachable(features) if config.warpgroups == 3]
        found += [(features, config) for config in (widest[0], widest[-1])]
    return one_of(len(found), found)


def listed() -> list[Kernel]:
    """A bool mask in tiles for lists of blocks: masks of programmable attention, by their bits. And one whose
    tile of 64 rows spilled with 112 keys.
    """
    few = Features("bfloat16", 192, 192, mask="bool", right=True)
    found = [(few, sm90.forward(few, Sizes(64, 8192)))]
    for D in one_of(5, (128, 64, 96, 192, 256)):
        lists, mask = (Features("bfloat16", D, D)._replace(**x) for x in ({"mods": BLOCKS}, {"mask": "bool"}))
        found.append((mask, sm90.forward(lists, Sizes(8192, 8192))))
    return found


def stacked() -> list[Kernel]:
    """Stacks of short sequences: each row has bounds of its own in registers."""
    found = [
        (features, config)
        for D, Dv in HEADS
        for uses in ({}, {"scaled": True, "sinks": "bfloat16"})
        for features in [Features("bfloat16", D, Dv, mods=STACKED, **WINDOW)._replace(**uses)]
        for config in sm90.reachable(features, 1)
    ]
    return one_of(len(found), found)


def keys() -> list[Key]:
    return [Key(ENTRY, kernel, "sm_90a") for kernel in [*covering(), SPILLS]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[Kernel, cubin.Code]:
    """SASS of every kernel in the covering set, and of one that is known to spill."""
    return {key.static: code for key, code in compiled_files.codes(keys(), tmp_path_factory).items()}


SPILLS = Features("bfloat16", 64, 64), Sm90Forward(3, 160, 2, 1)
"""O and S take 112 registers of 160, P another 40; wgmmas wait for one another while registers move."""


def test_a_spill_is_seen(compiled: dict[Kernel, cubin.Code]) -> None:
    assert not sm90.fits(*SPILLS)
    code = compiled[SPILLS]
    assert code.stack > 0 and code.spills > 0


def test_nothing_that_can_be_asked_for_spills(compiled: dict[Kernel, cubin.Code]) -> None:
    spilling = {kernel: code for kernel, code in compiled.items() if code.stack or code.spills}
    assert set(spilling) == {SPILLS}, "\n".join(map(str, spilling.items()))


def test_wgmmas_overlap(compiled: dict[Kernel, cubin.Code]) -> None:
    """ptxas waits for each wgmma where it cannot tell that its registers are left alone meanwhile."""
    serial = {kernel for kernel, code in compiled.items() if code.signalled == code.wgmmas}
    assert serial == {SPILLS}, "\n".join(map(str, serial))


def test_the_table_is_covered() -> None:
    kernels = covering()
    assert {config for _, config in tightest()} <= {config for _, config in kernels}
    masks = {f.mask for f, _ in kernels}
    assert masks == {"", "bool", "bfloat16", "float16", "float32"} if EVERYTHING else masks > {"", "bool"}
    for name in ("varlen", "left", "right", "softcap", "dropout"):
        assert {getattr(features, name) for features, _ in kernels} == {False, True}
    for name in ("pingpong", "next_tile", "k_ahead", "half_block", "lazy_rescale", "o_over_q"):
        assert {getattr(config, name) for _, config in kernels} == {False, True}
