"""The Blackwell forward kernels that calls can ask for, and few of them in which every two traits meet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, product

from flash4_torch.configs import sm100
from flash4_torch.configs.types import Features, Sm100Forward

Kernel = tuple[Features, Sm100Forward]
Pair = tuple[str, str]

_HEADS = ((64, 64), (72, 40), (128, 128), (192, 128), (256, 256))
_FLAGS = ("varlen", "left", "right", "softcap", "dropout")


def traits(kernel: Kernel) -> set[str]:
    """What is special about a kernel."""
    features, config = kernel
    found = {name for name in _FLAGS if getattr(features, name)}
    others = {
        "bool mask": features.mask == "bool",
        "bias": features.mask not in ("", "bool"),
        "pack": config.pack > 1,
        "one tile": config.q_tiles == 1,
        "O over Q": config.o_over_q,
        "no tail": not config.tail,
    }
    return found | {name for name, has in others.items() if has}


def covering(known: Iterable[Kernel]) -> dict[str, Kernel]:
    """Kernels, by their traits, that bring together every two that can meet, unless a known one does."""
    met = {pair for kernel in known for pair in _pairs(kernel)}
    left = {name: (kernel, set(_pairs(kernel)) - met) for name, kernel in _by_traits().items()}
    chosen = {}
    while True:
        name, (kernel, new) = max(left.items(), key=lambda item: len(item[1][1]))
        if not new:
            return chosen
        chosen[name] = kernel
        left = {other: (k, pairs - new) for other, (k, pairs) in left.items()}


def _pairs(kernel: Kernel) -> Iterator[Pair]:
    return combinations(sorted(traits(kernel)), 2)


def _by_traits() -> dict[str, Kernel]:
    """One kernel, the first, of each set of traits."""
    found: dict[str, Kernel] = {}
    for (D, Dv), mask, *flags in product(_HEADS, ("", "bool", "float32"), *((False, True),) * len(_FLAGS)):
        uses = dict(zip(_FLAGS, flags, strict=True))
        if uses["varlen"] and mask:
            continue
        scaled = uses["softcap"] or mask == "float32"
        features = Features("bfloat16", D, Dv, mask=mask, scaled=scaled, **uses)
        for config in sm100.reachable(features):
            found.setdefault(", ".join(sorted(traits((features, config)))), (features, config))
    return found
