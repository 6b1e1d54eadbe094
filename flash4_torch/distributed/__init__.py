"""Context parallelism: one sequence over many GPUs, or CPU processes, on torch.distributed.

    mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("ring", "ulysses"))
    tokens, positions = (shard_sequence(x, mesh) for x in (tokens, positions))       # (B, S / 8)
    out = context_parallel_attention(q, k, v, mesh, causal=True)                     # (B, S / 8, Hq, D)

The same code runs over NCCL and over gloo.
"""

from .attention import context_parallel_attention, ring_attention, ulysses_attention
from .layout import shard_documents, shard_sequence, unshard_documents, unshard_sequence
from .modules import context_parallel_style, parallelize_attention

__all__ = [
    "context_parallel_attention",
    "context_parallel_style",
    "parallelize_attention",
    "ring_attention",
    "shard_documents",
    "shard_sequence",
    "ulysses_attention",
    "unshard_documents",
    "unshard_sequence",
]
