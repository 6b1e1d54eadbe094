"""The backend that serves a call, and the truth of the answers of `support`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

import flash4_torch
from cases import Case, cases
from flash4_torch import backends, support_table, testing
from flash4_torch.backends import efficient
from flash4_torch.backends.compiled import SM90A
from flash4_torch.backends.compiled.explain import explain
from flash4_torch.errors import BackendError, RangeError
from flash4_torch.ops.impl import describe_inputs, weights_of
from flash4_torch.problem import CallOptions, Inputs


def first_able(reasons: dict[str, list[str]], backward: bool) -> str:
    """The backend `support` promises for one direction."""
    for name, why in reasons.items():
        blocking = (
            why if backward else [sentence for sentence in why if not sentence.startswith("backward: ")]
        )
        if not blocking:
            return name
    raise AssertionError(reasons)


@given(cases())
def test_support_tells_who_serves(case: Case) -> None:
    reasons = flash4_torch.support(case.q, case.k, case.v, **case.kwargs)
    with testing.backends_used() as used:
        flash4_torch.attention(case.q, case.k, case.v, **case.kwargs).sum().backward()
    assert used == {
        ("attention", first_able(reasons, backward=False)): 1,
        ("attention_backward", first_able(reasons, backward=True)): 1,
    }


X = torch.randn(1, 4, 2, 8)


def test_plain_calls_run_torchs_cpu_kernel() -> None:
    for kwargs in ({}, {"causal": True}, {"window": (3, 3)}):
        assert flash4_torch.support(X, X, X, **kwargs)["cpu"] == []


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"softcap": 2.0}, "softcap is 2.0"),
        ({"dropout_p": 0.5}, "dropout_p is 0.5"),
        ({"scale": -1.0}, "scale is -1.0"),
    ],
)
def test_reasons_name_the_feature(kwargs: dict[str, object], sentence: str) -> None:
    reasons = flash4_torch.support(X, X, X, **kwargs)
    assert any(sentence in why for why in reasons["cpu"])
    assert reasons["tiled"] == []


def test_reasons_name_the_window() -> None:
    x = torch.empty(1, 1024, 2, 8)
    (why,) = flash4_torch.support(x, x, x, window=(1, 1))["cpu"]
    assert why.startswith("the window is (1, 1) for Sq=1024, Sk=1024, and plain torch is faster")
    (why,) = flash4_torch.support(x[:, :2], x[:, :1], x[:, :1], window=(None, -3))["cpu"]
    assert why == "the window is (None, -3) for Sq=2, Sk=1, and it hides every key"


def test_gradient_of_lse_goes_to_tiled() -> None:
    x = X.clone().requires_grad_()
    assert flash4_torch.support(x, x, x, return_lse=True)["cpu"] == ["backward: it has no gradient for lse"]
    with testing.backends_used() as used:
        _, lse = flash4_torch.attention(x, x, x, return_lse=True)
        lse.sum().backward()
    assert used == {("attention", "cpu"): 1, ("attention_backward", "tiled"): 1}


def test_a_forced_backend_serves_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH4_BACKEND", "tiled")
    with testing.backends_used() as used:
        flash4_torch.attention(X, X, X)
    assert used == {("attention", "tiled"): 1}
    monkeypatch.setenv("FLASH4_BACKEND", "cpu")
    with pytest.raises(BackendError, match=r"cpu: softcap is 2\.0") as caught:
        flash4_torch.attention(X, X, X, softcap=2.0)
    assert list(caught.value.reasons) == ["cpu"]
    monkeypatch.setenv("FLASH4_BACKEND", "gpu")
    with pytest.raises(RangeError, match=r"FLASH4_BACKEND is 'gpu', but it must be one of \['cpu'"):
        flash4_torch.attention(X, X, X)


def test_excluded_backends_are_passed_over() -> None:
    with testing.backends_used() as used, backends.excluding("cpu"):
        flash4_torch.attention(X, X, X)
    assert used == {("attention", "tiled"): 1}
    with pytest.raises(BackendError), backends.excluding(*(b.name for b in backends.PRIORITY)):
        flash4_torch.attention(X, X, X)


def test_the_log_names_the_backend_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASH4_LOG", "backend")
    x = torch.randn(1, 13, 2, 8)
    for _ in range(3):
        flash4_torch.attention(x, x, x, softcap=5.0)
    printed = capfd.readouterr().err.splitlines()
    assert len(printed) == 1 and "tiled serves attention forward" in printed[0] and "Sq=13" in printed[0]


def test_memory_does_not_grow_with_the_product_of_lengths() -> None:
    """No tensor the tiled backend makes is larger than a bounded tile or the inputs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple) else [result]:
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.numel())
            return result

    from flash4_torch.reference import tiled
    from flash4_torch.reference.dropout import Dropout
    from flash4_torch.reference.scoring import Scoring

    q = k = v = torch.randn(1, 1500, 2, 8)
    scoring = Scoring(0.25, softcap=3.0, dropout=Dropout(torch.tensor([1, 2]), 0.1))
    with Watch():
        out, lse, _ = tiled.forward(q, k, v, scoring)
        tiled.backward(out, lse, q, k, v, out, lse, scoring)
    assert largest <= max(q.numel(), tiled.Tiling().elements)


def test_support_knows_what_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    x = X.clone().requires_grad_()
    for forced in ("tiled", "cpu"):
        monkeypatch.setenv("FLASH4_BACKEND", forced)
        reasons = flash4_torch.support(x, x, x)
        with testing.backends_used() as used:
            flash4_torch.attention(x, x, x).sum().backward()
        assert {name for _, name in used} == {forced} and len(used) == 2
        assert [name for name, why in reasons.items() if not why] == [forced]
        for name, why in reasons.items():
            assert name == forced or f"FLASH4_BACKEND={forced} asks for another" in why
    # Reasons of its own remain for a call that it cannot serve.
    assert "softcap is 2.0, and it has none" in flash4_torch.support(X, X, X, softcap=2.0)["cpu"]
    monkeypatch.setenv("FLASH4_BACKEND", "gpu")
    messages = []
    for call in (flash4_torch.support, flash4_torch.attention):
        with pytest.raises(RangeError, match=r"FLASH4_BACKEND is 'gpu'") as caught:
            call(X, X, X)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_support_knows_what_is_excluded() -> None:
    with backends.excluding("cpu"):
        assert flash4_torch.support(X, X, X)["cpu"] == ["this thread excludes it"]


def test_the_table_of_features_asks_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    table = support_table.markdown()
    monkeypatch.setenv("FLASH4_BACKEND", "cpu")
    assert support_table.markdown() == table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_efficient_kernel_gets_aligned_rows(dtype: torch.dtype) -> None:
    """It takes no others; what is aligned is not copied."""
    room = torch.randn(2, 6, 3, 19).to(dtype)
    for x in (room[..., :16], room[:, 1:, :, 1:17], torch.randn(2, 6, 3, 16).to(dtype)):
        found = efficient.aligned(x)
        assert torch.equal(found, x) and found.data_ptr() % 16 == 0
        assert all(stride * x.element_size() % 16 == 0 for stride in found.stride()[:-1])
        assert efficient.aligned(found) is found


def test_the_log_explains_weights() -> None:
    x = torch.randn(1, 130, 2, 16).bfloat16()
    problem = weights_of(describe_inputs(Inputs(x, x, x), CallOptions(0.25)))
    assert str(problem).startswith("attention weights forward")
    assert explain(SM90A, problem, 132)[-1] == "tiles of 128 queries by 128 keys"
