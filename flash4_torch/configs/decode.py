"""Tiles and splits of the decode kernel, on every architecture; none of these numbers was measured on a GPU.

Decoding is bound by HBM, so what counts is how many bytes of K and V an SM has in flight: Little's law asks
for 35 KB (4.5 TB/s over 132 SMs, a microsecond of latency).
"""

from __future__ import annotations

from typing import NamedTuple

from .types import Features


class DecodeForm(NamedTuple):
    """The tensors that a launch of the decode kernel has, and how K and V are stored."""

    paged: bool
    """Whether a block table says where keys are; otherwise sequence b has entry b of the cache."""
    splits: bool
    """Whether keys may be split among CTAs."""
    ragged: bool
    """Whether cu_seqlens_q says which tokens a sequence has; otherwise all have max_seqlen_q of them."""
    lengths: bool
    """Whether seqused_k says how many keys a sequence has; otherwise as many as there is room for."""
    causal_flags: bool = False
    """Whether a flag of each sequence says if the right bound holds for it."""
    cache_dtype: str = ""
    """The cache's dtype, `FP8`; '' for that of Q."""
    runs: bool = False
    """Whether a page has a multiple of `RUN` keys; False without pages, whose keys are one run."""


FP8 = "float8_e4m3fn"
MAX_D = 256
_VECTOR = 16
"""Bytes that a lane copies at a time: rows of the cache are multiples of them."""


WARPS = 4
KEYS = 64
"""Keys in a block: the order of sums, and so the bits of a result, depend on it."""
RUN = 16
"""Keys of a block that a warp copies, from a multiple of 16 on: cheap where they are in one page."""
MMA_ROWS = 16
"""Rows of a warp-level MMA."""
ROWS = (16, 32, 64)
"""Rows that a tile may have: query tokens times the query heads of a KV head."""
TWO_CTAS_BYTES, ONE_CTA_BYTES = 113 * 1024, 227 * 1024
"""SMEM of a CTA where two share an SM, and where it has the SM for itself."""
LEAST_STAGES, MOST_STAGES = 3, 8
CTAS_PER_SM = 2
MOST_TOKENS = 64
"""Tokens of a sequence up to which this kernel, which splits keys, serves where the forward could."""
LEAST_BLOCKS = 4
"""Blocks that a split has at least, if its sequence has several: shorter ones cost more in the merge than
they save. Splits of a fixed length may be shorter."""
SPLIT_KEYS = 2048
"""Keys of a split whose result must not depend on a batch: the longer, the fewer splits have to be merged;
the shorter, the more SMs serve one long sequence."""


def limits(features: Features, form: DecodeForm) -> list[str]:
    """Why the kernel does not serve the features, whose head sizes may be any."""
    found, multiple = [], _VECTOR if form.cache_dtype else _VECTOR // 2
    sizes = f"D is {features.D} and Dv is {features.Dv}"
    if max(features.D, features.Dv) > MAX_D:
        found.append(f"{sizes}, and it serves up to {MAX_D}")
    if features.D % multiple or features.Dv % multiple:
        found.append(f"{sizes}, and of such a cache it serves multiples of {multiple}")
    if form.cache_dtype not in ("", FP8):
        found.append(f"the cache is {form.cache_dtype}, and it serves {FP8} and q's dtype")
    return found


def rows(max_seqlen_q: int, group: int) -> int:
    """Rows of a tile: the fewest that hold a sequence's rows of one KV head, or the most there are."""
    return next((number for number in ROWS if max_seqlen_q * group <= number), ROWS[-1])


def ctas_per_sm(stage_bytes: int, other_bytes: int) -> int:
    """CTAs that share an SM: two, if each then has stages enough next to what else it has in SMEM."""
    return CTAS_PER_SM if (TWO_CTAS_BYTES - other_bytes) // stage_bytes >= LEAST_STAGES else 1


def stages(stage_bytes: int, other_bytes: int) -> int:
    """Stages of K and V, as many as there is room for."""
    room = ONE_CTA_BYTES if ctas_per_sm(stage_bytes, other_bytes) == 1 else TWO_CTAS_BYTES
    return min((room - other_bytes) // stage_bytes, MOST_STAGES)


def num_splits(tiles: int, max_seqlen_k: int, num_sms: int) -> int:
    """Splits that fill the SMs, if `tiles` tiles of rows share them: a bound, of which the kernel takes fewer
    where a sequence is so short that they had less than `LEAST_BLOCKS` blocks.

    tiles: those of all heads and sequences. max_seqlen_k: a bound on the keys of a sequence.
    """
    blocks = -(-max_seqlen_k // KEYS)
    return max(1, min(num_sms * CTAS_PER_SM // max(tiles, 1), blocks // LEAST_BLOCKS))


def invariant_splits(max_seqlen_k: int, split_keys: int = SPLIT_KEYS) -> int:
    """Splits of `split_keys` keys, a multiple of `KEYS`, that hold any sequence up to `max_seqlen_k` keys."""
    return max(1, -(-max_seqlen_k // split_keys))
