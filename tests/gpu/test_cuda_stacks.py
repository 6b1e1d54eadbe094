"""Batches of short sequences on a GPU whose kernels stack them: right results, in graphs and modules, too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import flash4_torch
from everything import examples
from flash4_torch import testing
from own_gpu import OURS, needs_ours
from stacked_calls import FEATURES, FORMS, made, noted

pytestmark = needs_ours


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Entries of all stacks from here on."""
    return noted(monkeypatch)


@pytest.mark.parametrize("form", FORMS)
@given(
    feature=st.sampled_from(list(FEATURES)),
    B=st.integers(300, 2000),
    Sq=st.integers(2, 70),
    Sk=st.integers(2, 70),
    Hk=st.integers(1, 4),
    group=st.sampled_from([1, 3]),
    sinks=st.booleans(),
    shared=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 999),
)
@settings(max_examples=examples(12, 60), deadline=None, suppress_health_check=list(HealthCheck))
def test_results_and_gradients_are_right(
    form: str,
    feature: str,
    B: int,
    Sq: int,
    Sk: int,
    Hk: int,
    group: int,
    sinks: bool,
    shared: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    how = {"sinks": sinks, "shared": shared, "seed": seed, "dtype": dtype, "device": "cuda"}
    call = made(feature, form, B, Sq, Sq if shared else Sk, Hk, group, **how)
    with testing.poisoned_memory():
        results = call.run()
    call.check(results)


@pytest.mark.parametrize("S", [8, 24, 40, 49, 64])
def test_modules_and_graphs_are_right(S: int, entries: list[int]) -> None:
    """Prepared launches and replays: the first and a third call of a module, and a graph of it."""
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(256, 8, batch_first=True, device="cuda", dtype=torch.bfloat16)
    ours = flash4_torch.MultiheadAttention.from_torch(stock)
    exact = nn.MultiheadAttention(256, 8, batch_first=True, device="cuda", dtype=torch.float64)
    exact.load_state_dict(stock.state_dict())
    x, dout = torch.randn(2, 512, S, 256, device="cuda", dtype=torch.bfloat16)

    def step(module: nn.Module) -> tuple[Tensor, ...]:
        leaf = x.to(next(module.parameters()).dtype).requires_grad_()
        out, _ = module(leaf, leaf, leaf, need_weights=False)
        return out, *torch.autograd.grad(out, [leaf, *module.parameters()], dout.to(out.dtype))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        first, _, again = (step(ours) for _ in range(3))
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step(ours)
    for each in captured:
        each.detach().fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    truth, peer = step(exact), step(stock)
    for results in (first, again, captured):
        for own, true, plain in zip(results, truth, peer, strict=True):
            testing.assert_close_as_peer(own, true, plain)
    # In the forward those of 49 rows have a tile each.
    assert len(set(entries)) == (OURS != "sm80") * (1 if S == 49 else 2)
