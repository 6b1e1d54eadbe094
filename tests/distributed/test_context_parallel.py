"""One sequence over many ranks gives what one process does: results, gradients, and dropout's very mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from context_calls import MESHES, WORLD, Call, results
from everything import EVERYTHING, examples, one_of
from flash4_torch.testing import assert_close_as_peer, peek_rng_state, reference
from ranks import ranks


def expected(call: Call, dtype: torch.dtype) -> list[Tensor]:
    """The same of one process, by definition, in a dtype."""
    q, k, v, sinks, dout, dlse = (x.to(dtype) for x in call.tensors())
    inputs = [x.requires_grad_() for x in (q, k, v, *([sinks] if call.sinks else []))]
    options = dict(call.options, sinks=sinks if call.sinks else None)
    if options.get("dropout_p"):
        torch.manual_seed(call.seed)
        options["rng_state"] = peek_rng_state()
    cu_seqlens = call.cu_seqlens()
    if cu_seqlens is None:
        out, lse = reference(q, k, v, dtype=dtype, **options)
    else:
        out, lse = _packed(q, k, v, cu_seqlens, options, dtype)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    loss = (out * dout).sum() + ((finite * dlse).sum() if call.lse else 0.0)
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, inputs)]


def _packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, options: dict[str, Any], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Documents one by one; with dropout each is a batch entry of its own."""
    outs, lses = [], []
    state = options.pop("rng_state", None)
    for b, (start, stop) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        if state is not None:
            Hq = q.shape[1]
            options["rng_state"] = torch.cat([state, torch.tensor([0, 0, b * Hq, Hq, Hq])])
        q_, k_, v_ = (x[None, start:stop] for x in (q, k, v))
        out, lse = reference(q_, k_, v_, dtype=dtype, **options)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, -1)


def check(call: Call, how: str = "") -> None:
    found = [x for x in ranks(WORLD).run(results, call, how) if x is not None]
    exact, peer = expected(call, torch.float64), expected(call, call.dtype)
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    # Gradients of scores are differences: one that cancels has the rounding of dout v^T, also if exact is 0.
    _, _, v, _, dout, _ = call.tensors()
    kept = 1.0 - call.options.get("dropout_p", 0.0)
    noise = torch.finfo(torch.float32).eps * (dout.norm(dim=-1).max() * v.norm(dim=-1).max()).item() / kept
    # Every rank has the same whole tensors, bit for bit.
    for others in found[1:]:
        for mine, other in zip(found[0], others, strict=True):
            assert torch.equal(mine, other)
    for name, mine, right, near in zip(names, found[0], exact, peer, strict=False):
        # lse and its gradient are float32 for 16-bit inputs; sinks' gradient is a sum over ranks.
        cancels = noise if name in ("dq", "dk") and call.dtype != torch.float64 else 0.0
        assert_close_as_peer(mine, right, near.to(mine.dtype), what=f"{name} of {call}", noise=cancels)


@st.composite
def calls(draw: st.DrawFn, meshes: tuple[str, ...] = tuple(MESHES)) -> Call:
    mesh = draw(st.sampled_from(meshes))
    packed = draw(st.booleans())
    Hk, group = draw(st.sampled_from([(1, 4), (2, 2), (4, 1), (4, 2), (3, 4)]))
    if "ulysses" not in mesh:
        Hk, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3)]))
    left = draw(st.sampled_from([None, None, 0, 3, 20]))
    causal = draw(st.booleans())
    right = draw(st.sampled_from([None, None, 1, 9]))
    D, Dv = draw(st.sampled_from([(8, 8), (4, 12), (16, 16)]))
    dropout_p = draw(st.sampled_from([0.0, 0.0, 0.3]))
    return Call(
        mesh,
        draw(st.sampled_from(["documents", "documents", "zigzag", "contiguous"][0 if packed else 2 :])),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 7)),
        group,
        Hk,
        D,
        Dv,
        draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16])),
        {
            "causal": causal,
            "window": (left, right),
            "softcap": draw(st.sampled_from([0.0, 0.0, 2.0])),
            "scale": draw(st.sampled_from([None, 0.3])),
            "dropout_p": dropout_p,
        },
        tuple(draw(st.lists(st.integers(0, 1000), min_size=1, max_size=5))) if packed else (),
        draw(st.booleans()),
        draw(st.booleans()),
        0 if packed or dropout_p else draw(st.sampled_from([0, 0, 3])),
        draw(st.integers(0, 99)),
    )


DROPOUT = {"causal": True, "dropout_p": 0.4}
PLAIN = Call("ring 2", "zigzag", 1, 4, 2, 2, 8, 8, torch.float32, {"causal": True})


@settings(max_examples=examples(20, 400))
@given(call=calls())
# Dropout's positions: in documents that begin and end anywhere, and of heads in batch entries.
@example(PLAIN._replace(options=DROPOUT, ends=(100, 100, 420, 900), chunk=7))
@example(PLAIN._replace(options=DROPOUT, ends=(300, 800), chunk=5, layout="contiguous"))
@example(PLAIN._replace(options=DROPOUT, mesh="ring 2 x ulysses 2", B=2, chunk=5))
@example(PLAIN._replace(options=DROPOUT | {"causal": False}, mesh="ulysses 4", B=2, ends=()))
# Rows that see nothing.
@example(PLAIN._replace(options={"window": (None, -5)}, sinks=True))
@example(PLAIN._replace(options={"window": (-3, 9)}, mesh="ring 3"))
# The same with more parts than wait to be merged.
@example(PLAIN._replace(options={"window": (None, -5), "dropout_p": 0.4}, mesh="ring 4", chunk=8))
# Documents divided and whole: joined in one call, apart in a window, and with positions for dropout.
@example(PLAIN._replace(layout="documents", mesh="ring 4", ends=(250, 800, 850, 870), chunk=7))
@example(PLAIN._replace(layout="documents", mesh="ring 3", ends=(250, 800, 900), chunk=7, options={}))
@example(PLAIN._replace(layout="documents", ends=(500, 900), chunk=7, options={"window": (5, 0)}))
@example(PLAIN._replace(layout="documents", mesh="ring 2 x ulysses 2", ends=(500, 900), options=DROPOUT))
def test_ranks_give_what_one_process_does(call: Call) -> None:
    check(call)


@pytest.mark.parametrize("how", ["", "by kernels"] if EVERYTHING else [""])
def test_chunks_of_whole_blocks(how: str) -> None:
    """The emulator's kernels merge parts, and sum up dQ over hops."""
    call = PLAIN._replace(chunk=128, Hk=1, D=64, Dv=64, dtype=torch.bfloat16, lse=False)
    check(call._replace(options={}), how)


@pytest.mark.parametrize("kind", ["compiled", "checkpointed"])
@pytest.mark.parametrize("mesh", one_of(3, ["ring 2 x ulysses 2", "ring 4", "ulysses 4"]))
def test_compiled_and_checkpointed_give_the_same(mesh: str, kind: str) -> None:
    """One graph holds the whole call; the second forward of a checkpoint has the first's dropout mask."""
    call = PLAIN._replace(mesh=mesh, options=DROPOUT, sinks=True, B=2)
    for eager, other in zip(*(ranks(WORLD).run(results, call, how) for how in ("", kind)), strict=True):
        for mine, theirs in zip(eager, other, strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("packed", [False, True])
def test_deterministic_and_repeatable(packed: bool) -> None:
    call = PLAIN._replace(mesh="ring 4", dtype=torch.bfloat16, chunk=16, ends=(333, 700) if packed else ())
    call = call._replace(options={"causal": True, "deterministic": True})
    first, second = (ranks(WORLD).run(results, call) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))


def flops_of(call: Call) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        results(call)
    return counter.get_total_flops()


@pytest.mark.parametrize("packed", [False, True])
def test_ranks_count_the_flops_of_one_process(packed: bool) -> None:
    call = PLAIN._replace(mesh="ring 4", dtype=torch.bfloat16, ends=(250, 500) if packed else ())
    S = call.length(call.chunk)
    pairs = S * S if not packed else (S // 4) ** 2 * 2 + (S // 2) ** 2
    # Two matmuls forward and five backward.
    assert sum(ranks(WORLD).run(flops_of, call)) == 2 * call.heads * pairs * 7 * call.D
