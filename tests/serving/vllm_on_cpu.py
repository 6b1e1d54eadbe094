"""A platform of vLLM, for tests: its CPU, with attention backends chosen as on a GPU, and no compiled code.

`install` makes vLLM find it as any plugin, in all of its processes. The wheels on the package index hold code
for GPUs alone; what the engine calls of it on a CPU is here in torch.
"""

from __future__ import annotations

from pathlib import Path


def install(folder: Path) -> None:
    """Writes what a package's installation would, for a process that has the folder on its PYTHONPATH."""
    about = folder / "vllm_on_cpu-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-on-cpu\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.platform_plugins]\non_cpu = vllm_on_cpu:platform\n")


def platform() -> str:
    """The plugin: the name of the platform's class."""
    return "vllm_cpu_platform.Platform"
