"""flex_attention with few queries: keys are split, heads packed, in the emulator with its race checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
import flash4_torch
from everything import EVERYTHING, examples, one_of
from flash4_torch.backends.compiled import SM90A, forward
from flash4_torch.backends.flex import bits
from flash4_torch.flex.block_mask import create_block_mask
from flex_calls import (
    ARCHS,
    SCHEDULES,
    Call,
    check_results,
    drawn_blocks,
    launched,
    made,
    tensors,
    with_blocks,
    with_intervals,
)
from flex_mods import H
from flex_on_cpu import gpu

PHASES = [Phase.explicit, Phase.generate] if EVERYTHING else [Phase.explicit]
NUM_SMS = 32
KEYS = 1403
"""No multiple of a block, and so many that their time outweighs another launch."""


def third(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (3 * i + j + h) % 3 != b


def bias(qkv: list[Tensor], seed: int) -> Call:
    """A number for each score, and a mask of positions: nothing is listed."""
    table = torch.randn(H, KEYS + 1)
    offset = KEYS - qkv[0].shape[1]
    return made(qkv, lambda s, b, h, i, j: s + table[h, (i + offset - j).clamp(min=0)], third)


def ramp(qkv: list[Tensor], seed: int) -> Call:
    slopes = torch.exp2(-torch.arange(1.0, H + 1))
    return made(qkv, lambda s, b, h, i, j: s + slopes[h] * (j - i), None, window_right=seed % 2 or None)


def lists(qkv: list[Tensor], seed: int) -> Call:
    """Lists of blocks that differ by head or do not, partial ones by their function."""
    call = made(qkv, None, third)
    return with_blocks(call, drawn_blocks(seed, qkv[0].shape[1], KEYS, 128, 128), 128, 128)


def intervals(qkv: list[Tensor], seed: int) -> Call:
    """An interval of keys for each row; one row of five sees few."""

    def interval(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j >= 100 * i) & (j < KEYS - 40 + 8 * i + b)

    return with_intervals(made(qkv, None, interval), interval)


CALLS = {made.__name__: made for made in (bias, ramp, lists, intervals)}


@pytest.mark.parametrize(
    "arch, kind, by_bits",
    one_of(
        5,
        [
            ("sm_90a", "lists", False),
            ("sm_80", "intervals", False),
            ("sm_80", "lists", False),
            ("sm_90a", "bias", False),
            ("sm_90a", "ramp", False),
            ("sm_100a", "lists", False),
            ("sm_80", "bias", False),
            ("sm_90a", "intervals", False),
            ("sm_90a", "lists", True),
            ("sm_100a", "bias", False),
            *([(arch, kind, False) for arch in ARCHS for kind in CALLS] if EVERYTHING else []),
        ],
    ),
)
def test_keys_are_split_and_heads_packed(arch: str, kind: str, by_bits: bool) -> None:
    @settings(max_examples=examples(2, 8), phases=PHASES)
    @given(st.integers(0, 1 << 20), st.integers(1, 6), st.sampled_from(SCHEDULES))
    @example(3, 5, SCHEDULES[1])
    @example(10, 1, SCHEDULES[0])
    def run(seed: int, Sq: int, schedule: dict[str, Any]) -> None:
        torch.manual_seed(seed)
        call = CALLS[kind](tensors(Sq, KEYS), seed)
        with pytest.MonkeyPatch.context() as patch:
            if not by_bits:
                patch.setattr(bits, "_MOST", 0)
            results, kernels = launched(call.results, arch, schedule, NUM_SMS)
        check_results(call, *results)
        *_, forward, merge = kernels
        assert "forward_kernel" in forward and "merge_kernel" in merge

    run()


def test_repeated_calls_are_split_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third call is a prepared launch, of the same kernel with the same arguments."""
    q, k, v = (
        torch.randn(1, heads, S, 64).bfloat16() for heads, S in ((H, 3), (H // 2, KEYS), (H // 2, KEYS))
    )
    table, found = torch.randn(H, KEYS), []
    mask = create_block_mask(lambda b, h, i, j: (i + j + h) % 3 != 0, None, H, 3, KEYS, "cpu")
    split = forward.with_splits
    monkeypatch.setattr(forward, "with_splits", lambda *args: found.append(split(*args)) or found[-1])
    with gpu() as launches, torch.no_grad():
        for score_mod in (lambda s, b, h, i, j: s + table[h, j], None):
            launches.clear()
            results = [
                flash4_torch.flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_lse=True)
                for _ in range(3)
            ]
            own = [launch for launch in launches if launch[0] == SM90A.forward]
            assert len(own) == 3 and len(set(own)) == 1
            for out, lse in results[1:]:
                assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
    assert len(found) == 2 and all(kernel.splits.number > 1 for kernel in found)
