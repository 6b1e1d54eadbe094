"""A block's tile of a floating mask: copied to SMEM as it lies, (queries, keys), and read transposed.

Rows of the mask's tensor are keys, as everywhere in the backward, but it is a view: in memory the keys of a
query are neighbours, usually. So lanes copy along keys, and a tile arrives with the block's Q. Then no lane
waits for global memory between its scores and its weights, and a transposing ldmatrix brings 16-bit numbers
in the order of the accumulator.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from ...common import smem_layouts, warp_mma
from ...common.attn_mask import VECTOR, is_aligned, within
from ...common.bwd.tiles import Tile
from ...common.host import NUMERIC
from ...common.rounding import float_of, widened
from ...common.warps import WARP
from ..rows import Visit
from .context import Context
from .plan import Plan
from .state import Block

_DEPTH = 8
"""Loads of a lane in flight, where vectors cannot be copied."""


def allocate(memory: SmemAllocator, plan: Plan) -> cute.Tensor | None:
    """(queries, keys, stages) of 16-bit numbers; those of 32 bits are two of these, side by side."""
    if not plan.features.float_mask:
        return None
    wide = plan.mask_bytes // 2
    dtype = NUMERIC["bfloat16" if wide > 1 else plan.features.mask]
    layout = smem_layouts.row_major_layout(dtype, plan.queries, wide * plan.keys, plan.stages)
    return smem_layouts.allocate(memory, dtype, layout)


@cute.jit
def load_mask(ctx: Context, tile: Tile, head: Int32, block: Block, visit: Visit, stage: Int32) -> None:
    """Start to copy a block's tile, if it is the i-th one of more than i; queries beyond the end are read as
    the last one.

    The tile of a block that the mask leaves alone becomes 0. Where keys are no neighbours, or vectors not
    aligned, numbers come one by one, and those of 16 bits are there when this returns.
    """
    mask, each = ctx.mask.values, VECTOR // ctx.plan.mask_bytes
    place = within(tile.batch, mask.shape[0]), within(head, mask.shape[1])
    if visit.i < visit.count:
        # Where one key stands for all, vectors would make the others 0.
        if (mask.shape[2] > 1) & is_aligned(mask, each, along=2):
            _copy_vectors(ctx, place, tile, block, stage)
        else:
            _copy_numbers(ctx, place, tile, block.n, stage)


@cute.jit
def _copy_vectors(ctx: Context, place: tuple, tile: Tile, block: Block, stage: Int32) -> None:
    """16 bytes of a query's keys a lane; keys after the last one become 0."""
    plan, target = ctx.plan, ctx.sMask[None, None, stage]
    Sk, Sq = ctx.mask.values.shape[2:]
    vectors = plan.keys * plan.mask_bytes // VECTOR
    thread, at_once = ctx.warp * WARP + ctx.lane, plan.threads // vectors
    row, vector = thread // vectors, thread % vectors
    key = tile.index * plan.keys + vector * (VECTOR // plan.mask_bytes)
    inside = cutlass.max(cutlass.min((Sk - key) * plan.mask_bytes, VECTOR), 0)
    inside = inside if block.partial else Int32(0)
    to = smem_layouts.vector_address(target, row, vector)
    row_bytes = smem_layouts.chunk_of(cute.size(target, mode=[1])) * 2
    # Rows a multiple of 8 further have their vectors at the same place in a swizzle.
    assert at_once % 8 == 0 and (at_once > plan.queries or plan.queries % at_once == 0)
    # There may be more threads than vectors.
    is_row = row < plan.queries if at_once > plan.queries else True
    for first in cutlass.range_constexpr(0, plan.queries, at_once):
        source = _number(ctx, place, within(block.n * plan.queries + first + row, Sq), key)
        if is_row:
            cute.arch.inline_ptx(
                f"cp.async.cg.shared.global [{{$r0}}+{first * row_bytes}], [{{$r1}}], {VECTOR}, {{$r2}};",
                read_only_args=[to, source, inside],
            )


@cute.jit
def _copy_numbers(ctx: Context, place: tuple, tile: Tile, n: Int32, stage: Int32) -> None:
    """Number by number, lanes along keys; keys after the last one are read as that one."""
    plan, target = ctx.plan, ctx.sMask[None, None, stage]
    Sk, Sq = ctx.mask.values.shape[2:]
    thread, at_once = ctx.warp * WARP + ctx.lane, plan.threads // plan.keys
    column, key = thread % plan.keys, within(tile.index * plan.keys + thread % plan.keys, Sk)
    rows = plan.queries // at_once
    for turn in cutlass.range(rows // min(rows, _DEPTH), unroll=1):
        loaded = []
        for i in cutlass.range_constexpr(min(rows, _DEPTH)):
            row = (turn * min(rows, _DEPTH) + i) * at_once + thread // plan.keys
            source = _number(ctx, place, within(n * plan.queries + row, Sq), key)
            to = number_address(target, row, column, plan.mask_bytes)
            if cutlass.const_expr(plan.mask_bytes == 4):
                cute.arch.inline_ptx(
                    "cp.async.ca.shared.global [{$r0}], [{$r1}], 4;", read_only_args=[to, source]
                )
            else:
                number = cute.arch.inline_ptx(
                    "{ .reg .b16 x; ld.global.b16 x, [{$r0}]; cvt.u32.u16 {$w0}, x; }",
                    write_only_types=[Uint32],
                    read_only_args=[source],
                )
                loaded = [*loaded, (to, number)]
        for to, number in loaded:
            cute.arch.inline_ptx(
                "{ .reg .b16 x; cvt.u16.u32 x, {$r1}; st.shared.b16 [{$r0}], x; }",
                read_only_args=[to, number],
            )


def _number(ctx: Context, place: tuple, i: Int32, j: Int32) -> Int64:
    """The address of a number of the mask: of query i and key j."""
    row = ctx.mask.values[(*place, None, 0)].iterator.toint()
    _, _, of_key, of_query = (Int64(stride) * ctx.plan.mask_bytes for stride in ctx.mask.values.stride)
    return row + Int64(i) * of_query + Int64(j) * of_key


def number_address(tile: cute.Tensor, row: Int32, column: Int32, each: int) -> Int32:
    """SMEM address of a number of so many bytes in a tile."""
    place = column * each
    return smem_layouts.vector_address(tile, row, place // VECTOR) + place % VECTOR


def add_tile(ctx: Context, S: cute.Tensor, first_query: Int32, first_key: Int32, stage: Int32) -> None:
    """Add the stage's tile to scores of 16 keys, from these on in the tile: its rows are keys."""
    tile = ctx.sMask[None, None, stage]
    if ctx.plan.mask_bytes == 2:
        _add_matrices(S, tile, first_query, first_key, ctx.lane)
    else:
        _add_words(S, tile, first_query, first_key, ctx.lane)


def _add_matrices(S: cute.Tensor, tile: cute.Tensor, row: Int32, column: Int32, lane: Int32) -> None:
    if cute.size(S) == 4:
        _add_half_matrices(S, tile, row, column, lane)
        return
    numbers = warp_mma.left(tile, row, lane, column=column, transposed=True)
    for k in range(cute.size(S) // 8):
        loaded = cute.make_rmem_tensor(8, tile.element_type)
        words = cute.recast_tensor(loaded, Uint32)
        for i, word in enumerate(numbers.read(16 * k, 0)):
            words[i] = word
        wide = widened(loaded)
        for i in range(8):
            S[8 * k + i] = S[8 * k + i] + wide[i]


def _add_half_matrices(S: cute.Tensor, tile: cute.Tensor, row: Int32, column: Int32, lane: Int32) -> None:
    """Those of eight queries, from a row on that is a multiple of eight."""
    first = row // warp_mma.ROWS * warp_mma.ROWS
    words = warp_mma.left(tile, first, lane, column=column, transposed=True).read(0, 0)
    loaded = cute.make_rmem_tensor(4, tile.element_type)
    own = cute.recast_tensor(loaded, Uint32)
    for i in range(2):
        own[i] = cutlass.select_(row == first, words[i], words[2 + i])
    wide = widened(loaded)
    for i in range(4):
        S[i] = S[i] + wide[i]


def _add_words(S: cute.Tensor, tile: cute.Tensor, row: Int32, column: Int32, lane: Int32) -> None:
    """Four rows of the tile and eight neighbouring columns at a time, which lie in different banks."""
    chunk = smem_layouts.chunk_of(cute.size(tile, mode=[1])) * 2
    for e in range(2):
        for half in range(2):
            own, key = row + 2 * (lane % warp_mma.LANES) + e, column + lane // warp_mma.LANES + 8 * half
            address = number_address(tile, own, key, 4)
            for j in range(cute.size(S) // 4):
                word = cute.arch.inline_ptx(
                    f"ld.shared.b32 {{$w0}}, [{{$r0}}+{8 * j * chunk}];",
                    write_only_types=[Uint32],
                    read_only_args=[address],
                )
                S[4 * j + 2 * half + e] = S[4 * j + 2 * half + e] + float_of(word)
