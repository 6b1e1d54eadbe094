"""Our compiled kernels: from a call to a launch, in the same way for every GPU.

The GPU determines a `Target`: kernel entries and config tables. The problem determines the `Features`;
features and sizes determine a config; features and config together name the compiled kernel. The rest of the
call goes into a tuple of numbers, `LaunchParams`. `forward` and `backward` make these choices, `tensors`
provides tensors that the kernels can read, `backend` launches.
"""

from .backend import Compiled, limits
from .targets import (
    APPEND_KVCACHE,
    DECODE,
    GROUP_REDUCE,
    MASK_BLOCKS,
    MASK_TRANSPOSE,
    MERGE_STATES,
    POSTPROCESS,
    PREPROCESS,
    SINKS_GRADIENT,
    SM80_FAMILY,
    SM80_ON_REQUEST,
    SM90A,
    SM100A,
    SM103A,
    TARGETS,
    WEIGHTS,
    WIDEST,
    Target,
    serving,
)

__all__ = [
    "APPEND_KVCACHE",
    "DECODE",
    "GROUP_REDUCE",
    "MASK_BLOCKS",
    "MASK_TRANSPOSE",
    "MERGE_STATES",
    "POSTPROCESS",
    "PREPROCESS",
    "SINKS_GRADIENT",
    "SM80_FAMILY",
    "SM80_ON_REQUEST",
    "SM90A",
    "SM100A",
    "SM103A",
    "TARGETS",
    "WEIGHTS",
    "WIDEST",
    "Compiled",
    "Target",
    "limits",
    "serving",
]
