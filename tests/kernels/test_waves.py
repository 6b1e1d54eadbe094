"""Estimates of launches against schedules."""

from __future__ import annotations

import heapq

from hypothesis import given
from hypothesis import strategies as st

from flash4_torch.configs.waves import Launch, TileTime

LAUNCHES = st.builds(
    Launch,
    tiles_per_head=st.integers(1, 40),
    heads=st.integers(1, 40),
    shortest=st.integers(1, 500),
    longest=st.integers(500, 5000),
    num_sms=st.integers(1, 150),
).map(lambda x: x if x.tiles_per_head > 1 else x._replace(shortest=x.longest))
TIMES = st.builds(TileTime, per_key=st.floats(1, 20), besides=st.floats(0, 5000))


def lengths(launch: Launch) -> list[int]:
    """The keys of all tiles, the longest first."""
    fall = launch.longest - launch.shortest
    steps = max(launch.tiles_per_head - 1, 1)
    of_a_head = [launch.longest - fall * i // steps for i in range(launch.tiles_per_head)]
    return [length for length in of_a_head for _ in range(launch.heads or 1)]


def of(time: TileTime, keys: int) -> float:
    return keys * time.per_key + time.besides


def scheduled(launch: Launch, time: TileTime) -> float:
    """The end of a schedule in which every SM that is free takes the longest tile that is left."""
    free = [0.0] * launch.num_sms
    for length in lengths(launch):
        heapq.heapreplace(free, free[0] + of(time, length))
    return max(free)


@given(LAUNCHES, TIMES)
def test_no_schedule_is_faster(launch: Launch, time: TileTime) -> None:
    # Lengths are whole keys.
    assert launch.ns(time) <= scheduled(launch, time) * 1.01 + 3 * time.per_key


@given(LAUNCHES, TIMES)
def test_tiles_of_one_length_take_whole_waves(launch: Launch, time: TileTime) -> None:
    equal = launch._replace(shortest=launch.longest)
    waves = -(-len(lengths(equal)) // equal.num_sms)
    expected = waves * of(time, equal.longest)
    assert abs(equal.ns(time) - expected) <= 1e-9 * expected
    assert abs(scheduled(equal, time) - expected) <= 1e-9 * expected


@given(LAUNCHES, TIMES)
def test_a_schedule_is_seldom_much_slower(launch: Launch, time: TileTime) -> None:
    """Graham's bound for any order, 2, where the longest tile comes last; the longest first, 4 / 3."""
    assert scheduled(launch, time) <= launch.ns(time) * 4 / 3 * 1.05 + time.per_key


@given(LAUNCHES, TIMES)
def test_any_number_of_heads_are_work_only(launch: Launch, time: TileTime) -> None:
    many = launch._replace(heads=1000 * launch.num_sms)
    work = launch._replace(heads=None).ns(time)
    assert abs(many.ns(time) - 1000 * work) <= 0.01 * many.ns(time) + 3 * of(time, launch.longest)
