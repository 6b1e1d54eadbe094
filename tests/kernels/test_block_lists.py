"""Block masks and what their rows see, by kernels that evaluate mask_mod, against torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from everything import examples, one_of
from flash4_torch.backends.compiled.targets import BLOCK_LISTS, BLOCK_ROWS, ROW_INTERVALS
from flash4_torch.backends.flex import intervals, new_masks, seen_rows
from flash4_torch.flex.block_mask import create_block_mask
from flash4_torch.flex.trace import MASK, trace
from flash4_torch.kernels.common.row_verdicts import Verdict
from flash4_torch.masks import Band
from flash4_torch.problem import Extent
from flash4_torch.reference.flex import FULL, PARTIAL, Mod
from flash4_torch.testing import emulate
from test_block_bits import BLOCKS, FUNCTIONS, LONGEST, B, H, shown_by
from test_block_tables import POISON, compiled, lists_of

WRITTEN = {BLOCK_LISTS: slice(2, 5), BLOCK_ROWS: slice(2, 6, 3), ROW_INTERVALS: slice(2, 5)}
ARCHS = one_of(3, ["sm_90a", "sm_100a", "sm_80"])


def tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return [each for own in x for each in tensors(own)] if isinstance(x, tuple) else []


def found_on(arch: str, schedule: str = "eager") -> Callable[..., Callable[..., None]]:
    """What finds kernels that run in the emulator, and write where something else was."""

    def find(entry: str, static: tuple[object, ...]) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            for x in tensors(args[WRITTEN[entry]]):
                x.fill_(POISON % 256 if x.dtype == torch.uint8 else POISON)
            with emulate.device(arch, schedule=schedule) as device, device.touching(*tensors(args)):
                compiled(arch, entry, static)(*args)

        return launch

    return find


def traced(name: str) -> tuple[str, Mod]:
    function = FUNCTIONS[name]
    assert function is not None
    own = trace(function.of, MASK, torch.device("cpu"))
    return own.text, Mod(own.program, own.tensors, own.scalars, torch.device("cpu"))


NAMES = [name for name, function in FUNCTIONS.items() if function is not None]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", ARCHS)
@settings(max_examples=examples(8, 60), deadline=None, derandomize=True)
@example(lengths=(150, 150), block=(14, 35), outer=(1, 1), has_full=True, schedule="eager")
@given(
    lengths=st.tuples(st.integers(1, LONGEST), st.integers(1, LONGEST)),
    block=BLOCKS,
    outer=st.tuples(st.integers(1, B), st.integers(1, H)),
    has_full=st.booleans(),
    schedule=st.sampled_from(["eager", "fuzz"]),
)
def test_lists_are_those_of_torch(
    arch: str,
    name: str,
    lengths: tuple[int, int],
    block: tuple[int, int],
    outer: tuple[int, int],
    has_full: bool,
    schedule: str,
) -> None:
    text, mod = traced(name)
    find = found_on(arch, schedule)
    found = new_masks.lists(text, mod, (*outer, *lengths), block, find, has_full=has_full)
    function = FUNCTIONS[name]
    assert function is not None
    wanted = create_block_mask(
        function.of, *outer, *lengths, "cpu", BLOCK_SIZE=block, separate_full_blocks=has_full
    )
    for field in found._fields:
        own, other = getattr(found, field), getattr(wanted, field)
        assert (own is None) == (other is None)
        if own is not None:
            assert own.dtype == other.dtype and torch.equal(own, other), field


def test_more_blocks_than_threads() -> None:
    """Lists of one row of blocks, and of one column."""
    text, mod = traced("documents")
    mod = Mod(mod.program, (torch.arange(4000) // 900,), mod.scalars, mod.device)
    of = lambda b, h, i, j: (mod.tensors[0][i] == mod.tensors[0][j]) & (i + 40 >= j)  # noqa: E731
    for lengths in ((5, 4000), (4000, 5)):
        found = new_masks.lists(text, mod, (1, 1, *lengths), (8, 8), found_on("sm_90a"), has_full=True)
        wanted = create_block_mask(of, None, None, *lengths, "cpu", BLOCK_SIZE=8)
        for field in found._fields:
            assert torch.equal(getattr(found, field), getattr(wanted, field)), field


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", ARCHS)
@settings(max_examples=examples(8, 60), deadline=None, derandomize=True)
@example(lengths=(20, LONGEST), block=(16, 5), outer=(1, 1), has_full=True, seed=0)
@given(
    lengths=st.tuples(st.integers(1, 90), st.integers(1, LONGEST)),
    block=BLOCKS,
    outer=st.tuples(st.sampled_from([1, B]), st.sampled_from([1, H])),
    has_full=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rows_see_what_blocks_and_mask_mod_show(
    arch: str,
    name: str,
    lengths: tuple[int, int],
    block: tuple[int, int],
    outer: tuple[int, int],
    has_full: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    counts = [-(-n // own) for n, own in zip(lengths, block, strict=True)]
    state = torch.randint(0, 3 if has_full else 2, (*outer, *counts))
    full = lists_of(state, FULL, (1, 1), torch.int32) if has_full else (None, None)
    lists = *lists_of(state, PARTIAL, (1, 1), torch.int64), *full
    text, mod = traced(name)
    seen = new_masks.rows(text, mod, lists, block, (B, H), lengths, found_on(arch))
    shown, key = shown_by(FUNCTIONS[name], state, block, lengths), torch.arange(lengths[1])
    wanted = shown.sum(-1), torch.where(shown, key, lengths[1]).amin(-1), torch.where(shown, key, -1).amax(-1)
    assert torch.equal(seen, torch.stack(wanted).int())


@st.composite
def seen_rows_of(draw: Callable[..., Any]) -> tuple[Tensor, Extent]:
    """What rows see: of windows, of documents, of staircases, with rows that see nothing, or of anything."""
    kind = draw(st.sampled_from(["window", "documents", "causal documents", "stairs", "anything"]))
    entries, heads, Sq = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2])), draw(st.integers(1, 1200))
    Sk = draw(st.sampled_from([Sq, Sq + 70])) if kind != "stairs" else draw(st.integers(1, 500))
    torch.manual_seed(draw(st.integers(0, 1 << 20)))
    shape, i = (entries, heads, Sq), torch.arange(Sq)
    if kind == "window":
        left, right = draw(st.integers(-5, Sq)), draw(st.integers(-5, Sq))
        first, last = (i - left).clamp(min=0), (i + right).clamp(max=Sk - 1)
        last = torch.where(last < first, -1, last)
        first = torch.where(last < 0, Sk, first)
        first, last = (x.expand(shape).clone() for x in (first, last))
    elif "documents" in kind:
        begins = torch.rand(shape) < draw(st.sampled_from([0.002, 0.01, 0.1]))
        begins[..., 0] = True
        first = torch.where(begins, i, 0).cummax(-1).values
        after = torch.nn.functional.pad(begins[..., 1:], (0, 1), value=True)
        last = torch.where(after, i, Sq).flip(-1).cummin(-1).values.flip(-1)
        last = i.expand(shape) if kind.startswith("causal") else last
    else:
        first, last = (torch.randint(0, Sk, shape) for _ in range(2))
        first, last = torch.minimum(first, last), torch.maximum(first, last)
        if kind == "stairs":
            first, last = (x.sort(-1).values for x in (first, last))
    is_empty = torch.rand(shape) < draw(st.sampled_from([0.0, 0.0, 0.3]))
    first, last = torch.where(is_empty, Sk, first), torch.where(is_empty, -1, last)
    keys = (last - first + 1).clamp(min=0)
    if draw(st.booleans()) and draw(st.booleans()):
        keys[0, 0, draw(st.integers(0, Sq - 1))] += 1
    return torch.stack([keys, first, last]).int(), Extent(entries, Sq, Sk, heads, heads)


@settings(max_examples=examples(60, 500), deadline=None, derandomize=True)
@given(
    drawn=seen_rows_of(),
    band=st.tuples(*[st.none() | st.integers(-3, 900)] * 2),
    schedule=st.sampled_from(["eager", "fuzz"]),
)
def test_rows_are_judged_as_by_torch(drawn: Any, band: tuple[Any, Any], schedule: str) -> None:
    """Entries of different bands are no band's, which torch's operators tell of all rows at once."""
    seen, extent = drawn
    wanted = seen_rows.judged(seen, Band(*band), extent)
    found = seen_rows.judged_by_kernel(seen, Band(*band), extent, found_on("sm_90a", schedule))
    assert torch.equal(found.bounds, wanted.bounds)
    assert torch.equal(found.starts, wanted.starts)
    if wanted.verdict.decreases:
        # What rows of documents are is asked of the others alone.
        names = "has_gaps", "decreases", "left", "right", "most"
        for name in names:
            assert getattr(found.verdict, name) == getattr(wanted.verdict, name), name
        return
    if wanted.verdict.no_documents:
        # Where these end is asked of documents alone.
        wanted = wanted._replace(verdict=wanted.verdict._replace(not_whole=found.verdict.not_whole))
    differ = found.verdict.is_no_band and not wanted.verdict.is_no_band and seen[0].flatten(0, 1).shape[0] > 1
    other = wanted.verdict._replace(is_no_band=1) if differ else wanted.verdict
    assert found.verdict == other
    own, wanted = (intervals._decided(x._replace(verdict=other), extent) for x in (found, wanted))
    assert repr(own) == repr(wanted)


def test_rows_that_see_nothing_decrease_nothing() -> None:
    """They are where the rows before them end: here the first ten of a window, and the last five."""
    i = torch.arange(40)
    first, last = (
        torch.where(i < 35, (i + 5).clamp(min=15), 40),
        torch.where(i < 35, (i + 5).clamp(max=39), -1),
    )
    is_empty = last < first
    first, last = torch.where(is_empty, 40, first), torch.where(is_empty, -1, last)
    seen = torch.stack([(last - first + 1).clamp(min=0), first, last]).int()[:, None, None]
    found = seen_rows.judged_by_kernel(seen, Band(), Extent(1, 40, 40, 1, 1), found_on("sm_90a"))
    assert is_empty.sum() == 15 and not found.verdict.decreases and not found.verdict.has_gaps
    assert found.bounds[0, 0, :10].tolist() == [[0, -1]] * 10
    assert found.bounds[0, 0, 35:].tolist() == [[40, 39]] * 5


def test_the_verdict_names_what_the_kernel_counts() -> None:
    """Two documents have two tiles and one."""
    i = torch.arange(400)
    first = torch.where(i < 300, 0, 300)
    seen = torch.stack([i - first + 1, first, i]).int()[:, None, None]
    found = seen_rows.judged_by_kernel(seen, Band(), Extent(1, 400, 400, 1, 1), found_on("sm_90a"))
    wanted = Verdict(0, 0, 1, 1, 1, 0, 0, 1, left=299, right=0, most=300, starts=2, longest=300, tiles=3)
    assert found.verdict == wanted and found.starts.tolist() == [0, 300]
