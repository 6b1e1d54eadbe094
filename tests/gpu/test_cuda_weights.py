"""Attention weights, sinks and torch's efficient kernel on a GPU, against the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash4_torch
from everything import examples
from flash4_torch import ops, testing
from flash4_torch.masks import Band
from flash4_torch.problem import CallOptions
from flash4_torch.reference.attention import attention, attention_weights
from flash4_torch.reference.dropout import Dropout, keep_each
from flash4_torch.reference.scoring import Scoring

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

FORMS: list[dict[str, Any]] = [
    {"D": 64},
    {"D": 64, "dtype": torch.float16, "band": Band(None, 0)},
    {"D": 128, "band": Band(70, 20), "sinks": torch.float32},
    {"D": 256, "band": Band(None, 0)},
    {"D": 40, "softcap": 20.0},
    {"D": 64, "mask": "bool"},
    {"D": 64, "mask": "padding", "sinks": torch.bfloat16},
    {"D": 96, "mask": "float"},
    {"D": 64, "mask": "large"},
    {"D": 64, "dropout_p": 0.3},
    {"D": 128, "dtype": torch.float16, "dropout_p": 0.1, "mask": "padding", "band": Band(None, 0)},
    {"D": 64, "dtype": torch.float32},
    {"D": 40, "dtype": torch.float32, "softcap": 20.0, "band": Band(None, 0)},
    {"D": 128, "dtype": torch.float32, "mask": "padding", "sinks": torch.float32},
    {"D": 64, "dtype": torch.float32, "mask": "float", "dropout_p": 0.1},
]


def a_mask(kind: str, B: int, Hq: int, Sq: int, Sk: int) -> Tensor | None:
    if kind == "bool":
        return torch.rand(B, 1, Sq, Sk, device="cuda") < 0.7
    if kind == "padding":
        return torch.arange(Sk, device="cuda") < torch.randint(1, Sk + 1, (B, 1, 1, 1), device="cuda")
    if kind == "float":
        return torch.randn(1, Hq, Sq, Sk, device="cuda")
    if kind == "large":
        return torch.where(torch.rand(B, 1, 1, Sk, device="cuda") < 0.5, 0.0, -1e9)
    return None


@pytest.mark.parametrize("form", FORMS, ids=str)
@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 300), st.integers(1, 600), st.sampled_from([1, 3])),
    group=st.sampled_from([1, 2]),
    average=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(4, 20), deadline=None, suppress_health_check=list(HealthCheck))
def test_weights_and_gradients(
    form: dict[str, Any], sizes: tuple[int, int, int, int], group: int, average: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    B, Sq, Sk, Hk = sizes
    Hq, D, dtype, p = Hk * group, form["D"], form.get("dtype", torch.bfloat16), form.get("dropout_p", 0.0)
    q, k, v = (
        torch.randn(B, S, H, D, device="cuda").to(dtype).requires_grad_()
        for S, H in ((Sq, Hq), (Sk, Hk), (Sk, Hk))
    )
    mask = a_mask(form.get("mask", ""), B, Hq, Sq, Sk)
    sinks = None
    if "sinks" in form:
        sinks = torch.randn(Hq, device="cuda").to(form["sinks"]).requires_grad_()
    rng_state = ops.draw_rng_state(q.device) if p else None
    options = CallOptions(D**-0.5, *form.get("band", Band()), form.get("softcap", 0.0), p)
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    with testing.backends_used() as used, testing.poisoned_memory():
        out, _, weights = ops.attention_and_weights(q, k, v, mask, sinks, rng_state, options, average)
        cotangents = torch.randn_like(out), torch.randn_like(weights)
        grads = torch.autograd.grad((out, weights), inputs, cotangents)
    ours = {"sm80"} if dtype == torch.float32 else {"sm90", "sm100", "sm80"}
    # Softcap's gradient of weights is plain torch's.
    assert {name for _, name in used} <= ours | ({"tiled"} if options.softcap else set())

    def by_definition(dtype: torch.dtype) -> tuple[Tensor, ...]:
        own = [x.detach().to(dtype).requires_grad_() for x in inputs]
        own_mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
        dropout = Dropout(rng_state, p) if rng_state is not None else None
        scoring = Scoring(options.scale, options.band, options.softcap, own_mask, dropout)
        own_sinks = own[3] if sinks is not None else None
        result, _ = attention(*own[:3], scoring, own_sinks)
        of_keys = attention_weights(*own[:2], scoring, own_sinks)
        of_keys = of_keys.mean(1) if average else of_keys
        total = (result * cotangents[0].to(dtype)).sum() + (of_keys * cotangents[1].to(dtype)).sum()
        return result, of_keys, *torch.autograd.grad(total, own)

    exact, peer = by_definition(torch.float64), by_definition(dtype)
    names = ("out", "weights", "dq", "dk", "dv", "dsinks")
    # The rounding error of out as stored enters the gradient of every score of its row.
    eps, largest = torch.finfo(dtype).eps, max(x.abs().max().item() for x in (q, k))
    of_row = eps / 2 * (cotangents[0] * out).detach().abs().sum(-1).max().item()
    of_scores = of_row * max(options.scale * largest, 1.0) * Sq**0.5
    for name, ours, truth, plain in zip(names, (out, weights, *grads), exact, peer, strict=False):
        # Gradients are sums of rounded products; the peer's are rounded at other places.
        noise = 0.0
        if name not in ("out", "weights"):
            noise = 4 * eps * truth.abs().max().item() + (0.0 if name == "dv" else of_scores)
        testing.assert_close_as_peer(ours.to(plain.dtype), truth, plain, what=name, noise=noise)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("mask", ["float16", "bool", ""])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_calls_repeat_their_bits(D: int, mask: str, dropout_p: float) -> None:
    """Loads of a mask by other warps hold up those from shared memory, which TMA must not overwrite: with a
    floating mask some hundred rows of each call were wrong.
    """
    B, S, H = 1, 4096, 16
    q, k, v = (torch.randn(B, S, H, D, device="cuda").half() for _ in range(3))
    numbers = torch.randn(1, 1, S, S, device="cuda")
    attn_mask = {"float16": numbers.half(), "bool": numbers > -1.0}.get(mask)
    options = CallOptions(D**-0.5, dropout_p=dropout_p)
    rng_state = ops.draw_rng_state(q.device) if dropout_p else None
    found = [
        ops.attention_and_weights(q, k, v, attn_mask, None, rng_state, options, True)[2] for _ in range(8)
    ]
    assert all(torch.equal(found[0], weights) for weights in found[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 200), st.integers(1, 200), st.sampled_from([1, 3])),
    D=st.sampled_from([8, 64, 320]),
    group=st.sampled_from([1, 2]),
    mask=st.sampled_from(["", "bool", "padding"]),
    top_left=st.booleans(),
    with_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(15, 80), deadline=None, suppress_health_check=list(HealthCheck))
def test_the_efficient_kernel(
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    D: int,
    group: int,
    mask: str,
    top_left: bool,
    with_sinks: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    B, Sq, Sk, Hk = sizes
    q, k, v = (
        torch.randn(B, S, H, D, device="cuda").to(dtype).requires_grad_()
        for S, H in ((Sq, Hk * group), (Sk, Hk), (Sk, Hk))
    )
    sinks = torch.randn(Hk * group, device="cuda").requires_grad_() if with_sinks else None
    kwargs: dict[str, Any] = {"attn_mask": a_mask(mask, B, Hk * group, Sq, Sk), "sinks": sinks}
    if top_left:
        kwargs["window"] = (None, Sq - Sk)
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASH4_BACKEND", "efficient")
        out, lse = flash4_torch.attention(q, k, v, **kwargs, return_lse=True)
        dout = torch.randn_like(out)
        grads = torch.autograd.grad(out, inputs, dout)

    def by_definition(dtype: torch.dtype) -> tuple[Tensor, ...]:
        result, of_rows = testing.reference(q, k, v, **kwargs, dtype=dtype)
        return result, of_rows, *torch.autograd.grad(result, inputs, dout.to(dtype))

    exact, peer = by_definition(torch.float64), by_definition(dtype)
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    for name, ours, truth, plain in zip(names, (out, lse, *grads), exact, peer, strict=False):
        noise = 0.0 if name in ("out", "lse") else 4 * torch.finfo(dtype).eps * truth.abs().max().item()
        testing.assert_close_as_peer(ours.to(plain.dtype), truth.double(), plain, what=name, noise=noise)


def test_a_graph_computes_the_dropout_of_the_kernels() -> None:
    """torch's compiler may multiply what it takes for an index in 32 bits."""
    B, Hq, Sq, Sk = 2, 3, 21, 133
    rng_state = ops.draw_rng_state(torch.device("cuda"))
    kept = torch.compile(keep_each)(rng_state, 0.1, B, Hq, Sq, Sk)
    assert torch.equal(kept, Dropout(rng_state, 0.1).keep(range(B), Hq, range(Sq), range(Sk)))
