"""Few of the forward kernels that calls can ask for, in which every two traits meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations, product
from typing import Any, NamedTuple

from flash4_torch.configs.types import Features
from kernel_calls import Kernel

Pair = tuple[str, str]

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
            "pack": config.pack > 1,
            "no tail": not config.tail,
            **self.special(kernel),
        }
        return {name for name, has in every.items() if has}

    def covering(self, known: Iterable[Kernel]) -> dict[str, Kernel]:
        """Kernels, by their traits, that bring together every two that can meet, unless a known one does."""
        met = {pair for kernel in known for pair in self._pairs(kernel)}
        left = {name: (kernel, set(self._pairs(kernel)) - met) for name, kernel in self._by_traits().items()}
        chosen = {}
        while True:
            name, (kernel, new) = max(left.items(), key=lambda item: len(item[1][1]))
            if not new:
                return chosen
            chosen[name] = kernel
            left = {other: (k, pairs - new) for other, (k, pairs) in left.items()}

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
