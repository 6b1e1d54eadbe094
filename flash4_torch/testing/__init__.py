"""What our tests use and what users may use to test us: exact results, a tolerance, poison, and who served.

exact, _ = testing.reference(q, k, v, causal=True)
peer, _ = testing.reference(q, k, v, causal=True, dtype=q.dtype)
testing.assert_close_as_peer(flash4_torch.attention(q, k, v, causal=True), exact, peer)
"""

from .dropout import dropout_mask, peek_rng_state
from .observe import backends_used, poisoned_memory
from .tolerance import assert_close_as_peer, reference

__all__ = [
    "assert_close_as_peer",
    "backends_used",
    "dropout_mask",
    "peek_rng_state",
    "poisoned_memory",
    "reference",
]
