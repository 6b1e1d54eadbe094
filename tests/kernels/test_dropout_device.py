"""Dropout in the kernels: the reference's mask, bit for bit, in every layout."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from flash4_torch.reference.dropout import Dropout, thresholds

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

from everything import one_of
from flash4_torch.emulator.device import as_device
from flash4_torch.kernels.common import dropout
from flash4_torch.testing import emulate

ARCHS = ("sm_90a", "sm_100a")
WARPS = 4
ROWS = 16 * WARPS
PROBABILITIES = (0.0, 0.001, 0.1, 0.25, 127.5 / 256, 0.5, 0.9, 255.5 / 256, 1.0 - 2**-53, 1.0)


@cute.jit
def keep_of_tile(
    rng_state: cute.Tensor,
    out: cute.Tensor,
    head: Int32,
    row: Int32,
    column: Int32,
    byte: Uint32,
    fraction: Uint32,
    transposed: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    tiles: cutlass.Constexpr,
    shared: cutlass.Constexpr,
) -> None:
    """Fills out (ROWS, tiles * N), float32, with ones after dropout, from `row` and `column` on."""
    keep_kernel(rng_state, out, head, row, column, byte, fraction, transposed, dtype, tiles, shared).launch(
        grid=(1, 1, 1), block=(32 * WARPS, 1, 1)
    )


@cute.kernel
def keep_kernel(
    rng_state: cute.Tensor,
    out: cute.Tensor,
    head: Int32,
    row: Int32,
    column: Int32,
    byte: Uint32,
    fraction: Uint32,
    transposed: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    tiles: cutlass.Constexpr,
    shared: cutlass.Constexpr,
) -> None:
    warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
    N = cutlass.const_expr(out.shape[1] // tiles)
    drop = dropout.load(rng_state, byte, fraction)
    side = dropout.KeyRows if cutlass.const_expr(transposed) else dropout.QueryRows
    rows = side.at(drop, row + 16 * warp, head, lane)
    places = cute.make_layout((32, dropout.words(N), WARPS))
    kept = SmemAllocator().allocate_tensor(Uint32, places, 16)[None, None, warp]
    for tile in cutlass.range(tiles, unroll=1):
        if cutlass.const_expr(shared):
            generate_in_passes(rows, column + tile * N, dropout.strips(N), kept, lane)
        else:
            strip = Uint32(lane // dropout.STRIP_LANES)
            while strip < dropout.strips(N):
                rows.generate(column + tile * N, strip, kept)
                strip += 32 // dropout.STRIP_LANES
        cute.arch.sync_warp()
        weights = cute.make_rmem_tensor(N // 2, dtype)
        weights.fill(1.0)
        rows.drop(weights, dropout.take(kept, lane))
        cute.arch.sync_warp()
        store(weights, out, 16 * warp + lane // 4, tile * N + 2 * (lane % 4))


@cute.jit
def generate_in_passes(
    rows: Any, column: Int32, strips: cutlass.Constexpr, kept: cute.Tensor, lane: Int32
) -> None:
    """Generate all strips as a warp does that has no RNG warps."""
    for first, lanes in dropout.passes(strips):
        strip = Uint32(first + lane // lanes)
        if cutlass.const_expr(lanes == dropout.SHARED_LANES):
            rows.generate_shared(column, strip, kept, strip, lane, strip < strips)
        elif strip < strips:
            rows.generate(column, strip, kept)


def store(weights: cute.Tensor, out: cute.Tensor, row: Int32, column: Int32) -> None:
    """Stores a fragment in the layout in which the lanes of a warp hold an accumulator."""
    for i in range(cute.size(weights)):
        out[row + 8 * (i // 2 % 2), column + 8 * (i // 4) + i % 2] = weights[i].to(Float32)


@functools.cache
def compiled(
    arch: str,
    N: int,
    transposed: bool,
    dtype: Any,
    tiles: int,
    numbers: int = dropout.STATE,
    shared: bool = False,
) -> Any:
    """The kernel compiled for an active device of that architecture, for a state of so many numbers."""
    state = cute.runtime.make_fake_compact_tensor(Int64, (numbers,), assumed_align=8)
    out = cute.runtime.make_fake_compact_tensor(
        Float32, (ROWS, tiles * N), stride_order=(1, 0), assumed_align=16
    )
    scalars = (Int32(0), Int32(0), Int32(0), Uint32(0), Uint32(0))
    return cute.compile(
        keep_of_tile, state, out, *scalars, transposed, dtype, tiles, shared, options=f"--gpu-arch {arch}"
    )


def as_cute(tensor: Tensor) -> Any:
    return from_dlpack(as_device(tensor), assumed_align=8)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "keys"])
@pytest.mark.parametrize("N", one_of(3, [16, 48, 80, 160, 128]))
@pytest.mark.parametrize("dtype", [BFloat16, Float32], ids=["packed", "float32"])
@settings(max_examples=12)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    offset=st.integers(-(2**63), 2**63 - 1),
    batch=st.integers(0, 40),
    head=st.integers(0, 2),
    row=st.integers(0, 2**20).map(lambda i: 16 * i),
    column=st.integers(0, 2**20).map(lambda i: 16 * i),
    p=st.sampled_from(PROBABILITIES) | st.floats(0, 1),
)
def test_the_mask_is_the_reference(arch, transposed, N, dtype, seed, offset, batch, head, row, column, p):
    Hq, tiles = 3, 2
    state = torch.tensor([seed, offset])
    kept = torch.full((ROWS, tiles * N), torch.nan)
    with emulate.device(arch):
        run = compiled(arch, N, transposed, dtype, tiles)
        run(as_cute(state), as_cute(kept), batch * Hq + head, row, column, *thresholds(p))
    rows, columns = range(row, row + ROWS), range(column, column + tiles * N)
    queries, keys = (columns, rows) if transposed else (rows, columns)
    expected = Dropout(state, p).keep(range(batch, batch + 1), Hq, queries, keys)[0, head]
    assert torch.equal(kept, (expected.T if transposed else expected).float())


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "keys"])
@pytest.mark.parametrize("N", [16, 64, 96, 160])
@settings(max_examples=4)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    column=st.integers(0, 2**20).map(lambda i: 16 * i),
    p=st.sampled_from(PROBABILITIES),
)
def test_lanes_that_share_a_strip_generate_the_same(transposed, N, seed, column, p):
    state, tiles, (Hq, head) = torch.tensor([seed, 3]), 2, (2, 1)
    kept = torch.full((ROWS, tiles * N), torch.nan)
    with emulate.device("sm_80"):
        run = compiled("sm_80", N, transposed, BFloat16, tiles, shared=True)
        run(as_cute(state), as_cute(kept), head, 32, column, *thresholds(p))
    rows, columns = range(32, 32 + ROWS), range(column, column + tiles * N)
    queries, keys = (columns, rows) if transposed else (rows, columns)
    expected = Dropout(state, p).keep(range(1), Hq, queries, keys)[0, head]
    assert torch.equal(kept, (expected.T if transposed else expected).float())


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "keys"])
@settings(max_examples=12)
@given(
    batch=st.integers(0, 4),
    head=st.integers(0, 2),
    origin=st.tuples(*[st.integers(0, 2**20).map(lambda i: 16 * i)] * 2),
    heads=st.tuples(st.integers(0, 5), st.integers(8, 9)),
)
def test_a_part_has_the_mask_of_the_whole(arch, transposed, batch, head, origin, heads):
    """A part's positions are counted from its origin, and its heads are some of the whole's."""
    Hq, N, p = 3, 48, 0.4
    (first_row, first_key), (first_head, every) = origin, heads
    whole = torch.tensor([12345, 67890])
    state = torch.cat([whole, torch.tensor([first_row, first_key, first_head, every, Hq])])
    kept = torch.full((ROWS, N), torch.nan)
    with emulate.device(arch):
        run = compiled(arch, N, transposed, Float32, 1, dropout.STATE_OF_PART)
        run(as_cute(state), as_cute(kept), batch * Hq + head, 16, 32, *thresholds(p))
    rows, columns = range(16, 16 + ROWS), range(32, 32 + N)
    queries, keys = (columns, rows) if transposed else (rows, columns)
    of_whole = Dropout(whole, p).keep(
        range(batch, batch + 1),
        every,
        range(first_row + queries.start, first_row + queries.stop),
        range(first_key + keys.start, first_key + keys.stop),
    )[0, first_head + head]
    assert torch.equal(kept, (of_whole.T if transposed else of_whole).float())
    expected = Dropout(state, p).keep(range(batch, batch + 1), Hq, queries, keys)[0, head]
    assert torch.equal(expected, of_whole)
