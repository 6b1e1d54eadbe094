"""KV caches on a GPU: attention, appends and merges against the definition, graphs, bits, large caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash4_torch
from cache_calls import CacheCall, cache_calls, check_results
from decode_calls import LAYOUTS, Cache, make_cache
from everything import examples
from flash4_torch.fast_path import kvcache as fast_path
from own_gpu import OURS, needs_ours

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
attend = flash4_torch.attention_kvcache
HALF = (torch.bfloat16, torch.float16)
INT = torch.int32
SLOW = settings(max_examples=examples(40, 300), deadline=None, suppress_health_check=list(HealthCheck))


def moved(x: Any) -> Any:
    """The tensor on the GPU, with its strides and what lies between its elements."""
    if not isinstance(x, Tensor):
        return x
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return whole.cuda().as_strided(x.shape, x.stride(), x.storage_offset())


def on_gpu(call: CacheCall) -> tuple[Tensor, Tensor]:
    """The call's results on the GPU, as the CPU has them."""
    there = {name: moved(x) for name, x in call.arguments().items()}
    tokens = sum(map(len, call.q))
    caches = (moved(x) for x in call.cache[:2])
    out, lse = attend(
        moved(call.packed_q()),
        *caches,
        cu_seqlens_q=moved(call.cu_seqlens_q),
        max_seqlen_q=max(map(len, call.q)) + 1,
        **there,
    )
    return out[:tokens].cpu(), lse[:, :tokens].cpu()


@needs_ours
@given(call=cache_calls(HALF, multiple=16, most_keys=2000, most_tokens=150, most_columns=128))
@SLOW
def test_results_are_right(call: CacheCall) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASH4_BACKEND", OURS)
        check_results(call, on_gpu(call))


@given(call=cache_calls((torch.float32, torch.bfloat16), most_keys=200))
@SLOW
def test_gathered_keys_give_right_results(call: CacheCall) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASH4_BACKEND", "tiled")
        check_results(call, on_gpu(call))


@needs_ours
@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 9000), st.sampled_from([1, 4, 8])),
    D=st.sampled_from([64, 128, 256]),
    page_size=st.sampled_from([1, 16, 48, 256]),
    float8=st.booleans(),
    seed=st.integers(0, 99),
)
@SLOW
def test_bits_depend_on_the_sequence_alone(
    sizes: tuple[int, int, int], D: int, page_size: int, float8: bool, seed: int
) -> None:
    """Tokens decoded one by one, beside other sequences, have the bits of a prompt."""
    Sq, Sk, group = sizes
    Sq = min(Sq, Sk)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    q, k, v = torch.randn(Sq, 2 * group, D), torch.randn(Sk, 2, D), torch.randn(Sk, 2, D)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    if float8:
        k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))

    def run(tokens: list[Tensor], lengths: list[int], pages: int | None) -> tuple[Tensor, Tensor]:
        keys, values = ([x[:n] for n in lengths] for x in (k, v))
        layout = LAYOUTS[int(torch.randint(4, (), generator=generator))]
        cache = Cache(*map(moved, make_cache(keys, values, generator, layout, pages)))
        cu_seqlens_q = torch.tensor([0, *(len(x) for x in tokens)]).cumsum(0).int().cuda()
        out, lse = attend(
            torch.cat(tokens).cuda(),
            *cache[:2],
            block_table=cache.table,
            seqused_k=torch.tensor(lengths, dtype=INT, device="cuda"),
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max(map(len, tokens)),
            causal=True,
            batch_invariant=True,
            return_lse=True,
        )
        return out, lse

    whole, whole_lse = run([q], [Sk], page_size)
    each = [Sk - Sq + 1 + i for i in range(Sq)]
    single, single_lse = run([*q.split(1), q[:1]], [*each, 1], None if page_size == 16 else 16)
    assert torch.equal(single[:Sq], whole)
    assert torch.equal(single_lse[:, :Sq], whole_lse)


@needs_ours
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_graph_is_replayed_with_other_lengths_and_tables(batch_invariant: bool) -> None:
    B, Hq, Hk, D, page_size, blocks = 3, 8, 2, 64, 16, 40
    q = torch.randn(B, 1, Hq, D, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, B * blocks, page_size, Hk, D, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(B * blocks, device="cuda").view(B, blocks).int()
    lengths = torch.tensor([5, 640, 33], dtype=INT, device="cuda")
    options = {"causal": True, "batch_invariant": batch_invariant}

    def step() -> Tensor:
        return attend(q, k, v, block_table=table, seqused_k=lengths, **options)

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(4):
        table.copy_(torch.randperm(B * blocks, device="cuda").view(B, blocks))
        lengths.copy_(torch.randint(0, page_size * blocks + 1, (B,), device="cuda"))
        q.normal_()
        graph.replay()
        assert torch.equal(out, step())


@needs_ours
@pytest.mark.parametrize("Sq", [1, 100])
def test_caches_of_more_than_2_31_elements(Sq: int) -> None:
    Hk, D, page_size = 2, 128, 64
    pages = 2**31 // (page_size * Hk * D) + 8
    caches = [torch.empty(pages, page_size, Hk, D, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    at = torch.tensor([[pages - 1, 0, pages - 2, 5]], dtype=INT, device="cuda")
    k, v = (torch.randn(1, 4 * page_size, Hk, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for cache, x in zip(caches, (k, v), strict=True):
        cache[at[0].long()] = x.view(4, page_size, Hk, D)
    q = torch.randn(1, Sq, 4, D, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([250], dtype=INT, device="cuda")
    out = attend(q, *caches, block_table=at, seqused_k=lengths, causal=True)
    expected = flash4_torch.attention(q, k[:, :250], v[:, :250], causal=True)
    torch.testing.assert_close(out, expected, atol=0.02, rtol=0.02)


@needs_ours
@given(call=cache_calls((torch.bfloat16,), multiple=8, float8=False, page_sizes=[16]))
@SLOW
def test_any_numbers_are_safe(call: CacheCall) -> None:
    """Lengths and page numbers that cannot be are clamped: the launch ends, and memory stays whole."""
    garbage = torch.tensor([-1, 2**31 - 1, -(2**31), 7], dtype=INT)
    arguments = call.arguments()
    table = arguments["block_table"]
    arguments["block_table"] = garbage.repeat(table.numel())[: table.numel()].view(table.shape)
    arguments["seqused_k"] = garbage.repeat(9)[: len(call.q)]
    attend(
        call.packed_q().cuda(),
        *(x.nan_to_num().cuda() for x in call.cache[:2]),
        cu_seqlens_q=call.cu_seqlens_q.cuda(),
        **{name: moved(x) for name, x in arguments.items()},
    )
    torch.cuda.synchronize()


@needs_ours
@given(
    dtype=st.sampled_from(HALF),
    float8=st.booleans(),
    D=st.sampled_from([64, 128, 80]),
    rotary=st.sampled_from(["", "halves", "interleaved"]),
    T=st.integers(1, 300),
    seed=st.integers(0, 99),
)
@SLOW
def test_appends_are_those_of_plain_torch(
    dtype: torch.dtype, float8: bool, D: int, rotary: str, T: int, seed: int
) -> None:
    """Rows that are stored as they come have the same bits; rotated ones may differ by a rounding."""
    torch.manual_seed(seed)
    k, v, q = (torch.randn(T, H, D).to(dtype) for H in (2, 2, 4))
    slots = torch.randperm(40 * 16)[:T] - 5
    cache_dtype = torch.float8_e4m3fn if float8 else dtype
    keywords: dict[str, Any] = {"slot_mapping": slots}
    if float8:
        keywords |= {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(0.25)}
    if rotary:
        angle = torch.rand(500, D // 4)
        keywords |= {"cos": angle.cos(), "sin": angle.sin(), "q": q, "positions": torch.randint(500, (T,))}
        keywords["interleaved"] = rotary == "interleaved"
    found = []
    for device in ("cpu", "cuda"):
        caches = [torch.zeros(40, 16, 2, D, device=device).to(cache_dtype) for _ in range(2)]
        there = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in keywords.items()}
        rotated = flash4_torch.append_kvcache(k.to(device), v.to(device), *caches, **there)
        found.append([x.float().cpu() for x in (*caches, *([] if rotated is None else [rotated]))])
    expected, actual = found
    assert torch.equal(actual[1], expected[1])
    close = {"atol": 0.3, "rtol": 0.13} if float8 else {"atol": 0.02, "rtol": 0.01}
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, **(close if rotary else {"atol": 0.0, "rtol": 0.0}))


@needs_ours
@given(N=st.integers(1, 5), T=st.integers(1, 60), D=st.sampled_from([8, 64, 128]), seed=st.integers(0, 99))
@SLOW
def test_merges_are_those_of_plain_torch(N: int, T: int, D: int, seed: int) -> None:
    torch.manual_seed(seed)
    outs, lses = torch.randn(N, T, 4, D).bfloat16(), torch.randn(N, 4, T) * 5
    lses.masked_fill_(torch.rand(N, 4, T) < 0.2, -torch.inf)
    expected, actual = (
        [x.float().cpu() for x in flash4_torch.merge_states(outs.to(device), lses.to(device))]
        for device in ("cpu", "cuda")
    )
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, atol=0.01, rtol=0.01)


@needs_ours
def test_two_streams_have_counters_of_their_own() -> None:
    """Launches that overlap give what they give alone."""
    call = replace(_long_call(), options={"num_splits": 20})
    alone = on_gpu(call)
    streams = [torch.cuda.Stream() for _ in range(4)]
    found = []
    torch.cuda.synchronize()
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(on_gpu(call))
    torch.cuda.synchronize()
    assert all(torch.equal(out, alone[0]) and torch.equal(lse, alone[1]) for out, lse in found)


def _long_call() -> CacheCall:
    q, k, v = (
        tuple(torch.randn(S, H, 64).bfloat16() for _ in range(3)) for S, H in ((1, 8), (3000, 2), (3000, 2))
    )
    return CacheCall(q, k, v, make_cache(k, v, torch.Generator().manual_seed(0), "rows", 16), causal=True)


def test_steps_of_decoding_take_prepared_launches() -> None:
    """A bound that grows with the lengths is decided about once in many steps."""
    q = torch.randn(2, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(2, 4096, 2, 64, device="cuda", dtype=torch.bfloat16)
    fast_path.clear()
    for length in range(2000, 2200):
        lengths = torch.tensor([length, length // 2], device="cuda", dtype=torch.int32)
        out = attend(q, cache, cache, seqused_k=lengths, max_seqlen_k=length)
        if length % 50 == 0:
            torch.testing.assert_close(out, attend(q, cache, cache, seqused_k=lengths), atol=0.01, rtol=0.01)
    (calls,) = fast_path._calls.values()
    assert len(calls.by_sizes) <= 4
