"""Every feature on a GPU, against float64; the CPU's dropout masks, graphs, streams and devices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flash4_torch
from cases import Case, cases
from flash4_torch import testing
from own_gpu import OURS
from test_cuda_compiled_gradients import noise_of_stored
from test_matches_reference import NAMES, results_and_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(case: Case) -> Case:
    """The same call on the GPU, strides included."""

    def move(x: torch.Tensor) -> torch.Tensor:
        storage = torch.empty(0, dtype=x.dtype).set_(x.detach().untyped_storage()).cuda()
        return torch.as_strided(storage, x.shape, x.stride(), x.storage_offset()).detach()

    kwargs = dict(case.kwargs)
    for name in ("attn_mask", "sinks"):
        if kwargs[name] is not None:
            kwargs[name] = kwargs[name].detach().cuda()
            kwargs[name].requires_grad_(kwargs[name].is_floating_point())
    return Case(*(move(x).requires_grad_() for x in (case.q, case.k, case.v)), kwargs)


@given(cases(), st.sampled_from([0.0, 0.1, 0.5]))
@settings(max_examples=200)
def test_values_and_gradients(case: Case, dropout_p: float) -> None:
    case = on_gpu(case)
    dropout = {}
    if dropout_p > 0.0:
        dropout = {"dropout_p": dropout_p, "rng_state": testing.peek_rng_state("cuda")}
    with testing.poisoned_memory():
        out, lse = flash4_torch.attention(
            case.q, case.k, case.v, **case.kwargs, dropout_p=dropout_p, deterministic=False, return_lse=True
        )
        cotangents = torch.randn_like(out, dtype=torch.float64), torch.randn_like(lse, dtype=torch.float64)
        actual = results_and_gradients(case, out, lse, *cotangents)
    exact = results_and_gradients(case, *case.exact(**dropout), *cotangents)
    peer = results_and_gradients(case, *case.exact(case.q.dtype, **dropout), *cotangents)
    noise = noise_of_stored(out, cotangents[0], case.q, case.k, case.kwargs["scale"])
    for name, a, e, p in zip(NAMES, actual, exact, peer, strict=False):
        testing.assert_close_as_peer(a, e.double(), p, what=name, noise=noise.get(name, 0.0))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_plain_calls_run_a_fused_kernel(dtype: torch.dtype, causal: bool) -> None:
    q, k, v = (torch.randn(2, 333, 4, 64, device="cuda").to(dtype).requires_grad_() for _ in "qkv")
    with testing.backends_used() as used:
        out = flash4_torch.attention(q, k, v, causal=causal)
        dout = torch.randn_like(out)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
    serving = OURS or "sdpa"
    assert used == {("attention", serving): 1, ("attention_backward", serving): 1}
    results = []
    for dtype_ in (torch.float64, dtype):
        other, _ = testing.reference(q, k, v, causal=causal, dtype=dtype_)
        results.append([other, *torch.autograd.grad(other, (q, k, v), dout.to(dtype_))])
    for a, e, p in zip((out, *gradients), *results, strict=True):
        testing.assert_close_as_peer(a, e.double(), p)


def test_dropout_masks_are_the_cpus() -> None:
    rng_state = torch.tensor([-(2**62) + 7, 2**61 + 3])
    masks = [testing.dropout_mask(rng_state.to(device), 2, 3, 130, 77, 0.37) for device in ("cpu", "cuda")]
    assert torch.equal(masks[0], masks[1].cpu())


@pytest.mark.parametrize(
    "kwargs", [{}, {"causal": True}, {"dropout_p": 0.2}, {"softcap": 5.0, "window": (9, 0)}]
)
def test_cuda_graphs_replay_with_new_data(kwargs: dict[str, object]) -> None:
    q = torch.randn(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(q)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = flash4_torch.attention(x, x, x, **kwargs)
        return out, torch.autograd.grad(out, x, dout)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(q.detach().requires_grad_())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, gradient = step(q)
    replays = []
    for _ in range(2):
        with torch.no_grad():
            q.normal_()
        graph.replay()
        replays.append((out.clone(), gradient.clone()))
        if "dropout_p" not in kwargs:
            expected = step(q.detach().clone().requires_grad_())
            torch.testing.assert_close(out, expected[0])
            torch.testing.assert_close(gradient, expected[1])
    assert not torch.equal(replays[0][0], replays[1][0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current() -> None:
    q = torch.randn(1, 65, 2, 64, device="cuda:1", dtype=torch.bfloat16, requires_grad=True)
    out = flash4_torch.attention(q, q, q, causal=True)
    out.sum().backward()
    exact, _ = testing.reference(q, q, q, causal=True)
    assert out.device == q.device
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)


def test_compiled_training_step_with_dynamic_lengths() -> None:
    @torch.compile(fullgraph=True, dynamic=True)
    def step(q: torch.Tensor) -> torch.Tensor:
        return flash4_torch.attention(q, q, q, causal=True).float().square().sum()

    for S in (64, 100, 257):
        q = torch.randn(2, S, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        (compiled,) = torch.autograd.grad(step(q), q)
        (eager,) = torch.autograd.grad(flash4_torch.attention(q, q, q, causal=True).float().square().sum(), q)
        torch.testing.assert_close(compiled, eager, rtol=2e-2, atol=2e-2)
