"""Section `swap` times every kind of call in turns, right results only, and fails where it is sure."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everything import EVERYTHING, examples
from flash4_torch.__main__ import main
from flash4_torch.bench import swap, swap_cases, swap_trial, turns
from flash4_torch.bench.settings import Selection, Settings
from flash4_torch.bench.swap_cases import CPU_SIZES, DTYPES, GPU_SIZES, MASKS, WAYS, SwapCase
from flash4_torch.bench.swap_trial import Trial, prepare
from flash4_torch.bench.turns import CERTAINTY, FEWEST_ROUNDS, MOST_ROUNDS, Ratio, Sample

TINY = min(CPU_SIZES, key=lambda size: size.E * size.B * size.S)
NAMES = ("stock", "flash4")
CASES = st.builds(
    SwapCase,
    compiled=st.just(False),
    size=st.just(TINY),
    dtype=st.sampled_from(DTYPES),
    mode=st.just("training"),
    mask=st.sampled_from(MASKS),
    dropout=st.just("0"),
    need_weights=st.booleans(),
    way=st.sampled_from(WAYS),
).map(lambda case: case._replace(dtype="float32") if case.is_cast else case)
few = settings(max_examples=examples(8, 60))


@given(n=st.integers(0, 300))
def test_limits_of_a_median_are_as_narrow_as_their_certainty_allows(n: int) -> None:
    limits = turns.limits_of_median([float(i) for i in range(n)])
    assert (limits is None) == (n < FEWEST_ROUNDS)
    if limits is None:
        return
    outside = int(limits[0])
    assert limits[1] == n - 1 - outside

    def risk(k: int) -> float:
        """The probability that fewer than k, or more than n - k, of n values are below the median."""
        return 2 * sum(math.comb(n, i) for i in range(k)) / 2**n

    assert risk(outside + 1) <= 1 - CERTAINTY < risk(outside + 2)


@given(values=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=40), limit=st.floats(0.1, 10.0))
def test_a_verdict_needs_limits(values: list[float], limit: float) -> None:
    ratio = Ratio.of(values)
    assert ratio.median == statistics.median(values) and ratio.rounds == len(values)
    if ratio.low is None or ratio.high is None:
        assert len(values) < FEWEST_ROUNDS
        assert ratio.is_uncertain(limit) and not ratio.is_below(limit) and not ratio.is_precise
        return
    assert min(values) <= ratio.low <= ratio.median <= ratio.high <= max(values)
    verdicts = [ratio.is_below(limit), ratio.is_uncertain(limit), ratio.low >= limit]
    assert verdicts.count(True) == 1


class _Watch:
    """A stopwatch that reads what `times` says, by call and round."""

    times: Callable[[str, int], float]

    def __init__(self, calls: Any, settings: Settings):
        self.log: list[str] = []
        _Watch.latest = self

    latest: _Watch

    def sample(self, call: Any) -> Sample:
        name = call.args[0]
        self.log.append(name)
        seconds = _Watch.times(name, self.log.count(name))
        return Sample(seconds / 2, seconds)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[str, int], float]], None]]:
    monkeypatch.setattr(turns, "Stopwatch", _Watch)
    monkeypatch.setattr(_Watch, "times", staticmethod(lambda name, number: 1.0), raising=False)
    yield lambda times: monkeypatch.setattr(_Watch, "times", staticmethod(times))


class _Call:
    def __init__(self, name: str):
        self.args = (name,)


def _take(seconds: float, rounds: int | None = None) -> turns.Turns:
    calls: Any = {name: _Call(name) for name in NAMES}
    return turns.take_turns("stock", calls, Settings(rounds=rounds), seconds, limit=0.98)


@pytest.mark.parametrize("rounds", [2, 9])
def test_everyone_is_timed_once_a_round_and_goes_first_every_other(rounds: int, watch: Any) -> None:
    taken = _take(100.0, rounds)
    assert taken.rounds == rounds
    log = _Watch.latest.log
    pairs = [tuple(log[i : i + 2]) for i in range(0, len(log), 2)]
    assert pairs == [NAMES if i % 2 else NAMES[::-1] for i in range(rounds)]


def test_rounds_end_when_the_ratio_is_sure_or_the_time_is_up(watch: Any) -> None:
    assert _take(100.0).rounds == FEWEST_ROUNDS
    # One in two rounds of stock takes twice as long.
    watch(lambda name, number: 1.0 + number % 2 if name == "stock" else 1.0)
    assert _take(100.0).rounds == MOST_ROUNDS
    assert _take(-1.0).rounds == FEWEST_ROUNDS
    # Precise, but on either side of the limit.
    watch(lambda name, number: 0.98 + 0.001 * (-1) ** number if name == "stock" else 1.0)
    assert _take(100.0).rounds == MOST_ROUNDS


@given(load=st.lists(st.floats(0.1, 10.0), min_size=2, max_size=20), speed=st.floats(0.1, 10.0))
def test_a_slow_moment_slows_both(load: list[float], speed: float) -> None:
    taken = turns.Turns(
        {
            "stock": [Sample(x, 2 * x) for x in load],
            "flash4": [Sample(x, 2 * x / speed) for x in load],
        }
    )
    assert taken.ratio("stock", "flash4").median == pytest.approx(speed)
    assert taken.ratio("stock", "flash4", "host").median == 1.0


def test_a_stopwatch_times_batches_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])

    def call(seconds: float) -> None:
        now[0] += seconds

    calls = {name: lambda seconds=seconds: call(seconds) for name, seconds in (("a", 1e-3), ("b", 4e-4))}
    watch = turns.Stopwatch(calls, Settings())
    start = now[0]
    assert watch.sample(calls["a"]) == pytest.approx((1e-3, 1e-3))
    assert now[0] - start == pytest.approx(5e-3), "two milliseconds of the faster one are five calls"


@pytest.mark.parametrize(("device", "sizes"), [("cpu", CPU_SIZES), ("cuda", GPU_SIZES)])
def test_the_grid_has_every_kind_of_call(device: str, sizes: Sequence[Any]) -> None:
    selection = Selection.parse(["compiled=yes,no", "way=self"])
    everything = list(swap_cases.grid(Settings(device, selection=selection)))
    assert len(everything) == len(set(everything))
    kinds = 3 * len(MASKS) * 2  # dropout in training, none, and none in evaluation
    assert len(everything) == 2 * len(sizes) * len(DTYPES) * kinds == 1080
    assert all(case.dropout == "0" for case in everything if case.mode == "evaluation")
    with_ways = list(swap_cases.grid(Settings(device)))
    usual = [case for case in with_ways if case.way == "self"]
    others = with_ways[len(usual) :]
    assert {case.way for case in others} == {*WAYS} - {"self"} and len(others) == 6 * (len(WAYS) - 1)
    assert len({case.size for case in others}) == 1
    assert set(usual) < set(everything)
    assert [case for case in usual if not case.compiled] == [c for c in everything if not c.compiled]
    assert [case.compiled for case in usual] == [False] * 540 + [True] * kinds
    assert len({(case.size, case.dtype) for case in usual if case.compiled}) == 1
    quick = list(swap_cases.grid(Settings(device, quick=True)))
    assert len(quick) == 2 * kinds and set(quick) < set(usual)


def test_all_choices_can_be_written_as_cells() -> None:
    words = ["E=64", "mode=training", "mask=padding+causal,bool", "dropout=0.1", "need_weights=yes"]
    chosen = list(swap_cases.grid(Settings(selection=Selection.parse([*words, "dtype=float16"]))))
    assert chosen == [
        SwapCase(False, TINY, "float16", "training", mask, "0.1", True) for mask in ("padding+causal", "bool")
    ]


def _run(*words: str, out: Path) -> tuple[int, list[dict[str, Any]]]:
    """The exit status and the rows of the tiny size."""
    threads = torch.get_num_threads()
    line = ["bench", "swap", "--device", "cpu", "--threads", "1", "--out", str(out), "--cells", "E=64"]
    try:
        status = main([*line, "dtype=float32", "compiled=no", *words])
    finally:
        torch.set_num_threads(threads)

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is no JSON")

    document = json.loads(out.read_text(), parse_constant=refuse)
    assert document["versions"]["torch"] == torch.__version__
    return status, document["sections"]["swap"]


def test_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = _run("mask=none,bool", "need_weights=no", "--rounds", "8", out=tmp_path / "swap.json")
    assert [(row["mode"], row["mask"], row["dropout"]) for row in rows] == [
        *(("training", mask, dropout) for mask in ("none", "bool") for dropout in ("0", "0.1")),
        *(("evaluation", mask, "0") for mask in ("none", "bool")),
    ]
    assert status == int(any(map(swap.fails, rows)))
    for row in rows:
        assert row["state"] == "timed" and row["stock_over_flash4"]["rounds"] == 8
        assert all(seconds["median"] > 0 for seconds in row["seconds"].values())
        assert set(row["served_by"]) == (
            {"attention", "attention_backward"} if row["mode"] == "training" else {"attention"}
        )
    assert f"6 of {len(rows)} cells timed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stock", "noise", "status", "mark"),
    [(1.2, 0.0, 0, ""), (0.9, 0.0, 1, "!"), (0.97, 0.04, 0, "?"), (0.9, 0.04, 1, "!")],
)
def test_only_what_is_certainly_slow_fails(
    stock: float,
    noise: float,
    status: int,
    mark: str,
    watch: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    watch(lambda name, number: stock + noise * (-1) ** number if name == "stock" else 1.0)
    words = ("mode=evaluation", "mask=none", "--rounds", "20")
    found, rows = _run(*words, out=tmp_path / "swap.json")
    assert found == status and len(rows) == 2
    printed = capsys.readouterr().out
    table = printed.partition("\n\n")[0].splitlines()[3:]
    assert [line.split()[-1] for line in table] == [f"{swap.ratio_of(row).median:.3f}{mark}" for row in rows]
    assert f"below 0.98: {2 if mark == '!' else 0}, uncertain: {2 if mark == '?' else 0}" in printed


def test_all_cells_of_a_size_are_right_and_in_the_table(
    watch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = _run(out=tmp_path / "swap.json")
    assert status == 0 and len(rows) == 36
    assert [row["state"] for row in rows] == ["timed"] * 36, [row.get("why") for row in rows]
    lines = {tuple(line.split()) for line in capsys.readouterr().out.splitlines()}
    for row in rows:
        weights = "yes" if row["need_weights"] else "no"
        kind = ("self", "eager", "float32", row["mode"], row["mask"], row["dropout"], weights)
        assert (*kind, "1.000") in lines


def _spoilt(trial: Trial, who: str, spoil: Callable[..., Any]) -> Trial:
    module = trial.modules[who]
    return replace(trial, modules=trial.modules | {who: lambda *x, **named: spoil(*module(*x, **named))})


@few
@given(case=CASES, who=st.sampled_from(NAMES))
def test_a_wrong_output_weight_or_gradient_is_found(case: SwapCase, who: str) -> None:
    trial = prepare(case, "cpu")
    assert not trial.what_differs()
    wrong = {
        "output": lambda out, weights: (out * 1.1, weights),
        "gradient of input": lambda out, weights: (out + 0.1 * (out - out.detach()), weights),
    }
    if case.need_weights:
        wrong["weights"] = lambda out, weights: (out, weights * 1.1)
    for what, spoil in wrong.items():
        found = _spoilt(trial, who, spoil).what_differs()
        assert list(found) == [who] and found[who].startswith(f"{what}: error ")


@few
@given(case=CASES.filter(lambda case: case.mask != "none"), who=st.sampled_from(NAMES))
def test_a_call_without_its_mask_is_found(case: SwapCase, who: str) -> None:
    trial = prepare(case, "cpu")
    module = trial.modules[who]

    def unmasked(*x: Any, **named: Any) -> Any:
        return module(*x, need_weights=named["need_weights"])

    assert list(replace(trial, modules=trial.modules | {who: unmasked}).what_differs()) == [who]


@few
@given(case=CASES.map(lambda case: case._replace(dropout="0.1")))
def test_dropout_is_compared_with_its_own_mask(case: SwapCase) -> None:
    trial = prepare(case, "cpu")
    results, kept = trial.call_and_replay("flash4")
    assert kept is not None and not kept.all() and results[0] is not None
    assert not trial.what_differs()
    other = kept.roll(1, -1)
    exact, peer = (trial.definition(dtype, other) for dtype in (torch.float64, trial.dtype))
    assert trial._differs(results, exact, peer).startswith("output: error ")


@pytest.mark.skipif(not EVERYTHING, reason="compiles; FLASH4_TEST_ALL=1 asks for it")
@pytest.mark.parametrize("dropout", ["0", "0.1"])
def test_compiled_cells_are_right(dropout: str) -> None:
    case = SwapCase(True, TINY, "float32", "training", "padding+causal", dropout, True)
    assert not prepare(case, "cpu").what_differs()


def test_who_raises_is_left_out_or_wrong(
    watch: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(*x: Any, **named: Any) -> NoReturn:
        raise RuntimeError("no\nsuch kernel")

    def spoilt(*whose: str) -> Callable[..., Trial]:
        def made(case: SwapCase, device: str) -> Trial:
            trial = prepare(case, device)
            if case.mask == "none":
                return replace(trial, modules=trial.modules | dict.fromkeys(whose, raises))
            return trial

        return made

    words = ("mode=evaluation", "mask=none,bool", "need_weights=no")
    for whose, state, status in (
        (("stock",), "left out", 0),
        (("flash4",), "wrong", 1),
        (NAMES, "left out", 0),
    ):
        monkeypatch.setattr(swap, "prepare", spoilt(*whose))
        found, rows = _run(*words, out=tmp_path / "swap.json")
        assert found == status and [row["state"] for row in rows] == [state, "timed"]
        why = f"{whose[0]} raises RuntimeError: no such kernel"
        assert rows[0]["why"] == why
        assert f"\n{state}: {why}, cells: 1\n" in capsys.readouterr().out
    monkeypatch.setattr(swap, "prepare", lambda case, device: raises())
    assert _run(*words, out=tmp_path / "swap.json")[0] == 2, "nothing was measured"


def test_a_wrong_result_is_not_timed_and_fails(
    watch: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for who, state in (("flash4", "wrong"), ("stock", "left out")):
        monkeypatch.setattr(
            swap,
            "prepare",
            lambda case, device, who=who: _spoilt(
                prepare(case, device), who, lambda out, weights: (out * (1 + (case.mask == "bool")), weights)
            ),
        )
        status, rows = _run(
            "mode=evaluation", "mask=none,bool", "need_weights=no", out=tmp_path / "swap.json"
        )
        assert status == int(state == "wrong") and [row["state"] for row in rows] == ["timed", state]
        assert rows[1]["why"].startswith(f"{who} is wrong: output: error ") and "seconds" not in rows[1]


def test_a_budget_ends_the_section(watch: Any) -> None:
    chosen = Selection.parse(["E=64", "dtype=float32", "compiled=no", "mask=none"])
    rows = list(swap.measure(Settings(selection=chosen, swap_seconds=0)))
    assert len(rows) == 6 and {row["why"] for row in rows} == {"the 0 s of --budget were over"}
    assert swap.text(rows).count("\n") >= 6


def test_a_gpus_host_has_a_table_of_its_own(watch: Any) -> None:
    watch(lambda name, number: 1.5 if name == "stock" else 1.0)
    row = _gpu_row()
    assert swap.text([row]).count("  1.500\n") == 2
    assert not swap.fails(row)
    row["host_stock_over_flash4"] |= {"median": 0.5, "low": 0.5, "high": 0.5}
    assert "0.500!" in swap.text([row]) and not swap.fails(row), "the whole call decides"


def _gpu_row(**changes: Any) -> dict[str, Any]:
    case = SwapCase(False, TINY, "float32", "evaluation", "none", "0", False)
    timed = swap._timed(prepare(case, "cpu"), Settings("cuda"), 0.0)
    return case.row() | timed | {"served_by": {"attention": "cpu"}} | changes


def test_a_heat_map_shows_every_cell(watch: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    from flash4_torch.bench import plots

    low = {"median": 0.7, "low": 0.69, "high": 0.71, "rounds": 9}
    rows = [
        _gpu_row(),
        _gpu_row(mask="bool", stock_over_flash4=low),
        _gpu_row(mask="float", state="left out", why="?"),
        _gpu_row(mode="training", state="wrong", why="?"),
        _gpu_row(mode="training", compiled=True, stock_over_flash4=low | {"high": 1.0}),
    ]
    evaluation, training = plots._swap(rows).axes
    assert _texts(evaluation) == ["1.00", "0.70", "-", "float32\neager"]
    assert _texts(training) == ["wrong", "0.70?", "float32\neager", "float32\ncompiled"]
    frames = [patch for patch in evaluation.patches if not patch.get_fill()]
    assert len(frames) == 1 and frames[0].get_y() == pytest.approx(1.06)
    plots.draw({"swap": rows}, tmp_path)
    assert (tmp_path / "swap.png").read_bytes().startswith(b"\x89PNG")


def _texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_a_state_that_autograd_did_not_save_is_an_error() -> None:
    with pytest.raises(LookupError):
        swap_trial.saved_rng_state(torch.ones(2, requires_grad=True) * 2)
