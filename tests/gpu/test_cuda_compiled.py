"""Our kernels on a GPU that they serve: the right stream and device, graphs, the fast and the slow path."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import flash4_torch
from flash4_torch import fast_path, testing
from flash4_torch.backends import tile_counters
from flash4_torch.backends.compiled import mask_kinds
from own_gpu import OURS, needs_ours
from test_fast_path import LongWay

pytestmark = needs_ours


def qkv(
    B: int = 2, S: int = 512, H: int = 4, D: int = 64, *, device: str = "cuda", **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(B, S, H, D, device=device, dtype=torch.bfloat16, **kwargs) for _ in "qkv")
    return q, k, v


def assert_right(out: Tensor, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> None:
    exact, _ = testing.reference(q, k, v, **kwargs)
    peer, _ = testing.reference(q, k, v, dtype=q.dtype, **kwargs)
    testing.assert_close_as_peer(out, exact, peer)


def kernels_of(call: Any) -> list[str]:
    """Names of the kernels that a call launches."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        call()
        torch.cuda.synchronize()
    return [event.key for event in profile.key_averages()]


CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 20)},
    "softcap": {"softcap": 5.0},
    "dropout": {"dropout_p": 0.1},
    "mask": {"attn_mask": torch.arange(512) < 300},
}


@pytest.mark.parametrize("kwargs", CALLS.values(), ids=CALLS)
def test_our_kernel_runs(kwargs: dict[str, Any]) -> None:
    kwargs = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in kwargs.items()}
    q, k, v = qkv()
    reasons = flash4_torch.support(q, k, v, **kwargs)
    assert reasons[OURS] == [] and next(name for name, why in reasons.items() if not why) == OURS
    with testing.backends_used() as used:
        names = kernels_of(lambda: flash4_torch.attention(q, k, v, **kwargs))
    assert set(used) == {("attention", OURS)}
    assert any("forward_kernel" in name for name in names), names
    assert not any("flash_fwd" in name or "cudnn" in name for name in names), names


@pytest.mark.parametrize("D", [32, 64, 72, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("Sq", "Sk"), [(1, 300), (333, 333), (700, 256), (1100, 3300)])
def test_values_of_every_head_size(D: int, causal: bool, Sq: int, Sk: int) -> None:
    q, _, _ = qkv(2, Sq, 4, D)
    _, k, v = qkv(2, Sk, 2, D)
    with testing.poisoned_memory(), testing.backends_used() as used:
        out = flash4_torch.attention(q, k, v, causal=causal)
    assert used == {("attention", OURS): 1}
    assert_right(out, q, k, v, causal=causal)
    assert torch.equal(out, flash4_torch.attention(q, k, v, causal=causal))


def test_our_backward_takes_over_from_its_results() -> None:
    q, k, v = qkv(requires_grad=True)
    with testing.backends_used() as used:
        out = flash4_torch.attention(q, k, v, causal=True)
        dout = torch.randn_like(out)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
    assert used == {("attention", OURS): 1, ("attention_backward", OURS): 1}
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        other, _ = testing.reference(q, k, v, causal=True, dtype=dtype)
        results.append(torch.autograd.grad(other, (q, k, v), dout.to(dtype)))
    for a, e, p in zip(gradients, *results, strict=True):
        testing.assert_close_as_peer(a, e.double(), p)


def test_the_short_way_launches_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fast_path.clear()
    way = LongWay(monkeypatch)
    q, k, v = qkv()
    results = []
    ways = [way.taken(lambda: results.append(flash4_torch.attention(q, k, v))) for _ in range(3)]
    assert ways == [True, False, False]
    assert all(torch.equal(results[0], result) for result in results)
    assert_right(results[0], q, k, v)


def test_streams_that_overlap() -> None:
    """Each launch leaves its counter at zero, and none claims work from another's."""
    inputs = [qkv(1, 4096, 8) for _ in range(4)]
    expected = [flash4_torch.attention(*x, causal=True) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(5):
        results = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(flash4_torch.attention(*x, causal=True))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert all(not counter.any() for counter in tile_counters._of_stream.values())


def test_a_launch_waits_for_its_stream() -> None:
    q, k, v = qkv()
    zeros = torch.zeros_like(v)
    flash4_torch.attention(q, k, zeros)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(v)
        torch.cuda._sleep(100_000_000)
        late.copy_(v)
        out = flash4_torch.attention(q, k, late)
    torch.cuda.synchronize()
    assert torch.equal(out, flash4_torch.attention(q, k, v))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("size", [(1, 2048, 8, 64), (1, 3200, 4, 128)], ids=["", "clusters"])
def test_a_graph_replays_with_new_data_beside_eager_calls(size: tuple[int, ...], grad: bool) -> None:
    q, k, v = qkv(*size)
    q.requires_grad_(grad)
    flash4_torch.attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = flash4_torch.attention(q, k, v, causal=True)
        second = flash4_torch.attention(first, k, v)
    # Counters of captured launches need no node that sets them to 0.
    assert not any("memset" in name.lower() for name in kernels_of(graph.replay))
    side = torch.cuda.Stream()
    eager_inputs = qkv(*size)
    eager = flash4_torch.attention(*eager_inputs, causal=True)
    for _ in range(3):
        with torch.no_grad():
            for x in (q, k, v):
                x.normal_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            graph.replay()
        again = [flash4_torch.attention(*eager_inputs, causal=True) for _ in range(4)]
        torch.cuda.synchronize()
        assert all(torch.equal(eager, x) for x in again)
        expected = flash4_torch.attention(q, k, v, causal=True)
        assert torch.equal(first, expected)
        assert torch.equal(second, flash4_torch.attention(expected, k, v))


def test_graphs_give_their_memory_back() -> None:
    q, k, v = qkv(1, 256, 2)
    flash4_torch.attention(q, k, v)

    def capture_and_replay() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            flash4_torch.attention(q, k, v)
        graph.replay()
        torch.cuda.synchronize()

    capture_and_replay()
    torch.cuda.empty_cache()
    before, kept = torch.cuda.memory_reserved(), dict(tile_counters._of_stream)
    for _ in range(3):
        capture_and_replay()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before
    assert tile_counters._of_stream.keys() == kept.keys()


# Torch makes an empty graph first, to hold the memory of the others.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str) -> None:
    """Torch makes CUDA graphs in "reduce-overhead", and looks for memory that somebody keeps in them."""

    @torch.compile(fullgraph=True, mode=mode)
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash4_torch.attention(q * 2.0, k, v, causal=True) + 1.0

    with torch.no_grad():
        for _ in range(4):
            q, k, v = qkv()
            torch.compiler.cudagraph_mark_step_begin()
            out = step(q, k, v).clone()
            eager = flash4_torch.attention(q * 2.0, k, v, causal=True) + 1.0
            torch.testing.assert_close(out, eager, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current() -> None:
    assert torch.cuda.current_device() == 0
    q, k, v = qkv(device="cuda:1")
    for _ in range(2):  # the slow path, then the fast one
        out = flash4_torch.attention(q, k, v, causal=True)
        assert out.device == q.device and torch.cuda.current_device() == 0
        assert_right(out, q, k, v, causal=True)
    stream = torch.cuda.Stream(device="cuda:1")
    with torch.cuda.stream(stream), torch.cuda.device(0):
        late = torch.zeros_like(v)
        with torch.cuda.device(1):
            torch.cuda._sleep(100_000_000)
        late.copy_(v)
        again = flash4_torch.attention(q, k, late, causal=True)
    torch.cuda.synchronize(1)
    assert torch.equal(again, out)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_graph_on_a_device_that_is_not_current_at_replay() -> None:
    q, k, v = qkv(device="cuda:1")
    expected = flash4_torch.attention(q, k, v)
    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        # Torch's own stream for captures is of one device only, that of the process's first capture.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            out = flash4_torch.attention(q, k, v)
        graph.replay()
    torch.cuda.synchronize(1)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("shape", [(2, 1, 384, 640), (2, 4, 384, 640), (1, 1, 384, 640)])
def test_dense_masks_of_a_kind_are_examined_once(shape: tuple[int, ...]) -> None:
    """Results are those of examined ones, right for another mask of the kind, and for any in a graph."""
    mask_kinds._kind.cache_clear()
    q, _, _ = qkv(S=384)
    _, k, v = qkv(S=640)
    mask = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    call = functools.partial(flash4_torch.attention, q, k, v, attn_mask=mask)
    first = call()
    torch.cuda.synchronize()
    assert not any("mask_blocks" in name for name in kernels_of(call))
    assert torch.equal(call(), first)

    def halve() -> None:
        mask[..., torch.randperm(640, device="cuda")[:320]] = -torch.inf
        mask[..., :128] = -torch.inf

    assert_right(call(), q, k, v, attn_mask=mask)
    halve()
    assert_right(call(), q, k, v, attn_mask=mask)
    for known in (True, False):
        if not known:
            mask_kinds._kind.cache_clear()
            fast_path.clear()
            # Its answer comes while the graph is captured.
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        for _ in range(2):
            mask.normal_()
            halve()
            graph.replay()
            assert_right(out, q, k, v, attn_mask=mask)
