"""Calls of the kernel that appends to a KV cache, caches of any kind, and what must be left behind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from flash4_torch.kernels.common.kvcache import AppendPlan
from flash4_torch.reference.kvcache import Append

PAGE_SIZES = st.one_of(st.sampled_from([1, 16]), st.integers(1, 70))
LAYOUTS = ("rows", "heads", "both", "padded")
"""Pages of rows of heads, of heads of rows, with K and V side by side, or with gaps."""
GARBAGE = (-1, 2**31 - 1, -(2**31), 99)
_LARGEST = 448.0


class Place(NamedTuple):
    """A token's row in the cache, None if it has none, and the row of cos and sin that rotates it."""

    row: tuple[int, int] | None
    position: int


def storage(
    layout: str, shape: Sequence[int], widths: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """K and V caches full of arbitrary bits."""
    pages, size, Hk = shape

    def make(*sizes: int) -> Tensor:
        numbers = math.prod(sizes) * dtype.itemsize
        return torch.randint(0, 256, (max(numbers, 1),), dtype=torch.uint8)[:numbers].view(dtype).view(sizes)

    if layout == "both":
        both = make(pages, size, Hk, sum(widths))
        return both[..., : widths[0]], both[..., widths[0] :]
    if layout == "heads":
        return tuple(make(pages, Hk, size, width).transpose(1, 2) for width in widths)
    gap = 1 if layout == "padded" else 0
    return tuple(
        make(pages, size + gap, Hk + gap, width + 8 * gap)[:, :size, :Hk, :width] for width in widths
    )


@st.composite
def calls(draw: st.DrawFn, plan: AppendPlan) -> Append:
    """Calls that a host may make of such a kernel, good ones and bad ones."""
    torch.manual_seed(draw(st.integers(0, 999)))
    dtype, Hk = getattr(torch, plan.dtype), draw(st.integers(1, 3))
    B = draw(st.sampled_from([2, 3, 1]))
    lengths = [draw(st.integers(0, 5)) for _ in range(B)] if plan.packed else [draw(st.integers(1, 4))] * B
    if plan.slots:
        lengths = [draw(st.integers(1, 9))]
    is_flat = plan.packed or (plan.slots and draw(st.booleans()))
    padding = draw(st.integers(0, 2)) if plan.packed else 0
    T = max(sum(lengths) + padding, 1)
    n, S = (1, T) if is_flat else (len(lengths), lengths[0])
    k, v = (_rows(draw, (n, S, Hk, D), dtype) for D in (plan.D, plan.Dv))
    page_size = draw(PAGE_SIZES)
    pages = B if not (plan.slots or plan.paged) else draw(st.integers(1, 6)) + T
    shape, widths = (pages, page_size, Hk), (plan.D, plan.Dv)
    cache_dtype = torch.float8_e4m3fn if plan.float8 else dtype
    k_cache, v_cache = storage(draw(st.sampled_from(LAYOUTS)), shape, widths, cache_dtype)
    x = Append(k, v, k_cache, v_cache)
    x = _with_slots(draw, x, plan.slots, T) if plan.slots else _with_sequences(draw, x, plan, lengths)
    scales = [_scale(draw, len(lengths), Hk) if s else None for s in (plan.k_scaled, plan.v_scaled)]
    if plan.slots:
        scales = [None if scale is None else scale[:1] for scale in scales]
    return _with_rotary(draw, x._replace(k_scale=scales[0], v_scale=scales[1]), plan)


def _rows(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rows side by side, or with gaps of NaN as between the parts of a projection."""
    n, S, H, D = shape
    more = draw(st.sampled_from([0, 0, 2]))
    room = torch.full((n, S, H + more, D), math.nan, dtype=dtype)
    room[:, :, :H] = 3 * torch.randn(shape)
    return room[:, :, :H]


def _with_slots(draw: st.DrawFn, x: Append, dtype: str, T: int) -> Append:
    slots = x.k_cache.shape[0] * x.k_cache.shape[1]
    mapping = torch.randperm(slots)[:T].to(getattr(torch, dtype))
    bad = [-1, -(2**31), 2**31 - 1, slots, *([2**40, -(2**60), 2**63 - 1] if dtype == "int64" else [])]
    for t in range(T):
        if draw(st.integers(0, 3)) == 0:
            mapping[t] = draw(st.sampled_from(bad))
    return x._replace(slot_mapping=_spread(draw, mapping))


def _with_sequences(draw: st.DrawFn, x: Append, plan: AppendPlan, lengths: list[int]) -> Append:
    pages, page_size = x.k_cache.shape[:2]
    table, room = None, page_size
    if plan.paged:
        blocks = draw(st.integers(0, pages // len(lengths)))
        table = torch.randperm(pages)[: len(lengths) * blocks].view(len(lengths), blocks).int()
        room = blocks * page_size
        if table.numel() and draw(st.booleans()):
            table[draw(st.integers(0, len(table) - 1)), draw(st.integers(0, blocks - 1))] = draw(
                st.sampled_from(GARBAGE)
            )
        wide = torch.full((len(table), blocks + 3), 2**30, dtype=torch.int32)
        wide[:, 2 : 2 + blocks] = table
        table = wide[:, 2 : 2 + blocks]
    before = [
        draw(st.one_of(st.integers(0, max(room - n, 0)), st.sampled_from([room - 1, room, -1, *GARBAGE])))
        for n in lengths
    ]
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return x._replace(
        block_table=table,
        seqused_k=_spread(draw, torch.tensor(before, dtype=torch.int32)),
        cu_seqlens=_spread(draw, ends) if plan.packed else None,
    )


def _spread(draw: st.DrawFn, x: Tensor) -> Tensor:
    """The numbers side by side, or every third one of others."""
    if draw(st.booleans()):
        return x
    wide = torch.full((3 * len(x),), 2**30, dtype=x.dtype)
    wide[::3] = x
    return wide[::3]


def _scale(draw: st.DrawFn, sequences: int, Hk: int) -> Tensor:
    shape = draw(st.sampled_from([(sequences, Hk), (sequences, Hk), (Hk,), ()]))
    return (torch.rand(shape) * draw(st.sampled_from([0.01, 1.0])) + 1e-3).expand(sequences, Hk)


def _with_rotary(draw: st.DrawFn, x: Append, plan: AppendPlan) -> Append:
    rotary = plan.rotary
    if rotary is None:
        return x
    rows, half = draw(st.integers(1, 50)), rotary.columns // 2
    angles = torch.rand(rows, half) * 6
    both = torch.cat([angles.cos(), angles.sin()], 1)
    if draw(st.booleans()):
        both = torch.cat([both, torch.full((rows, 8), math.nan)], 1)
    both = both.to(getattr(torch, rotary.dtype))
    T, positions = x.k.shape[0] * x.k.shape[1], None
    if rotary.positions:
        positions = torch.randint(0, rows, (T,)).to(getattr(torch, rotary.positions))
        if draw(st.booleans()):
            positions[draw(st.integers(0, T - 1))] = draw(st.sampled_from([-1, rows, 2**31 - 1]))
        positions = _spread(draw, positions)
    q = q_out = None
    if rotary.q:
        n, S, Hk, D = x.k.shape
        q = _rows(draw, (n, S, Hk * draw(st.integers(1, 4)), D), x.k.dtype)
        q_out = q if draw(st.booleans()) else _rows(draw, tuple(q.shape), q.dtype).fill_(math.nan)
    return x._replace(
        positions=positions,
        cos=both[:, :half],
        sin=both[:, half : 2 * half],
        interleaved=rotary.interleaved,
        q=q,
        q_out=q_out,
    )


def places(x: Append) -> list[Place]:
    """The places of all tokens, one by one."""
    n, S = x.k.shape[:2]
    pages, page_size = x.k_cache.shape[:2]
    found = []
    for t in range(n * S):
        row, key = None, 0
        if x.slot_mapping is not None:
            slot = int(x.slot_mapping[t])
            if 0 <= slot < pages * page_size:
                row = divmod(slot, page_size)
        else:
            b, i = divmod(t, S)
            if x.cu_seqlens is not None:
                b = max((b for b, start in enumerate(x.cu_seqlens[:-1].tolist()) if start <= t), default=0)
                i = t - int(x.cu_seqlens[b])
            key = int(x.seqused_k[b]) + i
            own = x.cu_seqlens is None or t < int(x.cu_seqlens[b + 1])
            if x.block_table is None:
                row = (b, key) if own and 0 <= key < page_size else None
            elif own and 0 <= key < x.block_table.shape[1] * page_size:
                page = int(x.block_table[b, key // page_size])
                row = (page, key % page_size) if 0 <= page < pages else None
        position = key if x.positions is None else int(x.positions[t])
        last = 0 if x.cos is None else len(x.cos) - 1
        found.append(Place(row, min(max(position, 0), last)))
    return found


class Before(NamedTuple):
    """Everything that a launch may change, as it was, and the tensors' exact results."""

    k: Tensor
    v: Tensor
    q: Tensor | None
    bits: tuple[Tensor, ...]
    """The memory of both caches, and of q_out."""

    @classmethod
    def of(cls, x: Append) -> Before:
        changed = (x.k_cache, x.v_cache, x.q_out)
        bits = tuple(memory(t).clone() for t in changed if t is not None)
        return cls(x.k.clone(), x.v.clone(), None if x.q is None else x.q.clone(), bits)


def memory(x: Tensor) -> Tensor:
    """All bytes of the storage that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


def exact_rotation(rows: Tensor, found: Sequence[Place], x: Append) -> tuple[Tensor, Tensor]:
    """Rows (T, H, D) rotated as complex numbers in float64, and the size of what was added up for each."""
    rows = rows.double()
    if x.cos is None:
        return rows, rows.abs()
    position = torch.tensor([place.position for place in found])
    angle = torch.complex(x.cos[position].double(), x.sin[position].double())[:, None]
    R = 2 * angle.shape[-1]
    order = torch.arange(R).view(-1, 2).T if x.interleaved else torch.arange(R).view(2, -1)
    z = torch.complex(rows[..., order[0]], rows[..., order[1]])
    turned, result, size = z * angle, rows.clone(), rows.abs()
    result[..., order[0]], result[..., order[1]] = turned.real, turned.imag
    size[..., order] = z.abs()[..., None, :] * angle.abs()[..., None, :] * 2
    return result, size


def check_append(x: Append, before: Before) -> None:
    """Requires every row that has a place to be right to one rounding, and all else to keep its bits."""
    found = places(x)
    expected = [bits.clone() for bits in before.bits]
    for bits, cache, rows, scale in zip(
        expected, (x.k_cache, x.v_cache), (before.k, before.v), (x.k_scale, x.v_scale), strict=False
    ):
        is_k = cache is x.k_cache
        rows = rows.flatten(0, 1)
        exact, size = exact_rotation(rows, found, x) if is_k else (rows.double(), rows.double().abs())
        own = torch.empty(0, dtype=cache.dtype).set_(bits.untyped_storage(), *_view(cache))
        for t, place in enumerate(found):
            if place.row is None:
                continue
            got = cache[place.row]
            factor = torch.ones(got.shape[0]) if scale is None else scale[_sequence(x, t)]
            _check_row(got, rows[t], exact[t], size[t], factor, turns=is_k and x.cos is not None)
            as_bits = (t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in (own, got))
            target, source = as_bits
            target[place.row] = source
    if x.k_cache.untyped_storage().data_ptr() == x.v_cache.untyped_storage().data_ptr():
        # Both have written to the same memory: each to its own columns.
        changed = [e != b for e, b in zip(expected[:2], before.bits[:2], strict=True)]
        assert not (changed[0] & changed[1]).any()
        expected[0] = torch.where(changed[1], expected[1], expected[0])
        expected[1] = expected[0]
    assert torch.equal(memory(x.k_cache), expected[0]), "bytes beside the new keys have changed"
    assert torch.equal(memory(x.v_cache), expected[1]), "bytes beside the new values have changed"
    if x.q_out is not None and before.q is not None:
        exact, size = exact_rotation(before.q.flatten(0, 1), found, x)
        ones = torch.ones(exact.shape[1])
        for t, row in enumerate(x.q_out.flatten(0, 1)):
            _check_row(row, before.q.flatten(0, 1)[t], exact[t], size[t], ones, turns=True)
        own = torch.empty(0, dtype=x.q_out.dtype).set_(
            before.bits[2].clone().untyped_storage(), *_view(x.q_out)
        )
        own.copy_(x.q_out)
        assert torch.equal(memory(own), memory(x.q_out)), "bytes beside q_out have changed"


def _view(x: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return x.storage_offset(), x.shape, x.stride()


def _sequence(x: Append, t: int) -> int:
    if x.slot_mapping is not None:
        return 0
    if x.cu_seqlens is None:
        return t // x.k.shape[1]
    return max(b for b, start in enumerate(x.cu_seqlens[:-1].tolist()) if start <= t)


def _check_row(got: Tensor, given: Tensor, exact: Tensor, size: Tensor, scale: Tensor, turns: bool) -> None:
    """Requires a row (H, D) to be `exact` to one rounding, and what was only copied to keep its bits."""
    float32 = 2.0**-22
    if got.dtype == torch.float8_e4m3fn:
        if not turns:
            wanted = (given.float() / scale[:, None]).clamp(-_LARGEST, _LARGEST).to(got.dtype)
            assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
        exact, size = (number / scale.double()[:, None] for number in (exact, size))
        exact, half_ulp, least = exact.clamp(-_LARGEST, _LARGEST), 2.0**-4, 2.0**-10
    else:
        if not turns:
            assert torch.equal(got.view(torch.int16), given.view(torch.int16))
        info = torch.finfo(got.dtype)
        half_ulp, least = info.eps / 2, info.tiny * info.eps / 2
    error = (got.double() - exact).abs()
    assert (error <= (exact.abs() * half_ulp).clamp(min=least) * 1.0001 + float32 * size).all()
