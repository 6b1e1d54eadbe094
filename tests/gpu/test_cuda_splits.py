"""Splits of keys on a GPU whose forward has them: calls with few tiles are right, and the same each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash4_torch
from everything import examples
from flash4_torch import testing
from own_gpu import needs_ours

pytestmark = needs_ours

FORMS: dict[str, tuple[int, int, torch.dtype, dict[str, Any]]] = {
    "causal": (64, 64, torch.bfloat16, {"causal": True}),
    "full": (128, 128, torch.float16, {}),
    "window, softcap": (128, 128, torch.bfloat16, {"window": (9000, 3), "softcap": 1.5}),
    "unequal": (192, 128, torch.bfloat16, {"causal": True}),
    "wide": (256, 256, torch.bfloat16, {"causal": True}),
    "float32": (64, 64, torch.float32, {"causal": True}),
}
LENGTHS = st.one_of(st.integers(1000, 3000), st.integers(3001, 20000), st.sampled_from([2048, 16384]))


def tensors(B: int, Sq: int, Sk: int, Hq: int, Hk: int, name: str) -> list[Tensor]:
    D, Dv, dtype, _ = FORMS[name]
    sizes = ((Sq, Hq, D), (Sk, Hk, D), (Sk, Hk, Dv))
    return [torch.randn(B, S, H, d, device="cuda").to(dtype) for S, H, d in sizes]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("packed", [False, True])
@given(
    B=st.integers(1, 3),
    Sq=st.one_of(st.integers(1, 9), st.integers(10, 300)),
    Sk=LENGTHS,
    Hk=st.integers(1, 3),
    group=st.sampled_from([1, 3, 8]),
    sinks=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(max_examples=examples(12, 60), deadline=None, suppress_health_check=list(HealthCheck))
def test_results_are_right_and_repeat(
    name: str, packed: bool, B: int, Sq: int, Sk: int, Hk: int, group: int, sinks: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    q, k, v = tensors(B, Sq, Sk, Hk * group, Hk, name)
    options = {**FORMS[name][3], "sinks": torch.randn(Hk * group, device="cuda") if sinks else None}
    exact = testing.reference(q, k, v, **options, dtype=torch.float64)
    peer = testing.reference(q, k, v, **options, dtype=q.dtype)
    call, own = flash4_torch.attention, (q, k, v)
    if packed:
        ends = [torch.arange(B + 1, dtype=torch.int32, device="cuda") * S for S in (Sq, Sk)]
        options |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
        options |= {"max_seqlen_q": Sq, "max_seqlen_k": Sk}
        call, own = flash4_torch.attention_varlen, tuple(x.flatten(0, 1) for x in own)
    with testing.poisoned_memory():
        out, lse = call(*own, return_lse=True, **options)
    again = call(*own, return_lse=True, **options)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    if packed:
        out, lse = out.unflatten(0, (B, Sq)), lse.unflatten(1, (B, Sq)).transpose(0, 1)
    for found, truth, plain in zip((out, lse), exact, peer, strict=True):
        testing.assert_close_as_peer(found, truth, plain)


@given(
    B=st.integers(1, 3),
    Sq=st.one_of(st.integers(1, 9), st.integers(10, 200)),
    Sk=st.integers(1000, 9000),
    hidden=st.sampled_from([0.0, 0.3, 0.99, 1.0]),
    by_query=st.booleans(),
    by_head=st.booleans(),
    is_float=st.booleans(),
    group=st.sampled_from([1, 3, 4]),
    seed=st.integers(0, 999),
)
@settings(max_examples=examples(12, 60), deadline=None, suppress_health_check=list(HealthCheck))
def test_masks_are_split_right(
    B: int,
    Sq: int,
    Sk: int,
    hidden: float,
    by_query: bool,
    by_head: bool,
    is_float: bool,
    group: int,
    seed: int,
) -> None:
    """Rows without a key are 0, and their lse is -inf."""
    torch.manual_seed(seed)
    q, k, v = tensors(B, Sq, Sk, 2 * group, 2, "causal")
    sizes = B, 2 * group if by_head else 1, Sq if by_query else 1, Sk
    mask = torch.rand(sizes, device="cuda") >= hidden
    if is_float:
        mask = torch.randn(sizes, device="cuda").masked_fill(~mask, -torch.inf).to(q.dtype)
    exact, peer = (testing.reference(q, k, v, attn_mask=mask, dtype=t) for t in (torch.float64, q.dtype))
    with testing.poisoned_memory():
        results = flash4_torch.attention(q, k, v, attn_mask=mask, return_lse=True)
    for found, truth, plain in zip(results, exact, peer, strict=True):
        testing.assert_close_as_peer(found, truth, plain)


def test_two_kernels_run() -> None:
    q, k, v = tensors(1, 100, 8192, 8, 1, "causal")
    flash4_torch.attention(q, k, v, causal=True)
    with torch.profiler.profile(acc_events=True) as profile:
        flash4_torch.attention(q, k, v, causal=True)
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profile.key_averages())
    assert "forward_kernel" in names and "merge_kernel" in names


def test_a_captured_call_reads_new_numbers() -> None:
    q, k, v = tensors(1, 9, 8192, 8, 2, "causal")
    flash4_torch.attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash4_torch.attention(q, k, v, causal=True)
    for _ in range(3):
        for x in (q, k, v):
            x.normal_()
        graph.replay()
        assert torch.equal(out, flash4_torch.attention(q, k, v, causal=True))


def test_gradients_follow_split_results() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(1, 40, 8192, 4, 2, "causal"))
    for _ in range(3):
        out = flash4_torch.attention(q, k, v, causal=True)
        found = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    exact = testing.reference(q.double(), k.double(), v.double(), causal=True)[0]
    wanted = torch.autograd.grad(exact, (q, k, v), torch.ones_like(exact))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
