"""What compiled graphs call instead of operators: the same results, and the operators if someone watches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.utils import fresh_cache

import flash4_torch
from cases import Case, cases
from flash4_torch import backends, fast_path, testing
from flash4_torch.backends.compiled import SM80_FAMILY
from flash4_torch.fast_path import graphs
from flash4_torch.ops import impl
from on_cpu import gpu

# torch 2.11's inductor imports a module that uses TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

NAMES = ("attention", "attention_backward", "attention_weights", "attention_weights_signed")
DIRECT = {name: getattr(torch.ops.flash4, f"direct_{name}") for name in NAMES}
OPERATORS = {name: getattr(torch.ops.flash4, name).default for name in NAMES}


@pytest.fixture(autouse=True)
def forgetful() -> None:
    fast_path.clear()


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends that operators have chosen."""
    names: list[str] = []

    def choose(problem: Any) -> Any:
        backend = backends.choose(problem)
        names.append(backend.name)
        return backend

    monkeypatch.setattr(impl, "backends", type("Backends", (), {"choose": staticmethod(choose)}))
    return names


def arguments(case: Case, dropout_p: float) -> tuple[Any, ...]:
    """Those of the operator for a drawn call."""
    kwargs, (left, right) = case.kwargs, case.kwargs["window"]
    mask, sinks = (None if (x := kwargs[name]) is None else x.detach() for name in ("attn_mask", "sinks"))
    mask = None if mask is None else mask[(None,) * (4 - mask.dim())]
    rng_state = testing.peek_rng_state("cpu") if dropout_p else None
    scale = case.q.shape[3] ** -0.5 if kwargs["scale"] is None else kwargs["scale"]
    right = 0 if kwargs["causal"] and (right is None or right > 0) else right
    tensors = (case.q.detach(), case.k.detach(), case.v.detach(), mask, sinks, rng_state)
    return *tensors, scale, left, right, kwargs["softcap"], dropout_p, False


def assert_same_bits(actual: Any, expected: Any) -> None:
    as_tuples = ((x,) if isinstance(x, Tensor) else x for x in (actual, expected))
    for a, e in zip(*as_tuples, strict=True):
        assert a.shape == e.shape and a.stride() == e.stride() and a.dtype == e.dtype
        assert torch.equal(a.nan_to_num(nan=7.0), e.nan_to_num(nan=7.0))


@given(cases(), st.sampled_from([0.0, 0.3]), st.booleans())
def test_they_return_what_the_operators_return(case: Case, dropout_p: float, average: bool) -> None:
    args = arguments(case, dropout_p)
    q, k, _, *masked_by, deterministic = args
    out, lse, low = OPERATORS["attention"](*args)
    saved = torch.randn_like(out), None, *args[:3], out, lse, low if low.numel() else None
    every = {
        "attention": args,
        "attention_backward": (*saved, *masked_by, deterministic, False),
        "attention_weights": (q, k, *saved[6:], *masked_by, average),
        "attention_weights_signed": (q, k, *saved[6:], *masked_by),
    }
    for name, given_ in every.items():
        expected = OPERATORS[name](*given_)
        for _ in range(2):
            assert_same_bits(DIRECT[name](*given_), expected)


def both_states() -> list[Tensor]:
    """States of dropout: of a call, and of a part of a larger one, which other kernels read."""
    return [torch.tensor([3, 4]), torch.tensor([3, 4, 16, 0, 1, 4, 2])]


@pytest.mark.parametrize("rng_state", both_states(), ids=["call", "part"])
def test_launches_are_prepared_for_the_operators_problem(
    rng_state: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: dict[str, list[Any]] = {"operator": [], "launch": []}

    def noting(who: str, choose: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda problem: problems[who].append(problem) or choose(problem)  # type: ignore[func-returns-value]

    choose = staticmethod(noting("operator", backends.choose))
    monkeypatch.setattr(impl, "backends", type("Backends", (), {"choose": choose}))
    monkeypatch.setattr(graphs, "prepares", noting("launch", graphs.prepares))
    (q, k, v), scored_by = qkv(), (None, None, rng_state)
    rules = 0.3, None, None, 0.0, 0.5
    out, lse, _ = DIRECT["attention"](q, k, v, *scored_by, *rules, False)
    DIRECT["attention_backward"](out, None, q, k, v, out, lse, None, *scored_by, *rules, False, False)
    DIRECT["attention_weights"](q, k, lse, None, *scored_by, *rules, True)
    DIRECT["attention_weights_signed"](q, k, lse, None, *scored_by, *rules)
    assert problems["launch"] == problems["operator"]
    is_part = len(rng_state) > 2
    assert [problem.spec.dropout_of_part for problem in problems["launch"]] == [is_part] * 4


ARGS = (None, None, None, 0.3, None, None, 0.0, 0.0, False)


def qkv(S: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, S, 2, 16) for _ in range(3))
    return q, k, v


def test_the_second_call_of_a_kind_needs_no_operator(chosen: list[str]) -> None:
    direct = DIRECT["attention"]
    direct(*qkv(), *ARGS)
    assert chosen == ["cpu"]
    for _ in range(2):
        direct(*qkv(), *ARGS)
        assert chosen == ["cpu"]
    direct(*qkv(17), *ARGS)
    direct(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv()), *ARGS)
    direct(*qkv(), *ARGS[:3], 0.4, *ARGS[4:])
    assert chosen == ["cpu"] * 4


def shifted(x: Tensor) -> Tensor:
    """Its values, four bytes beyond an aligned address."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


class Recording(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


WATCHERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "backends_used": testing.backends_used,
    "profiler": lambda: torch.profiler.profile(acc_events=True),
    "dispatch mode": Recording,
}


@pytest.mark.parametrize("who", WATCHERS)
def test_the_operator_is_called_if_someone_watches(who: str, chosen: list[str]) -> None:
    # The third time it is recognised without its signature.
    for _ in range(3):
        DIRECT["attention"](*qkv(), *ARGS)
    with WATCHERS[who]():
        DIRECT["attention"](*qkv(), *ARGS)
    assert len(chosen) == 2


def test_the_operator_is_called_for_odd_tensors(chosen: list[str]) -> None:
    q, k, v = qkv()
    expected = OPERATORS["attention"](q, k, v, *ARGS)
    negative = torch._neg_view(-q)
    for _ in range(3):
        DIRECT["attention"](q, k, v, *ARGS)
    for odd in (shifted(q), negative, torch.nn.Parameter(q, requires_grad=False)):
        for _ in range(2):
            assert_same_bits(DIRECT["attention"](odd, k, v, *ARGS), expected)
    assert len(chosen) == 8


def test_torchs_switch_for_tf32_is_heard() -> None:
    """Float32 calls like one before it are served as the switch stands now."""
    q, k, v = qkv()
    matmul, heard = torch.backends.cuda.matmul, []
    before = matmul.fp32_precision
    try:
        for call in (
            lambda: DIRECT["attention"](q, k, v, *ARGS),
            lambda: flash4_torch.attention(q, k, v),
        ):
            with gpu(SM80_FAMILY[0]) as machine:
                for precision in ("ieee", "tf32") * 3:
                    matmul.fp32_precision = precision
                    call()
                heard.append([launch.features.tf32 for launch in machine.launches])
    finally:
        matmul.fp32_precision = before
    assert heard == [[False, True] * 3] * 2


def test_a_forced_backend_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    args = (*qkv(), *ARGS)
    for _ in range(2):
        DIRECT["attention"](*args)
    monkeypatch.setenv("FLASH4_BACKEND", "tiled")
    with testing.backends_used() as used:
        DIRECT["attention"](*args)
    assert used == {("attention", "tiled"): 1}


def test_autocast_does_not_reach_what_the_operator_calls() -> None:
    q, k, v = (x.bfloat16() for x in qkv())
    rng_state = testing.peek_rng_state("cpu")
    args = (q, k, v, None, None, rng_state, 0.3, None, None, 5.0, 0.3, False)
    expected = OPERATORS["attention"](*args)
    for _ in range(2):
        assert_same_bits(DIRECT["attention"](*args), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(DIRECT["attention"](*args), expected)


def test_the_memory_is_bounded_and_holds_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST", 4)
    for S in range(1, 12):
        DIRECT["attention"](*qkv(S), *ARGS)
        assert len(graphs._launches) <= 4
    assert not any(isinstance(x, Tensor) for call in graphs._launches for x in call)


def test_graphs_of_inductor_call_them(chosen: list[str]) -> None:
    module = flash4_torch.MultiheadAttention(32, 2, dropout=0.2, batch_first=True)
    with fresh_cache():
        step = torch.compile(module, fullgraph=True)

        def train() -> tuple[Tensor, ...]:
            torch.manual_seed(0)
            # Of fewer weights the graph makes them itself, as it makes the output of these.
            x = torch.randn(2, 160, 32, requires_grad=True)
            out, weights = step(x, x, x)
            loss = out.square().sum() + weights.square().sum()
            return torch.autograd.grad(loss, (x, *module.parameters()))

        expected = train()
        # Each head's weights, which the backward finds saved.
        assert len(chosen) == 1
        train()  # torch's compiler watches the first call
        del chosen[:]
        assert_same_bits(train(), expected)
    assert not chosen
