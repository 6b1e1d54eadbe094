"""score_mod and mask_mod over packed sequences by our kernels, in the emulator with its race checks."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
import flash4_torch
from everything import EVERYTHING, one_of
from flash4_torch.masks import Band
from flash4_torch.reference.attention import attention as definition
from flash4_torch.reference.scoring import Scoring
from flash4_torch.testing import assert_close_as_peer, backends_used
from flex_calls import ARCHS, HK, SCHEDULES, emulated
from flex_mods import H

LENGTHS = [[(66, 70), (0, 3), (9, 1), (2, 0)], [(70, 90), (0, 5), (133, 3), (5, 0)], [(1, 1), (65, 200)]]


class Learned:
    """Gathers by sequence, head, row, column and both."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(5)
        shapes = (4, H), (140,), (210,), (H, 8)
        self.all = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]

    def mod(self, score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        of_sequence, rows, columns, table = self.all
        score = score * of_sequence[b, h] + rows[i]
        # Code for every score takes long to compile.
        return score + columns[j] * table[h, (i + j) & 7] if EVERYTHING else score


def mask(b: Any, h: Any, i: Any, j: Any) -> Tensor:
    return ((i ^ j) + h) & 3 != b


def by_definition(
    tensors: list[Tensor],
    ends: list[Tensor],
    learned: Learned | None,
    mask: Any,
    right: int | None,
    dtype: torch.dtype,
) -> list[Tensor]:
    results = []
    for b, (rows, keys) in enumerate(zip(*map(pairwise, ends), strict=True)):
        q, k, v = (
            x.to(dtype)[None, slice(*span)] for x, span in zip(tensors, (rows, keys, keys), strict=True)
        )
        scoring = Scoring(1 / math.sqrt(q.shape[-1]), Band(None, right))

        def score_mod(score: Tensor, _: Any, h: Any, i: Any, j: Any, b: int = b) -> Tensor:
            return score if learned is None else learned.mod(score, b, h, i, j).to(score.dtype)

        shown = lambda _, h, i, j, b=b: mask(b, h, i, j)  # noqa: E731
        results.append(definition(q, k, v, scoring, None, score_mod, shown))
    return [torch.cat([x[0][0] for x in results]), torch.cat([x[1][0] for x in results], 1)]


def few_blocks(b: Any, h: Any, i: Any, j: Any) -> Tensor:
    """Blocks of 32 keys that are full, partial and empty, far apart in neighbouring sequences; some rows see
    nothing.
    """
    of_block = ((i >> 4) + (j >> 5) + h + b) & 3
    return (i < 60) & ((j >> 7) == (b & 1)) & ((of_block == 0) | ((of_block == 1) & ((i + j) & 1 == 0)))


@pytest.mark.parametrize("arch", one_of(9, ARCHS[::-1]))
@pytest.mark.parametrize("lengths", one_of(3, LENGTHS), ids=str)
@pytest.mark.parametrize("causal", one_of(3, [True, False]))
def test_packed_sequences(arch: str, lengths: list[tuple[int, int]], causal: bool) -> None:
    """out, lse and gradients, those of captured tensors too, within twice plain torch's error."""
    check(arch, lengths, causal, mask, Learned(torch.float32), {"mask_mod": mask})


@pytest.mark.parametrize("arch", one_of(9, ARCHS))
@pytest.mark.parametrize("lengths", one_of(4, LENGTHS[::-1]), ids=str)
@pytest.mark.parametrize("causal", one_of(5, [True, False]))
@pytest.mark.parametrize("block", one_of(3, [(16, 32), (128, 128)]))
def test_block_masks(arch: str, lengths: list[tuple[int, int]], causal: bool, block: tuple[int, int]) -> None:
    """Blocks of positions within each sequence, listed up to the longest one and beyond."""
    sequences = len(lengths)
    made = flash4_torch.create_block_mask(few_blocks, sequences, H, 150, 210, "cpu", block)
    learned = Learned(torch.float32) if EVERYTHING else None
    check(arch, lengths, causal, few_blocks, learned, {"block_mask": made})


def check(
    arch: str,
    lengths: list[tuple[int, int]],
    causal: bool,
    mask: Any,
    learned: Learned | None,
    functions: dict[str, Any],
) -> None:
    ends = [torch.tensor([0, *x]).cumsum(0) for x in zip(*lengths, strict=True)]
    Tq, Tk = (int(x[-1]) for x in ends)
    tensors = [
        torch.randn(shape).bfloat16().requires_grad_() for shape in ((Tq, H, 64), (Tk, HK, 64), (Tk, HK, 64))
    ]
    sums = [] if learned is None else learned.all if EVERYTHING else learned.all[:2]
    score_mod = None if learned is None else learned.mod
    wanted = [*tensors, *sums]
    dout = torch.randn(Tq, H, 64).bfloat16()

    def run() -> Any:
        out, lse = flash4_torch.attention_varlen(
            *tensors, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], max_seqlen_q=140, max_seqlen_k=200,
            causal=causal, score_mod=score_mod, **functions, return_lse=True,
        )  # fmt: skip
        return [out, lse, *torch.autograd.grad(out, wanted, dout, retain_graph=True)]

    with backends_used() as used:
        found = emulated(run, arch, SCHEDULES[len(lengths) % 2])
    assert used == {("flex_attention", "emulator"): 1, ("flex_attention_backward", "emulator"): 1}
    sides = []
    for dtype in (torch.float64, torch.bfloat16):
        out, lse = by_definition(tensors, ends, learned, mask, 0 if causal else None, dtype)
        sides.append([out, lse, *torch.autograd.grad(out, wanted, dout.to(dtype))])
    names = ["out", "lse", "dq", "dk", "dv", "by sequence", "by row", "by column", "by both"]
    # Sums over a row have the noise of its rounded output, from which plain torch computes here, too.
    if sums:
        sides[0][5:] = torch.autograd.grad(found[0], sums, dout)
    for name, x, truth, plain in zip(names[: len(found)], found, *sides, strict=True):
        assert_close_as_peer(x, truth.double(), plain, what=name)
