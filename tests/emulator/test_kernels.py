"""Every kernel in `kernels` is right, gives the same bits in any order of events, and has no finding."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from everything import examples
from flash4_torch.testing.emulate import Options, device
from kernels import ARCHS, Case, all_cases

CASES = [(arch, case) for arch in ARCHS for case in all_cases(arch)]
OPTIONS = (
    Options(),
    Options(compact=False),
    Options(schedule="late"),
    *(Options(schedule="fuzz", seed=seed) for seed in range(examples(1, 3))),
)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits, in which NaN is equal to itself."""
    return tensor.contiguous().view(torch.uint8).clone()


@pytest.mark.parametrize(("arch", "case"), CASES, ids=[f"{arch}-{case}" for arch, case in CASES])
def test_results_do_not_depend_on_the_schedule(arch: str, case: Case) -> None:
    expected = case.reference(*case.arguments())
    first: list[torch.Tensor] = []
    with device(arch) as emulated:  # raises for findings
        compiled = case.compile(arch)
        for options in OPTIONS:
            emulated.options = options
            arguments = case.arguments()
            compiled(*case.converted(arguments))
            case.check(arguments, expected)
            outputs = [bits(output) for output in arguments[len(arguments) - len(expected) :]]
            first = first or outputs
            assert all(map(torch.equal, outputs, first)), options
        assert len(emulated.reports) % len(OPTIONS) == 0 and emulated.reports


def test_there_are_kernels_for_both_architectures() -> None:
    names = {arch: {case.name for other, case in CASES if other == arch} for arch in ARCHS}
    assert names["sm_90a"] - names["sm_100a"] and names["sm_100a"] - names["sm_90a"]
    assert names["sm_90a"] & names["sm_100a"]
