"""A call with a user's functions: checks of them, and the operator's arguments, eager and recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError, DeviceError, ShapeError
from ..flex_problem import Mods
from ..ops import CallOptions
from ..ops.check import is_one_of
from ..ops.flex_functions import recorded_flex_attention, results, with_functions

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Mod = Callable[..., Tensor]
"""score_mod(score, b, h, q_idx, kv_idx) or mask_mod(b, h, q_idx, kv_idx), of 0-dim tensors."""


class Functions(NamedTuple):
    """A user's functions and block mask, whose mask_mod is the mask_mod here."""

    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    block_mask: BlockMask | Any = None
    """None, or what has a BlockMask's lists, lengths and block size."""


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    max_scores: Tensor | None = None


def functions_of(score_mod: Any, mask_mod: Any, block_mask: Any) -> Functions:
    """The arguments, checked.

    Raises:
        ArgumentError: one is no function, or no BlockMask; or a block mask came with another mask_mod.
    """
    if block_mask is not None:
        from torch.nn.attention.flex_attention import BlockMask

        if not isinstance(block_mask, BlockMask):
            limit = "it must be a BlockMask, as create_block_mask makes it"
            raise ArgumentError("block_mask", type(block_mask).__name__, limit)
        if mask_mod is not None and mask_mod is not block_mask.mask_mod:
            limit = "it must be None beside a block_mask, which has a mask_mod of its own"
            raise ArgumentError("mask_mod", type(mask_mod).__name__, limit)
        mask_mod = block_mask.mask_mod
    for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if function is not None and not callable(function):
            raise ArgumentError(name, type(function).__name__, "it must be a function")
    return Functions(score_mod, mask_mod, block_mask)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    functions: Functions,
    options: CallOptions,
    given: Mods | None = None,
    max_scores: bool = False,
    mods: Mods | None = None,
) -> Results:
    """Results for tensors (B, S, H, D), or packed (T, H, D); given: sinks, RNG state and sequences.

    max_scores: the largest score of each row is wanted, too; not of packed sequences. mods: the operator's
    arguments, if functions are traced already.
    """
    if torch.compiler.is_dynamo_compiling():
        return Results(*_recorded(q, k, v, functions, options, given or Mods(), max_scores))
    if mods is None:
        mods = traced(q, k, *functions, given)
    return Results(*results(q, k, v, mods, options, max_scores))


def traced(
    q: Tensor,
    k: Tensor,
    score_mod: Mod | None,
    mask_mod: Mod | None,
    block_mask: BlockMask | None = None,
    given: Mods | None = None,
) -> Mods:
    """The operator's arguments for functions and a block mask."""
    return with_functions(_with_blocks(given or Mods(), block_mask, q, k), q, score_mod, mask_mod)


def _unchanged(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score


def _everything(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return b.new_ones((), dtype=torch.bool)


def _recorded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    functions: Functions,
    options: CallOptions,
    given: Mods,
    max_scores: bool,
) -> tuple[Tensor, ...]:
    """The call as torch.compile records it."""
    mods = _with_blocks(given, functions.block_mask, q, k)
    sizes = mods.q_block, mods.kv_block, mods.max_seqlen_q, mods.max_seqlen_k
    # torch 2.11 cannot trace `or` between functions.
    score_mod = _unchanged if functions.score_mod is None else functions.score_mod
    mask_mod = _everything if functions.mask_mod is None else functions.mask_mod
    beside = (*mods.tensors, *sizes, mask_mod)
    scale, *others = options
    named = {**dict(zip(CallOptions._fields[1:], others, strict=True)), "max_scores": max_scores}
    return recorded_flex_attention(q, k, v, score_mod, beside, scale, named)


def _with_blocks(mods: Mods, block_mask: BlockMask | None, q: Tensor, k: Tensor) -> Mods:
    if block_mask is None:
        return mods
    rows, keys = block_mask.BLOCK_SIZE
    counts, indices = block_mask.kv_num_blocks, block_mask.kv_indices
    full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    if counts.device != q.device:
        raise DeviceError("block_mask", counts.device, f"it must be on query's device, {q.device}")
    B, Hq = _check_lengths(mods, block_mask, q, k), q.shape[-2]
    lists = [
        None if x is None else _four(x, rank)
        for x, rank in zip((counts, indices, *full), (3, 4, 3, 4), strict=True)
    ]
    for x in lists:
        if x is not None and not (is_one_of(x.shape[0], 1, B) and is_one_of(x.shape[1], 1, Hq)):
            limit = f"its batch and heads must be (B or 1, Hq or 1), with B = {B}, Hq = {Hq}"
            raise ShapeError("block_mask", tuple(x.shape[:2]), limit)
    return mods._replace(
        kv_num_blocks=lists[0],
        kv_indices=lists[1],
        full_kv_num_blocks=lists[2],
        full_kv_indices=lists[3],
        q_block=rows,
        kv_block=keys,
    )


def _check_lengths(mods: Mods, block_mask: BlockMask, q: Tensor, k: Tensor) -> int:
    """Requires a mask that is made for the lengths of a call; returns B."""
    (rows, keys), (Q_LEN, KV_LEN) = block_mask.BLOCK_SIZE, block_mask.seq_lengths
    if mods.cu_seqlens_q is not None:
        longest = mods.max_seqlen_q, mods.max_seqlen_k
        if Q_LEN < longest[0] or KV_LEN < longest[1]:
            limit = f"it must be made for the longest sequences, max_seqlen_q, max_seqlen_k = {longest}"
            raise ShapeError("block_mask", f"for lengths {(Q_LEN, KV_LEN)}", limit)
        return mods.cu_seqlens_q.shape[0] - 1
    (B, Sq, *_), Sk = q.shape, k.shape[1]
    # torch's own mask of everything is one block of any length.
    is_everything = rows >= Sq and keys >= Sk and (Q_LEN, KV_LEN) == (1, 1)
    if (Q_LEN, KV_LEN) != (Sq, Sk) and not is_everything:
        limit = f"it must be made for Sq, Sk = {(Sq, Sk)}"
        raise ShapeError("block_mask", f"for lengths {(Q_LEN, KV_LEN)}", limit)
    return B


def _four(x: Tensor, rank: int) -> Tensor:
    # The tensor itself where it has the rank: what is made of a mask is kept by its tensors.
    return x if x.dim() == rank else x[(None,) * (rank - x.dim())]
