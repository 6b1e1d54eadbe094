"""A relative-position bias that is learned: `flex_attention` reads a table, and the table gets a gradient.

The task is to name the token that stood five places ago. Queries and keys know nothing of positions, so that
only the bias can find it: one number for each head and distance.

python examples/learned_bias.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flash4_torch

VOCABULARY, WIDTH, HEADS, REACH, LAG, S = 16, 32, 2, 16, 5, 64


class Block(nn.Module):
    """A transformer's block, causal, whose attention adds bias[h, distance] to each score."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.zeros(HEADS, REACH))  # distances from REACH - 1 on share an entry
        self.mask = flash4_torch.create_block_mask(causal, None, None, S, S, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        def add_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + self.bias[h, (q_idx - kv_idx).clamp(0, REACH - 1)]

        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (B, H, S, D)
        seen = flash4_torch.flex_attention(query, key, value, add_bias, self.mask)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def main() -> None:
    torch.manual_seed(0)
    block = Block()
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), block, nn.Linear(WIDTH, VOCABULARY))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(61):
        tokens = torch.randint(VOCABULARY, (8, S))
        logits = model(tokens)[:, LAG:]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, :-LAG].flatten())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            assert block.bias.grad is not None
            print(f"the bias has a gradient: {bool(block.bias.grad.abs().sum() > 0)}")
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    for h, distance in enumerate(block.bias.argmax(1).tolist()):
        print(f"head {h}: the largest bias is at distance {distance}")


if __name__ == "__main__":
    main()
