"""Kernels' instructions are counted rightly, and the cycle model is the paper's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from everything import EVERYTHING
from flash4_torch.__main__ import main
from flash4_torch.bench import command, compile_times, emulated, prediction
from flash4_torch.bench.cases import DIRECTIONS, Cell
from flash4_torch.bench.cycles import MACHINES, Cycles, cycles, flops_per_second
from flash4_torch.bench.emulator import CHECKERS, LOOPS, WARPS
from flash4_torch.bench.instruction_counts import (
    CLASSES,
    ISSUED,
    QUADRANTS,
    SHARED,
    Counts,
    class_of,
    count_instructions,
    shared_kind,
)
from flash4_torch.bench.prediction import RECORDED, Entry, Prediction
from flash4_torch.bench.settings import Selection, Settings
from flash4_torch.emulator.report import PIPES, Line, Report

B200 = MACHINES["b200"]


def line(ptx: str, pipe: str) -> Line:
    return Line(1, ptx, None, pipe, (1,), (128,), (1,))


@pytest.mark.parametrize(
    ("ptx", "pipe", "expected"),
    [
        ("ex2.approx.ftz.f32 %f1, %f2", "mufu", "mufu"),
        ("@%p1 fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4", "fma", "packed"),
        ("add.rm.ftz.f32x2 %rd1, %rd2, %rd3", "fma", "packed"),
        ("fma.rn.f32 %f1, %f2, %f3, %f4", "fma", "float"),
        ("max.f32 %f1, %f2, %f3, %f4", "alu", "max"),
        ("max.ftz.f32 %f1, %f2, %f3", "alu", "max"),
        ("max.s32 %r1, %r2, %r3", "alu", "integer"),
        ("@!%p1 selp.f32 %f1, %f2, %f3, %p2", "alu", "integer"),
        ("cvt.rn.bf16x2.f32 %r1, %f1, %f2", "convert", "convert"),
        ("mov.b64 %rd1, {%f1, %f2}", "move", "dropped"),
        ("cvta.to.global.u64 %rd1, %rd2", "alu", "dropped"),
        ("ld.param.u64 %rd1, [p]", "memory", "dropped"),
        ("ld.shared.b32 %r1, [%r2]", "memory", "memory"),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 %r1, [%r2]", "memory", "tensor memory"),
        ("tcgen05.wait::ld.sync.aligned", "sync", "tensor memory"),
        ("@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p2", "mma", "mma"),
        ("tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%r1]", "sync", "sync"),
        ("bar.sync 0", "sync", "sync"),
        ("bra.uni $L", "control", "branch"),
        ("ret", "control", "branch"),
        ("cp.async.bulk.commit_group", "async", "copy"),
    ],
)
def test_classes(ptx: str, pipe: str, expected: str) -> None:
    assert class_of(line(ptx, pipe)) == expected


def test_every_pipe_has_a_class() -> None:
    assert {class_of(line("x", pipe)) for pipe in PIPES} <= set(CLASSES)


@pytest.mark.parametrize(
    ("ptx", "pipe", "expected"),
    [
        ("ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5]", "memory", "loads"),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2]", "memory", "loads"),
        ("@%p1 st.shared.b32 [%r1], %r2", "memory", "stores"),
        ("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r2}", "memory", "stores"),
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {}", "mma", "operands"),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::x [%r1]", "async", "copies in"),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16", "async", "copies in"),
        ("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1]", "async", "copies out"),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1]", "async", "copies out"),
        ("cp.async.bulk.shared::cluster.shared::cta.mbarrier::x [%r1]", "async", "copies across"),
        ("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1]", "async", "copies across"),
    ],
)
def test_shared_bytes_belong_to_somebody(ptx: str, pipe: str, expected: str) -> None:
    assert shared_kind(line(ptx, pipe)) == expected


def test_a_kernel_that_can_be_counted_by_hand() -> None:
    """One thread issues four MMAs per iteration and waits for them; four warps wait for that."""
    turns = 3
    report = replace(LOOPS["tcgen05.mma m128n256k16"], turns=turns).launcher()(options=CHECKERS["races off"])
    weight = count_instructions(report)
    assert weight.mma_flops == turns * 4 * 2 * 128 * 256 * 16
    assert weight.warps == {"products": list(range(WARPS))}  # the guard differs by lane
    assert weight.count("mma") == turns * 4 * WARPS
    assert weight.shared == dict.fromkeys(SHARED, 0) | {"operands": turns * 4 * 32 * (128 + 256), "loads": 16}
    assert weight.waits == {"products": WARPS * (1 + 2 * turns)}
    issued = report.counters.instructions - weight.count("dropped")
    assert sum(weight.quadrants) == weight.count(*ISSUED) == issued
    assert Counts.of_row(json.loads(json.dumps(weight.row()))) == weight


def test_roles_by_what_warps_do() -> None:
    done = {
        "ex2.approx.f32 %f1, %f2": ("mufu", (100, 100, 1, 0, 0, 0, 0, 0)),
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 %r1, [%r2]": ("memory", (5, 5, 5, 0, 0, 0, 0, 0)),
        "tcgen05.mma.cta_group::1.kind::f16 [%r1]": ("mma", (0, 0, 0, 8, 0, 0, 0, 0)),
        "cp.async.bulk.shared::cluster.global.x [%r1]": ("async", (0, 0, 0, 0, 2, 0, 0, 0)),
        "cp.async.bulk.global.shared::cta.x [%r1]": ("async", (0, 0, 1, 0, 0, 2, 0, 0)),
        "add.s32 %r1, %r2, %r3": ("alu", (9, 9, 9, 9, 9, 9, 9, 0)),
    }
    lines = [Line(1, ptx, None, pipe, counts, counts, counts) for ptx, (pipe, counts) in done.items()]
    report = replace(_empty_report(), make_lines=lambda: lines)
    weight = count_instructions(report)
    assert weight.warps == {
        "weights": [0, 1],
        "products": [3],
        "accumulators": [2],
        "loads": [4],
        "stores": [5],
        "other": [6, 7],
    }
    assert weight.roles["weights"] == {"mufu": 200, "integer": 18, "tensor memory": 10}
    assert weight.quadrants == [114 + 11, 114 + 11, 16 + 9, 17]
    assert len(weight.quadrants) == QUADRANTS


def _empty_report() -> Report:
    return replace(LOOPS["arithmetic"], turns=1).launcher()(options=CHECKERS["races off"])


def weight_of(**changes: object) -> Counts:
    empty = dict.fromkeys(SHARED, 0)
    weight = Counts("k", {"weights": {}}, {"weights": [0]}, [0] * QUADRANTS, empty, empty, {"weights": 0}, 0)
    return replace(weight, **changes)


PAPER = {
    # M = N = d = 128: GEMMs, KiB that shared memory moves, and cycles of MMA, MUFU and shared memory, which
    # moves three operands forward; backward eight, dS written, dQ written and read.
    "forward": (2, 3 * 32, Cycles(1024, 1024, 768, 0)),
    "backward": (5, 8 * 32 + 32 + 2 * 64, Cycles(2560, 1024, 3328, 0)),
}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_cycles_are_the_papers(direction: str) -> None:
    products, kib, expected = PAPER[direction]
    weight = weight_of(
        mma_flops=products * 2 * 128**3,
        roles={"weights": {"mufu": 128 * 128 // 32}},
        passes=dict.fromkeys(SHARED, 0) | {"operands": kib * 1024 // 128, "copies in": 10**6},
    )
    assert cycles(weight, B200) == expected
    assert expected.bottleneck == ("mma" if direction == "forward" else "shared")
    speed = flops_per_second(weight.mma_flops, [weight], B200)
    peak = 8192 * 148 * 1.85e9
    assert speed == pytest.approx(peak * expected.mma / max(expected))
    # One launch after the other.
    assert flops_per_second(2 * weight.mma_flops, [weight, weight], B200) == pytest.approx(speed)


def test_the_fullest_quadrant_limits_what_is_issued() -> None:
    assert cycles(weight_of(quadrants=[10, 20, 70, 10]), B200) == (0, 0, 0, 70)


# --- real kernels


@pytest.fixture(scope="module")
def attend() -> Iterator[emulated.Attend]:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    with emulated.ours("sm_100a") as attend:
        yield attend


def cell(S: int, *, causal: bool = False) -> Cell:
    return Cell(64, causal, S, B=1, Hq=1, Hk=1)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_flops_are_the_formulas(attend: emulated.Attend, direction: str) -> None:
    """FLOPs are those of whole tiles; a causal call does no more than a full one, nor less than it must."""
    S = 768 if EVERYTHING else 512
    full, causal = (
        sum(w.mma_flops for w in attend(cell(S, causal=causal), direction)) for causal in (False, True)
    )
    assert full == cell(S).flops(direction)
    assert full / 2 < causal < full


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_twice_the_heads_weigh_twice(attend: emulated.Attend, direction: str) -> None:
    one, two = (attend(replace(cell(256), Hq=H, Hk=H), direction) for H in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert (b.mma_flops, b.shared["operands"]) == (2 * a.mma_flops, 2 * a.shared["operands"])
        assert b.count("mufu") == 2 * a.count("mufu")
        assert 1.5 * a.count(*ISSUED) < b.count(*ISSUED) <= 2 * a.count(*ISSUED)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_steady_part_doubles_with_the_blocks(attend: emulated.Attend, direction: str) -> None:
    """A tile has a fixed cost, and the same for every block that it visits: a n + b n * n for n tiles."""
    once, twice, four_times = (
        sum(weight.count(*ISSUED) for weight in attend(cell(S), direction)) for S in (256, 512, 1024)
    )
    assert four_times - 2 * twice == pytest.approx(4 * (twice - 2 * once), rel=0.01)


# --- the command


def small(who: str) -> Callable[[str], object]:
    @contextmanager
    def contender(arch: str) -> Iterator[emulated.Attend]:
        assert arch == "sm_100a"

        def attend(cell: Cell, direction: str) -> list[Counts]:
            if who == emulated.OURS and direction == "backward":
                raise LookupError("none yet")
            factor = {emulated.OURS: 3, emulated.UPSTREAM: 4}[who]
            roles = {"weights": {"mufu": 100 * factor}}
            return [weight_of(mma_flops=int(cell.flops(direction)), roles=roles)]

        yield attend

    return contender


@pytest.fixture
def contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    who = {name: small(name) for name in emulated.CONTENDERS}
    monkeypatch.setattr(emulated, "CONTENDERS", who)
    monkeypatch.setattr(emulated, "installed", lambda: set(who))
    monkeypatch.setattr(command, "find_spec", lambda name: True)


@pytest.mark.usefixtures("contenders")
def test_model_prints_and_writes_a_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    out = tmp_path / "new" / "b200.json"
    try:
        assert main(["bench", "--model", "b200", "--quick", "--threads", "1", "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert printed.startswith("b200: ") and "never timed" in printed
    assert "(0.75)" in printed
    assert "flash4 backward D=128 causal S=512: LookupError: none yet" in printed
    document = json.loads(out.read_text())
    assert document["model"]["note"] == "predicted, never timed"
    rows = [row for row in document["rows"] if "launches" in row]
    assert {(row["who"], row["direction"]) for row in rows} == {
        ("flash4", "forward"),
        ("fa4", "forward"),
        ("fa4", "backward"),
    }
    for row in rows:
        assert row["cycles"]["mma"] == 1024 * (2.5 if row["direction"] == "backward" else 1)
        assert row["bottleneck"] == "mma" and row["predicted_tflops"] == pytest.approx(2243, abs=1)


def test_model_needs_the_compiler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert main(["bench", "--model", "b200"]) == 2
    sentence = "--model compiles kernels: pip install 'flash4_torch[kernels]'"
    assert capsys.readouterr().err == f"flash4_torch bench: {sentence}\n"


def test_upstream_is_read_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated, "installed", set)
    chosen = Settings(selection=Selection.parse(["D=128", "causal=yes", "S=1024", "direction=forward"]))
    section = Prediction("b200")
    rows = list(section.measure(chosen))
    assert [(row["who"], row["direction"]) for row in rows] == [("flash4", "forward"), ("fa4", "forward")]
    assert "not installed: its numbers are those recorded in" in section.text(rows)


def test_recorded_numbers_are_of_every_cell_and_say_what_was_run() -> None:
    document = json.loads(RECORDED.read_text())
    assert document["versions"]["flash-attn-4"] == "4.0.0b36"
    known = {(prediction.cell_of(row), row["direction"], row["who"]) for row in document["rows"]}
    assert known == {
        (cell, direction, who)
        for cell in prediction.cells(Settings())
        for direction in DIRECTIONS
        for who in emulated.CONTENDERS
    }
    for row in document["rows"]:
        if "left_out" in row:
            assert row["who"] == emulated.OURS
            continue
        entry = Entry.of(row)
        assert row["predicted_tflops"] == pytest.approx(entry.tflops(B200), abs=0.1)
        least = entry.cell.flops(entry.direction)
        done = sum(weight.mma_flops for weight in entry.launches)
        # flash-attn-4 computes wide heads' scores twice.
        twice = entry.who == emulated.UPSTREAM and (entry.cell.D, entry.direction) == (256, "backward")
        assert least < done if entry.cell.causal or twice else done == least


# --- compile times


def test_a_sample_has_every_compilation_by_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    cute = pytest.importorskip("cutlass.cute", reason="nvidia-cutlass-dsl is not installed")
    monkeypatch.setattr(cute, "compile", lambda kernel: kernel.upper())

    @contextmanager
    def contender(arch: str) -> Iterator[emulated.Attend]:
        def attend(cell: Cell, direction: str) -> list[Counts]:
            names = {"forward": ["f"], "backward": ["before", "main", "after"]}[direction]
            assert [cute.compile(name) for name in names] == [name.upper() for name in names]
            return []

        yield attend

    monkeypatch.setattr(emulated, "CONTENDERS", {"x": contender})
    ticks = iter([0.0, 1.0, 10.0, 12.0, 20.0, 23.0, 30.0, 34.0])
    monkeypatch.setitem(compile_times.CLOCKS, "wall", lambda: next(ticks))
    seconds = compile_times.sample("x", 64, True, "wall")
    assert seconds == {"forward": [1.0], "backward": [2.0, 3.0, 4.0]}


def test_compile_times_are_medians_of_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = iter([5.0, 1.0, 9.0] * 6)

    def in_a_process(who: str, D: int, causal: bool, clock: str) -> dict[str, list[float]]:
        return {"forward": [next(drawn)], "backward": [0.5, 2.0, 0.25]}

    monkeypatch.setattr(compile_times, "_in_a_process", in_a_process)
    out = tmp_path / "times.json"
    assert compile_times.main(["--rounds", "3", "--who", "flash4", "--clock", "cpu", "--out", str(out)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["forward", "64", "full", "flash4", "5.0", "5.0", "1"] in lines
    assert ["backward", "256", "causal", "flash4", "2.0", "2.8", "3"] in lines
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 3 * 2 * 2 and rows[0]["seconds"] == [[5.0, 1.0, 9.0]]
