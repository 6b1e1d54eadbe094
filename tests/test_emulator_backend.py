"""FLASH4_BACKEND=emulator.

Attention on CPU tensors by our compiled kernels, with gradients, for either architecture.
"""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import flash4_torch
from flash4_torch import env, testing
from flash4_torch.errors import BackendError

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from flash4_torch.testing import emulate

ARCHS = ("sm_90a", "sm_100a")
HEADS = ((1, 1), (4, 2), (3, 1))


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    monkeypatch.setenv(env.BACKEND.name, "emulator")


def tensors(dtype, B, Sq, Sk, Hq, Hk, D, Dv):
    shapes = ((B, Sq, Hq, D), (B, Sk, Hk, D), (B, Sk, Hk, Dv))
    return [torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes]


def gradients(results, inputs):
    """Of a sum of all results with weights that differ everywhere."""
    total = sum((r.double() * torch.linspace(-1, 1, r.numel()).view(r.shape)).sum() for r in results)
    return torch.autograd.grad(total, inputs)


# Head sizes and flags are compiled in: few of them, so that few kernels are compiled.
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("dtype", "D", "Dv", "flags"),
    [
        (torch.bfloat16, 32, 32, {}),
        (torch.float16, 32, 16, {"causal": True}),
        (torch.float32, 20, 20, {"window": (9, 4), "softcap": 5.0}),
    ],
    ids=("bf16", "fp16-causal", "fp32-window-softcap"),
)
@settings(max_examples=4)
@given(B=st.integers(1, 2), Sq=st.integers(1, 80), Sk=st.integers(1, 80), heads=st.sampled_from(HEADS))
def test_matches_the_exact_result(arch, dtype, D, Dv, flags, B, Sq, Sk, heads):
    inputs = tensors(dtype, B, Sq, Sk, *heads, D, Dv)
    with emulate.device(arch) as device, testing.backends_used() as used, testing.poisoned_memory():
        out, lse = flash4_torch.attention(*inputs, return_lse=True, **flags)
        ours = gradients((out, torch.where(lse.isinf(), 0, lse)), inputs)
    assert {name for _, name in used} == {"emulator"}
    assert len(device.reports) == 3  # the forward's kernel, and two of the backward

    exact, exact_lse = testing.reference(*inputs, **flags)
    peer, peer_lse = testing.reference(*inputs, dtype=dtype, **flags)
    testing.assert_close_as_peer(out, exact, peer)
    testing.assert_close_as_peer(lse, exact_lse, peer_lse)
    wanted = gradients((exact, torch.where(exact_lse.isinf(), 0, exact_lse)), inputs)
    peers = gradients((peer, torch.where(peer_lse.isinf(), 0, peer_lse)), inputs)
    for own, want, other in zip(ours, wanted, peers, strict=True):
        testing.assert_close_as_peer(own, want, other)


@pytest.mark.parametrize("schedule", ["late", "fuzz"])
def test_schedules_give_the_same_bits(schedule):
    inputs = tensors(torch.bfloat16, 2, 70, 90, 2, 1, 32, 32)
    results = []
    for options in ({}, {"schedule": schedule, "seed": 5}):
        with emulate.device("sm_100a", **options):
            out = flash4_torch.attention(*inputs, causal=True)
            results.append([out, *gradients([out], inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_architecture_comes_from_the_environment(monkeypatch):
    for arch in ARCHS:
        monkeypatch.setenv(env.ARCH.name, arch)
        with emulate.device() as device:
            flash4_torch.attention(*tensors(torch.bfloat16, 1, 3, 3, 1, 1, 32, 32))
        assert device.arch == arch


def test_varlen_is_a_loop():
    q, k, v = (t[0].detach() for t in tensors(torch.bfloat16, 1, 60, 60, 2, 2, 32, 32))
    ends = torch.tensor([0, 17, 17, 60], dtype=torch.int32)
    out = flash4_torch.attention_varlen(
        q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=43, max_seqlen_k=43
    )
    for start, stop in ((0, 17), (17, 60)):
        alone = flash4_torch.attention(*(t[None, start:stop] for t in (q, k, v)))
        assert torch.equal(out[start:stop], alone[0])


@pytest.mark.parametrize(("B", "Sq", "Sk"), [(0, 4, 4), (1, 0, 4), (1, 4, 0)])
def test_empty_problems(B, Sq, Sk):
    inputs = tensors(torch.bfloat16, B, Sq, Sk, 2, 2, 32, 32)
    out, lse = flash4_torch.attention(*inputs, return_lse=True)
    assert out.shape == (B, Sq, 2, 32) and not out.any() and (lse == -torch.inf).all()
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), inputs))


def test_under_compile():
    inputs = tensors(torch.bfloat16, 1, 20, 20, 2, 2, 32, 32)
    compiled = torch.compile(flash4_torch.attention, backend="aot_eager", fullgraph=True)
    eager = flash4_torch.attention(*inputs)
    assert torch.equal(compiled(*inputs), eager)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"D": 136, "Dv": 136}, "136"),
        ({"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, "attn_mask"),
        ({"dropout_p": 0.5}, "dropout"),
    ],
)
def test_what_it_does_not_serve_is_named(call, word):
    sizes = {"B": 1, "Sq": 5, "Sk": 5, "Hq": 1, "Hk": 1, "D": 32, "Dv": 32, "dtype": torch.bfloat16}
    inputs = tensors(**{name: call.pop(name, value) for name, value in sizes.items()})
    with pytest.raises(BackendError, match=word):
        flash4_torch.attention(*inputs, **call)


def test_serves_nobody_who_has_not_asked(monkeypatch):
    monkeypatch.delenv(env.BACKEND.name)
    inputs = tensors(torch.bfloat16, 1, 5, 5, 1, 1, 32, 32)
    (reason,) = flash4_torch.support(*inputs)["emulator"]
    assert "FLASH4_BACKEND=emulator" in reason


def test_memory_of_others_is_out_of_bounds():
    """Kernels may touch the tensors of their call and nothing else."""
    a, b = torch.zeros(32), torch.zeros(32)
    with emulate.device("sm_100a") as device, device.touching(a):
        assert device.memory == [(a.data_ptr(), 128)]
        with device.touching(a, b.expand(4, 32)):
            assert device.memory[1] == (b.data_ptr(), 128)
    assert not device.memory
