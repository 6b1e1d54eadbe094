"""`replace_attention`: this package's attention in every nn.MultiheadAttention of an existing model."""

from __future__ import annotations

import inspect
import reprlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import ArgumentError, NothingReplacedWarning
from .multihead import MultiheadAttention, adopted_class, has_stock_forward


def replace_attention(
    model: nn.Module, predicate: Callable[[str, nn.MultiheadAttention], bool] | None = None
) -> dict[str, MultiheadAttention]:
    """Turns the nn.MultiheadAttention modules of `model` into `MultiheadAttention`, in place.

    The modules stay the same objects and only change their class. So everything that refers to one stays
    valid: other references to it, hooks and their handles, parameters in optimizers, tied weights,
    `state_dict` keys, device, dtype, training flag. `model` may itself be such a module.
    `module.__class__ = nn.MultiheadAttention` undoes the swap.

    Only modules whose class is exactly nn.MultiheadAttention are swapped, parametrized
    (torch.nn.utils.parametrize) or not. Subclasses, and modules with a forward set on the instance, are left
    alone: their forward would be lost. A compiled model may be swapped: all compiled code is dropped
    (torch.compiler.reset) and compiled again at the next call. Swap before applying wrappers that change the
    class of modules themselves, such as FSDP's fully_shard.

    Args:
        model: any module.
        predicate: called as predicate(name, module) for each candidate, with names as in
            `model.named_modules()`; a module is swapped only if it returns True. Default: swap all.

    Returns:
        The swapped modules by name. A module registered in several places appears under each of its names,
        and is swapped if `predicate` returns True for any of them. Empty when called again.

    Raises:
        ArgumentError: `model` is not a module, or `predicate` is not a function of a name and a module that
            returns True or False.

    Warns:
        NothingReplacedWarning: `model` has no nn.MultiheadAttention, or has some that are left alone.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", type(model).__name__, "it must be a torch.nn.Module")
    if predicate is not None:
        _check_predicate(predicate)
    named = dict(model.named_modules(remove_duplicate=False))
    candidates = {name: module for name, module in named.items() if _is_stock(module)}
    chosen = {
        id(module)
        for name, module in candidates.items()
        if predicate is None or _chooses(predicate, name, module)
    }
    swapped = {name: module for name, module in candidates.items() if id(module) in chosen}
    for module in swapped.values():
        module.__class__ = adopted_class(module, MultiheadAttention)
    if swapped:
        _forget_compiled_code()
    if predicate is None or not candidates:
        _warn_of_others(named)
    return swapped


def _check_predicate(predicate: object) -> None:
    limit = "it must be a function of two arguments, a name and a module, or None"
    if not callable(predicate):
        raise ArgumentError("predicate", type(predicate).__name__, limit)
    try:
        signature = inspect.signature(predicate)
    except ValueError:  # some builtins have none
        return
    try:
        signature.bind("", None)
    except TypeError:
        raise ArgumentError("predicate", f"a function of {signature}", limit) from None


def _chooses(predicate: Callable[[str, Any], Any], name: str, module: nn.Module) -> bool:
    answer = predicate(name, module)
    try:
        # Strings and tensors of one element have a truth value, but nobody means it.
        if not isinstance(answer, (str, bytes, Tensor)):
            return bool(answer)
    except (TypeError, ValueError, RuntimeError):  # an array of many truths
        pass
    raise ArgumentError(f"predicate({name!r}, ...)", reprlib.repr(answer), "it must be True or False")


def _warn_of_others(named: Mapping[str, nn.Module]) -> None:
    """Warns of modules that may have been meant but were left alone, or of a model that has none."""
    left = {
        name: module
        for name, module in named.items()
        if isinstance(module, nn.MultiheadAttention) and not isinstance(module, MultiheadAttention)
    }
    if left:
        listed = ", ".join(f"{name!r} ({_why_left(module)})" for name, module in left.items())
        note = (
            f"replace_attention left alone {listed}. Swap before fully_shard and other wrappers; from a "
            "subclass that keeps nn.MultiheadAttention's forward, MultiheadAttention.from_torch makes a new "
            "module."
        )
    elif not any(isinstance(module, MultiheadAttention) for module in named.values()):
        note = (
            "replace_attention found no torch.nn.MultiheadAttention. Models that call torch's "
            "scaled_dot_product_attention (timm's, for one) are served by "
            "flash4_torch.integrations.torch_sdpa.register() and "
            "torch.nn.attention.activate_flash_attention_impl('FLASH4'), those of Hugging Face by "
            "flash4_torch.integrations.transformers.register()."
        )
    else:
        return
    warnings.warn(note, NothingReplacedWarning, stacklevel=3)


def _why_left(module: nn.Module) -> str:
    kind = type(module).__name__
    if has_stock_forward(module):
        return f"{kind}, a subclass"
    return f"{kind}, with a forward of its own"


def _forget_compiled_code() -> None:
    """Drops compiled code, which may have stock's forward inlined; some torches do not guard on the class."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _is_stock(module: nn.Module) -> bool:
    kind = parametrize.type_before_parametrizations(module)
    return kind is nn.MultiheadAttention and has_stock_forward(module)
