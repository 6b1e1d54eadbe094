"""The Hopper forward kernels that calls can ask for, and a few in which every two traits meet."""

from __future__ import annotations

from flash4_torch.configs import sm90
from kernel_calls import Kernel
from kernel_traits import Family

_HEADS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
_SWITCHES = (
    "pingpong",
    "next_tile",
    "k_ahead",
    "half_block",
    "lazy_rescale",
    "o_over_q",
    "exp_quarters_before_pv",
)


def _special(kernel: Kernel) -> dict[str, bool]:
    features, config = kernel
    return {name: bool(getattr(config, name)) for name in _SWITCHES} | {
        "drawing warpgroup": features.rng_warpgroup,
        "cluster": config.cluster > 1,
        "one stage of Q": config.q_stages == 1,
    }


SM90 = Family(_HEADS, sm90.reachable, _special)
