"""The Blackwell forward kernels that calls can ask for, and a few in which every two traits meet."""

from __future__ import annotations

from flash4_torch.configs import sm100
from kernel_calls import Kernel
from kernel_traits import Family

_HEADS = ((64, 64), (72, 40), (128, 128), (192, 128), (256, 256))


def _special(kernel: Kernel) -> dict[str, bool]:
    _, config = kernel
    return {"one tile": config.q_tiles == 1, "O over Q": config.o_over_q, "pair": config.cluster == 2}


SM100 = Family(_HEADS, sm100.reachable, _special)
