"""The backends of torch's fused kernels on a GPU, against the definition in float64."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

import flash4_torch
from everything import examples, one_of
from fallback_calls import BANDS, a_mask, bands, check, deterministic, packed, problem_of, tensors
from flash4_torch import testing
from flash4_torch.backends.base import Backend
from flash4_torch.backends.compiled import served
from flash4_torch.backends.efficient import Efficient
from flash4_torch.backends.sdpa import Sdpa
from flash4_torch.masks import Band
from flash4_torch.problem import Extent, Inputs, Problem, Saved, mask_key

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a GPU"
    ),
    # The definition's gradients, in autograd's own thread.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]

HALF = (torch.bfloat16, torch.float16)
LENGTHS = st.one_of(st.integers(1, 40), st.integers(100, 400))


def on_gpu(*xs: Tensor | None) -> Inputs:
    return Inputs(*(None if x is None else x.cuda() for x in xs))


def slow(few: int, all_of_them: int) -> Any:
    number = examples(few, all_of_them)
    return settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck))


def poisoned(strictly: bool = False) -> AbstractContextManager[None]:
    """Fresh memory holds NaN. Strictly deterministic algorithms are on with it, or warn only."""
    return deterministic("error") if strictly else testing.poisoned_memory()


@pytest.mark.parametrize("call", BANDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("D", [64, 320])
def test_efficient_attention_serves_causal_and_windows(
    call: tuple[int, int, Band], dtype: torch.dtype, D: int
) -> None:
    """Sizes of some of the kernel's blocks."""
    Sq, Sk, (left, right) = call
    band = Band(None if left is None else 9 * left, None if right is None else 9 * right)
    check_band(9 * Sq, 9 * Sk, band, (D, 64, 2), dtype, is_deterministic=D == 320)


@given(
    call=bands(400),
    D=st.sampled_from([8, 64, 100, 128, 320]),
    Dv=st.sampled_from([16, 64, 128]),
    group=st.integers(1, 2),
    dtype=st.sampled_from([torch.float32, *HALF]),
    is_deterministic=st.booleans(),
)
@slow(40, 600)
def test_efficient_attention_serves_bands(
    call: tuple[int, int, Band], D: int, Dv: int, group: int, dtype: torch.dtype, is_deterministic: bool
) -> None:
    check_band(*call, (D, Dv, group), dtype, is_deterministic)


def check_band(
    Sq: int, Sk: int, band: Band, sizes: tuple[int, int, int], dtype: torch.dtype, is_deterministic: bool
) -> None:
    torch.manual_seed(0)
    D, Dv, group = sizes
    q, k, v = tensors((2, Sq, 2 * group), (2, Sk, 2), D, Dv, dtype)
    more = {"deterministic": is_deterministic, "sinks": "float32"}
    problem = problem_of(Extent(2, Sq, Sk, 2 * group, 2), dtype, D, Dv, band, **more)
    check(Efficient(), on_gpu(q, k, v, None, torch.randn(2 * group)), problem, within=poisoned)


@pytest.mark.parametrize("kind", ["bool", "float", "learned", "large"])
@given(
    Sq=LENGTHS,
    Sk=LENGTHS,
    D=st.sampled_from([20, 64, 128]),
    shape=st.tuples(*(st.booleans() for _ in range(4))),
    corner=st.sampled_from(["full", "top left", "bottom right"]),
    dtype=st.sampled_from([torch.float32, *HALF]),
    is_deterministic=st.booleans(),
    seed=st.integers(0, 99),
)
@slow(8, 150)
def test_efficient_attention_serves_masks(
    kind: str,
    Sq: int,
    Sk: int,
    D: int,
    shape: tuple[bool, ...],
    corner: str,
    dtype: torch.dtype,
    is_deterministic: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    B, Hq, Hk = 2, 4, 2
    own = [1 if one else n for one, n in zip(shape, (B, Hq, Sq, Sk), strict=True)]
    mask = a_mask(kind, own, dtype, seed)
    inputs = on_gpu(*tensors((B, Sq, Hq), (B, Sk, Hk), D, D, dtype), mask)
    band = {"full": Band(), "top left": Band(None, Sq - Sk), "bottom right": Band(None, 0)}[corner]
    more = {"mask": mask_key(mask), "dmask": kind == "learned", "deterministic": is_deterministic}
    problem = problem_of(Extent(B, Sq, Sk, Hq, Hk), dtype, D, D, band, **more)
    check(Efficient(), inputs, problem, dmask=kind == "learned", within=poisoned)


@pytest.mark.parametrize("backend", [Efficient(), Sdpa()], ids=["efficient", "sdpa"])
@given(
    ends=packed(), right=st.integers(-3, 0), left=st.one_of(st.none(), st.integers(0, 9)), full=st.booleans()
)
@slow(8, 100)
def test_packed_sequences(
    backend: Backend, ends: tuple[Tensor, Tensor], right: int, left: int | None, full: bool
) -> None:
    torch.manual_seed(0)
    Sq, Sk = (int(x.diff().max()) for x in ends)
    if not (Sq and Sk):
        return
    is_flash = isinstance(backend, Sdpa)
    dtype, band = torch.bfloat16 if is_flash else torch.float32, Band(left, 0 if is_flash else right)
    q, k, v = tensors((int(ends[0][-1]), 2), (int(ends[1][-1]), 1), 64, 64, dtype)
    inputs = on_gpu(q, k, v, None, None, None, *ends)
    extent = Extent(len(ends[0]) - 1, Sq, Sk, 2, 1)
    problem = problem_of(extent, dtype, 64, 64, Band() if full else band, varlen=True, deterministic=True)
    check(backend, inputs, problem, within=partial(poisoned, is_flash))


@given(
    Sq=LENGTHS,
    Sk=LENGTHS,
    D=st.sampled_from([32, 64, 128, 200, 256]),
    left=st.one_of(st.none(), st.integers(0, 400)),
    right=st.one_of(st.none(), st.integers(0, 400)),
    capability=st.sampled_from([(8, 0), (8, 6)]),
    is_deterministic=st.booleans(),
)
@slow(12, 200)
def test_flash_attention(
    Sq: int,
    Sk: int,
    D: int,
    left: int | None,
    right: int | None,
    capability: tuple[int, int],
    is_deterministic: bool,
) -> None:
    """Gradients are padded further where a GPU says that it has less shared memory."""
    torch.manual_seed(0)
    inputs = on_gpu(*tensors((2, Sq, 4), (2, Sk, 2), D, D, torch.bfloat16))
    more = {"capability": capability, "deterministic": is_deterministic}
    problem = problem_of(Extent(2, Sq, Sk, 4, 2), torch.bfloat16, D, D, Band(left, right), **more)
    if right is not None and Sk <= right < Sq - 1:
        with poisoned(is_deterministic):
            (why,) = Sdpa().why_not(problem)
        assert f"right bound is {right}" in why
        return
    check(Sdpa(), inputs, problem, within=partial(poisoned, is_deterministic))


def gradients(backend: Backend, inputs: Inputs, problem: Problem) -> list[Tensor]:
    out, lse, low, _ = backend.forward(inputs, problem)
    torch.manual_seed(1)
    dmask = problem.spec.dmask
    saved = Saved(torch.randn_like(out), None, out, lse, dmask, low)
    backward = problem._replace(spec=problem.spec._replace(backward=True))
    assert backend.why_not(backward) == []
    return [x for x in backend.backward(saved, inputs, backward) if x is not None]


REPEATED: list[tuple[torch.dtype, Band, str]] = [
    (torch.float32, Band(), ""),
    (torch.bfloat16, Band(), ""),
    (torch.float32, Band(None, 0), ""),
    (torch.bfloat16, Band(None, 0), "learned"),
    (torch.bfloat16, Band(300, 0), ""),
    (torch.float32, Band(300, -5), ""),
    (torch.float32, Band(), "learned"),
]


@pytest.mark.parametrize(("dtype", "band", "kind"), REPEATED)
@pytest.mark.parametrize("name", ["efficient", "sdpa"])
def test_deterministic_gradients_are_the_same_bits(
    name: str, dtype: torch.dtype, band: Band, kind: str
) -> None:
    """Few heads and many keys, whose order is what a split backward leaves open."""
    torch.manual_seed(0)
    if name == "sdpa" and (kind or dtype == torch.float32):
        return
    Sq, Sk, D = 2000, 2500, 64
    q, k, v = tensors((1, Sq, 2), (1, Sk, 1), D, D, dtype)
    mask = a_mask(kind, [1, 1, Sq, Sk], dtype, 0) if kind else None
    more = {"mask": mask_key(mask), "dmask": bool(kind), "deterministic": True}
    problem = problem_of(Extent(1, Sq, Sk, 2, 1), dtype, D, D, band, **more)
    backend: Backend = Sdpa() if name == "sdpa" else Efficient()
    inputs = on_gpu(q, k, v, mask)
    with deterministic("error" if name == "sdpa" else "default"):
        first = gradients(backend, inputs, problem)
        for _ in range(10):
            again = gradients(backend, inputs, problem)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("name", ["efficient", "sdpa"])
def test_more_batch_entries_than_a_grid_has(name: str) -> None:
    torch.manual_seed(0)
    B, D, dtype = 65535 + 7, 8, torch.bfloat16
    inputs = on_gpu(*tensors((B, 3, 2), (B, 5, 1), D, D, dtype))
    problem = problem_of(Extent(B, 3, 5, 2, 1), dtype, D, D, Band(None, 0))
    check(Sdpa() if name == "sdpa" else Efficient(), inputs, problem, within=poisoned)


LOWER_RIGHT = [(torch.float32, 64), (torch.bfloat16, 320), (torch.bfloat16, 64), (torch.float32, 128)]


@pytest.mark.parametrize(("dtype", "D"), one_of(2, LOWER_RIGHT))
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_without_a_compiler_causal_runs_fused_kernels(
    dtype: torch.dtype, D: int, is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The public function, beside torch's own causal_lower_right."""
    monkeypatch.setattr(served, "missing_packages", lambda exported: ["nvidia-cutlass-dsl"])
    torch.manual_seed(0)
    Sq, Sk = 150, 333
    q, k, v = (x.cuda().requires_grad_() for x in tensors((2, Sq, 4), (2, Sk, 4), D, D, dtype))
    with deterministic("error" if is_deterministic else "default"):
        with testing.backends_used() as used:
            out, lse = flash4_torch.attention(q, k, v, causal=True, return_lse=True)
            dout = torch.randn_like(out)
            grads = torch.autograd.grad(out, (q, k, v), dout)
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        torchs = F.scaled_dot_product_attention(*heads_first, attn_mask=causal_lower_right(Sq, Sk))
        own = torch.autograd.grad(torchs, (q, k, v), dout.transpose(1, 2))
    name = "sdpa" if dtype != torch.float32 and D <= 256 else "efficient"
    assert used == {("attention", name): 1, ("attention_backward", name): 1}
    exact, of_rows = testing.reference(q, k, v, causal=True)
    truth = [exact, *torch.autograd.grad(exact, (q, k, v), dout.double())]
    torch.testing.assert_close(lse.double(), of_rows, rtol=1e-4, atol=1e-4)
    for a, e, p in zip((out, *grads), truth, (torchs.transpose(1, 2), *own), strict=True):
        testing.assert_close_as_peer(a, e.double(), p)
