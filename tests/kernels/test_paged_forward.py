"""The forward kernels over paged caches in the emulator, with its race checks, on both architectures."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from everything import examples
from flash4_torch.configs.types import Sm90Forward, Sm100Forward
from kernel_calls import static as static_of
from paged_calls import pages_change_nothing

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

sm90 = partial(static_of, Sm90Forward, varlen=True)
sm100 = partial(static_of, Sm100Forward, varlen=True)
CAUSAL = {"right": True}
WINDOW = {"left": True, "right": True}
STATICS = {
    "narrow": sm90(128, 128, (3, 80, 2, 2), k_ahead=True, lazy_rescale=True, page_box=16, **CAUSAL),
    "next tile": sm90(
        64, 64, (2, 128, 2, 2), "float16", next_tile=True, k_ahead=True, pingpong=True, page_box=64, **CAUSAL
    ),
    "packed": sm90(64, 40, (1, 128, 2, 2), pack_gqa=4, page_box=128, sinks="float32"),
    "window": sm90(72, 64, (2, 96, 2, 2), softcap=True, scaled=True, page_box=32, **WINDOW),
    "O over Q": sm90(64, 64, (2, 48, 2, 1), o_over_q=True, k_ahead=True, page_box=16, sinks="bfloat16"),
    "Blackwell": sm100(64, 64, (2, 6), page_box=16, **CAUSAL),
    "Blackwell, packed": sm100(128, 72, (1, 3), "float16", pack_gqa=2, page_box=128, sinks="bfloat16"),
    "Blackwell, window": sm100(64, 96, (2, 4), softcap=True, scaled=True, page_box=32, **WINDOW),
}


@pytest.mark.parametrize("name", STATICS)
# No shrinking: a launch is slow, and its error says what is wrong.
@settings(max_examples=examples(3, 12), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_pages_change_nothing(name: str, data: st.DataObject) -> None:
    pages_change_nothing(STATICS[name], data)
