"""KV caches: who serves a call, with what."""
