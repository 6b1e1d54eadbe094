"""Few of many kernels: such as have every setting, or bring together every two traits that can meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations, product
from typing import Any, NamedTuple

from everything import EVERYTHING
from flash4_torch.configs.types import Features
from kernel_calls import Kernel

Pair = tuple[str, str]

_SIZES = ("dtype", "D", "Dv")
_FLAGS = ("varlen", "left", "right", "softcap", "dropout")


class Family(NamedTuple):
    """The kernels of one architecture."""

    heads: tuple[tuple[int, int], ...]
    """(D, Dv)"""
    reachable: Callable[[Features], Iterable[Any]]
    """The configs that calls with such features can have."""
    special: Callable[[Kernel], Mapping[str, bool]]
    """What its kernels can be besides what all can."""

    def traits(self, kernel: Kernel) -> set[str]:
        """What is special about a kernel."""
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
        """Kernels, by their traits, that bring together every two that can meet, unless a known one does."""
        met = {pair for kernel in known for pair in self._pairs(kernel)}
        kernels = self._by_traits()
        chosen = _covering({name: set(self._pairs(kernel)) - met for name, kernel in kernels.items()})
        return {name: kernels[name] for name in chosen}

    def _pairs(self, kernel: Kernel) -> Iterator[Pair]:
        return combinations(sorted(self.traits(kernel)), 2)

    def _by_traits(self) -> dict[str, Kernel]:
        """One kernel, the first, of each set of traits."""
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


def few(kernels: Mapping[str, Kernel], *always: str) -> dict[str, Kernel]:
    """What CI has time for: `always`, and others that have every setting that any has; or all of them."""
    settings = {name: {(setting,) for setting in _settings(kernel)} for name, kernel in kernels.items()}
    met = {setting for name in always for setting in settings[name]}
    chosen = kernels if EVERYTHING else [*always, *_covering({n: s - met for n, s in settings.items()})]
    return {name: kernel for name, kernel in kernels.items() if name in chosen}


def _settings(kernel: Kernel) -> Iterator[str]:
    """Of features and config, those that are not as they are by default."""
    features, _ = kernel
    for part in kernel:
        for name, value in zip(part._fields, part, strict=True):
            if name not in _SIZES and value != part._field_defaults.get(name):
                yield f"{name}={value}"
    yield "wide" if max(features.D, features.Dv) > 128 else "narrow"
    if features.D != features.Dv:
        yield "unequal heads"


def _covering(left: Mapping[str, set[tuple[str, ...]]]) -> list[str]:
    """Names, those with most that is new first, whose tuples are the tuples of all."""
    chosen: list[str] = []
    while True:
        name = max(left, key=lambda name: len(left[name]))
        if not (new := left[name]):
            return chosen
        chosen.append(name)
        left = {other: tuples - new for other, tuples in left.items()}
