"""The benchmark measures what it claims, compares like with like, and reports the contents of its rows."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import flash4_torch
from everything import EVERYTHING
from flash4_torch import backends, env, info
from flash4_torch.__main__ import main
from flash4_torch.backends import dispatch
from flash4_torch.backends.compiled import TARGETS, Target
from flash4_torch.bench import (
    cases,
    command,
    context,
    decode,
    feature_times,
    features,
    flex,
    gpu,
    host,
    memory,
    models,
    module,
    peers,
    providers,
    speeds,
    timing,
)
from flash4_torch.bench.cases import DIRECTIONS, Cell, Roof
from flash4_torch.bench.features import FEATURES, Shape
from flash4_torch.bench.peak import peak_mib
from flash4_torch.bench.providers import Provider
from flash4_torch.bench.settings import Selection, Settings
from flash4_torch.errors import BackendError
from flash4_torch.testing import backends_used

TINY = Cell(D=16, causal=True, S=24, B=2, Hq=4, Hk=2, dtype="float32")
TWICE = Settings(rounds=2)

# The folder also holds results that no run of the benchmark wrote.
RESULTS = [
    path
    for path in sorted((Path(command.__file__).parent / "results").glob("*.json"))
    if "sections" in json.loads(path.read_text())
]

# Lengths for each D, mask and head group; then, where memory limits at 4.24 TB/s, TFLOP/s by hand.
TABLE = """
64 no 1: 256 512 1024 2048 4096 16384
64 yes 1: 256 512 1024 2048 4096 16384
96 no 1: 1024 8192
96 yes 1: 1024 8192
128 no 1: 256 512 1024 2048 4096 16384
128 yes 1: 256 512 1024 2048 4096 16384
192 no 1: 1024 8192
192 yes 1: 1024 8192
256 no 1: 1024 4096 16384
256 yes 1: 1024 4096 16384
128 no 4: 2048 8192
128 yes 4: 2048 8192
"""
HEADS = {64: 32, 96: 21, 128: 16, 192: 10, 256: 8}
MEMORY_FLOORS = {
    "forward": {
        (False, 256): 543,
        (False, 512): 1085,
        (True, 256): 271,
        (True, 512): 543,
        (True, 1024): 1085,
    },
    "backward": {(False, 256): 678, (True, 256): 339, (True, 512): 678},
}


def test_gpu_cells_are_the_peers_table() -> None:
    expected = []
    for line in TABLE.split("\n")[1:-1]:
        D, causal, group = line.partition(":")[0].split()
        H = HEADS[int(D)]
        for S in map(int, line.partition(":")[2].split()):
            expected.append(Cell(int(D), causal == "yes", S, 32768 // S, H, H // int(group), "bfloat16"))
    assert len(expected) == 42
    assert list(cases.gpu_cells()) == expected


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_roof_is_memory_where_a_cell_does_little_with_its_bytes(direction: str) -> None:
    roof = Roof(matmul=800e12, copy=4.24e12)
    for cell in cases.gpu_cells():
        floor = MEMORY_FLOORS[direction].get((cell.causal, cell.S), 1200)
        by_memory = Roof(matmul=float("inf"), copy=4.24e12).flops(cell, direction) / 1e12
        if floor == 1200 or cell.Hq != cell.Hk:
            assert by_memory > 1050
        else:
            assert by_memory == pytest.approx(floor, abs=1)
        assert roof.flops(cell, direction) / 1e12 == pytest.approx(min(800, by_memory))


@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_the_operators_own(causal: bool) -> None:
    cell = Cell(D=8, causal=causal, S=64, B=2, Hq=4, Hk=2, dtype="float32")
    q, k, v, dout = cell.inputs("cpu")
    q.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        flash4_torch.attention(q, k, v, causal=causal).backward(dout)
    counted = counter.get_flop_counts()["Global"]
    # The operator counts all pairs, as torch's formulas do, a cell those that causal leaves.
    share = 2 if causal else 1
    for direction, operator in (
        ("forward", torch.ops.flash4.attention),
        ("backward", torch.ops.flash4.attention_backward),
    ):
        assert counted[operator] == pytest.approx(cell.flops(direction) * share)


@given(S=st.integers(1, 40), window=st.integers(0, 60), Hk=st.integers(1, 3), group=st.integers(1, 3))
def test_flops_of_a_window_count_what_is_visible(S: int, window: int, Hk: int, group: int) -> None:
    rows = torch.arange(S)
    distance = rows[:, None] - rows
    visible = int(((distance >= 0) & (distance <= window)).sum())
    cell = Cell(D=8, causal=True, S=S, B=2, Hq=Hk * group, Hk=Hk, window=window)
    if window >= S:
        cell = Cell(D=8, causal=True, S=S, B=2, Hq=Hk * group, Hk=Hk)
        visible = S * S / 2
    assert cell.flops("forward") == 4 * 2 * Hk * group * visible * 8
    assert cell.flops("backward") == 2.5 * cell.flops("forward")


def test_bytes_are_those_of_the_tensors() -> None:
    q, k, v, dout = TINY.inputs("cpu")
    assert TINY.bytes("forward") == sum(x.nbytes for x in (q, k, v, dout))
    assert TINY.bytes("backward") == 2 * TINY.bytes("forward")


def test_selection_takes_what_it_names() -> None:
    chosen = Settings("cuda", selection=Selection.parse(["D=64,128", "causal=yes", "S=2048", "Hk=16,4"]))
    assert [(c.D, c.causal, c.S, c.Hk) for c in cases.cells(chosen)] == [
        (128, True, 2048, 16),
        (128, True, 2048, 4),
    ]
    assert cases.cells(Settings("cuda")) == list(cases.gpu_cells())
    assert {c.S for c in cases.cells(Settings("cpu", quick=True))} == {1024}
    assert Selection.parse(["S=1"]).takes({"D": 64})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["nonsense"],
            "unknown section nonsense; there are forward, backward, features, memory, host, module, "
            "emulator, decode, models, swap, context, flex",
        ),
        (["--threads", "0"], "--threads is 0, but it must be at least 1"),
        (["--rounds", "1"], "--rounds is 1, but it must be at least 2"),
        (
            ["--cells", "D=64", "C=2"],
            "--cells is 'C=2', but it must be NAME=VALUE,... with one of "
            "D, causal, S, Hk, dtype, feature, direction, B, Sq, E, mode, mask, dropout, need_weights, "
            "compiled, mod, way",
        ),
        (["--device", "cuda"], "--device is cuda, but torch sees no GPU"),
        (["--plot", "here"], "--plot needs matplotlib: pip install 'flash4_torch[demo]'"),
    ],
)
def test_bench_refuses_before_it_measures(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"flash4_torch bench: {sentence}\n" and captured.out == ""


@pytest.mark.usefixtures("tiny_machine")
def test_nothing_selected_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "forward", "--cells", "D=77"]) == 2
    sentence = "flash4_torch bench: no case is what --cells selects, so nothing was measured\n"
    assert capsys.readouterr().err == sentence


@pytest.fixture
def tiny_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with one cell and a roof that takes no time."""
    monkeypatch.setattr(cases, "cpu_cells", lambda: iter([TINY]))
    monkeypatch.setattr(peers, "measure_roof", lambda dtype, settings: Roof(1e12, 1e11))


@pytest.mark.usefixtures("tiny_machine")
def test_bench_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    out = tmp_path / "new" / "results.json"
    words = "forward backward --device cpu --threads 1 --rounds 2 --cells S=24 --out"
    try:
        assert main(["bench", *words.split(), str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    document = json.loads(out.read_text())
    printed = capsys.readouterr().out
    for direction in DIRECTIONS:
        (row,) = document["sections"][direction]
        assert row["direction"] == direction and list(row["tflops"]) == ["flash4", "sdpa"]
        assert speeds.report([row]) in printed
        for name, seconds in row["seconds"].items():
            work = TINY.flops(direction)
            assert row["tflops"][name] == pytest.approx(work / seconds["median"] / 1e12)
    assert set(document["sections"]["backward"][0]["served_by"]) == {"attention", "attention_backward"}
    assert document["parameters"] == {
        "device": "cpu",
        "threads": 1,
        "quick": False,
        "clock": "wall",
        "rounds": 2,
        "cells": {"S": ["24"]},
        "budget": 600,
        "max_autotune": False,
    }
    assert info.versions().items() <= document["versions"].items()
    assert {"cuDNN", "flash-attn-4", "FlashAttention-3"} <= set(document["versions"])


@pytest.mark.usefixtures("tiny_machine")
def test_a_section_of_which_nothing_is_selected_is_empty() -> None:
    section = peers.Peers("backward")
    for words in (["direction=forward"], ["S=1"]):
        rows = list(section.measure(Settings(selection=Selection.parse(words))))
        assert rows == [] and section.text(rows).count("\n") == 1


def _failing(*arguments: Any) -> Any:
    raise RuntimeError("no\nsuch  kernel")


def _wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cell: Cell) -> Any:
    return providers.sdpa().forward(q, k, v, cell)[0] * float("nan"), None


@pytest.mark.usefixtures("tiny_machine")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_who_fails_or_is_wrong_is_left_out_and_named(
    direction: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    for name, load in {
        "fa3": providers.fa3,
        "failing": lambda: Provider(_failing),
        "raw": lambda: Provider(providers.sdpa().forward, _gradients),
        # The last one, which the others would be compared with if it were right.
        "wrong": lambda: Provider(_wrong),
        "sdpa": providers.sdpa,
    }.items():
        monkeypatch.setitem(providers.ON_CPU, name, load)
    (row,) = peers.Peers(direction).measure(TWICE)
    # A name in the table already keeps its place.
    assert list(row["tflops"]) == ["flash4", "sdpa", "raw"]
    assert row["left_out"]["failing"] == "RuntimeError: no such kernel"
    assert row["left_out"]["wrong"].startswith("ArithmeticError: its result differs")
    assert "flash_attn_interface" in row["left_out"]["fa3"]
    text = peers.Peers(direction).text([row])
    for name, why in row["left_out"].items():
        assert f"\nleft out {name}: {why}, cells: 1" in text
    assert "\nflash4 served attention by " in text
    assert "flash4 " in capsys.readouterr().err


def _gradients(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
    """A separate backward, as FlashAttention-3 has."""
    cell: Cell = rest[-1]
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    return torch.autograd.grad(providers.sdpa().forward(*leaves, cell)[0], leaves, dout)


def test_an_error_is_one_line() -> None:
    assert providers.sentence(ValueError("two\n  lines")) == "ValueError: two lines"
    refusal = BackendError("a call", {"sm90": ["it has no gradient", "it is busy"]})
    assert providers.sentence(refusal) == "sm90: it has no gradient; sm90: it is busy"


def test_a_result_is_refused_if_it_is_another() -> None:
    x = torch.randn(100)
    peers._refuse_difference((x * 1.01,), (x,))
    for other in (x * 1.03, x * float("nan")):
        with pytest.raises(ArithmeticError):
            peers._refuse_difference((x, other), (x, x))


@given(causal=st.booleans(), group=st.sampled_from([1, 3]), S=st.integers(1, 40))
def test_providers_compute_the_same(causal: bool, group: int, S: int) -> None:
    cell = Cell(D=16, causal=causal, S=S, B=2, Hq=3, Hk=3 // group, dtype="float32")
    found, missing = providers.available("cpu")
    assert list(found) == ["flash4", "sdpa"] and not missing
    for direction in DIRECTIONS:
        entry = peers.prepare(found, cell, direction, "cpu")
        assert list(entry.calls) == ["flash4", "sdpa"] and not entry.left_out
        torch.testing.assert_close(entry.calls["flash4"](), entry.calls["sdpa"](), atol=1e-5, rtol=1e-4)


def test_a_window_is_ours_and_not_sdpas() -> None:
    cell = Cell(D=16, causal=True, S=24, B=1, Hq=2, Hk=2, dtype="float32", window=5)
    q, k, v, _ = inputs = cell.inputs("cpu")
    (ours,) = providers.flash4().prepare(cell, "forward", inputs)()
    torch.testing.assert_close(ours, flash4_torch.attention(q, k, v, window=(5, 0)))
    assert "no window" in peers.prepare({"sdpa": providers.sdpa()}, cell, "forward", "cpu").left_out["sdpa"]


class _Fa3:
    """FlashAttention-3's two operators, with the names of their arguments, made of torch's."""

    def __init__(self) -> None:
        self.rules: dict[str, Any] = {}

    def fwd(self, q: Any, k: Any, v: Any, *, num_splits: int, **rules: Any) -> tuple[Any, ...]:
        self.rules = rules
        out, lse = flash4_torch.attention(
            q, k, v, causal=rules["is_causal"], scale=rules["softmax_scale"], return_lse=True
        )
        return out, lse, None, None

    def bwd(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dq: Any, dk: Any, dv: Any, **_: Any
    ) -> None:
        assert out.shape == q.shape and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        for into, value in zip((dq, dk, dv), _gradients(dout, q, k, v, TINY), strict=True):
            into.copy_(value)


def test_fa3_is_found_by_name_or_as_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _Fa3()
    monkeypatch.setattr(torch.ops, "flash_attn_3", fake, raising=False)
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", sys)
    found = {"fa3": providers.fa3(), "sdpa": providers.sdpa()}
    assert not loaded
    monkeypatch.setenv(env.BENCH_FA3.name, "/somewhere/_C.so")
    providers.fa3()
    assert loaded == ["/somewhere/_C.so"]
    for direction in DIRECTIONS:
        entry = peers.prepare(found, TINY, direction, "cpu")
        assert list(entry.calls) == ["fa3", "sdpa"], entry.left_out
    assert fake.rules == {"softmax_scale": 0.25, "is_causal": True, "window_size_left": -1}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_gpu_of_ours_is_measured_with_our_kernels(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: target.capability)
    name = peers.own_backend(Settings("cuda"))
    assert name == {8: "sm80", 9: "sm90", 10: "sm100", 12: "sm80"}[target.capability[0]]
    assert name in {backend.name for backend in backends.PRIORITY}


def test_ours_is_forced_to_the_gpus_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    on_gpu = Settings("cuda")
    assert peers.own_backend(Settings("cpu")) == ""
    assert peers.own_backend(on_gpu) == "sm90"
    monkeypatch.setenv(env.BACKEND.name, "sm80")
    assert peers.own_backend(on_gpu) == "sm80"
    monkeypatch.setenv(env.BACKEND.name, "sm100")
    assert peers.own_backend(on_gpu) == "sm90"
    monkeypatch.setattr(dispatch, "PRIORITY", ())
    assert peers.own_backend(on_gpu) == ""
    monkeypatch.setenv(env.BACKEND.name, "tiled")
    with peers._forced("sm90"):
        assert env.BACKEND.get() == "sm90"
    with peers._forced(""):
        assert env.BACKEND.get() == "tiled"


def test_contenders_of_a_cell_are_compared_with_the_first() -> None:
    q, *_ = TINY.inputs("cpu")
    row = peers.compare_cell(
        TINY,
        {"thrice": lambda: [torch.sin(q) for _ in range(60)], "once": lambda: torch.sin(q)},
        Settings(rounds=5),
    )
    assert row["ratios"]["thrice"]["median"] == 1.0
    assert row["ratios"]["once"]["median"] < 1.0 and row["tflops"]["once"] > row["tflops"]["thrice"]
    assert speeds.table_of([row]).splitlines()[-1].split()[-1] == "once"


SPEEDS = st.floats(1.0, 1000.0)


def _row(tflops: dict[str, float], **changes: Any) -> dict[str, Any]:
    """A row as `measure` makes it, for contenders that take the same time each round."""
    first = next(iter(tflops.values()), 0.0)
    ratios = {name: dict.fromkeys(("median", "low", "high"), first / speed) for name, speed in tflops.items()}
    return {
        **Cell(128, True, 512, 64, 16, 16).case(),
        "direction": "forward",
        "tflops": tflops,
        "ratios": ratios,
        "served_by": {"attention": "sm90"},
        "left_out": {},
        "roof_tflops": 500.0,
        "matmul_tflops": [800.0, 790.0],
        "copy_tbs": [4.2, 4.1],
        **changes,
    }


@given(ours=SPEEDS, others=st.lists(SPEEDS, min_size=1, max_size=5))
def test_ratio_is_over_the_fastest_peer(ours: float, others: list[float]) -> None:
    row = _row({"flash4": ours} | {f"peer {i}": speed for i, speed in enumerate(others)})
    assert row["tflops"][speeds.best_peer(row)] == max(others)
    ratio = speeds.versus_best(row)
    assert ratio and ratio["median"] == pytest.approx(ours / max(others))


def test_a_ratio_needs_us_and_a_peer() -> None:
    for tflops in ({"flash4": 1.0}, {"fa3": 1.0}, {}):
        row = _row(tflops)
        assert speeds.versus_best(row) is None and speeds.means([row]) == []
        assert speeds.report([row])


@given(ratios=st.lists(st.tuples(st.sampled_from([64, 128]), SPEEDS), min_size=1, max_size=9))
def test_means_are_geometric_by_width_and_over_all(ratios: list[tuple[int, float]]) -> None:
    rows = [_row({"flash4": ratio, "fa3": 1.0}, D=D) for D, ratio in ratios]
    mean, ahead = speeds.means(rows)
    for D in {D for D, _ in ratios}:
        expected = statistics.geometric_mean([ratio for d, ratio in ratios if d == D])
        assert f" D {D} {expected:.3f}," in mean
    assert mean.endswith(f" all {statistics.geometric_mean([ratio for _, ratio in ratios]):.3f}")
    assert f"in {len(ratios)} of {len(ratios)} cells" in ahead


def test_report_of_a_table() -> None:
    rows = [
        _row({"flash4": 450.0, "fa3": 400.0, "sdpa": 440.0}),
        _row({"flash4": 380.0, "fa3": 400.0}, left_out={"sdpa": "RuntimeError: no"}, Hk=4),
    ]
    expected = """
dtype       D  mask      S   BxHq/Hk  flash4    fa3   sdpa  best peer  ratio       quartiles   roof  of roof
------------------------------------------------------------------------------------------------------------
bfloat16  128  causal  512  64x16/16   450.0  400.0  440.0  sdpa       1.023  1.023 to 1.023  500.0      90%
bfloat16  128  causal  512   64x16/4   380.0  400.0         fa3        0.950  0.950 to 0.950  500.0      76%
geometric mean of the ratios, ours / best peer: D 128 1.023, D 128 GQA 4 0.950, all 0.986
ratio at least 1.00 in 1 of 2 cells
bfloat16: matrix product 800 and 790 TFLOP/s, copy 4.2 and 4.1 TB/s
flash4 served attention by sm90, cells: 2
left out sdpa: RuntimeError: no, cells: 1"""
    assert f"\n{speeds.report(rows)}" == expected


class _Clock:
    """A GPU's clock that `call` moves, and the events that read it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def call(self, milliseconds: Iterator[float]) -> Callable[[], None]:
        def run() -> None:
            self.now += next(milliseconds)
            self.log.append("call")

        return run

    def event(self, enable_timing: bool) -> Any:
        clock = self

        class Event:
            def record(self) -> None:
                self.at = clock.now

            def elapsed_time(self, other: Any) -> float:
                return other.at - self.at

        return Event()


def test_gpu_times_all_but_the_first_of_a_batch_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: clock.log.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: clock.log.append("queue"))
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: clock.log.append(f"rest {seconds}"))
    samples = timing.GpuTimer().samples(clock.call(iter([100.0, 1.0, 2.0, 3.0, 4.0])))
    assert samples == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3])
    assert clock.log == ["wait", "rest 0.02", "queue", *["call"] * 5, "wait"]


@given(names=st.lists(st.sampled_from("abcde"), min_size=2, unique=True), rounds=st.integers(2, 30))
def test_every_round_times_everyone_once_in_a_repeatable_order(names: list[str], rounds: int) -> None:
    def orders() -> list[list[str]]:
        called: list[str] = []
        contenders = {name: lambda name=name: called.append(name) for name in names}

        class Timer:
            def samples(self, call: Callable[[], Any]) -> list[float]:
                call()
                return [1.0, 3.0]

        result = timing.compare(contenders, Settings(rounds=rounds), Timer())
        assert all(seconds.samples == 2 * rounds for seconds in result.seconds.values())
        timed = called[len(names) :]
        return [timed[i : i + len(names)] for i in range(0, len(timed), len(names))]

    first = orders()
    assert first == orders() and len(first) == rounds
    assert all(sorted(order) == sorted(names) for order in first)
    if rounds >= 20:
        assert len({tuple(order) for order in first}) > 1


def test_ratios_are_of_each_round_by_itself() -> None:
    result = timing.Comparison({"a": [[1.0], [10.0], [100.0]], "b": [[2.0], [20.0], [200.0]]})
    assert result.ratio("a", "b") == (0.5, 0.5, 0.5, 3)
    assert result.seconds["a"].median == 10.0


def test_a_budget_ends_the_rounds() -> None:
    assert not timing._is_enough(6, 1.5, 1.0) and timing._is_enough(7, 1.5, 1.0)
    assert not timing._is_enough(100, 0.9, 1.0)
    assert not timing._is_enough(2, 9.0, 1.0) and timing._is_enough(3, 9.0, 1.0)


@given(values=st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=30))
def test_spread_orders_its_quartiles(values: list[float]) -> None:
    spread = timing.Spread.of(values)
    assert min(values) <= spread.low <= spread.median <= spread.high <= max(values)
    assert spread.samples == len(values)


def test_gpu_state_is_read_and_nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        uuid = "1-2"

    class Answer:
        stdout = "580.1, 1980, 3201, 120.5, 700.0, 41\n"

    asked: list[str] = []

    def run(command: list[str], **options: Any) -> Answer:
        asked.extend(command)
        return Answer()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(gpu.subprocess, "run", run)
    assert gpu.state() == {
        "driver": "580.1",
        "sm_mhz": "1980",
        "memory_mhz": "3201",
        "watts": "120.5",
        "limit_watts": "700.0",
        "celsius": "41",
    }
    assert asked[0] == "nvidia-smi" and asked[1] == "--id=GPU-1-2" and asked[2].startswith("--query-gpu=")

    def missing(*arguments: Any, **options: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(gpu.subprocess, "run", missing)
    assert gpu.state() == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.state() == {}


def test_stored_results_can_be_read() -> None:
    assert RESULTS
    for path in RESULTS:
        for name, rows in json.loads(path.read_text())["sections"].items():
            lines = len(rows) // 5 if name == "swap" else len(rows)  # five sizes to a line
            assert command.SECTIONS[name].text(rows).count("\n") >= lines + 1


def test_plots_of_stored_results(tmp_path: Path) -> None:
    """The newest section of each kind is drawn, or all are."""
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    from flash4_torch.bench import plots

    kinds: set[str] = set()
    for path in reversed(RESULTS):
        sections = json.loads(path.read_text())["sections"]
        if not EVERYTHING:
            sections = {name: rows for name, rows in sections.items() if name not in kinds}
        kinds |= sections.keys()
        plots.draw(sections, tmp_path / path.stem)
        for name in sections:
            assert (tmp_path / path.stem / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_has_a_panel_for_each_width_and_mask() -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    from flash4_torch.bench import plots

    rows = [
        _row({"flash4": 1.0, "fa3": 2.0}, D=D, causal=causal, S=S, Hk=Hk)
        for D, Hk in ((64, 16), (128, 16), (128, 4))
        for causal in (False, True)
        for S in (256, 512)
    ]
    # One length is missing: the line skips it.
    del rows[0]["tflops"]["fa3"]
    panels = [axes for axes in plots._speeds(rows).axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == [
        f"bfloat16, D={heads}, {mask}" for heads in ("64", "128", "128, GQA 4") for mask in ("full", "causal")
    ]
    assert [line.get_label() for line in panels[0].get_lines()] == ["flash4", "fa3", "roof"]
    assert list(panels[0].get_lines()[1].get_xdata()) == [512]


@given(power=st.sampled_from([0.5, 1.0, 2.0]), factor=st.floats(0.1, 100.0))
def test_exponent_of_a_power_law(power: float, factor: float) -> None:
    sizes = [1024, 2048, 8192]
    assert memory.exponent(sizes, [factor * S**power for S in sizes]) == pytest.approx(power)


@pytest.mark.parametrize("name", [name for name in FEATURES if name != "dropout"])
def test_both_sides_of_a_feature_compute_the_same(name: str) -> None:
    pair = FEATURES[name](Shape(B=2, S=48, H=4, D=16))
    ours, theirs = pair.flash4(), pair.torch()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    dout = torch.randn_like(ours)
    gradients = (
        features.step(pair.flash4, pair.inputs, dout)[1],
        features.step(pair.torch, pair.inputs, dout)[1],
    )
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def test_both_sides_of_dropout_drop() -> None:
    pair = FEATURES["dropout"](Shape(B=1, S=32, H=1, D=8))
    for attend in (pair.flash4, pair.torch):
        assert not torch.equal(attend(), attend())


def test_features_are_timed_against_torch_and_against_ours_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_times, "_shapes", lambda settings: iter([Shape(B=2, S=16, H=2, D=8)]))
    chosen = Selection.parse(["feature=dropout,varlen of equals", "direction=forward"])
    rows = list(feature_times.measure(Settings(rounds=2, selection=chosen)))
    assert [row["feature"] for row in rows] == ["dropout", "varlen of equals"]
    for row in rows:
        assert list(row["seconds"]) == ["flash4", "torch", "plain"]
        assert set(row["served_by"].values()) <= {backend.name for backend in backends.PRIORITY}
    assert feature_times.text(rows).count("\n") == 3


def test_host_contenders_compute_the_same() -> None:
    cell = Cell(D=16, causal=False, S=16, B=1, Hq=1, Hk=1, dtype="float32")
    q, k, v, _ = cell.inputs("cpu")
    expected, _ = providers.sdpa().forward(q, k, v, cell)
    for attend in (host.CONTENDERS | host._transformers()).values():
        torch.testing.assert_close(attend(q, k, v), expected)


def test_host_times_peers_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(providers.ON_CPU, "fa3", providers.sdpa)
    monkeypatch.setitem(providers.ON_CPU, "fa4", lambda: Provider(_failing))
    monkeypatch.setattr(host.shutil, "which", lambda name: None)
    rows = list(host.measure(TWICE))
    plain = [row["call"] for row in rows if row["mode"] == "nothing recorded"]
    assert plain == [*host.CONTENDERS, "fa3"]
    assert {row["call"] for row in rows if row["mode"] == "forward + backward"} == {
        *host.CONTENDERS,
        host.NOTHING,
    }
    theirs = [row for row in rows if row["mode"].startswith("transformers")]
    assert [row["call"] for row in theirs] == ["transformers: fa4", "transformers: sdpa"]
    assert theirs[1]["over_sdpa"] == 1.0 and set(theirs[0]["served_by"].values()) == {"cpu"}
    served = {row["call"]: set(row["served_by"].values()) for row in rows}
    assert capsys.readouterr().err == "  left out fa4: RuntimeError: no such kernel\n"
    assert served["flash4.attention"] == {"cpu"} and served["fa3"] == set()


@pytest.mark.parametrize("case", ["plain", "causal", "key_padding_mask", "need_weights"])
def test_module_contenders_do_the_same_step(case: str) -> None:
    steps = []
    for who in module.CLASSES:
        torch.manual_seed(0)
        steps.append(module.prepare(24, "cpu", who, **module.CASES[case])())
    torch.testing.assert_close(*steps, atol=1e-4, rtol=1e-3)


def _allocating(size: int, device: str, copies: int) -> Callable[[], list[torch.Tensor]]:
    made_before = torch.ones(size << 18)
    return lambda: [made_before + 1 for _ in range(copies)]


def test_peak_memory_counts_results_and_not_inputs() -> None:
    # size is in MiB: 2^18 floats.
    measured = [peak_mib(Settings(), _allocating, 32, 1, copies) for copies in (1, 3)]
    assert measured == [pytest.approx(32, abs=2), pytest.approx(96, abs=2)]


def test_memory_section_prepares_every_feature() -> None:
    for name in FEATURES:
        for who in ("flash4", "torch"):
            assert memory.prepare(64, "cpu", name, "forward", who)().shape[-1] == 32
            out, gradients = memory.prepare(64, "cpu", name, "forward + backward", who)()
            assert len(gradients) == 3 and out.shape[-1] == 32


def test_decode_measures_whom_it_names() -> None:
    """Contenders over the same keys, in pages too, agree; float8 is timed beside them."""
    chosen = Selection.parse(["B=1", "Sq=1"])
    (row,) = decode.measure(Settings("cpu", quick=True, rounds=2, selection=chosen))
    ours = {"flash4", "flash4 page 16", "flash4 page 256", "flash4 invariant"}
    ours |= {"flash4 float8", "flash4 float8 page 16"}
    assert row["seconds"].keys() == {"sdpa"} | ours and not row["left_out"]
    assert row["best_peer"] == "sdpa" and row["ratios"].keys() == ours
    text = decode.text([row])
    assert "8/2" in text and "geometric mean" in text and "copy" in text


def test_models_are_compared_with_themselves_before_the_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    some = {name: models.MODELS[name] for name in ("transformers GPT-OSS",)}
    monkeypatch.setattr(models, "MODELS", some)
    rows = list(models.measure(Settings("cpu", quick=True, rounds=2)))
    assert [row["mode"] for row in rows] == ["training", "evaluation"]
    for row in rows:
        assert row["served_by"] and row["error"]["torch"] == 0.0 < row["error"]["flash4"] < 1e-5
    assert models.text(rows).count("GPT-OSS") == 2


def test_models_without_their_package_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "MODELS", {"a model": ("no_such_package", models.llama)})
    assert not list(models.measure(Settings("cpu", quick=True)))
    assert "left out a model: no_such_package is not installed" in capsys.readouterr().out


def test_context_times_one_rank_of_many() -> None:
    rows = list(context.measure(Settings("cpu", quick=True)))
    assert {row["how"] for row in rows} == {"ring, one rank", "ulysses, one rank"}
    for row in rows:
        assert row["efficiency"] == row["one_gpu_seconds"] / row["ranks"] / row["seconds"]
        # Messages only cost.
        assert all(0.0 < value <= row["efficiency"] * (1 + 1e-9) for value in row["predicted"].values())
    assert context.text(rows).count("one rank") == len(rows)


def test_one_rank_makes_the_hops_of_a_ring() -> None:
    """What is timed without messages has the work of a rank: all but which keys they are."""
    cell = context.Cell(2, 1, 8, 64, "step")
    tensors = context._tensors(cell, Settings("cpu"))
    with backends_used() as used:
        context._rank_alone(cell, tensors, context.Split(4, 1))()
    assert sum(calls for calls in used.values()) == 8


def test_decode_leaves_out_whoever_attends_to_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode.attention_kvcache
    monkeypatch.setattr(decode, "attention_kvcache", lambda q, k, v, **more: right(q, k, k, **more))
    chosen = Selection.parse(["B=1", "Sq=1"])
    (row,) = decode.measure(Settings("cpu", quick=True, rounds=2, selection=chosen))
    assert row["seconds"].keys() == {"sdpa"} and len(row["left_out"]) == 6
    assert all("differs" in why for why in row["left_out"].values())


class StandIn:
    """FlashInfer's decode by definition, from the arguments that it documents; `plans` counts its plans."""

    def __init__(self) -> None:
        self.plans: list[bool] = []
        outer = self

        class BatchDecodeWithPagedKVCacheWrapper:
            def __init__(
                self, workspace: Tensor, layout: str, *, use_tensor_cores: bool, backend: str
            ) -> None:
                assert layout == "NHD" and backend == "fa2" and not workspace.any()
                self.on_tensor_cores = use_tensor_cores

            def plan(
                self,
                indptr: Tensor,
                indices: Tensor,
                last_page_len: Tensor,
                Hq: int,
                Hk: int,
                D: int,
                page: int,
                *,
                q_data_type: torch.dtype,
                kv_data_type: torch.dtype,
                q_len_per_req: int,
            ) -> None:
                assert self.on_tensor_cores or q_len_per_req == 1
                assert all(x.dtype == torch.int32 for x in (indptr, indices, last_page_len))
                outer.plans.append(self.on_tensor_cores)
                self.requests = [
                    (indices[start:end].long(), int(last))
                    for (start, end), last in zip(pairwise(indptr.tolist()), last_page_len, strict=True)
                ]
                self.shape = (q_len_per_req, Hk, D, page)
                self.dtypes = (q_data_type, kv_data_type)

            def run(self, q: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
                Sq, Hk, D, page = self.shape
                assert self.dtypes == (q.dtype, caches[0].dtype)
                outs = []
                for rows, (pages, last) in zip(q.split(Sq), self.requests, strict=True):
                    keys = (len(pages) - 1) * page + last
                    k, v = (x[pages].reshape(-1, Hk, D)[:keys].to(q.dtype) for x in caches)
                    x = decode._Tensors(rows[None], k[None], v[None], torch.tensor([keys]))
                    outs.append(decode._sdpa(x)[0])
                return torch.cat(outs)

        self.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper

    def xqa_batch_decode_with_kv_cache(
        self,
        q: Tensor,
        caches: tuple[Tensor, Tensor],
        workspace: Tensor,
        table: Tensor,
        lengths: Tensor,
        *,
        max_seq_len: int,
        bmm1_scale: float,
    ) -> Tensor:
        assert not workspace.any() and bmm1_scale == q.shape[-1] ** -0.5
        k, v = (x[table.long()].flatten(1, 2)[:, :max_seq_len].to(q.dtype) for x in caches)
        return decode._sdpa(decode._Tensors(q[:, None], k, v, lengths))[:, 0]


@given(
    Hk=st.integers(1, 2),
    group=st.integers(1, 3),
    B=st.integers(1, 3),
    pages=st.integers(1, 4),
    Sq=st.sampled_from([1, 4]),
    float8=st.booleans(),
)
def test_flashinfer_is_asked_for_the_cells_attention(
    Hk: int, group: int, B: int, pages: int, Sq: int, float8: bool
) -> None:
    """Every kernel sees the keys that SDPA sees, through its list of pages; each is planned once."""
    cell = decode.Cell(Hk * group, Hk, 8, B, 16 * pages, Sq)
    x, table = decode._tensors(cell, torch.float32, "cpu"), decode._table(cell, 16, "cpu")
    x = decode._float8(x) if float8 else x
    seen = x._replace(k=x.k.float(), v=x.v.float())
    expected = decode._sdpa(decode._gathered(seen, table))
    library, left_out = StandIn(), {}
    kernels = ("tensor cores", "cuda cores", "xqa") if Sq == 1 else ("tensor cores",)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer.decode", library)
        patch.setattr(decode, "_WORKSPACE_BYTES", 16)
        found = decode._flashinfer(cell, {16: table}, left_out)
        assert list(found) == [f"flashinfer {name}{of} page 16" for name in kernels for of in ("", " float8")]
        for name, attend in found.items():
            if float8 == ("float8" in name):
                for _ in range(2):
                    torch.testing.assert_close(attend(x), expected)
    assert not left_out and sorted(library.plans) == ([False, True] if Sq == 1 else [True])


def test_flashinfer_is_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer.decode", None)
    cell, left_out = decode.Cell(2, 1, 8, 1, 16), {}
    assert decode._flashinfer(cell, {16: decode._table(cell, 16, "cpu")}, left_out) == {}
    assert "flashinfer" in left_out["flashinfer"]


CHOSEN = Selection.parse(["mod=documents,alibi,rope_part"])


def test_flex_times_ours_beside_torchs_function() -> None:
    """Both compute the cell, and torch's function has no gradients on a CPU."""
    rows = list(flex.measure(Settings("cpu", rounds=2, selection=CHOSEN)))
    assert [(row["mod"], row["direction"]) for row in rows] == [
        (mod, direction) for mod in ("documents", "alibi", "rope_part") for direction in flex.DIRECTIONS
    ]
    for row in rows:
        names = ("out",) if row["direction"] == "forward" else ("out", "dq", "dk", "dv")
        assert tuple(row["differences"]["flash4"]) == names
        assert all(0.0 < x < 1e-5 for x in row["differences"]["flash4"].values())
        assert ("torch" in row["ratios"]) == (row["direction"] == "forward")
        assert ("torch" in row["left_out"]) == (row["direction"] == "step")
        assert ("flash4 causal" in row["ratios"]) == (row["mod"] == "alibi")
        assert row["served_by"]["flex_attention"] == ("cpu" if row["mod"] == "documents" else "tiled")
    text = flex.text(rows)
    assert "torch's time / flash4's, forward: geometric mean" in text
    assert "left out torch: NotImplementedError" in text and "cells: 3" in text


def test_flex_leaves_out_whoever_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours too, forward and backward: out is right in one of the two calls, and its gradient is not."""
    right = flex.flex_attention

    def without_mod(q: Any, k: Any, v: Any, score_mod: Any, block_mask: Any) -> torch.Tensor:
        return right(q, k, v, None, block_mask)

    def other_gradient(q: Any, k: Any, v: Any, score_mod: Any, block_mask: Any) -> torch.Tensor:
        out = right(q, k, v, score_mod, block_mask)
        return out + 0.1 * (k - k.detach()).sum()

    settings = Settings("cpu", rounds=2, selection=Selection.parse(["mod=documents,alibi"]))
    monkeypatch.setattr(flex, "flex_attention", without_mod)
    for row in flex.measure(settings):
        assert ("flash4" in row["left_out"]) == (row["mod"] != "documents")
    monkeypatch.setattr(flex, "flex_attention", other_gradient)
    for row in flex.measure(settings):
        assert ("its dk differs" in row["left_out"].get("flash4", "")) == (row["direction"] == "step")


def test_flex_counterparts_without_functions_compute_the_cell() -> None:
    """Counterparts are drawn at the lengths of models, where there are any."""
    settings = Settings("cpu")
    for mod in ("causal", "sliding_window", "documents", "softcap"):
        cell = flex.Cell(mod, 8, 1408, 1, 2)
        contenders = flex._contenders(cell, settings)
        exact = flex._Exact.of(flex._case(cell, settings), cell, contenders["flash4"].tensors)
        (name,) = contenders.keys() - {"flash4", "torch"}
        with flex._quiet():
            entry = flex._entry(contenders[name], "step", exact, settings)
        assert all(0.0 < x < 1e-5 for x in entry.differences.values()), name


def test_flex_plot_has_a_panel_for_each_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    from flash4_torch.bench import plots

    ratio = {"median": 2.0}
    rows: list[dict[str, Any]] = [
        {"mod": mod, "direction": direction, "D": 64, "S": 8192, "ratios": {"triton": ratio}}
        for mod in ("causal", "alibi")
        for direction in flex.DIRECTIONS
    ]
    # A peer that fails has no bar.
    rows[0]["ratios"] = {}
    panels = [axes for axes in plots._flex(rows).axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["forward, D=64, S=8192", "step, D=64, S=8192"]
    assert [len(axes.patches) for axes in panels] == [1, 2]
