"""Attention of few query tokens over a KV cache, paged or dense, with the keys split among CTAs."""
