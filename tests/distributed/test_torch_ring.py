"""torch's own ring runs our kernels where FLASH4 is active: it dispatches to operators that we serve.

On a CPU torch has no ring; so the operators of CUDA are put under the CPU's key, where they are plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from context_calls import mesh_of
from flash4_torch.distributed import shard_sequence, unshard_sequence
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
