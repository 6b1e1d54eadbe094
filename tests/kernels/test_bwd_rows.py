"""The kernels before and after the backward's main one, in the emulator, against plain torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everything import examples, one_of
from flash4_torch.kernels.common.bwd.dq_blocks import DqBlocks, DqLanes
from flash4_torch.kernels.common.bwd.row_blocks import (
    GroupReducePlan,
    PostprocessPlan,
    PreprocessPlan,
    RowBlocks,
)
from row_order import blocks_of, ends_of, in_blocks, out_of_blocks, places

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from flash4_torch.kernels.aux_kernels.bwd_group_reduce import compile_group_reduce
from flash4_torch.kernels.aux_kernels.bwd_postprocess import compile_postprocess
from flash4_torch.kernels.aux_kernels.bwd_preprocess import compile_preprocess
from flash4_torch.testing import emulate

compiled_before = functools.cache(compile_preprocess)
compiled_behind = functools.cache(compile_postprocess)
compiled_sums = functools.cache(compile_group_reduce)

HEADS = ((64, 64), (128, 128), (96, 96), (40, 24), (8, 200), (80, 72))
WIDE = ((512, 512), (264, 352))
LENGTHS = st.one_of(st.sampled_from([1, 63, 64, 65, 127, 128, 129, 256]), st.integers(1, 300))


@st.composite
def sequences(draw: st.DrawFn, varlen: bool) -> list[int]:
    """Sequence lengths; the same for a whole batch if dense."""
    if not varlen:
        return [draw(LENGTHS)] * draw(st.integers(1, 2))
    few = st.lists(st.one_of(st.just(0), LENGTHS), min_size=1, max_size=4)
    many = st.lists(st.sampled_from([0, 1, 3, 70]), min_size=33, max_size=70)
    lengths = draw(st.one_of(few, many))
    return lengths if any(lengths) else [*lengths, 5]


def test_packed_sequences_have_room() -> None:
    """They have it also where each is one token longer than a multiple of the block."""
    for m in (32, 64, 128):
        for lengths in ([1, 1, 1], [0, 0, m], [m + 1] * 5, [m - 1, 1, 2 * m, 0, 3]):
            count, rows = places(RowBlocks(m, 64), lengths, varlen=True)
            assert len(rows.unique()) == sum(lengths) and rows.max() < count


@pytest.mark.parametrize(
    ("D", "Dv", "queries", "varlen"),
    [
        *one_of(13, [(*heads, *rest) for heads, *rest in product(HEADS, (64, 128), (False, True))]),
        *one_of(13, [(*heads, *rest) for heads, *rest in product(WIDE, (32, 64), (False, True))]),
    ],
)
@given(data=st.data())
@settings(max_examples=examples(3, 4))
def test_preprocess(D: int, Dv: int, queries: int, varlen: bool, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["float16" if queries == 64 else "bfloat16", "float32"]))
    with_dlse = turns_wanted = queries == 64
    negated = queries == 128
    float_mask = not varlen and data.draw(st.booleans())
    asked = varlen, with_dlse, turns_wanted, negated
    plan = PreprocessPlan(dtype, Dv, blocks_of(D, queries, negated), *asked, large_scores=float_mask)
    lengths = data.draw(sequences(varlen))
    Hq, generator = data.draw(st.integers(1, 3)), torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    shape = (sum(lengths), Hq) if varlen else (len(lengths), lengths[0], Hq)
    room = torch.randn((2, *shape[:-1], Hq + 1, Dv + 8), generator=generator).to(getattr(torch, dtype))
    out, dout = room[..., :Hq, :Dv]
    lse = torch.randn(*shape[:-2], Hq, shape[-2], generator=generator)
    lse[torch.rand(lse.shape, generator=generator) < 0.1] = -math.inf
    dlse = torch.randn(lse.shape, generator=generator) if with_dlse else None
    low = torch.randn(lse.shape, generator=generator) if float_mask else None

    count, at = places(plan.blocks, lengths, varlen)
    batch = lse.shape[:-1]
    stats = torch.full((plan.stats, *batch, count), math.nan)
    dq_acc = torch.full((*batch, count // queries, plan.blocks.floats), math.nan)
    dq_semaphore = torch.full((*batch, count // queries), -7, dtype=torch.int32) if turns_wanted else None
    ends = ends_of(lengths) if varlen else None
    heads_first = data.draw(st.booleans()) and not varlen
    rows = [x.transpose(1, 2) if heads_first else x for x in (out, dout)]
    work = stats, dq_acc, dq_semaphore
    launch(compiled_before, plan, *rows, lse, low, dlse, *work, ends, int(heads_first))

    delta = (out.double() * dout.double()).sum(-1).transpose(-1, -2)
    if dlse is not None:
        delta = delta - dlse
    sees = lse != -math.inf
    wanted = torch.zeros(stats.shape)
    wanted[0] = math.inf
    wanted[0][..., at] = torch.where(sees, lse * math.log2(math.e), math.inf)
    if low is not None:
        wanted[2] = math.inf
        wanted[2][..., at] = torch.where(sees, lse, math.inf)
        wanted[3][..., at] = torch.where(sees, low * math.log2(math.e), 0.0)
    wanted[1][..., at] = torch.where(sees, delta, 0.0).float()
    torch.testing.assert_close(-stats if negated else stats, wanted, rtol=1e-5, atol=1e-4)
    assert not dq_acc.any() and (dq_semaphore is None or not dq_semaphore.any())


@pytest.mark.parametrize(
    "of_sums",
    [
        DqLanes(80, 128),
        *(DqBlocks(80, m, groups) for m in (64, 128) for groups in (1, 2, 3)),
        *(
            DqBlocks(80, m, groups, by_register=True)
            for m, groups in ((32, 1), (32, 4), (64, 1), (64, 2), (128, 4))
        ),
    ],
    ids=str,
)
def test_both_descriptions_of_blocks_agree(of_sums: DqBlocks | DqLanes) -> None:
    queries, blocks = of_sums.queries, RowBlocks.of(of_sums)
    numbers = torch.arange(blocks.floats).view(queries, blocks.columns)
    (placed,) = in_blocks(blocks, numbers)
    assert torch.equal(out_of_blocks(blocks, placed[None]), numbers)
    for row in range(0, queries, 7):
        for column in range(blocks.columns):
            assert placed[of_sums.place(row, column)] == numbers[row, column]


@pytest.mark.parametrize(
    ("D", "Dv", "queries", "order", "varlen"),
    [
        *one_of(
            23,
            [
                (*heads, *rest)
                for heads, *rest in product(
                    HEADS, (64, 128), ("fragments", "lanes", "registers"), (False, True)
                )
            ],
        ),
        *one_of(
            11, [(*heads, *rest) for heads, *rest in product(WIDE, (32, 64), ("registers",), (False, True))]
        ),
    ],
)
@given(data=st.data())
@settings(max_examples=examples(2, 4))
def test_postprocess(D: int, Dv: int, queries: int, order: str, varlen: bool, data: st.DataObject) -> None:
    dtype = torch.bfloat16 if queries == 64 else torch.float16
    blocks = blocks_of(D, queries, order == "lanes", order == "registers")
    plan = PostprocessPlan(str(dtype).removeprefix("torch."), D, blocks, varlen)
    lengths = data.draw(sequences(varlen))
    Hq, generator = data.draw(st.integers(1, 3)), torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    count, at = places(plan.blocks, lengths, varlen)
    batch = (Hq,) if varlen else (len(lengths), Hq)
    sums = torch.randn(*batch, count, plan.blocks.chunks * 8, generator=generator)
    dq = torch.full((sum(lengths), Hq, D) if varlen else (*batch[:1], lengths[0], Hq, D), math.nan).to(dtype)
    ends = ends_of(lengths) if varlen else None
    heads_first = data.draw(st.booleans()) and not varlen
    seen = dq.transpose(1, 2) if heads_first else dq
    launch(compiled_behind, plan, in_blocks(plan.blocks, sums), seen, ends, 0.3, int(heads_first))
    assert torch.equal(dq, (sums[..., at, :D] * 0.3).to(dtype).transpose(-3, -2))


@pytest.mark.parametrize(
    ("D", "queries", "varlen"),
    one_of(3, [(*case, v) for case in ((64, 64), (40, 64), (136, 64), (192, 32)) for v in (False, True)]),
)
def test_sums_of_float32(D: int, queries: int, varlen: bool) -> None:
    """They are scaled and stored as float32; `DqBlocks.place` says where each lies."""
    sums_of_D = DqBlocks(D, queries, 2, by_register=True, step=32)
    blocks, lengths, Hq = RowBlocks.of(sums_of_D), [70, 70], 2
    plan = PostprocessPlan("float32", D, blocks, varlen)
    count, at = places(blocks, lengths, varlen)
    batch = (Hq,) if varlen else (len(lengths), Hq)
    numbers = torch.randn(*batch, count // queries, queries, blocks.columns)
    order = [sums_of_D.place(row, column) for row in range(queries) for column in range(blocks.columns)]
    assert sorted(order) == list(range(blocks.floats))
    sums = torch.empty(*batch, count // queries, blocks.floats)
    sums[..., order] = numbers.flatten(-2)
    dq = torch.full((sum(lengths), Hq, D) if varlen else (len(lengths), lengths[0], Hq, D), math.nan)
    launch(compiled_behind, plan, sums, dq, ends_of(lengths) if varlen else None, 0.3, 0)
    assert torch.equal(dq, (numbers.flatten(-3, -2)[..., at, :D] * 0.3).transpose(-3, -2))


@pytest.mark.parametrize(
    ("D", "Dv", "varlen"), one_of(5, [(*heads, v) for heads in HEADS for v in (False, True)])
)
@given(data=st.data())
@settings(max_examples=examples(2, 4))
def test_group_sums(D: int, Dv: int, varlen: bool, data: st.DataObject) -> None:
    """Groups are summed in order, in float32, and rounded once."""
    dtype = torch.bfloat16 if varlen else torch.float16
    plan = GroupReducePlan(str(dtype).removeprefix("torch."), D, Dv, varlen)
    lengths, group = data.draw(sequences(varlen)), data.draw(st.integers(1, 9))
    Hk, generator = data.draw(st.integers(1, 3)), torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    rows = (sum(lengths),) if varlen else (len(lengths), lengths[0])
    parts = [torch.randn(*rows, Hk * group, d, generator=generator).to(dtype) for d in (D, Dv)]
    # Gradients lie in memory as k and v do, which may have their heads first.
    swapped = (0, 1) if varlen else (1, 2)
    found = [torch.full((*rows, Hk, d), math.nan, dtype=dtype) for d in (D, Dv)]
    if data.draw(st.booleans()):
        found = [x.transpose(*swapped).contiguous().transpose(*swapped) for x in found]
    heads_first = data.draw(st.booleans()) and not varlen
    seen = [x.transpose(*swapped) if heads_first else x for x in (*parts, *found)]
    launch(compiled_sums, plan, *seen, int(heads_first))
    for sums, terms in zip(found, parts, strict=True):
        wanted = functools.reduce(torch.add, terms.unflatten(-2, (Hk, group)).float().unbind(-2))
        assert torch.equal(sums, wanted.to(dtype))


def launch(compiled: Callable[[Any], Any], plan: Any, *args: Any) -> None:
    """Runs a kernel, which raises for whatever the emulator finds wrong."""
    with emulate.device("sm_90a") as device:
        kernel = compiled(plan)
        with device.touching(*(x for x in args if isinstance(x, Tensor))):
            kernel(*args)
