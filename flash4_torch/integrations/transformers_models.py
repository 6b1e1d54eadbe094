"""Decides from a Hugging Face model's classes whether it calls a registered attention function.

transformers accepts a registered name for every architecture, also for those that compute attention
themselves. Such a model would add our bool masks to its scores, or leave out the causal mask that our None
stands for, without an error. So a model class is examined before it is built: the code of its methods, and of
the modules that it names, shows whether it gets a function from an `AttentionInterface`. No list of
architectures is needed, and code from the hub or from a notebook is judged in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils import logging

from ..errors import ArgumentError

_logger = logging.get_logger(__name__)

_MASK_MODULE = "transformers.masking_utils"
_SCORES = {"softmax", "Softmax", "scaled_dot_product_attention", "multi_head_attention_forward"}
"""Names that appear where attention is computed (and in routers and losses: alone they prove nothing)."""

_CLAIMS = ("_supports_sdpa", "_supports_attention_backend")
"""Flags of a model class that claim it works with SDPA's masks, bool or None, which is our form too."""

_UNSERVED = {"indices": "sparse attention", "block_indices": "sparse attention"}
_HANDED_OVER = {"indices": "index", "block_indices": "index"}
"""Name of the parameter or submodule behind each keyword that our attention does not serve."""


class Service(NamedTuple):
    """How a model class that is correct under our name uses our functions."""

    calls_us: bool
    reads_none: bool
    """Whether it reads a mask of None as SDPA does: the attention's `is_causal` decides."""


def judge_class(model_class: type, name: str) -> Service:
    """Judges whether a model of this class computes the right result under `attn_implementation=name`.

    Parts of a model that are models themselves are judged separately, when they are built.

    Raises:
        ArgumentError: the class computes attention itself; the message says where, and what to use instead.
    """
    code = _Reached(model_class)
    own = code.own_attention()
    like_sdpa = any(getattr(model_class, f, False) for f in _CLAIMS)
    if table := code.table_without(name):
        raise _refusal(model_class, name, f"takes its attention from {table}, which has no {name!r}")
    if not like_sdpa and code.dispatches:
        # Parts that never get a mask do not matter.
        own = [m for m in own if code.looks[m].takes_mask]
    if own and not (like_sdpa and (code.dispatches or not code.makes_masks)):
        raise _refusal(model_class, name, f"computes its attention itself, in {_names(own)}")
    if own and not code.dispatches:
        _logger.warning_once(
            f"{_names(own)} of {model_class.__name__} computes its attention itself, also under {name!r}."
        )
    return Service(code.dispatches, like_sdpa)


def judge_model(model: PreTrainedModel, name: str) -> None:
    """Judges the modules of a built model, except the parts that are models themselves.

    Raises:
        ArgumentError: one of them passes an argument that our attention does not serve.
    """
    looks: dict[type, _Look] = {}
    todo: list[nn.Module] = [model]
    while todo:
        module = todo.pop()
        todo += [m for m in module.children() if not isinstance(m, PreTrainedModel)]
        if type(module) not in looks:
            looks[type(module)] = _look(type(module))
        look = looks[type(module)]
        for what in look.keywords:
            if _has(module, _HANDED_OVER[what]):
                reason = f"has {_UNSERVED[what]}, which {name!r} does not serve, in {type(module).__name__}"
                raise _refusal(type(model), name, reason)


def _refusal(model_class: type, name: str, reason: str) -> ArgumentError:
    instead = '"sdpa" or "eager"' if getattr(model_class, "_supports_sdpa", False) else '"eager"'
    return ArgumentError(
        "attn_implementation",
        repr(name),
        f"{model_class.__name__} {reason}: use {instead}; if it is a part of another model, for this part, "
        f'as in attn_implementation={{"": "{name}", "text_config": "eager", ...}}',
    )


def _has(module: nn.Module, attribute: str) -> bool:
    """Whether a module has a parameter or a submodule with this in its name."""
    owned = [*module._parameters.items(), *module._modules.items()]
    return any(attribute in key and value is not None for key, value in owned)


def model_classes(config_class: type) -> Iterator[type]:
    """The loaded model classes whose configuration has this class."""
    todo: list[type] = [PreTrainedModel]
    while todo:
        model_class = todo.pop()
        todo += model_class.__subclasses__()
        if getattr(model_class, "config_class", None) is config_class:
            yield model_class


def _names(classes: list[type]) -> str:
    return " and ".join(c.__name__ for c in classes[:2])


class _Look(NamedTuple):
    """Findings in the code of one class."""

    dispatches: bool
    computes_scores: bool
    takes_mask: bool
    makes_masks: bool
    keywords: set[str]
    modules: set[type]
    tables: dict[str, dict[str, type]]


class _Reached:
    """A model class and the modules that it is built from, except those that are models themselves."""

    def __init__(self, model_class: type) -> None:
        self.looks = {model_class: _look(model_class)}
        todo = [model_class]
        while todo:
            for module in self.looks[todo.pop()].modules - self.looks.keys():
                if not issubclass(module, PreTrainedModel):
                    self.looks[module] = _look(module)
                    todo.append(module)

    @property
    def dispatches(self) -> bool:
        return any(look.dispatches for look in self.looks.values())

    @property
    def makes_masks(self) -> bool:
        return any(look.makes_masks for look in self.looks.values())

    def own_attention(self) -> list[type]:
        """Modules that compute attention without a registered function; the likeliest come first."""
        found = [m for m, look in self.looks.items() if not look.dispatches and _is_attention(m, look)]
        return sorted(found, key=lambda m: (not self.looks[m].computes_scores, m.__name__))

    def table_without(self, name: str) -> str | None:
        """A table of attention modules by implementation that has no entry for `name`."""
        tables = [t for look in self.looks.values() for t in look.tables.items()]
        return next((title for title, table in tables if "eager" in table and name not in table), None)


def _is_attention(module: type, look: _Look) -> bool:
    if issubclass(module, PreTrainedModel):
        return False
    named_so = re.search("attention|attn", module.__name__, re.IGNORECASE) is not None
    return named_so or (look.computes_scores and look.takes_mask)


def _look(module: type) -> _Look:
    look = _Look(False, False, False, False, set(), set(), {})
    todo, seen = list(_methods(module)), set()
    while todo:
        function = todo.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        names = set(_names_in(function.__code__))
        objects = dict(_globals_named(function, names))
        dispatches = any(isinstance(o, AttentionInterface) for o in objects.values())
        scores = bool(names & _SCORES)
        arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        look = look._replace(
            dispatches=look.dispatches or dispatches,
            computes_scores=look.computes_scores or scores,
            takes_mask=look.takes_mask or (scores and not {"mask", "attention_mask"}.isdisjoint(arguments)),
        )
        if dispatches:
            look.keywords.update(_UNSERVED.keys() & set(_keywords_in(function.__code__)))
        for name, thing in objects.items():
            if isinstance(thing, type) and issubclass(thing, nn.Module):
                look.modules.add(thing)
            elif _is_table(thing):
                look.tables[name] = thing
                look.modules.update(thing.values())
            elif isinstance(thing, FunctionType) and thing.__module__ == _MASK_MODULE:
                look = look._replace(makes_masks=True)
            elif isinstance(thing, FunctionType) and thing.__module__ == module.__module__ and not dispatches:
                # Not for a dispatching method: the function that it names is the fallback that it passes.
                todo.append(thing)
    return look


def _is_table(thing: Any) -> bool:
    return (
        isinstance(thing, dict)
        and bool(thing)
        and all(isinstance(m, type) and issubclass(m, nn.Module) for m in thing.values())
    )


def _methods(module: type) -> Iterator[FunctionType]:
    """The functions of a class and its bases that are not overridden, up to torch's and transformers' own."""
    overridden: set[str] = set()
    for base in module.__mro__:
        if base in PreTrainedModel.__mro__ or base.__module__.partition(".")[0] == "torch":
            continue
        for name, thing in vars(base).items():
            # _init_weights names the classes that it initialises, not those that the model uses.
            if name == "_init_weights" or name in overridden:
                continue
            if isinstance(function := _unwrapped(thing), FunctionType):
                yield function
                if "super" not in _names_in(function.__code__):
                    overridden.add(name)


def _unwrapped(thing: Any) -> Any:
    if isinstance(thing, property):
        thing = thing.fget
    while isinstance(inner := getattr(thing, "__wrapped__", getattr(thing, "__func__", None)), FunctionType):
        thing = inner
    return thing.func if isinstance(thing, partial) else thing


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _keywords_in(code: CodeType) -> Iterator[str]:
    """The strings in constant tuples, which include the keyword names of calls."""
    for constant in code.co_consts:
        if isinstance(constant, tuple):
            yield from (word for word in constant if isinstance(word, str))


def _globals_named(function: FunctionType, names: set[str]) -> Iterator[tuple[str, Any]]:
    """The objects that the names refer to: globals, captured variables, and attributes of modules."""
    scope = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            scope[name] = cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    for name in names & scope.keys():
        thing = scope[name]
        yield name, _unwrapped(thing)
        if isinstance(thing, ModuleType):
            for attribute in names & vars(thing).keys():
                yield f"{name}.{attribute}", _unwrapped(vars(thing)[attribute])
