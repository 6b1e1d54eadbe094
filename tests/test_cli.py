"""The command line: `info` tells the truth and imports nothing heavy; `bench` compares like with like."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import flash4_torch
from flash4_torch import backends, env, info
from flash4_torch.__main__ import main
from flash4_torch.bench import attention, command, features, flops, host, memory, module, providers, timing
from flash4_torch.bench.features import FEATURES, Shape
from flash4_torch.bench.peak import peak_mib
from flash4_torch.bench.settings import Settings

# The folder also keeps results that are no run's of the benchmark.
RESULTS = [
    path
    for path in sorted((Path(command.__file__).parent / "results").glob("*.json"))
    if "sections" in json.loads(path.read_text())
]


def test_info_prints_everything_it_collects(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH4_BACKEND", "tiled")
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert flash4_torch.__version__ in text and torch.__version__ in text
    assert info.cpu()["name"] in text
    for backend in backends.PRIORITY:
        assert f"\n  {backend.name} " in text
    for variable in env.ALL:
        assert variable.name in text
    assert "FLASH4_BACKEND  tiled" in text
    assert "kernel cache: none" in text


def test_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == info.collect()


def test_info_says_who_serves_and_why_the_others_do_not() -> None:
    reasons = info.backends("cpu")
    assert reasons["cpu"] == [] and reasons["tiled"] == []
    assert "it serves cuda" in reasons["sdpa"][0]


def test_info_imports_nothing_heavy() -> None:
    code = (
        "import sys; from flash4_torch.__main__ import main; main(['info']);"
        "print([m for m in ('cutlass', 'triton', 'matplotlib', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["nonsense"],
            "unknown section nonsense; there are attention, features, memory, host, module, emulator",
        ),
        (["--threads", "0"], "--threads is 0, but it must be at least 1"),
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


def test_bench_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {"dtype": torch.float32, "B": 1, "H": 2, "D": 16, "causal": True, "S": 32}
    monkeypatch.setattr(attention, "_cases", lambda settings: [case])
    threads = torch.get_num_threads()
    out = tmp_path / "new" / "results.json"
    arguments = ["bench", "attention", "--quick", "--device", "cpu", "--threads", "1", "--out", str(out)]
    try:
        assert main(arguments) == 0
    finally:
        torch.set_num_threads(threads)
    document = json.loads(out.read_text())
    rows = document["sections"]["attention"]
    assert [(row["direction"], row["provider"]) for row in rows] == [
        ("forward", "flash4"),
        ("forward", "sdpa"),
        ("backward", "flash4"),
        ("backward", "sdpa"),
    ]
    assert attention.text(rows) in capsys.readouterr().out
    assert document["parameters"] == {"device": "cpu", "threads": 1, "quick": True, "clock": "wall"}
    assert document["versions"] == info.versions()


def test_stored_results_can_be_read(tmp_path: Path) -> None:
    assert RESULTS
    for path in RESULTS:
        for name, rows in json.loads(path.read_text())["sections"].items():
            assert command.SECTIONS[name].text(rows).count("\n") == len(rows) + 1


def test_plots_of_stored_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    from flash4_torch.bench import plots

    for path in RESULTS:
        sections = json.loads(path.read_text())["sections"]
        plots.draw(sections, tmp_path / path.stem)
        for name in sections:
            assert (tmp_path / path.stem / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@given(values=st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=30))
def test_spread_orders_its_quartiles(values: list[float]) -> None:
    spread = timing.Spread.of(values)
    assert min(values) <= spread.low <= spread.median <= spread.high <= max(values)
    assert spread.samples == len(values)


def test_ratios_are_of_the_first_contender() -> None:
    small, large = torch.randn(64, 64), torch.randn(768, 768)
    result = timing.compare(
        {"large": lambda: large @ large, "small": lambda: small @ small}, Settings(quick=True)
    )
    assert result.ratios["large"] == (1.0, 1.0, 1.0, result.seconds["large"].samples)
    assert result.ratios["small"].low > 1.0
    assert result.seconds["large"].median > result.seconds["small"].median


@given(power=st.sampled_from([0.5, 1.0, 2.0]), factor=st.floats(0.1, 100.0))
def test_exponent_of_a_power_law(power: float, factor: float) -> None:
    sizes = [1024, 2048, 8192]
    assert memory.exponent(sizes, [factor * S**power for S in sizes]) == pytest.approx(power)


@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_the_operators_own(causal: bool) -> None:
    q, k, v = (torch.randn(2, 64, 3, 8, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        flash4_torch.attention(q, k, v, causal=causal).sum().backward()
    counted = counter.get_flop_counts()["Global"]
    forward = flops.forward(2, 64, 3, 8, causal)
    # The operator counts the diagonal's other half, too.
    slack = 64 / 63 if causal else 1.0
    assert forward <= counted[torch.ops.flash4.attention] <= forward * (1 + 2 / 64) * slack
    assert (
        counted[torch.ops.flash4.attention_backward] == flops.BACKWARD * counted[torch.ops.flash4.attention]
    )


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


@pytest.mark.parametrize("causal", [False, True])
def test_providers_compute_the_same(causal: bool) -> None:
    q, k, v = (torch.randn(2, 40, 3, 16) for _ in range(3))
    serving = providers.serving(q, k, v, causal)
    assert list(serving)[:2] == ["flash4", "sdpa"]
    for attend in serving.values():
        torch.testing.assert_close(attend(q, k, v, causal), serving["sdpa"](q, k, v, causal))


def test_host_contenders_compute_the_same() -> None:
    q, k, v = (torch.randn(1, 16, 1, 16) for _ in range(3))
    expected = providers.serving(q, k, v, False)["sdpa"](q, k, v, False)
    for attend in host.CONTENDERS.values():
        torch.testing.assert_close(attend(q, k, v), expected)


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
