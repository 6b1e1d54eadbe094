"""`replace_attention`: this package's attention in every nn.MultiheadAttention of a finished model."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parametrize

from .multihead import MultiheadAttention, adopted_class, has_stock_forward


def replace_attention(
    model: nn.Module, predicate: Callable[[str, nn.MultiheadAttention], bool] | None = None
) -> dict[str, MultiheadAttention]:
    """Turns the nn.MultiheadAttention modules of `model` into `MultiheadAttention`, in place.

    The modules stay the same objects and only change their class. So everything that refers to one still
    holds: other references to it, hooks and their handles, parameters in optimizers, tied weights,
    `state_dict` keys, device, dtype, training flag. It works for a `model` that is itself such a module, and
    `module.__class__ = nn.MultiheadAttention` undoes it.

    Swapped is what is exactly an nn.MultiheadAttention, parametrized (torch.nn.utils.parametrize) or not.
    Subclasses, and modules with a forward of their own put onto the instance, are left alone: their forward
    would be lost. A compiled model may be swapped: all compiled code is dropped (torch.compiler.reset) and
    compiled anew when it is next called. Swap before wrappers that change the class of modules themselves,
    such as FSDP's fully_shard.

    Args:
        model: any module.
        predicate: called as predicate(name, module) for each candidate, with names as in
            `model.named_modules()`; only where it returns True the module is swapped. Default: everywhere.

    Returns:
        The swapped modules by name. One registered at several places is there under each of its names, and
        swapped if `predicate` says so for any of them. Empty when called again.
    """
    candidates = {
        name: module for name, module in model.named_modules(remove_duplicate=False) if _is_stock(module)
    }
    chosen = {
        id(module) for name, module in candidates.items() if predicate is None or predicate(name, module)
    }
    swapped = {name: module for name, module in candidates.items() if id(module) in chosen}
    for module in swapped.values():
        module.__class__ = adopted_class(module, MultiheadAttention)
    if swapped:
        _forget_compiled_code()
    return swapped


def _forget_compiled_code() -> None:
    """Compiled code may have stock's forward inlined, and not every torch guards it by the module's class."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _is_stock(module: nn.Module) -> bool:
    kind = parametrize.type_before_parametrizations(module)
    return kind is nn.MultiheadAttention and has_stock_forward(module)
