"""Our compiled kernels: from a call to a launch, the same way for every GPU.

The GPU gives a target: entries of kernels, and tables. The problem gives the features, the features and sizes
a config; both together name the compiled kernel, and what is left of the call travels in a tuple of numbers,
its rule. `forward` and `backward` make these choices, `tensors` sees to what the kernels may read, `backend`
launches.
"""

from .backend import Compiled, limits
from .targets import (
    GROUP_REDUCE,
    MASK_BLOCKS,
    POSTPROCESS,
    PREPROCESS,
    SM90A,
    SM100A,
    SM103A,
    TARGETS,
    Target,
)

__all__ = [
    "GROUP_REDUCE",
    "MASK_BLOCKS",
    "POSTPROCESS",
    "PREPROCESS",
    "SM90A",
    "SM100A",
    "SM103A",
    "TARGETS",
    "Compiled",
    "Target",
    "limits",
]
