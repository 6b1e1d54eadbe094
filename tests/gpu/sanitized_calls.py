"""Small calls of every family of kernels, for compute-sanitizer: python sanitized_calls.py FAMILY.

Sizes leave incomplete tiles, and PYTORCH_NO_CUDA_MEMORY_CACHING gives each tensor an allocation of its own,
so that a step over its end is seen. `test_cuda_sanitizer.py` runs this file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flash4_torch
from flash4_torch import env
from flash4_torch.flex.block_mask import create_block_mask
from flash4_torch.testing import backends_used

torch.manual_seed(0)


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()


def step(
    D: int,
    sizes: tuple[int, int, int, int, int] = (2, 150, 330, 4, 2),
    dtype: torch.dtype = torch.bfloat16,
    mask: str = "",
    **rules: Any,
) -> None:
    """A forward, and gradients of everything that can have some."""
    B, Sq, Sk, Hq, Hk = sizes
    inputs = [rand(B, Sq, Hq, D, dtype=dtype), *(rand(B, Sk, Hk, D, dtype=dtype) for _ in range(2))]
    if mask == "padding":
        rules["attn_mask"] = torch.arange(Sk, device="cuda") < torch.tensor(
            [[[[Sk]]], [[[70]]]], device="cuda"
        )
    if mask == "float":
        rules["attn_mask"] = rand(1, Hq, Sq, Sk, dtype=dtype)
        inputs.append(rules["attn_mask"])
    out = flash4_torch.attention(*inputs[:3], **rules)
    torch.autograd.grad(out.float().square().sum(), inputs)


def packed(D: int, **rules: Any) -> None:
    lengths = torch.tensor([0, 70, 70, 300], dtype=torch.int32, device="cuda")
    q, k, v = (rand(300, H, D) for H in (4, 2, 2))
    rules |= {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "max_seqlen_q": 230, "max_seqlen_k": 230}
    out = flash4_torch.attention_varlen(q, k, v, **rules)
    torch.autograd.grad(out.float().square().sum(), (q, k, v))


def own_kernels() -> None:
    step(64)
    step(128, causal=True)
    step(256, causal=True)
    step(128, window=(100, 0), softcap=20.0)
    step(64, dropout_p=0.2, mask="padding")
    step(128, mask="float")
    step(128, causal=True, deterministic=True)
    step(192, sinks=rand(4))
    packed(128, causal=True)


def sm80() -> None:
    with_backend("sm80", own_kernels)


def float32() -> None:
    for name in ("highest", "high"):
        torch.set_float32_matmul_precision(name)
        for D in (64, 128, 192):
            step(D, dtype=torch.float32, causal=True)
        step(64, dtype=torch.float32, dropout_p=0.2, mask="padding")
        step(128, dtype=torch.float32, mask="float")
    step(320, causal=True)
    step(512, mask="padding")


def weights() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for p, average in ((0.0, True), (0.2, True), (0.0, False)):
            model = torch.nn.Sequential(torch.nn.MultiheadAttention(192, 3, dropout=p, batch_first=True))
            flash4_torch.replace_attention(model.to("cuda", dtype))
            x, hidden = rand(2, 150, 192, dtype=dtype), torch.zeros(2, 150, dtype=torch.bool, device="cuda")
            hidden[1, 90:] = True
            for _ in range(2):  # the second call takes the fast path
                out, shown = model[0](x, x, x, key_padding_mask=hidden, average_attn_weights=average)
                torch.autograd.grad(out.float().sum() + shown.float().square().sum(), x)


def decode() -> None:
    for Hq, Hk, D in ((32, 8, 128), (128, 1, 128), (16, 8, 64), (8, 4, 256)):
        for kind in ("dense", "pages of 16", "pages of 64", "float8", "invariant"):
            caching(Hq, Hk, D, kind)
    parts = [
        (torch.randn(7, 4, 64, device="cuda").bfloat16(), torch.randn(4, 7, device="cuda")) for _ in range(3)
    ]
    flash4_torch.kvcache.merge_states([out for out, _ in parts], [lse for _, lse in parts])


def caching(Hq: int, Hk: int, D: int, kind: str) -> None:
    """A few new tokens of three sequences, appended to a cache, and their attention."""
    if kind == "float8" and D > 128:
        return
    dtype = torch.float8_e4m3fn if kind == "float8" else torch.bfloat16
    page = {"pages of 16": 16, "pages of 64": 64, "float8": 16}.get(kind, 0)
    lengths = torch.tensor([4, 700, 5000], dtype=torch.int32, device="cuda")
    rules: dict[str, Any] = {"batch_invariant": kind == "invariant"}
    if page:
        blocks = 5000 // page + 2
        table = torch.randperm(3 * blocks, device="cuda").view(3, blocks).int()
        rules["block_table"] = table
        shape = (3 * blocks, page, Hk, D)
    else:
        shape = (3, 5003, Hk, D)
    k_cache, v_cache = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
    for Sq in (1, 3):
        new = [torch.randn(3, Sq, Hk, D, device="cuda").bfloat16() for _ in range(2)]
        if page:
            flash4_torch.append_kvcache(
                *new, k_cache, v_cache, block_table=rules["block_table"], seqused_k=lengths - Sq
            )
        q = torch.randn(3, Sq, Hq, D, device="cuda").bfloat16()
        flash4_torch.attention_kvcache(q, k_cache, v_cache, seqused_k=lengths, causal=True, **rules)


def prefill() -> None:
    """150 new tokens of three sequences over pages, whose heads lie side by side or far apart."""
    lengths = torch.tensor([150, 700, 2000], dtype=torch.int32, device="cuda")
    for D, page, heads_first in (
        (128, 16, False),
        (64, 16, True),
        (96, 48, True),
        (256, 16, False),
        (192, 64, True),
    ):
        blocks = -(-2000 // page)
        table = torch.randperm(3 * blocks, device="cuda").view(3, blocks).int()
        shape = (3 * blocks, 2, page, D) if heads_first else (3 * blocks, page, 2, D)
        k_cache, v_cache = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
        if heads_first:
            k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        q = torch.randn(3, 150, 8, D, device="cuda").bfloat16()
        flash4_torch.attention_kvcache(q, k_cache, v_cache, block_table=table, seqused_k=lengths, causal=True)


def flex() -> None:
    B, H, S, D = 1, 4, 500, 64
    slopes = torch.rand(H, device="cuda", requires_grad=True)
    table = torch.randn(H, 2 * S, device="cuda", requires_grad=True)
    document = torch.arange(S, device="cuda") // 130
    mods = {
        "ramp": lambda s, b, h, i, j: s - slopes[h].detach() * (i - j),
        "learned slopes": lambda s, b, h, i, j: s + slopes[h] * (j - i),
        "table": lambda s, b, h, i, j: s + table[h, i - j + S],
        "soft": lambda s, b, h, i, j: torch.tanh(s / 20 + 0.1) * 20,
    }
    masks = {
        "causal": lambda b, h, i, j: i >= j,
        "documents": lambda b, h, i, j: (i >= j) & (document[i] == document[j]),
        "dilated": lambda b, h, i, j: (i - j) % 3 == 0,
    }
    learned = {"learned slopes": slopes, "table": table}
    for D in (64, 128):
        q, k, v = (rand(B, H, S, D) for _ in range(3))
        for name, mod in mods.items():
            inputs = [q, k, v, *([learned[name]] if name in learned else [])]
            out = flash4_torch.flex_attention(
                q, k, v, score_mod=mod, block_mask=block_mask(masks["causal"], S)
            )
            torch.autograd.grad(out.float().square().sum(), inputs)
        for mask in masks.values():
            out = flash4_torch.flex_attention(q, k, v, block_mask=block_mask(mask, S))
            torch.autograd.grad(out.float().square().sum(), (q, k, v))


def block_mask(mask: Callable[..., Tensor], S: int) -> Any:
    return create_block_mask(mask, None, None, S, S, device="cuda")


def with_backend(name: str, run: Callable[[], None]) -> None:
    os.environ[env.BACKEND.name] = name
    try:
        run()
    finally:
        del os.environ[env.BACKEND.name]


FAMILIES = {f.__name__: f for f in (own_kernels, sm80, float32, weights, decode, prefill, flex)}

if __name__ == "__main__":
    (family,) = sys.argv[1:]
    with backends_used() as used:
        FAMILIES[family]()
    torch.cuda.synchronize()
    print(f"{family}: served by {', '.join(sorted({name for _, name in used}))}")
