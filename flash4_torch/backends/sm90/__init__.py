"""Our kernels for Hopper GPUs: from a call to a launch.

The problem gives the features, the features and sizes a config; both together name the compiled kernel, and
what is left of the call travels in a tuple of numbers, its rule. `forward` and `backward` make these choices,
`tensors` sees to what the kernels may read, `backend` launches.
"""

from .backend import Sm90, limits
from .entries import ARCH, BACKWARD, FORWARD, MASK_BLOCKS, POSTPROCESS, PREPROCESS

__all__ = [
    "ARCH",
    "BACKWARD",
    "FORWARD",
    "MASK_BLOCKS",
    "POSTPROCESS",
    "PREPROCESS",
    "Sm90",
    "limits",
]
