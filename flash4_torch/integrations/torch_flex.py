"""Our kernels behind torch's own `flex_attention`, for models that call it by that name::

    with flash4_torch.integrations.torch_flex.register():
        model(x)  # torch.nn.attention.flex_attention.flex_attention, eager or compiled

torch checks the arguments, and its function gives what it is documented to give; instead of its own operator
it then calls ours. It is the operator that is replaced, so that references to torch's function, taken before,
are served, too. Calls whose kernel_options ask for another BACKEND than "AUTO" or "FLASH" stay torch's. CPUs
have gradients; torch refuses them there, and max_scores as well.

Nothing is replaced on import.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from torch import Tensor

from ..flex.attention import attend_heads_first, checked
from ..flex.call import Functions

_OURS = ("AUTO", "FLASH")
"""BACKEND of the calls that we serve."""


class Registration:
    """Keeps torch's flex_attention on our operator until `remove()`, or for a `with` block."""

    def __init__(self) -> None:
        self._is_on = True
        _acquire()

    def remove(self) -> None:
        """Gives torch its own operator back once no other registration is left; again it does nothing."""
        if self._is_on:
            self._is_on = False
            _release()

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


def register() -> Registration:
    """Serves torch's flex_attention from now on; it holds for all threads."""
    return Registration()


class _Replacement:
    """What is replaced, by its names in torch's module, and how many registrations want it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.stock: dict[str, Callable[..., Any]] = {}


_replacement = _Replacement()


def _module() -> ModuleType:
    # It loads much of torch, which importing this module should not.
    from torch.nn.attention import flex_attention

    return flex_attention


def _acquire() -> None:
    module = _module()
    with _replacement.lock:
        if _replacement.count == 0:
            _replacement.stock = {name: getattr(module, name) for name in _REPLACED}
            vars(module).update(_REPLACED)
        _replacement.count += 1


def _release() -> None:
    with _replacement.lock:
        _replacement.count -= 1
        if _replacement.count == 0:
            vars(_module()).update(_replacement.stock)


class _Blocks(NamedTuple):
    """A BlockMask's attributes that a call needs, out of its tuple."""

    seq_lengths: tuple[int, int]
    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    BLOCK_SIZE: tuple[int, int]
    mask_mod: Callable[..., Tensor]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_scores) as torch's operator gives them, both of the latter in base 2."""
    if kernel_options["BACKEND"] not in _OURS:
        _replacement.stock["_validate_device"](query, key, value)
        stock = _replacement.stock["flex_attention_hop"]
        return stock(query, key, value, score_mod, block_mask, scale, kernel_options)
    has_max = kernel_options["OUTPUT_MAX"]
    # What the caller looks at afterwards: a newer torch takes lse of "FLASH" for a natural logarithm.
    kernel_options["BACKEND"] = "AUTO"
    Q_LEN, KV_LEN, counts, indices, full_counts, full_indices = block_mask[:6]
    rows, keys, mask_mod = block_mask[-3:]
    lists = counts, indices, full_counts, full_indices
    blocks = _Blocks((Q_LEN, KV_LEN), *lists, (rows, keys), mask_mod)
    functions = Functions(score_mod, mask_mod, None if _shows_everything(blocks) else blocks)
    # Heads are checked already; torch lets dtypes differ, and its operator follows autocast.
    query, key, value = checked(query, key, value, True, None)
    out, lse, largest = attend_heads_first(query, key, value, functions, scale, has_max)
    ln2 = math.log(2.0)
    return out, lse / ln2, lse.new_empty(0) if largest is None else largest / ln2


def _any_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    """torch's check, which refuses gradients on a CPU: it waits until a call stays torch's."""


_REPLACED = {"flex_attention_hop": _attend, "_validate_device": _any_device}


def _shows_everything(blocks: _Blocks) -> bool:
    """Whether it is torch's own mask for calls without one: a block of any length."""
    from torch.nn.attention.flex_attention import noop_mask

    return blocks.seq_lengths == (1, 1) and blocks.mask_mod is noop_mask
