"""The config tables: they return what they promise, and it fits the machine."""

from __future__ import annotations

import itertools
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flash4_torch.backends.compiled.forward import mask_plan
from flash4_torch.configs import (
    decode,
    decode_shares,
    packing,
    sm80,
    sm80_backward,
    sm90,
    sm90_backward,
    sm100,
    sm100_backward,
    sm103,
)
from flash4_torch.configs.decode_shares import Work
from flash4_torch.configs.sizes import BackwardSizes, Sizes
from flash4_torch.configs.types import Features, Mods, Sm80Forward

HEAD_DIMS = range(8, 257, 8)
BARE = Features("bfloat16", 64, 64)


@st.composite
def features(draw: st.DrawFn) -> Features:
    flag = st.booleans()
    dim = st.sampled_from(HEAD_DIMS)
    D = draw(dim)
    return Features(
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        D=D,
        Dv=draw(st.one_of(st.just(D), dim)),
        varlen=draw(flag),
        left=draw(flag),
        right=draw(flag),
        softcap=draw(flag),
        scaled=draw(flag),
        mask=draw(st.sampled_from(["", "bool", "bfloat16", "float16", "float32"])),
        dropout=draw(flag),
    )


SIZES = st.one_of(
    st.integers(1, 300), st.sampled_from([512, 1024, 2048, 4096, 16384]), st.integers(1, 1 << 30)
)
TABLES = {"sm80": sm80.LARGE, "sm86": sm80.SMALL, "sm90": sm90, "sm100": sm100, "sm103": sm103}
EACH_TABLE = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
GROUPS = st.one_of(st.integers(1, 8), st.integers(1, 200))


@EACH_TABLE
@given(features(), SIZES, SIZES, GROUPS, st.one_of(st.none(), SIZES), st.booleans())
@settings(max_examples=300)
def test_what_is_chosen_is_reachable(
    table: ModuleType,
    features: Features,
    Sq: int,
    Sk: int,
    group: int,
    seen: int | None,
    end_masked: bool,
) -> None:
    if table.limits(features):
        return
    config = table.forward(features, Sizes(Sq, Sk, group, seen, end_masked))
    assert config in table.reachable(features)
    assert config in table.reachable(features, group)
    ends_inside = not (end_masked and features.right) and (features.varlen or Sk % config.keys != 0)
    # Some kernels by mma.sync are there once, whether Sk fills their blocks or not.
    is_one = config.ragged_k and isinstance(config, Sm80Forward)
    assert config.ragged_k == ends_inside or is_one
    if table is sm90:
        assert not (config.next_tile and (config.half_block or features.left or features.mask))
    if table is sm103:
        assert config.polynomial == 0


@EACH_TABLE
@given(features())
@settings(max_examples=100)
def test_reachable_names_nothing_twice(table: ModuleType, features: Features) -> None:
    if table.limits(features):
        return
    configs = table.reachable(features)
    assert len(set(configs)) == len(configs)
    assert set(table.reachable(features, 1)) <= set(configs)


@EACH_TABLE
def test_head_sizes_have_a_limit(table: ModuleType) -> None:
    assert not any(table.limits(BARE._replace(D=D, Dv=Dv)) for D in HEAD_DIMS for Dv in HEAD_DIMS)
    most = 512 if isinstance(table, sm80.Table) else 256
    for D, Dv in ((most + 1, 64), (64, most + 8)):
        (reason,) = table.limits(BARE._replace(D=D, Dv=Dv))
        assert reason == f"D is {D} and Dv is {Dv}, and it serves up to {most}"


@pytest.mark.parametrize(
    "table", [sm80.LARGE, sm80.SMALL, sm90, sm100], ids=["sm80", "sm86", "sm90", "sm100"]
)
@pytest.mark.parametrize(
    "extras", [{}, {"mask": "float32", "softcap": True, "scaled": True, "dropout": True}]
)
def test_there_are_tiles_that_fit_for_every_call(extras: dict[str, object], table: ModuleType) -> None:
    for D, Dv, right in itertools.product(HEAD_DIMS, HEAD_DIMS, (False, True)):
        features = BARE._replace(D=D, Dv=Dv, right=right, **extras)
        for Sq, Sk in ((1, 1), (1, 1 << 30), (1 << 30, 1), (1 << 30, 1 << 30)):
            config = table.forward(features, Sizes(Sq, Sk))
            assert table.fits(features, config), (features, config)
            assert config.keys % 16 == 0 and config.keys <= 256


WIDE = {"D": (264, 384, 512), "uses": ({}, {"dropout": True}, {"mask": "float32", "softcap": True})}
FLOAT32 = {
    "D": (8, 64, 72, 128, 192, 256),
    "uses": ({}, {"dropout": True}, {"mask": "float32", "scaled": True}, {"mask": "bool", "dropout": True}),
}


@pytest.mark.parametrize("table", [sm80.LARGE, sm80.SMALL], ids=["sm80", "sm86"])
@pytest.mark.parametrize("cases", [WIDE, FLOAT32], ids=["wide", "float32"])
def test_what_is_not_limited_has_tiles_that_fit(cases: dict[str, Any], table: sm80.Table) -> None:
    for D, uses, tf32 in itertools.product(cases["D"], cases["uses"], (False, True)):
        features = BARE._replace(D=D, Dv=D, **uses)
        if cases is FLOAT32:
            features = features._replace(dtype="float32", tf32=tf32)
        if limits := table.limits(features):
            assert cases is FLOAT32 and D > 192 and table is sm80.SMALL, limits
            continue
        for Sq in (1, 1 << 30):
            assert table.fits(features, table.forward(features, Sizes(Sq, 4096))), features
        assert all(table.fits(features, config) for config in table.reachable(features))


BACKWARDS = {"sm80": sm80_backward.LARGE, "sm86": sm80_backward.SMALL, "sm90": sm80_backward.ON_REQUEST}
"""The backward's tables by mma.sync, by an architecture of each."""


@pytest.mark.parametrize("table", [*BACKWARDS.values()], ids=BACKWARDS)
@pytest.mark.parametrize("tf32", [False, True])
def test_gradients_of_float32_have_tiles_that_fit(tf32: bool, table: sm80_backward.Table) -> None:
    # What is exact has no registers for 16 keys.
    most = 256 if table is not sm80_backward.SMALL else 192 if tf32 else 128
    for D, uses in itertools.product((8, 64, 72, 128, 136, 192, 200, 256, 264), FLOAT32["uses"]):
        features = BARE._replace(dtype="float32", tf32=tf32, D=D, Dv=D, **uses)
        limits = table.limits(features)
        # Two warps have no registers for float32 masks.
        is_masked = most == 192 and 128 < D <= most and features.float_mask
        assert bool(limits) == (D > most or is_masked), limits
        if limits:
            does = "serves gradients of float32 up to" if D > most else "has no room for gradients of so many"
            assert does in limits[0] and limits[0].startswith(f"D is {D} and Dv is {D}, and ")
        else:
            assert sm80_backward.fits(features, table.config(features), table.memory(features))


@pytest.mark.parametrize("table", [*BACKWARDS.values()], ids=BACKWARDS)
def test_gradients_of_wide_heads_have_tiles_that_fit(table: sm80_backward.Table) -> None:
    """Only floating masks at the widest ones have no room, next to tiles of 98 KiB."""
    small = table is sm80_backward.SMALL
    for (D, Dv), uses, ordered in itertools.product(
        ((264, 264), (320, 8), (8, 384), (512, 264), (512, 512)), WIDE["uses"], (False, True)
    ):
        features = BARE._replace(D=D, Dv=Dv, deterministic=ordered, **uses)
        limits = table.limits(features)
        assert bool(limits) == (small and D == Dv == 512 and features.float_mask), limits
        if not limits:
            for config in table.reachable(features):
                assert config.shared_memory(features) <= table.memory(features)
    assert "serves up to 512" in table.limits(BARE._replace(Dv=520))[0]


@given(features(), st.booleans(), st.sampled_from([100, 192, 4096]))
@example(BARE, True, 100)
@example(BARE._replace(right=True), True, 4096)
@example(BARE._replace(dropout=True), False, 4096)
@settings(max_examples=200)
def test_parts_of_queries_leave_room_for_two_ctas(features: Features, deterministic: bool, Sk: int) -> None:
    """Each CTA takes a KiB of an SM's 164 for itself. Only the loop has registers for a band."""
    features = features._replace(deterministic=deterministic, D=min(features.D, 64), Dv=min(features.Dv, 64))
    for table in (sm80_backward.LARGE, sm80_backward.SMALL):
        config = table.backward(features, BackwardSizes(Sk))
        assert config in table.reachable(features)
        if config.query_parts > 1:
            assert 2 * (config.shared_memory(features) + 1024) <= 164 * 1024
            f = features
            assert config.scores_by_parts == (f.left or f.right or f.varlen or f.dropout)
            assert config.ragged_k or config.scores_by_parts


def test_every_row_serves_somebody() -> None:
    """A row that others shadow would misstate what runs."""
    served: set[sm90.Row] = set()
    every: dict[str, object] = {"mask": "float32", "softcap": True, "dropout": True}
    capped: dict[str, object] = {"mask": "bool", "softcap": True}
    extras = ({}, {"mask": "bool"}, capped, {"mask": "float32"}, {"dropout": True}, every, {"D": 64})
    pages = tuple({"varlen": True, "page_box": box, **D} for box in (16, 32, 64) for D in ({}, {"D": 64}))
    sizes = [*itertools.product((1, 100, 200, 4096), (256, 1024, 4096, 16384), (1, 8, 99))]
    sizes += [(50, 64, 8), (100, 128, 8), (150, 192, 8)]
    for row, right, extra, (Sq, Sk, heads) in itertools.product(
        sm90.TABLE, (False, True), (*extras, *pages), sizes
    ):
        features = BARE._replace(**{"D": row.D, "Dv": row.Dv, "right": right, **extra})
        served.add(sm90.row(features, Sizes(Sq, Sk, heads=heads, num_sms=132)))
    assert served == set(sm90.TABLE)


@given(features(), SIZES, SIZES, GROUPS, st.integers(1, 1 << 20), st.integers(1, 200))
@settings(max_examples=300)
def test_rows_for_few_tiles_have_other_warpgroups(
    features: Features, Sq: int, Sk: int, group: int, heads: int, num_sms: int
) -> None:
    sizes = Sizes(Sq, Sk, group, heads=heads, num_sms=num_sms)
    row, rows = sm90.row(features, sizes), packing.rows_that_share_keys(features, sizes)
    admitting = [
        r
        for r in sm90.TABLE
        if r.admits_features(features)
        and (r.keys is None or Sk <= r.keys)
        and (not r.short or rows <= next(each for each in sm90._BOUNDS if Sk <= each))
    ]
    many = next(r for r in admitting if not r.few)
    assert row in admitting and (row is many or row.config.warpgroups != many.config.warpgroups)
    if Sq * packing.cover(group) <= 64 and Sk >= 512:
        assert row.config.warpgroups == min(r.config.warpgroups for r in admitting)


def sm90_rows(D: int, right: bool, Sq: int, Sk: int, heads: int, group: int) -> int:
    features = BARE._replace(D=D, Dv=D, right=right)
    return sm90.forward(features, Sizes(Sq, Sk, group, None, right, heads, 132)).rows


@pytest.mark.parametrize(
    ("D", "right", "Sq", "Sk", "heads", "group", "rows"),
    [
        (128, True, 512, 8192, 8, 4, 128),  # 128 tiles of 128 rows, or 96 of 192
        (128, True, 768, 8192, 8, 4, 192),  # 192 tiles of 128 rows, or 128 of 192
        (128, False, 1024, 8192, 2, 4, 64),  # 128 tiles of 64 rows
        (128, True, 2048, 2048, 4, 1, 64),
        (128, True, 2048, 2048, 32, 1, 128),
        (64, False, 2048, 8192, 4, 4, 128),
        (64, True, 1024, 1024, 8, 1, 64),
        (96, False, 384, 384, 64, 1, 192),
        (256, False, 1024, 1024, 8, 1, 64),
        (256, False, 1024, 1024, 16, 1, 128),
    ],
)
def test_few_tiles_that_were_measured_take_what_won_there(
    D: int, right: bool, Sq: int, Sk: int, heads: int, group: int, rows: int
) -> None:
    assert sm90_rows(D, right, Sq, Sk, heads, group) == rows


@pytest.mark.parametrize("table", [sm80.LARGE, sm80.SMALL], ids=["sm80", "sm86"])
def test_every_row_by_mma_sync_serves_somebody(table: sm80.Table) -> None:
    extras: tuple[dict[str, object], ...] = (
        {},
        {"dropout": True},
        {"dropout": True, "mask": "bool"},
        {"mask": "float32", "scaled": True},
        {"mask": "float32", "scaled": True, "softcap": True, "dropout": True},
    )
    for of_dtype, rows in (
        ((BARE,), table.rows),
        ([BARE._replace(dtype="float32", tf32=tf32) for tf32 in (False, True)], table.float32),
    ):
        heads = [(row.D, row.Dv) for row in rows]
        kinds = [
            bare._replace(D=D, Dv=Dv, **extra)
            for bare, (D, Dv), extra in itertools.product(of_dtype, heads, extras)
        ]
        asked = itertools.product((f for f in kinds if not table.limits(f)), (1, 4096))
        assert {table.row(f, Sizes(Sq, 4096)) for f, Sq in asked} == set(rows)


def test_every_row_for_blackwell_serves_somebody() -> None:
    heads = [(row.D, row.Dv) for row in sm100.TABLE]
    served = {
        next(
            row
            for row in sm100.TABLE
            if row.admits_features(BARE._replace(D=D, Dv=Dv, **uses)) and row.admits_sizes(rows, rows)
        )
        for D, Dv in [*heads, *((Dv, D) for D, Dv in heads), (64, 256)]
        for uses in ({}, {"right": True}, {"mask": "bool"})
        for rows in (1, 128, 4096)
    }
    assert served == set(sm100.TABLE)


def test_dropout_takes_no_polynomial_beside_one_tile() -> None:
    features, many = BARE._replace(D=256, Dv=256, dropout=True), Sizes(4096, 4096)
    assert sm100.forward(features, many).polynomial == 0 < sm100.forward(BARE, many).polynomial
    assert {c.polynomial > 0 for c in sm100.reachable(features)} == {False}


def test_a_why_is_one_line() -> None:
    """What was measured for a row stands in the NOTES; a why is a sentence that fits beside it."""
    rows = [row for table in (sm90, sm100, sm90_backward, sm100_backward) for row in table.TABLE]
    assert not [row.why for row in rows if not 0 < len(row.why) <= 120]


@EACH_TABLE
@given(st.integers(1, 300), GROUPS, st.booleans())
def test_packing_never_costs_tiles(table: ModuleType, Sq: int, group: int, right: bool) -> None:
    config = table.forward(BARE._replace(right=right), Sizes(Sq, 1024, group))
    tiles = -(-group // config.pack_gqa) * -(-Sq * config.pack_gqa // config.rows)
    assert tiles <= group * -(-Sq // config.rows)
    assert config.pack_gqa in (1, 2, 4, 8, 16, 32, 64) and config.pack_gqa < 2 * group
    if Sq >= config.rows:
        assert config.pack_gqa == 1


@EACH_TABLE
def test_heads_with_dropout_are_not_packed(table: ModuleType) -> None:
    assert table.forward(BARE, Sizes(1, 1024, 8)).pack_gqa == 8
    assert table.forward(BARE._replace(dropout=True), Sizes(1, 1024, 8)).pack_gqa == 1


LISTS: list[dict[str, Any]] = [
    {"mask": "bool"},
    {"mask": "float32", "scaled": True},
    {"mods": Mods(blocks="rows")},
]


@EACH_TABLE
@given(group=GROUPS, Sq=SIZES, lists=st.sampled_from(LISTS))
def test_heads_that_share_a_mask_tile_divide_the_group(
    table: ModuleType, group: int, Sq: int, lists: dict[str, Any]
) -> None:
    """A mask's tables have heads of a tile side by side, and no tile has heads of two groups."""
    assert group % table.forward(BARE._replace(**lists), Sizes(Sq, 1024, group)).pack_gqa == 0


@pytest.mark.parametrize(
    "extra", [{"varlen": True}, {"mask": "bool"}, {"dropout": True}], ids=["varlen", "mask", "dropout"]
)
def test_clusters_are_for_many_plain_tiles(extra: dict[str, object]) -> None:
    """Clusters need tiles of one sequence with the same blocks, and so many that an odd one hardly counts."""
    wide = BARE._replace(D=256, Dv=256)
    assert sm90.forward(wide, Sizes(8192, 8192)).cluster == 2
    assert {sm90.forward(wide, Sizes(Sq, 8192)).cluster for Sq in (1, 1000)} == {1}
    assert sm90.forward(wide._replace(**extra), Sizes(8192, 8192)).cluster == 1


def test_a_window_counts_as_few_keys() -> None:
    features = BARE._replace(left=True, right=True)
    assert sm90.forward(features, Sizes(1 << 14, 1 << 14, seen=256)) == sm90.forward(
        features, Sizes(1 << 14, 256)
    )


@pytest.mark.parametrize(
    ("D", "right", "S", "rows", "keys"),
    [
        (64, False, 256, 256, 64),
        (64, True, 1024, 256, 64),
        (64, True, 4096, 192, 128),
        (64, False, 16384, 192, 128),
        (128, False, 2048, 128, 128),
        (128, True, 1024, 128, 128),
        (128, True, 2048, 128, 128),
        (128, False, 4096, 192, 80),
    ],
)
def test_measured_cells_take_the_tiles_that_won_there(
    D: int, right: bool, S: int, rows: int, keys: int
) -> None:
    config = sm90.forward(BARE._replace(D=D, Dv=D, right=right), Sizes(S, S))
    assert (config.rows, config.keys) == (rows, keys)


@pytest.mark.parametrize("table", [sm90, sm100], ids=["sm90", "sm100"])
def test_the_kernel_agrees_that_it_can_run_every_config(table: ModuleType) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    Plan = import_module(f"flash4_torch.kernels.{table.__name__.rpartition('.')[2]}.fwd.plan").Plan

    masks = ("", "bool", "float32")
    for D, Dv, *flags, mask in itertools.product(
        HEAD_DIMS[::3], HEAD_DIMS[1::3], *[(False, True)] * 5, masks
    ):
        uses = dict(zip(("varlen", "left", "right", "softcap", "dropout"), flags, strict=True))
        features = BARE._replace(D=D, Dv=Dv, mask=mask, scaled=uses["softcap"], **uses)
        for config in [] if table.limits(features) else table.reachable(features):
            plan = Plan(features, config)
            plan.check()
            # The host sizes and fills by this plan the tables that the kernel reads.
            assert plan.mask == mask_plan(mask, config)


@given(SIZES, GROUPS, st.sampled_from([decode.ROWS, (64,), (64, 128)]))
def test_decode_tiles_hold_the_rows_of_few_tokens(
    max_seqlen_q: int, group: int, choice: tuple[int, ...]
) -> None:
    rows, needed = decode.rows(max_seqlen_q, group, choice), max_seqlen_q * group
    assert rows in choice
    assert rows == choice[-1] if needed > choice[-1] else needed <= rows < max(2 * needed, choice[0] + 1)


DECODE_GPUS = (decode.HOPPER, decode.AMPERE, decode.GA102, decode.ADA)


@given(st.integers(8, 256), st.integers(8, 256), st.sampled_from(decode.ROWS), st.sampled_from(DECODE_GPUS))
def test_decode_has_stages_and_room_for_them(D: int, Dv: int, rows: int, gpu: decode.Gpu) -> None:
    """Blocks in flight are as many as the GPU needs, and stages fit into what a CTA may have."""
    stage_bytes, q_bytes = 2 * decode.KEYS * (D + Dv), 2 * rows * D
    sizes = gpu, rows, stage_bytes, q_bytes
    stages, ctas = decode.stages(*sizes), decode.ctas_per_sm(*sizes)
    assert stages >= gpu.least_stages
    # 65536 registers, and up to 255 a thread.
    assert ctas * 128 * 255 <= 65536
    assert ctas * (stages * stage_bytes + q_bytes + 1024) <= gpu.smem_bytes + 1024


@given(*(st.integers(1, 16) for _ in range(2)), st.sampled_from(DECODE_GPUS), st.booleans(), st.booleans())
def test_decode_tiles_have_no_more_rows_for_what_takes_more_registers(
    D: int, Dv: int, gpu: decode.Gpu, paged: bool, groups: bool
) -> None:
    """Wider heads, FP8 numbers and keys without runs; tiles of 16 rows serve all."""

    def rows(more: int = 0, runs: bool = True, cache_dtype: str = "") -> tuple[int, ...]:
        features = BARE._replace(D=16 * D, Dv=min(16 * (Dv + more), decode.MAX_D))
        form = decode.DecodeForm(paged, 1, True, True, cache_dtype=cache_dtype, runs=runs, gpu=gpu)
        return decode.rows_of(features, form._replace(groups=groups and gpu.has_clusters))

    for cache_dtype in ("", decode.FP8):
        for runs in (False, True):
            own = rows(0, runs, cache_dtype)
            assert decode.ROWS[0] in own and own == decode.ROWS[: len(own)]
            assert set(rows(3, runs, cache_dtype)) <= set(own) <= set(rows(0, True, cache_dtype))
            assert set(own) <= set(rows(0, runs))


@given(
    *(st.integers(1, 16) for _ in range(2)),
    st.sampled_from((*decode.ROWS, decode.SHARED_ROWS)),
    st.sampled_from(DECODE_GPUS),
    st.sampled_from(["", decode.FP8]),
    st.booleans(),
)
def test_the_decode_kernel_agrees_that_it_has_stages(
    D: int, Dv: int, rows: int, gpu: decode.Gpu, cache_dtype: str, groups: bool
) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    plan = import_module("flash4_torch.kernels.decode.plan").DecodePlan
    features = BARE._replace(D=16 * D, Dv=16 * Dv)
    form = decode.DecodeForm(True, 1, True, True, cache_dtype=cache_dtype, groups=groups, gpu=gpu)
    form = form._replace(wgmma=rows > decode.ROWS[-1])
    for cluster in gpu.clusters:
        own = form._replace(cluster=cluster)
        if rows in decode.rows_of(features, own):
            sizes = () if groups else {decode.KEYS, *decode.block_keys(features, own, rows)}
            more = (own._replace(keys=keys) for keys in sizes)
            for each in {decode.with_blocks(features, own, rows), *more}:
                found = plan(features, rows, each)
                assert found.stages >= gpu.least_stages
                used = found.stages * found.stage_bytes + found.other_bytes
                assert found.ctas_per_sm * (used + 1024) <= gpu.smem_bytes + 1024


@given(
    *(st.integers(1, 16) for _ in range(2)),
    st.sampled_from((*decode.ROWS, decode.SHARED_ROWS)),
    st.sampled_from(DECODE_GPUS),
    st.sampled_from(["", decode.FP8]),
    *(st.booleans() for _ in range(3)),
)
def test_decode_has_room_for_the_blocks_that_it_chooses(
    D: int, Dv: int, rows: int, gpu: decode.Gpu, cache_dtype: str, groups: bool, wgmma: bool, has_many: bool
) -> None:
    """The keys of a block do not depend on the batch where bits must not."""
    features = BARE._replace(D=16 * D, Dv=16 * Dv)
    form = decode.DecodeForm(
        True, 1, True, True, cache_dtype=cache_dtype, groups=groups, wgmma=wgmma, gpu=gpu
    )
    found = decode.with_blocks(features, form, rows, has_many)
    assert found.keys in {decode.KEYS, *decode.block_keys(features, form, rows)}
    assert wgmma or not found.q_in_regs
    if groups:
        assert found._replace(q_in_regs=False, group_in_regs=False) == form


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(["", decode.FP8, "float8_e5m2"]))
def test_decode_states_its_limits(D: int, Dv: int, cache_dtype: str) -> None:
    """Rows of the cache are whole vectors of 16 bytes, of at most 256 numbers."""
    form = decode.DecodeForm(True, 8, True, True, cache_dtype=cache_dtype)
    number = 1 if cache_dtype else 2
    served = max(D, Dv) <= 256 and D * number % 16 == Dv * number % 16 == 0 and cache_dtype != "float8_e5m2"
    assert bool(decode.limits(BARE._replace(D=D, Dv=Dv), form)) != served


@st.composite
def works(draw: st.DrawFn) -> Work:
    """What decoding on some GPU has to do."""
    features = BARE._replace(
        D=draw(st.sampled_from([64, 128, 256])), Dv=draw(st.sampled_from([64, 128, 256]))
    )
    cache_dtype, gpu = draw(st.sampled_from(["", decode.FP8])), draw(st.sampled_from(DECODE_GPUS))
    form = decode.DecodeForm(True, 1, True, True, cache_dtype=cache_dtype, gpu=gpu)
    rows, sms = draw(st.sampled_from((*decode.ROWS, decode.SHARED_ROWS))), draw(st.integers(8, 200))
    return decode_shares.work_of(features, form, rows, draw(SIZES), draw(SIZES), sms)


@given(works())
def test_decode_splits_run_at_once_and_are_long_enough(work: Work) -> None:
    """No CTA of a tile that is split waits for others' end, and each has blocks enough."""
    splits, cluster, parts, _ = decode_shares.even_shares(work)
    assert (parts - 1) * cluster < splits <= parts * cluster and cluster in work.gpu.clusters
    assert (cluster == 1) == (splits == 1) or not work.gpu.has_clusters
    assert splits == 1 or splits * decode.LEAST_BLOCKS <= work.blocks
    ctas = decode.CTAS_PER_SM if work.rows < decode.SHARED_ROWS else 1
    assert splits == 1 or parts * cluster * work.tiles <= ctas * work.num_sms


@given(works(), st.integers(1, 1000))
def test_decode_takes_the_number_of_splits_that_is_asked_for(work: Work, num_splits: int) -> None:
    splits, cluster, parts, _ = decode_shares.even_shares(work, num_splits)
    assert splits == num_splits and (parts - 1) * cluster < splits <= parts * cluster
    assert (cluster == 1) == (splits == 1) or not work.gpu.has_clusters


@given(works())
def test_groups_of_decode_hold_every_key(work: Work) -> None:
    """Their number follows from the length alone, and no cluster is without a group."""
    clusters, cluster, groups, _ = decode_shares.group_shares(work, work.gpu.clusters)
    keys = decode.GROUP * decode.SPLIT_KEYS
    assert (groups - 1) * keys < work.blocks * decode.KEYS <= groups * keys
    assert 1 <= clusters <= groups and cluster in work.gpu.clusters


@pytest.mark.parametrize(
    ("tiles", "keys", "least"), [(8, 16384, 100), (4, 65536, 100), (64, 4096, 120), (2, 4096, 60)]
)
def test_decode_keeps_an_h200_busy(tiles: int, keys: int, least: int) -> None:
    form = decode.DecodeForm(True, 1, True, True)
    work = decode_shares.work_of(BARE._replace(D=128, Dv=128), form, 16, tiles, keys, 132)
    assert decode_shares.even_shares(work).num_splits * tiles >= least


@given(
    st.integers(8, 256), st.integers(8, 256), st.sampled_from(["", decode.FP8]), st.sampled_from(DECODE_GPUS)
)
def test_clusters_that_share_groups_have_room_for_them(
    D: int, Dv: int, cache_dtype: str, gpu: decode.Gpu
) -> None:
    features, whole = (
        BARE._replace(D=D, Dv=Dv),
        decode.DecodeForm(True, gpu.clusters[-1], True, True, cache_dtype=cache_dtype, gpu=gpu),
    )
    rows = decode.group_rows(features, whole)
    assert rows and rows[0] == decode.ROWS[0]
    for size in gpu.clusters:
        offered = decode.rows_of(features, whole._replace(groups=True, cluster=size))
        # What fits with more CTAs, which keep fewer splits each, or with fewer rows, fits as well.
        assert offered == rows[: len(offered)]
        assert (
            size == 1
            or size == 8
            or set(offered) <= set(decode.rows_of(features, whole._replace(groups=True)))
        )
