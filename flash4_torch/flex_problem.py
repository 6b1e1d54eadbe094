"""Description of a call of programmable attention, as `problem` describes one of plain attention."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .masks import Band
from .problem import Extent


class Mods(NamedTuple):
    """What is done to the scores of a call beside its options: arguments of the operators, in their order.

    `score_mod` and `mask_mod` are texts of programs (`flex.program`), or empty; `captured` and `scalars` are
    the former's arguments, then the latter's. A table of blocks, of q_block rows and kv_block keys, is
    kv_num_blocks (B or 1, Hq or 1, rows of blocks) and kv_indices (.., .., rows, columns), int32, and the
    same of full blocks, which mask_mod does not mask.

    With both cu_seqlens (B + 1,) the call is one of packed sequences, of at most max_seqlen_q queries and
    max_seqlen_k keys: b counts sequences, and positions begin anew in each.
    """

    captured: Sequence[Tensor] = ()
    kv_num_blocks: Tensor | None = None
    kv_indices: Tensor | None = None
    full_kv_num_blocks: Tensor | None = None
    full_kv_indices: Tensor | None = None
    sinks: Tensor | None = None
    rng_state: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    score_mod: str = ""
    mask_mod: str = ""
    scalars: Sequence[float] = ()
    q_block: int = 1
    kv_block: int = 1
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0

    @property
    def lists(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The table of blocks: the numbers and the columns of listed blocks, and those of full ones."""
        return self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors but the captured ones, in their order."""
        return (*self.lists, self.sinks, self.rng_state, self.cu_seqlens_q, self.cu_seqlens_k)

    def of_tensors(self, captured: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> Mods:
        """The same with other tensors, which are `captured` and `tensors`."""
        return Mods._make([captured, *tensors, *self[1 + NUM_TENSORS :]])


NUM_TENSORS = len(Mods().tensors)


class FlexSpec(NamedTuple):
    """Properties that a kernel is specialised on, or that a backend may refuse."""

    device: str
    dtype: torch.dtype
    D: int
    Dv: int
    group: int
    """Query heads per KV head, Hq // Hk."""
    score_mod: str
    mask_mod: str
    """Texts of the programs, '' without one."""
    block: tuple[int, int] | None
    """Rows and keys of a block, None without a table of blocks."""
    full_blocks: bool
    """Whether the table lists full blocks by themselves."""
    left: bool
    right: bool
    """Whether the band is bounded on that side."""
    softcap: bool
    dropout: bool
    deterministic: bool
    sinks: str
    """'' without sinks, else their dtype."""
    varlen: bool = False
    capability: tuple[int, int] = (0, 0)
    """Compute capability of a CUDA device."""
    backward: bool = False
    dlse: bool = False
    """Backward: lse has an incoming gradient."""
    dcaptured: tuple[bool, ...] = ()
    """Backward: which of score_mod's tensors want a gradient."""
    dcaptured_elements: int = 0
    """Backward: elements of these tensors, counted in deterministic calls."""
    bounds: bool = False
    """Whether a table has bounds for each row, instead of a block mask; `left` and `right` are theirs."""
    segments: bool = False
    """Whether `varlen` is meant of parts of batch entries, which a mask divides its rows and keys into."""
    bits: int = 0
    """Rows of a block of the mask for which a table has a bit for each score, instead of its blocks and
    mask_mod; 0 without one."""


class FlexProblem(NamedTuple):
    """Everything about a call except its tensors' data."""

    spec: FlexSpec
    extent: Extent
    scale: float
    band: Band
    softcap: float
    dropout_p: float

    def __str__(self) -> str:
        s, e = self.spec, self.extent
        features = [
            name
            for name, on in {
                "varlen": s.varlen,
                f"score_mod {_key(s.score_mod)}": bool(s.score_mod),
                f"mask_mod {_key(s.mask_mod)}": bool(s.mask_mod),
                f"blocks of {s.block}": s.block is not None,
                f"window=({self.band.left}, {self.band.right})": not self.band.is_full,
                f"softcap={self.softcap}": s.softcap,
                f"sinks {s.sinks}": bool(s.sinks),
                f"dropout_p={self.dropout_p}": s.dropout,
                "deterministic": s.deterministic,
                "gradient of lse": s.dlse,
                f"gradients of {sum(s.dcaptured)} captured tensors": any(s.dcaptured),
            }.items()
            if on
        ]
        direction = "backward" if s.backward else "forward"
        sizes = f"B={e.B} Sq={e.Sq} Sk={e.Sk} Hq={e.Hq} Hk={e.Hk} D={s.D} Dv={s.Dv}"
        return " ".join([f"flex_attention {direction} {sizes} {s.dtype} on {s.device}", *features])


def _key(text: str) -> str:
    """The first digits of a program's key."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


class FlexInputs(NamedTuple):
    """The tensors and programs of a call: q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv).

    Packed sequences: q (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mods: Mods


class FlexSaved(NamedTuple):
    """Tensors that the backward gets in addition: the forward's results and their gradients."""

    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    lse: Tensor
    lse_low: Tensor


class FlexGradients(NamedTuple):
    """Gradients in the inputs' dtypes and shapes."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dcaptured: list[Tensor | None]
    """Gradients of the tensors of score_mod, None where none is wanted."""
    dsinks: Tensor | None


def new_out(q: Tensor, Dv: int) -> Tensor:
    """out (B, Sq, Hq, Dv) for q (B, Sq, Hq, D), whose dimensions have q's order in memory, but for the last.

    FlexAttention's tensors are (B, H, S, D): a result that is not contiguous there would have to be copied.
    torch's function keeps any other order, too, such as that of sequences before batch entries.
    """
    *rows, _ = q.shape
    if q.dim() != 4 or q.is_contiguous():
        return q.new_empty(*rows, Dv)
    if q.transpose(1, 2).is_contiguous():
        return q.new_empty(rows[0], rows[2], rows[1], Dv).transpose(1, 2)
    outer = [0, 1, 2] if 0 in q.stride() else sorted(range(3), key=lambda i: q.stride(i), reverse=True)
    return torch.empty_permuted((*rows, Dv), [*outer, 3], dtype=q.dtype, device=q.device)
