"""What a function may be written with: each spelling gives what torch gives for one score at a time."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

import flash4_torch
from flex_mods import Mod

H, SQ, SK = 2, 3, 4
T = torch.linspace(-1.2, 1.7, 20, dtype=torch.float64).view(4, 5).requires_grad_()
"""A captured tensor that learns."""


def without_gradients(score: Tensor, learned: Tensor) -> Tensor:
    with torch.no_grad():
        factor = score * 3 + learned
        with torch.enable_grad():
            inner = score * learned
    return factor + inner if torch.is_grad_enabled() else score


SPELLINGS: dict[str, Mod] = {
    "number minus score": lambda s, b, h, i, j: 2 - s,
    "rsub with alpha": lambda s, b, h, i, j: torch.rsub(s, i, alpha=3),
    "add with alpha": lambda s, b, h, i, j: torch.add(s, T[h, i], alpha=2),
    "sub with alpha": lambda s, b, h, i, j: torch.sub(s, i, alpha=2),
    "masked_fill": lambda s, b, h, i, j: s.masked_fill(i > j, -1.5),
    "clamp": lambda s, b, h, i, j: s.clamp(-0.4, 0.3),
    "clamp from below": lambda s, b, h, i, j: s.clamp(min=-0.1),
    "clamp from above": lambda s, b, h, i, j: s.clamp(max=0.1),
    "clamp_min": lambda s, b, h, i, j: s.clamp_min(0.1) + i.clamp_max(1),
    "clamp by tensors": lambda s, b, h, i, j: torch.clamp(s, T[0, h], T[3, i]),
    "square": lambda s, b, h, i, j: s.square() - T[h, j].square(),
    "mean of a row": lambda s, b, h, i, j: s * T[h].mean(),
    "sum of a row": lambda s, b, h, i, j: s + (T[i] * T[j]).sum(),
    "sums of a product": lambda s, b, h, i, j: (
        s + (T[h][None] * T[j][:, None]).sum(0, keepdim=True).exp().sum()
    ),
    "distance of rows without gradients": lambda s, b, h, i, j: (
        s * (-(T.detach()[i] - T.detach()[j]).pow(2).sum(-1).sqrt() / T[h, 4]).exp()
    ),
    "dot": lambda s, b, h, i, j: s + torch.dot(T[i], T[j]),
    "indexed twice": lambda s, b, h, i, j: s + T[h][i] + T[j][2] * T[i][-1],
    "indexed by a number": lambda s, b, h, i, j: s + T[3, h] + T[-1][j] + T[h, -2],
    "indexed behind dots": lambda s, b, h, i, j: s + T[..., i].sum() + T[:, j].mean(),
    "indexed by a sum": lambda s, b, h, i, j: s + T[(i + j) % 4, j - i],
    "a new dimension": lambda s, b, h, i, j: s + T.unsqueeze(0)[0, h, i],
    "a part": lambda s, b, h, i, j: s + T[1:3, ::2][h, i % 3],
    "a transpose": lambda s, b, h, i, j: s + T.t()[i, h],
    "F.embedding": lambda s, b, h, i, j: s + F.embedding(i, T).sum(),
    "take of what is computed": lambda s, b, h, i, j: s + T.exp().cumsum(1)[h, j],
    "captured tensors alone": lambda s, b, h, i, j: (
        s + T.sort(1)[0][h, j] + T.chunk(2, 1)[1][i, h] + T.max(0)[0][j]
    ),
    "where of numbers": lambda s, b, h, i, j: s + torch.where(i > j, 1.5, -0.5),
    "where of a row": lambda s, b, h, i, j: s + torch.where(T[h] > 0, T[i], 0.25).sum(),
    "comparison of dtypes": lambda s, b, h, i, j: torch.where(s * 3 > i, s, T[h, j]),
    "comparison with a fraction": lambda s, b, h, i, j: torch.where(i < 1.5, s, -s),
    "a distance beside a bound": lambda s, b, h, i, j: (
        torch.where((i - j).abs() <= h + 1, s, -s) + torch.where((j - i).abs() < 3, T[h, j], 0.25)
    ),
    "floor division": lambda s, b, h, i, j: s + (i - j) // 2 + torch.div(i - j, 2, rounding_mode="trunc"),
    "remainder": lambda s, b, h, i, j: s + (i - j) % 3 + torch.fmod(i - j, 3) + s % 0.3,
    "true division": lambda s, b, h, i, j: s / (i + 1) + i / (j + 2) + 1 / (s.abs() + 1),
    "bits": lambda s, b, h, i, j: s + (i << 1) + (j >> 1) + (i & 2) + (i | 4) + (i ^ j) + ~i,
    "logic": lambda s, b, h, i, j: torch.where((i > j) | ~(j > 1) & (h == 0) ^ (b == 0), s, 0.5 * s),
    "logical functions": lambda s, b, h, i, j: (
        s * torch.logical_or(i, j) * torch.logical_not(torch.logical_and(h, i))
    ),
    "powers": lambda s, b, h, i, j: s**2 + s.pow(3) - i**2,
    "power of two tensors": lambda s, b, h, i, j: (s.abs() + 0.5) ** T[h, j] + 2**s,
    "extrema": lambda s, b, h, i, j: torch.minimum(s, T[h, i]) + torch.maximum(s, T[h, j]),
    "atan2": lambda s, b, h, i, j: torch.atan2(s, T[h, i]),
    "narrow dtypes": lambda s, b, h, i, j: s + s.to(torch.bfloat16) + T[h, i].half(),
    "integers made of scores": lambda s, b, h, i, j: s + (s * 3).int() + T[i, (s > 0).long()],
    "gelu": lambda s, b, h, i, j: F.gelu(s) + F.gelu(s, approximate="tanh"),
    "activations": lambda s, b, h, i, j: (
        F.silu(s) + F.softplus(s) + F.leaky_relu(s) + F.elu(s) + F.hardtanh(s)
    ),
    "logsigmoid": lambda s, b, h, i, j: F.logsigmoid(s) + F.relu(s) + F.hardswish(s),
    "lerp": lambda s, b, h, i, j: torch.lerp(s, T[h, i], 0.3) + torch.addcmul(s, T[h, j], s, value=0.5),
    "detach": lambda s, b, h, i, j: s * s.detach() + T[h, i].detach() * T[h, j],
    "zeros and ones": lambda s, b, h, i, j: (
        s + torch.ones_like(s) * 2 + torch.zeros_like(T[h]).sum() + s.new_ones(())
    ),
    "rounded to decimals": lambda s, b, h, i, j: (
        torch.round(s, decimals=1) * T[h, i] + torch.round(T[h, j] * s.detach() * 99, decimals=-1) * s
    ),
    "a row of one number": lambda s, b, h, i, j: (
        s + T[:, 2:3][i].squeeze(-1) * T[:, 1:2][j].view(()) + T[:, :1][h].reshape(())
    ),
    "an embedding with padding": lambda s, b, h, i, j: s + F.embedding(i, T, padding_idx=0).sum(),
    "without gradients": lambda s, b, h, i, j: s * without_gradients(s, T[h, i]) + T[h, j],
    "a constant of torch": lambda s, b, h, i, j: s + torch.tensor(0.25) * i,
}


def definition(q: Tensor, k: Tensor, v: Tensor, score_mod: Mod) -> tuple[Tensor, Tensor]:
    """(out, lse), with the function called once for each score."""
    before = q @ k.transpose(-1, -2) * 0.7
    numbers = torch.arange(max(H, SQ, SK), dtype=torch.int32)
    scores = [
        score_mod(before[0, h, i, j], numbers[0], numbers[h], numbers[i], numbers[j])
        for h in range(H)
        for i in range(SQ)
        for j in range(SK)
    ]
    after = torch.stack(scores).view(1, H, SQ, SK)
    return after.softmax(-1) @ v, after.logsumexp(-1)


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_means_what_it_means_in_torch(name: str) -> None:
    shapes = (1, H, SQ, 5), (1, H, SK, 5), (1, H, SK, 3)
    q, k, v = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    theirs = definition(q, k, v, SPELLINGS[name])
    ours = flash4_torch.flex_attention(q, k, v, SPELLINGS[name], scale=0.7, return_lse=True)
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    upstream = [torch.randn_like(x) for x in theirs]
    found = torch.autograd.grad(ours, [q, k, v, T], upstream, **options)
    expected = torch.autograd.grad(theirs, [q, k, v, T], upstream, **options)
    for x, y in zip((*ours, *found), (*theirs, *expected), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "seen",
    [
        lambda b, h, i, j: i - j < sys.maxsize,
        lambda b, h, i, j: -(2**40) > j - i,
        lambda b, h, i, j: (i != 2**31) & (j >= -(2**35)) & (i > j),
        lambda b, h, i, j: (2**33 <= i) | (j == 2**32) | (j > 1),
    ],
)
def test_indices_beside_numbers_of_more_bits(seen: Mod) -> None:
    """Positions are int32 here, int64 in torch."""
    q, k, v = (torch.randn(1, H, S, 5, dtype=torch.float64) for S in (SQ, SK, SK))
    found = flash4_torch.flex_attention(q, k, v, lambda s, *at: torch.where(seen(*at), s, -s))
    mask = create_mask(seen, 1, 1, SQ, SK, device="cpu")
    scores = q @ k.transpose(-1, -2) * 5**-0.5
    expected = torch.where(mask, scores, -scores).softmax(-1) @ v
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_float64_beside_other_scores(dtype: torch.dtype) -> None:
    """NumPy makes such numbers; the gradient of a score has the score's dtype."""
    q, k, v = (torch.randn(1, H, S, 8, dtype=dtype).requires_grad_() for S in (SQ, SK, SK))
    slopes = torch.linspace(0.1, 0.5, H, dtype=torch.float64).requires_grad_()

    def results(leaves: list[Tensor], exact: bool) -> tuple[Tensor, ...]:
        q, k, v, slopes = leaves
        if exact:
            bias = slopes[:, None, None] * torch.arange(SK)
            out = (q @ k.transpose(-1, -2) * 8**-0.5 + bias).softmax(-1) @ v
        else:
            out = flash4_torch.flex_attention(q, k, v, lambda s, b, h, i, j: s + slopes[h] * j)
        return out, *torch.autograd.grad(out.sum(), leaves)

    own = results([q, k, v, slopes], exact=False)
    truth = results([x.detach().double().requires_grad_() for x in (q, k, v, slopes)], exact=True)
    for x, y in zip(own, truth, strict=True):
        close = {"rtol": 2e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(x.double(), y, **close)
