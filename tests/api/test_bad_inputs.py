"""Every bad call of the operators in `bad_inputs` fails with the error and words it stands with."""

from __future__ import annotations

import pytest

from bad_inputs import (
    Case,
    append_kvcache,
    attention,
    attention_varlen,
    check,
    merge_states,
    scaled_dot_product_attention,
)

DOORS = (attention, attention_varlen, scaled_dot_product_attention, append_kvcache, merge_states)
CASES = [case for door in DOORS for case in door.CASES]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_it_is_refused_clearly(case: Case) -> None:
    check(case)
