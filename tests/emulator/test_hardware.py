"""The comparison of the emulator with a GPU, as far as it works without one; and the recorded comparison."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from emulator.hardware import hopper, record, replay
from emulator.hardware.comparison import compared, differences, ulps_apart
from emulator.hardware.recorder import ARCH, Recorder
from emulator.hardware.recording import Bound, Recording
from emulator.kernels import all_cases

import flash4_torch
from flash4_torch.emulator import host

RESULT = Path(flash4_torch.__file__).parent / "bench" / "results" / "emulator-h200.json"
NUMPY = {torch.float16: np.float16, torch.float32: np.float32}


@pytest.fixture(scope="module")
def recording() -> Iterator[Recording]:
    recorder = Recorder()
    with recorder.listening():
        host.install(recorder.run, ARCH)
        try:
            for case in all_cases(ARCH):
                if case.name in ("ring_plain", "dependent"):
                    record.small_kernel(recorder, case)
        finally:
            host.uninstall()
    yield recorder.recording


def test_recorded_launches_have_their_memory_and_machine_code(recording: Recording, tmp_path: Path) -> None:
    recording.save(tmp_path / "recording.pkl")
    loaded = Recording.load(tmp_path / "recording.pkl")
    assert {step.name: len(step.launches) for step in loaded.steps} == {"ring_plain": 1, "dependent": 2}
    for step in loaded.steps:
        assert [r.before != r.after for r in step.regions] == [False] + [True] * len(step.launches)
        for launch in step.launches:
            assert loaded.bytes(launch.cubin).startswith(b"\x7fELF")
            assert launch.kernel.encode() in loaded.bytes(launch.cubin)


def test_pointers_move_to_the_memory_of_the_gpu(recording: Recording) -> None:
    """Pointers in tensor maps move, too (a map begins with one); nothing else in the parameters changes."""
    for step in recording.steps:
        buffers = [replay.Buffer(torch.zeros(1 << 20, dtype=torch.uint8)) for _ in step.regions]
        for launch in step.launches:
            moved = replay.parameters(launch, buffers)
            addresses = {buffer.address for buffer in buffers}
            starts = [int.from_bytes(bytes(data[:8].tolist()), "little") for data in moved]
            assert set(starts) <= addresses and len(set(starts)) == 2
            for before, after in zip(launch.params, moved, strict=True):
                assert bytes(after[8:].tolist()) == before[8:]


def test_comparison_finds_a_changed_byte(recording: Recording) -> None:
    step = recording.steps[0]
    region = step.regions[-1]
    result = torch.frombuffer(bytearray(recording.bytes(region.after)), dtype=torch.uint8)
    assert replay.touched(recording, region, result)
    assert replay.compare(recording, region, result)["explained"]
    result[2] ^= 1
    answer = replay.compare(recording, region, result)
    assert (answer["differing"], answer["max_ulp"], answer["explained"]) == (1, 1, False)
    untouched = replace(region, after=region.before)
    assert replay.touched(recording, untouched, result)


@given(
    st.sampled_from([torch.float16, torch.float32]),
    st.floats(width=16, allow_nan=False, allow_infinity=False),
)
def test_neighbours_are_one_ulp_apart(dtype: torch.dtype, value: float) -> None:
    x = torch.tensor([value], dtype=dtype)
    with np.errstate(over="ignore"):  # the neighbour of the largest number is infinite
        up = torch.from_numpy(np.nextafter(x.numpy(), NUMPY[dtype](np.inf)))
        down = torch.from_numpy(np.nextafter(x.numpy(), NUMPY[dtype](-np.inf)))
    assert ulps_apart(x, up).item() == ulps_apart(x, down).item() == 1
    assert ulps_apart(down, up).item() == 2


def test_a_difference_is_explained_up_to_its_bound() -> None:
    ours = torch.tensor([1.0, float("nan"), 2.0, float("inf")])
    theirs = torch.tensor([1.0, float("nan"), 2.25, float("inf")])
    assert compared(theirs, ours, Bound(0.25, "of this test"))["explained"]
    assert not compared(theirs, ours, Bound(0.125, "of this test"))["explained"]
    each = Bound(torch.tensor([0.0, 0.0, 0.5, 0.0]), "of this test")
    assert compared(theirs, ours, each)["share_of_bound"] == 0.5
    assert differences(theirs, ours)["differing"] == 1


def test_model_of_hopper_is_exact_where_nothing_is_cut() -> None:
    a, b = torch.randint(-16, 17, (5, 64)) / 8, torch.randint(-16, 17, (7, 64)) / 8
    assert torch.equal(hopper.product(a.half(), b.half()).double(), a.double() @ b.double().T)


def test_model_of_hopper_cuts_addends_below_the_largest() -> None:
    def summed(*addends: float) -> float:
        a = torch.tensor([[*addends, *[0.0] * (-len(addends) % hopper.BLOCK)]], dtype=torch.bfloat16)
        return hopper.product(a, torch.ones_like(a)).item()

    assert summed(1.0, 2.0**-24, 2.0**-24) == 1 + 2.0**-23
    assert summed(1.0, *[2.0**-26] * 15) == 1
    assert summed(-1.0, -(2.0**-24)) == -1


def test_the_recorded_comparison_with_an_h200_left_nothing_unexplained() -> None:
    result: dict[str, Any] = json.loads(RESULT.read_text())
    steps = result["steps"]
    assert result["summary"]["steps"] == len(steps) and all(step["explained"] for step in steps)
    products = [output for step in steps for output in step["outputs"] if "of_model" in output]
    assert len(products) == 3
    for output in products:
        assert output["of_model"].items() <= output.items()
