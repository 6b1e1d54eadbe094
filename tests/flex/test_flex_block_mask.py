"""create_block_mask against torch's: the same lists, for drawn masks, sizes and blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.flex_attention import create_block_mask as torchs

from flash4_torch import create_block_mask, flex_attention
from flash4_torch.errors import ArgumentError, RangeError, TraceError
from flash4_torch.flex import block_mask as module
from flex_mods import drawn_mask

LISTS = [
    f"{full}{side}_{what}"
    for full in ("", "full_")
    for side in ("kv", "q")
    for what in ("num_blocks", "indices")
]


def same(ours: BlockMask, theirs: BlockMask) -> None:
    assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for name in LISTS:
        x, y = getattr(ours, name), getattr(theirs, name)
        assert x.dtype == y.dtype == torch.int32 and torch.equal(x, y), name


def nothing(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i < 0) & (j < 0)


def everything(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= 0) & (j >= 0)


def slanted(length: int, shift: int) -> Any:
    """Documents that begin elsewhere in each batch entry and head."""
    return lambda b, h, i, j: (i + shift * h) // length == (j + 2 * shift * b) // length


masks = st.one_of(
    st.builds(drawn_mask, st.integers(0, 60), st.integers(1, 2), st.integers(1, 90)),
    st.builds(slanted, st.integers(1, 40), st.integers(1, 9)),
    st.sampled_from([nothing, everything]),
)
sizes = st.tuples(
    st.sampled_from([None, 3, 2, 1]),
    st.sampled_from([None, 3, 2, 1]),
    st.integers(1, 150),
    st.integers(1, 150),
)
blocks = st.one_of(st.sampled_from([1, 8, 16, 128]), st.tuples(st.integers(1, 20), st.integers(1, 40)))


@settings(max_examples=40)
@given(mask=masks, sizes=sizes, block=blocks)
def test_lists_are_torchs(mask: Any, sizes: Any, block: Any) -> None:
    theirs = torchs(mask, *sizes, device="cpu", BLOCK_SIZE=block)
    same(create_block_mask(mask, *sizes, "cpu", block), theirs)


@pytest.mark.parametrize("length, shift", [(16, 3), (5, 1), (40, 9)])
def test_batch_entries_and_heads_have_lists_of_their_own(length: int, shift: int) -> None:
    theirs = torchs(slanted(length, shift), 2, 3, 100, 90, device="cpu", BLOCK_SIZE=16)
    ours = create_block_mask(slanted(length, shift), 2, 3, 100, 90, "cpu", 16)
    same(ours, theirs)
    assert len({str(x.tolist()) for entry in ours.kv_indices for x in entry}) > 3


@settings(max_examples=40)
@given(mask=masks, sizes=sizes, block=blocks, scores=st.integers(1, 4000), ordered=st.integers(1, 50))
def test_strips_change_nothing(mask: Any, sizes: Any, block: Any, scores: int, ordered: int) -> None:
    """However few scores are held at once, the lists are the same."""
    whole = create_block_mask(mask, *sizes, "cpu", block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SCORES", scores)
        patch.setattr(module, "_BLOCKS", ordered)
        same(create_block_mask(mask, *sizes, "cpu", block), whole)


def test_blocks_that_bounds_tell_are_not_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of blocks on the diagonal alone are, and no more at once than the bound."""
    seen: list[int] = []
    evaluate = module.programs.evaluate

    def counted(*arguments: Any) -> Any:
        found = evaluate(*arguments)
        seen.append(found[0].numel())
        return found

    monkeypatch.setattr(module.programs, "evaluate", counted)
    monkeypatch.setattr(module, "_SCORES", 5000)
    create_block_mask(lambda b, h, i, j: i >= j, None, None, 900, 1100, "cpu", (16, 32))
    # Each row of 16 queries has one block of 32 keys in which the diagonal is.
    assert max(seen) <= 5000 and sum(seen) == 57 * 16 * 32


@pytest.mark.parametrize("documents", ["sorted", "drawn"])
def test_time_is_of_the_order_of_blocks(documents: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents: blocks with two documents or the diagonal are evaluated, whatever is far apart is not."""
    S, block = 4096, 64
    document = torch.randint(0, 9, (S,)).sort()[0] if documents == "sorted" else torch.randint(0, 9, (S,))
    evaluated: list[int] = []
    evaluate = module.programs.evaluate

    def counted(*arguments: Any) -> Any:
        found = evaluate(*arguments)
        evaluated.append(found[0].numel() // block**2)
        return found

    monkeypatch.setattr(module.programs, "evaluate", counted)
    create_block_mask(lambda b, h, i, j: (document[i] == document[j]) & (i >= j), 1, 1, S, S, "cpu", block)
    count, all_blocks = sum(evaluated), (S // block) ** 2
    below = (all_blocks + S // block) // 2
    assert count == below if documents == "drawn" else count <= all_blocks // 10


def test_bad_arguments_are_named() -> None:
    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def branches(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j if i > 3 else i == j

    bad: list[tuple[str, type[Exception], tuple[Any, ...]]] = [
        ("mask_mod", ArgumentError, (torch.ones(2), 1, 1, 8, 8)),
        ("B is 0", RangeError, (mask, 0, 1, 8, 8)),
        ("H is 1.5", ArgumentError, (mask, 1, 1.5, 8, 8)),
        ("KV_LEN is -2", RangeError, (mask, 1, 1, 8, -2)),
        ("BLOCK_SIZE is 0", RangeError, (mask, 1, 1, 8, 8, "cpu", 0)),
        ("BLOCK_SIZE", ArgumentError, (mask, 1, 1, 8, 8, "cpu", (8, 8, 8))),
        ("mask_mod .*branches", TraceError, (branches, 1, 1, 8, 8)),
    ]
    call: Any = create_block_mask
    for message, error, arguments in bad:
        with pytest.raises(error, match=message):
            call(*arguments)


class Causal(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2], "cpu")
        return flex_attention(q, k, v, block_mask=mask)


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


@pytest.mark.filterwarnings("ignore:While compiling")  # torch's, of what a strict export records
@pytest.mark.parametrize("strict", [False, True])
def test_a_mask_is_made_in_an_exported_graph(strict: bool) -> None:
    inputs = tuple(torch.randn(1, 2, 20, 8) for _ in range(3))
    exported = torch.export.export(Causal(), inputs, strict=strict).module()
    torch.testing.assert_close(exported(*inputs), Causal()(*inputs))


def test_a_mask_of_tensors_without_values() -> None:
    sizes = None, None, 300, 200
    assert create_block_mask(causal, *sizes, "meta").kv_indices.device.type == "meta"
    with FakeTensorMode():
        assert create_block_mask(causal, *sizes, "cpu").shape == (1, 1, 300, 200)
