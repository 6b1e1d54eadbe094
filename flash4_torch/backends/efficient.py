"""PyTorch's memory-efficient CUDA attention: float32, wide heads and masks, if nothing better serves."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import Inputs, Problem, Saved, has_float_mask
from ..reference import sinks
from . import batches, sequences
from .base import CallsTorch, Grads, Results, WithoutWeights
from .compiled.params import dtype_name
from .cpu import beyond_plain, sees_nothing
from .tiled import Tiled, sinks_gradient

_forward = torch.ops.aten._efficient_attention_forward.default
_backward = torch.ops.aten._efficient_attention_backward.default

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ALIGNMENT = 16
"""Bytes to a multiple of which rows of q, k and v must be padded."""
_MASK_STEP = 16
"""Keys to a multiple of which rows of a mask are padded in memory."""
_LEAST_SHIFT = 1024.0
"""The least size of a row's largest mask number in 16 bits that is subtracted from the row. Below it float32
sums are exact enough, and beyond it differences are rounded only where the weights are 0."""
_LSE_STEP = 32
"""Rows to a multiple of which the kernel's lse is padded."""
_FULL, _TOP_LEFT, _BOTTOM_RIGHT = 0, 1, 2
"""The kernel's `custom_mask_type`: none, or causal that begins in that corner of the scores."""


class Efficient(CallsTorch, WithoutWeights):
    """The `efficient` backend: torch's kernels by the operators below `scaled_dot_product_attention`, so that
    causal aligned to the bottom right, windows and an order of sums are served, too.

    Of a band the kernel gets the rows and keys that are not hidden altogether (`_Block`); a row that a mask
    hides gives 0, but its lse has to be mended. KV heads are repeated for the query heads that share them.

    The kernel multiplies a floating mask by log2(e), so a row's largest number is subtracted before, if it is
    large, and added to lse after. Scores then count even next to numbers that would round them away.

    Varlen runs one sequence at a time; sequences that the kernel cannot serve run on `Tiled`.
    """

    name = "efficient"

    def why_not(self, problem: Problem) -> list[str]:
        spec, extent = problem.spec, problem.extent
        if spec.device != "cuda":
            return [f"the tensors are on {spec.device}, and it serves cuda"]
        if spec.weights:
            return ["it has no attention weights"]
        why = beyond_plain(problem)
        mask = spec.mask.partition(":")[0]
        if mask not in ("", "bool", *_mask_dtypes(spec.dtype)):
            own = " and ".join(_mask_dtypes(spec.dtype))
            why.append(f"attn_mask is {mask}, and next to {spec.dtype} it takes bool and {own}")
        if 0 in extent:
            why.append("the problem is empty")
        else:
            why += _beyond_bands(problem)
        if spec.dtype not in _DTYPES:
            why.append(f"the dtype is {spec.dtype}, and it serves float32, float16 and bfloat16")
        if spec.dtype == torch.bfloat16 and spec.capability < (8, 0):
            why.append(f"the GPU's compute capability is {spec.capability}, and bfloat16 needs (8, 0)")
        if extent.Hq > batches.MOST:
            why.append(f"Hq is {extent.Hq}, and it serves up to {batches.MOST}")
        return why

    def forward(self, inputs: Inputs, problem: Problem) -> Results:
        if problem.spec.varlen:
            return sequences.forward(inputs, problem, self._or_tiled)
        if problem.extent.B > batches.MOST:
            return batches.forward(inputs, problem, self.forward)
        block = _Block.of(problem)
        q, k, v = _per_query_head(inputs, problem, block)
        bias, shift = _bias_of(inputs, problem, block)
        more: dict[str, Any] = {"scale": problem.scale, "window_size": block.window}
        out, padded, *_ = _forward(q, k, v, bias, None, None, None, None, 0.0, block.corner, True, **more)
        lse, low = padded[..., : block.Sq].contiguous(), None
        if bias is not None:
            is_causal = block.corner != _FULL
            lse.masked_fill_(sees_nothing(bias, is_causal, block.Sq, block.diagonal), -torch.inf)
        if shift is not None:
            lse, low = _sum_with_error(lse, shift)
        out = out[..., : problem.spec.Dv].contiguous()
        if block.Sq < problem.extent.Sq:
            out, lse, low = block.among_all_rows(problem, out, lse, low)
        results = Results(out, lse, low)
        return results if inputs.sinks is None else Results(*sinks.join(*results[:3], inputs.sinks))

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> Grads:
        if problem.spec.varlen:
            return sequences.backward(saved, inputs, problem, self._or_tiled)
        if problem.extent.B > batches.MOST:
            return batches.backward(saved, inputs, problem, self.backward)
        block = _Block.of(problem)
        q, k, v = _per_query_head(inputs, problem, block)
        dout, out = (aligned(_padded(x[:, block.rows])) for x in (saved.dout, saved.out))
        lse = _lse_of_kernel(saved, block, bias_shift := _bias_of(inputs, problem, block))
        # Of a mask's gradient the kernel writes the blocks that it visits. The mask hides what the band does.
        corner, ahead = _FULL if saved.mask_grad else block.corner, 0
        if block.window is not None and block.diagonal:
            # The kernel's backward lets windows begin in the top left corner, whatever the mask's type. So
            # rows of zeros go ahead, as many as the window is off; their weights are exp(0 - inf) = 0.
            corner, ahead = _TOP_LEFT, block.diagonal
            q, dout, out = (F.pad(x, (0, 0, 0, 0, ahead, 0)) for x in (q, dout, out))
            lse = F.pad(lse, (ahead, 0), value=torch.inf)
        lse = F.pad(lse, (0, -lse.shape[-1] % _LSE_STEP))
        # Without dropout the kernel does not read the RNG state.
        seed = offset = torch.empty((), dtype=torch.int64, device=q.device)
        # With all keys in one split a single CTA adds up a head's gradients, always in the same order.
        more: dict[str, Any] = {"num_splits_key": 1 if problem.spec.deterministic else None}
        grads = _backward(
            dout,
            q,
            k,
            v,
            bias_shift.bias,
            out.contiguous(),
            None,
            None,
            q.shape[1],
            k.shape[1],
            lse,
            0.0,
            seed,
            offset,
            corner,
            saved.mask_grad,
            scale=problem.scale,
            window_size=block.window,
            **more,
        )
        widths = problem.spec.D, problem.spec.D, problem.spec.Dv
        dq, dk, dv = (g[..., :width] for g, width in zip(grads, widths, strict=False))
        dq = dq[:, ahead:]
        if problem.spec.group > 1:
            dk, dv = (_sum_of_group(g, problem) for g in (dk, dv))
        dq = _among(dq, inputs.q, block.rows)
        dk, dv = (_among(g, x, block.keys) for g, x in ((dk, inputs.k), (dv, inputs.v)))
        mask, dmask = inputs.attn_mask, None
        if saved.mask_grad and mask is not None:
            dmask = _mask_gradient(grads[3], mask, block)
        return Grads(dq, dk, dv, dmask, sinks_gradient(saved, inputs))

    def _or_tiled(self, problem: Problem) -> Efficient | Tiled:
        return Tiled() if self.why_not(problem) else self


class _Block(NamedTuple):
    """The rows and keys of a dense call that the kernel gets. Every row sees one of them, and the diagonal
    that bounds what it sees begins in a corner: the kernel's blocks of rows that see nothing leave results
    as they are, and its offsets are not negative."""

    rows: slice
    keys: slice
    corner: int
    window: int | None = None
    """Keys that a row sees at most, up to the diagonal."""

    @property
    def Sq(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def diagonal(self) -> int:
        """The last key that the first row sees, if `corner` bounds what rows see."""
        return int(self.keys.stop - self.keys.start) - self.Sq if self.corner == _BOTTOM_RIGHT else 0

    @classmethod
    def of(cls, problem: Problem) -> _Block:
        found = cls.find(problem)
        if found is None:
            raise AssertionError("it is not chosen for this band")
        return found

    @classmethod
    def find(cls, problem: Problem) -> _Block | None:
        """The block of a dense problem that is not empty; None if there is none of its band's form."""
        (_, Sq, Sk, _, _), (left, right) = problem.extent, problem.band
        if problem.band.hides_nothing(Sq, Sk):
            return cls(slice(0, Sq), slice(0, Sk), _FULL)
        window = None if left is None or left >= Sk - 1 else left
        if right is None or (window is not None and window + right < 0):
            return None
        # Row i sees up to key i + diagonal.
        diagonal = Sk - Sq + right
        first_row, last_row, first_key = max(0, -diagonal), Sq, 0
        diagonal = max(diagonal, 0)
        last_key = min(Sk, last_row - first_row + diagonal)
        corner = _BOTTOM_RIGHT if diagonal else _TOP_LEFT
        if first_row >= Sq or (diagonal and last_key < last_row - first_row + diagonal):
            # No row sees a key, or the last ones see all of them.
            return None
        if window is not None:
            window += right + 1
            first_key = max(0, diagonal - window + 1)
            last_row = min(last_row, first_row + last_key + window - 1 - diagonal)
        return cls(slice(first_row, last_row), slice(first_key, last_key), corner, window)

    def among_all_rows(
        self, problem: Problem, out: Tensor, lse: Tensor, low: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Results of the block's rows as those of all rows; the others see nothing."""
        (B, Sq, _, Hq, _), Dv = problem.extent, problem.spec.Dv
        all_out, all_lse = out.new_zeros(B, Sq, Hq, Dv), lse.new_full((B, Hq, Sq), -torch.inf)
        all_out[:, self.rows], all_lse[..., self.rows] = out, lse
        if low is None:
            return all_out, all_lse, None
        all_low = low.new_zeros(B, Hq, Sq)
        all_low[..., self.rows] = low
        return all_out, all_lse, all_low


def _beyond_bands(problem: Problem) -> list[str]:
    """The reason if the kernel has no mask for a problem's band; of packed sequences each is asked again."""
    band, extent = problem.band, problem.extent
    served = "it serves full attention, causal masks, and windows whose right bound is 0 or less"
    if problem.spec.varlen:
        may_serve = band.is_full or (band.right is not None and band.right <= 0)
    else:
        block = _Block.find(problem)
        may_serve = block is not None
        if block is not None and block.window is not None and problem.spec.mask:
            return ["it has no window next to an attn_mask"]
    if may_serve:
        return []
    return [f"the window is {tuple(band)} for Sq={extent.Sq}, Sk={extent.Sk}, and {served}"]


def _among(grad: Tensor, x: Tensor, at: slice) -> Tensor:
    """The gradient of some rows of x as that of all of them."""
    if grad.shape[1] == x.shape[1]:
        return grad
    found = x.new_zeros(x.shape)
    found[:, at] = grad
    return found


def _per_query_head(inputs: Inputs, problem: Problem, block: _Block) -> list[Tensor]:
    """The block's q, k and v as (B, S, Hq, D)."""
    spans = (block.rows, block.keys, block.keys)
    q, k, v = (aligned(_padded(x[:, at])) for x, at in zip(inputs[:3], spans, strict=True))
    group = problem.spec.group
    return [q, k, v] if group == 1 else [q, *(x.repeat_interleave(group, 2) for x in (k, v))]


def _padded(x: Tensor) -> Tensor:
    """The tensor with columns of zeros up to a multiple of 16 bytes, and without gaps between columns."""
    more = -x.shape[-1] % (_ALIGNMENT // x.element_size())
    if more:
        return F.pad(x, (0, more))
    return x if x.stride(-1) == 1 else x.contiguous()


def aligned(x: Tensor) -> Tensor:
    """`x` itself if its rows begin at multiples of 16 bytes, else a copy: the kernel takes no others."""
    steps = [x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1])]
    is_aligned = all(step % _ALIGNMENT == 0 for step in steps)
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def _sum_of_group(grad: Tensor, problem: Problem) -> Tensor:
    """(B, Sk, Hq, D) summed up to (B, Sk, Hk, D)."""
    return grad.unflatten(2, (-1, problem.spec.group)).sum(3, dtype=torch.float32).to(grad.dtype)


def _mask_dtypes(dtype: torch.dtype) -> tuple[str, ...]:
    """Dtypes of floating masks next to q's: those that q's holds."""
    own = dtype_name(dtype)
    return (own, "bfloat16", "float16") if dtype == torch.float32 else (own,)


class _Bias(NamedTuple):
    """What is added to scores, (B, Hq, Sq, Sk), and what has been subtracted of its rows before."""

    bias: Tensor | None
    shift: Tensor | None
    """float32, broadcastable to (B, Hq, Sq); None without a floating mask."""


def _bias_of(inputs: Inputs, problem: Problem, block: _Block) -> _Bias:
    """A mask as the kernel takes it: numbers of q's dtype, with rows at multiples of 16 keys."""
    mask, q = inputs.attn_mask, inputs.q
    if mask is None:
        return _Bias(None, None)
    mask, shift = _in_block(mask, block), None
    B, Sq, Hq, Sk = problem.extent.B, block.Sq, problem.extent.Hq, block.keys.stop - block.keys.start
    mask, width = mask.expand(*mask.shape[:3], Sk), Sk + -Sk % _MASK_STEP
    if has_float_mask(mask):
        mask = mask.to(q.dtype)
        if block.corner != _FULL:
            # What the row does not see may be larger than all that it sees.
            hidden = torch.ones(Sq, Sk, dtype=torch.bool, device=q.device).triu(1 + block.diagonal)
            mask = mask.masked_fill(hidden, -torch.inf)
        shift = _shift_of(mask)
        bias = q.new_zeros(*mask.shape[:3], width)[..., :Sk].copy_(mask - shift)
        shift = shift[..., 0].float()
    else:
        bias = q.new_zeros(*mask.shape[:3], width)[..., :Sk].masked_fill_(~mask, -torch.inf)
    return _Bias(bias.expand(B, Hq, Sq, Sk), shift)


def _in_block(mask: Tensor, block: _Block) -> Tensor:
    """The part of a mask of the block's rows and keys; dimensions of size 1 stay 1."""
    rows = block.rows if mask.shape[2] != 1 else slice(None)
    keys = block.keys if mask.shape[3] != 1 else slice(None)
    return mask[:, :, rows, keys]


def _lse_of_kernel(saved: Saved, block: _Block, bias: _Bias) -> Tensor:
    """lse of the block's rows as the kernel knows it: 0 where a row sees nothing."""
    lse = saved.lse[..., block.rows]
    of_kernel = lse if bias.shift is None else lse - bias.shift
    if saved.lse_low is not None:
        of_kernel = of_kernel + saved.lse_low[..., block.rows]
    return of_kernel.masked_fill(lse == -torch.inf, 0.0)


def _mask_gradient(grad: Tensor, mask: Tensor, block: _Block) -> Tensor:
    """The mask's gradient from that of the block's bias, (B, Hq, Sq, Sk)."""
    own = _in_block(mask, block)
    found = grad[..., : block.keys.stop - block.keys.start].float().sum_to_size(own.shape).to(mask.dtype)
    if own.shape == mask.shape:
        return found
    dmask = mask.new_zeros(mask.shape)
    _in_block(dmask, block).copy_(found)
    return dmask


def _shift_of(mask: Tensor) -> Tensor:
    """What is subtracted of each row: its largest number, if that is finite and large, else 0."""
    top = mask.detach().amax(-1, keepdim=True)
    least = 0.0 if mask.dtype == torch.float32 else _LEAST_SHIFT
    return torch.where(top.isfinite() & (top.abs() >= least), top, 0.0)


def _sum_with_error(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x + y as float32 rounds it, and what rounding took from it, 0 where the sum is infinite."""
    total = x + y
    other = total - x
    error = (x - (total - other)) + (y - other)
    return total, error.masked_fill(total.isinf(), 0.0)
