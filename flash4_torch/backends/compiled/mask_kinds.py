"""What is known of floating masks of some sizes and strides before a kernel looks at one.

Tables of a mask take as long to make as it takes to read the mask, and leave nothing out if all blocks are
visible and partial, as next to a learned bias. So it is noted whether those of a kind of masks did. If not,
the next `_CALLS` masks of the kind are not examined: kernels get the tables of a mask whose blocks are all
partial, which are right for any mask, since the mask is added to the scores of a partial block. Then one is
examined again. Masks of few keys next to few scores never are: a kernel that reads them takes longer than
blocks left out.

The host never waits for an answer. For a mask that does look like its kind both tables are the same, so that
results do not depend on when an answer comes; for others they differ by a rounding. Deterministic calls
examine all but those of few keys.
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
_FEW_BLOCKS, _FEW_OF_ONE_ROW = 4, 2
"""Blocks of keys, at most, of a mask that is not worth a look, and of one whose queries have the same row."""
_FEW_SCORES = 1 << 24
"""Scores, at most, of a call whose mask is not worth a look. On an H200 2^23 at S 512 and D 128 take 22 us,
and 31 with blocks above the diagonal left out, the look included."""


class MaskKind:
    """Floating masks of one plan, device, sizes and strides, next to few scores or to many."""

    def __init__(self, plan: MaskPlan, sizes: tuple[int, ...], device: torch.device, few_scores: bool):
        self._device, self._rows = device, sizes[0]
        self._at = mask_tables.place(plan, *sizes)
        few = _FEW_BLOCKS if sizes[2] > 1 else _FEW_OF_ONE_ROW
        self._is_small = self._at.NB <= few and few_scores
        self._is_dense = False
        # A single row may be generation, whose masks grow: each size comes once a layer.
        self._until_next = 0 if sizes[2] > 1 else _CALLS
        self._answer: Tensor | None = None
        self._is_asked = False

    def known_tables(self, deterministic: bool = False) -> Tensor | None:
        """The tables of a mask that need not be examined, or None."""
        if self._is_small:
            return constants.all_partial(self._device, self._at.NB)
        # Plain memory of the host: a capture under way, in any thread, forbids to ask CUDA.
        if self._is_asked and self._answer is not None and (is_dense := int(self._answer)) != _PENDING:
            self._is_dense, self._is_asked, self._until_next = bool(is_dense), False, _CALLS
        if deterministic or not self._is_dense or self._until_next <= 0:
            return None
        self._until_next -= 1
        return constants.all_partial(self._device, self._at.NB)

    def observe(self, tables: Tensor) -> None:
        """Take note of the tables that a kernel has made."""
        if self._is_asked:
            return
        if self._until_next > 0:
            self._until_next -= 1
            return
        on_gpu = self._device.type == "cuda"
        if on_gpu and tile_counters.is_capturing(self._device.index):
            return
        if self._answer is None:
            self._answer = torch.empty((), dtype=torch.uint8, pin_memory=on_gpu)
        self._answer.fill_(_PENDING).copy_(self._is_all_partial(tables).byte(), non_blocking=True)
        self._is_asked = True

    def _is_all_partial(self, tables: Tensor) -> Tensor:
        at, expected = self._at, constants.all_partial(self._device, self._at.NB)
        rows = self._rows * at.HB * at.MB
        blocks = tables[at.blocks : at.rank].view(rows, at.NB) == expected[: at.NB]
        rank = tables[at.rank :].view(rows, at.NB + 1) == expected[at.NB :]
        return blocks.all() & rank.all()


def kind_of(plan: MaskPlan, mask: Tensor, scores: int) -> MaskKind:
    """The kind of a floating mask as kernels view it, (Bm, Hm, Sqm, Sk), of a call with so many scores."""
    return _kind(plan, tuple(mask.shape), mask.stride(), mask.device, scores <= _FEW_SCORES)


@lru_cache(maxsize=_KINDS)
def _kind(
    plan: MaskPlan, sizes: tuple[int, ...], strides: tuple[int, ...], device: torch.device, few_scores: bool
) -> MaskKind:
    return MaskKind(plan, sizes, device, few_scores)
