"""Bad input of the environment, the command line, warm-up: an error says what is wrong, nothing compiles."""

from __future__ import annotations

import pytest

from bad_inputs import Case, check, environment


@pytest.mark.parametrize("case", environment.CASES, ids=lambda case: case.name)
def test_environment(case: Case) -> None:
    check(case)
