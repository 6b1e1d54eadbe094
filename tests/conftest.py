"""Every test is repeatable: fixed seeds, and hypothesis draws the same examples each time.

The same, as long as the packages and the modules that are loaded are the same: hypothesis also draws numbers
that it finds in their source. `--hypothesis-profile=fresh` draws anew in every run, to find what that hides.
"""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import register_random, settings

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


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
