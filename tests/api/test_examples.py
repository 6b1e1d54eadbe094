"""The small examples run, and what they print is right."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def differences(text: str) -> list[float]:
    return [float(line.split()[-1]) for line in text.splitlines() if "largest difference" in line]


def test_packed_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("packed_sequences", capsys)
    assert "packed: (980, 8, 64), 980 rows" in text and "padded: (3, 700, 8, 64), 2100 rows" in text
    assert len(differences(text)) == 3 and max(differences(text)) < 1e-5


def test_dropout_replay(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("dropout_replay", capsys)
    assert "the next call draws another mask: True" in text
    kept = re.search(r"kept (\S+) of the weights, asked for 0.75", text)
    assert kept is not None and abs(float(kept[1]) - 0.75) < 0.01
    assert len(differences(text)) == 1 and max(differences(text)) < 1e-5


def test_context_parallel() -> None:
    """Two processes lose what one does. It runs as a command, because its processes import it."""
    command = [sys.executable, str(EXAMPLES / "context_parallel.py"), "--steps", "6"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=True)
    assert differences(done.stdout) and max(differences(done.stdout)) < 1e-4
    assert done.stdout.count("step 5: loss") == 2


def test_learned_bias(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("learned_bias", capsys)
    assert "the bias has a gradient: True" in text
    losses = [float(line.split()[-1]) for line in text.splitlines() if ": loss " in line]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)
    # Guessing among 16 tokens costs ln 16 = 2.8, and without the bias no head knows of distances.
    assert losses[-1] < 0.3
    assert re.findall(r"head \d: the largest bias is at distance (\d+)", text) == ["5", "5"]


def test_hugging_face(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    text = printed("hugging_face", capsys)
    assert "the same tokens: True" in text
    assert len(differences(text)) == 1 and max(differences(text)) < 1e-5
    # One for the logits, then eight tokens, in each of two layers; none by eager.
    assert "calls of flash4_torch's attention: 18" in text


def test_hugging_face_serving(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from transformers.generation.continuous_batching import cache

    # transformers takes a CPU to have no memory where psutil is missing.
    memory = torch.device("cpu"), 1 << 30, 0, 0
    monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: memory)
    text = printed("hugging_face_serving", capsys)
    assert "tokens of 4 requests: 32" in text
    assert "by eager attention: True" in text
