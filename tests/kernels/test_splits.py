"""Splits of keys where a call has few tiles: how many are chosen, and what the host makes of them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from importlib import import_module, resources
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flash4_torch
import on_cpu
from everything import examples, one_of
from flash4_torch import testing
from flash4_torch.backends.compiled import SM90A
from flash4_torch.configs import sm80_splits, sm90, sm90_splits, sm100_splits
from flash4_torch.configs.sizes import Sizes
from flash4_torch.configs.splits import Split, Splits
from flash4_torch.configs.types import SHARED_MEMORY, Features, Mods
from flash4_torch.flex.attention import traced
from flash4_torch.problem import CallOptions
from kernel_calls import Results, check_results, drawn
from paged_calls import in_pages
from test_configs import GROUPS, SIZES, features
from test_paged_host import half, launch, problem_of

NUM_SMS = 132
BARE = Features("bfloat16", 64, 64)
HEADS = st.integers(1, 300)
TABLES: dict[str, Splits] = {
    "sm80": sm80_splits.LARGE,
    "sm86": sm80_splits.SMALL,
    "on request": sm80_splits.ON_REQUEST,
    "sm90": sm90_splits.SPLITS,
    "sm100": sm100_splits.SPLITS,
    "sm103": sm100_splits.SPLITS_OF_ULTRA,
}
EACH_TABLE = pytest.mark.parametrize("of", TABLES)


@st.composite
def features_of(draw: st.DrawFn, of: str) -> Features:
    """Features that a table has tiles for, of float32 too where it has."""
    drawn_ones = draw(features())
    if of not in ("sm90", "sm100", "sm103") and draw(st.booleans()):
        return drawn_ones._replace(dtype="float32", D=128, Dv=128, tf32=draw(st.booleans()))
    return drawn_ones


def may_be_split(of: str, features: Features) -> bool:
    """Whether a table splits such calls: Hopper has no registers for some floating masks of wide heads."""
    may_be_scarce = of == "sm90" and features.float_mask and max(features.D, features.Dv) > 128
    has_tiles = bool(TABLES[of].candidates(features)) if may_be_scarce else True
    return has_tiles and not features.dropout


def most_ctas(table: Splits, features: Features) -> int:
    """CTAs that run in so many waves as splits may take."""
    return max(NUM_SMS * tile.at_once * tile.most_waves for tile in table.candidates(features))


@EACH_TABLE
@given(st.data(), SIZES, SIZES, GROUPS, st.one_of(st.none(), SIZES), st.booleans(), HEADS)
@settings(max_examples=examples(30, 300))
def test_what_is_chosen_is_reachable(
    of: str,
    data: st.DataObject,
    Sq: int,
    Sk: int,
    group: int,
    seen: int | None,
    end_masked: bool,
    heads: int,
) -> None:
    table = TABLES[of]
    features = data.draw(features_of(of))
    sizes = Sizes(Sq, Sk, group, seen, end_masked, heads, NUM_SMS)
    split = table.split(features, sizes)
    if split is None:
        return
    assert features.may_be_split and split.config in table.reachable(features, group)
    assert set(table.reachable(features, group)) <= set(table.reachable(features))
    # No split of the longest tile is empty, and all of them run in two waves at most.
    tiles, blocks = -(-Sq // split.config.queries) * heads, -(-Sk // split.config.keys)
    assert 1 < split.number <= blocks and tiles * split.number <= most_ctas(table, features)


@EACH_TABLE
@given(st.data(), SIZES, SIZES, GROUPS, st.integers(1, 1 << 30), HEADS)
@settings(max_examples=examples(30, 60))
def test_a_number_that_is_asked_for_is_taken_as_far_as_there_is_room(
    of: str, data: st.DataObject, Sq: int, Sk: int, group: int, number: int, heads: int
) -> None:
    """Results of splits take no more memory than where the number is chosen."""
    table = TABLES[of]
    features = data.draw(features_of(of))
    sizes = Sizes(Sq, Sk, group, None, True, heads, NUM_SMS, number)
    split = table.split(features, sizes)
    if split is not None:
        tiles, blocks = -(-Sq // split.config.queries) * heads, -(-Sk // split.config.keys)
        assert 1 < split.number <= min(number, blocks)
        assert tiles * split.number <= most_ctas(table, features)
    few = sizes._replace(Sq=1, Sk=1 << 17, group=1, heads=2, num_splits=5)
    found = table.split(features, few)
    assert may_be_split(of, features) == (found is not None) and (found is None or found.number == 5)


@EACH_TABLE
@given(st.data())
@settings(max_examples=examples(30, 60))
def test_calls_with_dropout_are_not_split(of: str, data: st.DataObject) -> None:
    table = TABLES[of]
    features = data.draw(features_of(of))
    sizes = Sizes(1, 1 << 17, end_masked=True, heads=1, num_sms=NUM_SMS)
    assert (table.split(features, sizes) is not None) == may_be_split(of, features)
    assert bool(table.reachable(features)) == may_be_split(of, features)
    assert table.split(features, sizes._replace(heads=None)) is None
    for more in ({"running": "add"}, {"segments": True, "varlen": True}):
        assert table.split(features._replace(**more), sizes) is None


def test_columns_that_warps_share_are_not_split() -> None:
    """O of wide heads has no way to memory in float32."""
    for table in (sm80_splits.LARGE, sm80_splits.SMALL):
        wide = BARE._replace(D=320, Dv=320)
        assert table.reachable(wide) == () and table.split(wide, Sizes(1, 1 << 17, heads=1)) is None


@EACH_TABLE
def test_the_kernel_agrees_that_it_can_run_every_config(of: str) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    heads, flags = range(8, 257, 56), itertools.product(*[(False, True)] * 4, ("", "bool", "float32"))
    for D, Dv, (varlen, left, right, softcap, mask) in itertools.product(heads, heads, flags):
        own = BARE._replace(D=D, Dv=Dv, varlen=varlen, left=left, right=right, softcap=softcap)
        own = own._replace(mask=mask, scaled=softcap or mask == "float32")
        for page_box in (0, 16, 64) if varlen and not mask else (0,):
            for config in TABLES[of].reachable(own._replace(page_box=page_box)):
                kind = type(config).__name__.removesuffix("Forward").lower()
                Plan = import_module(f"flash4_torch.kernels.{kind}.fwd.plan").Plan
                if not page_box or (kind != "sm80" and config.keys % page_box == 0):
                    Plan(own._replace(page_box=page_box, splits=True), config).check()


def _measured(name: str, rows: str = "cells") -> list[dict[str, Any]]:
    results = resources.files("flash4_torch.bench") / "results" / f"{name}.json"
    return list(json.loads(results.read_text())[rows])


def test_measured_calls_take_what_won_there() -> None:
    """The choice is within a sixth; an H200 has run all rows and several numbers of splits of each."""
    for cell in _measured("splits-h200"):
        (Hq, Hk, D), B, Sq, Sk = cell["heads"], cell["B"], cell["Sq"], cell["Sk"]
        sizes = Sizes(Sq, Sk, Hq // Hk, end_masked=True, heads=B * Hk, num_sms=NUM_SMS)
        split = sm90_splits.SPLITS.split(BARE._replace(D=D, Dv=D, right=Sq > 1), sizes)
        name = "one" if split is None else f"{split.config.warpgroups} x {split.number}"
        times = {which: us for which, us in cell["us"].items() if which != "FlashAttention-3"}
        assert times[name] <= 1.17 * min(times.values()), (cell, name)


def test_measured_calls_by_mma_sync_take_nearly_what_won_there() -> None:
    """Single cells with 2k keys differ by a third, the mean of all by a hundredth."""
    shares = []
    for cell in _measured("splits-mma-sync-h200"):
        (Hq, Hk, D), B, Sq, Sk = cell["heads"], cell["B"], cell["Sq"], cell["Sk"]
        features = Features(cell["dtype"], D, D, tf32=cell["tf32"])
        split = sm80_splits.ON_REQUEST.split(features, Sizes(Sq, Sk, Hq // Hk, heads=B * Hk, num_sms=NUM_SMS))
        name = "one" if split is None else f"{split.config.rows} x {split.number}"
        assert name == cell["chosen"]
        own = {which: us for which, us in cell["us"].items() if which == "one" or which[0].isdigit()}
        shares.append(own[name] / min(own.values()))
        assert shares[-1] <= 1.32, (cell, name)
    assert sum(shares) / len(shares) <= 1.012


def test_measured_calls_next_to_functions_take_nearly_what_won_there() -> None:
    """One query: softcap, and a table of a number for each score."""
    q, table = torch.empty(1, 1, 2, 64), torch.ones(64)
    bias = traced(q, q, lambda s, b, h, i, j: s + table[(i - j).clamp(0, 63)], None).score_mod
    own: dict[str, dict[str, Any]] = {
        "cap": {"softcap": True, "scaled": True},
        "bias": {"mods": Mods(bias), "scaled": True},
    }
    shares = []
    for cell in _measured("flex-few-queries-h200", "one_query"):
        (Hq, Hk, D), B, Sk, us = cell["heads"], cell["B"], cell["Sk"], cell["us"]
        if cell["kind"] in own:
            sizes = Sizes(1, Sk, Hq // Hk, heads=B * Hk, num_sms=NUM_SMS)
            split = sm90_splits.SPLITS.split(Features("bfloat16", D, D, **own[cell["kind"]]), sizes)
            assert split is not None
            name, ctas = "chosen", B * Hk * split.number
            if split.config.at_once == 2:
                factor = min((0.5, 1.0, 2.0), key=lambda x: abs(ctas - 2 * NUM_SMS * x))
                name = f"{split.config.keys}x{split.config.kv_stages} {factor}"
            elif cell["chosen"] != [split.config.keys, split.number]:
                continue
            shares.append(us[name] / min(us.values()))
    assert len(shares) > 20 and max(shares) <= 1.17 and sum(shares) / len(shares) <= 1.03


def test_two_ctas_fit_on_an_sm() -> None:
    """An SM has 1 KiB more than a CTA may have, and takes as much from each."""
    for D, blocks in itertools.product((64, 96, 128, 192, 256), ("", "rows", "scores")):
        own = Features("bfloat16", D, D, mods=Mods(blocks=blocks, bounds="table"))
        (tile,) = sm90_splits.SPLITS.candidates(own)
        assert tile.at_once == tile.row.config.at_once == (2 if D <= 128 else 1)
        assert tile.at_once * (tile.row.config.shared_memory(own) + 1024) <= SHARED_MEMORY + 1024


CALLS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (2500, 0)},
    "sinks": {"causal": True, "sinks": torch.tensor([0.5, 3.0, -float("inf"), 1.0])},
    "softcap": {"softcap": 3.0},
    "float mask": {"attn_mask": 9.0 * torch.randn(1, 4, 1, 3000, generator=torch.Generator().manual_seed(1))},
    "bool mask": {"attn_mask": torch.arange(3000) % 7 > torch.arange(3)[:, None, None, None].transpose(0, 2)},
}


def _tensors(Sq: int = 3, Sk: int = 3000) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((Sq, 4), (Sk, 2), (Sk, 2))
    return [torch.randn(2, S, H, 64, generator=generator).bfloat16() for S, H in sizes]


@pytest.mark.parametrize("name", CALLS)
def test_any_path_splits_and_merges(name: str) -> None:
    """The first call takes the slow path, others a prepared launch; heads first or not, with gradients."""
    q, k, v = _tensors()
    exact = testing.reference(q, k, v, **CALLS[name], dtype=torch.float64)
    peer = testing.reference(q, k, v, **CALLS[name], dtype=torch.bfloat16)
    with on_cpu.gpu(SM90A) as machine:
        for _ in range(3):
            results = flash4_torch.attention(q, k, v, return_lse=True, **CALLS[name])
            for found, truth, plain in zip(results, exact, peer, strict=True):
                testing.assert_close_as_peer(found, truth, plain)
        if name == "causal":
            order = [x.transpose(1, 2) for x in (q[:, :1], k, v)]
            for _ in range(3):
                found = flash4_torch.scaled_dot_product_attention(*order, enable_gqa=True)
                one, plain = (
                    testing.reference(q[:, :1], k, v, dtype=t)[0] for t in (torch.float64, torch.bfloat16)
                )
                testing.assert_close_as_peer(found.transpose(1, 2), one, plain)
            for x in (q, k, v):
                x.requires_grad_()
            dout = torch.randn_like(q)
            exact, peer = (
                torch.autograd.grad(
                    testing.reference(q, k, v, causal=True, dtype=t)[0], (q, k, v), dout.to(t)
                )
                for t in (torch.float64, torch.bfloat16)
            )
            for _ in range(3):
                gradients = torch.autograd.grad(flash4_torch.attention(q, k, v, causal=True), (q, k, v), dout)
                for found, truth, plain in zip(gradients, exact, peer, strict=True):
                    testing.assert_close_as_peer(found, truth.double(), plain)
        assert all(launch.features.splits for launch in machine.launches)


def test_packed_sequences_are_split() -> None:
    q, k, v = (x.flatten(0, 1) for x in _tensors())
    ends_q, ends_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (3, 3000))
    call = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, "max_seqlen_q": 3, "max_seqlen_k": 3000}
    dense, _ = testing.reference(*_tensors(), causal=True, dtype=torch.float64)
    with on_cpu.gpu(SM90A) as machine:
        for _ in range(3):
            out = flash4_torch.attention_varlen(q, k, v, causal=True, **call)
            torch.testing.assert_close(out.double(), dense.flatten(0, 1), rtol=0.02, atol=0.02)
        assert all(launch.features.splits for launch in machine.launches)


class _Always:
    """A table that divides keys whatever the sizes."""

    reachable = staticmethod(sm90_splits.SPLITS.reachable)

    @staticmethod
    def split(features: Features, sizes: Sizes) -> Split:
        config = sm90_splits.SPLITS.reachable(features, 1)[0]
        return Split(sm90.row(features, sizes), config, 3)


def test_caches_are_split() -> None:
    """The kernel reads pages in the emulator, whatever is in memory before."""
    emulate = pytest.importorskip("flash4_torch.testing.emulate")
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from flash4_torch.backends.compiled import forward

    target = replace(SM90A, split_configs=_Always)
    kernel = forward.features_of(problem_of().problem)._replace(sinks="bfloat16"), None
    call = drawn(kernel, lengths=((30, 0, 90), (250, 33, 130)), right=0)
    out, lse = half(120, 2, 64).fill_(float("nan")), torch.full((2, 120), float("nan"))
    given = in_pages(call, 16, "heads", seed=1)
    with emulate.device(target.arch) as device:
        launch(target, given, CallOptions(0.125, window_right=0), out, lse)
    assert len(device.reports) == 2
    check_results(kernel, call, Results(out, lse))
    # Sequences with fewer queries are another launch's.
    own, own_lse = out.clone(), lse.clone()
    own[:30], own_lse[:, :30] = 7.0, 7.0
    with emulate.device(target.arch):
        launch(target, given, CallOptions(0.125, window_right=0), out.fill_(7.0), lse.fill_(7.0), 31)
    assert torch.equal(out, own) and torch.equal(lse, own_lse)


def test_results_of_every_split_are_aligned() -> None:
    """Whatever the number of rows, which the stand-in for the kernel looks at."""
    q, k, v = (torch.zeros(1, S, H, 64).bfloat16() for S, H in ((1, 3), (3000, 1), (3000, 1)))
    with on_cpu.gpu(SM90A) as machine:
        for _ in range(3):
            flash4_torch.attention(q, k, v)
        assert all(launch.features.splits for launch in machine.launches)


@pytest.mark.parametrize(
    "arch, dtype, name",
    one_of(
        2,
        [
            ("sm_90a", torch.bfloat16, "float mask"),
            ("sm_80", torch.float32, "bool mask"),
            ("sm_100a", torch.float16, "bool mask"),
            ("sm_86", torch.bfloat16, "sinks"),
            ("sm_103a", torch.bfloat16, "window"),
            ("sm_120a", torch.float32, "causal"),
        ],
    ),
)
def test_the_kernel_and_the_merge_run(
    monkeypatch: pytest.MonkeyPatch, arch: str, dtype: torch.dtype, name: str
) -> None:
    """A whole call in the emulator."""
    emulate = pytest.importorskip("flash4_torch.testing.emulate")
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    monkeypatch.setenv("FLASH4_BACKEND", "emulator")
    monkeypatch.setenv("FLASH4_ARCH", arch)
    q, k, v = (x.to(dtype) for x in _tensors())
    with emulate.device(arch) as device, testing.poisoned_memory():
        results = flash4_torch.attention(q, k, v, return_lse=True, **CALLS[name])
    *_, forward, merge = (report.kernel for report in device.reports)
    assert "forward_kernel" in forward and "merge_kernel" in merge
    exact, peer = (testing.reference(q, k, v, **CALLS[name], dtype=t) for t in (torch.float64, dtype))
    for found, truth, plain in zip(results, exact, peer, strict=True):
        testing.assert_close_as_peer(found, truth, plain)
