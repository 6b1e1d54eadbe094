"""Environment variables with values that they cannot take, and the calls that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import flash4_torch
from flash4_torch import compile as layer
from flash4_torch import env
from flash4_torch.backends.compiled import SM90A
from flash4_torch.compile import Key, aot, cache
from flash4_torch.errors import ExportError, RangeError
from flash4_torch.testing import emulate

from . import Case

X = torch.randn(1, 4, 2, 8)
CU = torch.tensor([0, 4], dtype=torch.int32)
LONGEST = {"max_seqlen_q": 4, "max_seqlen_k": 4}
KEY = Key("flash4_torch.kernels.nowhere:nothing", (), "sm_90a")


def under(values: dict[str, str], call: Callable[[], object]) -> Callable[[], object]:
    """`call` with these variables set."""

    def made() -> object:
        before = env.change(values)
        try:
            return call()
        finally:
            env.change(before)

    return made


def attend() -> object:
    return flash4_torch.attention(X, X, X)


def attend_backward() -> object:
    x = X.clone().requires_grad_()
    return flash4_torch.attention(x, x, x).sum().backward()


def attend_varlen() -> object:
    return flash4_torch.attention_varlen(X[0], X[0], X[0], cu_seqlens_q=CU, cu_seqlens_k=CU, **LONGEST)


def attend_as_torch() -> object:
    return flash4_torch.scaled_dot_product_attention(X, X, X)


def attend_in_a_module() -> object:
    return flash4_torch.MultiheadAttention(8, 2, batch_first=True)(X[0], X[0], X[0], need_weights=False)


def open_a_device() -> object:
    with emulate.device():
        return None


def warm_up() -> object:
    return flash4_torch.warmup("sm_90a", head_dims=[64], features=["plain"], gradients=False)


ATTENDING = (attend, attend_backward, attend_varlen, attend_as_torch, attend_in_a_module)


def _backends() -> Iterator[Case]:
    for call in ATTENDING:
        yield _case(
            env.BACKEND,
            "nope",
            call,
            "one of ['cpu', 'sm90', 'sm100', 'sm80', 'sdpa', 'efficient', 'tiled', 'emulator']",
        )
    for value, words in {
        "TILED": "did you mean tiled?",
        " tiled": "did you mean tiled?",
        "cpu,tiled": "one of ['cpu'",
        "emulate": "did you mean emulator?",
        "sm_90a": "did you mean sm90?",
        "0": "one of ['cpu'",
        "none": "one of ['cpu'",
        "*": "one of ['cpu'",
    }.items():
        yield _case(env.BACKEND, value, attend, words)


def _logs() -> Iterator[Case]:
    for call in ATTENDING:
        yield _case(env.LOG, "anything", call, "it must be one of ['backend', 'config']")
    for value in ("backends", "BACKEND", "1", "true", "0", "debug", "backend,all"):
        yield _case(env.LOG, value, attend, "it must be one of ['backend', 'config']")


def _archs() -> Iterator[Case]:
    for value in ("nope", "sm_75", "sm_90", "sm_120", "SM_100A", "hopper", "100", "sm_90a,sm_100a"):
        words = "it must be one of ['sm_80', 'sm_86', 'sm_87', 'sm_89', 'sm_90a', 'sm_100a'"
        yield _case(env.ARCH, value, open_a_device, words)
        yield _case(env.ARCH, value, attend, words, {env.BACKEND.name: "emulator"})


def _folders() -> Iterator[Case]:
    for value in ("x", ".", "..", "./cache", "cache/flash4", " /tmp", "$HOME/x", "file:///tmp"):
        yield _case(env.CACHE_DIR, value, cache.folder, "absolute path")
        yield _case(env.AOT_DIR, value, lambda: aot.find(KEY), "absolute path")
    yield _case(env.CACHE_DIR, "x", warm_up, "absolute path")
    for value in ("/dev/null", "/dev/null/x", "/proc/x"):
        yield _case(env.CACHE_DIR, value, warm_up, "must be a folder that can be written to", shown=False)


def _exports() -> Iterator[Case]:
    for value in ("/nonexistent", "/dev/null", "/proc", "/nonexistent/deeper"):
        for call in (lambda: aot.find(KEY), lambda: layer.function(SM90A.forward, ("bad input",), "sm_90a")):
            values = {env.AOT_DIR.name: value}
            yield Case(f"{env.AOT_DIR.name}={value}", under(values, call), ExportError, value)


def _case(
    variable: env.Variable,
    value: str,
    call: Callable[[], object],
    words: str,
    more: dict[str, str] | None = None,
    shown: bool = True,
) -> Case:
    """The error names the variable and its value, then says what is allowed."""
    name = f"{variable.name}={value!r} in {call.__name__.strip('<>')}"
    values = {variable.name: value, **(more or {})}
    begins = f"{variable.name} is {value!r}, but " if shown else f"{variable.name} is {value}"
    return Case(name, _naming(begins, under(values, call)), RangeError, words)


def _naming(begins: str, call: Callable[[], object]) -> Callable[[], object]:
    def made() -> object:
        try:
            return call()
        except RangeError as error:
            assert str(error).startswith(begins), error
            raise

    return made


CASES = [*_backends(), *_logs(), *_archs(), *_folders(), *_exports()]
