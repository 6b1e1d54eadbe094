"""What the host passes is what compiled kernels take: stand-ins of kernels could take anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import compiled_files
import flash4_torch
from everything import EVERYTHING
from flash4_torch import compile, env
from flash4_torch.backends.compiled import SM90A, SM100A, Target
from flash4_torch.backends.compiled.targets import SM80
from flash4_torch.ops import schema
from on_cpu import gpu
from test_compiled import half

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")


def small_step() -> None:
    q, k, v = (half(1, 128, 2, 64).requires_grad_() for _ in range(3))
    for _ in range(3):  # prepared launches pass arguments of their own
        flash4_torch.attention(q, k, v).sum().backward()


def masked_step() -> None:
    q, k, v = (half(2, 128, 4, 64).requires_grad_() for _ in range(3))
    mask = torch.rand(2, 1, 128, 128) < 0.9
    for _ in range(3):
        flash4_torch.attention(q, k, v, attn_mask=mask).sum().backward()


def signed_weights() -> None:
    q, k = half(2, 64, 2, 64), half(2, 64, 2, 64)
    lse, state = torch.zeros(2, 2, 64), torch.tensor([3, 5])
    options = 0.125, None, None, 0.0, 0.1
    schema.attention_weights_signed(q, k, lse, None, None, None, state, *options)


@pytest.mark.parametrize("call", [*([small_step] if EVERYTHING else []), masked_step, signed_weights])
@pytest.mark.parametrize(
    "target", [SM90A, *([SM100A, SM80] if EVERYTHING else [])], ids=lambda target: target.arch
)
def test_compiled_kernels_take_what_is_passed(
    target: Target,
    call: Callable[[], None],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that such a kernel has to say of a call is that its tensors are not on a GPU."""
    folder = compiled_files.folder_of_all_workers(tmp_path_factory)
    monkeypatch.setenv(env.CACHE_DIR.name, str(folder / "kernels"))
    compiled, passed = compile.function, []
    with gpu(target):
        stand_in = compile.function

        def recording(entry: str, static: tuple[Any, ...], arch: str) -> compile.Function:
            function = stand_in(entry, static, arch)

            def launch(*args: Any) -> None:
                passed.append(((entry, static, arch), args))
                function(*args)

            return launch

        with mock.patch.object(compile, "function", recording):
            call()
    assert passed
    for key, args in passed:
        with pytest.raises(ValueError, match="device_type"):
            compiled(*key)(*args)
