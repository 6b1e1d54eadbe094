"""Backends whose kernels for programmable attention do not exist yet: they refuse every call, and say so."""

from __future__ import annotations

from torch import Tensor

from ...flex_problem import FlexGradients, FlexInputs, FlexProblem, FlexSaved


class Unwritten:
    def __init__(self, name: str) -> None:
        self.name = name

    def why_not(self, problem: FlexProblem) -> list[str]:
        return ["it has no kernels for score_mod, mask_mod and block masks yet"]

    def forward(self, inputs: FlexInputs, problem: FlexProblem) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("it is not chosen")

    def backward(self, saved: FlexSaved, inputs: FlexInputs, problem: FlexProblem) -> FlexGradients:
        raise AssertionError("it is not chosen")
