"""Our kernels on a GPU that they serve compute the gradients of any call, rightly and completely.

Sizes and layouts are generated as for the forward.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash4_torch
from flash4_torch import testing
from flash4_torch.masks import Band
from flash4_torch.reference.attention import attention as by_definition
from flash4_torch.reference.dropout import Dropout
from flash4_torch.reference.scoring import Scoring
from own_gpu import OURS, lacks_gradients, needs_ours
from test_cuda_compiled_laws import (
    FORMS,
    FP16,
    PACKED_FORMS,
    Call,
    Form,
    calls,
    ends_of,
    laid_out,
    sequences,
)
from test_fast_path import LongWay

pytestmark = needs_ours

NAMES = ("dq", "dk", "dv", "dmask")
FP32 = torch.float32
WIDE = (
    Form(320, 320),
    Form(320, 320, FP16, causal=True, dropout_p=0.1),
    Form(264, 72, mask="bool"),
    Form(384, 384, window=(100, 30), softcap=1.5),
    Form(512, 512, FP16),
    Form(512, 512, causal=True, mask="half", dropout_p=0.3),
    Form(300, 512, scale=-0.7, mask="float32"),
    Form(192, 192, FP32, causal=True),
    Form(192, 136, FP32, mask="float32", dropout_p=0.1),
    Form(256, 256, FP32, window=(130, 20)),
    Form(200, 256, FP32, mask="bool", softcap=1.5),
    Form(128, 128, FP32, mask="float32"),
    Form(128, 128, FP32, causal=True, mask="bool"),
)
"""What kernels by mma.sync alone serve."""
DOUTS = ("contiguous", "heads first", "among NaN", "of a sum", "strided last")


def is_full(mask: Tensor, q: Tensor, k: Tensor) -> bool:
    B, Sq, Hq, _ = q.shape
    return mask.shape == (B, Hq, Sq, k.shape[1])


def gradient_of_out(out: Tensor, layout: str) -> Tensor:
    if layout == "of a sum":
        return torch.full((), 0.5, dtype=out.dtype, device="cuda").expand(out.shape)
    return laid_out(*out.shape, out.dtype, layout)


def assert_as_good_as_torch(
    actual: tuple[Tensor, ...],
    exact: tuple[Tensor, ...],
    peer: tuple[Tensor, ...],
    noise: dict[str, float] | None = None,
) -> None:
    for name, a, e, p in zip(NAMES, actual, exact, peer, strict=False):
        testing.assert_close_as_peer(a, e.double(), p, what=name, noise=(noise or {}).get(name, 0.0))


def noise_of_stored(out: Tensor, dout: Tensor, q: Tensor, k: Tensor, scale: float | None) -> dict[str, float]:
    """The rounding error of out as stored, which enters the gradient of every score of its row.

    It shows where that gradient is next to nothing, as for rows that see one key.
    """
    if not (q.numel() and k.numel()):
        return {}
    products, eps = out.detach().double() * dout.double(), torch.finfo(out.dtype).eps
    of_row = eps / 2 * products.abs().sum(-1).max().item() * abs(scale or q.shape[-1] ** -0.5)
    largest = {"dq": k, "dk": q}
    noise = {name: of_row * x.detach().abs().max().item() for name, x in largest.items()}
    # A key takes part in as many rows as see it.
    noise["dk"] *= q.shape[1] ** 0.5
    return {**noise, "dmask": eps * products.norm().item()}


def loss(results: tuple[Tensor, Tensor], dout: Tensor, dlse: Tensor | None) -> Tensor:
    out, lse = results
    total = (out.double() * dout.double()).sum()
    if dlse is not None:
        total = total + (torch.where(lse.isinf(), 0.0, lse).double() * dlse).sum()
    return total


@pytest.mark.parametrize("form", FORMS, ids=str)
@given(data=st.data())
@settings(max_examples=15)
def test_gradients(form: Form, data: st.DataObject) -> None:
    check_gradients(form, data, OURS)


@pytest.mark.parametrize("form", WIDE, ids=str)
@given(data=st.data())
@settings(max_examples=10)
def test_gradients_of_wide_heads(form: Form, data: st.DataObject) -> None:
    check_gradients(form, data, "sm80")


def check_gradients(form: Form, data: st.DataObject, backend: str) -> None:
    call: Call = data.draw(calls(form))
    kwargs = {**call.kwargs, "deterministic": data.draw(st.booleans())}
    inputs = [x.requires_grad_() for x in call[:3]]
    mask = kwargs["attn_mask"]
    wanted = list(inputs)
    if mask is not None and mask.is_floating_point() and data.draw(st.booleans()):
        wanted.append(mask.requires_grad_())
        # A broadcast mask's gradient is summed in no fixed order.
        kwargs["deterministic"] &= is_full(mask, *inputs[:2])
    state = testing.peek_rng_state("cuda")
    with testing.backends_used() as used, testing.poisoned_memory():
        results = flash4_torch.attention(*inputs, **kwargs, return_lse=True)
        dout = gradient_of_out(results[0], data.draw(st.sampled_from(DOUTS)))
        dlse = torch.randn_like(results[1]) if data.draw(st.booleans()) else None
        cotangents = (dout,) if dlse is None else (dout, dlse)
        ours = torch.autograd.grad(results[: len(cotangents)], wanted, cotangents)
    assert used == {("attention", backend): 1, ("attention_backward", backend): 1}
    del kwargs["deterministic"]
    if kwargs["dropout_p"]:
        kwargs["rng_state"] = state
    exact, peer = (
        torch.autograd.grad(loss(testing.reference(*inputs, **kwargs, dtype=t), dout, dlse), wanted)
        for t in (torch.float64, form.dtype)
    )
    noise = noise_of_stored(results[0], dout, *inputs[:2], kwargs["scale"])
    assert_as_good_as_torch(ours, exact, peer, noise)
    for gradient, x in zip(ours, inputs, strict=False):
        # `contiguous` leaves an empty tensor as it is.
        assert not x.numel() or strides(gradient) == strides(
            torch.empty_like(x) if x.stride(-1) == 1 else x.contiguous()
        )


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("Sq", "Sk", "H"), [(512, 512, 4), (515, 1029, 4), (64, 4104, 1)])
@pytest.mark.parametrize("D", [64, 128])
def test_a_mask_lies_either_way(D: int, Sq: int, Sk: int, H: int, dtype: torch.dtype) -> None:
    """A mask that a kernel transposes gives the same bits as one whose queries are neighbours."""
    inputs = [
        torch.randn(2, S, 4, D, dtype=torch.bfloat16, device="cuda").requires_grad_() for S in (Sq, Sk, Sk)
    ]
    numbers = torch.randn(2, H, Sq, Sk, device="cuda")
    mask = numbers > -1 if dtype == torch.bool else numbers.where(numbers > -1, -torch.inf).to(dtype)
    if not dtype.is_floating_point or Sk % 2:
        mask[..., Sk // 2 :] = False if dtype == torch.bool else -torch.inf
    found = []
    for attn_mask in (mask, mask.mT.contiguous().mT):
        # Launches are prepared from the second call on, but not where fresh memory is filled.
        for where in (testing.poisoned_memory(), *[nullcontext()] * 3):
            with where:
                out = flash4_torch.attention(*inputs, attn_mask=attn_mask, deterministic=True)
                found.append(torch.autograd.grad(out, inputs, torch.ones_like(out)))
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def strides(x: Tensor) -> list[int]:
    """Strides of dimensions longer than 1: those that decide how a tensor lies in memory."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


@pytest.mark.parametrize("form", PACKED_FORMS, ids=str)
@given(
    lengths=sequences(),
    heads=st.sampled_from([(2, 2), (6, 2)]),
    deterministic=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=20)
def test_packed_sequences(
    form: Form,
    lengths: tuple[list[int], list[int]],
    heads: tuple[int, int],
    deterministic: bool,
    seed: int,
) -> None:
    for why in lacks_gradients(form.D, form.Dv, varlen=True):
        pytest.skip(f"{OURS}: {why}")
    torch.manual_seed(seed)
    ends = ends_of(lengths[0]), ends_of(lengths[1])
    inputs = [
        laid_out(1, sum(n), H, D, form.dtype, "among NaN")[0].requires_grad_()
        for n, H, D in (
            (lengths[0], heads[0], form.D),
            (lengths[1], heads[1], form.D),
            (lengths[1], heads[1], form.Dv),
        )
    ]
    state = testing.peek_rng_state("cuda")
    with testing.backends_used() as used, testing.poisoned_memory():
        out = flash4_torch.attention_varlen(
            *inputs,
            cu_seqlens_q=ends[0],
            cu_seqlens_k=ends[1],
            max_seqlen_q=max(lengths[0]),
            max_seqlen_k=max(lengths[1]),
            deterministic=deterministic,
            **form.rules,
        )
        dout = torch.randn_like(out)
        ours = torch.autograd.grad(out, inputs, dout)
    assert used[("attention_varlen_backward", OURS)] == 1
    exact, peer = (one_by_one(inputs, ends, form, state, dout, t) for t in (torch.float64, form.dtype))
    assert_as_good_as_torch(ours, exact, peer)


def one_by_one(
    inputs: list[Tensor],
    ends: tuple[Tensor, Tensor],
    form: Form,
    state: Tensor,
    dout: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Gradients of each sequence by definition, in `dtype`."""
    band = Band(*form.window) if not form.causal else Band(form.window[0], 0)
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    for b, (rows, keys) in enumerate(zip(*(pairwise(x.tolist()) for x in ends), strict=True)):
        dropout = Dropout(state, form.dropout_p, b) if form.dropout_p else None
        scoring = Scoring(form.D**-0.5, band, form.softcap, None, dropout)
        spans = (rows, keys, keys)
        parts = (x[None, slice(*span)].to(dtype) for x, span in zip(inputs, spans, strict=True))
        out, _ = by_definition(*parts, scoring)
        total = total + (out[0].double() * dout[slice(*rows)].double()).sum()
    if not total.requires_grad:
        return tuple(torch.zeros_like(x) for x in inputs)
    return torch.autograd.grad(total, inputs)


def trained(form: Form, B: int = 2, S: int = 700, Hq: int = 4, Hk: int = 2) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the gradient of out."""
    sizes = ((Hq, form.D), (Hk, form.D), (Hk, form.Dv))
    inputs = [laid_out(B, S, H, D, form.dtype, "contiguous").requires_grad_() for H, D in sizes]
    return inputs, laid_out(B, S, Hq, form.Dv, form.dtype, "contiguous")


PLAIN = (
    Form(64, 64),
    Form(64, 64, FP16, causal=True),
    Form(128, 128, causal=True),
    Form(256, 256, causal=True),
)


def assert_equal_up_to_order(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    """Compares results of one kernel: dK and dV are summed in registers, dQ in memory, in any order."""
    assert torch.equal(ours[1], theirs[1]) and torch.equal(ours[2], theirs[2])
    assert_close_to(ours, theirs)


def assert_close_to(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("form", PLAIN, ids=str)
def test_deterministic_sums(form: Form) -> None:
    inputs, dout = trained(form, S=1500)
    runs = []
    for _ in range(20):
        out = flash4_torch.attention(*inputs, **form.rules, deterministic=True)
        runs.append(torch.autograd.grad(out, inputs, dout))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))
    # The kernel without order may visit blocks of rows in another order.
    any_order = flash4_torch.attention(*inputs, **form.rules, deterministic=False)
    assert_close_to(torch.autograd.grad(any_order, inputs, dout), runs[0])


@pytest.mark.parametrize("D", [64, 128, 192, 256])
@pytest.mark.parametrize("S", [300, 8192])
def test_heads_first(S: int, D: int) -> None:
    """SDPA's contract gives `attention`'s gradients, by the first call and by prepared ones.

    The long calls have kernels for each query head, whose dK and dV another kernel sums up.
    """
    shapes = (1, 8, S, D), (1, 2, S, D), (1, 2, S, D)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    rows = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs]
    dout = torch.randn(shapes[0], device="cuda", dtype=torch.bfloat16)
    out = flash4_torch.attention(*rows, causal=True)
    expected = [x.transpose(1, 2) for x in torch.autograd.grad(out, rows, dout.transpose(1, 2))]
    for _ in range(3):
        out = flash4_torch.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
        found = torch.autograd.grad(out, inputs, dout)
        assert_equal_up_to_order(found, tuple(expected))
        assert all(strides(a) == strides(x) for a, x in zip(found, inputs, strict=True))


@pytest.mark.parametrize("form", PLAIN, ids=str)
def test_the_short_way(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, dout = trained(form)
    long_way, steps = LongWay(monkeypatch), []

    def step() -> None:
        out = flash4_torch.attention(*inputs, **form.rules)
        steps.append(torch.autograd.grad(out, inputs, dout))

    step()
    step()
    assert not long_way.taken(step)
    for other in steps[1:]:
        assert_equal_up_to_order(other, steps[0])


@pytest.mark.parametrize("form", PLAIN, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_graphs_read_new_data(form: Form, deterministic: bool) -> None:
    inputs, dout = trained(form)
    rules = {**form.rules, "deterministic": deterministic}

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(flash4_torch.attention(*inputs, **rules), inputs, dout)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(3):
        for x in (*inputs, dout):
            x.detach().normal_()
        graph.replay()
        assert_equal_up_to_order(found, step())


def test_streams_do_not_meet() -> None:
    """Backwards of several streams at once, each with workspaces and a counter of its own."""
    inputs, dout = trained(PLAIN[1])

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(flash4_torch.attention(*inputs, **PLAIN[1].rules), inputs, dout)

    expected = step()
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(4)], []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(step())
    torch.cuda.synchronize()
    for run in found:
        assert_equal_up_to_order(run, expected)


@pytest.mark.parametrize("form", PLAIN, ids=str)
def test_compiled_steps(form: Form) -> None:
    inputs, dout = trained(form)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash4_torch.attention(q * 2.0, k, v, **form.rules)

    expected = torch.autograd.grad(step(*inputs), inputs, dout)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with testing.backends_used() as used:
        found = torch.autograd.grad(compiled(*inputs), inputs, dout)
    assert used[("attention_backward", OURS)] == 1
    assert_equal_up_to_order(found, expected)


@pytest.mark.parametrize(("D", "Dv", "S"), [(128, 128, 1100), (192, 128, 4200), (256, 256, 8200)])
def test_many_heads_of_a_long_call(D: int, Dv: int, S: int) -> None:
    """Each query head makes its share of dK and dV."""
    form = Form(D, Dv, FP16 if D == 192 else torch.bfloat16, causal=True)
    inputs, dout = trained(form, B=1, S=S, Hq=8)

    def gradients(**flags: object) -> tuple[Tensor, ...]:
        with testing.poisoned_memory():
            out = flash4_torch.attention(*inputs, **form.rules, **flags)
            return torch.autograd.grad(out, inputs, dout)

    exact, peer = (
        torch.autograd.grad(loss(testing.reference(*inputs, **form.rules, dtype=t), dout, None), inputs)
        for t in (torch.float64, form.dtype)
    )
    assert_as_good_as_torch(gradients(), exact, peer)
    in_order = [gradients(deterministic=True) for _ in range(20)]
    assert_as_good_as_torch(in_order[0], exact, peer)
    for run in in_order[1:]:
        assert all(torch.equal(a, b) for a, b in zip(in_order[0], run, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_many_heads_of_long_packed_sequences(deterministic: bool) -> None:
    """The gradients of each sequence are those that it has alone."""
    lengths, form = [1, 1500, 0, 700, 65], Form(128, 128, causal=True)
    (q, k, v), dout = trained(form, B=1, S=sum(lengths), Hq=8)
    rows = [x[0].detach().requires_grad_() for x in (q, k, v)]
    ends, most = ends_of(lengths), {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    with testing.poisoned_memory():
        out = flash4_torch.attention_varlen(
            *rows, cu_seqlens_q=ends, cu_seqlens_k=ends, **most, causal=True, deterministic=deterministic
        )
        together = torch.autograd.grad(out, rows, dout[0])
    for start, end in pairwise(ends.tolist()):
        if start == end:
            continue
        alone = [x[None, start:end].detach().requires_grad_() for x in rows]
        exact, peer = (
            torch.autograd.grad(
                loss(testing.reference(*alone, causal=True, dtype=t), dout[:, start:end], None), alone
            )
            for t in (torch.float64, form.dtype)
        )
        for a, e, p in zip(together, exact, peer, strict=True):
            testing.assert_close_as_peer(a[None, start:end], e.double(), p)
