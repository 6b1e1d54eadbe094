"""torch.func: grad, vmap and their compositions equal loops; second and forward derivatives are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap

import flash4_torch
from flash4_torch import ops, testing
from flash4_torch.errors import DoubleBackwardError, ForwardModeError
from flash4_torch.problem import CallOptions

B, SQ, SK, HQ, HK, D = 2, 5, 7, 4, 2, 8
ENTRIES = 3

Function = Callable[..., Any]
InDims = tuple[int | None, ...]


def dense(**options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(B, S, H, D, **options) for S, H in ((SQ, HQ), (SK, HK), (SK, HK)))


def mapped(x: Tensor, dim: int | None) -> Tensor:
    """Entries of x's shape along a new dimension, or x itself."""
    return x if dim is None else torch.randn(ENTRIES, *x.shape).movedim(0, dim)


def loop(function: Function, in_dims: InDims, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The loop that vmap stands for."""
    results = [
        as_tuple(
            function(*(x if d is None else x.select(d, n) for x, d in zip(arguments, in_dims, strict=True)))
        )
        for n in range(ENTRIES)
    ]
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True))


def as_tuple(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def gradients(function: Function, argnums: tuple[int, ...]) -> Function:
    """Gradients of a functional of all results."""
    return grad(lambda *xs: sum(y.sin().sum() for y in as_tuple(function(*xs))), argnums)


def assert_maps(function: Function, in_dims: InDims, arguments: tuple[Tensor, ...]) -> None:
    """vmap equals the loop, for the function and for its gradients."""
    argnums = tuple(n for n, x in enumerate(arguments) if x.is_floating_point())
    for f in (function, gradients(function, argnums)):
        actual = as_tuple(vmap(f, in_dims)(*arguments))
        torch.testing.assert_close(actual, loop(f, in_dims, arguments))


@st.composite
def in_dims(draw: st.DrawFn, *ranks: int) -> InDims:
    """The mapped dimension of each argument or None; at least one argument is mapped."""
    dims = tuple(draw(st.one_of(st.none(), st.integers(0, rank))) for rank in ranks)
    return dims if any(d is not None for d in dims) else (0, *dims[1:])


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return flash4_torch.attention(q, k, v, causal=True, softcap=2.0, return_lse=True)


def with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return flash4_torch.attention(q, k, v, attn_mask=mask, return_lse=True)


def varlen(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([0, 3, 7])
    return flash4_torch.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=lengths,
        cu_seqlens_k=lengths,
        max_seqlen_q=4,
        max_seqlen_k=4,
        return_lse=True,
    )


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash4_torch.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def weights(q: Tensor, k: Tensor) -> Tensor:
    options = CallOptions(scale=0.3, window_right=0)
    return ops.attention_and_weights(q, k, k, None, None, None, options, True)[2]


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash4_torch.attention(q, k, v, dropout_p=0.5)


@given(in_dims(4, 4, 4))
@settings(max_examples=40)
def test_vmap(dims: InDims) -> None:
    arguments = tuple(mapped(x, d) for x, d in zip(dense(), dims, strict=True))
    assert_maps(attention, dims, arguments)


@given(in_dims(4, 4, 4, 4), st.sampled_from([(B, HQ, SQ, SK), (1, HQ, 1, SK), (1, 1, SQ, SK)]), st.booleans())
@settings(max_examples=40)
def test_vmap_with_mask(dims: InDims, shape: tuple[int, ...], as_bool: bool) -> None:
    arguments = (*dense(), torch.randn(shape))
    arguments = tuple(mapped(x, d) for x, d in zip(arguments, dims, strict=True))
    if as_bool:
        arguments = (*arguments[:3], arguments[3] > -0.5)
    assert_maps(with_mask, dims, arguments)


@given(in_dims(3, 3, 3))
@settings(max_examples=20)
def test_vmap_of_varlen(dims: InDims) -> None:
    arguments = (torch.randn(7, HQ, D), torch.randn(7, HK, D), torch.randn(7, HK, D))
    assert_maps(varlen, dims, tuple(mapped(x, d) for x, d in zip(arguments, dims, strict=True)))


@given(in_dims(4, 4, 4))
@settings(max_examples=20)
def test_vmap_of_sdpa(dims: InDims) -> None:
    arguments = (x.transpose(1, 2) for x in dense())
    assert_maps(sdpa, dims, tuple(mapped(x, d) for x, d in zip(arguments, dims, strict=True)))


@given(in_dims(4, 4))
@settings(max_examples=20)
def test_vmap_of_weights(dims: InDims) -> None:
    assert_maps(weights, dims, tuple(mapped(x, d) for x, d in zip(dense()[:2], dims, strict=True)))


def test_vmap_of_vmap() -> None:
    arguments = tuple(mapped(mapped(x, 0), 0) for x in dense())
    expected = loop(lambda *xs: loop(attention, (0, 0, 0), xs), (0, 0, 0), arguments)
    torch.testing.assert_close(vmap(vmap(attention))(*arguments), expected)


def test_vmap_over_nothing() -> None:
    q, k, v = dense()
    out, lse = vmap(attention, (0, None, None))(q.new_empty(0, *q.shape), k, v)
    assert out.shape == (0, B, SQ, HQ, D) and lse.shape == (0, B, HQ, SQ)


def test_vmap_of_every_input_is_one_call() -> None:
    """The mapped dimension joins the batch: no loop."""
    arguments = tuple(mapped(x, 0) for x in dense())
    with testing.backends_used() as used:
        vmap(gradients(attention, (0, 1, 2)))(*arguments)
    assert sorted((operator, n) for (operator, _), n in used.items()) == [
        ("attention", 1),
        ("attention_backward", 1),
    ]


def test_vmap_asks_how_to_draw_dropout() -> None:
    arguments = tuple(mapped(x, 0) for x in dense())
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(dropped)(*arguments)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None)])
def test_vmap_with_the_same_dropout(in_dims: InDims) -> None:
    """Every entry sees the dropout mask that a single call would generate."""
    arguments = tuple(mapped(x, d) for x, d in zip(dense(), in_dims, strict=True))

    def reseeded(*xs: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        return as_tuple(gradients(dropped, (0, 1, 2))(*xs))

    torch.manual_seed(3)
    actual = vmap(gradients(dropped, (0, 1, 2)), in_dims, randomness="same")(*arguments)
    torch.testing.assert_close(actual, loop(reseeded, in_dims, arguments))


def test_vmap_with_different_dropout() -> None:
    """Entries drop different weights, at the right rate, and the backward drops what the forward dropped."""
    S = 32
    q, k = (torch.randn(1, S, 1, D).expand(ENTRIES, -1, -1, -1, -1) for _ in "qk")
    v = torch.eye(S)[None, :, None].expand(ENTRIES, -1, -1, -1, -1)

    def summed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = dropped(q, k, v)
        return out.sum(), out

    dv, out = vmap(grad(summed, 2, has_aux=True), randomness="different")(q, k, v)
    weights = out[:, 0, :, 0]  # v is the identity
    kept = weights != 0
    assert len({tuple(entry.flatten().tolist()) for entry in kept}) == ENTRIES
    assert abs(kept.double().mean() - 0.5) < 4 * 0.5 / kept.numel() ** 0.5
    torch.testing.assert_close(dv[:, 0, :, 0], weights.sum(1)[:, :, None].expand(ENTRIES, S, S))


def test_grad_equals_autograd() -> None:
    arguments = dense()
    leaves = [x.clone().requires_grad_() for x in arguments]
    loss = sum(y.sin().sum() for y in attention(*leaves))
    torch.testing.assert_close(gradients(attention, (0, 1, 2))(*arguments), torch.autograd.grad(loss, leaves))


def test_vmap_in_a_compiled_graph() -> None:
    torch._dynamo.reset()
    arguments = tuple(mapped(x, 0) for x in dense())
    graph = torch.compile(vmap(attention), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(graph(*arguments), loop(attention, (0, 0, 0), arguments))


def test_jacrev() -> None:
    q, k, v = (torch.randn(1, S, H, 2, dtype=torch.float64) for S, H in ((2, 2), (3, 1), (3, 1)))
    mine = jacrev(lambda *xs: flash4_torch.attention(*xs, return_lse=True), (0, 1, 2))(q, k, v)
    exact = jacrev(lambda *xs: testing.reference(*xs), (0, 1, 2))(q, k, v)
    torch.testing.assert_close(mine, exact)


def test_gradients_per_sample_of_a_module() -> None:
    module = flash4_torch.MultiheadAttention(8, 2, batch_first=True)
    parameters = dict(module.named_parameters())
    samples = torch.randn(ENTRIES, SQ, 8)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(module, parameters, (x, x, x), {"need_weights": False})[0].sin().sum()

    actual = vmap(grad(loss), (None, 0))(parameters, samples)
    each = [grad(loss)(parameters, x) for x in samples]
    for name in parameters:
        torch.testing.assert_close(actual[name], torch.stack([gradient[name] for gradient in each]))


CALLS: dict[str, tuple[Function, Callable[[], tuple[Tensor, ...]]]] = {
    "attention": (attention, dense),
    "lse alone": (lambda *xs: attention(*xs)[1], dense),
    "varlen": (varlen, lambda: (torch.randn(7, HQ, D), torch.randn(7, HK, D), torch.randn(7, HK, D))),
    "sdpa": (sdpa, lambda: tuple(x.transpose(1, 2) for x in dense())),
    "weights": (weights, lambda: dense()[:2]),
}
calls = pytest.mark.parametrize("call", CALLS)


@calls
def test_second_derivatives_are_refused(call: str) -> None:
    function, draw = CALLS[call]
    arguments = draw()
    leaves = [x.requires_grad_() for x in arguments]
    loss = sum(y.sin().sum() for y in as_tuple(function(*leaves)))
    (dq,) = torch.autograd.grad(loss, leaves[0], create_graph=True)
    with pytest.raises(DoubleBackwardError):
        dq.sum().backward()


@calls
def test_second_derivatives_are_refused_in_torch_func(call: str) -> None:
    function, draw = CALLS[call]
    arguments = draw()
    with pytest.raises(DoubleBackwardError):
        grad(lambda *xs: gradients(function, (0,))(*xs)[0].sum())(*arguments)


def test_gradients_are_not_differentiable_by_what_arrives_at_them() -> None:
    q, k, v = dense()
    dout = torch.randn(B, SQ, HQ, D, requires_grad=True)
    out = flash4_torch.attention(q, k, v.requires_grad_())
    (dv,) = torch.autograd.grad(out, v, dout, create_graph=True)
    with pytest.raises(DoubleBackwardError):
        dv.sum().backward()


# Forward mode's first use loads decompositions that are written in TorchScript.
loads_torchscript = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


@calls
@loads_torchscript
def test_forward_mode_is_refused(call: str) -> None:
    """The call is refused rather than answered with a tangent of zeros."""
    function, draw = CALLS[call]
    arguments = draw()
    with pytest.raises(ForwardModeError, match="no forward-mode derivative"):
        jvp(function, arguments, arguments)
    with pytest.raises(ForwardModeError):
        jacfwd(function)(*arguments)
    with forward_ad.dual_level(), pytest.raises(ForwardModeError):
        function(forward_ad.make_dual(arguments[0], torch.ones_like(arguments[0])), *arguments[1:])


@loads_torchscript
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_forward_mode_is_refused_in_a_compiled_graph(fullgraph: bool) -> None:
    torch._dynamo.reset()
    q, k, v = dense()
    graph = torch.compile(
        lambda q: jvp(lambda q: attention(q, k, v)[0], (q,), (q,)), backend="aot_eager", fullgraph=fullgraph
    )
    with pytest.raises((NotImplementedError, torch._dynamo.exc.Unsupported)):
        graph(q)


@loads_torchscript
def test_forward_mode_past_attention() -> None:
    """A tangent that does not go through attention is not refused."""
    q, k, v = dense()
    shift = nn.Parameter(torch.zeros(()))
    _, tangent = jvp(lambda x: flash4_torch.attention(q, k, v).sum() + x, (shift,), (torch.ones(()),))
    assert tangent == 1.0
