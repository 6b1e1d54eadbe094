"""Appends that are recognised, since they are like the one before, do what others do."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import append_calls
import flash4_torch
from everything import examples
from flash4_torch.backends.compiled import TARGETS
from flash4_torch.errors import ArgumentError, NoGradientError
from flash4_torch.fast_path import append as fast_path
from flash4_torch.kernels.common.kvcache import AppendPlan, RotaryPlan
from flash4_torch.ops import kvcache_append
from flash4_torch.reference.kvcache import Append
from kvcache_on_cpu import gpu

FLOAT8 = "float8_e4m3fn"


@st.composite
def plans(draw: st.DrawFn) -> AppendPlan:
    """Kernels of all kinds."""
    slots, float8 = draw(st.sampled_from(["", "int32", "int64"])), draw(st.booleans())
    rotary = None
    if draw(st.booleans()):
        positions = "int64" if slots else draw(st.sampled_from(["", "int32"]))
        dtype = draw(st.sampled_from(["bfloat16", "float32"]))
        rotary = RotaryPlan(16, draw(st.booleans()), dtype, positions, draw(st.booleans()))
    return AppendPlan(
        dtype="bfloat16",
        D=32,
        Dv=16,
        cache_dtype=FLOAT8 if float8 else "",
        slots=slots,
        paged=not slots and draw(st.booleans()),
        packed=not slots and draw(st.booleans()),
        k_scaled=float8 and draw(st.booleans()),
        v_scaled=float8 and draw(st.booleans()),
        rotary=rotary,
    )


def appended(x: Append, *, new_q: bool = False) -> Tensor | None:
    """The public call; new_q: rotated q goes to a tensor of its own."""
    is_packed = x.cu_seqlens is not None

    def rows(y: Tensor | None) -> Tensor | None:
        return y[0] if is_packed and y is not None else y

    q = None if x.q_out is None else rows(x.q)
    q_out = None if new_q else q if x.q_out is x.q else rows(x.q_out)
    scales = [
        None if s is None else s[0] if x.slot_mapping is not None else s for s in (x.k_scale, x.v_scale)
    ]
    return flash4_torch.append_kvcache(
        rows(x.k),
        rows(x.v),
        x.k_cache,
        x.v_cache,
        slot_mapping=x.slot_mapping,
        block_table=x.block_table,
        seqused_k=x.seqused_k,
        cu_seqlens=x.cu_seqlens,
        q=q,
        positions=x.positions,
        cos=x.cos,
        sin=x.sin,
        interleaved=x.interleaved,
        k_scale=scales[0],
        v_scale=scales[1],
        q_out=q_out,
    )


def unseen() -> ExitStack:
    """A context in which nobody reads numbers, as on a GPU."""
    stack = ExitStack()
    fast_path.clear()
    stack.callback(fast_path.clear)
    stack.enter_context(mock.patch.object(kvcache_append, "_check_values", lambda call: None))
    return stack


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return a is b
    if (a.shape, a.stride(), a.dtype) != (b.shape, b.stride(), b.dtype):
        return False
    return torch.equal(a, b) or torch.allclose(a.double(), b.double(), 0.0, 0.0, equal_nan=True)


@given(plan=plans(), data=st.data(), new_q=st.booleans())
@settings(max_examples=examples(60, 600))
def test_what_is_recognised_launches_what_the_slow_path_does(
    plan: AppendPlan, data: st.DataObject, new_q: bool
) -> None:
    x = data.draw(append_calls.calls(plan))
    with unseen(), gpu(TARGETS["sm_90a"]) as backend:
        for _ in range(4):
            backend.launches.clear()
            fast = appended(x, new_q=new_q)
        own = list(backend.launches)
        backend.launches.clear()
        with mock.patch.object(fast_path, "lookup", lambda *args: (None, None)):
            slow = appended(x, new_q=new_q)
        assert len(own) == len(backend.launches) == 1
        (quick,), (usual,) = own, backend.launches
        assert quick[:2] == usual[:2] and len(quick.args) == len(usual.args)
        *read, _ = zip(quick.args, usual.args, strict=True)
        assert all(same(a, b) for a, b in read)
        for i in (2, 3):
            assert quick.args[i].data_ptr() == usual.args[i].data_ptr()
        assert (fast is None) == (slow is None) == (x.q_out is None)
        if fast is not None:
            assert fast.shape == slow.shape and fast.stride() == slow.stride()
            assert quick.args[-1].data_ptr() == fast.data_ptr()


def test_the_third_one_of_a_kind_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the fourth of other numbers of tokens is not, nor are others forgotten for it."""
    checked: list[int] = []
    operator = kvcache_append.append_kvcache
    monkeypatch.setattr(
        kvcache_append, "append_kvcache", lambda *args: [checked.append(len(args[0])), operator(*args)]
    )
    fast_path.clear()
    caches = [torch.zeros(4, 16, 2, 8) for _ in range(2)]
    for T in (3, 3, 3, 5, 3):
        slots = torch.randperm(64)[:T]
        k, v = torch.randn(2, T, 2, 8)
        flash4_torch.append_kvcache(k, v, *caches, slot_mapping=slots)
        for rows, cache in ((k, caches[0]), (v, caches[1])):
            assert torch.equal(cache.view(64, 2, 8)[slots], rows)
    assert checked == [3, 3, 5]


def _call(**changes: Any) -> dict[str, Any]:
    k, v = torch.randn(2, 6, 2, 16).bfloat16()
    given = {
        "k": k,
        "v": v,
        "k_cache": torch.zeros(4, 16, 2, 16).bfloat16(),
        "q": torch.randn(6, 4, 16).bfloat16(),
    }
    given |= {"v_cache": torch.zeros(4, 16, 2, 16).bfloat16(), "slot_mapping": torch.arange(6)}
    angles = torch.randn(64, 8)
    return given | {"positions": torch.arange(6), "cos": angles.cos(), "sin": angles.sin()} | changes


def _off_by_8_bytes(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(4), x.flatten()])[4:].view(x.shape)


OTHERS: dict[str, Any] = {
    "place": _off_by_8_bytes,
    "strides": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "sign": lambda x: torch._neg_view(-x),
    "gradient": lambda x: x.clone().requires_grad_(),
    "subclass": lambda x: x.as_subclass(type("Own", (Tensor,), {})),
}


@pytest.mark.parametrize("name", ["k", "v", "q", "k_cache"])
@pytest.mark.parametrize("other", OTHERS)
def test_a_call_that_differs_unseen_appends_as_well(other: str, name: str) -> None:
    """Its tensors have the sizes of those that are recognised."""
    if name == "k_cache" and other in ("gradient", "sign"):
        return
    fast_path.clear()
    for _ in range(4):
        usual = _call()
        flash4_torch.append_kvcache(**usual)
    changed = {x: y.clone() for x, y in usual.items()}
    changed[name] = OTHERS[other](usual[name])
    q = flash4_torch.append_kvcache(**changed)
    expected = {x: y.clone() for x, y in usual.items()}
    with mock.patch.object(fast_path, "lookup", lambda *args: (None, None)):
        turned = flash4_torch.append_kvcache(**expected)
    assert torch.equal(q, turned)
    for cache in ("k_cache", "v_cache"):
        assert torch.equal(changed[cache], expected[cache])
    if other == "gradient" and name != "v":
        with pytest.raises(NoGradientError):
            q.sum().backward()


@pytest.mark.parametrize("name", ["k", "v", "q", "k_cache", "cos", "q_out"])
@pytest.mark.parametrize("other", ["place", "strides"])
def test_kernels_get_what_they_can_read(other: str, name: str) -> None:
    """Also where a call of the same sizes, whose tensors they read in place, is recognised."""
    usual = _call(q_out=torch.zeros(6, 4, 16).bfloat16())
    changed = usual | {name: OTHERS[other](usual[name])}
    with unseen(), gpu(TARGETS["sm_90a"]) as backend:

        def layouts() -> list[Any]:
            backend.launches.clear()
            flash4_torch.append_kvcache(**changed)
            return [
                [(x.stride(), x.data_ptr() % 16) for x in launch.args if isinstance(x, Tensor)]
                for launch in backend.launches
            ]

        alone = layouts()
        fast_path.clear()
        for _ in range(4):
            flash4_torch.append_kvcache(**usual)
        assert layouts() == alone


def test_numbers_on_a_cpu_are_looked_at_each_time() -> None:
    fast_path.clear()
    for _ in range(4):
        flash4_torch.append_kvcache(**_call())
    with pytest.raises(ArgumentError, match="slot_mapping is"):
        flash4_torch.append_kvcache(**_call(slot_mapping=torch.tensor([0, 1, 2, 64, 4, 5])))


def test_autograd_notices_what_is_written() -> None:
    fast_path.clear()
    for _ in range(4):
        call = _call(q_out=torch.zeros(6, 4, 16).bfloat16())
        before = [call[x]._version for x in ("k_cache", "v_cache", "q_out")]
        flash4_torch.append_kvcache(**call)
        assert all(call[x]._version > b for x, b in zip(("k_cache", "v_cache", "q_out"), before, strict=True))
