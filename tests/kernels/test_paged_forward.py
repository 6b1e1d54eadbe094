"""The forward kernels over paged caches in the emulator, with its race checks, on both architectures."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from decode_calls import GARBAGE
from everything import examples, one_of
from flash4_torch.configs.types import Sm90Forward, Sm100Forward
from kernel_calls import Kernel, drawn
from kernel_calls import static as static_of
from paged_calls import PagedCall, far_apart, in_pages, pages_change_nothing, run_paged, same

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

sm90 = partial(static_of, Sm90Forward, varlen=True)
sm100 = partial(static_of, Sm100Forward, varlen=True)
CAUSAL = {"right": True}
WINDOW = {"left": True, "right": True}
STATICS = {
    "Hopper": sm90(128, 128, (3, 80, 2, 2), k_ahead=True, lazy_rescale=True, page_box=16, **CAUSAL),
    "next tile": sm90(
        64, 64, (2, 128, 2, 2), "float16", next_tile=True, k_ahead=True, pingpong=True, page_box=64, **CAUSAL
    ),
    "window": sm90(72, 64, (2, 96, 2, 2), softcap=True, scaled=True, page_box=32, **WINDOW),
    "packed": sm90(64, 40, (1, 128, 2, 2), pack_gqa=4, page_box=128, sinks="float32"),
    "O over Q": sm90(64, 64, (2, 48, 2, 1), o_over_q=True, k_ahead=True, page_box=16, sinks="bfloat16"),
    "odd columns": sm90(48, 240, (1, 64, 2, 1), page_box=16, **CAUSAL),
    "whole rows": sm90(128, 80, (2, 64, 2, 2), k_ahead=True, page_box=32, **CAUSAL),
    "whole rows, V apart": sm90(96, 96, (3, 112, 2, 2), "float16", pingpong=True, k_ahead=True, page_box=16),
    "Blackwell": sm100(64, 64, (2, 6), page_box=16, **CAUSAL),
    "Blackwell, packed": sm100(128, 72, (1, 3), "float16", pack_gqa=2, page_box=128, sinks="bfloat16"),
    "Blackwell, window": sm100(64, 96, (2, 4), softcap=True, scaled=True, page_box=32, **WINDOW),
    "Blackwell, O over Q": sm100(128, 64, (2, 4), o_over_q=True, page_box=64, **CAUSAL),
}
EACH = [sm90(64, 64, (2, 128, 2, 2), page_box=32), sm100(64, 64, (1, 4), page_box=32)]
EACH_KERNEL = pytest.mark.parametrize("kernel", EACH, ids=["sm_90a", "sm_100a"])


@pytest.mark.parametrize("name", one_of(4, list(STATICS)))
# No shrinking: a launch is slow, and its error says what is wrong.
@settings(max_examples=examples(2, 12), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_pages_change_nothing(name: str, data: st.DataObject) -> None:
    pages_change_nothing(STATICS[name], data)


def two_sequences(kernel: Kernel, lengths: tuple[int, int], page_size: int = 64) -> PagedCall:
    return in_pages(drawn(kernel, Hk=2, lengths=((40, 9), lengths)), page_size)


@EACH_KERNEL
def test_page_numbers_are_clamped(kernel: Kernel) -> None:
    """Whatever the table holds, the launch reads pages of the cache."""
    paged = two_sequences(kernel, (128, 70))
    for cache in (paged.k, paged.v):
        cache.copy_(torch.randn(cache.shape))
    garbage = torch.tensor(GARBAGE).repeat(9)[: paged.table.numel()].view(paged.table.shape).int()
    inside = garbage.clamp(0, len(paged.k) - 1)
    found = run_paged(kernel, replace(paged, table=garbage))
    assert same(found, run_paged(kernel, replace(paged, table=inside)))


@EACH_KERNEL
@pytest.mark.parametrize(("longest", "page_size"), one_of(2, [(96, 32), (128, 64), (192, 96)]))
def test_lengths_are_clamped(kernel: Kernel, longest: int, page_size: int) -> None:
    """A sequence has no fewer keys than none, and no more than its row of the table has room for."""
    paged = two_sequences(kernel, (0, longest), page_size)
    paged = replace(paged, table=paged.table[:, : longest // page_size].contiguous())
    beyond = torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32)
    found = run_paged(kernel, replace(paged, seqused_k=beyond), schedule="late")
    assert same(found, run_paged(kernel, paged))


@EACH_KERNEL
@pytest.mark.parametrize("least", one_of(2, [10, 9, 41]))
def test_sequences_with_few_queries_are_left_alone(kernel: Kernel, least: int) -> None:
    """Sequences of 40 and 9 queries, of which those with fewer than `least` stay what they were."""
    paged = two_sequences(kernel, (50, 70))
    whole, found = run_paged(kernel, paged), run_paged(kernel, paged, min_seqlen_q=least)
    for rows, Sq in ((slice(40), 40), (slice(40, 49), 9)):
        if least <= Sq:
            assert torch.equal(found.out[rows], whole.out[rows])
            assert torch.equal(found.lse[:, rows], whole.lse[:, rows])
        else:
            assert found.out[rows].isnan().all() and found.lse[:, rows].isnan().all()


@EACH_KERNEL
def test_long_sequences_are_found_among_many(kernel: Kernel) -> None:
    """Sequences that a launch leaves alone take no tiles, wherever they are among 70."""
    lengths = [40 if b in (3, 33, 34, 69) else b % 3 for b in range(70)]
    paged = in_pages(drawn(kernel, Hk=1, lengths=(tuple(lengths), (33,) * 70)), 32)
    whole, found = run_paged(kernel, paged), run_paged(kernel, paged, min_seqlen_q=3, schedule="fuzz")
    is_served = torch.tensor(lengths).repeat_interleave(torch.tensor(lengths)) == 40
    assert torch.equal(found.out[is_served], whole.out[is_served])
    assert torch.equal(found.lse[:, is_served], whole.lse[:, is_served])
    assert found.out[~is_served].isnan().all() and found.lse[:, ~is_served].isnan().all()
    nothing = run_paged(kernel, paged, min_seqlen_q=41)
    assert nothing.out.isnan().all() and nothing.lse.isnan().all()


@pytest.mark.parametrize("what", ["pages", "heads"])
@pytest.mark.parametrize("kernel", [*EACH, STATICS["whole rows"]], ids=["sm_90a", "sm_100a", "whole rows"])
def test_pages_and_heads_may_be_far_apart(kernel: Kernel, what: Literal["pages", "heads"]) -> None:
    """They are more than 2**31 elements from each other; memory in between is never touched."""
    paged = in_pages(drawn(kernel, Hk=2, lengths=((9,), (33,))), 32)
    assert same(run_paged(kernel, far_apart(paged, what)), run_paged(kernel, paged))
