"""Attention weights in compiled graphs: written in torch's own operators, and equal to ours."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from compiling import compiled, results_and_gradients
from everything import EVERYTHING, one_of
from flash4_torch import MultiheadAttention, ops
from flash4_torch.ops import weights_in_graph
from flash4_torch.ops.weights_in_graph import OfOutput
from flash4_torch.problem import CallOptions
from flash4_torch.reference import dropout
from test_decomposition import masks, scorings

FLASH4 = torch.ops.flash4

# torch 2.11's inductor imports a module that uses TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None]:
    B, Sq, Sk, Hk, group = (draw(st.integers(1, n)) for n in (3, 6, 6, 2, 3))
    shapes = (B, Sq, Hk * group, 4), (B, Sk, Hk, 4), (B, Sk, Hk, 4)
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    sinks = torch.randn(Hk * group, dtype=torch.float64) if draw(st.booleans()) else None
    return (q, k, v), draw(masks(B, Hk * group, Sq, Sk)), sinks


@given(calls(), scorings(), st.booleans(), st.sampled_from([0.0, 0.4, 1.0]))
def test_output_and_weights_together(call: Any, scoring: tuple[Any, ...], average: bool, p: float) -> None:
    """Results and gradients of the forward that is written out equal the operators'."""
    (q, k, v), mask, sinks = call
    has_mask_grad = mask is not None and mask.is_floating_point()
    leaves = [x for x in (q, k, v, mask if has_mask_grad else None, sinks) if x is not None]
    options = CallOptions(*scoring)._replace(dropout_p=p)
    rng_state = ops.draw_rng_state(q.device) if p else None
    found = []
    for function in (weights_in_graph.forward, ops.attention_and_weights):
        for x in leaves:
            x.requires_grad_()
        results = function(q, k, v, mask, sinks, rng_state, options, average)
        torch.manual_seed(1)
        loss = sum((x.masked_fill(x == -torch.inf, 0.0) * torch.randn_like(x)).sum() for x in results)
        found.append((*results, *torch.autograd.grad(loss, leaves)))
    for x, y in zip(*found, strict=True):
        assert_equal(x, y)


@given(
    calls(),
    scorings(),
    st.booleans(),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.sampled_from(["", "out", "lse"]),
    st.booleans(),
)
def test_gradients(
    call: Any, scoring: tuple[Any, ...], average: bool, p: float, more: str, is_saved: bool
) -> None:
    """Those of the weights, alone or with those of out and lse, are what the backward operators add up to."""
    (q, k, v), mask, sinks = call
    scale, left, right, *_ = scoring
    scoring = scale, left, right, 0.0, p
    rng_state = ops.draw_rng_state(q.device) if p else None
    out, lse, low = FLASH4.attention.default(q, k, v, mask, sinks, rng_state, *scoring, False)
    beside = lse, low if low.numel() else None, mask, sinks, rng_state
    weights = FLASH4.attention_weights.default(q, k, *beside, *scoring, average)
    dweights, mask_grad = torch.randn_like(weights), mask is not None and mask.is_floating_point()
    given = dweights, q, k, *beside, *scoring, average, mask_grad
    dq, dk, dmask, dsinks = FLASH4.attention_weights_backward.default(*given)
    expected, output = [dq, dk, None, dmask, dsinks], None
    if more:
        dout, dlse = torch.randn_like(out), torch.randn_like(lse) if more == "lse" else None
        output = OfOutput(dout, dlse, v)
        others = FLASH4.attention_backward.default(
            dout, dlse, q, k, v, out, *beside, *scoring, False, mask_grad
        )
        expected = [y if x is None else x + y for x, y in zip(expected, others, strict=True)]
    saved = weights_in_graph.each_head(q, k, *beside, *scoring) if is_saved else None
    actual = weights_in_graph.backward(*given, output=output, saved=saved)
    has = True, True, bool(more), mask_grad, sinks is not None
    for x, y, wanted in zip(actual, expected, has, strict=True):
        assert (x is not None) == wanted
        if x is not None:
            assert_equal(x, y)


def assert_equal(x: Tensor, y: Tensor) -> None:
    """A mask in float16 has its two gradients rounded before they are added."""
    loose = {"rtol": 4e-3, "atol": 4e-3} if x.dtype == torch.float16 else {}
    torch.testing.assert_close(x, y, **loose)


@pytest.mark.parametrize("p", [0.1, 0.7])
def test_dropout_in_a_graph(p: float) -> None:
    """The mask that a graph computes, for each weight by itself, is that of the kernels, bit for bit."""
    B, Hq, Sq, Sk = 2, 3, 21, 37
    rng_state = ops.draw_rng_state(torch.device("cpu"))
    kept = compiled(dropout.keep_each)(rng_state, p, B, Hq, Sq, Sk)
    whole = dropout.Dropout(rng_state, p).keep(range(B), Hq, range(Sq), range(Sk))
    assert torch.equal(kept, whole) and 0 < kept.sum() < kept.numel()


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs call the operators, as those for a GPU do with more scores than a few."""
    monkeypatch.setattr(weights_in_graph, "_ON_CPU", 0)
    monkeypatch.setattr(weights_in_graph, "_DROPPED_ON_CPU", 0)


USES = ("both", "out", "weights")


def operators(
    module: Callable[..., Any], uses: str, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[list[str], list[str]]:
    """Our operators in the forward and in the backward graph of a training step that uses these results."""
    called: list[list[str]] = [[], []]

    def collect(index: int) -> Any:
        def compiler(graph: GraphModule, _: list[Tensor]) -> Any:
            targets = [str(node.target) for node in graph.graph.nodes]
            called[index] += [name.split(".")[1] for name in targets if name.startswith("flash4.")]
            return make_boxed_func(graph)

        return compiler

    def step(x: Tensor) -> list[Tensor]:
        results = module(x, x, x, **options)
        return [x for x, name in zip(results, USES[1:], strict=True) if uses in (name, "both")]

    backend = aot_autograd(fw_compiler=collect(0), bw_compiler=collect(1))
    results = compiled(step, backend=backend)(torch.randn(2, 5, 8, dtype=dtype))
    sum(x.square().sum() for x in results).backward()
    return called[0], called[1]


@pytest.mark.parametrize(("uses", "dropout"), [*((uses, 0.0) for uses in USES), ("both", 0.3)])
def test_a_graph_for_the_cpu_calls_nothing_of_ours(uses: str, dropout: float) -> None:
    assert operators(MultiheadAttention(8, 2, dropout, batch_first=True), uses) == ([], [])


def test_a_graph_drops_what_eager_attention_drops() -> None:
    module = MultiheadAttention(16, 2, 0.3, batch_first=True)
    x = torch.randn(2, 21, 16, requires_grad=True)
    found = []
    for attend in (module, compiled(module)):
        torch.manual_seed(1)
        out, weights = attend(x, x, x, average_attn_weights=False)
        grads = torch.autograd.grad(out.sum() + weights.square().sum(), (x, *module.parameters()))
        found.append((out, weights, *grads))
    assert torch.equal(found[0][1] == 0.0, found[1][1] == 0.0)
    for eager, graph in zip(*found, strict=True):
        torch.testing.assert_close(graph, eager)


@pytest.mark.parametrize("mask", ["padding", "causal"])
def test_the_backward_computes_no_weights_again(mask: str) -> None:
    """It takes the rounded ones, and no mask, in graphs that are divided as Inductor divides them."""
    graphs: list[GraphModule] = []

    def collect(graph: GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=collect,
        bw_compiler=collect,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    module = MultiheadAttention(8, 2, batch_first=True, dtype=torch.bfloat16)
    x = torch.randn(3, 5, 8, dtype=torch.bfloat16)
    step_of(compiled(module, backend=backend), module, x.requires_grad_(), mask, True)
    computed, again = ([node.target for node in graph.graph.nodes] for graph in graphs)
    exp = torch.ops.aten.exp.default
    assert exp in computed and exp not in again
    assert torch.bool not in [
        node.meta["val"].dtype for node in graphs[1].graph.nodes if node.op == "placeholder"
    ]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("uses", USES)
def test_what_a_graph_calls(like_a_gpu: None, uses: str, average: bool, dropout: float) -> None:
    """The forward saves the weights that its backward needs, of all heads; weights that nobody uses are not
    in the graphs."""
    module = MultiheadAttention(8, 2, dropout, batch_first=True)
    forward, backward = operators(module, uses, average_attn_weights=average)
    if uses == "out":
        assert (forward, backward) == (["attention"], ["attention_backward"])
        return
    of_each_head = "attention_weights_signed" if dropout else "attention_weights"
    assert (forward, backward) == (["attention", of_each_head], [])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_many_weights_are_saved_in_float32_alone(
    monkeypatch: pytest.MonkeyPatch, like_a_gpu: None, dtype: torch.dtype, average: bool, dropout: float
) -> None:
    """The backward makes each head's weights in 16 bits anew, by one launch, unless they are what was
    returned.
    """
    monkeypatch.setattr(weights_in_graph, "_SAVED", 2 * 2 * 5 * 5 - 1)
    module = MultiheadAttention(8, 2, dropout, batch_first=True, dtype=dtype)
    forward, backward = operators(module, "both", dtype, average_attn_weights=average)
    signed = ["attention_weights_signed"] if dropout else ["attention_weights"]
    if dtype == torch.float32:
        assert (forward, backward) == (["attention", *signed], [])
    else:
        assert forward == ["attention", "attention_weights"]
        assert backward == (signed if dropout or average else [])


@given(calls(), scorings(), st.sampled_from([0.0, 0.4, 1.0]), st.booleans())
def test_signs_say_what_dropout_takes(call: Any, scoring: tuple[Any, ...], p: float, average: bool) -> None:
    """Both weights, before dropout and after it, are in the signed ones; the mask is the reference's."""
    (q, k, v), mask, sinks = call
    *scores, _ = scoring
    rng_state = ops.draw_rng_state(q.device) if p else None
    _, lse, low = FLASH4.attention.default(q, k, v, mask, sinks, rng_state, *scores, p, False)
    saved = q, k, lse, low if low.numel() else None, mask, sinks
    signed = weights_in_graph.each_head(*saved, rng_state, *scores, p)
    before = FLASH4.attention_weights.default(*saved, None, *scores, 0.0, False)
    torch.testing.assert_close(signed.abs(), before)
    if rng_state is not None:
        B, Sq, Hq, _ = q.shape
        kept = dropout.Dropout(rng_state, p).keep(range(B), Hq, range(Sq), range(k.shape[1]))
        assert torch.equal(signed > 0, kept & (before > 0))
    after = FLASH4.attention_weights.default(*saved, rng_state, *scores, p, average)
    torch.testing.assert_close(weights_in_graph.applied(signed, p, average), after)


def test_large_calls_and_softcap_keep_the_kernels(monkeypatch: pytest.MonkeyPatch, like_a_gpu: None) -> None:
    monkeypatch.setattr(weights_in_graph, "_IN_BACKWARD", 2 * 2 * 5 * 5 - 1)
    _, backward = operators(MultiheadAttention(8, 2, batch_first=True), "both")
    assert sorted(backward) == ["attention_backward", "attention_weights_backward"]


def mask_of(kind: str, S: int) -> dict[str, Any]:
    causal = torch.ones(S, S, dtype=torch.bool).triu(1)
    return {
        "none": {},
        "causal": {"attn_mask": causal, "is_causal": True},
        "padding": {"key_padding_mask": (torch.arange(S) >= S - 2).expand(3, S)},
        "float": {"attn_mask": torch.randn(S, S)},
        "bool": {"attn_mask": torch.rand(S, S) > 0.8},
    }[kind]


def step_of(attend: Any, module: nn.Module, x: Tensor, mask: str, average: bool) -> list[Tensor]:
    """Output, weights, and gradients of the input and of all parameters."""
    torch.manual_seed(3)
    options = mask_of(mask, x.shape[1])
    if mask == "float":
        options = {"attn_mask": options["attn_mask"].to(x.dtype)}
    out, weights = attend(x, x, x, average_attn_weights=average, **options)
    loss = (out * torch.randn(out.shape).to(x.dtype)).sum()
    loss = loss + (weights * torch.randn(weights.shape).to(x.dtype)).sum() * 4
    return [out, weights, *torch.autograd.grad(loss, [x, *module.parameters()])]


MASKS = ("none", "causal", "padding", "float", "bool")
STEPS = [(mask, average, like) for mask in MASKS for average in (True, False) for like in ("cpu", "gpu")]


@pytest.mark.parametrize(("mask", "average", "like"), one_of(3, STEPS))
def test_as_exact_as_stock(mask: str, average: bool, like: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled step in bfloat16 is at most twice as far from float64 as that of stock attention."""
    if like == "gpu":
        monkeypatch.setattr(weights_in_graph, "_ON_CPU", 0)
    exact_module = nn.MultiheadAttention(64, 4, batch_first=True, dtype=torch.float64)
    module = nn.MultiheadAttention(64, 4, batch_first=True, dtype=torch.bfloat16)
    exact_module.load_state_dict(module.state_dict())
    x = torch.randn(3, 24, 64, dtype=torch.bfloat16, requires_grad=True)
    exact = step_of(exact_module, exact_module, x.detach().double().requires_grad_(), mask, average)
    stock, ours = (
        step_of(compiled(who, backend="aot_eager"), who, x, mask, average)
        for who in (module, MultiheadAttention.from_torch(module))
    )
    for a, b, e in zip(ours, stock, exact, strict=True):
        assert (a - e).abs().max() <= 2 * (b - e).abs().max() + 1e-3 * e.abs().max()


def weighted(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return ops.attention_and_weights(q, k, v, None, None, None, CallOptions(0.3, softcap=2.0), True)


def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return ops.attention_and_weights(q, k, v, None, None, None, CallOptions(0.3), True)


def qkv(S: int = 5) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, S, 2, 8, requires_grad=True) for _ in "qkv")


def assert_equal_steps(graph: Any, function: Any, arguments: tuple[Tensor, ...]) -> None:
    found = (results_and_gradients(f, arguments) for f in (graph, function))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("function", [plain, weighted])
def test_lengths_recompile_nothing(function: Any, like_a_gpu: None) -> None:
    graph = compiled(function, backend="aot_eager")
    for S in (8, 9):
        results_and_gradients(graph, qkv(S))
    with torch.compiler.set_stance("fail_on_recompile"):
        for S in range(10, 20):
            assert_equal_steps(graph, function, qkv(S))


@pytest.mark.parametrize("trains, is_masked", [(True, False), (True, True), (False, True), (False, False)])
def test_few_scores_on_a_gpu(trains: bool, is_masked: bool) -> None:
    """They are computed with the output, if dropout's state is not that of a part of a call. Without
    gradients and a mask the kernels are faster."""
    most = weights_in_graph._ON_GPU if trains else weights_in_graph._MASKED_ON_GPU
    with FakeTensorMode() as mode, tracing(TracingContext(mode)):
        for scores, numbers in product((most, most + 1), (0, 2, 7)):
            q, k = (torch.empty(1, S, 1, 64, device="cuda") for S in (scores, 1))
            state = torch.empty(numbers, dtype=torch.int64, device="cuda") if numbers else None
            options = CallOptions(1.0, dropout_p=0.1 if numbers else 0.0)
            mask = torch.empty(1, device="cuda") if is_masked else None
            served = weights_in_graph.serves(q, k, mask, state, options, trains)
            assert served == (scores == most and numbers != 7 and (trains or is_masked))


def test_vmap_in_a_graph(like_a_gpu: None) -> None:
    """Its entries are one call of attention, as in eager mode."""
    forward, _ = operators(torch.vmap(MultiheadAttention(8, 2, batch_first=True)), "both")
    assert forward.count("attention") == 1
    mapped = torch.vmap(plain)
    arguments = tuple(torch.stack([x, x.cos()]).detach().requires_grad_() for x in qkv())
    assert_equal_steps(compiled(mapped, backend="aot_eager"), mapped, arguments)


def test_torch_func_in_a_graph() -> None:
    """Gradients that a graph takes by itself are those outside of it."""

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse, weights = plain(q, k, v)
        return out.square().sum() + lse.sum() + weights.square().sum()

    gradient = torch.func.grad(loss, argnums=(0, 1, 2))
    inputs = [x.detach() for x in qkv()]
    torch.testing.assert_close(compiled(gradient, backend="aot_eager")(*inputs), gradient(*inputs))


@pytest.mark.skipif(not EVERYTHING, reason="test_compile.py has a case of this law")
def test_the_second_process_compiles_nothing(like_a_gpu: None) -> None:
    seen = []
    with fresh_cache(), torch._functorch.config.patch(enable_autograd_cache=True):
        for _ in range(2):
            counters.clear()
            assert_equal_steps(compiled(plain), plain, qkv())
            seen.append({name: n for name, n in counters["aot_autograd"].items() if "cache" in name})
    assert seen == [{"autograd_cache_miss": 1, "autograd_cache_saved": 1}, {"autograd_cache_hit": 1}]


@pytest.mark.parametrize("strict", [True, False])
def test_exported_graphs_hold_the_operators(strict: bool, like_a_gpu: None) -> None:
    module = MultiheadAttention(8, 2, batch_first=True)
    exported = torch.export.export(module, (torch.randn(2, 5, 8),) * 3, strict=strict)
    targets = [str(node.target) for node in exported.graph.nodes]
    assert [x for x in targets if "flash4" in x] == [
        "flash4.attention.default",
        "flash4.attention_weights.default",
    ]


@pytest.mark.parametrize("requires_grad", [True, False])
def test_the_operator_of_both(requires_grad: bool) -> None:
    arguments = [x.detach().requires_grad_(requires_grad) for x in qkv()]
    op = torch.ops.flash4.attention_and_weights.default
    torch.library.opcheck(op, (*arguments, None, None, None, 0.3, None, 0, 0.0, 0.0, False, True))
