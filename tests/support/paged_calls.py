"""Launches of forward kernels over paged caches, next to those of the same calls with packed keys."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from decode_calls import LAYOUTS, make_cache
from flash4_torch.reference.dropout import thresholds
from kernel_calls import Call, Kernel, Results, calls, check_results
from kernel_runs import compiled, emulated, run

FAR = 2**31 + 40
"""Elements from one page or head to the next: more than 32 bits count."""


@dataclass(frozen=True)
class PagedCall:
    """A call with packed queries, whose keys and values are in pages."""

    call: Call
    k: Tensor
    """(pages, page_size, Hk, D)"""
    v: Tensor
    table: Tensor
    """(B, blocks)"""
    seqused_k: Tensor


def in_pages(call: Call, page_size: int, layout: str = "rows", seed: int = 0) -> PagedCall:
    """The call with its keys in pages at random places; there is NaN in all memory that is nobody's."""
    generator = torch.Generator().manual_seed(seed)
    parts = (x.split(call.lengths[1]) for x in (call.k, call.v))
    k, v, table = make_cache(*parts, generator, layout, page_size)
    if seed % 2:
        table = table.T.contiguous().T
    return PagedCall(call, k, v, table, torch.tensor(call.lengths[1], dtype=torch.int32))


def far_apart(paged: PagedCall, what: Literal["pages", "heads"]) -> PagedCall:
    """The same call, with its pages or its heads more elements apart than 32 bits count."""
    mode = {"pages": 0, "heads": 2}[what]
    return replace(paged, k=_far(paged.k, mode), v=_far(paged.v, mode))


def _far(cache: Tensor, mode: int) -> Tensor:
    """A copy whose stride in that dimension is `FAR`, and in the others what a contiguous one has."""
    others = cache.select(mode, 0)
    stride = list(torch.empty(others.shape, device="meta").stride())
    stride.insert(mode, FAR)
    empty = torch.empty(cache.shape[mode] * FAR, dtype=cache.dtype)
    return empty.as_strided(cache.shape, stride).copy_(cache)


@st.composite
def paged_calls(draw: st.DrawFn, kernel: Kernel) -> PagedCall:
    """Calls that a host may make of such a kernel; some sequence has several blocks of keys."""
    features, config = kernel
    whole = 1 if config.ragged_k else config.keys
    several = calls(features, whole=whole, packed=config.pack_gqa > 1).filter(
        lambda call: any(Sq > 0 and Sk > config.keys for Sq, Sk in zip(*call.lengths, strict=True))
    )
    call = draw(several)
    page_size = features.page_box * draw(st.sampled_from([1, 1, 2, 3, 5]))
    return in_pages(call, page_size, draw(st.sampled_from(LAYOUTS)), draw(st.integers(0, 999)))


def dense(kernel: Kernel) -> Kernel:
    """The kernel with the same tiles, for packed keys."""
    return kernel[0]._replace(page_box=0), kernel[1]


def run_paged(kernel: Kernel, paged: PagedCall, min_seqlen_q: int = 0, **schedule: Any) -> Results:
    """A launch into memory full of NaN; raises for whatever the emulator finds wrong."""
    features, config = kernel
    call = paged.call
    out = torch.full((*call.q.shape[:-1], features.Dv), math.nan, dtype=call.q.dtype)
    lse = torch.full(call.q.shape[1::-1], math.nan)
    tile_counter = torch.zeros(1, dtype=torch.int32)
    ends_q = torch.tensor([0, *torch.tensor(call.lengths[0]).cumsum(0)], dtype=torch.int32)
    byte, fraction = thresholds(0.0)
    numbers = (call.scale, call.softcap, call.left, call.right, max(call.lengths[0]))
    params = (*numbers, call.heads_per_section, call.num_sms, byte, fraction, 1.0, 0, 0, 0)
    pages = paged.table, paged.seqused_k, min_seqlen_q
    tensors = (call.q, paged.k, paged.v, out, lse, None, tile_counter, ends_q)
    touched = (*tensors, *pages[:2], call.sinks)
    with (
        emulated(kernel, call, **schedule) as device,
        device.touching(*(x for x in touched if x is not None)),
    ):
        compiled(features, config)(*tensors, pages, None, None, call.sinks, params)
    assert tile_counter.item() == 0
    return Results(out, lse)


def same(a: Results, b: Results) -> bool:
    return torch.equal(a.out, b.out) and torch.equal(a.lse, b.lse)


# Laws.


def pages_change_nothing(kernel: Kernel, data: st.DataObject) -> None:
    """A generated call is right, and has the bits that the same tiles have without pages, in any schedule."""
    paged = data.draw(paged_calls(kernel))
    found = run_paged(kernel, paged, schedule="late")
    check_results(kernel, paged.call, found)
    schedule, seed = data.draw(st.sampled_from(["eager", "fuzz"])), data.draw(st.integers(0, 9))
    assert same(found, run_paged(kernel, paged, schedule=schedule, seed=seed))
    assert same(found, run(dense(kernel), paged.call))
