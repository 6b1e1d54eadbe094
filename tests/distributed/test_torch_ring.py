"""torch's `context_parallel`: its ring runs our kernels where FLASH4 is active, and ours runs inside of it.

On a CPU torch has no ring; so the operators of CUDA are put under the CPU's key, where they are plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flash4_torch
from context_calls import mesh_of
from flash4_torch import errors
from flash4_torch.distributed import context_parallel_style, shard_sequence, unshard_sequence
from flash4_torch.integrations import torch_sdpa
from flash4_torch.testing import backends_used, reference
from ranks import ranks


def tensors() -> list[Tensor]:
    """q, k, v and dout, (B, S, H, D)."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 32, H, 16) for H in (4, 2, 2, 4)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def rings_of_torch() -> list[Tensor] | None:
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    mesh = mesh_of("ring 2")
    if mesh is None:
        return None
    kernels = {n: k for n, k in torch_sdpa.CUDA_KERNELS.items() if hasattr(torch.ops.aten, n)}
    activation = torch_sdpa.Activation({"CPU": kernels})
    try:
        q, k, v, dout = (shard_sequence(x, mesh).transpose(1, 2) for x in tensors())
        with backends_used() as used:
            found: Any = theirs._scaled_dot_product_ring_flash_attention(mesh, q, k, v, is_causal=True)
            out, lse = found[:2]
            # What aten's operator returns beside them.
            numbers = torch.empty(0, dtype=torch.int32)
            state = torch.zeros(2, dtype=torch.int64)
            gradients = theirs._scaled_dot_product_ring_flash_attention_backward(
                mesh, dout, q, k, v, out, lse, numbers, numbers, 16, 16, 0.0, True, state, state
            )
        assert sum(used.values()) >= 4
    finally:
        activation.remove()
    return [unshard_sequence(x.transpose(1, 2), mesh) for x in (out, *gradients[:3])]


def test_torchs_ring_calls_ours() -> None:
    """Causal and zigzag: with its default settings torch's ring serves no others."""
    q, k, v, dout = tensors()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, _ = reference(q, k, v, causal=True, dtype=torch.float32)
    expected = [out.detach(), *torch.autograd.grad(out, inputs, dout)]
    for found in ranks(4).run(rings_of_torch):
        if found is not None:
            for mine, right in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, right)


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = flash4_torch.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        found: Tensor = self.attention(x, x, x, need_weights=False, attn_mask=mask, is_causal=True)[0]
        return found


def sequence() -> Tensor:
    return torch.randn(2, 32, 16, generator=torch.Generator().manual_seed(0))


def ours_in_torchs_context() -> list[Tensor] | None:
    """torch divides the buffers, head and tail, which is a zigzag; attention is our ring."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = mesh_of("ring 2")
    if mesh is None:
        return None
    model, x = Causal(), sequence()
    parallelize_module(model, mesh, {"attention": context_parallel_style()})
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x}):
        out = model(x)
        out.sin().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    for gradient in gradients:
        torch.distributed.all_reduce(gradient, group=mesh.get_group())
    return [unshard_sequence(out, mesh), *gradients]


def test_our_ring_inside_of_torchs_context() -> None:
    model = Causal()
    out = model(sequence())
    out.sin().sum().backward()
    expected = [out.detach(), *(p.grad for p in model.parameters())]
    for found in ranks(4).run(ours_in_torchs_context):
        if found is not None:
            for mine, right in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, right)


def refusals() -> None:
    """Calls that would see one rank's tokens, in the order that torch has given them."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import context_parallel

    mesh = mesh_of("ring 2")
    if mesh is None:
        return
    model, x = Causal(), sequence()
    model(x)
    q = torch.randn(2, 16, 4, 8)
    shared = DTensor.from_local(q, mesh, [Shard(1)])
    layer = flash4_torch.integrations.transformers.attention_forward
    heads_first = [q.transpose(1, 2)] * 3
    calls: list[Callable[[], Any]] = [
        lambda: model(x),
        lambda: flash4_torch.scaled_dot_product_attention(*heads_first, is_causal=True),
        lambda: layer(model, *heads_first, None),
        lambda: flash4_torch.attention(shared, shared, shared),
    ]
    for call in calls:
        call()
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x}):
        for call in calls:
            with pytest.raises(
                errors.ArgumentError, match=r"part of a sequence, but .*parallelize_attention"
            ):
                call()
    for call in calls:
        call()


def test_what_torchs_context_does_not_see_is_refused() -> None:
    ranks(4).run(refusals)
