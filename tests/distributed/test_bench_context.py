"""`bench context` over ranks: every way to share a sequence, and what its profile means."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from context_calls import WORLD
from flash4_torch.bench import context, overlap
from flash4_torch.bench.settings import Settings
from ranks import ranks


def rows_of_ranks() -> list[dict[str, Any]]:
    context._seconds = context._once  # type: ignore[assignment]
    return list(context.measure(Settings("cpu", quick=True)))


def wrong_rows_of_ranks() -> None:
    right, context.shard_sequence = context.shard_sequence, lambda x, mesh: x[:, : x.shape[1] // WORLD]
    try:
        with pytest.raises(RuntimeError, match=r"results of ranks differ from one GPU's by"):
            rows_of_ranks()
    finally:
        context.shard_sequence = right


def test_ranks_share_a_sequence_in_every_way() -> None:
    each = ranks(WORLD).run(rows_of_ranks)
    ours = [row for row in each[0] if "torch" not in row["how"]]
    assert [row["how"] for row in ours] == 2 * ["ring", "ring 2 x ulysses 2", "ulysses"]
    for row in ours:
        assert row["difference"] < 1e-5
        assert row["efficiency"] == row["one_gpu_seconds"] / WORLD / row["seconds"]
    # torch has no ring on a CPU, and the row says so.
    assert all(row["left_out"] for row in each[0] if row not in ours)
    assert context.text(each[0]).count("ulysses") == 4


def test_results_that_differ_are_not_timed() -> None:
    ranks(WORLD).run(wrong_rows_of_ranks)


def test_ranks_repeat_kv_heads_that_are_fewer() -> None:
    cell = context.Cell(16, 4, 128, 32768, "forward")
    assert context.Split(1, 8).heads(cell) == (2, 1)
    assert context.Split(4, 2).heads(cell) == (8, 2)
    # A rank sends q and out of 2 heads and k and v of 1 to each of the 7 others, of 4096 rows.
    assert context._ulysses_bytes(cell, context.Split(1, 8)) == 4096 * 7 * (2 * 2 + 2 * 1) * 128 * 2
    # Half of a zigzag's rank sees the keys of later ranks, the others see half of its keys.
    assert context._ring_bytes(cell, context.Split(2, 1)) == 2 * 4 * 128 * 2 * 16384 * 0.75


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ncclDevKernel_SendRecv", "kernel"]), st.integers(0, 50), st.integers(1, 9)
        ),
        min_size=1,
    )
)
def test_overlap_counts_each_microsecond(events: list[tuple[str, int, int]]) -> None:
    """Spans in whole microseconds give the same as counting microseconds one by one."""
    found = overlap.summary([(name, float(start), float(length)) for name, start, length in events])
    at: dict[bool, set[int]] = {True: set(), False: set()}
    for name, start, length in events:
        at[name.startswith("nccl")].update(range(start, start + length))
    busy = at[True] | at[False]
    assert found["messages_ms"] == pytest.approx(len(at[True]) / 1e3)
    assert found["hidden_ms"] == pytest.approx(len(at[True] & at[False]) / 1e3)
    assert found["idle_ms"] == pytest.approx((max(busy) + 1 - min(busy) - len(busy)) / 1e3)
