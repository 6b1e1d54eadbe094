"""CUDA calls without a compiler: torch's fused kernels serve all that they can, with the right results.

Nothing here needs a GPU: kernels of torch are stood for by what they are known to do.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everything import examples
from flash4_torch import backends, testing
from flash4_torch.backends import dispatch, efficient, sdpa
from flash4_torch.backends.compiled import served
from flash4_torch.masks import Band
from flash4_torch.problem import Extent, Inputs, Problem, Saved, Spec, mask_key
from flash4_torch.reference.attention import attention
from flash4_torch.reference.scoring import Scoring

MISSING = "nvidia-cutlass-dsl must be installed"
CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
HALF = (torch.bfloat16, torch.float16)


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "missing_packages", lambda exported: ["nvidia-cutlass-dsl"])


def problem_of(extent: Extent, dtype: torch.dtype, D: int, Dv: int, band: Band, **more: Any) -> Problem:
    """A call on a GPU."""
    group = extent.Hq // extent.Hk
    fields = {"varlen": False, "softcap": False, "mask": "", "dropout": False, "deterministic": False, **more}
    bounds = {"left": band.left is not None, "right": band.right is not None}
    fields = {"capability": (8, 0), **bounds, **fields}
    spec = Spec(device="cuda", dtype=dtype, D=D, Dv=Dv, group=group, **fields)
    return Problem(spec, extent, D**-0.5, band, 0.0, 0.1 if spec.dropout else 0.0)


@st.composite
def calls_of_torch(draw: st.DrawFn) -> Problem:
    """Calls that a function of torch serves by a fused kernel: scaled_dot_product_attention, of dense tensors
    and of nested ones, with masks and causal_lower_right; varlen_attn with windows."""
    dtype = draw(st.sampled_from([*HALF, torch.float32]))
    B, Sq, Sk, Hk, group, D = (draw(st.integers(1, n)) for n in (4, 300, 300, 4, 4, 256))
    Dv = D if draw(st.booleans()) else draw(st.integers(1, 256))
    more = {"backward": draw(st.booleans()), "capability": draw(st.sampled_from(CAPABILITIES))}
    kind = draw(st.sampled_from(["plain", "top left", "bottom right", "mask", "varlen", "window"]))
    band = Band()
    if kind == "top left":
        band = Band(None, Sq - Sk)
    elif kind == "bottom right":
        # Its other fused kernel is flash attention.
        dtype, Dv, band = draw(st.sampled_from(HALF)), D, Band(None, 0)
    elif kind == "mask":
        name = draw(st.sampled_from(["bool", str(dtype).removeprefix("torch.")]))
        shape = "".join(draw(st.sampled_from("1.")) for _ in range(4))
        more |= {"mask": f"{name}:{shape}"}
        more |= {"dmask": name != "bool" and more["backward"] and draw(st.booleans())}
    elif kind == "varlen":
        more, band = more | {"varlen": True}, draw(st.sampled_from([Band(), Band(None, 0)]))
    elif kind == "window":
        dtype, Dv, more = draw(st.sampled_from(HALF)), D, more | {"varlen": True}
        band = Band(draw(st.integers(0, 300)), draw(st.integers(0, 300)))
    return problem_of(Extent(B, Sq, Sk, Hk * group, Hk), dtype, D, Dv, band, **more)


@pytest.mark.usefixtures("without_compiler")
@given(problem=calls_of_torch())
@settings(max_examples=examples(300, 3000))
def test_no_call_that_torch_fuses_is_left_to_plain_torch(problem: Problem) -> None:
    assert MISSING in str(backends.reasons(problem))
    assert backends.choose(problem).name in ("sdpa", "efficient")


@pytest.mark.usefixtures("without_compiler")
def test_dropout_says_once_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its masks are ours alone, so that plain torch serves it."""
    monkeypatch.setattr(dispatch, "_warned", set())
    problem = problem_of(Extent(2, 64, 64, 4, 4), torch.bfloat16, 64, 64, Band(), dropout=True)
    with pytest.warns(UserWarning, match=r"dropout .*pip install 'flash4_torch\[kernels\]'"):
        assert backends.choose(problem).name == "tiled"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.choose(problem).name == "tiled"
        assert backends.choose(problem_of(problem.extent, torch.bfloat16, 64, 64, Band())).name == "sdpa"


# What the kernels compute


def seen_by(Sq: int, Sk: int, left: int, right: int) -> Tensor:
    """FlashAttention-2's windows: aligned to the bottom right, -1 is no bound."""
    diagonal = torch.arange(Sk) - torch.arange(Sq)[:, None] - (Sk - Sq)
    seen = torch.ones(Sq, Sk, dtype=torch.bool)
    if left >= 0:
        seen &= diagonal >= -left
    return seen & (diagonal <= right) if right >= 0 else seen


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor | None,
    ends_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:
    """aten._flash_attention_forward: rows that see nothing have 0 and an lse of +inf."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    assert all(x.stride(-1) == 1 for x in (q, k, v)) and dropout_p == 0.0
    right = 0 if is_causal else window_size_right

    def one(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert len(q) <= max_q and len(k) <= max_k
        group = q.shape[1] // k.shape[1]
        keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q.float(), keys) * scale
        hidden = ~seen_by(len(q), len(k), window_size_left, right)
        scores = scores.masked_fill(hidden, -torch.inf)
        nothing = hidden.all(-1)
        weights = torch.softmax(scores.masked_fill(nothing[:, None], 0.0), -1)
        weights = weights.masked_fill(nothing[:, None], 0.0)
        lse = scores.detach().logsumexp(-1).masked_fill(nothing, torch.inf)
        return torch.einsum("hij,jhd->ihd", weights, values).to(q.dtype), lse

    if ends_q is None or ends_k is None:
        found = [one(*each) for each in zip(q, k, v, strict=True)]
        return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])
    assert ends_q.dtype == ends_k.dtype == torch.int32
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.nan)
    for b in range(len(ends_q) - 1):
        rows, keys = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        out[rows], lse[:, rows] = one(q[rows], k[keys], v[keys])
    return out, lse


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, ...]:
    """aten._flash_attention_backward: gradients of rows of no sequence are anything."""
    ends_q, ends_k, max_q, max_k, dropout_p, is_causal, *_ = rest
    with torch.enable_grad():
        own = [x.detach().requires_grad_() for x in (q, k, v)]
        found, stats = flash(*own, ends_q, ends_k, max_q, max_k, dropout_p, is_causal, False, **options)
        rows = slice(None) if ends_q is None else slice(0, int(ends_q[-1]))
        torch.testing.assert_close(lse[..., rows], stats[..., rows], rtol=1e-3, atol=1e-3)
        grads = [g.clone() for g in torch.autograd.grad(found[rows], own, dout[rows])]
    for grad, ends in zip(grads, (ends_q, ends_k, ends_k), strict=True):
        if ends is not None:
            grad[int(ends[-1]) :] = torch.nan
    return tuple(grads)


LOG2E = 1.4426950408889634


def memory_efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, log: bool, p: float, causal: bool, *, scale: float
) -> tuple[Tensor, Tensor]:
    """aten._scaled_dot_product_efficient_attention: float32 scores in base 2, to which biases are added."""
    assert all(x.shape[-1] * x.element_size() % 16 == 0 and x.shape[1] == q.shape[1] for x in (q, k, v))
    scores = q.float() @ k.float().transpose(2, 3) * (scale * LOG2E)
    if bias is not None:
        assert bias.dtype == q.dtype and bias.stride(-2) % 16 == 0
        scores = scores + bias.float() * LOG2E
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(nothing, 0.0) / LOG2E, -1).masked_fill(nothing, 0.0)
    lse = (scores.detach() / LOG2E).logsumexp(-1).masked_fill(nothing[..., 0], 0.0)
    rest = torch.full((*lse.shape[:2], -lse.shape[2] % 32), torch.inf)
    return (weights @ v.float()).to(q.dtype), torch.cat([lse, rest], -1)


def memory_efficient_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
    **o: Any,
) -> tuple[Tensor | None, ...]:
    *_, p, wanted, causal = rest
    with torch.enable_grad():
        own = [x.detach().requires_grad_() for x in (q, k, v)]
        if bias is not None:
            bias = bias.detach().requires_grad_(wanted[3])
        found, stats = memory_efficient(*own, bias, True, p, causal, **o)
        Sq = q.shape[2]
        torch.testing.assert_close(lse[..., :Sq], stats[..., :Sq], rtol=1e-3, atol=1e-3)
        asked = [*own, *([bias] if wanted[3] and bias is not None else [])]
        grads = torch.autograd.grad(found, asked, dout)
    return (*grads, None)[:4]


def check(backend: Any, inputs: Inputs, problem: Problem, *, dmask: bool = False) -> None:
    """Results and gradients against the definition, of each sequence."""
    assert backend.why_not(problem) == []
    forward = backend.forward(inputs, problem)
    torch.manual_seed(1)
    dout = torch.randn_like(forward.out)
    saved = Saved(dout, None, forward.out, forward.lse, dmask, forward.lse_low)
    grads = backend.backward(saved, inputs, problem)

    def by_definition(dtype: torch.dtype) -> list[Tensor]:
        tensors = [x.to(dtype).detach().requires_grad_() for x in inputs[:3]]
        mask, top = inputs.attn_mask, None
        if mask is not None and mask.is_floating_point():
            mask, top = _without_huge_numbers(mask.to(dtype).detach(), problem)
            mask.requires_grad_(dmask)
        scoring = Scoring(problem.scale, problem.band, 0.0, mask)
        if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
            out, lse = attention(*tensors, scoring)
            lse = lse if top is None else lse + top
        else:
            out, lse = torch.zeros_like(forward.out, dtype=dtype), torch.full(forward.lse.shape, -torch.inf)
            ends = zip(inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist(), strict=True)
            (i, j), *more = ends
            lse = lse.to(dtype)
            for i_end, j_end in more:
                own = [
                    x[None, a:b] for x, a, b in zip(tensors, (i, j, j), (i_end, j_end, j_end), strict=True)
                ]
                found, of_rows = attention(*own, scoring)
                out[i:i_end], lse[:, i:i_end] = found[0], of_rows[0]
                i, j = i_end, j_end
        asked = [*tensors, *([mask] if dmask and mask is not None else [])]
        grads = list(torch.autograd.grad(out, asked, dout.to(dtype), allow_unused=True))
        if dmask and inputs.attn_mask is not None:
            grads[3] = grads[3].sum_to_size(inputs.attn_mask.shape)
        return [out, lse, *grads]

    exact, peer = by_definition(torch.float64), by_definition(inputs.q.dtype)
    names = ("out", "lse", "dq", "dk", "dv", "dmask")
    ours = [forward.out, forward.lse, *grads[:3]]
    if dmask:
        ours.append(grads.dmask)
    eps = torch.finfo(inputs.q.dtype).eps
    for name, found, truth, plain in zip(names, ours, exact, peer, strict=False):
        noise = 0.0 if name in ("out", "lse") else 8 * eps * max(truth.abs().max().item(), 1.0)
        if name == "dmask":
            # A sum of so many rounded numbers.
            noise *= (forward.lse.numel() * problem.extent.Sk / truth.numel()) ** 0.5
        testing.assert_close_as_peer(
            found.to(plain.dtype), truth.detach().double(), plain, what=name, noise=noise
        )


def _without_huge_numbers(mask: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """A mask without the largest number of each row that sees but huge ones, and what that changes of lse.

    Sums of these numbers and scores are the numbers, even in float64: the kernel knows better.
    """
    Sq, Sk = problem.extent[1:3]
    mask = mask.expand(*mask.shape[:2], Sq, Sk)
    seen = problem.band.visible(torch.arange(Sq)[:, None], torch.arange(Sk), Sq, Sk)
    top = mask.masked_fill(~torch.as_tensor(seen), -torch.inf)
    top = top.amax(-1, keepdim=True)
    top = torch.where(top.isfinite() & (top < -(2.0**40)), top, 0.0)
    return (mask - top).contiguous(), top[..., 0]


@st.composite
def packed(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """cu_seqlens of queries and keys, with empty sequences."""
    B = draw(st.integers(1, 4))
    found = []
    for _ in range(2):
        lengths = draw(st.lists(st.integers(0, 40), min_size=B, max_size=B))
        found.append(torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32))
    return found[0], found[1]


def tensors(q: tuple[int, ...], k: tuple[int, ...], D: int, Dv: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = (*q, D), (*k, D), (*k, Dv)
    return [torch.randn(shape).to(dtype) for shape in shapes]


SIZES = st.integers(1, 50)
BOUNDS = st.one_of(st.none(), st.integers(0, 60))


@pytest.mark.parametrize("is_packed", [False, True])
@given(
    data=st.data(),
    D=st.sampled_from([8, 20, 64]),
    Dv=st.sampled_from([8, 20, 64]),
    group=st.integers(1, 3),
    left=BOUNDS,
    right=BOUNDS,
    dtype=st.sampled_from(HALF),
)
@settings(max_examples=examples(25, 300))
def test_flash_attention_serves_every_band(
    is_packed: bool,
    data: st.DataObject,
    D: int,
    Dv: int,
    group: int,
    left: int | None,
    right: int | None,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    ends: tuple[Tensor | None, Tensor | None] = (None, None)
    if is_packed:
        ends = ends_q, ends_k = data.draw(packed())
        B, Sq, Sk = len(ends_q) - 1, *(int(x.diff().max()) for x in (ends_q, ends_k))
        if not (Sq and Sk):
            return
        rows, keys = (int(x[-1]) + data.draw(st.integers(0, 3)) for x in (ends_q, ends_k))
        q, k, v = tensors((rows, 2 * group), (keys, 2), D, Dv, dtype)
    else:
        B, Sq, Sk = 2, data.draw(SIZES), data.draw(SIZES)
        q, k, v = tensors((B, Sq, 2 * group), (B, Sk, 2), D, Dv, dtype)
    band = Band(left, right)
    problem = problem_of(Extent(B, Sq, Sk, 2 * group, 2), dtype, D, Dv, band, varlen=is_packed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa, "_forward", flash)
        patch.setattr(sdpa, "_backward", flash_backward)
        inputs = Inputs(q, k, v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
        check(sdpa.Sdpa(), inputs, problem)


@pytest.mark.parametrize("kind", ["bool", "float", "learned", "large"])
@given(
    sizes=st.tuples(SIZES, SIZES),
    D=st.sampled_from([8, 20, 64]),
    shape=st.tuples(*(st.booleans() for _ in range(4))),
    is_causal=st.booleans(),
    dtype=st.sampled_from([torch.float32, *HALF]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(15, 300))
def test_efficient_attention_serves_masks(
    kind: str,
    sizes: tuple[int, int],
    D: int,
    shape: tuple[bool, ...],
    is_causal: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Floating masks hide keys by -inf and by the least number of their dtype, for all of some rows."""
    torch.manual_seed(seed)
    Sq, Sk = sizes
    B, Hk, group = 2, 2, 2
    q, k, v = tensors((B, Sq, Hk * group), (B, Sk, Hk), D, D, dtype)
    own = [1 if one else n for one, n in zip(shape, (B, Hk * group, Sq, Sk), strict=True)]
    shown = torch.rand(own) < 0.7
    mask = shown
    if kind != "bool":
        mask = torch.randn(own).to(dtype)
        hidden = torch.finfo(dtype).min if seed % 2 else -torch.inf
        mask = mask.masked_fill(~shown, hidden if kind != "learned" else -torch.inf)
    if kind == "large":
        mask = mask.masked_fill(torch.rand((*own[:3], 1)) < 0.5, torch.finfo(dtype).min)
    band, dmask = Band(None, Sq - Sk) if is_causal else Band(), kind == "learned"
    extent = Extent(B, Sq, Sk, Hk * group, Hk)
    problem = problem_of(extent, dtype, D, D, band, mask=mask_key(mask), dmask=dmask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(efficient, "_forward", memory_efficient)
        patch.setattr(efficient, "_backward", memory_efficient_backward)
        check(efficient.Efficient(), Inputs(q, k, v, mask), problem, dmask=dmask)


@given(ends=packed(), is_causal=st.booleans())
@settings(max_examples=examples(10, 100))
def test_efficient_attention_serves_packed_sequences(ends: tuple[Tensor, Tensor], is_causal: bool) -> None:
    torch.manual_seed(0)
    Sq, Sk = (int(x.diff().max()) for x in ends)
    if not (Sq and Sk):
        return
    q, k, v = tensors((int(ends[0][-1]), 2), (int(ends[1][-1]), 1), 20, 12, torch.float32)
    band = Band(None, 0) if is_causal else Band()
    extent = Extent(len(ends[0]) - 1, Sq, Sk, 2, 1)
    problem = problem_of(extent, torch.float32, 20, 12, band, varlen=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(efficient, "_forward", memory_efficient)
        patch.setattr(efficient, "_backward", memory_efficient_backward)
        inputs = Inputs(q, k, v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
        check(efficient.Efficient(), inputs, problem)
