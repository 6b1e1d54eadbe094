"""Threads, streams, captures and forks at the same time, on a GPU that our kernels serve."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

import flash4_torch
from flash4_torch import fast_path
from flash4_torch.backends import tile_counters
from own_gpu import needs_ours
from test_threads import at_once

pytestmark = needs_ours

ROUNDS = 15
PAUSE = 20_000_000
"""Cycles, about 10 ms: long enough for a thread to queue its launches after them."""


class Work:
    """A causal call and its gradients, and what they give when nothing else runs."""

    def __init__(self, *size: int, deterministic: bool = False):
        self.inputs = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]
        self.leaves = [x.clone().requires_grad_() for x in self.inputs]
        self.dout = torch.randn_like(self.inputs[0])
        self.deterministic = deterministic
        # The first two steps prepare the fast path in both directions.
        *_, self.expected = (self.step() for _ in range(3))
        torch.cuda.synchronize()

    def forward(self) -> tuple[Tensor, ...]:
        return (flash4_torch.attention(*self.inputs, causal=True),)

    def step(self) -> tuple[Tensor, ...]:
        out = flash4_torch.attention(*self.leaves, causal=True, deterministic=self.deterministic)
        return out.detach(), *torch.autograd.grad(out, self.leaves, self.dout)

    def check(self, found: tuple[Tensor, ...]) -> None:
        """Compares bit for bit, except sums of dQ in any order, which may be rounded otherwise."""
        for name, a, b in zip(("out", "dq", "dk", "dv"), found, self.expected, strict=False):
            if name == "dq" and not self.deterministic:
                allowed = 2 * torch.finfo(a.dtype).eps * b.abs().max()
                assert (a.float() - b.float()).abs().max() <= allowed, name
            else:
                assert torch.equal(a, b), name


def assert_counters_are_left_at_zero() -> None:
    torch.cuda.synchronize()
    assert all(not counter.any() for counter in tile_counters._of_stream.values())


def launch_repeatedly(call: Callable[[], tuple[Tensor, ...]], stream: Any) -> list[tuple[Tensor, ...]]:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(PAUSE)
        return [call() for _ in range(ROUNDS)]


CALLS = {"steps": ("step", "step"), "steps beside forwards": ("step", "forward")}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_streams", [1, 2])
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_two_threads(calls: tuple[str, str], num_streams: int, deterministic: bool) -> None:
    """Threads have a stream each or share one. Gradients are launched from a third thread, autograd's."""
    works = [Work(*size, deterministic=deterministic) for size in ((1, 1024, 4, 64), (2, 777, 2, 64))]
    streams = [torch.cuda.Stream() for _ in range(num_streams)] * (3 - num_streams)
    tasks = [
        partial(launch_repeatedly, getattr(work, call), stream)
        for work, call, stream in zip(works, calls, streams, strict=True)
    ]
    results = at_once(tasks)
    torch.cuda.synchronize()
    for work, found in zip(works, results, strict=True):
        for one in found:
            work.check(one)
    assert_counters_are_left_at_zero()


def test_deterministic_and_other_gradients_interleaved_on_two_streams() -> None:
    works = [Work(1, 1024, 4, 64, deterministic=deterministic) for deterministic in (False, True)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(PAUSE)
    found = []
    for i in range(4 * ROUNDS):
        # Each stream has both kinds, and at any time the streams have different ones.
        work = works[(i + i // 2) % 2]
        with torch.cuda.stream(streams[i % 2]):
            found.append((work, work.step()))
    torch.cuda.synchronize()
    for work, results in found:
        work.check(results)
    assert_counters_are_left_at_zero()


def test_first_calls_at_once() -> None:
    """One thread compiles and loads a kernel that nothing else uses here, and all launch it."""
    fast_path.clear()
    q, k, v = (torch.randn(1, 300, 2, 80, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    torch.cuda.synchronize()

    def first() -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            return flash4_torch.attention(q, k, v, window=(33, 5), softcap=3.0)

    results = at_once([first] * 4)
    torch.cuda.synchronize()
    expected = flash4_torch.attention(q, k, v, window=(33, 5), softcap=3.0)
    assert all(torch.equal(out, expected) for out in results)
    assert_counters_are_left_at_zero()


@pytest.mark.parametrize("call", ["forward", "step"])
def test_capture_while_another_thread_launches(call: str) -> None:
    captured, eager = Work(1, 1024, 4, 64), Work(2, 777, 2, 64)
    began, enough = threading.Event(), threading.Event()

    def launch_until_it_is_enough() -> int:
        rounds = 0
        with torch.cuda.stream(torch.cuda.Stream()):
            while rounds == 0 or not enough.is_set():
                eager.check(eager.step())
                rounds += 1
                began.set()
        return rounds

    graphs = []
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(launch_until_it_is_enough)
        try:
            began.wait(60)
            for _ in range(4):
                graph = torch.cuda.CUDAGraph()
                # Torch's default, "global", forbids other threads calls that any new allocation may make.
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    results = getattr(captured, call)()
                graph.replay()
                graphs.append((graph, results))
        finally:
            enough.set()
        assert other.result() > 0
    torch.cuda.synchronize()
    for graph, results in graphs:
        captured.check(results)
        for x in results:
            x.zero_()
        graph.replay()
        captured.check(results)
    assert_counters_are_left_at_zero()


def call_in_child(
    answers: Connection, on_cpu: Tensor, expected: Tensor, prepared: Tensor, other: Tensor
) -> None:
    torch.set_num_threads(1)
    answers.send(torch.equal(flash4_torch.attention(on_cpu, on_cpu, on_cpu), expected))
    for x in (prepared, other):
        try:
            flash4_torch.attention(x, x, x)
            answers.send("no error")
        except RuntimeError as error:
            answers.send(str(error))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_with_cuda_initialised() -> None:
    """A child's call on the CPU works; one on the GPU, by either path, gives torch's error, no hang."""
    on_cpu = torch.randn(1, 64, 2, 32)
    expected = flash4_torch.attention(on_cpu, on_cpu, on_cpu)
    prepared, other = (torch.randn(1, S, 2, 64, device="cuda", dtype=torch.bfloat16) for S in (256, 257))
    for _ in range(2):
        flash4_torch.attention(prepared, prepared, prepared)
    torch.cuda.synchronize()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=call_in_child, args=(sender, on_cpu, expected, prepared, other))
    child.start()
    sender.close()
    try:
        assert receiver.poll(60) and receiver.recv() is True
        for _ in ("prepared", "other"):
            assert receiver.poll(60), "the child hangs"
            error = receiver.recv()
            assert "forked subprocess" in error or "initialization error" in error, error
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()
    assert torch.equal(*(flash4_torch.attention(prepared, prepared, prepared) for _ in range(2)))
