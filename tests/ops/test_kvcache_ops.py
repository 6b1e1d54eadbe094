"""The operators around a KV cache as torch.library, torch.compile and autograd see them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import flash4_torch
from everything import one_of
from flash4_torch import env
from flash4_torch.errors import BackendError, NoGradientError
from flash4_torch.reference import kvcache as reference
from flash4_torch.testing import emulate

# torch 2.11's inductor imports a module that uses TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

T, HQ, HK, D, PAGES, SIZE = 5, 4, 2, 16, 4, 8
APPEND, MERGE = torch.ops.flash4.append_kvcache.default, torch.ops.flash4.merge_states.default
FLOAT8 = torch.float8_e4m3fn


def rows(H: int = HK, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(T, H, D).to(dtype)


def caches(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Keys and values side by side in one cache, as vLLM has them."""
    k, v = torch.zeros(PAGES, HK, SIZE, 2 * D).to(dtype).transpose(1, 2).split(D, -1)
    return k, v


def rotary(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    cos, sin = torch.rand(40, D).to(dtype).chunk(2, -1)
    return cos, sin


def arguments(kind: str) -> tuple[Any, ...]:
    """Arguments of the operator that appends."""
    slots, none = torch.tensor([3, -1, 9, 31, 0]), (None,) * 4
    lengths = torch.tensor([2, 7], dtype=torch.int32)
    ends, table = torch.tensor([0, 1, 4], dtype=torch.int32), torch.arange(4, dtype=torch.int32).view(2, 2)
    if kind == "slots":
        return rows(), rows(), *caches(), slots, *none, None, None, None, False, None, None, None
    if kind == "rotary":
        angles = (rows(HQ), torch.arange(T), *rotary(), True)
        return rows(), rows(), *caches(), slots, None, None, None, *angles, None, None, rows(HQ)
    if kind == "table, in place":
        angles = (None, None, *rotary(torch.bfloat16), False)
        return rows(), rows(), *caches(), None, table, lengths, ends, *angles, None, None, rows(HQ)
    k, scale = rows()[None, :2].expand(2, -1, -1, -1), torch.rand(2, HK) + 0.5
    dense = torch.zeros(2, 2, 16, HK, D).to(FLOAT8)
    return k, k, *dense, None, None, lengths, None, None, None, None, None, False, scale, scale, None


@pytest.mark.parametrize("kind", ["slots", "rotary", "table, in place", "dense, float8"])
def test_append_passes_opcheck(kind: str) -> None:
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    # Torch has no comparison of 8-bit floats, which the first of these needs.
    opcheck(APPEND, arguments(kind), test_utils=tests[1:] if "float8" in kind else tests)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_merge_passes_opcheck(listed: bool, grad: bool) -> None:
    outs, lses = torch.randn(3, 2, T, HQ, D), torch.randn(3, 2, HQ, T)
    lists = [list(x[:, None]) if listed else [x] for x in (outs, lses)]
    if grad:
        lists = [[x.clone().requires_grad_() for x in part] for part in lists]
        opcheck(
            MERGE, tuple(lists), test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
        )
    else:
        opcheck(MERGE, tuple(lists))


def step(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, ...]:
    """A model's step: views of the cache are made inside, and read afterwards."""
    k_cache, v_cache = cache.transpose(1, 2).split(D, -1)
    q = flash4_torch.append_kvcache(
        k, v, k_cache, v_cache, slot_mapping=slots, positions=positions, cos=cos, sin=sin, q=q
    )
    k_cache, v_cache = cache.transpose(1, 2).split(D, -1)
    out = q.sum(), k_cache.float().sum(), v_cache.float().sum()
    return out + flash4_torch.merge_states([q[:1], q[1:2]], [q[:1, :, 0].float().T] * 2)


def inputs(tokens: int = T) -> tuple[Tensor, ...]:
    torch.manual_seed(tokens)
    q, k, v = (torch.randn(tokens, H, D).bfloat16() for H in (HQ, HK, HK))
    slots = torch.randperm(PAGES * SIZE)[:tokens]
    return q, k, v, torch.zeros(PAGES, HK, SIZE, 2 * D).bfloat16(), slots, torch.arange(tokens), *rotary()


@pytest.mark.parametrize("backend", one_of(2, ["aot_eager", "inductor"]))
def test_a_step_compiles_as_one_graph(backend: str) -> None:
    """It gives eager's results and leaves the same cache, for any number of tokens."""
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (T, 9):
        given, again = inputs(tokens), inputs(tokens)
        found, wanted = compiled(*given), step(*again)
        for x, y in zip((*found, given[3]), (*wanted, again[3]), strict=True):
            torch.testing.assert_close(x, y)
        assert torch.equal(given[3], again[3])


def in_place(q: Tensor, k: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, angle: Tensor) -> Tensor:
    where = {"slot_mapping": slots, "positions": slots, "cos": angle, "sin": angle}
    flash4_torch.append_kvcache(k, k, k_cache, v_cache, q=q, q_out=q, **where)
    return q + 1


def test_changes_of_given_tensors_compile() -> None:
    """The caches are inputs of the graph, and q is rotated in place."""
    torch._dynamo.reset()
    given = [rows(HQ), rows(), *caches(), torch.arange(T), rotary()[0]]
    again = [x.clone() for x in given]
    found = torch.compile(in_place, fullgraph=True, backend="aot_eager")(*given)
    assert torch.equal(found, in_place(*again))
    assert all(map(torch.equal, given, again))
    assert given[2].any() and given[3].any()


def test_fakes_need_no_values() -> None:
    with FakeTensorMode():
        q, k, v, cache, *where = inputs()
        out = step(q, k, v, cache, *where)
        assert out[3].shape == (1, HQ, D) and out[4].shape == (HQ, 1)


def test_a_backward_is_refused_by_name() -> None:
    q, k, v, cache, slots, positions, cos, sin = inputs()
    q.requires_grad_()
    k_cache, v_cache = cache.transpose(1, 2).split(D, -1)
    where = {"slot_mapping": slots, "positions": positions, "cos": cos, "sin": sin}
    turned = flash4_torch.append_kvcache(k, v, k_cache, v_cache, q=q, **where)
    with pytest.raises(NoGradientError, match="append_kvcache has no gradient"):
        turned.sum().backward()
    with torch.no_grad():
        assert not flash4_torch.append_kvcache(k, v, k_cache, v_cache, q=q, **where).requires_grad
    assert not k_cache.requires_grad
    outs, lses = torch.randn(2, T, HQ, D, requires_grad=True), torch.randn(2, HQ, T)
    for given in (outs, list(outs)):
        out, lse = flash4_torch.merge_states(given, lses)
        with pytest.raises(NoGradientError, match="merge_states has no gradient"):
            (out.sum() + lse.sum()).backward()


def test_autograd_notices_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that some backward needs may not change unseen, by whichever kernel."""
    x = torch.randn(T, HK, D, dtype=torch.bfloat16, requires_grad=True)
    q, slots, angle = x * 1.0, torch.arange(T), rotary()[0]
    product = q * q
    monkeypatch.setattr(reference, "append", lambda call: None)
    where = {"slot_mapping": slots, "positions": slots, "cos": angle, "sin": angle}
    flash4_torch.append_kvcache(rows(), rows(), *caches(), q=q, q_out=q, **where)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        flash4_torch.append_kvcache(rows(), rows(), *caches(), slot_mapping=slots)


def test_a_compiled_graph_refuses_gradients_at_once() -> None:
    torch._dynamo.reset()
    q, *more = inputs()
    with pytest.raises(Exception, match="NoGradientError"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(q.requires_grad_(), *more)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_emulator_serves_where_it_is_asked_for(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    wanted_cache, given = inputs(), inputs()
    wanted = step(*wanted_cache)
    monkeypatch.setenv(env.BACKEND.name, "emulator")
    with emulate.device(arch) as device:
        found = step(*given)
    assert ["append" in report.kernel for report in device.reports] == [True, False]
    for x, y in zip((*found, given[3]), (*wanted, wanted_cache[3]), strict=True):
        torch.testing.assert_close(x, y)


def test_a_forced_backend_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    k, cache = rows(dtype=torch.float32), torch.zeros(2, PAGES, SIZE, HK, D)
    slots = torch.arange(T)
    monkeypatch.setenv(env.BACKEND.name, "emulator")
    with pytest.raises(BackendError, match=r"emulator: the dtype is torch\.float32"):
        flash4_torch.append_kvcache(k, k, *cache, slot_mapping=slots)
    monkeypatch.setenv(env.BACKEND.name, "sm90")
    with pytest.raises(BackendError, match="sm90: the tensors are on cpu, and it serves cuda"):
        flash4_torch.merge_states([k], [k[..., 0].T])
    monkeypatch.setenv(env.BACKEND.name, "tiled")
    flash4_torch.append_kvcache(k, k, *cache, slot_mapping=slots)
    assert torch.equal(cache[0].flatten(0, 1)[:T], k)
