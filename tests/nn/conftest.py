"""Tests of modules begin with no prepared calls."""

import pytest

from flash4_torch import fast_path
from flash4_torch.nn import prepared


@pytest.fixture(autouse=True)
def nothing_prepared() -> None:
    prepared.clear()
    fast_path.clear()
