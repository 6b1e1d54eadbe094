"""Tables by which kernels visit a block mask: made once for a mask, and again after it has changed."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash4_torch
from everything import examples
from flash4_torch.backends.flex import bits, compiled, tables
from flash4_torch.backends.flex.tables import Lists, Tables, kept
from flash4_torch.reference.flex import EMPTY, FULL, Blocks


def lists_of(seed: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lists of a mask (1, 1, rows, columns): partial blocks, then full ones."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(rows, columns, generator=generator).argsort(-1).int()
    partial, full = (torch.randint(0, columns // 2 + 1, (rows,), generator=generator).int() for _ in range(2))
    own = [partial, order, full, order.flip(-1)]
    return tuple(x[None, None].contiguous() for x in own)


def made(lists: Lists) -> Tables:
    return tables.tables(Blocks.of(*lists, (64, 64)), 200, 300, tables.TileSize(128, 64))


def equal(one: Tables, other: Tables) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one[:3], other[:3], strict=True)) and one[3:] == other[3:]


@given(seed=st.integers(0, 99), row=st.integers(0, 3), changed=st.sampled_from([None, 0, 1, 2, 3]))
def test_tables_are_made_once_and_again_after_a_change(seed: int, row: int, changed: int | None) -> None:
    lists = lists_of(seed, 4, 5)
    first = kept(lists, "key", lambda: made(lists))
    assert kept(lists, "key", pytest.fail) is first
    assert kept(lists, "other", lambda: made(lists)) is not first
    if changed is not None:
        lists[changed][0, 0, row] = lists[changed][0, 0, row].flip(-1) if changed % 2 else 1
        assert equal(kept(lists, "key", lambda: made(lists)), made(lists))
    exchanged = (lists[0], lists[1], lists[2].clone(), lists[3])
    assert kept(exchanged, "key", lambda: made(exchanged)) is not first


def test_tables_live_as_long_as_their_mask() -> None:
    lists = lists_of(0, 4, 5)
    table = weakref.ref(kept(lists, "key", partial(made, lists)).visible)
    assert table() is not None
    del lists
    gc.collect()
    assert table() is None


def test_inference_tensors_have_no_versions() -> None:
    with torch.inference_mode():
        lists = lists_of(0, 4, 5)
    assert kept(lists, "key", lambda: made(lists)) is not kept(lists, "key", lambda: made(lists))


def test_calls_with_one_mask_make_its_tables_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the forward, and those of the backward, which walks by columns, until the mask changes."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    monkeypatch.setenv("FLASH4_BACKEND", "emulator")
    monkeypatch.setenv("FLASH4_ARCH", "sm_90a")
    monkeypatch.setattr(bits, "_MOST", 0)
    count = []
    original = compiled.tables
    monkeypatch.setattr(compiled, "tables", lambda *args: count.append(args) or original(*args))
    q, k, v = (torch.randn(1, 1, 128, 64).bfloat16().requires_grad_() for _ in range(3))
    mask = flash4_torch.create_block_mask(lambda b, h, i, j: i % 3 >= j, 1, 1, 128, 128, device="cpu")
    for _ in range(2):
        flash4_torch.flex_attention(q, k, v, block_mask=mask).sum().backward()
    assert len(count) == 2
    mask.kv_num_blocks.add_(0)
    flash4_torch.flex_attention(q.detach(), k, v, block_mask=mask)
    assert len(count) == 3


@given(
    seed=st.integers(0, 99),
    lengths=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    size=st.tuples(st.sampled_from([16, 48, 64, 128, 1000]), st.sampled_from([16, 48, 64, 128, 1000])),
    tile=st.tuples(st.sampled_from([16, 64, 192]), st.sampled_from([32, 48, 64, 128])),
    heads=st.sampled_from([1, 2, 4]),
    has_heads=st.booleans(),
)
@example(0, (300, 200), (128, 128), (16, 64), 4, True)
@example(1, (300, 200), (64, 48), (64, 32), 2, True)
@settings(max_examples=examples(60, 500))
def test_tables_list_what_tiles_see(
    seed: int,
    lengths: tuple[int, int],
    size: tuple[int, int],
    tile: tuple[int, int],
    heads: int,
    has_heads: bool,
) -> None:
    """Blocks that any of a tile's rows and heads sees, in order, and whether any does not see all of it."""
    torch.manual_seed(seed)
    counts = [-(-n // own) for n, own in zip(lengths, size, strict=True)]
    state = torch.randint(0, 3, (2, 4 if has_heads else 1, *counts), dtype=torch.uint8)
    found = tables.tables(Blocks(state, size), *lengths, tables.TileSize(*tile, heads))
    # The state of each row and column, by head.
    i, j = (torch.arange(n) // own for n, own in zip(lengths, size, strict=True))
    whole = state[:, :, i[:, None], j]
    for b, n in ((b, n) for b in range(2) for n in range(found.visible.shape[1])):
        own_heads = whole[b, n * heads : (n + 1) * heads] if has_heads else whole[b]
        for m in range(found.visible.shape[2]):
            parts = own_heads[:, m * tile[0] : (m + 1) * tile[0]].split(tile[1], 2)
            seen = [
                (2 * c + bool((x != FULL).any())) for c, x in enumerate(parts) if bool((x != EMPTY).any())
            ]
            assert found.visible[b, n, m, : len(seen)].tolist() == seen
            before = [sum(entry // 2 < c for entry in seen) for c in range(len(parts) + 1)]
            assert found.rank[b, n, m].tolist() == before
    assert found.visible.is_contiguous() and found.visible.dtype == found.rank.dtype == torch.int32
