"""Build entry point; the metadata is in pyproject.toml."""

from setuptools import find_packages, setup

# The emulator's C++ sources are outside the package; they are installed into it and compiled on first use.
EMULATOR_SOURCES = "flash4_torch.emulator.csrc"
# Measurements stay in the repository, except for the one that a command reads.
RESULTS = "flash4_torch.bench.results"

setup(
    packages=[*find_packages(include=["flash4_torch", "flash4_torch.*"]), EMULATOR_SOURCES, RESULTS],
    package_dir={EMULATOR_SOURCES: "csrc_stubs/no_gpu"},
    package_data={
        "flash4_torch": ["py.typed"],
        RESULTS: ["blackwell-weights.json"],
        EMULATOR_SOURCES: ["*.cpp", "*.h"],
    },
)
