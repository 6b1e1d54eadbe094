"""Downloads a wheel of vLLM and unpacks its Python: `python get_vllm.py VERSION FOLDER`.

The rest of a wheel, nine tenths of it, is code for GPUs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64")
"""What wheels of some versions ask for; their Python runs anywhere."""


def main(version: str, folder: Path) -> None:
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    with tempfile.TemporaryDirectory() as downloads:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
        command += ["--only-binary", ":all:", *platforms, "--dest", downloads, f"vllm=={version}"]
        subprocess.run(command, check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name]
            archive.extractall(folder, names)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
