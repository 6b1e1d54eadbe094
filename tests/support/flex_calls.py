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
from flash4_torch.testing import assert_close_as_peer, emulate
from flex_mods import H, Mod

HK = H // 2
ARCHS = ["sm_90a", "sm_100a"]
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


def drawn_blocks(
    seed: int, Sq: int, Sk: int, q_block: int, kv_block: int, sizes: tuple[int, int] = (2, H)
) -> Tensor:
    """States of blocks: for one or all batch entries and heads; sometimes rows see nothing."""
    B, Hm = (n if seed >> i & 1 else 1 for i, n in enumerate(sizes))
    states = torch.randint(0, 3, (B, Hm, -(-Sq // q_block), -(-Sk // kv_block)))
    if seed % 5 == 0:
        states[:, :, -1] = EMPTY
    return states


def emulated(function: Callable[[], Any], arch: str, schedule: dict[str, Any], num_sms: int = 3) -> Any:
    with pytest.MonkeyPatch.context() as patch, emulate.device(arch, num_sms=num_sms, **schedule):
        patch.setenv("FLASH4_BACKEND", "emulator")
        return function()


def _plain(call: Call, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) in float32, by the reference."""
    inputs = FlexInputs(call.q.float(), call.k.float(), v, call.mods)
    out, lse, _ = Tiled().forward(inputs, describe(inputs, call.options))
    return out, lse


def check(call: Call, arch: str, schedule: dict[str, Any]) -> None:
    """The forward's results are right."""
    out, lse = emulated(call.results, arch, schedule)
    exact, exact_lse = _plain(call, call.v.float())
    # Each weight and each result is rounded to 16 bits, by half a unit each; a weight's own error is 1e-4.
    sizes, _ = _plain(call, call.v.float().abs())
    error, bound = (out.float() - exact).abs(), (torch.finfo(out.dtype).eps + 2e-4) * sizes + 1e-30
    assert bool((error <= bound).all()), f"out: {(error / bound).max():.2f} of what it may be"
    nothing = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, nothing)
    assert bool((out.transpose(1, 2)[nothing] == 0).all())
    away = (lse - exact_lse)[~nothing].abs()
    assert bool((away <= 2e-4 + 1e-6 * exact_lse[~nothing].abs()).all()), f"lse: {away.max():.2e}"


def check_gradients(call: Call, arch: str, schedule: dict[str, Any], *, has_dlse: bool = False) -> None:
    """Gradients by kernels are as near to the exact ones as plain torch's.

    Unless there is time, plain torch has computed what they differentiate.
    """
    q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))
    sinks = None if call.mods.sinks is None else call.mods.sinks.detach().requires_grad_()
    call = replace(call, q=q, k=k, v=v, mods=call.mods._replace(sinks=sinks))
    wanted = {"q": q, "k": k, "v": v, **({} if sinks is None else {"sinks": sinks})}
    wanted |= {f"captured {i}": x for i, x in enumerate(call.learned)}
    exact = call.by_definition(torch.float64)
    dout = torch.randn(exact[0].shape).to(q.dtype)
    # A row that sees nothing has lse -inf, whose gradient the definition turns to NaN.
    dlse = torch.where(exact[1].isfinite(), torch.randn(exact[1].shape), 0.0) * has_dlse

    def gradients(results: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        upstream = [dout.to(results[0].dtype), dlse.to(results[1].dtype)]
        used = 2 if has_dlse else 1
        return torch.autograd.grad(
            results[:used], list(wanted.values()), upstream[:used], allow_unused=True, materialize_grads=True
        )

    if EVERYTHING:
        found = emulated(lambda: gradients(call.results()), arch, schedule)
    else:
        results = call.results()
        found = emulated(lambda: gradients(results), arch, schedule)
    noise = dict(zip((f"captured {i}" for i in range(len(call.learned))), _noise(call, dout), strict=True))
    truths, peers = gradients(exact), gradients(call.by_definition(q.dtype))
    for name, x, truth, peer in zip(wanted, found, truths, peers, strict=True):
        more = noise.get(name, 1e-4)
        assert_close_as_peer(x, truth.double(), peer, what=f"gradient of {name}", noise=more)


def _noise(call: Call, dout: Tensor) -> list[float]:
    """Errors of captured tensors' gradients, four times their deviation: each row's sum over its weights is
    off by what rounding weights and results to 16 bits took from its output.
    """
    if not call.learned or call.score_mod is None:
        return [0.0] * len(call.learned)
    o, dtype = call.options, torch.float64
    q, k, v = (x.detach().to(dtype).transpose(1, 2) for x in (call.q, call.k, call.v))
    k, v = (x.repeat_interleave(H // HK, 1) for x in (k, v))
    products = Scoring(o.scale, softcap=o.softcap).cap(q @ k.transpose(2, 3) * o.scale)
    b, h, i, j = (
        torch.arange(n).view([-1 if dim == at else 1 for dim in range(4)])
        for at, n in enumerate(products.shape)
    )
    modified = call.score_mod(products, b, h, i, j)
    seen = call.shown(b, h, i, j) & torch.as_tensor(o.band.visible(i, j, q.shape[2], k.shape[2]))
    out, lse = (x.detach() for x in call.by_definition(dtype))
    weights = torch.where(seen, torch.exp(modified.detach() - lse[..., None]), 0.0).nan_to_num(0.0)
    squares = dout.to(dtype).square().transpose(1, 2)
    variance = (squares * (weights.square() @ v.square() + out.transpose(1, 2).square())).sum(-1)
    deviation = torch.finfo(call.q.dtype).eps / math.sqrt(12) * variance.sqrt()
    sums = [torch.zeros_like(x, dtype=dtype) for x in call.learned]
    generator, samples = torch.Generator().manual_seed(0), 8
    for _ in range(samples):
        rows = deviation * torch.randn(deviation.shape, generator=generator, dtype=dtype)
        upstream = (weights * rows[..., None]).to(modified.dtype)
        found = torch.autograd.grad(modified, list(call.learned), upstream, retain_graph=True)
        for total, x in zip(sums, found, strict=True):
            total += x.double().square()
    return [4 * float((total / samples).sqrt().max()) for total in sums]
