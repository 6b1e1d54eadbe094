"""Kernels as the compiler of CUDA 13 makes them: a GPU gets its code where the driver has CUDA 13.

A process has one compiler, and that of CUDA 12 is installed for all other tests: another process compiles.
`make test` puts the compiler into build/cuda13.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import cubin
from flash4_torch import env
from flash4_torch.compile import Key

_ROOT = Path(__file__).parents[2]
FOLDER = _ROOT / "build" / "cuda13"


def codes(keys: Sequence[Key], folder: Path) -> dict[Key, cubin.Code]:
    """The code of each kernel. folder: where it is compiled to."""
    packages = (_ROOT, FOLDER, FOLDER / "nvidia_cutlass_dsl" / "dsl_packages", Path(__file__).parent)
    settings = {"PYTHONPATH": os.pathsep.join(map(str, packages)), env.CACHE_DIR.name: str(folder)}
    result = folder / "codes"
    subprocess.run(
        [sys.executable, __file__, str(result)],
        input=pickle.dumps(list(keys)),
        env=os.environ | settings,
        check=True,
    )
    return dict(zip(keys, pickle.loads(result.read_bytes()), strict=True))


def _compile(keys: Sequence[Key]) -> list[cubin.Code]:
    import cutlass

    from flash4_torch.compile import cache, jit

    assert cutlass.CUDA_VERSION.major == 13
    found = []
    for key in keys:
        with cache.obtained(key.digest, partial(jit.build, key)) as file:
            found.append(cubin.read(file)[0])
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(pickle.dumps(_compile(pickle.load(sys.stdin.buffer))))
