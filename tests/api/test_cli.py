"""The command line: `info` tells the truth and imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash4_torch
from flash4_torch import ahead, backends, env, info
from flash4_torch.__main__ import FEATURE_WORDS, _parser, main
from flash4_torch.backends.compiled import TARGETS
from flash4_torch.compile import key, library


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
    for arch, target in TARGETS.items():
        assert f"\n  {arch} " in text and target.proven in text
    assert "FLASH4_BACKEND  tiled" in text
    assert f"kernel cache: {info.kernel_cache()['kernels']} kernels, " in text
    assert f" MiB in {info.kernel_cache()['folder']}\n" in text + "\n"


def test_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == info.collect()


def documented_keys(section: str) -> list[str]:
    """The first words of the lines that are indented by two, under a line that begins with `section`."""
    lines = section.splitlines()
    return [line.split()[0] for line in lines if line.startswith("  ") and not line.startswith("   ")]


def test_the_keys_of_json_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["info", "--help"])
    assert ended.value.code == 0
    epilog = capsys.readouterr().out.partition("--json prints")[2]
    collected = info.collect()
    assert documented_keys(epilog) == list(collected)
    for variable in collected["environment"]:
        assert all(key in epilog for key in variable)
    assert all(key in epilog for key in collected["cache"])
    assert all(key in epilog for device in collected["devices"] for key in device)


WRONG = {
    "FLASH4_BACKEND": "nope",
    "FLASH4_LOG": "anything",
    "FLASH4_ARCH": "nope",
    "FLASH4_CACHE_DIR": "relative",
    "FLASH4_AOT_DIR": "/nonexistent",
    "FLASH4_BENCH_FA3": "/nonexistent.so",
}


@pytest.mark.parametrize(
    "names", [[name] for name in WRONG] + [list(WRONG)], ids=lambda names: "+".join(names)
)
def test_info_marks_wrong_variables_and_prints_everything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    for name in names:
        monkeypatch.setenv(name, WRONG[name])
    assert main(["info"]) == 1
    text = capsys.readouterr().out
    assert main(["info", "--json"]) == 1
    collected = json.loads(capsys.readouterr().out)
    wrong = {v["name"]: v["wrong"] for v in collected["environment"] if v["wrong"]}
    assert list(wrong) == names
    for name, sentence in wrong.items():
        assert name in sentence and WRONG[name] in sentence
        assert f"\n  {sentence}\n" in text + "\n"
    assert "kernel cache: " in text and all(f"\n  {backend.name} " in text for backend in backends.PRIORITY)
    assert set(collected["backends"]["cpu"]) == {backend.name for backend in backends.PRIORITY}
    for variable in env.ALL:
        assert f"\n  {variable.name}  " in text


@pytest.mark.parametrize("folder", ["~nobody_has_this_name/x", "/dev/null/x", "/dev/null"])
def test_info_marks_a_cache_that_cannot_be(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setenv("FLASH4_CACHE_DIR", folder)
    (sentence,) = info.complaints(info.collect())
    assert sentence.startswith(f"FLASH4_CACHE_DIR is {folder!r}, but ")


def test_info_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH4_CACHE_DIR", str(tmp_path / "not yet"))
    assert info.complaints(info.collect()) == []
    assert list(tmp_path.iterdir()) == []


def test_info_notices_a_misspelt_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH4_BACKND", "tiled")
    assert main(["info"]) == 1
    assert "FLASH4_BACKND is none of these; did you mean FLASH4_BACKEND?" in capsys.readouterr().out


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for word in ("info", "warmup", "export", "bench", "examples:", "--version"):
        assert word in shown.out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"flash4_torch {flash4_torch.__version__}\n"


@pytest.mark.parametrize("command", ["warmup", "export", "bench"])
def test_help_has_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    prefix = "  python -m flash4_torch "
    examples = [line.removeprefix(prefix) for line in shown.splitlines() if line.startswith(prefix)]
    assert len(examples) >= 2
    for example in examples:
        assert _parser().parse_args(example.split()).command == command


def test_every_word_of_features_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(FEATURE_WORDS) == list(ahead.WORDS)
    with pytest.raises(SystemExit):
        main(["warmup", "--help"])
    shown = capsys.readouterr().out
    for word, meaning in FEATURE_WORDS.items():
        assert f"\n  {word:<13}  {meaning}\n" in shown


def test_info_says_who_serves_and_why_the_others_do_not() -> None:
    reasons = info.backends("cpu")
    assert reasons["cpu"] == [] and reasons["tiled"] == []
    assert "it serves cuda" in reasons["sdpa"][0]


def test_info_says_whose_cuda_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several CUDAs may be installed, and ptxas of one may spill where that of another does not."""
    monkeypatch.setattr(library, "installed_runtime", lambda: Path("/x/cu99/lib/libcute_dsl_runtime.so"))
    monkeypatch.setattr(key, "versions", key.versions.__wrapped__)
    assert info.versions()["CUDA (of nvidia-cutlass-dsl)"] == "cu99"
    assert "CUDA (of nvidia-cutlass-dsl)  cu99" in info.text(info.collect())


def test_info_says_how_kernels_were_proven() -> None:
    """Kernels that no GPU has run must say so."""
    proven = info.kernels()
    assert "timed on an H200" in proven["sm_90a"]
    for arch in proven.keys() - {"sm_90a"}:
        lacking = "never run on a GPU" + (", never timed" if arch.startswith("sm_10") else " of its own")
        assert lacking in proven[arch] and "emulator" in proven[arch]


def test_info_imports_nothing_heavy() -> None:
    code = (
        "import sys; from flash4_torch.__main__ import main; main(['info']);"
        "print([m for m in ('cutlass', 'triton', 'matplotlib', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
