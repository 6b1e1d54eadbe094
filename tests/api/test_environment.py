"""Environment variables: an empty one is unset; a wrong one is named by what uses it, and by nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import flash4_torch
from flash4_torch import backends, env, testing
from flash4_torch.compile import arch
from flash4_torch.errors import RangeError

X = torch.randn(1, 4, 2, 8)

TEXT = st.text(
    st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), min_size=1, max_size=12
)


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    before = env.change(values)
    try:
        yield
    finally:
        env.change(before)


@pytest.mark.parametrize("variable", env.ALL, ids=lambda v: v.name)
def test_empty_means_unset(variable: env.Variable) -> None:
    for value in (None, ""):
        with environment(**{variable.name: value}):
            assert variable.get() == variable.default


def test_an_empty_backend_forces_none_and_an_empty_log_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    empty = {variable.name: "" for variable in env.ALL}
    with environment(**empty), testing.backends_used() as used:
        flash4_torch.attention(X, X, X)
    assert used == {("attention", "cpu"): 1}
    assert capsys.readouterr() == ("", "")


def test_the_choices_are_what_there_is() -> None:
    assert env.BACKEND.choices == tuple(backend.name for backend in backends.PRIORITY)
    assert set(env.ARCH.choices) == set(arch.NAMES)


@given(variable=st.sampled_from([v for v in env.ALL if v.choices]), value=TEXT)
def test_a_value_is_a_choice_or_named(variable: env.Variable, value: str) -> None:
    with environment(**{variable.name: value}):
        if value in variable.choices:
            assert variable.get() == value
            return
        with pytest.raises(RangeError) as failure:
            variable.get()
    assert failure.value.argument == variable.name and failure.value.value == repr(value)
    assert all(choice in str(failure.value) for choice in variable.choices)


@given(variable=st.sampled_from([v for v in env.ALL if v.is_folder]), value=TEXT)
def test_a_folder_is_absolute_or_named(variable: env.Variable, value: str) -> None:
    """Otherwise kernels would be loaded from whatever working directory a process happens to have."""
    with environment(**{variable.name: value}):
        if value[0] in "/~":
            assert variable.get() == value
        else:
            with pytest.raises(RangeError, match=f"^{variable.name} is .*absolute path"):
                variable.get()


def test_what_is_not_used_may_be_wrong() -> None:
    """FLASH4_ARCH is for the emulator, which does not serve unless it is asked to."""
    with (
        environment(FLASH4_ARCH="nope", FLASH4_BACKEND=None, FLASH4_LOG=None),
        testing.backends_used() as used,
    ):
        flash4_torch.attention(X, X, X, softcap=2.0)
        assert flash4_torch.support(X, X, X)["tiled"] == []
    assert used == {("attention", "tiled"): 1}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("FLASH4_BACKND", "FLASH4_BACKEND"),
        ("FLASH4_CACHEDIR", "FLASH4_CACHE_DIR"),
        ("FLASH4_LOGS", "FLASH4_LOG"),
    ],
)
def test_a_misspelt_variable_is_noticed(name: str, meant: str) -> None:
    with environment(**{name: "x"}):
        (sentence,) = env.misspelt()
    assert sentence == f"{name} is none of these; did you mean {meant}?"


def test_variables_of_others_are_their_own() -> None:
    with environment(FLASH4_TEST_ALL="1", FLASH4_CUTLASS_EXAMPLES="/x", FLASH5_BACKEND="x"):
        assert env.misspelt() == []
