"""Description of an attention call over a KV cache, as `problem` describes one over plain tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .masks import Band


class CacheSpec(NamedTuple):
    """Properties that a kernel is specialised on, or that a backend may refuse."""

    device: str
    dtype: torch.dtype
    cache_dtype: torch.dtype
    D: int
    Dv: int
    group: int
    """Query heads per KV head, Hq // Hk."""
    paged: bool
    """Whether a block table says where keys are; otherwise entry b of the cache is sequence b."""
    ragged: bool
    """Whether cu_seqlens_q says where tokens are; otherwise sequences have equally many."""
    lengths: bool
    """Whether seqused_k says how many keys there are; otherwise a sequence fills its entry of the cache."""
    causal_flags: bool
    """Whether a tensor says which sequences are causal."""
    softcap: bool
    sinks: str
    """'' without sinks, else their dtype."""
    batch_invariant: bool
    aligned: bool
    """Whether rows of the cache are contiguous and begin at multiples of 16 bytes."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability of a CUDA device."""


class CacheExtent(NamedTuple):
    """Sizes of a call. Lengths are bounds: those of sequences are known to the device alone."""

    B: int
    T: int
    """Tokens of all sequences."""
    max_seqlen_q: int
    max_seqlen_k: int
    Hq: int
    Hk: int
    page_size: int
    """Keys of a page; without a block table, of a sequence's entry."""


class CacheOptions(NamedTuple):
    """Numbers and flags of a call, checked and completed: the last arguments of the operators' schemas."""

    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    num_splits: int = 0
    """0: the backend's choice."""
    batch_invariant: bool = False


class CacheProblem(NamedTuple):
    """Everything about a call except its tensors' data."""

    spec: CacheSpec
    extent: CacheExtent
    scale: float
    band: Band
    softcap: float
    num_splits: int

    def of_sizes(self, extent: CacheExtent) -> CacheProblem:
        """The same call with other sizes."""
        return CacheProblem(self.spec, extent, *self[2:])

    def __str__(self) -> str:
        s, e = self.spec, self.extent
        features = [
            name
            for name, on in {
                f"pages of {e.page_size}": s.paged,
                f"cache {s.cache_dtype}": s.cache_dtype != s.dtype,
                f"window=({self.band.left}, {self.band.right})": not self.band.is_full,
                "causal by sequence": s.causal_flags,
                f"softcap={self.softcap}": s.softcap,
                f"sinks {s.sinks}": bool(s.sinks),
                "batch_invariant": s.batch_invariant,
            }.items()
            if on
        ]
        sizes = f"B={e.B} T={e.T} Sq<={e.max_seqlen_q} Sk<={e.max_seqlen_k} Hq={e.Hq} Hk={e.Hk}"
        head = f"attention_kvcache {sizes} D={s.D} Dv={s.Dv} {s.dtype} on {s.device}"
        return " ".join([head, *features])


class CacheInputs(NamedTuple):
    """The tensors of a call; `ops.kvcache` documents their shapes."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    seqused_k: Tensor | None = None
    causal: Tensor | None = None
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
