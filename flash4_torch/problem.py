"""Description of one attention call: `Spec` is static (a compile key), `Extent` holds the call's sizes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .masks import Band


class Spec(NamedTuple):
    """Properties that a kernel is specialised on. Batch sizes and sequence lengths never enter it."""

    device: str
    dtype: torch.dtype
    D: int
    Dv: int
    group: int
    """Query heads per KV head, Hq // Hk."""
    varlen: bool
    left: bool
    right: bool
    """Whether the band is bounded on that side."""
    softcap: bool
    mask: str
    """'' without a mask, else its dtype and which of its four dimensions broadcast, as in 'bool:11..'."""
    dropout: bool
    deterministic: bool
    sinks: str = ""
    """'' without sinks, else their dtype."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability of a CUDA device."""
    backward: bool = False
    dlse: bool = False
    """Backward: lse has an incoming gradient."""
    dmask: bool = False
    """Backward: attn_mask wants a gradient."""
    weights: bool = False
    """The attention weights are wanted, or with `backward` their gradient, instead of what they make of v."""
    signed: bool = False
    """The weights wanted are those of each head before dropout, and negative where dropout takes them."""
    tf32: bool = False
    """float32: torch's switches allow TF32 for matrix products (`allows_tf32`)."""
    dropout_of_part: bool = False
    """The state of dropout says where the call lies in a larger one."""
    running: str = ""
    """Forward: '' if the results are the call's, else what is done with running ones (`Features.running`)."""
    segments: bool = False
    """Whether `varlen` is meant of parts of batch entries (`Features.segments`)."""


class CallOptions(NamedTuple):
    """Numbers and flags of a call, checked and completed: the last arguments of every operator's schema."""

    scale: float
    window_left: int | None = None
    window_right: int | None = None
    """The band, aligned to the bottom right; its bounds may be negative."""
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False

    @property
    def band(self) -> Band:
        return Band(self.window_left, self.window_right)


class Extent(NamedTuple):
    """Sizes of a call; with varlen, B is the number of sequences and Sq, Sk are the longest lengths."""

    B: int
    Sq: int
    Sk: int
    Hq: int
    Hk: int

    @property
    def scores(self) -> int:
        return self.B * self.Hq * self.Sq * self.Sk


class Problem(NamedTuple):
    """Everything about a call except its tensors' data."""

    spec: Spec
    extent: Extent
    scale: float
    band: Band
    softcap: float
    dropout_p: float
    entries: int = 1
    """Batch entries that each of the extent's stands for, one after another: a stack. Each has the band."""

    @property
    def has_float_mask(self) -> bool:
        """Whether there is a mask that is added to the scores."""
        mask = self.spec.mask.partition(":")[0]
        return mask not in ("", "bool")

    def __str__(self) -> str:
        s, e = self.spec, self.extent
        what = "attention_varlen" if s.varlen else "attention"
        features = [
            name
            for name, on in {
                f"window=({self.band.left}, {self.band.right})": not self.band.is_full,
                f"softcap={self.softcap}": s.softcap,
                f"attn_mask {s.mask}": bool(s.mask),
                f"sinks {s.sinks}": bool(s.sinks),
                f"dropout_p={self.dropout_p}": s.dropout,
                "deterministic": s.deterministic,
                "TF32": s.tf32,
                "gradient of lse": s.dlse,
                "gradient of attn_mask": s.dmask,
            }.items()
            if on
        ]
        direction = ("weights " if s.weights else "") + ("backward" if s.backward else "forward")
        sizes = f"B={e.B} Sq={e.Sq} Sk={e.Sk} Hq={e.Hq} Hk={e.Hk} D={s.D} Dv={s.Dv}"
        return " ".join([f"{what} {direction} {sizes} {s.dtype} on {s.device}", *features])


class Inputs(NamedTuple):
    """The tensors of a call. Dense: (B, S, H, D); varlen: packed (T, H, D) with both cu_seqlens."""

    q: Tensor
    k: Tensor
    v: Tensor
    attn_mask: Tensor | None = None
    sinks: Tensor | None = None
    rng_state: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    first_batch: int = 0
    """Offset of dropout's batch indices: each sequence of a varlen call counts as a batch entry."""


class Saved(NamedTuple):
    """Tensors that the backward gets in addition to the inputs: the forward's results and their gradients."""

    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    lse: Tensor
    mask_grad: bool = False
    lse_low: Tensor | None = None
    """Rounding error of lse (the part that rounding dropped), with a floating attn_mask."""


class SavedWeights(NamedTuple):
    """Tensors that the weights need in addition to q, k and what masks them, and those of their backward."""

    lse: Tensor
    lse_low: Tensor | None
    average_heads: bool
    dweights: Tensor | None = None
    mask_grad: bool = False


_MADE_CONTIGUOUS = frozenset({"cpu"})
"""Devices on which gradients are contiguous, as torch's own attention kernel makes them there."""


def new_gradient(x: Tensor) -> Tensor:
    """An empty tensor for the gradient of q, k or v.

    Autograd copies a gradient that does not lie in memory as its leaf does. So on a GPU it lies as `x` does,
    by the rules of `torch.empty_like`, if the rows of `x` are contiguous; kernels write no others.
    """
    if x.device.type in _MADE_CONTIGUOUS or x.stride(-1) != 1:
        return x.new_empty(x.shape)
    return torch.empty_like(x)


def as_gradient(made: Tensor, x: Tensor) -> Tensor:
    """The gradient of `x`, laid out like `new_gradient(x)`; `made` itself where it is."""
    wanted = new_gradient(x)
    lies_so = all(a == b or n <= 1 for n, a, b in zip(x.shape, made.stride(), wanted.stride(), strict=True))
    return made if lies_so else wanted.copy_(made)


def allows_tf32(dtype: torch.dtype) -> bool:
    """Whether torch's switches allow products of that dtype in TF32: for float32, those of CUDA's matmul."""
    # `torch.backends.cuda.matmul.fp32_precision`, in a fifth of the time.
    return dtype is torch.float32 and torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"


def has_float_mask(attn_mask: Tensor | None) -> bool:
    """Whether the mask is added to the scores."""
    return attn_mask is not None and attn_mask.is_floating_point()


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of a device; (0, 0) if it is no GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def mask_key(attn_mask: Tensor | None) -> str:
    """A mask's identity in a compile key: its dtype, and '1' for each dimension it broadcasts over."""
    if attn_mask is None:
        return ""
    return f"{dtype_key(attn_mask)}:{''.join('1' if n == 1 else '.' for n in attn_mask.shape)}"


def dtype_key(x: Tensor | None) -> str:
    """The dtype's name in a compile key, '' without a tensor."""
    return "" if x is None else str(x.dtype).removeprefix("torch.")
