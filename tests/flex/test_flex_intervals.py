"""Block masks that are bands: what is found shows the same, and is found once for a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flash4_torch
from flash4_torch.backends.flex import intervals, partial_blocks
from flash4_torch.flex.attention import traced
from flash4_torch.flex_problem import FlexInputs, FlexProblem, Mods
from flash4_torch.masks import Band
from flash4_torch.ops import CallOptions
from flash4_torch.ops.flex import describe
from flash4_torch.reference.flex import EMPTY, FULL, PARTIAL
from flex_calls import drawn_blocks, made, tensors, with_blocks
from flex_mods import H, Mod

SIZES = [(1, 1), (16, 16), (64, 32), (33, 80)]


def reduced(block_mask: Any, Sq: int, Sk: int, B: int = 1, **options: Any) -> FlexProblem:
    q, k = torch.empty(B, Sq, H, 8), torch.empty(B, Sk, H, 8)
    inputs = FlexInputs(q, k, k, traced(q, k, None, block_mask.mask_mod, block_mask))
    return intervals.reduced(inputs, describe(inputs, CallOptions(1.0, **options))).problem


def shown(band: Band, Sq: int, Sk: int) -> Tensor:
    i, j = torch.arange(Sq)[:, None], torch.arange(Sk)
    return torch.as_tensor(band.visible(i, j, Sq, Sk)).expand(Sq, Sk)


bounds = st.none() | st.integers(-90, 90)


@given(
    below=bounds,
    above=bounds,
    own_left=bounds,
    Sq=st.integers(1, 90),
    Sk=st.integers(1, 90),
    size=st.sampled_from(SIZES),
)
def test_masks_that_are_bands_become_bands(
    below: int | None, above: int | None, own_left: int | None, Sq: int, Sk: int, size: tuple[int, int]
) -> None:
    """Also next to a band of the call's own; what shows nothing stays a mask."""

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = i == i
        if below is not None:
            seen = seen & (i - j <= below)
        return seen if above is None else seen & (j <= i + above)

    mask = flash4_torch.create_block_mask(mask_mod, None, None, Sq, Sk, "cpu", size)
    i, j = torch.arange(Sq)[:, None], torch.arange(Sk)
    wanted = mask_mod(i, i, i, j).expand(Sq, Sk)
    problem = reduced(mask, Sq, Sk, window_left=own_left)
    if problem.spec.block is None:
        own = shown(Band(own_left, None), Sq, Sk)
        assert torch.equal(shown(problem.band, Sq, Sk), wanted & own)
        assert (problem.spec.left, problem.spec.right) == tuple(x is not None for x in problem.band)
        assert not problem.spec.mask_mod
    else:
        assert not wanted.any() or (own_left is not None and problem.band == Band(own_left, None))


@given(
    seed=st.integers(0, 1 << 20),
    Sq=st.integers(1, 90),
    Sk=st.integers(1, 90),
    size=st.sampled_from(SIZES),
    width=st.integers(0, 40),
    has_mod=st.booleans(),
)
def test_what_blocks_show_counts_whatever_the_function_says(
    seed: int, Sq: int, Sk: int, size: tuple[int, int], width: int, has_mod: bool
) -> None:
    torch.manual_seed(seed)
    widths = torch.tensor([width, width + seed % 2])
    mask_mod: Mod = lambda b, h, i, j: (i - j <= widths[b]) & (j <= i)  # noqa: E731
    call = made(tensors(Sq, Sk, 8), None, mask_mod if has_mod else None)
    states = drawn_blocks(seed, Sq, Sk, *size)
    if seed % 3 == 0:
        i, j = torch.arange(-(-Sq // size[0]))[:, None], torch.arange(-(-Sk // size[1]))
        states = torch.where(i == j, FULL, torch.where(i > j, PARTIAL, EMPTY))[None, None]
    call = with_blocks(call, states, *size)
    inputs = FlexInputs(call.q, call.k, call.v, call.mods)
    found = intervals.reduced(inputs, describe(inputs, call.options))
    lanes = [
        torch.arange(n).view([-1 if at == d else 1 for d in range(4)]) for at, n in enumerate((2, H, Sq, Sk))
    ]
    wanted = call.shown(*lanes).expand(2, H, Sq, Sk)
    check_shown(found, wanted)


@given(
    seed=st.integers(0, 1 << 20),
    Sq=st.integers(1, 90),
    Sk=st.integers(1, 90),
    size=st.sampled_from(SIZES),
    own_left=bounds,
    own_right=bounds,
)
def test_ordered_intervals_are_bounds(
    seed: int, Sq: int, Sk: int, size: tuple[int, int], own_left: int | None, own_right: int | None
) -> None:
    """Documents, with rows of padding between them, for each batch entry; prefixes; next to a band."""
    torch.manual_seed(seed)
    first, last = (torch.randint(-3, Sk + 3, (2, Sq)).sort(-1).values for _ in range(2))
    if seed % 3 == 0:
        first = torch.zeros_like(first)
    mask_mod: Mod = lambda b, h, i, j: (first[b, i] <= j) & (j <= last[b, i])  # noqa: E731
    if own_left is not None and own_right is not None and own_left + own_right < 0:
        own_right = None
    q, k = torch.empty(2, Sq, H, 8), torch.empty(2, Sk, H, 8)
    mask = flash4_torch.create_block_mask(mask_mod, 2, None, Sq, Sk, "cpu", size)
    inputs = FlexInputs(q, k, k, traced(q, k, None, mask_mod, mask))
    options = CallOptions(1.0, own_left, own_right)
    found = intervals.reduced(inputs, describe(inputs, options))
    lanes = [
        torch.arange(n).view([-1 if at == d else 1 for d in range(4)]) for at, n in enumerate((2, H, Sq, Sk))
    ]
    wanted = mask_mod(*lanes).expand(2, H, Sq, Sk) & shown(Band(own_left, own_right), Sq, Sk)
    check_shown(found, wanted)
    assert found.problem.spec.block is None or not wanted.any()


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    below=st.none() | st.integers(0, 70),
    above=st.integers(0, 9),
    own_left=st.none() | st.integers(0, 70),
    are_one=st.booleans(),
    is_ordered=st.booleans(),
)
def test_packed_sequences_become_bands_where_queries_and_keys_are_of_one_length(
    lengths: list[int], below: int | None, above: int, own_left: int | None, are_one: bool, is_ordered: bool
) -> None:
    """Else a mask stays one, as documents within a sequence do: the ends of others are not known."""

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (j <= i + above) if below is None else (i - j <= below) & (j <= i + above)
        return seen & (i // 7 == j // 7) if is_ordered else seen

    T, longest = sum(lengths), max(8, *lengths, 0)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    sequences = ends, ends if are_one else ends.clone()
    q = torch.empty(T, H, 8)
    block_mask = flash4_torch.create_block_mask(mask_mod, None, None, longest, longest, "cpu", 16)
    mods = Mods(cu_seqlens_q=sequences[0], cu_seqlens_k=sequences[1])
    mods = mods._replace(max_seqlen_q=longest, max_seqlen_k=longest)
    inputs = FlexInputs(q, q, q, traced(q, q, None, mask_mod, block_mask, mods))
    given = describe(inputs, CallOptions(1.0, own_left))
    found = intervals.reduced(inputs, given).problem
    if not are_one:
        assert found == given
    elif found.spec.block is None:
        for S in {S for S in lengths if S}:
            i, j = torch.arange(S)[:, None], torch.arange(S)
            wanted = mask_mod(i, i, i, j) & shown(Band(own_left, None), S, S)
            assert torch.equal(shown(found.band, S, S), wanted)
    else:
        assert is_ordered


def check_shown(found: intervals.Reduced, wanted: Tensor) -> None:
    """What is found shows what is wanted, to rows and to keys, and on both sides where it is said to hide."""
    spec, table = found.problem.spec, found.bounds
    Sq, Sk = wanted.shape[2:]
    if spec.block is not None:
        assert not is_band(wanted)
    elif table is None:
        assert torch.equal(shown(found.problem.band, Sq, Sk).expand(wanted.shape), wanted)
    else:
        i, j = torch.arange(Sq)[:, None], torch.arange(Sk)
        (begin, end), (above, below) = table.of_rows.unbind(-1), table.of_keys[:, :-1].unbind(-1)
        assert (table.of_keys[:, -1] == torch.tensor([Sq, Sq - 1])).all()
        assert all(bool((x.diff(dim=-1) >= 0).all()) for x in (begin, end, above, below))
        begins, ends = (begin[..., None] <= j), (j <= end[..., None])
        assert begins.all() or spec.left
        assert ends.all() or spec.right
        assert torch.equal((begins & ends)[:, None].expand(wanted.shape), wanted)
        begins, ends = (above[:, None] <= i), (i <= below[:, None])
        assert begins.all() or spec.right
        assert ends.all() or spec.left
        assert torch.equal((begins & ends)[:, None].expand(wanted.shape), wanted)
        assert wanted.sum(-1).max() == table.most


def is_band(wanted: Tensor) -> bool:
    """Whether some band shows the same, and anything at all."""
    Sq, Sk = wanted.shape[2:]
    one = wanted[0, 0]
    if not one.any() or not (wanted == one).all():
        return False
    distance = torch.arange(Sk) - torch.arange(Sq)[:, None]
    seen = distance[one]
    return bool((one == ((distance >= seen.min()) & (distance <= seen.max()))).all())


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with each evaluation of a mask."""
    count: list[Any] = []
    original: Callable[..., Any] = intervals._found
    monkeypatch.setattr(intervals, "_found", lambda *args: count.append(args) or original(*args))
    return count


def test_masks_are_evaluated_once_and_again_after_a_change(evaluations: list[Any]) -> None:
    width = torch.tensor([3])
    mask = flash4_torch.create_block_mask(
        lambda b, h, i, j: (i >= j) & (i - j <= width[0 * b]), None, None, 90, 90, "cpu", 16
    )
    assert {reduced(mask, 90, 90).band for _ in range(3)} == {Band(3, 0)}
    assert len(evaluations) == 1
    width += 20
    # Blocks below the old window are empty still.
    assert reduced(mask, 90, 90).spec.bounds
    mask.kv_num_blocks.add_(0)
    assert reduced(mask, 90, 90).spec.bounds
    assert len(evaluations) == 3
    width -= 20
    assert reduced(mask, 90, 90).band == Band(3, 0)


def test_masks_of_tensors_made_for_each_call_are_not_evaluated_each_time(evaluations: list[Any]) -> None:
    width = torch.tensor([3])
    mask = flash4_torch.create_block_mask(
        lambda b, h, i, j: (i >= j) & (i - j <= (width + 0)[0 * b]), None, None, 90, 90, "cpu", 16
    )
    assert reduced(mask, 90, 90).band == Band(3, 0)
    assert all(reduced(mask, 90, 90).spec.block is not None for _ in range(3))
    assert len(evaluations) == 1


def test_a_large_partial_block_is_left_to_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_blocks, "_MOST_SCORES", 4096)
    small, large = (
        flash4_torch.create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, "cpu", 16)
        for n in (256, 272)
    )
    assert reduced(small, 256, 256).band == Band(None, 0)
    assert reduced(large, 272, 272).spec.block is not None


def test_indices_outside_of_captured_tensors_are_clamped() -> None:
    """A mask may hide what it reads there."""
    table = torch.ones(40, dtype=torch.bool)
    mask = flash4_torch.create_block_mask(lambda b, h, i, j: i >= j, None, None, 90, 90, "cpu", 16)
    mask.mask_mod = lambda b, h, i, j: (i >= j) & table[i - j]
    assert reduced(mask, 90, 90).band == Band(None, 0)


def test_parts_of_a_mask_are_evaluated_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_blocks, "_SCORES", 16 * 16 * 3)
    mask = flash4_torch.create_block_mask(
        lambda b, h, i, j: (i - j).abs() < 20, None, None, 90, 77, "cpu", 16
    )
    problem = reduced(mask, 90, 77)
    assert torch.equal(shown(problem.band, 90, 77), (torch.arange(90)[:, None] - torch.arange(77)).abs() < 20)
