"""A CPU's extensions are part of a kernel's key: a kernel compiled for one CPU may not run on another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from flash4_torch import processor
from flash4_torch.compile import Key, key

X86 = """processor\t: 0
cpu MHz\t\t: {mhz}
flags\t\t: {flags}
bugs\t\t: spectre_v1

processor\t: 1
flags\t\t: fpu
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd evtstrm sve cpuid\n"
SELECTED = ["avx", "avx2", "avx512f", "avx512_bf16", "avx_vnni", "amx_tile", "bmi2", "fma", "pni", "gfni"]
OTHERS = ["fpu", "hypervisor", "md_clear", "ibrs", "arch_perfmon", "flush_l1d", "clzero", "pku", "fsrm"]


@pytest.fixture(scope="module")
def description(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("proc") / "cpuinfo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "_DESCRIPTION", str(path))
        yield path


def extensions() -> tuple[str, ...]:
    return processor.extensions.__wrapped__()


@given(flags=st.permutations([*SELECTED, *OTHERS]), count=st.integers(0, 19), mhz=st.floats(1000, 5000))
def test_only_extensions_that_compilers_use_count(
    description: Path, flags: list[str], count: int, mhz: float
) -> None:
    """Their order does not count, nor do additions by the system and the hypervisor, nor the other cores."""
    description.write_text(X86.format(mhz=mhz, flags=" ".join(["avx", *flags[:count]])))
    assert extensions() == tuple(sorted({"avx", *flags[:count]} & set(SELECTED)))


def test_other_machines_have_names_too(description: Path) -> None:
    description.write_text(ARM)
    assert extensions() == ("asimd", "fp", "sve")
    description.write_text("processor\t: 0\nhart\t: 1\n")
    unknown = extensions()
    description.unlink()
    assert extensions() == unknown and len(unknown) == 1 and unknown[0]


def test_a_kernel_of_another_cpu_is_never_found(description: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with fewer extensions has other kernels: the key distinguishes all that the compiler does."""
    monkeypatch.setattr(key, "versions", key.versions.__wrapped__)
    monkeypatch.setattr(processor, "extensions", processor.extensions.__wrapped__)
    digests = set()
    for flags in ("sse2 avx2", "sse2 avx2 avx512f", "sse2 avx2 avx512f avx512vl", "sse2 avx2 amx_tile"):
        description.write_text(X86.format(mhz=1.0, flags=flags))
        digests.add(Key("flash4_torch.kernels.a:f", (1,), "sm_90a").digest)
    assert len(digests) == 4
