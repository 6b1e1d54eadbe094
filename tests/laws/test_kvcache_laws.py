"""Laws of the functions around a KV cache: they are what the definition says, however a call is written."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import append_calls
import flash4_torch
from append_calls import Before, check_append
from everything import examples
from flash4_torch import testing
from flash4_torch.kernels.common.kvcache import FLOAT8, AppendPlan, RotaryPlan
from flash4_torch.reference import kvcache as reference

FLOAT8_CACHE = {"cache_dtype": FLOAT8, "k_scaled": True, "v_scaled": True}


@st.composite
def plans(draw: st.DrawFn) -> AppendPlan:
    """Calls of any kind, also those that no kernel serves."""
    D, indices = draw(st.sampled_from([4, 7, 16, 40])), st.sampled_from(["int32", "int64"])
    rotary = None
    slots = draw(st.sampled_from(["", "int32", "int64"]))
    if draw(st.booleans()):
        columns = 2 * draw(st.integers(1, D // 2))
        positions = draw(indices) if slots or draw(st.booleans()) else ""
        dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
        rotary = RotaryPlan(columns, draw(st.booleans()), dtype, positions, draw(st.booleans()))
    return AppendPlan(
        dtype=rotary.dtype
        if rotary and rotary.dtype != "float32"
        else draw(st.sampled_from(["bfloat16", "float16"])),
        D=D,
        Dv=draw(st.sampled_from([1, 8, 24])),
        slots=slots,
        paged=not slots and draw(st.booleans()),
        packed=not slots and draw(st.booleans()),
        rotary=rotary,
        **(FLOAT8_CACHE if draw(st.booleans()) else {}),
    )


@given(data=st.data())
@settings(max_examples=examples(60, 500))
def test_appending_is_right_and_all_else_keeps_its_bits(data: st.DataObject) -> None:
    x = data.draw(append_calls.calls(data.draw(plans())))
    before = Before.of(x)
    reference.append(x)
    check_append(x, before)


@given(data=st.data())
@settings(max_examples=examples(30, 300))
def test_what_a_gpu_runs_does_the_same(data: st.DataObject) -> None:
    """It picks no tokens, for which the host would have to wait."""
    x = data.draw(append_calls.calls(data.draw(plans())))
    before = Before.of(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_store_some", reference._store_without_waiting)
        reference.append(x)
    check_append(x, before)


class Sequences:
    """New keys and values of some sequences, and caches for them."""

    def __init__(self, draw: st.DrawFn) -> None:
        torch.manual_seed(draw(st.integers(0, 999)))
        self.before = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
        self.new = [draw(st.integers(0, 5)) for _ in self.before]
        self.page_size, T = draw(st.integers(1, 6)), sum(self.new)
        self.k, self.v, self.q = torch.randn(T, 2, 8), torch.randn(T, 2, 6), torch.randn(T, 4, 8)
        self.blocks = 14 // self.page_size + 1
        self.table = torch.randperm(self.blocks * len(self.before)).view(len(self.before), -1).int()
        angle = torch.rand(20, 3)
        self.rotary = {"cos": angle.cos(), "sin": angle.sin(), "interleaved": draw(st.booleans())}

    def caches(self) -> tuple[Tensor, Tensor]:
        k, v = (torch.zeros(self.table.numel(), self.page_size, 2, D) for D in (8, 6))
        return k, v

    @property
    def lengths(self) -> Tensor:
        return torch.tensor(self.before, dtype=torch.int32)

    @property
    def ends(self) -> Tensor:
        return torch.tensor([0, *torch.tensor(self.new).cumsum(0)], dtype=torch.int32)

    @property
    def keys(self) -> list[tuple[int, int]]:
        """Each token's sequence and its place in it."""
        pairs = zip(self.before, self.new, strict=True)
        return [(b, length + i) for b, (length, n) in enumerate(pairs) for i in range(n)]

    @property
    def slots(self) -> Tensor:
        size = self.page_size
        return torch.tensor(
            [int(self.table[b, key // size]) * size + key % size for b, key in self.keys], dtype=torch.long
        )


@given(data=st.data())
@settings(max_examples=examples(25, 200))
def test_slots_tables_and_dense_caches_are_one(data: st.DataObject) -> None:
    s = Sequences(data.draw)
    by_table, by_slots = s.caches(), s.caches()
    where = {"seqused_k": s.lengths, "cu_seqlens": s.ends}
    q = flash4_torch.append_kvcache(s.k, s.v, *by_table, block_table=s.table, q=s.q, **where, **s.rotary)
    positions = torch.tensor([key for _, key in s.keys], dtype=torch.int64)
    more = {"positions": positions, "q": s.q, **s.rotary}
    again = flash4_torch.append_kvcache(s.k, s.v, *by_slots, slot_mapping=s.slots, **more)
    assert torch.equal(q, again)
    dense = [torch.zeros(len(s.before), s.blocks * s.page_size, 2, x.shape[-1]) for x in (s.k, s.v)]
    flash4_torch.append_kvcache(s.k, s.v, *dense, **where, **s.rotary)
    for table, slots, entries in zip(by_table, by_slots, dense, strict=True):
        assert torch.equal(table, slots)
        assert torch.equal(table[s.table.long()].flatten(1, 2), entries)


@given(data=st.data())
@settings(max_examples=examples(25, 200))
def test_chunks_append_what_one_call_does(data: st.DataObject) -> None:
    """So do a batch and its sequences one by one, in place or not."""
    s = Sequences(data.draw)
    whole, chunks = s.caches(), s.caches()
    q = flash4_torch.append_kvcache(
        s.k, s.v, *whole, block_table=s.table, seqused_k=s.lengths, cu_seqlens=s.ends, q=s.q, **s.rotary
    )
    rotated = s.q.clone()
    for b, (start, end) in enumerate(pairwise(s.ends.tolist())):
        cut = data.draw(st.integers(start, end))
        for first, last in ((start, cut), (cut, end)):
            own, table = slice(first, last), s.table[b : b + 1]
            length = torch.tensor([s.before[b] + first - start], dtype=torch.int32)
            part = rotated[None, own]
            more = {"q": part, "q_out": part, **s.rotary}
            flash4_torch.append_kvcache(
                s.k[None, own], s.v[None, own], *chunks, block_table=table, seqused_k=length, **more
            )
    assert torch.equal(q, rotated)
    assert all(map(torch.equal, whole, chunks))


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_distances_alone(interleaved: bool) -> None:
    """Rotated q and k have the same product wherever they are, as long as they are as far apart."""
    angle = torch.arange(60).double()[:, None] * torch.rand(4).double()
    rotary = {"cos": angle.cos(), "sin": angle.sin(), "interleaved": interleaved}
    q, k = torch.randn(2, 1, 1, 10).double()
    products = []
    for shift in (0, 7, 40):
        cache = torch.zeros(2, 1, 60, 1, 10).double()
        place = torch.tensor([shift + 5]), torch.tensor([shift])
        flash4_torch.append_kvcache(k, k, *cache, slot_mapping=place[1], positions=place[1], **rotary)
        none = torch.tensor([-1])
        turned = flash4_torch.append_kvcache(
            k, k, *cache, slot_mapping=none, positions=place[0], q=q, **rotary
        )
        products.append((turned * cache[0, 0, shift]).sum())
    torch.testing.assert_close(products, products[:1] * 3)


def test_float8_saturates_and_keeps_nan() -> None:
    k = torch.tensor([1.0, 500.0, -1e4, math.inf, math.nan, 2.0**-11, 0.0, -3.3]).view(1, 1, 8)
    cache = torch.zeros(2, 1, 1, 1, 8).to(torch.float8_e4m3fn)
    scales = {"k_scale": torch.tensor(2.0), "v_scale": torch.tensor([0.5])}
    flash4_torch.append_kvcache(k, k, *cache, slot_mapping=torch.tensor([0]), **scales)
    found = cache.float().flatten(1)
    want = [[0.5, 256.0, -448.0, 448.0, math.nan, 0.0, 0.0, -1.625]]
    want += [[2.0, 448.0, -448.0, 448.0, math.nan, 0.0, 0.0, -6.5]]
    torch.testing.assert_close(found, torch.tensor(want), equal_nan=True)


@given(data=st.data())
@settings(max_examples=examples(30, 200))
def test_parts_over_disjoint_keys_merge_to_attention(data: st.DataObject) -> None:
    """They may be stacked or a list, and come in any order."""
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 999)))
    Sk, dtype = draw(st.integers(0, 30)), draw(st.sampled_from([torch.float32, torch.float64]))
    q, k, v = (torch.randn(2, S, H, D, dtype=dtype) for S, H, D in ((5, 4, 8), (Sk, 2, 8), (Sk, 2, 6)))
    cuts = sorted({0, Sk, *draw(st.lists(st.integers(0, Sk), max_size=4))})
    spans = [*pairwise(cuts), (0, 0)]
    results = [flash4_torch.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in spans]
    order = draw(st.permutations(range(len(results))))
    outs, lses = zip(*(results[i] for i in order), strict=True)
    whole = flash4_torch.attention(q, k, v, return_lse=True)
    stacked = flash4_torch.merge_states(torch.stack(outs), torch.stack(lses))
    listed = flash4_torch.merge_states(outs, list(lses))
    packed = flash4_torch.merge_states([x[0] for x in outs], [x[0] for x in lses])
    for one, same, wanted in zip(stacked, listed, whole, strict=True):
        assert torch.equal(one, same) and one.dtype == wanted.dtype
        torch.testing.assert_close(one, wanted)
    torch.testing.assert_close(packed, tuple(x[0] for x in whole))


def test_parts_without_keys_do_not_count() -> None:
    outs, lses = torch.randn(3, 4, 2, 8).half(), torch.randn(3, 2, 4)
    lses[1:] = -math.inf
    outs[1:] = math.nan
    with testing.poisoned_memory():
        out, lse = flash4_torch.merge_states(outs, lses)
    assert torch.equal(out, outs[0]) and torch.equal(lse, lses[0])
    lses[0, :, 2] = -math.inf
    out, lse = flash4_torch.merge_states(outs, lses)
    assert (out[2] == 0.0).all() and (lse[:, 2] == -math.inf).all()
    out, lse = flash4_torch.merge_states(outs[:0], lses[:0])
    assert (out == 0.0).all() and (lse == -math.inf).all()
