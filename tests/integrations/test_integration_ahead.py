"""Kernels of a server's steps, compiled when its engine starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flash4_torch.errors import ArgumentError, CompileError
from flash4_torch.integrations import ahead_of_steps

STEP: Any = object()


def test_a_gpu_s_steps_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(ahead_of_steps, "warmup_steps", lambda *args: asked.append(args))
    steps = iter([STEP])
    ahead_of_steps.prepare(steps, torch.device("cpu"))
    assert not asked
    ahead_of_steps.prepare(steps, torch.device("cuda:1"))
    assert asked == [([STEP], 1)]


def test_an_engine_starts_where_kernels_do_not_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise CompileError("1 of 2 kernels", "no room")

    monkeypatch.setattr(ahead_of_steps, "warmup_steps", fail)
    with caplog.at_level(logging.WARNING):
        ahead_of_steps.prepare([STEP], torch.device("cuda:0"))
    assert "compiled when a step needs them: " in caplog.text and "no room" in caplog.text


def test_an_engine_starts_where_a_layer_cannot_be_described(caplog: pytest.LogCaptureFixture) -> None:
    def steps() -> Iterator[Any]:
        raise ArgumentError("k_scale", "a tensor", "it goes with a float8 cache")
        yield

    ahead_of_steps.prepare(steps(), torch.device("cuda:0"))
    assert "k_scale is a tensor" in caplog.text
