"""CUDA calls without a compiler: torch's fused kernels serve all that they can, with the right results.

Nothing here needs a GPU: kernels of torch are stood for by what they are known to do.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everything import examples
from fallback_calls import BANDS, a_mask, bands, check, deterministic, packed, problem_of, tensors
from flash4_torch import backends
from flash4_torch.backends import batches, dispatch, efficient, sdpa
from flash4_torch.backends.compiled import served
from flash4_torch.masks import Band
from flash4_torch.problem import Extent, Inputs, Problem, mask_key

MISSING = "nvidia-cutlass-dsl must be installed"
CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
HALF = (torch.bfloat16, torch.float16)


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "missing_packages", lambda exported: ["nvidia-cutlass-dsl"])


@st.composite
def calls_of_torch(draw: st.DrawFn) -> Problem:
    """Calls that a function of torch serves by a fused kernel: scaled_dot_product_attention, of dense tensors
    and of nested ones, with masks and causal_lower_right; varlen_attn with windows."""
    dtype = draw(st.sampled_from([*HALF, torch.float32]))
    B, Sq, Sk, Hk, group, D = (draw(st.integers(1, n)) for n in (4, 300, 300, 4, 4, 256))
    if draw(st.integers(0, 4)) == 0:
        D = draw(st.sampled_from([257, 320, 512]))
    Dv = D if draw(st.booleans()) else draw(st.integers(1, 256))
    more = {name: draw(st.booleans()) for name in ("backward", "deterministic")}
    more |= {"capability": draw(st.sampled_from(CAPABILITIES))}
    kind = draw(st.sampled_from(["plain", "top left", "bottom right", "mask", "varlen", "window"]))
    band = Band()
    if kind == "top left":
        band = Band(None, Sq - Sk)
    elif kind == "bottom right":
        # It promises nothing of rows that see no key.
        Sq, band = min(Sq, Sk), Band(None, 0)
    elif kind == "mask":
        name = draw(st.sampled_from(["bool", str(dtype).removeprefix("torch.")]))
        shape = "".join(draw(st.sampled_from("1.")) for _ in range(4))
        more |= {"mask": f"{name}:{shape}"}
        more |= {"dmask": name != "bool" and more["backward"] and draw(st.booleans())}
    elif kind == "varlen":
        more, band = more | {"varlen": True}, draw(st.sampled_from([Band(), Band(None, 0)]))
    elif kind == "window":
        dtype, D, more = draw(st.sampled_from(HALF)), min(D, 256), more | {"varlen": True}
        # torch takes right bounds as large as Sk for none, which is right only if Sq is not larger.
        largest = 300 if Sq <= Sk else Sk - 1
        Dv, band = D, Band(draw(st.integers(0, 300)), draw(st.integers(0, largest)))
    if kind in ("plain", "top left", "mask") and draw(st.integers(0, 4)) == 0:
        # Its grids have no more than 65535 batch entries, and it makes parts of more.
        B = draw(st.sampled_from([65535, 65536, 140000]))
    return problem_of(Extent(B, Sq, Sk, Hk * group, Hk), dtype, D, Dv, band, **more)


@pytest.mark.usefixtures("without_compiler")
@given(problem=calls_of_torch())
@settings(max_examples=examples(300, 3000))
def test_no_call_that_torch_fuses_is_left_to_plain_torch(problem: Problem) -> None:
    """torch's own backwards are deterministic where its switch says so."""
    with deterministic("error" if problem.spec.deterministic else "default"):
        assert MISSING in str(backends.reasons(problem))
        assert backends.choose(problem).name in ("sdpa", "efficient")


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("backward", [False, True])
def test_our_kernels_go_before_torchs(capability: tuple[int, int], backward: bool) -> None:
    extent = Extent(2, 512, 512, 8, 8)
    for dtype in (*HALF, torch.float32):
        problem = problem_of(extent, dtype, 64, 64, Band(), capability=capability, backward=backward)
        assert backends.first(problem).name.startswith("sm")


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("mode", ["default", "warn", "error"])
def test_deterministic_gradients_of_flash_attention_need_torchs_switch(mode: str) -> None:
    """Efficient attention, asked for one split, serves them without it, but not all windows."""
    extent = Extent(2, 64, 64, 4, 4)
    with deterministic(mode):
        for band, otherwise in ((Band(), "efficient"), (Band(9, 0), "efficient"), (Band(9, 5), "tiled")):
            for backward in (False, True):
                more = {"deterministic": True, "backward": backward}
                problem = problem_of(extent, torch.bfloat16, 64, 64, band, **more)
                expected = "sdpa" if mode == "error" or not backward else otherwise
                assert backends.choose(problem).name == expected
    why = sdpa.Sdpa().why_not(problem)
    assert why == ["its backward is deterministic under torch.use_deterministic_algorithms(True) only"]


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
    # A bound as large as the longest keys is taken for none.
    right = 0 if is_causal else -1 if window_size_right >= max_k else window_size_right

    assert (len(q) if ends_q is None else len(ends_q) - 1) <= batches.MOST

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
CORNERS = {"full": 0, "top left": 1, "bottom right": 2}


def seen_by_efficient(Sq: int, Sk: int, corner: int, window: int | None, backward: bool) -> Tensor:
    """Its masks. A window is the number of keys up to the diagonal; the backward counts from the top left."""
    i, j = torch.arange(Sq)[:, None], torch.arange(Sk)
    shift = Sk - Sq if corner == CORNERS["bottom right"] else 0
    seen = torch.ones(Sq, Sk, dtype=torch.bool)
    if corner:
        # It compares unsigned numbers, skips blocks of rows, and leaves their results as they are.
        assert shift >= 0
        seen &= j <= i + shift
    if window is not None:
        assert corner and window > 0
        seen &= j > i + (0 if backward else shift) - window
    assert seen.any(-1).all()
    return seen


def scores_of_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """(B, H, Sq, Sk) in base 2, in float32, before its masks, of (B, S, H, D)."""
    assert len(q) <= batches.MOST and q.shape[2] == k.shape[2] == v.shape[2] <= batches.MOST
    for x in (q, k, v):
        steps = [x.data_ptr(), *(step * x.element_size() for step in x.stride()[:-1])]
        assert x.stride(-1) == 1 and x.shape[-1] * x.element_size() % 16 == 0
        assert all(step % 16 == 0 for step in steps)
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * (scale * LOG2E)
    if bias is None:
        return scores
    assert bias.shape == scores.shape and bias.dtype == q.dtype
    assert bias.stride(-1) == 1 and bias.stride(-2) % 16 == 0
    return scores + bias.float() * LOG2E


def memory_efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    ends_q: None,
    ends_k: None,
    max_q: None,
    max_k: None,
    dropout_p: float,
    corner: int,
    log: bool,
    *,
    scale: float,
    window_size: int | None,
) -> tuple[Tensor, Tensor]:
    """aten._efficient_attention_forward: rows that see nothing have 0 and an lse of 0."""
    assert dropout_p == 0.0 and log and ends_q is ends_k is max_q is max_k is None
    scores = scores_of_efficient(q, k, v, bias, scale)
    hidden = ~seen_by_efficient(q.shape[1], k.shape[1], corner, window_size, backward=False)
    scores = scores.masked_fill(hidden, -torch.inf)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(nothing, 0.0) / LOG2E, -1).masked_fill(nothing, 0.0)
    lse = (scores / LOG2E).logsumexp(-1).masked_fill(nothing[..., 0], 0.0)
    rest = torch.full((*lse.shape[:2], -lse.shape[2] % 32), torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", weights, v.float()).to(q.dtype)
    return out, torch.cat([lse, rest], -1)


def memory_efficient_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    ends_q: None,
    ends_k: None,
    max_q: int,
    max_k: int,
    lse: Tensor,
    dropout_p: float,
    seed: Tensor,
    offset: Tensor,
    corner: int,
    bias_requires_grad: bool,
    *,
    scale: float,
    num_splits_key: int | None,
    window_size: int | None,
) -> tuple[Tensor | None, ...]:
    """aten._efficient_attention_backward, from the forward's out and lse."""
    assert dropout_p == 0.0 and ends_q is ends_k is None and (max_q, max_k) == (q.shape[1], k.shape[1])
    assert num_splits_key in (1, None) and out.is_contiguous() and dout.shape == out.shape
    assert lse.is_contiguous() and lse.shape == (len(q), q.shape[2], -(-max_q // 32) * 32)
    splits.append(num_splits_key)
    scores = scores_of_efficient(q, k, v, bias, scale)
    hidden = ~seen_by_efficient(max_q, max_k, corner, window_size, backward=True)
    scores = scores.masked_fill(hidden, -torch.inf)
    weights = torch.exp2(scores - lse[..., :max_q, None] * LOG2E)
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    ds = weights * (torch.einsum("bihd,bjhd->bhij", dout.float(), v.float()) - delta[..., None])
    dq = torch.einsum("bhij,bjhd->bihd", ds, k.float()) * scale
    dk = torch.einsum("bhij,bihd->bjhd", ds, q.float()) * scale
    dv = torch.einsum("bhij,bihd->bjhd", weights, dout.float())
    # What is hidden may be in a block that the kernel does not visit.
    dbias = ds.to(q.dtype).masked_fill(hidden, torch.nan) if bias_requires_grad and bias is not None else None
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dbias


splits: list[int | None] = []
"""What backwards have been asked for."""


@contextmanager
def stand_ins() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa, "_forward", flash)
        patch.setattr(sdpa, "_backward", flash_backward)
        patch.setattr(efficient, "_forward", memory_efficient)
        patch.setattr(efficient, "_backward", memory_efficient_backward)
        yield


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
    if right is not None and Sk <= right < Sq - 1:
        (why,) = sdpa.Sdpa().why_not(problem)
        assert f"right bound is {right}" in why
        return
    with stand_ins():
        inputs = Inputs(q, k, v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
        check(sdpa.Sdpa(), inputs, problem)


@pytest.mark.parametrize("kind", ["bool", "float", "learned", "large"])
@given(
    sizes=st.tuples(SIZES, SIZES),
    D=st.sampled_from([8, 20, 64]),
    shape=st.tuples(*(st.booleans() for _ in range(4))),
    corner=st.sampled_from(list(CORNERS)),
    dtype=st.sampled_from([torch.float32, *HALF]),
    is_deterministic=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(20, 300))
def test_efficient_attention_serves_masks(
    kind: str,
    sizes: tuple[int, int],
    D: int,
    shape: tuple[bool, ...],
    corner: str,
    dtype: torch.dtype,
    is_deterministic: bool,
    seed: int,
) -> None:
    """Floating masks hide keys by -inf and by the least number of their dtype, for all of some rows."""
    torch.manual_seed(seed)
    Sq, Sk = sizes
    B, Hk, group = 2, 2, 2
    q, k, v = tensors((B, Sq, Hk * group), (B, Sk, Hk), D, D, dtype)
    mask = a_mask(
        kind, [1 if one else n for one, n in zip(shape, (B, Hk * group, Sq, Sk), strict=True)], dtype, seed
    )
    band = {"full": Band(), "top left": Band(None, Sq - Sk), "bottom right": Band(None, 0)}[corner]
    more = {"mask": mask_key(mask), "dmask": kind == "learned", "deterministic": is_deterministic}
    problem = problem_of(Extent(B, Sq, Sk, Hk * group, Hk), dtype, D, D, band, **more)
    with stand_ins():
        check(efficient.Efficient(), Inputs(q, k, v, mask), problem, dmask=kind == "learned")
    assert splits.pop() == (1 if is_deterministic else None)


@pytest.mark.parametrize("call", BANDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_efficient_attention_serves_causal_and_windows(
    call: tuple[int, int, Band], dtype: torch.dtype
) -> None:
    check_band(*call, (20, 12, 2), dtype, is_deterministic=dtype == torch.float32)


@given(
    call=bands(50),
    D=st.sampled_from([8, 20, 64, 320]),
    Dv=st.sampled_from([8, 20, 64]),
    group=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, *HALF]),
    is_deterministic=st.booleans(),
)
@settings(max_examples=examples(5, 500))
def test_efficient_attention_serves_bands(
    call: tuple[int, int, Band], D: int, Dv: int, group: int, dtype: torch.dtype, is_deterministic: bool
) -> None:
    check_band(*call, (D, Dv, group), dtype, is_deterministic)


def check_band(
    Sq: int, Sk: int, band: Band, sizes: tuple[int, int, int], dtype: torch.dtype, is_deterministic: bool
) -> None:
    torch.manual_seed(0)
    D, Dv, group = sizes
    q, k, v = tensors((2, Sq, 2 * group), (2, Sk, 2), D, Dv, dtype)
    more = {"deterministic": is_deterministic, "sinks": "float32"}
    problem = problem_of(Extent(2, Sq, Sk, 2 * group, 2), dtype, D, Dv, band, **more)
    with stand_ins():
        check(efficient.Efficient(), Inputs(q, k, v, None, torch.randn(2 * group)), problem)
    assert splits.pop() == (1 if is_deterministic else None)


@given(
    ends=packed(), right=st.integers(-3, 0), left=st.one_of(st.none(), st.integers(0, 9)), full=st.booleans()
)
@settings(max_examples=examples(20, 200))
def test_efficient_attention_serves_packed_sequences(
    ends: tuple[Tensor, Tensor], right: int, left: int | None, full: bool
) -> None:
    """Sequences whose band hides everything run in plain torch."""
    torch.manual_seed(0)
    Sq, Sk = (int(x.diff().max()) for x in ends)
    if not (Sq and Sk):
        return
    q, k, v = tensors((int(ends[0][-1]), 2), (int(ends[1][-1]), 1), 20, 12, torch.float32)
    extent = Extent(len(ends[0]) - 1, Sq, Sk, 2, 1)
    problem = problem_of(extent, torch.float32, 20, 12, Band() if full else Band(left, right), varlen=True)
    with stand_ins():
        inputs = Inputs(q, k, v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
        check(efficient.Efficient(), inputs, problem)


@pytest.mark.parametrize("mask", ["", "bool", "shared", "each"])
def test_efficient_attention_serves_more_batch_entries_than_a_grid_has(
    mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MOST", 4)
    torch.manual_seed(0)
    B, Sq, Sk, Hq, D = 9, 7, 11, 4, 16
    q, k, v = tensors((B, Sq, Hq), (B, Sk, 2), D, D, torch.bfloat16)
    sinks, attn_mask, dmask = torch.randn(Hq), None, mask in ("shared", "each")
    if mask:
        kind = "learned" if dmask else "bool"
        attn_mask = a_mask(kind, [1 if mask == "shared" else B, 1, Sq, Sk], q.dtype, 0)
    more = {"mask": mask_key(attn_mask), "sinks": "float32"}
    problem = problem_of(Extent(B, Sq, Sk, Hq, 2), q.dtype, D, D, Band(None, 0), **more)
    with stand_ins():
        check(efficient.Efficient(), Inputs(q, k, v, attn_mask, sinks), problem, dmask=dmask)


def test_flash_attention_serves_more_batch_entries_than_a_grid_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MOST", 4)
    torch.manual_seed(0)
    q, k, v = tensors((9, 7, 4), (9, 11, 2), 16, 16, torch.bfloat16)
    problem = problem_of(Extent(9, 7, 11, 4, 2), q.dtype, 16, 16, Band(None, 0))
    with stand_ins():
        check(sdpa.Sdpa(), Inputs(q, k, v), problem)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (12, 0)])
@pytest.mark.parametrize("D", [192, 200, 224, 256])
def test_flash_attention_trains_widths_that_torch_does_not(D: int, capability: tuple[int, int]) -> None:
    """Heads of 193 to 224 columns become wider on GPUs with less shared memory."""
    torch.manual_seed(0)
    q, k, v = tensors((1, 9, 2), (1, 9, 2), D, D, torch.bfloat16)
    problem = problem_of(Extent(1, 9, 9, 2, 2), q.dtype, D, D, Band(), backward=True, capability=capability)
    widths = []

    def backward(dout: Tensor, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        widths.append(dout.shape[-1])
        return flash_backward(dout, *args, **options)

    with stand_ins(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa, "_backward", backward)
        check(sdpa.Sdpa(), Inputs(q, k, v), problem)
    assert widths == [D if capability == (8, 0) or not 192 < D <= 224 else 232]
