"""Calls of `attention_kvcache` over caches of any kind, and what they should give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import flash4_torch
from decode_calls import LAYOUTS, Cache, make_cache
from flash4_torch import testing
from flash4_torch.masks import Band
from flash4_torch.reference.attention import attention
from flash4_torch.reference.scoring import Scoring, working_dtype

FLOAT8 = torch.float8_e4m3fn


@dataclass(repr=False)
class CacheCall:
    """Sequences of new tokens, what the cache holds of each, and the call's options."""

    q: tuple[Tensor, ...]
    """(Sq, Hq, D) of each sequence."""
    k: tuple[Tensor, ...]
    """(Sk, Hk, D) of each, as the cache has it."""
    v: tuple[Tensor, ...]
    cache: Cache
    causal: bool | Tensor = False
    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    scales: tuple[Tensor, Tensor] | None = None
    """k_scale and v_scale."""
    padding: int = 0
    """Tokens of no sequence at the end of q."""
    options: dict[str, Any] = field(default_factory=dict)
    """num_splits, batch_invariant and bounds, which change no result by more than a rounding."""

    def __repr__(self) -> str:
        lengths = [(len(q), len(k)) for q, k in zip(self.q, self.k, strict=True)]
        cache = [(tuple(x.shape), x.stride(), x.dtype) for x in self.cache if x is not None]
        names = ("causal", "window", "scale", "softcap", "sinks", "scales", "padding", "options")
        said = {name: getattr(self, name) for name in names}
        return f"CacheCall({lengths}, {tuple(self.q[0].shape)}, {self.q[0].dtype}, {cache}, {said})"

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(k) for k in self.k], dtype=torch.int32)

    @property
    def cu_seqlens_q(self) -> Tensor:
        return torch.tensor([0, *(len(q) for q in self.q)]).cumsum(0).int()

    def packed_q(self) -> Tensor:
        q = torch.cat(self.q)
        return torch.cat([q, q.new_full((self.padding, *q.shape[1:]), math.nan)])

    def arguments(self) -> dict[str, Any]:
        """Keywords of the function, besides those about packed q."""
        keywords = dict(
            seqused_k=self.lengths,
            block_table=self.cache.table,
            causal=self.causal,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
            return_lse=True,
            **self.options,
        )
        if self.scales is not None:
            keywords |= {"k_scale": self.scales[0], "v_scale": self.scales[1]}
        return keywords

    def run(self, **more: Any) -> tuple[Tensor, Tensor]:
        """out (T, Hq, Dv) and lse (Hq, T) of the tokens that sequences have."""
        with testing.poisoned_memory():
            return self.run_unwatched(**more)

    def run_unwatched(self, **more: Any) -> tuple[Tensor, Tensor]:
        """`run` in whatever memory there is, which leaves the fast path free."""
        tokens = sum(map(len, self.q))
        out, lse = flash4_torch.attention_kvcache(
            self.packed_q(),
            *self.cache[:2],
            cu_seqlens_q=self.cu_seqlens_q,
            max_seqlen_q=max(map(len, self.q)) + 1,
            **(self.arguments() | more),
        )
        return out[:tokens], lse[:, :tokens]

    def truth(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The results by definition, in `dtype`."""
        sinks = None if self.sinks is None else self.sinks.to(dtype)
        scale = self.q[0].shape[-1] ** -0.5 if self.scale is None else self.scale
        found = []
        for b, tensors in enumerate(zip(self.q, self.k, self.v, strict=True)):
            q, k, v = (x[None].to(dtype) for x in tensors)
            if self.scales is not None:
                k, v = (x * s[b][:, None].to(dtype) for x, s in zip((k, v), self._scales(), strict=True))
            scoring = Scoring(scale, self.band(b), self.softcap)
            found.append(attention(q, k, v, scoring, sinks))
        return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], 1)

    def _scales(self) -> tuple[Tensor, ...]:
        assert self.scales is not None
        return tuple(s.expand(len(self.k), self.k[0].shape[1]) for s in self.scales)

    def band(self, b: int) -> Band:
        """What the tokens of sequence b see."""
        left, right = self.window
        if isinstance(self.causal, Tensor):
            return Band(left, 0 if self.causal[b] else None)
        return Band(left, 0 if self.causal else right)


def check_results(call: CacheCall, found: tuple[Tensor, Tensor]) -> None:
    """Requires results as good as those of the definition in q's dtype."""
    dtype = call.q[0].dtype
    exact, peer = (call.truth(dtype) for dtype in (torch.float64, dtype))
    assert found[0].dtype == dtype and found[1].dtype == working_dtype(dtype)
    for name, result, truth, plain in zip(("out", "lse"), found, exact, peer, strict=True):
        testing.assert_close_as_peer(result, truth, plain, what=name)


@st.composite
def cache_calls(
    draw: st.DrawFn,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    multiple: int = 1,
    most_keys: int = 90,
    float8: bool = True,
    page_sizes: Sequence[int | None] = (),
    most_tokens: int = 6,
    most_columns: int = 40,
) -> CacheCall:
    """Calls with any sequences, caches and options; head sizes are multiples of `multiple`."""
    dtype = draw(st.sampled_from(dtypes))
    Hk, group = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    D, Dv = (multiple * draw(st.integers(1, max(1, most_columns // multiple))) for _ in range(2))
    each = st.tuples(st.integers(0, most_tokens), st.integers(0, most_keys))
    lengths = draw(st.lists(each, min_size=1, max_size=4))
    if not any(Sq for Sq, _ in lengths):
        lengths[0] = (1, lengths[0][1])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    q, k, v = (
        tuple(torch.randn(n[which], H, size, generator=generator).to(dtype) for n in lengths)
        for which, H, size in ((0, Hk * group, D), (1, Hk, D), (1, Hk, Dv))
    )
    scales = None
    if float8 and draw(st.booleans()):
        k, v = (tuple((3 * x).to(FLOAT8) for x in parts) for parts in (k, v))
        shape = draw(st.sampled_from([(), (Hk,), (len(lengths), Hk)]))
        scales = torch.rand(shape, generator=generator) + 0.1, torch.rand(shape, generator=generator) + 0.1
    any_size = st.one_of(st.none(), st.sampled_from([1, 16, 32]), st.integers(1, 70))
    page_size = draw(st.sampled_from(page_sizes) if page_sizes else any_size)
    cache = make_cache(k, v, generator, draw(st.sampled_from(LAYOUTS)), page_size)
    causal: bool | Tensor = draw(st.booleans())
    left = draw(st.one_of(st.none(), st.integers(0, 50)))
    right = None if causal else draw(st.one_of(st.none(), st.integers(0, 9)))
    if draw(st.booleans()):
        causal, right = torch.rand(len(lengths), generator=generator) < 0.5, None
    options: dict[str, Any] = {"num_splits": draw(st.one_of(st.none(), st.integers(1, 20)))}
    if draw(st.booleans()):
        options["max_seqlen_k"] = max(max(Sk for _, Sk in lengths), 1)
    return CacheCall(
        q,
        k,
        v,
        cache,
        causal,
        (left, right),
        draw(st.sampled_from([None, 0.3, -0.2, 0.0])),
        draw(st.sampled_from([0.0, 5.0])),
        torch.randn(Hk * group, generator=generator) if draw(st.booleans()) else None,
        scales,
        draw(st.sampled_from([0, 3])),
        options,
    )
