"""flash-attn's functions over KV caches: the definition on the keys that a cache should then hold."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash4_torch.errors import ArgumentError, NoGradientError
from flash4_torch.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn_definition import by_definition

FLOAT8 = torch.float8_e4m3fn
X, PAGES = torch.randn(2, 1, 8, 8), torch.randn(2, 5, 4, 2, 8)
SEQLENS, TABLE = torch.tensor([3, 5]).int(), torch.tensor([[0, 3], [4, 1]]).int()
Side = st.one_of(st.just(-1), st.integers(0, 9))


class Case(NamedTuple):
    """A cache and a call on it; lengths[b] keys of sequence b are there before."""

    k_cache: Tensor
    v_cache: Tensor
    where: dict[str, Any]
    """block_table, cache_batch_idx, or nothing."""
    rows: list[list[tuple[int, int]]]
    """The page and the row of each key of each sequence, also of those to come."""
    lengths: list[int]
    tokens: list[int]
    """New tokens of each sequence."""
    Hq: int


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@st.composite
def cases(draw: st.DrawFn, *, uniform: bool = False) -> Case:
    """Caches whose unused rows are NaN: reading one would show."""
    B, most = draw(st.integers(1, 3)), 4
    Hk, group, D, Dv = (draw(st.integers(1, n)) for n in (2, 3, 5, 5))
    D *= 2
    lengths = draw(st.lists(st.integers(0, 9), min_size=B, max_size=B))
    tokens = [draw(st.integers(1, most))] * B
    if not uniform:
        tokens = draw(st.lists(st.integers(0, most), min_size=B, max_size=B))
    kind = draw(st.sampled_from(["pages", "entries", "some entries"]))
    if kind == "pages":
        page_size, spare = draw(st.integers(1, 6)), draw(st.integers(0, 2))
        blocks = -(-(max(lengths) + most) // page_size)
        pages = B * blocks + spare
        table = torch.tensor(draw(st.permutations(range(pages))))[: B * blocks].view(B, blocks).int()
        where = {draw(st.sampled_from(["block_table", "page_table"])): table}
    else:
        page_size, pages = max(lengths) + most, B
        entries = list(range(B))
        where = {}
        if kind == "some entries":
            pages = B + 2
            entries = draw(st.permutations(range(pages)))[:B]
            where = {"cache_batch_idx": ints(*entries)}
        table = torch.tensor(entries)[:, None]
    rows = [
        [(int(table[b, j // page_size]), j % page_size) for j in range(length + new)]
        for b, (length, new) in enumerate(zip(lengths, tokens, strict=True))
    ]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    caches = []
    for width in (D, Dv):
        cache = torch.full((pages, page_size, Hk, width), torch.nan)
        for b, length in enumerate(lengths):
            for page, row in rows[b][:length]:
                cache[page, row] = torch.randn(Hk, width, generator=generator)
        caches.append(cache)
    if draw(st.booleans()) and D == Dv:
        # Views of a cache that holds both.
        both = torch.stack(caches, 3)
        caches = [both[:, :, :, 0], both[:, :, :, 1]]
    return Case(caches[0], caches[1], where, rows, lengths, tokens, Hk * group)


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "softmax_scale": draw(st.sampled_from([None, 0.3])),
        "causal": draw(st.booleans()),
        "window_size": draw(st.tuples(Side, Side)),
        "softcap": draw(st.sampled_from([0.0, 1.5])),
    }


def held(cache: Tensor, rows: list[tuple[int, int]]) -> Tensor:
    """Rows of a cache, (keys, Hk, D)."""
    return torch.stack([cache[place] for place in rows]) if rows else cache.new_empty(0, *cache.shape[2:])


def wanted(q: Tensor, k: Tensor, v: Tensor, flags: dict[str, Any], sinks: Tensor | None) -> Any:
    """(out, lse) of one sequence, (S, Hq, D) and (keys, Hk, D), from the definition in float64."""
    flags = {**flags, "alibi_slopes": None}
    sinks = None if sinks is None else sinks.double()
    out, lse = by_definition(*(x[None].double() for x in (q, k, v)), flags=flags, learnable_sink=sinks)
    return out[0], lse[0]


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (S, H, D) with its first columns as complex numbers times cos + i sin (S, R / 2)."""
    R = 2 * cos.shape[1]
    cos, sin, x = cos.double()[:, None], sin.double()[:, None], x.double()
    real, imaginary = (x[..., :R:2], x[..., 1:R:2]) if interleaved else x[..., :R].chunk(2, -1)
    product = torch.complex(real, imaginary) * torch.complex(cos, sin)
    parts = product.real, product.imag
    pairs = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([pairs, x[..., R:]], -1)


def assert_near(found: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5)


def packed(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat(parts), ints(0, *accumulate(len(part) for part in parts))


@given(st.data(), options(), st.booleans(), st.booleans())
@settings(max_examples=150)
def test_new_keys_are_appended_and_all_are_seen(
    data: st.DataObject, flags: dict[str, Any], is_packed: bool, has_sinks: bool
) -> None:
    case: Case = data.draw(cases(uniform=not is_packed))
    new = [
        [torch.randn(n, H, W) for n in case.tokens]
        for H, W in (
            (case.Hq, case.k_cache.shape[3]),
            (case.k_cache.shape[2], case.k_cache.shape[3]),
            (case.k_cache.shape[2], case.v_cache.shape[3]),
        )
    ]
    sinks = torch.randn(case.Hq) if has_sinks else None
    flags["num_splits"] = data.draw(st.integers(0, 3))
    more: dict[str, Any] = {}
    if has_sinks:
        more[data.draw(st.sampled_from(["learnable_sink", "sinks", "s_aux"]))] = sinks
    turn = data.draw(st.sampled_from([None, "after the keys before", "elsewhere"]))
    starts = case.lengths
    rotated = new[:2]
    if turn:
        R = data.draw(st.integers(1, case.k_cache.shape[3] // 2))
        cos, sin = torch.rand(2, 20, R)
        interleaved = data.draw(st.booleans())
        more |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
        if turn == "elsewhere":
            starts = [length // 2 + 1 for length in starts]
            more["rotary_seqlens"] = ints(*starts)
        local = flags["causal"] or flags["window_size"] != (-1, -1)
        rotated = [
            [
                turned(x, cos[at], sin[at], interleaved)
                for x, start in zip(sequences, starts, strict=True)
                for at in [start + torch.arange(len(x)) * int(local or sequences is new[1])]
            ]
            for sequences in new[:2]
        ]
    lengths: Any = ints(*case.lengths)
    if is_packed:
        (q, ends), (k, ends_k), (v, _) = (packed(parts) for parts in new)
        # The same tensor says that queries and keys are the same tokens.
        more |= {"cu_seqlens_q": ends, "cu_seqlens_k_new": data.draw(st.sampled_from([ends, ends_k]))}
        more["max_seqlen_q"] = data.draw(st.sampled_from([None, max(case.tokens)]))
    else:
        q, k, v = (torch.stack(parts) for parts in new)
        if len(set(case.lengths)) == 1 and data.draw(st.booleans()):
            lengths = case.lengths[0]
    caches = case.k_cache.clone(), case.v_cache.clone()
    out, lse = flash_attn_with_kvcache(
        q,
        case.k_cache,
        case.v_cache,
        k,
        v,
        cache_seqlens=lengths,
        **case.where,
        **flags,
        **more,
        return_softmax_lse=True,
    )
    del flags["num_splits"]
    for b, (before, n) in enumerate(zip(case.lengths, case.tokens, strict=True)):
        for cache, rows in zip(caches, (rotated[1][b], new[2][b]), strict=True):
            for place, row in zip(case.rows[b][before:], rows, strict=True):
                cache[place] = row
        exact = wanted(
            rotated[0][b], held(caches[0], case.rows[b]), held(caches[1], case.rows[b]), flags, sinks
        )
        start = sum(case.tokens[:b])
        own = (out[start : start + n], lse[:, start : start + n]) if is_packed else (out[b], lse[b])
        for found, one in zip(own, exact, strict=True):
            assert_near(found, one)
    for found, cache in zip((case.k_cache, case.v_cache), caches, strict=True):
        torch.testing.assert_close(found, cache, equal_nan=True)


@given(st.data(), options(), st.booleans())
def test_without_new_keys_the_cache_is_read(
    data: st.DataObject, flags: dict[str, Any], into_out: bool
) -> None:
    """Queries then are those of the last keys, and packed functions say the same of a paged cache."""
    case: Case = data.draw(cases())
    queries = [torch.randn(n, case.Hq, case.k_cache.shape[3]) for n in case.tokens]
    q, ends = packed(queries)
    more: dict[str, Any] = {}
    if into_out:
        more["out"] = torch.full((len(q), case.Hq, case.v_cache.shape[3]), torch.nan)
    out = flash_attn_with_kvcache(
        q, case.k_cache, case.v_cache, cache_seqlens=ints(*case.lengths), cu_seqlens_q=ends, **case.where,
        **flags, **more,
    )  # fmt: skip
    assert out is more["out"] if into_out else True
    for b, (part, own) in enumerate(zip(queries, out.split(case.tokens), strict=True)):
        rows = case.rows[b][: case.lengths[b]]
        assert_near(own, wanted(part, held(case.k_cache, rows), held(case.v_cache, rows), flags, None)[0])
    if "cache_batch_idx" not in case.where:
        for lengths in ({"cu_seqlens_k": None, "seqused_k": ints(*case.lengths)}, {}):
            if not lengths:
                if not case.where:
                    continue
                lengths = {"cu_seqlens_k": ints(0, *accumulate(case.lengths))}
            same = flash_attn_varlen_func(
                q, case.k_cache, case.v_cache, ends, **lengths, max_seqlen_q=4, **case.where, **flags
            )
            assert torch.equal(same, out)


@given(st.lists(st.tuples(*(st.integers(0, 7),) * 3), min_size=1, max_size=4), options(), st.booleans())
def test_packed_sequences_may_use_fewer_keys_than_they_have(
    sizes: list[tuple[int, int, int]], flags: dict[str, Any], says: bool
) -> None:
    """More than they have counts as what they have."""
    tokens, room, used = zip(*sizes, strict=True)
    q, k, v = torch.randn(sum(tokens), 4, 6), torch.randn(sum(room), 2, 6), torch.randn(sum(room), 2, 5)
    ends = [torch.tensor([0, *accumulate(n)]) for n in (tokens, room)]
    longest = (max(tokens), max(room)) if says else ()
    out, lse = flash_attn_varlen_func(
        q, k, v, *ends, *longest, seqused_k=ints(*used), return_lse=True, **flags
    )
    parts = zip(
        q.split(tokens), k.split(room), v.split(room), used, out.split(tokens), lse.split(tokens, 1),
        strict=True,
    )  # fmt: skip
    for queries, keys, values, length, *found in parts:
        for own, exact in zip(
            found, wanted(queries, keys[:length], values[:length], flags, None), strict=True
        ):
            assert_near(own, exact)


@given(cases(uniform=True), st.booleans())
def test_float8_caches_hold_what_is_divided_by_their_scales(case: Case, causal: bool) -> None:
    """Attention to what such a cache holds afterwards, multiplied by the scales."""
    B, (_, _, Hk, D), Dv = len(case.lengths), case.k_cache.shape, case.v_cache.shape[3]
    scales = {"k_descale": torch.rand(B, Hk) + 0.1, "v_descale": torch.rand(B, Hk) + 0.1}
    caches = [x.contiguous().nan_to_num(100.0).to(FLOAT8) for x in (case.k_cache, case.v_cache)]
    q, k, v = (torch.randn(B, case.tokens[0], *width) for width in ((case.Hq, D), (Hk, D), (Hk, Dv)))
    lengths = ints(*case.lengths)
    out = flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=lengths, causal=causal, **case.where, **scales
    )
    flags = {"softmax_scale": None, "causal": causal, "window_size": (-1, -1), "softcap": 0.0}
    for b, before in enumerate(case.lengths):
        keys, values = (
            held(cache.float(), case.rows[b]) * scale[b, :, None]
            for cache, scale in zip(caches, scales.values(), strict=True)
        )
        torch.testing.assert_close(keys[before:], k[b], rtol=0.07, atol=0.01)
        torch.testing.assert_close(values[before:], v[b], rtol=0.07, atol=0.01)
        assert_near(out[b], wanted(q[b], keys, values, flags, None)[0])


def decode(**more: Any) -> Any:
    """One new token of each of two sequences, with 3 and 5 keys in pages of 4."""
    call = {"q": X[:, :, :4], "k": X[:, :, 4:6], "v": X[:, :, 6:], "cache_seqlens": SEQLENS, "causal": True}
    call |= {"block_table": TABLE, "caches": PAGES, **more}
    return flash_attn_with_kvcache(call.pop("q"), *(cache.clone() for cache in call.pop("caches")), **call)


def test_a_padded_entry_without_keys_gives_zero() -> None:
    out, lse = decode(cache_seqlens=ints(3, 0), k=None, v=None, return_softmax_lse=True)
    assert not out[1].any() and bool((lse[1] == -torch.inf).all()) and out[0].any()


@pytest.mark.parametrize("turns", ["", "together", "apart"])
def test_a_graph_does_not_break(turns: str) -> None:
    more: dict[str, Any] = {}
    if turns:
        more["rotary_cos"], more["rotary_sin"] = torch.rand(2, 9, 4)
    if turns == "apart":
        more |= {"q": torch.ones(2, 2, 4, 8), "causal": False}
    compiled = torch.compile(lambda: decode(**more), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(), decode(**more))


def test_there_are_no_gradients() -> None:
    q = torch.randn(2, 1, 4, 8, requires_grad=True)
    with pytest.raises(NoGradientError):
        decode(q=q).sum().backward()
    x, ends = torch.randn(4, 2, 8, requires_grad=True), ints(0, 4)
    with pytest.raises(NoGradientError):
        flash_attn_varlen_func(x, x, x, ends, ends, seqused_k=ints(3)).sum().backward()


def test_other_versions_defaults_change_nothing() -> None:
    """flash-attn 3's keywords that say nothing here, or nothing by their defaults."""
    defaults = {
        "qv": None, "page_table": None, "cu_seqlens_q": None, "cu_seqlens_k_new": None,
        "max_seqlen_q": None, "rotary_seqlens": None, "q_descale": None, "k_descale": None,
        "v_descale": None, "attention_chunk": 0, "scheduler_metadata": None, "pack_gqa": None,
        "sm_margin": 0,
    }  # fmt: skip
    assert torch.equal(decode(**defaults), decode())


CACHES = torch.randn(2, 2, 8, 2, 8)
DENSE: dict[str, Any] = {"block_table": None, "caches": CACHES}
# arguments, the argument that the error names, a piece of its limit
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "alibi": ({"alibi_slopes": torch.ones(4)}, "alibi_slopes", "takes no bias"),
    "left padding": ({"cache_leftpad": ints(0, 1)}, "cache_leftpad", "left out"),
    "qv": ({"qv": torch.ones(1)}, "qv", "left out"),
    "chunks": ({"attention_chunk": 4}, "attention_chunk", "left out"),
    "two tables": ({"page_table": ints(0)[None]}, "page_table", "beside block_table"),
    "two sinks": ({"sinks": torch.ones(4), "s_aux": torch.ones(4)}, "s_aux", "beside sinks"),
    "sinks": ({"s_aux": torch.ones(3)}, "s_aux", "4"),
    "a table and entries": ({"cache_batch_idx": ints(0, 1)}, "cache_batch_idx", "with a block_table"),
    "entries of a float": ({**DENSE, "cache_batch_idx": torch.ones(2)}, "cache_batch_idx", "int32"),
    "entries of rank 2": ({**DENSE, "cache_batch_idx": ints(0, 1)[None]}, "cache_batch_idx", "(B,)"),
    "no such entry": ({**DENSE, "cache_batch_idx": ints(0, 2)}, "cache_batch_idx", "0 to 1"),
    "no lengths": ({"cache_seqlens": None}, "cache_seqlens", "before"),
    "a length too long": ({"cache_seqlens": ints(3, 8)}, "cache_seqlens", "room"),
    "an int too long": ({"cache_seqlens": 9}, "cache_seqlens", "0 to 8"),
    "a negative int": ({"cache_seqlens": -1}, "cache_seqlens", "0 to 8"),
    "a float": ({"cache_seqlens": 1.0}, "cache_seqlens", "an int"),
    "int64": ({"cache_seqlens": torch.tensor([3, 5])}, "cache_seqlens", "int32"),
    "no v": ({"v": None}, "v", "beside k"),
    "no k": ({"k": None}, "k", "beside v"),
    "a rotation of nothing": (
        {"k": None, "v": None, "rotary_cos": torch.ones(9, 4)},
        "rotary_cos, rotary_sin",
        "nothing new",
    ),
    "no sin": ({"rotary_cos": torch.ones(9, 4)}, "rotary_sin", "beside"),
    "scale": ({"softmax_scale": float("inf")}, "softmax_scale", "finite"),
    "window": ({"window_size": (-2, 0)}, "window_size", "at least -1"),
    "splits": ({"num_splits": -1}, "num_splits", "1 to"),
    "a descale": ({"v_descale": torch.ones(())}, "v_descale", "float8"),
    "packed k alone": ({"k": torch.ones(2, 2, 8), "v": torch.ones(2, 2, 8)}, "cu_seqlens_k_new", "divide"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    changed, argument, limit = WRONG[name]
    with pytest.raises(ArgumentError) as caught:
        decode(**changed)
    assert (caught.value.argument, limit in caught.value.limit) == (argument, True), str(caught.value)


P, ENDS = torch.randn(9, 2, 8), ints(0, 4, 4, 9)
WRONG_PACKED: dict[str, tuple[dict[str, Any], str, str]] = {
    "dropout": ({"dropout_p": 0.1, "seqused_k": ints(1, 0, 2)}, "dropout_p", "must be 0"),
    "alibi": ({"alibi_slopes": torch.ones(2)}, "alibi_slopes", "no bias"),
    "queries used": ({"seqused_q": ints(1, 0, 2)}, "seqused_q", "left out"),
    "a descale of packed keys": ({"k_descale": torch.ones(())}, "k_descale", "float8 cache"),
    "no places of keys": ({"cu_seqlens_k": None, "seqused_k": ints(1, 0, 2)}, "cu_seqlens_k", "packed k"),
    "a table, and keys that are packed": ({"page_table": ints(0, 1, 2)[:, None]}, "k_cache", "no size 0"),
    "a table of rank 1": ({"k": CACHES[0], "v": CACHES[1], "page_table": ENDS}, "page_table", "blocks"),
    "lengths": ({"seqused_k": ints(1, 0)}, "seqused_k", "(B,)"),
}


@pytest.mark.parametrize("name", WRONG_PACKED)
def test_what_is_wrong_with_packed_keys_is_named(name: str) -> None:
    changed, argument, limit = WRONG_PACKED[name]
    call = {"q": P, "k": P, "v": P, "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, **changed}
    with pytest.raises(ArgumentError) as caught:
        flash_attn_varlen_func(**call)
    assert (caught.value.argument, limit in caught.value.limit) == (argument, True), str(caught.value)
