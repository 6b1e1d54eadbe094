"""Sequences of different lengths, packed one after another: no padding is stored or computed.

python examples/packed_sequences.py
"""

import torch
from torch.nn.utils.rnn import pad_sequence

import flash4_torch


def main() -> None:
    torch.manual_seed(0)
    lengths, H, D = [700, 30, 250], 8, 64
    sequences = [torch.randn(n, 3, H, D) for n in lengths]

    # Packed: (T, H, D), and where each sequence ends.
    q, k, v = torch.cat(sequences).requires_grad_().unbind(1)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    packed = flash4_torch.attention_varlen(
        q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=700, max_seqlen_k=700, causal=True
    )
    packed.sum().backward()

    # Padded: (B, S, H, D), and a mask over the padding.
    pq, pk, pv = pad_sequence(sequences, batch_first=True).unbind(2)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    padded = flash4_torch.attention(pq, pk, pv, causal=True, attn_mask=mask[:, None, None])

    print(f"packed: {tuple(packed.shape)}, {len(packed)} rows")
    print(f"padded: {tuple(padded.shape)}, {mask.numel()} rows")
    for n, one, other in zip(lengths, packed.split(lengths), padded, strict=True):
        print(f"a sequence of {n}: largest difference {(one - other[:n]).abs().max().item():.0e}")


if __name__ == "__main__":
    main()
