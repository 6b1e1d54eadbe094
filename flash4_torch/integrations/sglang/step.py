"""What the layers of a step share: where keys are, and which queries see them.

Slots are SGLang's: row i of a request's table is the slot of its key i, and slot s is row s % page_size of
page s // page_size. A page's slots are neighbours, so a table of pages has every page_size-th of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Keys(NamedTuple):
    """Keys of some sequences, and what the host knows about their number."""

    seqused_k: Tensor
    """(B,) int32."""
    table: Tensor
    """(B, pages) int32."""
    max_seqlen_k: int


class Queries(NamedTuple):
    """Tokens of some sequences, packed."""

    cu_seqlens_q: Tensor
    """(B + 1,) int32."""
    max_seqlen_q: int


class Step(NamedTuple):
    """A batch; its drafts, if they are a tree, see all of `keys` and some of each other."""

    queries: Queries
    keys: Keys
    window_table: Tensor | None = None
    """The table of layers with a window, where these have a pool of their own."""
    drafts: Keys | None = None
    """Drafts that each token of a tree sees, as a sequence of its own, in pages of size 1."""


def page_table(req_to_token: Tensor, requests: Tensor, pages: int, page_size: int) -> Tensor:
    """(B, pages) int32, from SGLang's table of slots (requests, positions)."""
    slots = req_to_token[requests, : pages * page_size : page_size]
    return (slots // page_size).to(torch.int32)


def tree(req_to_token: Tensor, requests: Tensor, prefix: Tensor, mask: Tensor, drafts: int) -> Keys:
    """The drafts that each draft sees.

    prefix: (B,), keys before the drafts. mask: flat, bool: for each request (drafts, prefix + drafts), what
    each draft sees of all keys.
    """
    columns = torch.arange(drafts, device=prefix.device)
    widths = prefix.long() + drafts
    begin = (widths * drafts).cumsum(0) - widths * drafts
    places = begin[:, None, None] + columns[:, None] * widths[:, None, None]
    places = places + prefix.long()[:, None, None] + columns
    sees = mask[places].flatten(0, 1)
    slots = req_to_token[requests[:, None], prefix.long()[:, None] + columns]
    # Those that it sees come first, in their order.
    order = (~sees).to(torch.int8).argsort(dim=1, stable=True)
    table = slots.repeat_interleave(drafts, dim=0).gather(1, order)
    return Keys(sees.sum(1).to(torch.int32), table.to(torch.int32), drafts)
