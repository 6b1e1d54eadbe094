"""Tables by which kernels visit a block mask: made once for a mask, and again after it has changed."""

from __future__ import annotations

import gc
import itertools
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flash4_torch
from flash4_torch.backends.emulator import emulated_find
from flash4_torch.backends.flex import bits, compiled, tables
from flash4_torch.backends.flex.tables import Lists, Tables, kept

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")


def lists_of(seed: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lists of a mask (1, 1, rows, columns): partial blocks, then full ones."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(rows, columns, generator=generator).argsort(-1).int()
    partial, full = (torch.randint(0, columns // 2 + 1, (rows,), generator=generator).int() for _ in range(2))
    own = [partial, order, full, order.flip(-1)]
    return tuple(x[None, None].contiguous() for x in own)


def made(lists: Lists) -> Tables:
    tile, how = tables.TileSize(128, 64), {"is_decided": False, "is_transposed": False}
    return tables.tables(lists, (64, 64), (200, 300), tile, emulated_find, **how)


def equal(one: Tables, other: Tables) -> bool:
    """What is behind the visible blocks may be anything."""
    number = one.rank[..., -1:]
    is_listed = torch.arange(one.visible.shape[-1]) < number
    visible = (torch.where(is_listed, x.visible, 0) for x in (one, other))
    pairs = (one.rank, other.rank), (one.states, other.states), visible
    return all(itertools.starmap(torch.equal, pairs)) and one[3:] == other[3:]


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH4_ARCH", "sm_90a")


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


def test_tables_of_many_lengths_do_not_pile_up() -> None:
    """A mask that is called with ever other lengths keeps the tables of the last ones."""
    lists, made_for = lists_of(0, 4, 5), []
    for length in range(200):
        kept(lists, length, lambda length=length: made_for.append(length))
    assert made_for == [*range(200)]
    assert len(tables._of_mask[lists[0]].tables) == tables._MOST_CALLS
    kept(lists, 199, pytest.fail)


def test_inference_tensors_have_no_versions() -> None:
    with torch.inference_mode():
        lists = lists_of(0, 4, 5)
    assert kept(lists, "key", lambda: made(lists)) is not kept(lists, "key", lambda: made(lists))


def test_calls_with_one_mask_make_its_tables_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the forward, and those of the backward, which walks by columns, until the mask changes."""
    monkeypatch.setenv("FLASH4_BACKEND", "emulator")
    monkeypatch.setattr(bits, "_MOST", 0)
    count = []
    original = compiled.tables
    monkeypatch.setattr(compiled, "tables", lambda *args, **how: count.append(args) or original(*args, **how))
    q, k, v = (torch.randn(1, 1, 128, 64).bfloat16().requires_grad_() for _ in range(3))
    mask = flash4_torch.create_block_mask(lambda b, h, i, j: i % 3 >= j, 1, 1, 128, 128, device="cpu")
    for _ in range(2):
        flash4_torch.flex_attention(q, k, v, block_mask=mask).sum().backward()
    assert len(count) == 2
    mask.kv_num_blocks.add_(0)
    flash4_torch.flex_attention(q.detach(), k, v, block_mask=mask)
    assert len(count) == 3
