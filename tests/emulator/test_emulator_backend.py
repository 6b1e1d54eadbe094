"""FLASH4_BACKEND=emulator.

Attention on CPU tensors by our compiled kernels, with gradients, for every architecture: a call takes the
same path as on such a GPU, except for the GPU itself.
"""

import copy
from itertools import product
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

import flash4_torch
from everything import examples, one_of
from flash4_torch import env, testing
from flash4_torch.backends.compiled import TARGETS
from flash4_torch.errors import BackendError

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from flash4_torch.testing import emulate

ARCHS = tuple(TARGETS)
EACH = ("sm_90a", "sm_100a")
"""The architectures whose kernels differ; others run theirs, or `BY_MMA_SYNC`."""
FAMILIES = (*EACH, "sm_80", "sm_86")
"""The same, and the kernels by mma.sync with much SMEM and with little."""
HEADS = ((1, 1), (4, 2), (3, 1))


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    monkeypatch.setenv(env.BACKEND.name, "emulator")


def tensors(dtype, B, Sq, Sk, Hq, Hk, D, Dv):
    shapes = ((B, Sq, Hq, D), (B, Sk, Hk, D), (B, Sk, Hk, Dv))
    return [torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes]


def gradients(results, inputs):
    """Gradients of a sum of all results with weights that differ everywhere."""
    total = sum((r.double() * torch.linspace(-1, 1, r.numel()).view(r.shape)).sum() for r in results)
    return torch.autograd.grad(total, inputs)


# Head sizes and flags are compile-time constants: there are few of them, so that few kernels are compiled.
@pytest.mark.parametrize(
    ("arch", "dtype", "D", "Dv", "flags"),
    one_of(
        8,
        [
            (arch, *call)
            for arch in FAMILIES
            for call in (
                (torch.bfloat16, 32, 32, {}),
                (torch.float16, 32, 16, {"causal": True}),
                (torch.float32, 20, 20, {"window": (9, 4), "softcap": 5.0}),
            )
        ],
    ),
)
@settings(max_examples=examples(1, 4))
@given(B=st.integers(1, 2), Sq=st.integers(1, 80), Sk=st.integers(1, 80), heads=st.sampled_from(HEADS))
def test_matches_the_exact_result(arch, dtype, D, Dv, flags, B, Sq, Sk, heads):
    inputs = tensors(dtype, B, Sq, Sk, *heads, D, Dv)
    with emulate.device(arch) as device, testing.backends_used() as used, testing.poisoned_memory():
        out, lse = flash4_torch.attention(*inputs, return_lse=True, **flags)
        ours = gradients((out, torch.where(lse.isinf(), 0, lse)), inputs)
    assert {name for _, name in used} == {"emulator"}
    # One forward kernel and the backward's: three of them, or two for scope "kv_head".
    assert len(device.reports) == (3 if dtype != torch.float32 and arch == "sm_90a" else 4)
    assert sum("preprocess_kernel" in report.kernel for report in device.reports) == 1

    exact, exact_lse = testing.reference(*inputs, **flags)
    peer, peer_lse = testing.reference(*inputs, dtype=dtype, **flags)
    testing.assert_close_as_peer(out, exact, peer)
    testing.assert_close_as_peer(lse, exact_lse, peer_lse)
    wanted = gradients((exact, torch.where(exact_lse.isinf(), 0, exact_lse)), inputs)
    peers = gradients((peer, torch.where(peer_lse.isinf(), 0, peer_lse)), inputs)
    for own, want, other in zip(ours, wanted, peers, strict=True):
        testing.assert_close_as_peer(own, want, other)


@pytest.mark.parametrize(("arch", "p"), one_of(18, [(arch, p) for arch in ARCHS for p in (0.0, 0.3)]))
def test_a_module_in_float32_returns_the_weights_by_kernels(arch, p):
    torch.manual_seed(3)
    stock = torch.nn.MultiheadAttention(48, 3, dropout=p, batch_first=True)
    model = torch.nn.Sequential(copy.deepcopy(stock))
    flash4_torch.replace_attention(model)
    (ours,) = model
    x, hidden = torch.randn(2, 37, 48, requires_grad=True), torch.arange(37) >= torch.tensor([[37], [20]])
    with emulate.device(arch), testing.backends_used() as used:
        torch.manual_seed(7)
        out, weights = ours(x, x, x, key_padding_mask=hidden, average_attn_weights=False)
        found = gradients((out, weights), [x, *ours.parameters()])
    assert {name for _, name in used} == {"emulator"}
    assert not weights[1, :, :, 20:].any()
    if p:
        # What is kept of a row is 1 / (1 - p) of what it was.
        kept = weights != 0
        with emulate.device(arch):
            undropped = ours.eval()(x, x, x, key_padding_mask=hidden, average_attn_weights=False)[1]
        torch.testing.assert_close(weights, kept * undropped / (1 - p))
        assert 0.6 < kept[0].double().mean() < 0.8
        return
    exact = stock.double()
    x64 = x.detach().double().requires_grad_()
    wanted = exact(x64, x64, x64, key_padding_mask=hidden, average_attn_weights=False)
    torch.testing.assert_close(weights.double(), wanted[1], rtol=1e-4, atol=1e-6)
    for own, want in zip(found, gradients(wanted, [x64, *exact.parameters()]), strict=True):
        torch.testing.assert_close(own.double(), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("schedule", ["late", "fuzz"])
def test_schedules_give_the_same_bits(schedule):
    """Kernels that add nothing up in any order give the same bits under all schedules."""
    inputs = tensors(torch.float32, 2, 70, 90, 2, 1, 32, 32)
    results = []
    for options in ({}, {"schedule": schedule, "seed": 5}):
        with emulate.device("sm_100a", **options):
            out = flash4_torch.attention(*inputs, causal=True)
            results.append([out, *gradients([out], inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_architecture_comes_from_the_environment(monkeypatch):
    for arch in one_of(4, ARCHS):
        monkeypatch.setenv(env.ARCH.name, arch)
        with emulate.device() as device:
            flash4_torch.attention(*tensors(torch.bfloat16, 1, 3, 3, 1, 1, 32, 32))
        assert device.arch == arch


@pytest.mark.parametrize(("dtype", "launches"), one_of(2, [(torch.bfloat16, 1), (torch.float32, 1)]))
@pytest.mark.parametrize("arch", one_of(2, EACH))
def test_varlen_is_a_loop(arch, dtype, launches):
    """One launch serves all sequences."""
    q, k, v = (t[0].detach() for t in tensors(dtype, 1, 60, 60, 2, 2, 32, 32))
    ends = torch.tensor([0, 17, 17, 60], dtype=torch.int32)
    with emulate.device(arch) as device:
        out = flash4_torch.attention_varlen(
            q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=43, max_seqlen_k=43, causal=True
        )
        assert len(device.reports) == launches
        unsaid = flash4_torch.attention_varlen(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True)
        assert len(device.reports) == 2 * launches and torch.equal(unsaid, out)
        for start, stop in ((0, 17), (17, 60)):
            alone = flash4_torch.attention(*(t[None, start:stop] for t in (q, k, v)), causal=True)
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
    ("arch", "call", "word"),
    [
        ("sm_100a", {"dtype": torch.float64}, "float64"),
        ("sm_100a", {"D": 520, "Dv": 520}, "520"),
        ("sm_100a", {"dtype": torch.float32, "D": 264}, "264"),
        ("sm_90a", {"dtype": torch.float64}, "float64"),
        ("sm_90a", {"D": 520}, "520"),
        ("sm_90a", {"attn_mask": torch.ones(5, 5, dtype=torch.float64)}, "attn_mask"),
        ("sm_86", {"D": 520}, "520"),
        ("sm_86", {"dtype": torch.float32, "D": 200}, "192"),
    ],
)
def test_what_it_does_not_serve_is_named(monkeypatch, arch, call, word):
    monkeypatch.setenv(env.ARCH.name, arch)
    sizes = {"B": 1, "Sq": 5, "Sk": 5, "Hq": 1, "Hk": 1, "D": 32, "Dv": 32, "dtype": torch.bfloat16}
    inputs = tensors(**{name: call.pop(name, value) for name, value in sizes.items()})
    with pytest.raises(BackendError, match=word):
        flash4_torch.attention(*inputs, **call)


@pytest.mark.parametrize(("arch", "D"), one_of(3, [("sm_90a", 256), ("sm_80", 64), ("sm_120a", 96)]))
def test_torchs_switch_decides_on_tf32(arch: str, D: int) -> None:
    """It counts when a call is made, on the fast path, too."""
    q, k, v = (x.detach() for x in tensors(torch.float32, 1, 40, 40, 1, 1, D, D))
    exact, found = testing.reference(q, k, v)[0], {}
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        with emulate.device(arch) as device:
            for precision in ("ieee", "tf32", "ieee", "tf32"):
                matmul.fp32_precision = precision
                out = flash4_torch.attention(q, k, v)
                assert torch.equal(found.setdefault(precision, out), out)
            assert len(device.reports) == 4
    finally:
        matmul.fp32_precision = before
    errors = {precision: (out - exact).abs().max() for precision, out in found.items()}
    assert errors["ieee"] < 2e-6 < errors["tf32"] < 5e-3


# The arguments that a call can use, and how many kernels it launches.
CALLS: dict[str, tuple[dict[str, Any], int]] = {
    "causal": ({"causal": True}, 1),
    "window, softcap": ({"window": (40, 3), "softcap": 3.0}, 1),
    "negative scale": ({"scale": -0.2}, 1),
    "bool mask": ({"attn_mask": torch.arange(150) % 7 > 1}, 2),
    "float mask": ({"attn_mask": torch.linspace(-2, 2, 90 * 150).view(90, 150).sin().bfloat16()}, 1),
    "dropout": ({"causal": True, "dropout_p": 0.3}, 1),
}
# "causal" on Hopper, "float mask" on Blackwell, "negative scale" by mma.sync.
EACH_CALL = pytest.mark.parametrize(("arch", "call"), one_of(15, list(product(FAMILIES, CALLS))))
SIZES = {"B": 2, "Sq": 90, "Sk": 150, "Hq": 4, "Hk": 2, "D": 64, "Dv": 64}


def attention_of(arch, q, k, v, seed=0, **kwargs):
    """(out, lse) of that GPU's kernel; `seed` determines the state of the generator that dropout uses."""
    torch.manual_seed(seed)
    with emulate.device(arch, num_sms=3, schedule="late"), torch.no_grad():
        return flash4_torch.attention(q, k, v, return_lse=True, **kwargs)


BY_MMA_SYNC = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_120a", "sm_121a")
"""Architectures of one family of kernels, some with less shared memory than others."""


@pytest.mark.parametrize(
    ("arch", "call"),
    [
        *(("sm_90a", call) for call in one_of(6, list(CALLS))),
        *(("sm_100a", call) for call in one_of(6, ["float mask", *(c for c in CALLS if c != "float mask")])),
        *one_of(3 * len(CALLS) + 4, list(product(BY_MMA_SYNC, CALLS))),
    ],
)
def test_the_gpus_own_kernel_runs(arch, call):
    kwargs, launches = CALLS[call]
    inputs = [x.detach() for x in tensors(torch.bfloat16, **SIZES)]
    with (
        emulate.device(arch) as device,
        testing.backends_used() as used,
        testing.poisoned_memory(),
    ):
        assert flash4_torch.support(*inputs, **kwargs)["emulator"] == []
        rng_state = testing.peek_rng_state()
        out, lse = flash4_torch.attention(*inputs, return_lse=True, **kwargs)
    assert used == {("attention", "emulator"): 1}
    names = [report.kernel for report in device.reports]
    assert len(names) == launches and "forward_kernel_Maps" in names[-1]
    assert device.reports[-1].counters.mma > 0
    more = {"rng_state": rng_state} if "dropout_p" in kwargs else {}
    results = [testing.reference(*inputs, **kwargs, **more, dtype=t) for t in (torch.float64, torch.bfloat16)]
    for actual, exact, peer in zip((out, lse), *results, strict=True):
        testing.assert_close_as_peer(actual, exact, peer)


@pytest.mark.parametrize("arch", ARCHS)
def test_support_knows_the_architecture(monkeypatch, arch):
    monkeypatch.setenv(env.ARCH.name, arch)
    inputs = [x.detach() for x in tensors(torch.bfloat16, **{**SIZES, "D": 256})]
    assert flash4_torch.support(*inputs, dropout_p=0.1)["emulator"] == []
    reasons = flash4_torch.support(*(x.double() for x in inputs), dropout_p=0.1)["emulator"]
    assert len(reasons) == 1
    assert reasons[0].endswith(f"(the kernels for {arch})") and "float64" in reasons[0]


@EACH_CALL
@settings(max_examples=2)
@given(seed=st.integers(0, 99))
def test_linear_in_v(arch, call, seed):
    kwargs, _ = CALLS[call]
    q, k, v = (x.detach() for x in tensors(torch.bfloat16, **SIZES))
    other = torch.randn(v.shape).bfloat16()
    out, lse = attention_of(arch, q, k, v, seed, **kwargs)
    # Scaling by two or one half is exact.
    for factor in (2.0, -0.5):
        scaled, same_lse = attention_of(arch, q, k, factor * v, seed, **kwargs)
        assert torch.equal(scaled, factor * out) and torch.equal(lse, same_lse)
    added, _ = attention_of(arch, q, k, v + other, seed, **kwargs)
    parts = out.float() + attention_of(arch, q, k, other, seed, **kwargs)[0].float()
    torch.testing.assert_close(added.float(), parts, rtol=0.03, atol=0.03)


@EACH_CALL
def test_gqa_is_repeated_keys(arch, call):
    kwargs, _ = CALLS[call]
    q, k, v = (x.detach() for x in tensors(torch.bfloat16, **SIZES))
    repeated = (x.repeat_interleave(2, dim=2) for x in (k, v))
    ours, theirs = attention_of(arch, q, k, v, **kwargs), attention_of(arch, q, *repeated, **kwargs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("arch", "dtype"),
    one_of(3, [("sm_90a", torch.bfloat16), ("sm_86", torch.float32), ("sm_80", torch.float16)]),
)
@settings(max_examples=examples(3, 9))
@given(shape=st.tuples(*(st.sampled_from([1, n]) for n in (2, 4, 33, 70))))
@example(shape=(1, 1, 33, 1))
@example(shape=(1, 1, 1, 70))
def test_a_mask_may_repeat_any_dimension(arch, dtype, shape):
    """Gradients, too, are those of the mask with all of its numbers."""
    torch.manual_seed(0)
    q, k, v = tensors(dtype, 2, 33, 70, 4, 4, 64, 64)
    mask = torch.randn(*shape).to(dtype)
    found = []
    for attn_mask in (mask, mask.expand(2, 4, 33, 70).contiguous()):
        with emulate.device(arch, num_sms=3, schedule="late"), testing.poisoned_memory():
            out, lse = flash4_torch.attention(q, k, v, attn_mask=attn_mask, return_lse=True)
            found.append((out, lse, *gradients((out, lse), (q, k, v))))
    eps = torch.finfo(dtype).eps
    for repeated, full in zip(*found, strict=True):
        assert (repeated - full).abs().max() <= 4 * eps * full.abs().max()


@pytest.mark.parametrize("arch", one_of(4, FAMILIES[::-1]))
@settings(max_examples=examples(1, 3))
@given(shift=st.sampled_from([-3.0, 0.5, 7.0]), causal=st.booleans())
def test_a_shift_of_all_scores_moves_only_lse(arch, shift, causal):
    q, k, v = (x.detach() for x in tensors(torch.bfloat16, **SIZES))
    mask = CALLS["bool mask"][0]["attn_mask"]
    bias = torch.where(mask, shift, -torch.inf)
    out, lse = attention_of(arch, q, k, v, causal=causal, attn_mask=mask)
    shifted, shifted_lse = attention_of(arch, q, k, v, causal=causal, attn_mask=bias)
    torch.testing.assert_close(out, shifted, rtol=0.01, atol=0.01)
    torch.testing.assert_close(lse + shift, shifted_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", one_of(4, ("sm_100a", "sm_90a", "sm_80", "sm_86")))
@settings(max_examples=examples(2, 4))
@given(
    q_lengths=st.lists(st.integers(0, 140), min_size=1, max_size=4),
    k_lengths=st.lists(st.integers(0, 140), min_size=4, max_size=4),
    p=st.sampled_from([0.0, 0.4]),
)
def test_one_launch_serves_all_sequences(arch, q_lengths, k_lengths, p):
    k_lengths = k_lengths[: len(q_lengths)]
    q, k, v = (
        torch.randn(sum(lengths), heads, 64).bfloat16()
        for lengths, heads in ((q_lengths, 4), (k_lengths, 2), (k_lengths, 2))
    )
    ends = [torch.tensor([0, *torch.tensor(n).cumsum(0)]) for n in (q_lengths, k_lengths)]
    rng_state = testing.peek_rng_state()
    with emulate.device(arch, num_sms=2) as device, testing.poisoned_memory():
        out, lse = flash4_torch.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=ends[0],
            cu_seqlens_k=ends[1],
            max_seqlen_q=max(q_lengths),
            max_seqlen_k=max(k_lengths),
            causal=True,
            dropout_p=p,
            return_lse=True,
        )
    assert len(device.reports) == (len(q) > 0 and len(k) > 0)
    parts = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
    first = 0
    for b, sequence in enumerate(parts):
        # Sequence b replays dropout as batch entry b.
        batch = [x[None].expand(b + 1, *x.shape) for x in sequence]
        more = {"causal": True, "dropout_p": p, "rng_state": rng_state}
        exact, peer = (testing.reference(*batch, **more, dtype=t) for t in (torch.float64, q.dtype))
        rows = slice(first, first := first + len(sequence[0]))
        if len(sequence[0]):
            testing.assert_close_as_peer(out[rows], exact[0][b], peer[0][b])
            testing.assert_close_as_peer(lse[:, rows], exact[1][b], peer[1][b])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_log_says_whose_kernels_serve(monkeypatch, capsys, dtype):
    monkeypatch.setenv(env.LOG.name, "backend")
    monkeypatch.setenv(env.ARCH.name, "sm_100a")
    # No other test has these sizes: a problem is logged once.
    flash4_torch.attention(*(x.detach() for x in tensors(dtype, 1, 3, 19, 1, 1, 32, 32)))
    call = f"forward B=1 Sq=3 Sk=19 Hq=1 Hk=1 D=32 Dv=32 {dtype} on cpu"
    assert capsys.readouterr().err.endswith(f" serves attention {call} by the kernels for sm_100a\n")


@pytest.mark.parametrize(
    ("arch", "D", "words"),
    one_of(
        2,
        [
            ("sm_90a", 64, ("Sm90Forward(", "Sm90Backward(", "Registers(consumer=")),
            ("sm_100a", 128, ("Sm100Forward(", "Sm100Backward(", "Registers(compute=")),
        ],
    ),
)
def test_the_log_tells_the_row_and_the_plan(monkeypatch, capsys, arch, D, words):
    monkeypatch.setenv(env.LOG.name, "config")
    monkeypatch.setenv(env.ARCH.name, arch)
    q, k, v = tensors(torch.bfloat16, 1, 3, 21, 1, 1, D, D)
    flash4_torch.attention(q, k, v).sum().backward()
    printed = capsys.readouterr().err
    assert all(word in printed for word in (*words, f"of {arch}: ", "bytes of shared memory", "threads"))
    assert printed.count("    launch: heads_per_section=") == 2


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
