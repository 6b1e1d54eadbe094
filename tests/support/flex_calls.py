"""Calls of programmable attention for kernels in the emulator, and what they have to give."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from everything import EVERYTHING
from flash4_torch.backends.flex.tiled import Tiled
from flash4_torch.flex.attention import traced
from flash4_torch.flex_problem import FlexInputs, Mods
from flash4_torch.ops import CallOptions
from flash4_torch.ops.flex import describe, flex_attention
from flash4_torch.reference.attention import attention as definition
from flash4_torch.reference.dropout import Dropout
from flash4_torch.reference.flex import EMPTY, FULL, PARTIAL
from flash4_torch.reference.scoring import Scoring
from flash4_torch.testing import emulate
from flex_mods import H, Mod

HK = H // 2
ARCHS = ["sm_90a", "sm_100a", "sm_80", *(["sm_86", "sm_89", "sm_120a"] if EVERYTHING else [])]
SCHEDULES = [{"schedule": "late"}, {"schedule": "fuzz", "seed": 3}]


def tensors(
    Sq: int, Sk: int, D: int = 64, dtype: torch.dtype = torch.bfloat16, Dv: int | None = None
) -> list[Tensor]:
    """q, k and v, (2, S, H, D)."""
    shapes = (2, Sq, H, D), (2, Sk, HK, D), (2, Sk, HK, Dv or D)
    return [torch.randn(shape).to(dtype) for shape in shapes]


@dataclass(frozen=True)
class Call:
    q: Tensor
    k: Tensor
    v: Tensor
    mods: Mods
    options: CallOptions
    score_mod: Mod | None
    mask_mod: Mod | None
    learned: Sequence[Tensor] = ()
    """Captured tensors whose gradients are wanted."""
    states: Tensor | None = field(default=None)
    block: tuple[int, int] = (1, 1)

    def results(self) -> tuple[Tensor, Tensor]:
        return flex_attention(self.q, self.k, self.v, self.mods, self.options)

    def shown(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """What mask_mod and the blocks show."""
        seen = torch.ones((), dtype=torch.bool) if self.mask_mod is None else self.mask_mod(b, h, i, j)
        if self.states is None:
            return seen
        B, Hm = self.states.shape[:2]
        state = self.states[b % B, h % Hm, i // self.block[0], j // self.block[1]]
        return (state == FULL) | ((state == PARTIAL) & seen)

    def by_definition(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out, lse) in `dtype`, differentiable."""
        state, o, sinks = self.mods.rng_state, self.options, self.mods.sinks
        dropout = None if state is None else Dropout(state, o.dropout_p)
        scoring = Scoring(o.scale, o.band, o.softcap, None, dropout)
        q, k, v = (x.to(dtype) for x in (self.q, self.k, self.v))
        mod = None if self.score_mod is None else _in_dtype(self.score_mod)
        return definition(q, k, v, scoring, None if sinks is None else sinks.to(dtype), mod, self.shown)


def _in_dtype(mod: Mod) -> Mod:
    return lambda score, *places: mod(score, *places).to(score.dtype)


def made(
    qkv: list[Tensor],
    score_mod: Mod | None,
    mask_mod: Mod | None,
    learned: Sequence[Tensor] = (),
    **options: Any,
) -> Call:
    q, k, v = qkv
    mods = traced(q, k, score_mod, mask_mod)
    scale = 1 / math.sqrt(q.shape[-1])
    return Call(q, k, v, mods, CallOptions(scale, **options), score_mod, mask_mod, learned)


def with_blocks(call: Call, states: Tensor, q_block: int, kv_block: int) -> Call:
    """The call with a table of blocks (B or 1, H or 1, rows, columns) that are empty, partial or full."""

    def listed(state: int) -> tuple[Tensor, Tensor]:
        is_listed = states == state
        # What stands behind a list may be anything.
        order = torch.argsort((~is_listed).int(), dim=-1, stable=True)
        counts = is_listed.sum(-1)
        behind = torch.arange(order.shape[-1]) >= counts[..., None]
        return counts.int(), order.masked_fill(behind, -77).int()

    (partial, indices), (full, full_indices) = listed(PARTIAL), listed(FULL)
    mods = call.mods._replace(
        kv_num_blocks=partial,
        kv_indices=indices,
        full_kv_num_blocks=full,
        full_kv_indices=full_indices,
        q_block=q_block,
        kv_block=kv_block,
    )
    return replace(call, mods=mods, states=states, block=(q_block, kv_block))


def with_intervals(call: Call, mask_mod: Mod, block: tuple[int, int] = (64, 64)) -> Call:
    """The call with a block mask of a function."""
    B, Sq, Sk = call.q.shape[0], call.q.shape[1], call.k.shape[1]
    b, i, j = torch.arange(B)[:, None, None], torch.arange(Sq)[:, None], torch.arange(Sk)
    seen = mask_mod(b, b, i, j).expand(B, Sq, Sk)
    missing = [-n % size for n, size in zip((Sq, Sk), block, strict=True)]
    padded = torch.nn.functional.pad(seen, (0, missing[1], 0, missing[0]))
    parts = padded.unflatten(2, (-1, block[1])).unflatten(1, (-1, block[0]))
    some, every = parts.any(4).any(2), parts.all(4).all(2)
    states = torch.where(every, FULL, torch.where(some, PARTIAL, EMPTY))[:, None]
    return with_blocks(call, states, *block)


def drawn_blocks(
    seed: int, Sq: int, Sk: int, q_block: int, kv_block: int, sizes: tuple[int, int] = (2, H)
) -> Tensor:
    """States of blocks: for one or all batch entries and heads; sometimes rows see nothing, never do all."""
    B, Hm = (n if seed >> i & 1 else 1 for i, n in enumerate(sizes))
    states = torch.randint(0, 3, (B, Hm, -(-Sq // q_block), -(-Sk // kv_block)))
    if seed % 5 == 0:
        states[:, :, -1] = EMPTY
    states[0, 0, 0, 0], states[-1, -1, 0, -1] = FULL, PARTIAL
    return states


def emulated(function: Callable[[], Any], arch: str, schedule: dict[str, Any], num_sms: int = 3) -> Any:
    return launched(function, arch, schedule, num_sms)[0]


def launched(
    function: Callable[[], Any], arch: str, schedule: dict[str, Any], num_sms: int
) -> tuple[Any, list[str]]:
    """What a function returns in the emulator, and the names of the kernels that it launches."""
    with pytest.MonkeyPatch.context() as patch, emulate.device(arch, num_sms=num_sms, **schedule) as device:
        patch.setenv("FLASH4_BACKEND", "emulator")
        return function(), [report.kernel for report in device.reports]


def _plain(call: Call, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) in float32, by the reference."""
    inputs = FlexInputs(call.q.float(), call.k.float(), v, call.mods)
    out, lse, _ = Tiled().forward(inputs, describe(inputs, call.options))
    return out, lse


def check(call: Call, arch: str, schedule: dict[str, Any]) -> None:
    """The forward's results are right."""
    check_results(call, *emulated(call.results, arch, schedule))


def check_results(call: Call, out: Tensor, lse: Tensor) -> None:
    """A forward's results are right."""
    exact, exact_lse = _plain(call, call.v.float())
    # Each weight and each result is rounded to 16 bits, by half a unit each; a weight's own error is 1e-4.
    # Units do not get smaller than those of the smallest normal number.
    sizes, _ = _plain(call, call.v.float().abs())
    info = torch.finfo(out.dtype)
    bound = (info.eps + 2e-4) * sizes + (info.eps * info.smallest_normal / 2 + 1e-30)
    error = (out.float() - exact).abs()
    assert bool((error <= bound).all()), f"out: {(error / bound).max():.2f} of what it may be"
    nothing = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, nothing)
    assert bool((out.transpose(1, 2)[nothing] == 0).all())
    away = (lse - exact_lse)[~nothing].abs()
    assert bool((away <= 2e-4 + 1e-6 * exact_lse[~nothing].abs()).all()), f"lse: {away.max():.2e}"


def check_gradients(call: Call, arch: str, schedule: dict[str, Any], *, has_dlse: bool = False) -> None:
    """Gradients by kernels are off by no more than rounding to 16 bits may do.

    Unless there is time, plain torch has computed what they differentiate.
    """
    q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))
    sinks = None if call.mods.sinks is None else call.mods.sinks.detach().requires_grad_()
    call = replace(call, q=q, k=k, v=v, mods=call.mods._replace(sinks=sinks))
    sums = {f"captured {i}": x for i, x in enumerate(call.learned)}
    if sinks is not None:
        sums["sinks"] = sinks
    exact = Exact(call, has_dlse)
    wanted, upstream = [q, k, v, *sums.values()], exact.upstream

    def gradients(results: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        given = [x.to(y.dtype) for x, y in zip(upstream, results, strict=False)]
        return torch.autograd.grad(
            results[: len(given)], wanted, given, allow_unused=True, materialize_grads=True
        )

    if EVERYTHING:
        found = emulated(lambda: gradients(call.results()), arch, schedule)
    else:
        results = call.results()
        found = emulated(lambda: gradients(results), arch, schedule)
    truths, bounds = exact.gradients(wanted), [*exact.bounds(), *exact.bounds_of_sums(list(sums.values()))]
    for name, x, truth, bound in zip(["q", "k", "v", *sums], found, truths, bounds, strict=True):
        error, allowed = (x.double() - truth).abs(), bound + torch.finfo(x.dtype).eps * truth.abs() + 1e-6
        assert bool((error <= allowed).all()), (
            f"gradient of {name}: {(error / allowed).max():.2f} of what it may be off"
        )


class Exact:
    """The definition of a call in float64, and what a kernel's gradients may be off.

    P and dS are rounded to 16 bits before they are multiplied; so were the weights and the output in the
    forward, which shifts all of a row's dS by the weights times a number of that deviation.
    """

    def __init__(self, call: Call, has_dlse: bool) -> None:
        self._call, self._eps = call, torch.finfo(call.q.dtype).eps
        shape = call.q.shape[0], H, call.q.shape[1], call.k.shape[1]
        self._before = torch.zeros(shape, dtype=torch.float64).requires_grad_()
        self._after = torch.zeros(shape, dtype=torch.float64).requires_grad_()
        self.out, self.lse = replace(call, score_mod=self._mod).by_definition(torch.float64)
        dout = torch.randn(self.out.shape).to(call.q.dtype)
        # A row that sees nothing has lse -inf, whose gradient the definition turns to NaN.
        dlse = torch.where(self.lse.isfinite(), torch.randn(self.lse.shape), 0.0)
        self.upstream = [dout, dlse] if has_dlse else [dout]
        (weights,) = self._grad([self.lse], [self._after], [torch.ones_like(self.lse)])
        group = H // HK
        values = call.v.detach().double().repeat_interleave(group, 2).transpose(1, 2)
        kept = 1.0 / (1.0 - call.options.dropout_p)
        of_out = weights.square() @ values.square() * kept + self.out.detach().transpose(1, 2).square()
        variance = (dout.double().square().transpose(1, 2) * of_out).sum(-1)
        self._deviation = self._eps / math.sqrt(12) * variance.sqrt()

    def _mod(self, score: Tensor, *places: Tensor) -> Tensor:
        score, mod = score + self._before, self._call.score_mod
        score = score if mod is None else mod(score, *places).to(score.dtype)
        self._modified = score + self._after
        return self._modified

    def _grad(self, of: list[Tensor], wanted: Sequence[Tensor], upstream: list[Tensor]) -> list[Tensor]:
        found = torch.autograd.grad(
            of, wanted, upstream, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return [x.double() for x in found]

    def gradients(self, wanted: Sequence[Tensor]) -> list[Tensor]:
        given = [x.double() for x in self.upstream]
        return self._grad([self.out, self.lse][: len(given)], wanted, given)

    def bounds(self) -> list[Tensor]:
        """What the gradients of q, k and v may be off, before they are rounded."""
        call, group = self._call, H // HK
        q, k = (x.detach().double().abs().transpose(1, 2) for x in (call.q, call.k))
        (ds,) = self.gradients([self._before])
        (shifts,) = self._grad([self.lse], [self._before], [4 * self._deviation])
        each = call.options.scale * ((2 * self._eps + 3e-4) * ds.abs() + shifts.abs())
        of_q = (each @ k.repeat_interleave(group, 1)).transpose(1, 2)
        of_k = (each.transpose(2, 3) @ q).unflatten(1, (HK, group)).sum(2).transpose(1, 2)
        (of_v,) = self._grad([self.out], [call.v], [self.upstream[0].double().abs()])
        return [of_q, of_k, (self._eps + 3e-4) * of_v]

    def bounds_of_sums(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """What sums over scores may be off: six times the deviation, by samples."""
        if not sums:
            return []
        (dmod,) = self.gradients([self._after])
        squares = [torch.zeros_like(x, dtype=torch.float64) for x in sums]
        generator, samples = torch.Generator().manual_seed(0), 8
        for _ in range(samples):
            rows, scores = (torch.randn(x.shape, generator=generator) for x in (self.lse, dmod))
            given = [rows * self._deviation, scores * dmod * self._eps / math.sqrt(12)]
            for total, x in zip(squares, self._grad([self.lse, self._modified], sums, given), strict=True):
                total += x.square()
        deviations = [(total / samples).sqrt() for total in squares]
        return [6 * x + x.max() for x in deviations]
