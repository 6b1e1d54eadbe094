"""What is known of floating masks of some sizes and strides before a kernel looks at one.

Tables of a mask take as long to make as it takes to read the mask, and leave nothing out if all blocks are
visible and partial, as next to a learned bias. So it is noted whether those of a kind of masks did. If not,
the next `_CALLS` masks of the kind are not examined: kernels get the tables of a mask whose blocks are all
partial, which are right for any mask, since the mask is added to the scores of a partial block. Then one is
examined again. Masks of few keys next to few scores never are: a kernel that reads them takes longer than
blocks left out.

The host never waits for an answer. For a mask that does look like its kind both tables are the same, so that
results do not depend on when an answer comes. With torch.use_deterministic_algorithms all are examined but
those of few keys.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...kernels.common import mask_tables
from ...kernels.common.mask_tables import MaskPlan
from .. import constants, tile_counters

_CALLS = 61
"""Masks between two whose tables are looked at; odd, so that masks which take turns are all seen."""
_KINDS = 256
_PENDING = 2
"""An answer that has not come yet."""
_FEW_BLOCKS = 4
"""Blocks of keys, at most, of a mask that is not worth a look; one, if all queries have the same row."""
_FEW_SCORES = 1 << 24
"""Scores, at most, of a call whose mask is not worth a look. On an H200 2^23 at S 512 and D 128 take 22 us,
and 31 with blocks above the diagonal left out, the look included."""


class MaskKind:
    """Masks of one plan, device, sizes and strides."""

    def __init__(self, plan: MaskPlan, sizes: tuple[int, ...], device: torch.device, scores: int):
        self._plan, self._device, self._rows = plan, device, sizes[0]
        self._at = mask_tables.place(plan, *sizes)
        few = _FEW_BLOCKS if sizes[2] > 1 else 1
        self._is_small = self._at.NB <= few and scores <= _FEW_SCORES
        self._is_dense = False
        # A single row may be generation, whose masks grow: each size comes once a layer.
        self._until_next = 0 if sizes[2] > 1 else _CALLS
        self._answer: Tensor | None = None

    def known_tables(self) -> Tensor | None:
        """The tables of a mask that need not be examined, or None."""
        if self._plan.dtype == "bool":
            return None
        if self._is_small:
            return constants.all_partial(self._device, self._at.NB)
        # Plain memory of the host: a capture under way, in any thread, forbids to ask CUDA.
        if (answer := self._answer) is not None and (is_dense := int(answer)) != _PENDING:
            self._is_dense, self._answer, self._until_next = bool(is_dense), None, _CALLS
        if not self._is_dense or self._until_next <= 0 or torch.are_deterministic_algorithms_enabled():
            return None
        self._until_next -= 1
        return constants.all_partial(self._device, self._at.NB)

    def observe(self, tables: Tensor) -> None:
        """Take note of the tables that a kernel has made."""
        if self._plan.dtype == "bool" or self._answer is not None:
            return
        if self._until_next > 0:
            self._until_next -= 1
            return
        on_gpu = self._device.type == "cuda"
        if on_gpu and tile_counters.is_capturing(self._device.index):
            return
        answer = torch.full((), _PENDING, dtype=torch.uint8, pin_memory=on_gpu)
        self._answer = answer.copy_(self._is_all_partial(tables).byte(), non_blocking=True)

    def _is_all_partial(self, tables: Tensor) -> Tensor:
        at, expected = self._at, constants.all_partial(self._device, self._at.NB)
        rows = self._rows * at.HB * at.MB
        blocks = tables[at.blocks : at.rank].view(rows, at.NB) == expected[: at.NB]
        rank = tables[at.rank :].view(rows, at.NB + 1) == expected[at.NB :]
        return blocks.all() & rank.all()


def kind_of(plan: MaskPlan, mask: Tensor, scores: int) -> MaskKind:
    """The kind of a mask as kernels view it, (Bm, Hm, Sqm, Sk), of a call with so many scores."""
    return _kind(plan, tuple(mask.shape), mask.stride(), mask.device, scores)


@lru_cache(maxsize=_KINDS)
def _kind(
    plan: MaskPlan, sizes: tuple[int, ...], strides: tuple[int, ...], device: torch.device, scores: int
) -> MaskKind:
    return MaskKind(plan, sizes, device, scores)
