"""Our kernels on a GPU that they serve: they serve any call, rightly and the same each time.

A kernel takes seconds to compile, so features come from a list, while sizes and layouts are generated freely.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

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
from own_gpu import OURS, needs_ours

pytestmark = needs_ours

BF16, FP16 = torch.bfloat16, torch.float16


class Form(NamedTuple):
    """Features of a call. mask: '' for none, 'bool', 'half' for a bias in the dtype of q, or 'float32'."""

    D: int
    Dv: int
    dtype: torch.dtype = BF16
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    scale: float | None = None
    mask: str = ""
    dropout_p: float = 0.0

    def __str__(self) -> str:
        used = [
            f"{name}={value}"
            for name, value in self._asdict().items()
            if value != self._field_defaults.get(name)
        ]
        return ",".join(used)

    @property
    def rules(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("causal", "window", "softcap", "scale", "dropout_p")}


FORMS = (
    Form(64, 64),
    Form(64, 64, causal=True),
    Form(64, 64, FP16, causal=True, softcap=1.5),
    Form(64, 64, window=(130, 20)),
    Form(64, 64, FP16, window=(70, None)),
    Form(64, 64, window=(130, -20)),
    Form(64, 64, FP16, window=(-9, None)),
    Form(64, 64, scale=-0.7),
    Form(64, 64, mask="bool"),
    Form(64, 64, causal=True, mask="half"),
    Form(64, 64, FP16, mask="float32", softcap=1.5),
    Form(64, 64, dropout_p=0.1),
    Form(64, 64, causal=True, mask="bool", dropout_p=0.5),
    Form(128, 128),
    Form(128, 128, FP16, causal=True),
    Form(128, 128, window=(0, 300)),
    Form(128, 128, mask="bool"),
    Form(128, 128, window=(100, 100), softcap=1.5, mask="float32", dropout_p=0.3),
    Form(128, 128, causal=True, dropout_p=0.1),
    Form(96, 96, causal=True),
    Form(96, 40, FP16, mask="half"),
    Form(60, 13),
    Form(192, 192, causal=True),
    Form(192, 128, FP16, causal=True, mask="bool"),
    Form(256, 256, causal=True),
    Form(256, 256, mask="half", dropout_p=0.1),
    Form(40, 200, FP16, window=(50, 50)),
)
PACKED_FORMS = (
    Form(64, 64),
    Form(64, 64, FP16, causal=True),
    Form(128, 128, causal=True, dropout_p=0.1),
    Form(128, 128, window=(100, 30), softcap=1.5),
    Form(192, 128, causal=True),
    Form(30, 30, FP16),
)


class Sizes(NamedTuple):
    B: int
    Sq: int
    Sk: int
    Hq: int
    Hk: int


LENGTHS = st.one_of(
    st.integers(1, 4), st.integers(5, 300), st.integers(301, 1500), st.sampled_from([256, 1024])
)


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    """Up to 15 query heads; one in ten has nothing to attend from or to."""
    Sq = draw(LENGTHS)
    Sk = draw(st.one_of(st.just(Sq), LENGTHS))
    Hk = draw(st.integers(1, 3))
    full = Sizes(draw(st.integers(1, 3)), Sq, Sk, Hk * draw(st.sampled_from([1, 2, 5])), Hk)
    empty = draw(st.sampled_from([*({},) * 27, {"B": 0}, {"Sq": 0}, {"Sk": 0}]))
    return full._replace(**empty)


LAYOUTS = ("contiguous", "heads first", "among NaN", "of a joint projection", "expanded", "strided last")


def laid_out(B: int, S: int, H: int, D: int, dtype: torch.dtype, layout: str) -> Tensor:
    """Random (B, S, H, D) with the strides of `layout`."""
    x = torch.randn(B, S, H, D, device="cuda").to(dtype)
    if layout == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "among NaN":
        room = torch.full((B, S + 2, H + 1, D + 8), math.nan, dtype=dtype, device="cuda")
        room[:, 1 : S + 1, :H, :D] = x
        return room[:, 1 : S + 1, :H, :D]
    if layout == "of a joint projection":
        return torch.stack([x, x, x], 2)[:, :, 1]
    if layout == "expanded":
        return x[:1].expand(B, S, H, D)
    if layout == "strided last":
        return torch.stack([x, x], -1)[..., 0]
    return x


@st.composite
def masks(draw: st.DrawFn, form: Form, sizes: Sizes) -> Tensor | None:
    """Random masked keys, any dimension broadcast; rows may see nothing at all."""
    if not form.mask:
        return None
    B, Sq, Sk, Hq, _ = sizes
    shape = [draw(st.sampled_from([1, n])) for n in (B, Hq, Sq, Sk)]
    visible = torch.rand(shape, device="cuda") < draw(st.sampled_from([0.02, 0.6, 1.0]))
    visible &= torch.arange(shape[3], device="cuda") < draw(st.sampled_from([shape[3], max(1, Sk // 3)]))
    if form.mask == "bool":
        return visible
    dtype = form.dtype if form.mask == "half" else torch.float32
    return torch.randn(shape, device="cuda").masked_fill(~visible, -math.inf).to(dtype)


class Call(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    kwargs: dict[str, Any]

    def __repr__(self) -> str:
        kwargs = {
            name: f"{x.dtype}{tuple(x.shape)}" if isinstance(x, Tensor) else x
            for name, x in self.kwargs.items()
        }
        tensors = (f"{tuple(x.shape)}{x.stride()}" for x in self[:3])
        return f"Call({' '.join(tensors)} {self.q.dtype} {kwargs})"


@st.composite
def calls(draw: st.DrawFn, form: Form) -> Call:
    size = draw(sizes())
    torch.manual_seed(draw(st.integers(0, 999)))
    B, Sq, Sk, Hq, Hk = size
    q, k, v = (
        laid_out(B, S, H, D, form.dtype, draw(st.sampled_from(LAYOUTS)))
        for S, H, D in ((Sq, Hq, form.D), (Sk, Hk, form.D), (Sk, Hk, form.Dv))
    )
    return Call(q, k, v, {**form.rules, "attn_mask": draw(masks(form, size))})


def assert_as_good_as_torch(
    actual: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], peer: tuple[Tensor, Tensor]
) -> None:
    for what, a, e, p in zip(("out", "lse"), actual, exact, peer, strict=True):
        assert a.is_contiguous()
        testing.assert_close_as_peer(a, e.double(), p, what=what)


@pytest.mark.parametrize("form", FORMS, ids=str)
@given(data=st.data())
@settings(max_examples=15)
def test_values(form: Form, data: st.DataObject) -> None:
    q, k, v, kwargs = data.draw(calls(form))
    reasons = flash4_torch.support(q, k, v, **kwargs)
    assert next(name for name, why in reasons.items() if not why) == OURS
    state = testing.peek_rng_state("cuda")
    generator = torch.cuda.get_rng_state()
    results = []
    with testing.backends_used() as used, testing.poisoned_memory():
        for _ in range(2):
            torch.cuda.set_rng_state(generator)
            results.append(flash4_torch.attention(q, k, v, **kwargs, return_lse=True))
    assert used == {("attention", OURS): 2}
    if kwargs["dropout_p"]:
        kwargs = {**kwargs, "rng_state": state}
    exact = testing.reference(q, k, v, **kwargs)
    assert_as_good_as_torch(results[0], exact, testing.reference(q, k, v, **kwargs, dtype=q.dtype))
    for once, again in zip(*results, strict=True):
        assert torch.equal(once, again)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Lengths of queries and keys."""
    length = st.one_of(st.just(0), st.integers(1, 130), st.integers(131, 700))
    pairs = draw(st.lists(st.tuples(length, length), min_size=1, max_size=6))
    if draw(st.booleans()):
        pairs = [(n, n) for n, _ in pairs]
    return [n for n, _ in pairs], [n for _, n in pairs]


def ends_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")


def one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: tuple[Tensor, Tensor],
    form: Form,
    state: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Each sequence by definition, in `dtype`."""
    band = Band(*form.window) if not form.causal else Band(form.window[0], 0)
    out, lse = [], []
    for b, (rows, keys) in enumerate(zip(*(pairwise(x.tolist()) for x in ends), strict=True)):
        dropout = Dropout(state, form.dropout_p, b) if form.dropout_p else None
        scoring = Scoring(form.D**-0.5, band, form.softcap, None, dropout)
        parts = (x[None, slice(*span)].to(dtype) for x, span in ((q, rows), (k, keys), (v, keys)))
        results = by_definition(*parts, scoring)
        out.append(results[0][0])
        lse.append(results[1][0])
    return torch.cat(out), torch.cat(lse, -1)


@pytest.mark.parametrize("form", PACKED_FORMS, ids=str)
@given(lengths=sequences(), heads=st.sampled_from([(2, 2), (6, 2)]), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_packed_sequences(
    form: Form, lengths: tuple[list[int], list[int]], heads: tuple[int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    ends = ends_of(lengths[0]), ends_of(lengths[1])
    q, k, v = (
        laid_out(1, sum(n), H, D, form.dtype, "among NaN")[0]
        for n, H, D in (
            (lengths[0], heads[0], form.D),
            (lengths[1], heads[1], form.D),
            (lengths[1], heads[1], form.Dv),
        )
    )
    state, generator = testing.peek_rng_state("cuda"), torch.cuda.get_rng_state()
    results = []
    with testing.backends_used() as used, testing.poisoned_memory():
        for _ in range(2):
            torch.cuda.set_rng_state(generator)
            results.append(
                flash4_torch.attention_varlen(
                    q,
                    k,
                    v,
                    cu_seqlens_q=ends[0],
                    cu_seqlens_k=ends[1],
                    max_seqlen_q=max(lengths[0]),
                    max_seqlen_k=max(lengths[1]),
                    **form.rules,
                    return_lse=True,
                )
            )
    assert used == {("attention_varlen", OURS): 2}
    exact, peer = (one_by_one(q, k, v, ends, form, state, dtype) for dtype in (torch.float64, form.dtype))
    assert_as_good_as_torch(results[0], exact, peer)
    for once, again in zip(*results, strict=True):
        assert torch.equal(once, again)


@given(
    st.integers(1, 3),
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from([0.001, 0.1, 0.5, 0.97]),
    st.integers(0, 99),
)
@settings(max_examples=40)
def test_the_dropout_mask_is_the_cpus(B: int, Sq: int, Sk: int, p: float, seed: int) -> None:
    """All scores are 0 and v holds unit vectors, so out shows which weights were kept."""
    torch.manual_seed(seed)
    H, D = 2, 64
    state, generator = testing.peek_rng_state("cuda"), torch.cuda.get_rng_state()
    q, k = (torch.zeros(B, S, H, D, device="cuda", dtype=BF16) for S in (Sq, Sk))
    kept = []
    for units in torch.eye(Sk, device="cuda", dtype=BF16).split(D, 1):
        torch.cuda.set_rng_state(generator)
        v = torch.nn.functional.pad(units, (0, D - units.shape[1]))[None, :, None].expand(B, Sk, H, D)
        out = flash4_torch.attention(q, k, v, dropout_p=p)
        kept.append(out[..., : units.shape[1]] != 0)
    mask = testing.dropout_mask(state.cpu(), B, H, Sq, Sk, p)
    assert torch.equal(torch.cat(kept, -1).transpose(1, 2).cpu(), mask)


GRAPHED = (
    Form(64, 64, mask="bool"),
    Form(64, 64, causal=True, mask="half"),
    Form(64, 64, window=(130, 20)),
    Form(128, 128, causal=True),
)


@pytest.mark.parametrize("mask", [torch.float16, torch.bool], ids=str)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_dropout_beside_a_mask_repeats_its_bits(D: int, mask: torch.dtype) -> None:
    """Loads of a mask hold up those of keep bits, whose stage may be filled again then (ptxas.md, P32)."""
    torch.manual_seed(0)
    B, S, H = 1, 4096, 8
    inputs = [torch.randn(B, S, H, D, device="cuda").half().requires_grad_() for _ in range(3)]
    dout, numbers = torch.randn(B, S, H, D, device="cuda").half(), torch.randn(B, H, S, S, device="cuda")
    attn_mask = numbers > -1.0 if mask == torch.bool else numbers.to(mask)
    found = []
    for _ in range(8):
        torch.manual_seed(1)
        out = flash4_torch.attention(*inputs, attn_mask=attn_mask, dropout_p=0.1, deterministic=True)
        found.append((out.detach(), *torch.autograd.grad(out, inputs, dout)))
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


@pytest.mark.parametrize("form", GRAPHED, ids=str)
def test_graphs_read_new_data(form: Form) -> None:
    """A mask is read anew as well: which of its blocks are empty is not remembered."""
    size = Sizes(2, 400, 700, 4, 2)
    q, k, v = (
        laid_out(2, S, H, 64 if form.D == 64 else 128, form.dtype, "contiguous")
        for S, H in ((400, 4), (700, 2), (700, 2))
    )

    def new_mask(reach: int) -> Tensor | None:
        visible = torch.arange(size.Sk, device="cuda").expand(size.B, 1, size.Sq, size.Sk) < reach
        if form.mask == "half":
            return torch.randn(visible.shape, device="cuda").masked_fill(~visible, -math.inf).to(form.dtype)
        return visible if form.mask else None

    mask = new_mask(700)

    def call() -> Tensor:
        out: Tensor = flash4_torch.attention(q, k, v, attn_mask=mask, **form.rules)
        return out

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), testing.backends_used() as used:
        out = call()
    assert used == {("attention", OURS): 1}
    for reach in (10, 333, 700):
        for x in (q, k, v):
            x.normal_()
        if mask is not None:
            mask.copy_(new_mask(reach))
        graph.replay()
        assert torch.equal(out, call())


def test_a_graph_of_packed_sequences_reads_new_lengths() -> None:
    q, k, v = (laid_out(1, 900, 4, 64, BF16, "contiguous")[0] for _ in "qkv")
    ends = ends_of([300, 300, 300])

    def call() -> Tensor:
        lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 700, "max_seqlen_k": 700}
        out: Tensor = flash4_torch.attention_varlen(q, k, v, **lengths, causal=True)
        return out

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    replayed = []
    for lengths in ([300, 300, 300], [1, 699, 200], [0, 200, 700]):
        ends.copy_(ends_of(lengths))
        graph.replay()
        replayed.append(out.clone())
        assert torch.equal(out, call())
    assert not torch.equal(replayed[0], replayed[1])


def test_a_graph_drops_anew_at_each_replay() -> None:
    q, k, v = (laid_out(1, 256, 2, 64, BF16, "contiguous") for _ in "qkv")
    flash4_torch.attention(q, k, v, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash4_torch.attention(q, k, v, dropout_p=0.5)
    replays = []
    for _ in range(3):
        graph.replay()
        replays.append(out.clone())
    assert not any(torch.equal(a, b) for a, b in pairwise(replays))


@pytest.mark.parametrize(
    "form", [Form(64, 64, causal=True), Form(64, 64, mask="bool")], ids=["causal", "mask"]
)
def test_compiled_once_for_all_lengths(form: Form) -> None:
    """torch.compile traces one graph, in which our kernel serves every length, as in eager mode."""
    graphs = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    @torch.compile(fullgraph=True, dynamic=True, backend=counting)
    def step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return flash4_torch.attention(q * 2.0, k, v, attn_mask=mask, **form.rules)

    for S in (65, 100, 700):
        q, k, v = (laid_out(2, S, 4, 64, BF16, "contiguous") for _ in "qkv")
        mask = torch.rand(2, 1, 1, S, device="cuda") < 0.7 if form.mask else None
        with testing.backends_used() as used:
            out = step(q, k, v, mask)
        assert used == {("attention", OURS): 1}
        assert torch.equal(out, flash4_torch.attention(q * 2.0, k, v, attn_mask=mask, **form.rules))
    assert graphs == 1


ROOMY = bool(OURS) and torch.cuda.get_device_properties(0).total_memory > 40 << 30


@pytest.mark.skipif(not ROOMY, reason="needs 40 GB")
@pytest.mark.parametrize(("Sq", "Sk"), [(1 << 18, 64), (64, 1 << 18)], ids=["queries", "keys"])
def test_more_elements_than_32_bits_count(Sq: int, Sk: int) -> None:
    """The last heads lie beyond 32 bits; copied to the front, they give the same."""
    H, last = 132, slice(130, 132)
    q, k, v = (torch.randn(1, S, H, 64, device="cuda", dtype=BF16) for S in (Sq, Sk, Sk))
    assert max(q.numel(), k.numel()) > 1 << 31
    for x in (q, k, v):
        x[:, :, :2] = x[:, :, last]
    out, lse = flash4_torch.attention(q, k, v, return_lse=True)
    assert torch.equal(out[:, :, last], out[:, :, :2]) and torch.equal(lse[:, last], lse[:, :2])
    rows = slice(-64, None)
    few = [q[:, rows, last], k[:, :, last], v[:, :, last]]
    exact, peer = testing.reference(*few), testing.reference(*few, dtype=BF16)
    assert_as_good_as_torch((out[:, rows, last].contiguous(), lse[:, last, rows].contiguous()), exact, peer)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kwargs", [{"dropout_p": 0.1}, {"causal": True}, {"attn_mask": 0}], ids=str)
def test_two_devices_by_turns(kwargs: dict[str, Any]) -> None:
    """Each device has its kernels, its counters and its generator, whichever is current."""
    expected = []
    for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 2 * 300 * 4 * 64).view(2, 300, 4, 64).to(device, BF16)
        if "attn_mask" in kwargs:
            kwargs = {"attn_mask": torch.arange(300, device=device) < 200}
        with testing.backends_used() as used:
            out = flash4_torch.attention(x, x, x, **kwargs)
        assert used == {("attention", OURS): 1} and out.device == torch.device(device)
        expected.append(out.cpu())
    assert all(torch.equal(a, b) for a, b in pairwise(expected))
