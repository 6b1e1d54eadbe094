"""Every test is repeatable: fixed seeds, and hypothesis generates the same examples each time.

They stay the same as long as packages, modules and the collected tests do: hypothesis also uses numbers that
it finds in the source of modules. `--hypothesis-profile=fresh` generates new examples in every run, to find
what this misses.
"""

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import register_random, settings
from hypothesis.internal.conjecture import providers

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True, max_examples=60)
settings.register_profile("fresh", deadline=None, print_blob=True, max_examples=60, database=None)
settings.load_profile("repeatable")


class _TorchRandom:
    """Torch's generator as hypothesis wants it, so that each example starts from the same state."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


_TORCH_RANDOM = _TorchRandom()  # hypothesis keeps weak references only
register_random(_TORCH_RANDOM)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # modules and tests stay: the garbage collector took a fiftieth of the time for them
    if settings.default.derandomize:
        # Which modules are loaded later depends on the tests that a worker takes from the other.
        constants = providers._get_local_constants()
        providers._get_local_constants = lambda: constants


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
