"""Every bad call of the operators in `bad_inputs` fails with the error and words it stands with."""

from __future__ import annotations

import pytest

from bad_inputs import Case, attention, attention_varlen, check, scaled_dot_product_attention

CASES = (*attention.CASES, *attention_varlen.CASES, *scaled_dot_product_attention.CASES)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_it_is_refused_clearly(case: Case) -> None:
    check(case)
