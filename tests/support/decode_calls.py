"""Calls of the decode kernel over caches of any kind, their launches in the emulator, and right results."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from hypothesis import strategies as st
from torch import Tensor

from flash4_torch import testing
from flash4_torch.compile import jit
from flash4_torch.configs.decode import GROUP, KEYS, LEAST_BLOCKS, DecodeForm, part_columns
from flash4_torch.configs.types import RESERVED_BYTES, Features
from flash4_torch.masks import Band
from flash4_torch.reference.attention import attention
from flash4_torch.reference.scoring import Scoring
from flash4_torch.testing import emulate
from kernel_calls import sinks
from kernel_runs import launches

LENGTHS = st.one_of(st.sampled_from([0, 1, 16, 63, 64, 65, 128, 191, 193]), st.integers(0, 330))
_RUNS = st.sampled_from([16, 48, 64, 112, 256])
_PAGE_SIZES = st.one_of(st.sampled_from([1, 8, 16, 64]), st.integers(1, 130))
LAYOUTS = ("rows", "heads", "both", "padded")
"""Pages of rows of heads, of heads of rows, with K and V side by side, or with gaps."""
FP8 = torch.float8_e4m3fn
GARBAGE = (-1, 2**31 - 1, -(2**31), 5)


class Kernel(NamedTuple):
    """What a kernel is compiled for, besides its architecture."""

    features: Features
    rows: int
    form: DecodeForm


class Cache(NamedTuple):
    """Keys and values of sequences, with NaN all around them; without a table a page is a sequence."""

    k: Tensor
    v: Tensor
    table: Tensor | None


def page_sizes(form: DecodeForm) -> st.SearchStrategy[int | None]:
    """Page sizes that the form allows."""
    if not form.paged:
        return st.none()
    return _RUNS if form.runs else _PAGE_SIZES


class Results(NamedTuple):
    out: Tensor
    lse: Tensor


@dataclass(repr=False)
class Call:
    """A launch: sequences of query tokens, and what their caches hold."""

    q: tuple[Tensor, ...]
    """(Sq, Hq, D) of each sequence."""
    k: tuple[Tensor, ...]
    """(Sk, Hk, D) of each sequence."""
    v: tuple[Tensor, ...]
    cache: Cache
    scale: float
    softcap: float = 0.0
    left: int = 0
    right: int = 0
    sinks: Tensor | None = None
    num_splits: int = 1
    split_keys: int = 0
    more_tokens: int = 0
    """How far max_seqlen_q is above the longest sequence."""
    causal: tuple[int, ...] = ()
    """A flag of each sequence; without them the right bound holds for all."""
    k_scale: Tensor | None = None
    """(B, Hk): what numbers of an FP8 cache, and of `k`, are multiplied by."""
    v_scale: Tensor | None = None

    def __repr__(self) -> str:
        lengths = [(len(q), len(k)) for q, k in zip(self.q, self.k, strict=True)]
        cache = [(tuple(x.shape), x.stride()) for x in self.cache if x is not None]
        names = ("scale", "softcap", "left", "right", "sinks", "num_splits", "split_keys", "more_tokens")
        rest = {name: getattr(self, name) for name in (*names, "causal", "k_scale", "v_scale")}
        return f"Call({lengths}, {self.q[0].shape}, {cache}, {rest})"


@functools.cache
def compiled(arch: str, kernel: Kernel) -> Any:
    from flash4_torch.kernels.decode.launch import compile_decode

    with jit.quiet():
        return compile_decode(*kernel)


def make_cache(
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    generator: torch.Generator,
    layout: str,
    page_size: int | None,
    spare: int = 9,
) -> Cache:
    """A cache of these sequences in pages at random places, or without pages if page_size is None.

    There is room for fewer than `spare` keys more than the longest one has.
    """
    room = max(len(x) for x in k) + int(torch.randint(0, spare, (), generator=generator))
    size = max(room, 1) if page_size is None else page_size
    blocks = 1 if page_size is None else -(-room // size) + 1
    pages = len(k) + 1 if page_size is None else len(k) * blocks + 2
    (_, Hk, D), Dv, dtype = k[0].shape, v[0].shape[-1], k[0].dtype
    if dtype == FP8:
        k, v = ([x.view(torch.uint8) for x in parts] for parts in (k, v))
    caches = _storage(layout, (pages, size, Hk), (D, Dv), k[0].dtype)
    if page_size is None:
        table = torch.arange(len(k))[:, None]
    else:
        # The first and the last page, to which page numbers are clamped, are nobody's.
        table = 1 + torch.randperm(pages - 2, generator=generator).view(len(k), blocks)
    for cache, parts in zip(caches, (k, v), strict=True):
        for b, part in enumerate(parts):
            j = torch.arange(len(part))
            cache[table[b, j // size], j % size] = part
    caches = tuple(x.view(dtype) for x in caches)
    if page_size is None:
        return Cache(*caches, None)
    for b, part in enumerate(k):
        used = -(-len(part) // size)
        table[b, used:] = torch.tensor(GARBAGE).repeat(blocks)[: blocks - used]
    wide = torch.full((len(k), blocks + 3), 2**30, dtype=torch.int32)
    wide[:, 2 : 2 + blocks] = table
    return Cache(*caches, wide[:, 2 : 2 + blocks])


def _storage(
    layout: str, shape: tuple[int, int, int], widths: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    pages, size, Hk = shape
    # A byte is a number of FP8.
    nothing, vector = (0x7F, 16) if dtype == torch.uint8 else (math.nan, 8)
    if layout == "both":
        both = torch.full((*shape, sum(widths)), nothing, dtype=dtype)
        return both[..., : widths[0]], both[..., widths[0] :]

    def make(width: int) -> Tensor:
        if layout == "heads":
            return torch.full((pages, Hk, size, width), nothing, dtype=dtype).transpose(1, 2)
        gap = 1 if layout == "padded" else 0
        x = torch.full((pages, size + gap, Hk + gap, width + vector * gap), nothing, dtype=dtype)
        return x[:, :size, :Hk, :width]

    return make(widths[0]), make(widths[1])


@st.composite
def calls(draw: st.DrawFn, kernel: Kernel, most_rows: int | None = None) -> Call:
    """Calls that a host may make of such a kernel. most_rows: rows of a sequence, at most."""
    features, form = kernel.features, kernel.form
    # A sequence has several tiles of a warpgroup.
    most_heads, most_tokens = 20 if form.wgmma else 5, 12
    if most_rows is not None:
        most_heads = most_rows
    Hk, group = draw(st.integers(1, 2)), draw(st.integers(1, most_heads))
    if most_rows is not None:
        most_tokens = most_rows // group
    splits_keys = form.cluster > 1 or form.groups or form.parts
    split_keys = draw(st.sampled_from([64, 128])) if form.groups else 0
    # One sequence at least has several splits, if there are any.
    least = 1 + 2 * (split_keys or KEYS * LEAST_BLOCKS) if splits_keys else 1
    lengths = [(draw(st.integers(1, most_tokens)), draw(st.integers(least, least + 200)))]
    lengths += draw(st.lists(st.tuples(st.integers(0, most_tokens), LENGTHS), max_size=2))
    lengths = [
        (n if form.ragged else lengths[0][0], keys if form.lengths else lengths[0][1]) for n, keys in lengths
    ]
    lengths = draw(st.permutations(lengths))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    dtype = getattr(torch, features.dtype)
    q, k, v = (
        tuple(torch.randn(n[which], H, D, generator=generator).to(dtype) for n in lengths)
        for which, H, D in ((0, Hk * group, features.D), (1, Hk, features.D), (1, Hk, features.Dv))
    )
    sizes = {}
    if form.cache_dtype:
        k, v = (tuple(x.to(FP8) for x in parts) for parts in (k, v))
        sizes = {name: draw(cache_scales(len(q), Hk)) for name in ("k_scale", "v_scale")}
    page_size = draw(page_sizes(form))
    scales = [0.0, -0.1, 0.2] if features.scaled else [features.D**-0.5, 0.5]
    return Call(
        q,
        k,
        v,
        make_cache(k, v, generator, draw(st.sampled_from(LAYOUTS)), page_size, 9 if form.lengths else 1),
        scale=draw(st.sampled_from(scales)),
        softcap=draw(st.sampled_from([1.0, 7.5])) if features.softcap else 0.0,
        left=draw(st.integers(-20, 200)) if features.left else 0,
        right=draw(st.one_of(st.just(0), st.integers(-100, 20))) if features.right else 0,
        sinks=draw(sinks(features, Hk * group)),
        num_splits=_num_splits(draw, form),
        split_keys=split_keys,
        more_tokens=draw(st.integers(0, 2)) if form.ragged and most_rows is None else 0,
        causal=tuple(draw(st.sampled_from([0, 1, -1])) for _ in q) if form.causal_flags else (),
        **sizes,
    )


def _num_splits(draw: st.DrawFn, form: DecodeForm) -> int:
    """Splits that such a kernel may be launched with."""
    if form.groups:
        return draw(st.integers(1, 3))
    if form.parts:
        return draw(st.integers(form.cluster + 1, 3 * form.cluster))
    return draw(st.integers(form.cluster // 2 + 1, form.cluster))


@st.composite
def cache_scales(draw: st.DrawFn, B: int, Hk: int) -> Tensor:
    """Scales of an FP8 cache (B, Hk): one for all, one of each head, or any, in any order in memory."""
    shape = draw(st.sampled_from([(1, 1), (1, Hk), (B, Hk)]))
    numbers = st.lists(
        st.sampled_from([0.03, 1.0, 1.7]), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]
    )
    x = torch.tensor(draw(numbers)).view(shape[::-1]).T
    return x.expand(B, Hk)


def shared_memory(kernel: Kernel) -> int:
    """Bytes of shared memory that a CTA may ask for, so that as many share an SM as its plan says."""
    from flash4_torch.kernels.decode.plan import DecodePlan

    sm_bytes = kernel.form.gpu.smem_bytes + RESERVED_BYTES
    return sm_bytes // DecodePlan(*kernel).ctas_per_sm - RESERVED_BYTES


def run(arch: str, kernel: Kernel, call: Call, **schedule: Any) -> Results:
    """A launch into memory full of NaN; raises for whatever the emulator finds wrong."""
    with launches() as asked, emulate.device(arch, **schedule) as device:
        found = launch(device, kernel, call)
    assert asked[-1].smem_bytes <= shared_memory(kernel), "the stages leave too little shared memory"
    return found


class Place(Protocol):
    """A device that launches run on: emulated, or a bench of mutants."""

    @property
    def arch(self) -> str: ...

    def touching(self, *tensors: Tensor) -> AbstractContextManager[None]:
        """Restricts launches inside the block to these tensors' memory."""
        ...


class Partial(NamedTuple):
    """Results of splits, and counters; None without splits."""

    out: Tensor | None
    lse: Tensor | None
    counters: Tensor | None


def make_partial(kernel: Kernel, call: Call) -> Partial:
    """NaN where results of splits may be stored, and counters of 0."""
    if not kernel.form.parts:
        return Partial(None, None, None)
    (_, Hq, _), Hk, T = call.q[0].shape, call.k[0].shape[1], sum(len(x) for x in call.q)
    cluster, keys = kernel.form.cluster, max(map(len, call.k))
    parts = -(-call.num_splits // cluster)
    if kernel.form.groups:
        parts = -(-keys // (call.split_keys * GROUP))
    tiles = -(-_max_seqlen_q(call) * (Hq // Hk) // kernel.rows)
    return Partial(
        torch.full((parts, T, Hq, part_columns(kernel.features.Dv)), math.nan),
        torch.full((parts, cluster, Hq, T), math.nan),
        torch.zeros(len(call.q) * Hk * tiles * cluster, dtype=torch.int32),
    )


def _max_seqlen_q(call: Call) -> int:
    return max(len(x) for x in call.q) + call.more_tokens


def launch(
    device: Place,
    kernel: Kernel,
    call: Call,
    *,
    tokens: Tensor | None = None,
    keys: Tensor | None = None,
    partial: Partial | None = None,
) -> Results:
    """A launch on an emulated device, with other cu_seqlens_q (`tokens`) and seqused_k (`keys`) if given."""
    (features, _, form), (k, v, table) = kernel, call.cache
    q = torch.cat(call.q)
    T, Hq, _ = q.shape
    cu_seqlens_q, seqused_k = None, None
    if form.ragged:
        own = _int32([0, *torch.tensor([len(x) for x in call.q]).cumsum(0)])
        cu_seqlens_q = own if tokens is None else tokens
    if form.lengths:
        seqused_k = _int32([len(x) for x in call.k]) if keys is None else keys
    causal = _int32(call.causal) if form.causal_flags else None
    out, lse = torch.full((T, Hq, features.Dv), math.nan, dtype=q.dtype), torch.full((Hq, T), math.nan)
    partial = partial or make_partial(kernel, call)
    params = (
        call.scale,
        call.softcap,
        call.left,
        call.right,
        _max_seqlen_q(call),
        call.split_keys,
        call.num_splits,
    )
    tensors = (
        *(q, k, v, table, cu_seqlens_q, seqused_k, causal, call.sinks, call.k_scale, call.v_scale),
        *(out, lse, *partial),
    )
    with device.touching(*(x for x in tensors if x is not None)):
        compiled(device.arch, kernel)(*tensors, params)
    assert partial.counters is None or not partial.counters.any(), "the counters are not back at 0"
    return Results(out, lse)


def _int32(numbers: Sequence[Any]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def results(features: Features, call: Call, dtype: torch.dtype) -> Results:
    """Results by definition, in `dtype`."""
    own = None if call.sinks is None else call.sinks.to(dtype)
    found = []
    flags = call.causal or (1,) * len(call.q)
    for b, (causal, q, k, v) in enumerate(zip(flags, call.q, call.k, call.v, strict=True)):
        tensors = [q.to(dtype), k.to(dtype), v.to(dtype)]
        for i, scale in ((1, call.k_scale), (2, call.v_scale)):
            if scale is not None:
                tensors[i] = tensors[i] * scale[b, :, None].to(dtype)
        right = call.right if features.right and causal else None
        scoring = Scoring(call.scale, Band(call.left if features.left else None, right), call.softcap)
        found.append(attention(*(x[None] for x in tensors), scoring, own))
    return Results(torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], 1))


def check_results(features: Features, call: Call, found: Results) -> None:
    exact, peer = (results(features, call, dtype) for dtype in (torch.float64, call.q[0].dtype))
    for name, result, truth, plain in zip(Results._fields, found, exact, peer, strict=True):
        testing.assert_close_as_peer(result, truth, plain, what=name)
