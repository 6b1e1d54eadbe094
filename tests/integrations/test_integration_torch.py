"""torch's flash attention registry: opt-in, ours while active, equal to torch's own, gone when restored."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)
from torch.nn.attention.varlen import varlen_attn

from flash4_torch import attention_kvcache, backends, fast_path, ops
from flash4_torch.errors import ArgumentError
from flash4_torch.integrations import torch_sdpa
from flash4_torch.ops import impl
from flash4_torch.problem import CallOptions, Problem

PLAIN = {"scale": 0.3, "window_left": None, "softcap": 0.0, "deterministic": False}


@contextmanager
def counted() -> Iterator[list[str]]:
    """Collects 'forward' and 'backward', one for each call that reaches a backend of ours."""
    calls: list[str] = []

    def observe(problem: Problem, backend: str) -> None:
        calls.append("backward" if problem.spec.backward else "forward")

    backends.observers.append(observe)
    try:
        yield calls
    finally:
        backends.observers.remove(observe)


@contextmanager
def active() -> Iterator[list[str]]:
    torch_sdpa.register()
    activate_flash_attention_impl("FLASH4")
    try:
        with counted() as calls:
            yield calls
    finally:
        restore_flash_attention_impl()


@contextmanager
def cuda_operators_on_cpu() -> Iterator[None]:
    """The kernels meant for CUDA, under the CPU's key: they are plain torch, and torch has none there."""
    kernels = {n: k for n, k in torch_sdpa.CUDA_KERNELS.items() if hasattr(torch.ops.aten, n)}
    activation = torch_sdpa.Activation({"CPU": kernels})
    try:
        yield
    finally:
        activation.remove()


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def heads_first(B: int, S: int, H: int, D: int, seed: int, dtype: torch.dtype, as_view: bool) -> Tensor:
    """(B, H, S, D), as a view of (B, S, H, D) or contiguous."""
    x = normal(B, S, H, D, seed=seed, dtype=dtype).transpose(1, 2)
    return (x if as_view else x.contiguous()).requires_grad_()


def with_grads(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    grad_out = normal(*out.shape, seed=9, dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]


def assert_same(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def test_importing_registers_nothing() -> None:
    program = (
        "import flash4_torch, flash4_torch.integrations, torch.nn.attention as a\n"
        "assert 'FLASH4' not in a.list_flash_attention_impls()\n"
        "flash4_torch.integrations.torch_sdpa.register()\n"
        "assert 'FLASH4' in a.list_flash_attention_impls()\n"
        "assert a.current_flash_attention_impl() is None\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 33), st.integers(1, 33), st.sampled_from([1, 5, 8])),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2)]),
    rule=st.sampled_from(["full", "causal", "bool mask", "float mask"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    views=st.booleans(),
)
def test_sdpa_runs_ours_and_equals_torch(
    sizes: tuple[int, int, int, int],
    heads: tuple[int, int],
    rule: str,
    dtype: torch.dtype,
    views: bool,
) -> None:
    (B, Sq, Sk, D), (Hq, Hk) = sizes, heads
    q = heads_first(B, Sq, Hq, D, 0, dtype, views)
    k, v = (heads_first(B, Sk, Hk, D, seed, dtype, views) for seed in (1, 2))
    attends = normal(Sq, Sk, seed=3) > -0.5
    attends[:, 0] = True  # torch's kernel and ours differ on a row that attends to nothing
    masks = {"bool mask": attends, "float mask": normal(B, 1, Sq, Sk, seed=4, dtype=dtype)}

    def attend() -> list[Tensor]:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=masks.get(rule), is_causal=rule == "causal", scale=0.4, enable_gqa=True
        )
        return with_grads(out, q, k, v)

    theirs = attend()
    with active() as calls:
        ours = attend()
    assert calls == ["forward", "backward"]
    assert_same(ours, theirs, 2e-2 if dtype == torch.bfloat16 else 1e-5)
    assert [x.stride() for x in ours] == [x.stride() for x in theirs]


def test_multihead_attention_trains_on_ours() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 9, 16)

    def step() -> list[Tensor]:
        out, _ = module(x, x, x, need_weights=False)
        return with_grads(out, *module.parameters())

    theirs = step()
    with active() as calls:
        ours = step()
    assert calls == ["forward", "backward"]
    assert_same(ours, theirs, 1e-5)


def test_restoring_gives_torch_its_kernels_back() -> None:
    q = heads_first(2, 8, 2, 4, 0, torch.float32, True)
    before = F.scaled_dot_product_attention(q, q, q)
    with active():
        assert current_flash_attention_impl() == "FLASH4"
    assert current_flash_attention_impl() is None
    with counted() as calls:
        after = F.scaled_dot_product_attention(q, q, q)
    assert calls == []
    assert torch.equal(before, after)


def test_removing_twice_does_no_harm() -> None:
    activation = torch_sdpa.activate()
    activation.remove()
    activation.remove()
    q = torch.ones(1, 1, 2, 4)
    with counted() as calls:
        F.scaled_dot_product_attention(q, q, q)
    assert calls == []


def test_another_name_may_be_chosen() -> None:
    torch_sdpa.register("MINE")
    assert "MINE" in list_flash_attention_impls()


def test_our_own_function_ends_while_the_route_is_active() -> None:
    """The cpu backend calls the very operator that is replaced."""
    q, k, v = (normal(1, 16, 2, 8, seed=s).requires_grad_() for s in range(3))

    def attend() -> list[Tensor]:
        out, _ = ops.attention(q, k, v, None, None, None, CallOptions(window_right=0, **PLAIN))
        return with_grads(out, q, k, v)

    alone = attend()
    with active():
        assert_same(attend(), alone, 1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_compiled_sdpa_runs_ours() -> None:
    contiguous = heads_first(2, 11, 2, 8, 0, torch.float32, False)
    view = heads_first(2, 11, 2, 8, 1, torch.float32, True)

    def two_layouts(a: Tensor, b: Tensor) -> Tensor:
        first = F.scaled_dot_product_attention(a, b, b, is_causal=True)
        return F.scaled_dot_product_attention(b, first, a) * 2.0

    theirs = with_grads(two_layouts(contiguous, view), contiguous, view)
    with active() as calls:
        compiled = torch.compile(two_layouts, fullgraph=True)
        ours = with_grads(compiled(contiguous, view), contiguous, view)
    assert sorted(calls) == ["backward"] * 2 + ["forward"] * 2
    assert_same(ours, theirs, 1e-5)


def test_calls_like_an_earlier_one_choose_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the fast path; `active` would watch, and so keep them from it."""
    fast_path.clear()
    inputs = [torch.randn(2, 3, 5, 8, requires_grad=True) for _ in "qkv"]
    dout, chosen = torch.randn(2, 3, 5, 8), mock.Mock(wraps=backends.choose)
    monkeypatch.setattr(impl, "backends", mock.Mock(choose=chosen))

    def step() -> list[Tensor]:
        out = F.scaled_dot_product_attention(*inputs, is_causal=True)
        return [out, *torch.autograd.grad(out, inputs, dout)]

    stock = step()
    torch_sdpa.register()
    activate_flash_attention_impl("FLASH4")
    try:
        first = step()
        assert chosen.call_count == 2
        second = step()
        assert chosen.call_count == 2
    finally:
        restore_flash_attention_impl()
    for a, b, c in zip(stock, first, second, strict=True):
        assert torch.equal(b, c) and b.stride() == c.stride()
        torch.testing.assert_close(b, a)


def test_dropout_on_cpu_is_refused_by_name() -> None:
    q = torch.ones(1, 1, 2, 4)
    with active(), pytest.raises(ArgumentError, match=r"^dropout_p is 0\.5"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 20)),
    heads=st.sampled_from([(2, 2), (4, 2)]),
    causal=st.booleans(),
    left=st.sampled_from([None, -1, 0, 3]),
    dropout_p=st.sampled_from([0.0, 0.3]),
)
def test_cuda_forward_and_backward_are_our_attention(
    sizes: tuple[int, int, int], heads: tuple[int, int], causal: bool, left: int | None, dropout_p: float
) -> None:
    """Causal is bottom-right here, -1 means unbounded, and the backward replays the forward's dropout."""
    (B, Sq, Sk), (Hq, Hk) = sizes, heads
    q = normal(B, Sq, Hq, 8, seed=0).requires_grad_()
    k, v = (normal(B, Sk, Hk, 8, seed=s).requires_grad_() for s in (1, 2))
    with cuda_operators_on_cpu():
        out, lse, rng_state, _, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, Sq, Sk, dropout_p, causal, False, scale=0.3, window_size_left=left
        )
        through_aten = [lse, *with_grads(out, q, k, v)]
    ours, lse = ops.attention(
        q,
        k,
        v,
        None,
        None,
        rng_state.view(torch.int64) if dropout_p else None,
        CallOptions(
            scale=0.3,
            window_left=None if left == -1 else left,
            window_right=0 if causal else None,
            dropout_p=dropout_p,
        ),
    )
    assert_same(through_aten, [lse, *with_grads(ours, q, k, v)], 1e-5)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("causal", [False, True])
def test_cuda_sdpa_is_the_same_with_heads_first(causal: bool, dropout_p: float) -> None:
    q, k, v = (normal(2, 7, 4, 8, seed=s).requires_grad_() for s in range(3))
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    with cuda_operators_on_cpu():
        torch.manual_seed(5)
        flash, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, 7, 7, dropout_p, causal, False
        )
        theirs = with_grads(flash, q, k, v)
        torch.manual_seed(5)
        sdpa, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*rows, dropout_p, causal)
        ours = with_grads(sdpa.transpose(1, 2), q, k, v)
    assert_same(ours, theirs, 0.0)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 2)])
def test_varlen_attn_is_each_sequence_by_itself(window: tuple[int, int]) -> None:
    lengths = [5, 1, 9]
    ends = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    q, k, v = (normal(15, 2, 8, seed=s).requires_grad_() for s in range(3))
    with cuda_operators_on_cpu():
        packed = with_grads(varlen_attn(q, k, v, ends, ends, 9, 9, window_size=window), q, k, v)

    def alone(x: Tensor) -> list[Tensor]:
        return [part.transpose(0, 1) for part in x.split(lengths)]

    pieces = []
    for qs, ks, vs in zip(alone(q), alone(k), alone(v), strict=True):
        distance = torch.arange(ks.shape[1]) - torch.arange(qs.shape[1])[:, None]
        left, right = (99 if side == -1 else side for side in window)
        mask = (distance >= -left) & (distance <= right)
        pieces.append(F.scaled_dot_product_attention(qs, ks, vs, attn_mask=mask).transpose(0, 1))
    assert_same(packed, with_grads(torch.cat(pieces), q, k, v), 1e-5)


@pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"),
    reason="PyTorch before 2.13 has no varlen_attn_out",
)
def test_varlen_attn_out_writes_into_out() -> None:
    from torch.nn.attention.varlen import varlen_attn_out

    ends = torch.tensor([0, 4, 7], dtype=torch.int32)
    q, k, v = (normal(7, 2, 8, seed=s) for s in range(3))
    out = torch.full_like(q, torch.nan)
    with cuda_operators_on_cpu():
        varlen_attn_out(out, q, k, v, ends, ends, 4, 4)
        assert torch.equal(out, varlen_attn(q, k, v, ends, ends, 4, 4))


Sizes = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=4)
Splits = st.sampled_from([None, 0, 1, 3])


def by_mask(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int]) -> Tensor:
    """Attention of one sequence, (S, H, D), aligned to the bottom right, 0 for rows that see nothing."""
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
    left, right = (99 if side == -1 else side for side in window)
    mask = (distance >= -left) & (distance <= right)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask) if k.shape[1] else torch.zeros_like(q)
    return out.masked_fill(~mask.any(1)[:, None], 0.0).transpose(0, 1)


@pytest.mark.skipif(
    "seqused_k" not in inspect.signature(varlen_attn).parameters,
    reason="PyTorch before 2.13 has no caches in varlen_attn; the operator's own arguments are tested below",
)
@settings(derandomize=True, deadline=None, max_examples=40)
@given(Sizes, st.integers(1, 5), st.sampled_from([(-1, -1), (-1, 0), (3, 0), (2, 2)]), Splits)
def test_varlen_attn_over_pages_is_each_sequence_by_itself(
    sizes: list[tuple[int, int]], page_size: int, window: tuple[int, int], num_splits: int | None
) -> None:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn_out

    tokens, keys = zip(*sizes, strict=True)
    table, pages, parts = paged(keys, page_size)
    q, ends = normal(sum(tokens), 4, 8, seed=0), cumulative(tokens)
    options = {"window_size": window, "enable_gqa": True, "block_table": table, "num_splits": num_splits}
    call = (q, *pages, ends, None, max(tokens), max(keys))
    out = torch.full_like(q, torch.nan)
    lengths = torch.tensor(keys, dtype=torch.int32)
    with cuda_operators_on_cpu():
        found, lse = varlen_attn(*call, seqused_k=lengths, return_aux=AuxRequest(lse=True), **options)
        into, same = varlen_attn_out(
            out, *call, seqused_k=lengths, return_aux=AuxRequest(lse=True), **options
        )
    assert into is out and torch.equal(out, found) and torch.equal(lse, same)
    assert lse.shape == (4, sum(tokens))
    wanted = [by_mask(x, k, v, window) for x, (k, v) in zip(q.split(tokens), parts, strict=True)]
    assert_same([found], [torch.cat(wanted)], 1e-5)


def cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def paged(
    lengths: Sequence[int], page_size: int
) -> tuple[Tensor, tuple[Tensor, Tensor], list[tuple[Tensor, Tensor]]]:
    """The block table, the caches in shuffled pages, whose other rows are NaN, and each sequence's (k, v)."""
    blocks = max(1, *(-(-n // page_size) for n in lengths)) if lengths else 1
    number = len(lengths) * blocks
    table = torch.randperm(number, generator=torch.Generator().manual_seed(7)).view(-1, blocks).int()
    caches = torch.full((2, number, page_size, 2, 8), torch.nan)
    parts = []
    for b, n in enumerate(lengths):
        part = normal(2, n, 2, 8, seed=10 + b)
        for j in range(n):
            caches[:, table[b, j // page_size], j % page_size] = part[:, j]
        parts.append((part[0], part[1]))
    return table, (caches[0], caches[1]), parts


@settings(derandomize=True, deadline=None, max_examples=40)
@given(Sizes, st.data(), st.booleans(), Splits)
def test_cuda_forward_over_packed_and_dense_caches(
    sizes: list[tuple[int, int]], data: st.DataObject, causal: bool, num_splits: int | None
) -> None:
    """The first seqused_k keys of each sequence count, packed or dense."""
    tokens, room = zip(*sizes, strict=True)
    dense = data.draw(st.booleans())
    if dense:
        tokens, room = (max(tokens),) * len(tokens), (max(1, *room, 1),) * len(room)
    used = [data.draw(st.integers(0, n)) for n in room]
    q, k, v = (
        normal(sum(n), H, 8, seed=seed) for seed, (n, H) in enumerate(((tokens, 4), (room, 2), (room, 2)))
    )
    ends: list[Tensor | None] = [cumulative(tokens), cumulative(room)]
    given_q, given_k, given_v = q, k, v
    if dense:
        B, ends = len(sizes), [None, None]
        given_q, given_k, given_v = (x.view(B, -1, *x.shape[1:]) for x in (q, k, v))
    call = (given_q, given_k, given_v, *ends, max(tokens), max(room), 0.0, causal, False)
    lengths = torch.tensor(used, dtype=torch.int32)
    kernels = torch_sdpa.CUDA_KERNELS
    out, lse, *_ = kernels["_flash_attention_forward"](*call, seqused_k=lengths, num_splits=num_splits)
    into = torch.full_like(given_q, torch.nan)
    same = kernels["_flash_attention_forward_no_dropout_inplace"](
        into, *call, seqused_k=lengths, num_splits=num_splits
    )
    assert torch.equal(into, out) and torch.equal(same, lse)
    assert lse.is_contiguous() and lse.shape == ((B, 4, max(tokens)) if dense else (4, sum(tokens)))
    wanted = [
        by_mask(x, ks[:n], vs[:n], (-1, 0) if causal else (-1, -1))
        for x, ks, vs, n in zip(q.split(tokens), k.split(room), v.split(room), used, strict=True)
    ]
    assert_same([out.reshape(-1, 4, 8)], [torch.cat(wanted)], 1e-5)


@pytest.mark.skipif(
    "num_splits" not in str(torch.ops.aten._flash_attention_forward.default._schema),
    reason="PyTorch before 2.13 has no num_splits",
)
def test_one_split_asks_for_bits_that_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch promises so of num_splits=1; gradients are those of any other call."""
    asked: list[bool] = []

    def attend(*args: Any, batch_invariant: bool, **kwargs: Any) -> Any:
        asked.append(batch_invariant)
        return attention_kvcache(*args, batch_invariant=batch_invariant, **kwargs)

    monkeypatch.setattr(torch_sdpa, "attention_kvcache", attend)
    q, k, v = (normal(7, 2, 8, seed=s).requires_grad_() for s in range(3))
    ends = cumulative([3, 4])
    with cuda_operators_on_cpu():
        results = []
        for splits in ({}, {"num_splits": 1}, {"num_splits": 2}):
            out, *_ = torch.ops.aten._flash_attention_forward(
                q, k, v, ends, ends, 4, 4, 0.0, True, False, **splits
            )
            results.append(with_grads(out, q, k, v))
    assert asked == [True, False]
    assert_same(results[1], results[0], 1e-5)
    assert_same(results[2], results[0], 1e-5)


REFUSED = {
    "return_debug_mask": {"return_debug_mask": True},
    "seqused_k": {"block_table": torch.zeros(1, 1, dtype=torch.int32)},
    "dropout_p": {"num_splits": 2, "dropout_p": 0.5},
    "alibi_slopes": {"alibi_slopes": torch.ones(2)},
    "cum_seq_k": {"cum_seq_q": torch.tensor([0, 2], dtype=torch.int32)},
    "block_table": {"block_table": torch.zeros(1, 1), "seqused_k": torch.ones(1, dtype=torch.int32)},
    "num_splits": {"num_splits": -1},
}


@pytest.mark.parametrize("argument", REFUSED)
def test_what_is_not_served_is_refused_by_name(argument: str) -> None:
    q = torch.ones(1, 2, 2, 4)
    call = {"cum_seq_q": None, "cum_seq_k": None, "return_debug_mask": False, "dropout_p": 0.0}
    call |= REFUSED[argument]
    with pytest.raises(ArgumentError, match=f"^{argument} is"):
        torch_sdpa.CUDA_KERNELS["_flash_attention_forward"](
            q, q, q, max_q=2, max_k=2, is_causal=False, **call
        )
