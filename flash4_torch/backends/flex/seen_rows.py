"""What rows see of a mask, and whether these are intervals: by torch's operators, or by kernels on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels.common.row_verdicts import NUMBERS, TILE_ROWS, UNBOUNDED, Verdict
from ...masks import Band
from ...problem import Extent
from ...reference.flex import FULL
from ..compiled.targets import ROW_INTERVALS, Find
from .partial_blocks import Mask, parts


class Judged(NamedTuple):
    """What is known of the rows of all batch entries and heads."""

    verdict: Verdict
    bounds: Tensor
    """(B or 1, Hq or 1, Sq, 2) integers: the first and the last key of each row within the band; a row that
    sees nothing has its place where the rows before it end."""
    starts: Tensor
    """Rows of all batch entries, one after another, whose first key is at their own position; none if heads
    differ."""


def seen_by(mask: Mask) -> Tensor | None:
    """What each row sees, (3, B or 1, Hq or 1, Sq) int64: the number of keys, the first one and the last one,
    Sk or more and -1 if there are none. None if too many scores would have to be evaluated.
    """
    state, (q_block, kv_block), Sq, Sk = mask.blocks.state, mask.blocks.size, mask.Sq, mask.Sk
    starts = torch.arange(0, Sk, kv_block, device=state.device)
    ends = (starts + kv_block).clamp(max=Sk)
    is_full = state == FULL

    def of_rows(x: Tensor) -> Tensor:
        return x.repeat_interleave(q_block, -1)[..., :Sq].flatten()

    count = of_rows(torch.where(is_full, ends - starts, 0).sum(-1))
    first = of_rows(torch.where(is_full, starts, Sk).amin(-1))
    last = of_rows(torch.where(is_full, ends, 0).amax(-1) - 1)
    partial = parts(mask)
    if partial is None:
        return None
    for b, h, _, _, i, j, seen in partial:
        at = ((b.long() * state.shape[1] + h) * Sq + i).flatten()
        count.index_add_(0, at, seen.sum(-1).flatten())
        first.scatter_reduce_(0, at, torch.where(seen, j, Sk).amin(-1).flatten().long(), "amin")
        last.scatter_reduce_(0, at, torch.where(seen, j, -1).amax(-1).flatten().long(), "amax")
    return torch.stack([count, first, last]).view(3, *state.shape[:2], Sq)


def judged(seen: Tensor, band: Band, extent: Extent) -> Judged:
    """What rows see within a band, by torch's operators; the host waits."""
    keys, first, last = seen.long()
    Sq, Sk = extent.Sq, extent.Sk
    i = torch.arange(Sq, device=seen.device)
    has_gaps = keys != (last - first + 1).clamp(min=0)
    if band.left is not None:
        first = torch.maximum(first, i + (Sk - Sq - band.left))
    if band.right is not None:
        last = torch.minimum(last, i + (Sk - Sq + band.right))
    number = (last - first + 1).clamp(min=0)
    is_empty = number == 0
    left, right = torch.where(is_empty, -Sk, i - first).amax(), torch.where(is_empty, -Sq, last - i).amax()
    parallel = (i - left).clamp(min=0), (i + right).clamp(max=Sk - 1)
    lies_so = is_empty | ((first == parallel[0]) & (last == parallel[1]))
    is_band = lies_so & (number == (parallel[1] - parallel[0] + 1).clamp(min=0))
    # A row that sees nothing is where the rows before it end.
    ends = torch.where(is_empty, -1, last).cummax(-1).values
    first = torch.where(is_empty, ends + 1, first)
    decreases = (pad(first.diff(dim=-1), (1, 0)) < 0) | ~is_empty & (ends != last)
    last, begins = ends, first == i
    start = torch.where(begins, i, -1).cummax(-1).values
    # The last row before the next one that begins.
    end = torch.where(begins, i - 1, Sq - 1)[..., 1:].flip(-1).cummin(-1).values.flip(-1)
    end = pad(end, (0, 1), value=Sq - 1)
    lengths = torch.where(begins, end - i + 1, 0)
    flags = has_gaps, decreases, ~is_band, first > 0, last < Sk - 1, first != start, last != i, last != end
    numbers = left, right, number.amax(), begins.sum(), lengths.amax(), (-(-lengths // TILE_ROWS)).sum()
    starts = begins.flatten().nonzero()[:, 0] if seen.shape[2] == 1 else last.new_empty(0)
    found = torch.stack([*(x.any().long() for x in flags), *numbers]).tolist()
    return Judged(Verdict(*found), torch.stack([first, last], -1), starts)


def judged_by_kernel(seen: Tensor, band: Band, extent: Extent, find: Find) -> Judged:
    """The same of int32 numbers, by a kernel; the host waits once."""
    (_, B, H, Sq), Sk = seen.shape, extent.Sk
    groups = B * H
    bounds, starts = seen.new_empty(B, H, Sq, 2), seen.new_empty(groups, Sq)
    numbers = seen.new_empty(groups, NUMBERS)
    sides = (UNBOUNDED if side is None else side for side in band)
    find(ROW_INTERVALS, ())(
        seen.view(3, groups, Sq), (Sk, *sides), bounds.view(groups, Sq, 2), starts, numbers
    )
    verdicts = [Verdict(*own) for own in numbers.tolist()]
    whole = [starts[n, : own.starts] + n * Sq for n, own in enumerate(verdicts if H == 1 else ())]
    return Judged(_of_all(verdicts), bounds, torch.cat(whole) if whole else starts.new_empty(0))


def _of_all(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on the rows of all; a band's are those of one band."""
    whole = Verdict(*map(max, *verdicts)) if len(verdicts) > 1 else verdicts[0]
    differ = len({(own.left, own.right) for own in verdicts}) > 1
    tiles, starts = (sum(getattr(own, name) for own in verdicts) for name in ("tiles", "starts"))
    return whole._replace(is_no_band=whole.is_no_band | differ, tiles=tiles, starts=starts)
