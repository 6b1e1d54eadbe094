"""flex_attention's repeated calls on a GPU of ours: new data, other streams, a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flash4_torch
from flash4_torch import backends, testing
from flash4_torch.flex.block_mask import create_block_mask
from flash4_torch.ops import flex as ops
from own_gpu import needs_ours

pytestmark = needs_ours

H, S = 4, 1024
MASKS: dict[str, Callable[..., Tensor] | None] = {
    "none": None,
    "band": lambda b, h, i, j: i >= j,
    "segments": lambda b, h, i, j: (i // 512 == j // 512) & (i >= j),
    "bounds": lambda b, h, i, j: (i // 100 == j // 100) & (i >= j),
    "bits": lambda b, h, i, j: (i - j) % 3 != 0,
    "tables": lambda b, h, i, j: (i - j + h) % 3 != 0,
}


def new(*shape: int, **kwargs: Any) -> Tensor:
    return torch.randn(shape, device="cuda", **kwargs)


class Calls:
    """Calls with one block mask, whose score_mod learns."""

    def __init__(self, name: str):
        mask_mod, of_heads = MASKS[name], H if name == "tables" else None
        self.mask = None
        if mask_mod is not None:
            self.mask = create_block_mask(mask_mod, None, of_heads, S, S, "cuda")
        self.has_score = name in ("none", "bounds", "tables")
        self.renew()

    def renew(self) -> None:
        self.tensors = [new(1, H, S, 64, dtype=torch.bfloat16).requires_grad_() for _ in "qkv"]
        self.bias = new(H, S, requires_grad=self.has_score)

    def forward(self) -> tuple[Tensor, Tensor]:
        bias = self.bias
        score_mod = (lambda s, b, h, i, j: s + bias[h, j]) if self.has_score else None
        return flash4_torch.flex_attention(*self.tensors, score_mod, self.mask, return_lse=True)

    def step(self) -> list[Tensor]:
        results = self.forward()
        wanted = [*self.tensors, *([self.bias] if self.has_score else [])]
        grads = torch.autograd.grad(results[0].float().square().sum(), wanted)
        return [x.detach() for x in (*results, *grads)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Results bit for bit; gradients are sums in any order."""
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert x.stride() == y.stride()
        atol = 0.01 * float(y.float().abs().amax()) if i > 1 else 0.0
        torch.testing.assert_close(x, y, rtol=0.0, atol=atol)


@pytest.mark.parametrize("name", MASKS)
def test_repeated_calls_give_what_the_slow_path_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(name)
    for _ in range(3):
        calls.step()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                calls.renew()
                found = calls.step()
                with backends.excluding("nothing"):
                    assert_same(found, calls.step())
        torch.cuda.synchronize()
    calls.step()
    # The operators' implementation is not reached.
    monkeypatch.setattr(ops, "backends", None)
    calls.step()


def test_a_graph_replays_with_new_data() -> None:
    calls = Calls("none")
    with torch.no_grad():
        for _ in range(3):
            calls.forward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = calls.forward()
        for _ in range(2):
            for x in (*calls.tensors, calls.bias):
                x.normal_()
            graph.replay()
            assert_same([out, lse], list(calls.forward()))


def test_a_graph_replays_with_another_mask() -> None:
    """Lists and captured tensors are read in each replay."""
    document, S = torch.arange(S_OF_DOCUMENTS, device="cuda") // 300, S_OF_DOCUMENTS
    masks = [lambda b, h, i, j: (document[i] == document[j]) & ((i - j) % 3 != 1)]
    mask = create_block_mask(masks[0], None, None, S, S, "cuda")
    qkv = [new(1, H, S, 64).bfloat16() for _ in "qkv"]
    with torch.no_grad():
        for _ in range(3):
            flash4_torch.flex_attention(*qkv, block_mask=mask)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = flash4_torch.flex_attention(*qkv, block_mask=mask, return_lse=True)
        for length in (170, 600):
            document.copy_(torch.arange(S, device="cuda") // length)
            other = create_block_mask(masks[0], None, None, S, S, "cuda")
            for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
                getattr(mask, name).copy_(getattr(other, name))
            out.fill_(torch.nan)
            graph.replay()
            exact, peer = (by_definition(*qkv, (None, masks[0]), t) for t in (torch.float64, torch.bfloat16))
            for found, truth, plain in zip((out, lse), exact, peer, strict=True):
                testing.assert_close_as_peer(found, truth, plain)


S_OF_DOCUMENTS = 1500


@pytest.mark.parametrize("is_causal", [True, False])
def test_masks_that_are_made_again(is_causal: bool) -> None:
    """Kernels evaluate them from the second one of a function on: documents' rows, and bits of others."""
    torch.manual_seed(0)
    S = S_OF_DOCUMENTS
    qkv = [new(1, H, S, 64).bfloat16().requires_grad_() for _ in "qkv"]
    for _ in range(4):
        document = torch.randint(0, 6, (S,), device="cuda").sort().values

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor, document: Tensor = document) -> Tensor:
            return (document[i] == document[j]) & (i >= j if is_causal else (i - j) % 3 != 1)

        mask = create_block_mask(mask_mod, None, None, S, S, "cuda")
        results = [
            *flash4_torch.flex_attention(*qkv, block_mask=mask, return_lse=True),
            *by_definition(*qkv, (None, mask_mod), torch.float64),
            *by_definition(*qkv, (None, mask_mod), torch.bfloat16),
        ]
        dout = torch.randn_like(results[0])
        grads = [torch.autograd.grad(out, qkv, dout.to(out.dtype)) for out in results[::2]]
        testing.assert_close_as_peer(results[0], results[2], results[4])
        testing.assert_close_as_peer(results[1], results[3], results[5])
        for found, truth, plain in zip(*grads, strict=True):
            testing.assert_close_as_peer(found, truth, plain)


FEW: dict[str, tuple[Callable[..., Tensor] | None, Callable[..., Tensor] | None]] = {
    "ramp": (lambda s, b, h, i, j: s - (h + 1) * (i + LONG - j) * 0.01, lambda b, h, i, j: j <= i + LONG),
    "functions": (lambda s, b, h, i, j: 9 * torch.tanh((s + h) / 9), None),
    "lists": (None, lambda b, h, i, j: (j - 3 * i + h) % 3 != 0),
    "bounds": (None, lambda b, h, i, j: (j >= 40 * i) & (j < 3000 + i)),
}
"""Functions of few queries next to many keys, whose keys are split."""
LONG = 3900


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, mods: tuple[Any, Any], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(out, lse) of (B, H, S, D), computed in `dtype`."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.to(dtype), *(x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    sizes = (*q.shape[:3], k.shape[2])
    places = [
        torch.arange(n, device=q.device).view([-1 if d == e else 1 for e in range(4)])
        for d, n in enumerate(sizes)
    ]
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    score_mod, mask_mod = mods
    if score_mod is not None:
        scores = score_mod(scores, *places).to(dtype)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*places), -torch.inf)
    return scores.softmax(3) @ v, scores.logsumexp(3)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("Sq, group, D", [(1, 4, 128), (9, 1, 64), (60, 8, 64)])
def test_few_queries_are_right(name: str, Sq: int, group: int, D: int) -> None:
    torch.manual_seed(0)
    q = new(2, 2 * group, Sq, D).bfloat16()
    k, v = (new(2, 2, LONG + Sq, D).bfloat16() for _ in "kv")
    score_mod, mask_mod = FEW[name]
    of_heads = 2 * group if name == "lists" else None
    mask = mask_mod and create_block_mask(mask_mod, None, of_heads, Sq, LONG + Sq, "cuda")
    exact, peer = (by_definition(q, k, v, FEW[name], t) for t in (torch.float64, torch.bfloat16))
    for _ in range(3):
        results = flash4_torch.flex_attention(q, k, v, score_mod, mask, enable_gqa=group > 1, return_lse=True)
        for found, truth, plain in zip(results, exact, peer, strict=True):
            testing.assert_close_as_peer(found, truth, plain)
