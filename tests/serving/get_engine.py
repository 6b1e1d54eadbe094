"""Downloads an engine's wheel and unpacks what runs on a CPU: `python get_engine.py vllm==VERSION FOLDER`.

The rest of a wheel of vLLM, nine tenths of it, is code for GPUs. SGLang's has none, but modules in Rust.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_31_x86_64",
    "manylinux_2_34_x86_64",
    "manylinux_2_35_x86_64",
)
"""What wheels of some versions ask for; their Python runs anywhere."""


def main(requirement: str, folder: Path) -> None:
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    with tempfile.TemporaryDirectory() as downloads:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
        command += ["--only-binary", ":all:", *platforms, "--dest", downloads, requirement]
        subprocess.run(command, check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if _runs_on_a_cpu(name)])


def _runs_on_a_cpu(name: str) -> bool:
    return not name.startswith("vllm/") or name.endswith(".py")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
