"""A decoder trained on one long sequence that several ranks share: each holds a part of its tokens.

python examples/context_parallel.py                                    # two CPU processes, 64 tokens
torchrun --nproc-per-node 2 examples/context_parallel.py               # a process for each GPU, 131072 tokens

A word fills the first quarter of a sequence, and its last quarter has to name it, far away.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from flash4_torch.distributed import context_parallel_attention, shard_sequence

VOCABULARY = 16


class Sizes(NamedTuple):
    """Sequences, their length, and sizes of the model."""

    B: int
    S: int
    E: int
    H: int
    Hk: int
    layers: int


SMALL = Sizes(B=64, S=64, E=32, H=4, Hk=2, layers=2)
LARGE = Sizes(B=1, S=131072, E=2048, H=16, Hk=4, layers=4)


class Layer(nn.Module):
    """Attention over the tokens of all ranks, and an MLP; Hk KV heads serve H query heads."""

    def __init__(self, sizes: Sizes, mesh: DeviceMesh):
        super().__init__()
        self.D, self.mesh = sizes.E // sizes.H, mesh
        self.widths = [sizes.E, self.D * sizes.Hk, self.D * sizes.Hk]
        self.project, self.out = nn.Linear(sizes.E, sum(self.widths)), nn.Linear(sizes.E, sizes.E)
        self.mlp = nn.Sequential(nn.Linear(sizes.E, 4 * sizes.E), nn.GELU(), nn.Linear(4 * sizes.E, sizes.E))
        self.before, self.between = nn.LayerNorm(sizes.E), nn.LayerNorm(sizes.E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.D)) for y in self.project(self.before(x)).split(self.widths, -1))
        x = x + self.out(context_parallel_attention(q, k, v, self.mesh, causal=True).flatten(2))
        return x + self.mlp(self.between(x))


class Decoder(nn.Module):
    """Everything but attention sees this rank's tokens alone; `positions` are theirs."""

    def __init__(self, sizes: Sizes, mesh: DeviceMesh):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, sizes.E), nn.Embedding(sizes.S, sizes.E)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.layers = nn.ModuleList([Layer(sizes, mesh) for _ in range(sizes.layers)])
        self.norm, self.head = nn.LayerNorm(sizes.E), nn.Linear(sizes.E, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            # Activations of a layer are computed again in the backward, attention over all ranks included.
            x = checkpoint(layer, x, use_reentrant=False)
        # FSDP warns of views.
        return self.head(self.norm(x)).contiguous().clone()


def train(sizes: Sizes, steps: int, device: str) -> list[float]:
    """Losses of the steps, means over the tokens of all ranks."""
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("ring",))
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Decoder(sizes, mesh).to(device, dtype)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)  # its gradients are means over the ranks
    rate = 3e-3 if sizes.E == SMALL.E else 5e-5
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=min(10, steps))
    generator, losses = torch.Generator().manual_seed(1), []
    for step in range(steps):
        started = time.perf_counter()
        words = torch.randint(1, VOCABULARY, (sizes.B, 1), generator=generator).repeat(1, sizes.S)
        tokens, labels = words.clone(), words
        tokens[:, sizes.S // 4 :] = 0
        labels[:, : sizes.S * 3 // 4] = -100
        whole = tokens, torch.arange(sizes.S).expand(sizes.B, -1), labels
        mine, positions, labels = (shard_sequence(x.to(device), mesh) for x in whole)
        logits = model(mine, positions).float()
        count = sizes.B * (sizes.S // 4) / mesh.size()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        mean = loss.detach() / mesh.size()
        dist.all_reduce(mean)
        losses.append(mean.item())
        if dist.get_rank() == 0 and step % max(1, steps // 5) == 0:
            seconds = time.perf_counter() - started
            print(
                f"step {step}: loss {losses[-1]:.3f}, {sizes.B * sizes.S / seconds:.0f} tokens/s", flush=True
            )
    return losses


def run_rank(rank: int, ranks: int, steps: int, folder: Path) -> None:
    """One CPU process of several on this machine."""
    torch.set_num_threads(1)
    store = f"file://{folder / f'store{ranks}'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    losses = train(SMALL, steps, "cpu")
    if rank == 0:
        torch.save(losses, folder / f"losses{ranks}.pt")
    dist.destroy_process_group()
    # FSDP keeps gloo's threads, which abort if they let go of a tensor when the interpreter has ended.
    time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=LARGE.S, help="length of the sequence, under torchrun")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    if dist.is_torchelastic_launched():
        torch.cuda.set_device(dist.get_node_local_rank())
        dist.init_process_group("nccl")
        train(LARGE._replace(S=options.tokens), options.steps, "cuda")
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as name:
        losses = {}
        for ranks in (1, 2):
            print(f"{ranks} process{'es' if ranks > 1 else ''}:")
            torch.multiprocessing.spawn(run_rank, (ranks, options.steps, Path(name)), nprocs=ranks)
            losses[ranks] = torch.load(Path(name) / f"losses{ranks}.pt")
    first = [abs(a - b) for a, b in zip(losses[1][:5], losses[2][:5], strict=True)]
    print(f"losses of the first steps: largest difference {max(first):.0e}")


if __name__ == "__main__":
    main()
