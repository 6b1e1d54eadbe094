"""torch.compile(fullgraph=True): eager's results, no recompilation, and one dropout for both directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import flash4_torch
from compiling import assert_same, compiled, results_and_gradients
from everything import one_of
from flash4_torch import ops, testing
from flash4_torch.errors import ShapeError
from flash4_torch.problem import CallOptions

# torch 2.11's inductor imports a module that uses TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

B, SQ, SK, HQ, HK, D = 2, 5, 7, 4, 2, 8


def dense(Sq: int = SQ, Sk: int = SK, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(B, S, H, D, **options) for S, H in ((Sq, HQ), (Sk, HK), (Sk, HK)))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def heads_first(Sq: int = SQ, Sk: int = SK) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in dense(Sq, Sk))
    return q, k, v


def float_mask(Sq: int = SQ, Sk: int = SK) -> Tensor:
    return torch.randn(HQ, Sq, Sk, requires_grad=True)


def packed(longest: int = 5) -> tuple[Tensor, ...]:
    """Three sequences, one of them empty, and their cumulative lengths."""
    lengths = torch.tensor([0, 4, 4, 4 + longest], dtype=torch.int32)
    q, k, v = (torch.randn(4 + longest, H, D, requires_grad=True) for H in (HQ, HK, HK))
    return q, k, v, lengths


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash4_torch.attention(q, k, v, causal=True)


def every_rule(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return flash4_torch.attention(q, k, v, window=(3, 1), softcap=2.0, scale=0.3, return_lse=True)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return flash4_torch.attention(q, k, v, attn_mask=mask, return_lse=True)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, longest: int | Tensor | None = 5
) -> tuple[Tensor, Tensor]:
    return flash4_torch.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=lengths,
        cu_seqlens_k=lengths,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=True,
        return_lse=True,
    )


def sdpa_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash4_torch.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def sdpa_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return flash4_torch.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    options = CallOptions(scale=0.3, window_right=0)
    return ops.attention_and_weights(q, k, v, mask[None], None, None, options, True)


Call = tuple[Callable[..., Any], Callable[..., tuple[Any, ...]]]

CALLS: dict[str, Call] = {
    "causal": (causal, dense),
    "every rule, lse": (every_rule, dense),
    "float mask": (masked, lambda: (*dense(), float_mask())),
    "bool mask": (masked, lambda: (*dense(), torch.rand(B, 1, SQ, SK) > 0.3)),
    "varlen": (varlen, packed),
    "sdpa, causal": (sdpa_causal, heads_first),
    "sdpa, mask": (sdpa_masked, lambda: (*heads_first(), float_mask())),
    "weights": (weights, lambda: (*dense(), float_mask())),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("call", CALLS)
def test_equals_eager(call: str, backend: str) -> None:
    function, draw = CALLS[call]
    arguments = draw()
    actual = results_and_gradients(compiled(function, backend=backend), arguments)
    expected = results_and_gradients(function, arguments)
    if call != "weights":
        return assert_same_but_small(actual, expected, backend)
    # Written in torch's own operators there.
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y)


def assert_same_but_small(actual: list[Tensor], expected: list[Tensor], backend: str) -> None:
    """Bitwise equal, but by Inductor, which writes small calls in torch's own operators; strides included."""
    if backend != "inductor":
        return assert_same(actual, expected)
    torch.testing.assert_close(actual, expected, check_stride=True)


def of_gaps(joint: Tensor, twice: Tensor, one: Tensor) -> tuple[Tensor, ...]:
    """Attention to rows with gaps: joint of three, every second column, and a column that repeats."""
    second, repeated = twice[..., ::2], one.expand(*one.shape[:3], 8)
    mask = torch.ones(twice.shape[1], twice.shape[1], dtype=torch.bool)
    return (
        flash4_torch.attention(*joint.unbind(-1), causal=True),
        flash4_torch.attention(second, second, second, attn_mask=mask),
        flash4_torch.attention(repeated * 2.0, repeated, repeated),
    )


@pytest.mark.parametrize("dynamic", one_of(2, [False, True]))
def test_rows_may_have_gaps(dynamic: bool) -> None:
    """Torch's kernel reads rows without gaps, and Inductor keeps the order of strides alone."""
    shapes = (2, 5, 4, 8, 3), (2, 5, 4, 16), (2, 5, 4, 1)
    arguments = tuple(torch.randn(shape, requires_grad=True) for shape in shapes)
    with fresh_cache():  # one on disk does not know of our decompositions
        actual = results_and_gradients(compiled(of_gaps, backend="inductor", dynamic=dynamic), arguments)
    torch.testing.assert_close(actual, results_and_gradients(of_gaps, arguments))


@pytest.mark.parametrize("call", ["every rule, lse", "float mask", "varlen", "sdpa, causal"])
def test_equals_eager_with_dynamic_shapes_from_the_start(call: str) -> None:
    function, draw = CALLS[call]
    arguments = draw()
    actual = results_and_gradients(compiled(function, backend="aot_eager", dynamic=True), arguments)
    assert_same(actual, results_and_gradients(function, arguments))


def test_a_longest_length_that_only_the_graph_knows() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return varlen(q, k, v, lengths, lengths.diff().max())

    arguments = packed()
    actual = results_and_gradients(compiled(function, backend="aot_eager"), arguments)
    assert_same(actual, results_and_gradients(function, arguments))


GROWING: dict[str, Call] = {
    "causal": (causal, lambda n: dense(n, n + 1)),
    "float mask": (masked, lambda n: (*dense(n, n + 1), float_mask(n, n + 1))),
    "varlen": (varlen, lambda n: (*packed(n), n)),
    "varlen, longest left out": (lambda *inputs: varlen(*inputs, None), packed),
    "sdpa, causal": (sdpa_causal, lambda n: heads_first(n, n + 1)),
    "window": (
        lambda q, k, v, n: flash4_torch.attention(q, k, v, window=(n, 2 * n)),
        lambda n: (*dense(), n),
    ),
    "window before the diagonal": (
        lambda q, k, v, n: flash4_torch.attention(q, k, v, window=(2 * n, -n // 4)),
        lambda n: (*dense(), n),
    ),
}


@pytest.mark.parametrize(
    ("call", "backend"),
    [*((call, "aot_eager") for call in GROWING), ("float mask", "inductor"), ("varlen", "inductor")],
)
def test_twenty_lengths_after_the_dynamic_one_recompile_nothing(call: str, backend: str) -> None:
    function, draw = GROWING[call]
    graph = compiled(function, backend=backend)
    for n in (8, 9):
        results_and_gradients(graph, draw(n))
    with torch.compiler.set_stance("fail_on_recompile"):
        for n in range(10, 30):
            arguments = draw(n)
            expected = results_and_gradients(function, arguments)
            assert_same_but_small(results_and_gradients(graph, arguments), expected, backend)


def slopes(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None) -> Tensor:
    return flash4_torch.flash_attn.flash_attn_func(q, k, v, alibi_slopes=alibi_slopes)


def at_positions(q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None) -> Tensor:
    """The cache after keys were rotated by cos and sin of their positions."""
    B, S, H, D = k.shape
    caches = k.new_zeros(B, S, H, D), v.new_zeros(B, S, H, D)
    angles = torch.arange(20.0)[:, None] * torch.arange(1.0, D // 2 + 1)
    cos, sin = angles.cos(), angles.sin()
    rotated = {} if positions is None else {"positions": positions, "cos": cos, "sin": sin}
    flash4_torch.append_kvcache(
        k.detach(), v.detach(), *caches, seqused_k=torch.zeros(B, dtype=torch.int32), **rotated
    )
    return q * caches[0].sum()


def of_float8(q: Tensor, k: Tensor, v: Tensor, scale: Tensor | None) -> Tensor:
    caches = k.detach().to(torch.float8_e4m3fn), v.detach().to(torch.float8_e4m3fn)
    out: Tensor = flash4_torch.attention_kvcache(q.detach(), *caches, k_scale=scale)
    return out


JOINING: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "mask": (
        lambda q, k, v, mask: flash4_torch.attention(q, k, v, attn_mask=mask),
        lambda B, S: torch.rand(B, 1, S, S) > 0.3,
    ),
    "mask beside SDPA": (
        lambda q, k, v, mask: flash4_torch.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, enable_gqa=True
        ),
        lambda B, S: torch.rand(B, 1, S, S) > 0.3,
    ),
    "slopes": (slopes, lambda B, S: torch.rand(B, HQ)),
    "positions": (at_positions, lambda B, S: torch.arange(B * S).remainder(20).view(B, S)),
    "scale": (of_float8, lambda B, S: torch.rand(B, HK)),
}


@pytest.mark.parametrize("kind", JOINING)
def test_tensors_join_a_graph_of_unknown_sizes(kind: str) -> None:
    """Their own sizes are known in the first call that has them, and must equal those that are not."""
    function, draw = JOINING[kind]
    graph = compiled(function, backend="aot_eager")
    for B, S, joins in ((2, 5, False), (3, 6, False), (4, 7, True), (5, 8, True)):
        q, k, v = (torch.randn(B, S, H, D, requires_grad=True) for H in (HQ, HK, HK))
        arguments = (q, k, v, draw(B, S) if joins else None)
        torch.testing.assert_close(graph(*arguments), function(*arguments))


def test_a_scale_that_changes() -> None:
    """Dynamo hands the function a symbol for the scale after its second value."""

    def function(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float) -> Tensor:
        return flash4_torch.attention(q, k, v, scale=scale, softcap=softcap)

    graph = compiled(function, backend="aot_eager")
    for n in range(3):
        arguments = (*dense(), 0.2 + n, 1.0 + n)
        assert_same(results_and_gradients(graph, arguments), results_and_gradients(function, arguments))


def test_bad_arguments_are_named() -> None:
    """Dynamo leaves a call that raises to eager; told not to (fullgraph), it names the error."""
    q, k, _ = dense()
    v = dense(Sk=3)[2]
    torch._dynamo.reset()
    with pytest.raises(ShapeError, match="v is"):
        torch.compile(causal, backend="aot_eager")(q, k, v)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="raised exception ShapeError"):
        compiled(causal, backend="aot_eager")(q, k, v)


def test_second_derivatives_are_refused() -> None:
    q, k, v = dense()
    out = compiled(causal, backend="aot_eager")(q, k, v)
    (dq,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        dq.sum().backward()


def test_autograd_cache_serves_the_second_process() -> None:
    """Its counters show a miss that is saved, then, with dynamo's memory wiped, a hit."""
    seen = []
    with fresh_cache(), torch._functorch.config.patch(enable_autograd_cache=True):
        for _ in range(2):
            counters.clear()
            results_and_gradients(compiled(every_rule), dense())
            seen.append({name: n for name, n in counters["aot_autograd"].items() if "cache" in name})
    assert seen == [{"autograd_cache_miss": 1, "autograd_cache_saved": 1}, {"autograd_cache_hit": 1}]


P = 0.4


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash4_torch.attention(q, k, v, dropout_p=P)


def seeded(function: Callable[..., Any], seed: int, arguments: tuple[Any, ...]) -> list[Tensor]:
    torch.manual_seed(seed)
    return results_and_gradients(function, arguments)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dropout(backend: str) -> None:
    """The result is the weights, as v is the identity, so it shows which ones were dropped."""
    S = 48
    q, k = (torch.randn(B, S, HQ, D, dtype=torch.float64, requires_grad=True) for _ in "qk")
    v = torch.eye(S, dtype=torch.float64)[None, :, None].repeat(B, 1, HQ, 1).requires_grad_()
    graph = compiled(dropped, backend=backend)

    first, again, other = (seeded(graph, seed, (q, k, v)) for seed in (1, 1, 2))
    assert_same(again, first)
    assert not torch.equal(graph(q, k, v), graph(q, k, v)), "each call draws anew"

    kept = first[0] != 0
    assert not torch.equal(kept, other[0] != 0)
    deviation = (P * (1 - P) / kept.numel()) ** 0.5
    assert abs(kept.double().mean() - (1 - P)) < 4 * deviation
    # Forward and backward agree with plain torch under the mask that the forward showed.
    assert_close_to_replay(first, q, k, v, kept)


def assert_close_to_replay(actual: list[Tensor], q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> None:
    def replay(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(torch.einsum("bihd,bjhd->bihj", q, k) / D**0.5, -1)
        return torch.einsum("bihj,bjhd->bihd", weights * kept / (1 - P), v)

    for a, e in zip(actual, results_and_gradients(replay, (q, k, v)), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dropout_draws_what_eager_draws(backend: str) -> None:
    arguments = dense()
    found = seeded(compiled(dropped, backend=backend), 3, arguments), seeded(dropped, 3, arguments)
    assert_same_but_small(*found, backend)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dropout_is_the_one_that_testing_replays(backend: str) -> None:
    q, k, v = (x.detach() for x in dense())
    torch.manual_seed(5)
    rng_state = testing.peek_rng_state()
    actual = compiled(dropped, backend=backend)(q, k, v)
    expected, _ = testing.reference(q, k, v, dropout_p=P, rng_state=rng_state)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_operators_stay_whole_where_ci_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor asks the environment whether an operator may have a decomposition that it does not take."""
    monkeypatch.setenv("CI", "true")
    q = torch.randn(1, 37, 2, 8)
    with fresh_cache():
        out = compiled(lambda x: flash4_torch.attention(x, x, x, softcap=3.0))(q)
    torch.testing.assert_close(out, flash4_torch.attention(q, q, q, softcap=3.0))
