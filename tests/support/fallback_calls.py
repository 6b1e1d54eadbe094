"""Calls that torch's fused CUDA kernels serve, by their backends, and the law that holds them to the
definition, for stand-ins on a CPU and for the kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from flash4_torch import testing
from flash4_torch.masks import Band
from flash4_torch.problem import Extent, Inputs, Problem, Saved, Spec
from flash4_torch.reference.attention import attention
from flash4_torch.reference.scoring import Scoring


@contextmanager
def deterministic(mode: str) -> Iterator[None]:
    """torch's switch, as torch.set_deterministic_debug_mode takes it: "default", "warn" or "error"."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(mode)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def problem_of(extent: Extent, dtype: torch.dtype, D: int, Dv: int, band: Band, **more: Any) -> Problem:
    """A call on a GPU."""
    group = extent.Hq // extent.Hk
    fields = {"varlen": False, "softcap": False, "mask": "", "dropout": False, "deterministic": False, **more}
    bounds = {"left": band.left is not None, "right": band.right is not None}
    fields = {"capability": (8, 0), **bounds, **fields}
    spec = Spec(device="cuda", dtype=dtype, D=D, Dv=Dv, group=group, **fields)
    return Problem(spec, extent, D**-0.5, band, 0.0, 0.1 if spec.dropout else 0.0)


def check(
    backend: Any,
    inputs: Inputs,
    problem: Problem,
    *,
    dmask: bool = False,
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Results and gradients against the definition, of each sequence.

    within: a context of what the backend does.
    """
    backward = problem._replace(spec=problem.spec._replace(backward=True, dmask=dmask))
    with within():
        assert backend.why_not(problem) == backend.why_not(backward) == []
        forward = backend.forward(inputs, problem)
        torch.manual_seed(1)
        dout = torch.randn_like(forward.out)
        saved = Saved(dout, None, forward.out, forward.lse, dmask, forward.lse_low)
        grads = backend.backward(saved, inputs, backward)

    def by_definition(dtype: torch.dtype) -> list[Tensor]:
        tensors = [x.to(dtype).detach().requires_grad_() for x in inputs[:3]]
        sinks = None if inputs.sinks is None else inputs.sinks.to(dtype).requires_grad_()
        mask, top = inputs.attn_mask, None
        if mask is not None and mask.is_floating_point():
            mask, top = _without_huge_numbers(mask.to(dtype).detach(), problem)
            mask.requires_grad_(dmask)
        scoring = Scoring(problem.scale, problem.band, 0.0, mask)
        if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
            out, lse = attention(*tensors, scoring, sinks)
            lse = lse if top is None else lse + top
        else:
            out, lse = torch.zeros_like(forward.out, dtype=dtype), torch.full_like(forward.lse, -torch.inf)
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
        asked += [] if sinks is None else [sinks]
        grads = list(torch.autograd.grad(out, asked, dout.to(dtype), allow_unused=True))
        if dmask and inputs.attn_mask is not None:
            grads[3] = grads[3].sum_to_size(inputs.attn_mask.shape)
        return [out, lse, *grads]

    exact, peer = by_definition(torch.float64), by_definition(inputs.q.dtype)
    names, ours = ["out", "lse", "dq", "dk", "dv"], [forward.out, forward.lse, *grads[:3]]
    for name, found in (("dmask", grads.dmask if dmask else None), ("dsinks", grads.dsinks)):
        if found is not None:
            names, ours = [*names, name], [*ours, found]
    assert len(ours) == len(exact)
    eps = torch.finfo(inputs.q.dtype).eps
    # Products of dout and v that cancel, in float32, and sums of them over rows.
    terms = problem.spec.Dv * (1 + problem.extent.Sq * problem.spec.group / 64)
    cancelled = 8 * torch.finfo(torch.float32).eps * terms**0.5
    for name, found, truth, plain in zip(names, ours, exact, peer, strict=True):
        noise = 0.0 if name in ("out", "lse") else 8 * eps * max(truth.abs().max().item(), 1.0) + cancelled
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
    top = mask.masked_fill(~torch.as_tensor(seen, device=mask.device), -torch.inf)
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


BANDS: list[tuple[int, int, Band]] = [
    (33, 50, Band(9, 0)),
    (33, 50, Band(None, 0)),
    (50, 33, Band(None, 0)),
    (50, 33, Band(9, 0)),
    (40, 40, Band(12, -5)),
    (20, 50, Band(40, -3)),
    (20, 50, Band(None, -30)),
    (20, 50, Band(36, -30)),
    (50, 20, Band(None, 30)),
    (50, 20, Band(-20, 30)),
    (1, 50, Band(8, 0)),
    (50, 1, Band(3, 0)),
    (30, 30, Band(40, 0)),
]
"""Sq, Sk and bands of efficient attention: right bounds of 0 or less, and causal aligned to the top left."""


@st.composite
def bands(draw: st.DrawFn, most: int) -> tuple[int, int, Band]:
    """Others, up to a length."""
    Sq, Sk = (draw(st.integers(1, most)) for _ in range(2))
    right = draw(st.one_of(st.just(0), st.just(Sq - Sk), st.integers(-Sq, 0)))
    band = Band(draw(st.one_of(st.none(), st.integers(-10, Sk))), right)
    assume(band.pairs(Sq, Sk) > 0)
    return Sq, Sk, band


def a_mask(kind: str, shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    """A mask that hides some keys: bool, or floating, with numbers that hide all of some rows."""
    shown = torch.rand(shape) < 0.7
    if kind == "bool":
        return shown
    hidden = torch.finfo(dtype).min if seed % 2 and kind != "learned" else -torch.inf
    mask = torch.randn(shape).to(dtype).masked_fill(~shown, hidden)
    if kind == "large":
        mask = mask.masked_fill(torch.rand((*shape[:3], 1)) < 0.5, torch.finfo(dtype).min)
    return mask
