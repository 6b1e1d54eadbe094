"""Our functions as a kernel of the Hugging Face Hub, which the package `kernels` loads by its name::

    python -m flash4_torch.integrations.hub flash4-torch-fa3
    export LOCAL_KERNELS=me/flash4-torch-fa3=$PWD/flash4-torch-fa3       # or uploaded to the Hub

    model.set_attn_implementation("me/flash4-torch-fa3")

The folder holds this package, so that a machine that loads the kernel needs torch and, for a GPU, what the
extra `kernels` installs. Where flash4_torch is installed, that is used.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

NAME = "flash4-torch-fa3"
"""The kernel's name. For a request that is decoded transformers calls `flash_attn_with_kvcache` only if the
name has "flash" and after it a 2 or a 3, the version of flash-attn whose interface this is."""

VERSION = 1
"""The version that transformers asks for: the branch v1 of a repository."""

_BACKENDS = {"cpu": (), "cuda": ("nvidia-cutlass-dsl", "tvm-ffi")}
"""What a kernel needs besides torch, in the words of `kernels`."""

_PACKAGE = Path(__file__).parents[2]
_LEFT_OUT = ("__pycache__", "bench", "csrc", "*.md", "*.png")


def write(folder: Path | str) -> Path:
    """Writes the kernel's repository to a folder, which may not exist yet, and returns its path.

    Raises:
        FileExistsError: there is such a folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True)
    for backend, needed in _BACKENDS.items():
        variant = folder / "build" / f"torch-{backend}"
        shutil.copytree(_PACKAGE, variant / _PACKAGE.name, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        shutil.copy(Path(__file__).with_name("kernel.py"), variant / "__init__.py")
        metadata = {
            "name": NAME,
            "id": f"{NAME.replace('-', '_')}_{backend}_{VERSION}",
            "version": VERSION,
            "license": "BSD-3-Clause",
            "python-depends": list(needed),
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return folder
