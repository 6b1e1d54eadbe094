"""Kernels for programmable attention: the calls that they serve, and their launches."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import env
from ...configs.types import Features, Mods
from ...flex_problem import FlexGradients, FlexInputs, FlexProblem, FlexSaved
from ...kernels.common import lowering
from ...problem import Problem, Spec
from ...reference.flex import EMPTY, FULL, Blocks
from .. import tile_counters
from ..compiled import TARGETS, Target, forward, limits
from ..compiled.backend import missing_packages, num_sms
from ..compiled.targets import Find, ForwardConfig
from ..compiled.tensors import readable, unpad
from ..emulator import Emulator, emulated_find, emulated_num_sms, emulated_target, why_not_emulated
from .tables import tables
from .tiled import described, program_of


class Compiled:
    """The backend that serves the GPUs of its targets."""

    def __init__(self, name: str, *targets: Target) -> None:
        self.name = name
        self._targets = {target.capability: target for target in targets}

    def why_not(self, problem: FlexProblem) -> list[str]:
        spec = problem.spec
        if spec.device != "cuda":
            return [f"the tensors are on {spec.device}, and it serves cuda"]
        why = []
        target = self._targets.get(spec.capability)
        if target is None:
            served = " and ".join(map(str, self._targets))
            why.append(f"the GPU's compute capability is {spec.capability}, and it serves {served}")
        if missing := missing_packages(exported=bool(env.AOT_DIR.get())):
            why.append(f"{' and '.join(missing)} must be installed (pip install 'flash4_torch[kernels]')")
        return [*why, *why_not_kernels(target or next(iter(self._targets.values())), problem)]

    def forward(self, inputs: FlexInputs, problem: FlexProblem) -> tuple[Tensor, Tensor, Tensor]:
        spec, (B, Sq, _, Hq, _) = problem.spec, problem.extent
        q, sinks, rng_state = inputs.q, inputs.mods.sinks, inputs.mods.rng_state
        lse = q.new_empty(B, Hq, Sq, dtype=torch.float32)
        if 0 in problem.extent:
            lse = lse.fill_(-math.inf) if sinks is None else lse.copy_(sinks[:, None].expand(lse.shape))
            return q.new_zeros(B, Sq, Hq, spec.Dv), lse, torch.zeros_like(lse)
        index = q.get_device()
        plain, target, sms = plain_problem(problem), self.target(problem), self.sms(index)
        features, config = chosen(target, problem)
        function = self.find(problem)(target.forward, (features, config))
        x, k, v = (readable(tensor) for tensor in inputs[:3])
        out = q.new_empty(B, Sq, Hq, features.Dv)
        low = torch.empty_like(lse) if features.large_scores else torch.zeros_like(lse)
        function(
            x,
            k,
            v,
            out,
            lse,
            low if features.large_scores else None,
            self.counter(index),
            None,
            None,
            arguments(inputs, problem, config),
            rng_state,
            sinks if sinks is None else sinks.contiguous(),
            forward.params_of(target, plain, config, sms),
        )
        return unpad(out, spec.Dv), lse, low

    def backward(self, saved: FlexSaved, inputs: FlexInputs, problem: FlexProblem) -> FlexGradients:
        raise AssertionError("it is not chosen")

    # The emulator's backend overrides the following methods.

    def target(self, problem: FlexProblem) -> Target:
        return self._targets[problem.spec.capability]

    def find(self, problem: FlexProblem) -> Find:
        return self.target(problem).find

    def sms(self, index: int) -> int:
        return num_sms(index)

    def counter(self, index: int) -> Tensor:
        return tile_counters.counter(index)


class Emulated(Compiled):
    """The kernels of the GPU that FLASH4_ARCH names, run in the emulator."""

    def __init__(self) -> None:
        super().__init__(Emulator.name, *TARGETS.values())
        self._counter = torch.zeros(1, dtype=torch.int32)

    def why_not(self, problem: FlexProblem) -> list[str]:
        if why := why_not_emulated(problem.spec.device):
            return why
        return why_not_kernels(emulated_target(), problem)

    def target(self, problem: FlexProblem) -> Target:
        return emulated_target()

    def find(self, problem: FlexProblem) -> Find:
        return emulated_find

    def sms(self, index: int) -> int:
        return emulated_num_sms()

    def counter(self, index: int) -> Tensor:
        return self._counter


@lru_cache(maxsize=1024)
def why_not_kernels(target: Target, problem: FlexProblem) -> list[str]:
    """The reasons why the target's kernels cannot serve the problem, on whatever device it is."""
    spec = problem.spec
    why = ["it has no kernels for gradients yet"] if spec.backward else []
    plain = plain_problem(problem)
    why += limits(target, plain._replace(spec=plain.spec._replace(backward=False)))
    if not target.has_mods:
        why.append(f"its kernels for {target.arch} take no score_mod, mask_mod or block_mask")
    for name, text in (("score_mod", spec.score_mod), ("mask_mod", spec.mask_mod)):
        if text:
            why += lowering.limits(name, program_of(text))
    return why


def plain_problem(problem: FlexProblem) -> Problem:
    """The problem without its programs and blocks."""
    s = problem.spec
    spec = Spec(
        device=s.device,
        dtype=s.dtype,
        D=s.D,
        Dv=s.Dv,
        group=s.group,
        varlen=False,
        left=s.left,
        right=s.right,
        softcap=s.softcap,
        mask="",
        dropout=s.dropout,
        deterministic=s.deterministic,
        sinks=s.sinks,
        capability=s.capability,
        backward=s.backward,
    )
    return Problem(spec, problem.extent, problem.scale, problem.band, problem.softcap, problem.dropout_p)


class Choice(NamedTuple):
    """The kernel that serves a call."""

    features: Features
    config: ForwardConfig


@lru_cache(maxsize=1024)
def chosen(target: Target, problem: FlexProblem) -> Choice:
    spec, plain = problem.spec, plain_problem(problem)
    features = forward.features_of(plain)
    scaled = features.scaled or bool(spec.score_mod)
    mods = Mods(spec.score_mod, spec.mask_mod, "" if spec.block is None else "rows")
    features = features._replace(scaled=scaled, mods=mods)
    extent, band = problem.extent, problem.band
    end_masked = band.right is not None and band.right <= 0
    seen = forward.seen(plain)
    config = target.forward_configs.forward(features, extent.Sq, extent.Sk, spec.group, seen, end_masked)
    if spec.block is not None and spec.block[1] % config.keys and spec.block[1] < extent.Sk:
        features = features._replace(mods=mods._replace(blocks="scores"))
    return Choice(features, config)


def arguments(inputs: FlexInputs, problem: FlexProblem, config: ForwardConfig) -> tuple[Any, ...] | None:
    """What the kernel takes for the mods: `kernels.common.mods.ModArgs`."""
    flex = described(inputs, problem)
    found = [mod for mod in (flex.score_mod, flex.mask_mod) if mod is not None]
    tensors = tuple(_element(x) for mod in found for x in mod.tensors)
    scalars = tuple(
        value if dtype.startswith(("float", "bfloat")) else int(value)
        for mod in found
        for dtype, value in zip(mod.program.scalars, mod.scalars, strict=True)
    )
    blocks, of_blocks = flex.blocks, None
    if blocks is not None:
        if flex.mask_mod is None:
            blocks = Blocks(torch.where(blocks.state == EMPTY, EMPTY, FULL).to(torch.uint8), blocks.size)
        Sq, Sk = problem.extent.Sq, problem.extent.Sk
        of_blocks = tables(blocks, Sq, Sk, config.queries, config.keys)
    if not found and of_blocks is None:
        return None
    return tensors or None, scalars or None, of_blocks


def _element(x: Tensor) -> Tensor:
    """A captured tensor as kernels read it: of one dimension at least, and not empty."""
    if x.numel() == 0:
        raise IndexError(f"an index is out of range for a captured tensor of shape {tuple(x.shape)}")
    return x if x.dim() else x.reshape(1)
