"""Dropout as a function of a seed and the position: read the RNG state first, and replay the same mask.

python examples/dropout_replay.py
"""

import torch

import flash4_torch
from flash4_torch import testing


def main() -> None:
    torch.manual_seed(0)
    B, S, H, D, p = 2, 100, 4, 32, 0.25
    q, k, v = torch.randn(3, B, S, H, D)

    state = testing.peek_rng_state(q.device)  # the state that the next call will use
    out = flash4_torch.attention(q, k, v, dropout_p=p)
    again = flash4_torch.attention(q, k, v, dropout_p=p)
    print(f"the next call draws another mask: {not torch.equal(out, again)}")

    keep = testing.dropout_mask(state, B, H, S, S, p)  # True where a weight is kept
    scores = torch.einsum("bqhd, bkhd -> bhqk", q, k) / D**0.5
    weights = scores.softmax(-1) * keep / (1 - p)
    by_hand = torch.einsum("bhqk, bkhd -> bqhd", weights, v)
    print(f"kept {keep.double().mean().item():.3f} of the weights, asked for {1 - p}")
    print(f"largest difference from plain torch with that mask: {(out - by_hand).abs().max().item():.0e}")


if __name__ == "__main__":
    main()
