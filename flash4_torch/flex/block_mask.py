"""Block masks in memory of the order of their blocks: the mask of all scores never exists.

A strip of some rows of blocks is evaluated at a time, and of these some columns. What it leaves is a byte for
each block; the ordered lists of a BlockMask are made from it strip by strip, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ArgumentError, RangeError
from ..reference import programs
from ..reference.flex import EMPTY, FULL, PARTIAL

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from .trace import Traced

_SCORES = 1 << 21
"""Scores whose mask is held at once."""
_BLOCKS = 1 << 20
"""Blocks that are put in order at once."""
_EIGHT_TRUE = 0x0101010101010101


def create_block_mask(
    mask_mod: Callable[..., Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
) -> BlockMask:
    """`torch.nn.attention.flex_attention.create_block_mask`, in memory of the order of the blocks.

    Args:
        mask_mod: mask_mod(b, h, q_idx, kv_idx), a function of 0-dim int32 tensors written in torch; True
            where the query sees the key.
        B: batch size, or None where the mask is the same for all.
        H: number of query heads, or None likewise.
        Q_LEN: Sq, which need not be a multiple of the block.
        KV_LEN: Sk.
        device: where the mask will be used. Default: the accelerator, or the CPU without one.
        BLOCK_SIZE: rows and keys of a block, an int for both. Default: 128.
        _compile: torch's argument; nothing is compiled here, and it changes nothing.
        separate_full_blocks: list blocks that are seen whole by themselves; mask_mod is left out there.

    Returns:
        torch's BlockMask, equal to what torch makes.

    Raises:
        ArgumentError: an argument is outside its limits.
        TraceError: mask_mod cannot be traced.

    In a compiled function torch's own makes it, which the compiler fuses with the mask.
    """
    if torch.compiler.is_dynamo_compiling():
        return _recorded(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, separate_full_blocks)
    # Both need much of torch that not every import of the package should load.
    from torch.nn.attention.flex_attention import BlockMask

    from .trace import MASK, trace

    if not callable(mask_mod):
        raise ArgumentError("mask_mod", type(mask_mod).__name__, "it must be a function")
    sizes = {"B": 1 if B is None else B, "H": 1 if H is None else H, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN}
    for name, size in sizes.items():
        _positive(name, size)
    block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)
    if len(block) != 2:
        raise ArgumentError("BLOCK_SIZE", BLOCK_SIZE, "it must be an int or a pair of rows and keys")
    for size in block:
        _positive("BLOCK_SIZE", size)
    where = torch.device(device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    with torch.no_grad():
        traced = trace(mask_mod, MASK, where)
        batch, heads = sizes["B"], sizes["H"]
        state = _table(traced, (batch, heads, Q_LEN, KV_LEN), (block[0], block[1]), where)
        full: tuple[Any, Any] = None, None
        full_q: tuple[Any, Any] = None, None
        if separate_full_blocks:
            partial = state == PARTIAL
            full, full_q = _ordered(state == FULL), _ordered((state == FULL).transpose(-1, -2))
        else:
            partial = state != EMPTY
        lists = (*_ordered(partial), *full, *_ordered(partial.transpose(-1, -2)), *full_q)
    return BlockMask((Q_LEN, KV_LEN), *lists, BLOCK_SIZE=(block[0], block[1]), mask_mod=mask_mod)


def _recorded(
    mask_mod: Callable[..., Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None,
    BLOCK_SIZE: int | tuple[int, int],
    separate_full_blocks: bool,
) -> BlockMask:
    """torch's block mask, whose steps Dynamo can record."""
    from torch.nn.attention.flex_attention import create_block_mask

    # torch 2.11 does not have the last one.
    last = {} if separate_full_blocks else {"separate_full_blocks": False}
    return create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, **last)


def _positive(name: str, size: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
        raise ArgumentError(name, size, "it must be an int")
    if size < 1:
        raise RangeError(name, size, "it must be at least 1")


def _table(
    traced: Traced, sizes: tuple[int, int, int, int], block: tuple[int, int], device: torch.device
) -> Tensor:
    """The state of each block, (B, H, rows of blocks, columns), uint8."""
    B, H, Sq, Sk = sizes
    rows, columns = -(-Sq // block[0]), -(-Sk // block[1])
    state = torch.empty(B, H, rows, columns, dtype=torch.uint8, device=device)
    scalars = programs.scalar_tensors(traced.program, traced.scalars, device)
    for b in range(B):
        for h in range(H):
            for at, spans in _strips((rows, columns), block, (Sq, Sk)):
                lanes = [_span(range(b, b + 1), 0, device), _span(range(h, h + 1), 1, device)]
                lanes += [_span(span, dim, device) for dim, span in zip((2, 3), spans, strict=True)]
                (seen,) = programs.evaluate(traced.program, lanes, traced.tensors, scalars)
                state[b, h][at] = _states(seen.expand(1, 1, len(spans[0]), len(spans[1]))[0, 0], block)
    return state


def _span(span: range, dim: int, device: torch.device) -> Tensor:
    shape = [-1 if at == dim else 1 for at in range(programs.LANES)]
    return torch.arange(span.start, span.stop, dtype=torch.int32, device=device).view(shape)


def _strips(
    table: tuple[int, int], block: tuple[int, int], lengths: tuple[int, int]
) -> Iterator[tuple[tuple[slice, slice], tuple[range, range]]]:
    """Parts of the table of blocks, each with its rows and keys."""
    per_block = min(block[0], lengths[0]) * min(block[1], lengths[1])
    wide = max(1, min(table[1], _SCORES // per_block))
    high = max(1, min(table[0], _SCORES // (per_block * wide)))
    for row in range(0, table[0], high):
        for column in range(0, table[1], wide):
            at = slice(row, min(row + high, table[0])), slice(column, min(column + wide, table[1]))
            spans = [
                range(part.start * size, min(part.stop * size, length))
                for part, size, length in zip(at, block, lengths, strict=True)
            ]
            yield at, (spans[0], spans[1])


def _states(seen: Tensor, block: tuple[int, int]) -> Tensor:
    """The states of the blocks of a mask (rows, keys)."""
    missing = [-n % size for n, size in zip(seen.shape, block, strict=True)]
    if any(missing):
        # A block that reaches beyond the end is not full, as in torch.
        seen = torch.nn.functional.pad(seen, (0, missing[1], 0, missing[0]))
    parts = seen.reshape(seen.shape[0] // block[0], block[0], seen.shape[1] // block[1], block[1])
    if block[1] % 8 == 0:
        # Eight bools at once, as one number: several times as fast.
        numbers = parts.contiguous().view(torch.int64)
        some, every = numbers.amax((1, 3)) != 0, numbers.amin((1, 3)) == _EIGHT_TRUE
    else:
        some, every = parts.any(3).any(1), parts.all(3).all(1)
    return some.to(torch.uint8) + every.to(torch.uint8)


def _ordered(listed: Tensor) -> tuple[Tensor, Tensor]:
    """The number of blocks listed in each row, and their columns in order, before those that are not."""
    counts = listed.sum(-1, dtype=torch.int32)
    indices = torch.empty(listed.shape, dtype=torch.int32, device=listed.device)
    rows, columns = listed.shape[-2:]
    high = max(1, _BLOCKS // max(1, columns * listed.shape[0] * listed.shape[1]))
    for row in range(0, rows, high):
        part = listed[:, :, row : row + high].to(torch.uint8)
        indices[:, :, row : row + high] = torch.argsort(part, dim=-1, descending=True, stable=True)
    return counts, indices
