"""Tiles over splits of the keys, one after another, give what one call on all keys does: out, lse, gradients.

Kernels merge results and sum up dQ in float32 themselves where the call allows for that.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everything import examples, one_of
from flash4_torch import env, testing
from flash4_torch.backends.compiled import SM90A, SM100A, TARGETS, Target
from flash4_torch.distributed import ring
from flash4_torch.distributed.groups import ALONE
from flash4_torch.distributed.layout import Shards
from flash4_torch.distributed.plan import Problem, Tile
from flash4_torch.masks import Band
from flash4_torch.ops.parts import QueryGradient
from flash4_torch.problem import CallOptions, Saved
from flash4_torch.testing import assert_close_as_peer, emulate, reference
from on_cpu import gpu

BLOCK = 128
"""Rows of which the kernels' blocks are parts."""


class Split(NamedTuple):
    """Tiles that have all keys between them, and the call's sizes."""

    tiles: tuple[Tile, ...]
    B: int
    Sq: int
    Sk: int
    Hk: int
    group: int
    D: int
    Dv: int
    dtype: torch.dtype
    softcap: float
    deterministic: bool
    dlse: bool
    seed: int

    @property
    def options(self) -> CallOptions:
        return CallOptions(self.D**-0.5, None, None, self.softcap, 0.0, self.deterministic)

    @property
    def mask(self) -> Tensor:
        """(Sq, Sk), True where some tile sees a key."""
        mask = torch.zeros(self.Sq, self.Sk, dtype=torch.bool)
        for rows, keys, band, *_ in self.tiles:
            n, m = len(rows), len(keys)
            i, j = torch.arange(n)[:, None], torch.arange(m)
            seen = torch.ones(n, m, dtype=torch.bool) & band.visible(i, j, n, m)
            mask[rows.start : rows.stop, keys.start : keys.stop] = seen
        return mask

    def tensors(self) -> list[Tensor]:
        """q, k, v, dout and dlse."""
        generator = torch.Generator().manual_seed(self.seed)
        Hq = self.Hk * self.group
        shapes = [(self.Sq, Hq, self.D), (self.Sk, self.Hk, self.D), (self.Sk, self.Hk, self.Dv)]
        shapes += [(self.Sq, Hq, self.Dv)]
        made = [torch.randn(self.B, *shape, generator=generator).to(self.dtype) for shape in shapes]
        return [*made, torch.randn(self.B, Hq, self.Sq, generator=generator)]


@st.composite
def splits(draw: st.DrawFn) -> Split:
    Sq, Sk = draw(st.integers(1, 300)), draw(st.integers(1, 160))
    cuts = sorted({0, Sk, *draw(st.lists(st.integers(0, Sk), max_size=3))})
    tiles = []
    for a, b in pairwise(cuts):
        start = draw(st.sampled_from([0, 0, BLOCK, 2 * BLOCK, 37]))
        stop = draw(st.sampled_from([Sq, Sq, BLOCK, 2 * BLOCK, 90]))
        rows = range(start, stop) if start < stop <= Sq else range(Sq)
        bound = st.one_of(st.none(), st.integers(-20, 200))
        left, right = draw(bound), draw(bound)
        if left is not None and right is not None and left + right < 0:
            left, right = -left, -right
        tiles.append(Tile(rows, range(a, b), Band(left, right)))
    Hk, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 4)]))
    D, Dv = draw(st.sampled_from([(8, 8), (16, 8), (13, 20), (64, 64)]))
    return Split(
        tuple(tiles),
        draw(st.integers(1, 2)),
        Sq,
        Sk,
        Hk,
        group,
        D,
        Dv,
        draw(st.sampled_from([torch.bfloat16, torch.float16])),
        draw(st.sampled_from([0.0, 0.0, 2.0])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 99)),
    )


def by_tiles(split: Split) -> list[Tensor]:
    """out, lse, dq, dk and dv."""
    q, k, v, dout, dlse = split.tensors()
    nothing = Problem(Shards("contiguous", 1, 1), Shards("contiguous", 1, 1), Band())
    it = ring.Ring(ALONE, nothing, split.options, None)
    rows = ring.Rows(q, split.Dv, by_kernels=True)
    for tile in split.tiles:
        keys = slice(tile.keys.start, tile.keys.stop)
        rows.attend(it, tile, k[:, keys], v[:, keys])
    out, lse = rows.finished()
    out, lse = out.to(q.dtype), lse.contiguous()
    queries = ring.Queries(q, Saved(dout, dlse if split.dlse else None, out, lse))
    grads = []
    for tile in split.tiles:
        keys = slice(tile.keys.start, tile.keys.stop)
        grads.append(queries.backward(it, tile, k[:, keys], v[:, keys]))
    dk, dv = (torch.cat(parts, 1) for parts in zip(*grads, strict=True))
    return [out, lse, queries.finished(), dk, dv]


def at_once(split: Split, dtype: torch.dtype) -> list[Tensor]:
    """The same of one call with a mask, by definition."""
    q, k, v, dout, dlse = (x.to(dtype) for x in split.tensors())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    options = {"softcap": split.softcap, "scale": split.options.scale, "dtype": dtype}
    out, lse = reference(*inputs, attn_mask=split.mask, **options)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    loss = (out * dout).sum() + (finite * dlse).sum() * split.dlse
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, inputs)]


def check(split: Split) -> None:
    with testing.poisoned_memory():
        found = by_tiles(split)
    exact, peer = (at_once(split, dtype) for dtype in (torch.float64, split.dtype))
    # Gradients of a row's only key are sums of what cancels.
    noise = split.Sq * split.group * torch.finfo(torch.float32).eps
    assert torch.equal(found[1] == -torch.inf, exact[1] == -torch.inf)
    for name, mine, right, near in zip(("out", "lse", "dq", "dk", "dv"), found, exact, peer, strict=True):
        assert_close_as_peer(mine, right, near.to(mine.dtype), what=f"{name} of {split}", noise=noise)


@pytest.mark.parametrize("target", [SM90A, SM100A, TARGETS["sm_80"]], ids=lambda target: target.arch)
@settings(max_examples=examples(20, 300))
@given(split=splits())
def test_parts_give_what_one_call_does(target: Target, split: Split) -> None:
    """The host, with stand-ins that assert what kernels take and compute from it."""
    with gpu(target) as machine:
        check(split)
    modes = [launch.features.running for launch in machine.launches]
    assert len(modes) == len(split.tiles) and modes[0] == "begin" and "" not in modes


SPLIT = Split(
    (
        Tile(range(BLOCK, 530), range(40), Band(None, 9)),
        Tile(range(530), range(40, 101), Band(None, 9)),
        Tile(range(2 * BLOCK, 530), range(101, 160), Band(None, 9)),
    ),
    *(1, 530, 160, 1, 4, 64, 64, torch.bfloat16, 0.0, False, True, 0),
)
"""Rows that see nothing in some tiles, and in all."""
EMULATED: dict[str, tuple[str, Split]] = {
    "sm_90a": ("sm_90a", SPLIT),
    "sm_100a": ("sm_100a", SPLIT),
    "sm_90a, in order": ("sm_90a", SPLIT._replace(deterministic=True, dtype=torch.float16)),
    "sm_100a, in order": ("sm_100a", SPLIT._replace(deterministic=True, B=2)),
    "sm_80": ("sm_80", SPLIT),
    "sm_80, float32": ("sm_80", SPLIT._replace(dtype=torch.float32)),
    "sm_90a, 128": ("sm_90a", SPLIT._replace(D=128, Dv=128)),
    "sm_100a, 128": ("sm_100a", SPLIT._replace(D=128, Dv=128)),
    "sm_90a, 192 and 104": ("sm_90a", SPLIT._replace(D=192, Dv=104)),
    "sm_100a, 192 and 104": ("sm_100a", SPLIT._replace(D=192, Dv=104)),
    "sm_90a, 256": ("sm_90a", SPLIT._replace(D=256, Dv=256)),
    "sm_100a, 256": ("sm_100a", SPLIT._replace(D=256, Dv=256)),
    "sm_80, 200": ("sm_80", SPLIT._replace(D=200, Dv=200)),
    "sm_80, float32, 160": ("sm_80", SPLIT._replace(D=160, Dv=160, dtype=torch.float32)),
}


@pytest.mark.parametrize("name", one_of(len(EMULATED), list(EMULATED)))
def test_by_kernels_in_the_emulator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    monkeypatch.setenv(env.BACKEND.name, "emulator")
    arch, split = EMULATED[name]
    with emulate.device(arch, num_sms=3, schedule="fuzz") as device:
        check(split)
    # Of the backward: one before, one for each tile, one after.
    assert len(device.reports) == len(split.tiles) + 1 + len(split.tiles) + 1


def test_what_kernels_do_not_add_up_has_a_reason() -> None:
    q, k = (torch.randn(1, S, 2, 16).bfloat16() for S in (300, 200))
    saved = Saved(q, None, q, torch.zeros(1, 2, 300))
    with gpu(SM90A):
        gradient = QueryGradient(q, saved)
        assert gradient.add(range(37, 300), k, k, None, CallOptions(0.25)) is None
        assert gradient.finished() is None
        assert gradient.why_not(range(37, 300), k, k, None, CallOptions(0.25)) == [
            "the call's rows are 37 to 300, and the kernels' blocks have 128 rows"
        ]
