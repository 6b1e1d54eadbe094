"""Gradients by every GPU's kernels in the emulator; a call takes the same path as on that GPU."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash4_torch
from everything import examples, one_of
from flash4_torch import env, testing
from flash4_torch.backends.compiled import masks
from flash4_torch.configs import sm90_backward

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from flash4_torch.testing import emulate


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.BACKEND.name, "emulator")


SIZES = {"B": 2, "Sq": 90, "Sk": 150, "Hq": 4, "Hk": 2, "D": 64, "Dv": 64}
BIAS = torch.linspace(-2, 2, 90 * 150).view(90, 150).sin()
ARCHS = ("sm_90a", "sm_100a", "sm_80", "sm_86")
"""Hopper, Blackwell, and the kernels by mma.sync with much SMEM and with little."""
# CI tries a law on one architecture, and the laws take turns.
BLACKWELL_FIRST = pytest.mark.parametrize("arch", one_of(4, ("sm_100a", "sm_90a", "sm_80", "sm_86")))
SMALL_AMPERE_FIRST = pytest.mark.parametrize("arch", one_of(4, ARCHS[::-1]))
# The arguments that a call can use, and how many kernels its backward launches.
CALLS: dict[str, tuple[dict[str, Any], int]] = {
    "full": ({}, 3),
    "causal": ({"causal": True}, 3),
    "window": ({"window": (40, 3)}, 3),
    "wide heads": ({"D": 128, "Dv": 128, "causal": True}, 3),
    "widest heads": ({"D": 256, "Dv": 256, "B": 1, "Hq": 2, "Hk": 1}, 3),
    "small heads, keys after the diagonal": ({"D": 40, "Dv": 13, "window": (-20, 90)}, 3),
    "float16": ({"dtype": torch.float16}, 3),
    "deterministic": ({"deterministic": True}, 3),
    "softcap, keys before the diagonal": ({"window": (70, -9), "softcap": 3.0}, 3),
    "negative scale": ({"scale": -0.2}, 3),
    "bool mask": ({"attn_mask": torch.arange(150)[None] % 7 > 1}, 4),
    "bool mask of rows": ({"attn_mask": BIAS > 0.3, "causal": True}, 4),
    "float mask": ({"attn_mask": BIAS.bfloat16()}, 3),
    "gradient of a mask": ({"attn_mask": BIAS.clone().requires_grad_()}, 3),
    "gradient of a mask of keys": ({"attn_mask": BIAS[:1].clone().requires_grad_()}, 3),
    "dropout": ({"causal": True, "dropout_p": 0.3}, 3),
}


def drawn(**call: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v and the other arguments."""
    sizes = {name: call.pop(name, n) for name, n in SIZES.items()}
    dtype = call.pop("dtype", torch.bfloat16)
    B, Sq, Sk, Hq, Hk, D, Dv = sizes.values()
    shapes = ((B, Sq, Hq, D), (B, Sk, Hk, D), (B, Sk, Hk, Dv))
    inputs = [torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes]
    return inputs, {"deterministic": False, **call}


def gradients(results: tuple[Tensor, ...], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of a sum of all results with weights that differ everywhere."""
    finite = [torch.where(r.isinf(), 0, r).double() for r in results]
    total = sum((r * torch.linspace(-1, 1, r.numel()).view(r.shape)).sum() for r in finite)
    return torch.autograd.grad(total, inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arch", "name"),
    # "full" on Hopper, "gradient of a mask" on Blackwell, "bool mask" by mma.sync.
    one_of(29, list(product(ARCHS, CALLS))),
)
def test_gradients(arch: str, name: str) -> None:
    call, launches = CALLS[name]
    torch.manual_seed(0)
    inputs, kwargs = drawn(**call)
    mask = kwargs.get("attn_mask")
    wanted = [*inputs, mask] if mask is not None and mask.requires_grad else inputs
    with emulate.device(arch, num_sms=3) as device, testing.poisoned_memory():
        state = testing.peek_rng_state()
        results = flash4_torch.attention(*inputs, return_lse=True, **kwargs)
        before = len(device.reports)
        ours = gradients(results, wanted)
    names = [report.kernel for report in device.reports[before:]]
    assert len(names) == launches and all(
        any(n in name for name in names) for n in ("preprocess", "backward")
    )
    del kwargs["deterministic"]
    more = {"rng_state": state} if "dropout_p" in kwargs else {}
    exact, peer = (
        gradients(testing.reference(*inputs, **kwargs, **more, dtype=t), wanted)
        for t in (torch.float64, inputs[0].dtype)
    )
    # The rounding error of the stored out enters the sums of a mask's gradient.
    stored = torch.finfo(inputs[0].dtype).eps * results[0].double().norm().item()
    for name, a, e, p in zip(("dq", "dk", "dv", "dmask"), ours, exact, peer, strict=False):
        testing.assert_close_as_peer(a, e.double(), p, what=name, noise=stored if name == "dmask" else 0.0)


@pytest.mark.parametrize(
    ("arch", "schedule", "deterministic"),
    # "late" by mma.sync, "fuzz" on Blackwell with sums in order.
    one_of(
        11,
        [
            (arch, schedule, deterministic)
            for schedule in ("late", "fuzz")
            for arch in ("sm_80", "sm_100a", "sm_90a", "sm_86")
            for deterministic in (False, True)
        ],
    ),
)
def test_schedules(arch: str, schedule: str, deterministic: bool) -> None:
    """Gradients are the same except for the order of sums; deterministic ones are the same bit for bit."""
    torch.manual_seed(0)
    inputs, kwargs = drawn(B=1, Hq=2, Hk=1, causal=True, deterministic=deterministic)
    found = []
    for options in ({"num_sms": 1}, {"num_sms": 4, "schedule": schedule, "seed": 5}):
        # The forward's tiles, and so its rounding, depend on the number of SMs.
        with emulate.device(arch, num_sms=1):
            results = (flash4_torch.attention(*inputs, **kwargs),)
        with emulate.device(arch, **options):
            found.append(gradients(results, inputs))
    for name, a, b in zip("qkv", *found, strict=True):
        if deterministic or name != "q":
            assert torch.equal(a, b), name
        else:
            torch.testing.assert_close(a, b, rtol=0.01, atol=1e-3)


SMALL: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 3.0, "dtype": torch.float16, "Sk": 77},
    "sinks, rows that see nothing": {"window": (None, -9), "sinks": torch.tensor([0.5, -1.0])},
    "dropout, two tiles": {"causal": True, "dropout_p": 0.3, "Sk": 201},
    "gradient of lse": {"causal": True, "return_lse": True},
    "wide heads": {"D": 128, "Dv": 128, "causal": True, "Sk": 120},
    "rows of a mask": {"attn_mask": BIAS[:, :128] > -0.9, "Sk": 128},
}
"""Calls of one CTA for each KV head. With a gradient of lse, or a mask, they have a preprocess kernel."""


@pytest.mark.parametrize("name", one_of(6, list(SMALL)))
def test_small_gradients_are_one_launch_with_the_bits_of_two(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, launches = [], []
    for rows in (0, 512):
        monkeypatch.setattr(sm90_backward, "_PREPROCESS_ROWS", rows)
        torch.manual_seed(0)
        inputs, kwargs = drawn(**{"B": 1, "Hq": 2, "Hk": 1, "Sk": 128, **SMALL[name]})
        if "sinks" in kwargs:
            kwargs["sinks"] = kwargs["sinks"].clone().requires_grad_()
            inputs.append(kwargs["sinks"])
        k = inputs[1]
        options = {"num_sms": k.shape[0] * k.shape[2], "schedule": ("late", "eager")[rows > 0]}
        with emulate.device("sm_90a", **options) as device, testing.poisoned_memory():
            results = flash4_torch.attention(*inputs[:3], **kwargs)
            before = len(device.reports)
            found.append(gradients(results if isinstance(results, tuple) else (results,), inputs))
        launches.append([report.kernel for report in device.reports[before:]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    two, one = (sum("preprocess" in launch for launch in each) for each in launches)
    assert two == 1 and one == (name in ("gradient of lse", "rows of a mask"))
    assert len(launches[0]) - len(launches[1]) == two - one


@pytest.mark.parametrize(
    ("arch", "dtype", "head"),
    one_of(
        5,
        [
            (arch, dtype, head)
            for dtype, head in ((torch.bfloat16, 0), (torch.bool, 1), (torch.float32, 1))
            for arch in ("sm_100a", "sm_90a", "sm_80")
        ],
    ),
)
def test_a_mask_lies_either_way(
    arch: str, dtype: torch.dtype, head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that a kernel transposes gives the same bits as one whose queries are neighbours."""
    monkeypatch.setattr(masks, "_FEW", 0)
    torch.manual_seed(0)
    inputs, kwargs = drawn(B=1, Hq=2, Hk=1)
    numbers = BIAS - 0.01 * torch.arange(1 + head)[:, None, None]
    mask = numbers > -0.5 if dtype == torch.bool else numbers.to(dtype)
    found = []
    for attn_mask in (mask, mask.mT.contiguous().mT):
        with emulate.device(arch, num_sms=1) as device, testing.poisoned_memory():
            out = flash4_torch.attention(*inputs, attn_mask=attn_mask, **kwargs)
            found.append(gradients((out,), inputs))
        names = [report.kernel for report in device.reports]
        transposes = attn_mask.stride(-1) == 1 and (arch != "sm_80" or dtype == torch.bool)
        assert sum("list_kernel" in name for name in names) == transposes
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@BLACKWELL_FIRST
def test_linear_in_the_gradient_of_out(arch: str) -> None:
    """Scaling by two or one half is exact; with one SM the order of the sums is fixed."""
    torch.manual_seed(0)
    inputs, kwargs = drawn(B=1, Hq=2, Hk=1, window=(60, 20))
    with emulate.device(arch, num_sms=1):
        out = flash4_torch.attention(*inputs, **kwargs)
        dout = torch.randn(out.shape).bfloat16()
        once = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        for factor in (2.0, -0.5):
            scaled = torch.autograd.grad(out, inputs, factor * dout, retain_graph=True)
            assert all(torch.equal(a, factor * b) for a, b in zip(scaled, once, strict=True))


@SMALL_AMPERE_FIRST
def test_gqa_is_repeated_keys(arch: str) -> None:
    torch.manual_seed(0)
    (q, k, v), kwargs = drawn(B=1, causal=True)
    repeated = [x.detach().repeat_interleave(2, 2).requires_grad_() for x in (k, v)]
    with emulate.device(arch):
        ours = gradients((flash4_torch.attention(q, k, v, **kwargs),), [q, k, v])
        theirs = gradients((flash4_torch.attention(q, *repeated, **kwargs),), [q, *repeated])
    summed = [theirs[0], *(x.float().unflatten(2, (2, 2)).sum(3) for x in theirs[1:])]
    for a, b in zip(ours, summed, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0.02, atol=0.02)


@BLACKWELL_FIRST
@settings(max_examples=examples(2, 3))
@given(
    q_lengths=st.lists(st.integers(0, 140), min_size=1, max_size=4),
    k_lengths=st.lists(st.integers(0, 140), min_size=4, max_size=4),
    p=st.sampled_from([0.0, 0.4]),
    says=st.booleans(),
)
def test_packed_sequences_are_alone(
    arch: str, q_lengths: list[int], k_lengths: list[int], p: float, says: bool
) -> None:
    k_lengths = k_lengths[: len(q_lengths)]
    longest = {"max_seqlen_q": max(q_lengths), "max_seqlen_k": max(k_lengths)} if says else {}
    lengths = (q_lengths, 4), (k_lengths, 2), (k_lengths, 2)
    inputs = [torch.randn(sum(n), H, 64).bfloat16().requires_grad_() for n, H in lengths]
    ends = [torch.tensor([0, *torch.tensor(n).cumsum(0)]) for n in (q_lengths, k_lengths)]
    more: dict[str, Any] = {"causal": True, "dropout_p": p, "deterministic": False}
    state = testing.peek_rng_state()
    with emulate.device(arch, num_sms=2), testing.poisoned_memory():
        results = flash4_torch.attention_varlen(
            *inputs,
            cu_seqlens_q=ends[0],
            cu_seqlens_k=ends[1],
            **longest,
            return_lse=True,
            **more,
        )
        dout = torch.randn(results[0].shape).bfloat16()
        ours = torch.autograd.grad(results[0], inputs, dout)
    found: tuple[list[Tensor], ...] = ([], [])
    for b, (q, k, v, do) in enumerate(
        zip(
            *(x.split(n) for x, (n, _) in zip((*inputs, dout), (*lengths, lengths[0]), strict=True)),
            strict=True,
        )
    ):
        # Sequence b replays dropout as batch entry b.
        batch = [x[None].expand(b + 1, *x.shape) for x in (q, k, v)]
        for into, dtype in zip(found, (torch.float64, torch.bfloat16), strict=True):
            rng = {"rng_state": state} if p else {}
            out, _ = testing.reference(*batch, causal=True, dropout_p=p, **rng, dtype=dtype)
            into.append((out[b].double() * do.double()).sum())
    exact, peer = (
        torch.autograd.grad(sum(parts), inputs, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
        for parts in found
    )
    for a, e, p_ in zip(ours, exact, peer, strict=True):
        if a.numel():
            testing.assert_close_as_peer(a, e.double(), p_)
