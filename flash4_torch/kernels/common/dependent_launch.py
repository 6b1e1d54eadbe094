"""Programmatic dependent launch: a GPU launches a kernel before the kernel ahead of it has ended.

A call that launches several kernels then does not wait for each launch in turn. Those that come after another
one are launched with `use_pdl`, and all of their threads call `wait_for_previous_kernel` before they touch
global memory; the emulator refuses a kernel that does not. Kernels ahead of them do not trigger the launch
(griddepcontrol.launch_dependents), and the first kernel of a call is launched as usual: both were slower
(sm90/bwd/NOTES.md).
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass.base_dsl import Arch
from cutlass.cutlass_dsl import CuTeDSL

from ...configs.types import Features


def is_possible() -> bool:
    """Whether the GPUs that are compiled for have it: from Hopper on."""
    return bool(CuTeDSL._get_dsl().get_arch_enum() >= Arch.sm_90)


def is_possible_after_tables(features: Features) -> bool:
    """The same for a forward, which comes after others if they make the tables of its attn_mask."""
    return is_possible() and bool(features.mask) and not any(features.mods)


def wait_for_previous_kernel() -> None:
    """Wait until the kernels ahead have ended and what they wrote can be read; nothing in other launches."""
    if is_possible():
        cute.arch.griddepcontrol_wait()
