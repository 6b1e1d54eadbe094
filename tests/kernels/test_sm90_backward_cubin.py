"""The Hopper backward as ptxas compiles it: nothing spills, and wgmmas overlap, whatever is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import compiled_files
import cubin
from everything import EVERYTHING, one_of
from flash4_torch.backends.compiled import GROUP_REDUCE, POSTPROCESS, PREPROCESS, SM90A
from flash4_torch.backends.compiled.backward import group_reduce_plan, row_plans
from flash4_torch.backends.flex.compiled import derivative_of
from flash4_torch.compile import Key
from flash4_torch.configs import sm90_backward as configs
from flash4_torch.configs.sizes import BackwardSizes
from flash4_torch.configs.types import Features, Mods, Scope
from flash4_torch.flex import ramp
from flex_calls import traced
from flex_mods import Mod
from kernel_traits import few
from test_sm90_cubin import USES

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

HEADS = ((64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (40, 24))
MORE: tuple[dict[str, object], ...] = (
    {"deterministic": True},  # these two for all head sizes: they have table rows of their own
    {"deterministic": True, "right": True},
    {"softcap": True, "scaled": True, "varlen": True, "right": True},  # for D 128
    {"mask": "float32", "scaled": True, "dmask": True},
)
ODD = Features("float16", 176, 176, varlen=True, right=True)
"""TMA copies of eleven boxes took the uniform registers, and an address that all roles share was spilled."""

EVERY = 3 if EVERYTHING else 7
"""One of this many combinations of heads and features is compiled, besides those of table rows: each
takes seconds."""


def reachable() -> Iterator[Features]:
    """A rotating choice of the features that calls can ask for with these head sizes."""
    for i, (D, Dv) in enumerate(HEADS):
        for j, uses in enumerate((*USES, *MORE)):
            features = Features(("bfloat16", "float16")[(i + j) % 2], D, Dv)._replace(**uses)
            asked_for = uses in ({}, USES[1], *MORE[:2]) or (uses is MORE[2] and D == 128)
            if asked_for or (2 * i + j) % EVERY == 0:
                yield features
        if EVERYTHING:
            yield Features("bfloat16", D, Dv, left=True, right=True, mods=Mods(bounds="stacked"))
    yield ODD
    yield from with_programs()


def with_programs() -> Iterator[Features]:
    """One call for each row of the table for functions: ALiBi, a slope that reaches both ways, one like
    softcap, one that is long, learned slopes; and one whose derivative reads scores of wide heads.
    """
    q, slopes = torch.empty(1, 64, 2, 64), torch.ones(2)
    alibi: Mod = lambda s, b, h, i, j: s + slopes[h] * (j - i)  # noqa: E731
    both_ways: Mod = lambda s, b, h, i, j: s - slopes[h] * (j - i).abs()  # noqa: E731
    softcap: Mod = lambda s, b, h, i, j: 29 * torch.tanh(s / 30)  # noqa: E731
    long: Mod = lambda s, b, h, i, j: s + ((i ^ j) & 7) * slopes[h] + ((i + j) & 3) * (i - j).abs()  # noqa: E731
    third: Mod = lambda b, h, i, j: (i - j) % 3 < 2  # noqa: E731
    for D, score_mod, mask_mod, learns in (
        (64, alibi, None, False),
        (64, alibi, third, True),
        (64, both_ways, None, False),
        (128, alibi, None, False),
        (128, both_ways, None, False),
        (128, softcap, None, False),
        (128, long, None, False),
        (192, softcap, None, False),
        (256, lambda s, b, h, i, j: s * s * slopes[h], third, True),
    ):
        mods = traced(q, q, score_mod, mask_mod)
        derivative = derivative_of(mods.score_mod, (learns,) if mods.captured else ()).text()
        own = Mods(mods.score_mod, mods.mask_mod, "", derivative, ramp=bool(ramp.of(mods.score_mod)))
        yield Features("bfloat16", D, D, scaled=not own.ramp, right=D == 128, mods=own)


def main_kernels() -> list[Key]:
    """Kernels whose Sk may end inside a tile, which takes more registers; without FLASH4_TEST_ALL, of each
    config the one with the most features.
    """
    kernels = [
        Key(SM90A.backward, (f, config), SM90A.arch)
        for f in reachable()
        for config in configs.reachable(f)
        # With one CTA for a KV head, deterministic kernels equal the others.
        if (config.ragged_k or f.is_stacked)
        and not (config.scope == Scope.KV_HEAD and (f.deterministic or f.D < 64))
    ]
    if EVERYTHING:
        return kernels
    by_config = {key.static[1]: key for key in sorted(kernels, key=lambda key: sum(map(bool, key.static[0])))}
    return list(by_config.values())


def common() -> list[Key]:
    """What most calls ask for: long sequences, causal and full."""
    found = [Features("bfloat16", D, D, right=causal) for D in (64, 128) for causal in (True, False)]
    return [
        Key(SM90A.backward, (features, configs.backward(features, BackwardSizes(8192))), SM90A.arch)
        for features in found
    ]


KINDS = (GROUP_REDUCE, PREPROCESS, POSTPROCESS)


def kernels_of_rows() -> list[Key]:
    """Kernels before and behind the main ones; without FLASH4_TEST_ALL one of each kind."""
    found = {Key(GROUP_REDUCE, (group_reduce_plan(features),), SM90A.arch): None for features in reachable()}
    for features in reachable():
        for config in configs.reachable(features):
            before, behind = row_plans(features, config, dlse=features.right)
            for entry, plan in ((PREPROCESS, before), (POSTPROCESS, behind)):
                if plan is not None:
                    found[Key(entry, (plan,), SM90A.arch)] = None
    return [key for kind in KINDS for key in one_of(len(found), [key for key in found if key.entry == kind])]


def keys() -> list[Key]:
    """All kernels that are compiled; without FLASH4_TEST_ALL some of the main ones."""
    main = {str(key): key for key in main_kernels()}
    chosen = few({name: key.static for name, key in main.items()})
    return [*one_of(2, [main[name] for name in chosen]), *one_of(4, common()[::-1]), *kernels_of_rows()]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, cubin.Code]:
    return compiled_files.codes(keys(), tmp_path_factory)


def test_nothing_spills(compiled: dict[Key, cubin.Code]) -> None:
    spilling = {str(key): code for key, code in compiled.items() if code.spills or code.stack}
    assert not spilling, "\n".join(map(str, spilling.items()))


def test_wgmmas_overlap(compiled: dict[Key, cubin.Code]) -> None:
    """ptxas waits for each wgmma where it cannot tell that its registers are left alone meanwhile."""
    serial = [str(key) for key, code in compiled.items() if code.wgmmas and code.signalled == code.wgmmas]
    assert not serial, "\n".join(serial)


def test_the_table_is_covered() -> None:
    configs_of = {config._replace(ragged_k=True) for _, config in (key.static for key in main_kernels())}
    tiles = {config for config in configs_of if config.scope == Scope.KEY_TILE}
    assert tiles == {row.config for row in configs.TABLE}
    assert sum(config.scope == Scope.Q_HEAD for config in configs_of) == sum(
        bool(row.q_head_keys) for row in configs.TABLE
    )
    for preprocesses in (False, True):
        assert sum(
            config.scope == Scope.KV_HEAD and config.preprocesses == preprocesses for config in configs_of
        ) == sum(any(row.kv_head_rows) for row in configs.TABLE)
