"""Block masks in time and memory of the order of their blocks: the mask of all scores never exists.

Bounds of mask_mod over the positions of a block tell most blocks that are seen whole or not at all
(`reference.bounds`); the scores of the others alone are evaluated. What is left is a byte for each block; the
ordered lists of a BlockMask are made from it some rows at a time. Where masks of one function are made again
on a GPU, kernels evaluate all scores instead (`backends.flex.new_masks`): two launches, and no waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from ..errors import ArgumentError, RangeError
from ..reference import bounds, programs
from ..reference.bounds import Bounds
from ..reference.flex import EMPTY, FULL, PARTIAL, Mod

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from .trace import Traced

_SCORES = 1 << 21
"""Scores whose mask is held at once."""
_BLOCKS = 1 << 20
"""Blocks that are bounded, or put in order, at once."""
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
    """`torch.nn.attention.flex_attention.create_block_mask`, in time and memory of the order of the blocks.

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

    In a compiled function torch's own makes it, which the compiler fuses with the mask; and where tensors
    have no values: in torch.export, among fake tensors, and on the meta device.
    """
    if torch.compiler.is_compiling() or detect_fake_mode() is not None or _is_meta(device):
        return _recorded(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, separate_full_blocks)
    # They need much that not every import of the package should load.
    from torch.nn.attention.flex_attention import BlockMask

    from ..backends.flex import dispatch, new_masks
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
        mod = Mod(traced.program, traced.tensors, traced.scalars, where)
        text, shape = traced.text, (batch, heads, Q_LEN, KV_LEN)
        find = dispatch.find_on(where) if new_masks.may_be_made(text, mod, shape) else None
        if find is not None:
            by_kernels = new_masks.lists(text, mod, shape, block, find, has_full=separate_full_blocks)
            return BlockMask((Q_LEN, KV_LEN), *by_kernels, BLOCK_SIZE=(block[0], block[1]), mask_mod=mask_mod)
        state = _table(traced, shape, (block[0], block[1]), where)
        full: tuple[Any, Any] = None, None
        full_q: tuple[Any, Any] = None, None
        if separate_full_blocks:
            partial = state == PARTIAL
            full, full_q = _ordered(state == FULL), _ordered((state == FULL).transpose(-1, -2))
        else:
            partial = state != EMPTY
        lists = (*_ordered(partial), *full, *_ordered(partial.transpose(-1, -2)), *full_q)
    return BlockMask((Q_LEN, KV_LEN), *lists, BLOCK_SIZE=(block[0], block[1]), mask_mod=mask_mod)


def _is_meta(device: torch.device | str | None) -> bool:
    return device is not None and torch.device(device).type == "meta"


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
    of_mask = _OfMask(traced, sizes, block, programs.scalar_tensors(traced.program, traced.scalars, device))
    high = max(1, _BLOCKS // columns)
    for b in range(B):
        for h in range(H):
            for row in range(0, rows, high):
                own = range(row, min(row + high, rows))
                state[b, h, own.start : own.stop] = of_mask.states(b, h, own, columns, device)
    return state


class _OfMask(NamedTuple):
    """A mask_mod, and the blocks whose states are wanted."""

    traced: Traced
    sizes: tuple[int, int, int, int]
    block: tuple[int, int]
    scalars: list[Tensor]

    def states(self, b: int, h: int, rows: range, columns: int, device: torch.device) -> Tensor:
        """The states of some rows of blocks (rows, columns): from bounds where these tell them."""
        (Sq, Sk), (high, wide) = self.sizes[2:], self.block
        spans = _spans(rows, high, Sq, 2, device), _spans(range(columns), wide, Sk, 3, device)
        lanes = [_place(b, device), _place(h, device), *spans]
        found = bounds.of_result(self.traced.program, lanes, self.traced.tensors, self.scalars)
        if found is None:
            state = torch.full((len(rows), columns), PARTIAL, dtype=torch.uint8, device=device)
        else:
            state = found.lowest.to(torch.uint8) + found.highest.to(torch.uint8)
            state = state.expand(1, 1, len(rows), columns)[0, 0].clone()
        unknown = (state == PARTIAL).nonzero()
        # A block that reaches beyond the end is not full, as in torch.
        if Sq % high and rows.stop * high > Sq:
            state[-1].clamp_(max=PARTIAL)
        if Sk % wide:
            state[:, -1].clamp_(max=PARTIAL)
        count = max(1, _SCORES // (min(high, Sq) * min(wide, Sk)))
        for some in unknown.split(count):
            row, column = some.unbind(1)
            state[row, column] = self._evaluated(b, h, row + rows.start, column)
        return state

    def _evaluated(self, b: int, h: int, rows: Tensor, columns: Tensor) -> Tensor:
        """The states of some blocks, by all of their scores."""
        program, (Sq, Sk), (high, wide) = self.traced.program, self.sizes[2:], self.block
        i = _positions(rows, high, Sq).view(-1, 1, min(high, Sq), 1)
        j = _positions(columns, wide, Sk).view(-1, 1, 1, min(wide, Sk))
        # A position beyond the end shows nothing, and stands for the last one.
        lanes = [i.new_full((1,) * programs.LANES, b), i.new_full((1,) * programs.LANES, h)]
        lanes += [i.clamp(max=Sq - 1), j.clamp(max=Sk - 1)]
        (seen,) = programs.evaluate(program, lanes, self.traced.tensors, self.scalars)
        seen = seen.expand(len(rows), 1, i.shape[2], j.shape[3])[:, 0]
        if Sq % high or Sk % wide:
            seen = seen & (i < Sq)[:, 0] & (j < Sk)[:, 0]
        some, every = _any_and_all(seen)
        # Rows that a block has beyond all rows are not seen either.
        every = every & (high <= Sq) & (wide <= Sk)
        return some.to(torch.uint8) + every.to(torch.uint8)


def _place(n: int, device: torch.device) -> Bounds:
    x = torch.full((1,) * programs.LANES, n, device=device)
    return bounds.whole(x, x, n, n)


def _spans(blocks: range, size: int, length: int, dim: int, device: torch.device) -> Bounds:
    """The first and the last position of each block."""
    shape = [-1 if at == dim else 1 for at in range(programs.LANES)]
    first = torch.arange(blocks.start, blocks.stop, device=device).view(shape) * size
    return bounds.whole(first, (first + size - 1).clamp(max=length - 1), 0, length - 1)


def _positions(blocks: Tensor, size: int, length: int) -> Tensor:
    """The positions of blocks, (blocks, positions) int32; they may be beyond the end."""
    own = torch.arange(min(size, length), dtype=torch.int32, device=blocks.device)
    return blocks.to(torch.int32)[:, None] * size + own


def _any_and_all(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Whether some and whether all are seen of each block (blocks, rows, keys)."""
    if seen.shape[2] % 8:
        return seen.any(2).any(1), seen.all(2).all(1)
    # Eight bools at once, as one number: several times as fast.
    numbers = seen.contiguous().view(torch.int64)
    return numbers.amax((1, 2)) != 0, numbers.amin((1, 2)) == _EIGHT_TRUE


def _ordered(listed: Tensor) -> tuple[Tensor, Tensor]:
    """The number of blocks listed in each row, and their columns in order, before those that are not."""
    counts = listed.sum(-1, dtype=torch.int32)
    indices = torch.empty(listed.shape, dtype=torch.int32, device=listed.device)
    rows, columns = listed.shape[-2:]
    column = torch.arange(columns, dtype=torch.int32, device=listed.device)
    high = max(1, _BLOCKS // max(1, columns * listed.shape[0] * listed.shape[1]))
    for row in range(0, rows, high):
        part, count = listed[:, :, row : row + high], counts[:, :, row : row + high, None]
        before = part.cumsum(-1, dtype=torch.int32)
        places = torch.where(part, before - 1, count + column - before).long()
        indices[:, :, row : row + high].scatter_(-1, places, column.expand(part.shape))
    return counts, indices
