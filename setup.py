"""Build entry point; metadata stands in pyproject.toml."""

from setuptools import find_packages, setup

# The emulator's C++ sources live outside the package and are installed into it, to be compiled on first use.
EMULATOR_SOURCES = "flash4_torch.emulator.csrc"

setup(
    packages=[*find_packages(include=["flash4_torch", "flash4_torch.*"]), EMULATOR_SOURCES],
    package_dir={EMULATOR_SOURCES: "csrc_stubs/no_gpu"},
    package_data={
        "flash4_torch": ["py.typed"],
        "flash4_torch.bench": ["results/blackwell-weights.json"],
        EMULATOR_SOURCES: ["*.cpp", "*.h"],
    },
)
