"""A few of many kernels that cover every setting, or every two traits that can occur together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import combinations, product
from typing import Any, NamedTuple, TypeVar

from everything import EVERYTHING
from flash4_torch.configs.types import Features
from kernel_calls import Kernel

Pair = tuple[str, str]
Name = TypeVar("Name")

_FLAGS = ("varlen", "left", "right", "softcap", "dropout")


class Family(NamedTuple):
    """The kernels of one architecture."""

    heads: tuple[tuple[int, int], ...]
    """(D, Dv)"""
    reachable: Callable[[Features], Iterable[Any]]
    """The configs that calls with such features can have."""
    special: Callable[[Kernel], Mapping[str, bool]]
    """Traits that its kernels can have besides those of all families."""

    def traits(self, kernel: Kernel) -> set[str]:
        """The traits of a kernel that are not plain."""
        features, config = kernel
        every = {name: bool(getattr(features, name)) for name in _FLAGS} | {
            "bool mask": features.mask == "bool",
            "bias": features.mask not in ("", "bool"),
            "pack_gqa": config.pack_gqa > 1,
            "no tail": not config.ragged_k,
            **self.special(kernel),
        }
        return {name for name, has in every.items() if has}

    def covering(self, known: Iterable[Kernel]) -> dict[str, Kernel]:
        """Kernels by their traits, in which every two that can occur together do, unless in a known one."""
        met = {pair for kernel in known for pair in self._pairs(kernel)}
        kernels = self._by_traits()
        chosen = chosen_to_cover({name: set(self._pairs(kernel)) - met for name, kernel in kernels.items()})
        return {name: kernels[name] for name in chosen}

    def _pairs(self, kernel: Kernel) -> Iterator[Pair]:
        return combinations(sorted(self.traits(kernel)), 2)

    def _by_traits(self) -> dict[str, Kernel]:
        """The first kernel with each set of traits."""
        found: dict[str, Kernel] = {}
        flags = ((False, True),) * len(_FLAGS)
        for (D, Dv), mask, *chosen in product(self.heads, ("", "bool", "float32"), *flags):
            uses = dict(zip(_FLAGS, chosen, strict=True))
            if uses["varlen"] and mask:
                continue
            scaled = uses["softcap"] or mask == "float32"
            features = Features("bfloat16", D, Dv, mask=mask, scaled=scaled, **uses)
            for config in self.reachable(features):
                kernel = features, config
                found.setdefault(", ".join(sorted(self.traits(kernel))), kernel)
        return found


def few(kernels: Mapping[str, Kernel], *always: str, elsewhere: Iterable[Kernel] = ()) -> dict[str, Kernel]:
    """The kernels that CI has time for: `always`, and others to cover every setting; or all of them.

    elsewhere: kernels of other tests of the same laws, whose settings need no others.
    """
    settings = {name: set(_settings(kernel)) for name, kernel in kernels.items()}
    met = {setting for name in always for setting in settings[name]}
    met |= {setting for kernel in elsewhere for setting in _settings(kernel)}
    chosen = kernels if EVERYTHING else [*always, *chosen_to_cover({n: s - met for n, s in settings.items()})]
    return {name: kernel for name, kernel in kernels.items() if name in chosen}


def of_few(kernels: Mapping[str, Kernel], names: Sequence[str]) -> list[str]:
    """The names that are among `few` kernels, which CI compiles anyway, or else the first one; or all."""
    return list(names) if EVERYTHING else [name for name in names if name in kernels] or [names[0]]


def _settings(kernel: Kernel) -> Iterator[str]:
    """The fields of features and config that are not at their defaults. A number or a dtype is one setting,
    whatever it is.
    """
    features, _ = kernel
    for part in kernel:
        for name, default in part._field_defaults.items():
            value = getattr(part, name)
            if value != default:
                yield f"{name}={value}" if isinstance(value, Enum) or value == "bool" else name
    yield "wide" if max(features.D, features.Dv) > 128 else "narrow"
    if features.D != features.Dv:
        yield "unequal heads"


def chosen_to_cover(left: Mapping[Name, set[Any]]) -> list[Name]:
    """Names whose tuples are together all tuples, those with the most new ones first."""
    chosen: list[Name] = []
    while True:
        name = max(left, key=lambda name: len(left[name]))
        if not (new := left[name]):
            return chosen
        chosen.append(name)
        left = {other: tuples - new for other, tuples in left.items()}
