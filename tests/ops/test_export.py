"""torch.export and AOTInductor: saved, loaded and run at other lengths than the one that was traced."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import flash4_torch
from everything import one_of
from flash4_torch import testing

pytestmark = [
    # The archive's reader makes tensors of bytes it only reads (torch 2.11).
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
    # Copying a program instantiates a class that torch itself deprecates.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    # torch 2.11's inductor imports a module that uses TorchScript.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

H, D = 2, 8
LENGTHS = (1, 6, 33)


class Dense(nn.Module):
    """Attention over (B, S, E) between projections, in place of a user's model."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.project = nn.Linear(H * D, 3 * H * D)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).unbind(-3)
        return flash4_torch.attention(q, k, v, **self.options).flatten(-2)


class Packed(Dense):
    """The same over (T, E), two sequences in one."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).unbind(-3)
        out = flash4_torch.attention_varlen(
            q, k, v, cu_seqlens_q=lengths, cu_seqlens_k=lengths, **self.options
        )
        return out.flatten(-2)


def dense_inputs(S: int, B: int = 2) -> tuple[Tensor]:
    return (torch.randn(B, S, H * D),)


def packed_inputs(T: int) -> tuple[Tensor, Tensor]:
    return torch.randn(T, H * D), torch.tensor([0, T // 3, T])


def exported(model: nn.Module, inputs: tuple[Tensor, ...], shapes: Any, **options: Any) -> ExportedProgram:
    return torch.export.export(model, inputs, dynamic_shapes=shapes, **options)


def saved_and_loaded(program: ExportedProgram, folder: Path) -> ExportedProgram:
    torch.export.save(program, folder / "model.pt2")
    return torch.export.load(folder / "model.pt2")


def calls(program: ExportedProgram) -> list[str]:
    """Our operators that the program's graph calls."""
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return [target for target in targets if target.startswith("flash4.")]


@pytest.mark.parametrize("strict", [False, True])
def test_dense(tmp_path: Path, strict: bool) -> None:
    model = Dense(causal=True, window=(3, None), softcap=2.0)
    program = exported(model, dense_inputs(6), ({0: Dim("B"), 1: Dim("S")},), strict=strict)
    loaded = saved_and_loaded(program.run_decompositions(), tmp_path)
    assert calls(loaded) == ["flash4.attention.default"]
    for S in LENGTHS:
        inputs = dense_inputs(S, B=3)
        torch.testing.assert_close(loaded.module()(*inputs), model(*inputs))


def test_varlen(tmp_path: Path) -> None:
    model = Packed(causal=True)
    program = exported(model, packed_inputs(6), ({0: Dim("T", min=2)}, None))
    loaded = saved_and_loaded(program, tmp_path)
    assert calls(loaded) == ["flash4.attention_varlen.default"]
    for T in LENGTHS[1:]:
        inputs = packed_inputs(T)
        torch.testing.assert_close(loaded.module()(*inputs), model(*inputs))


def test_dropout_draws_in_the_graph(tmp_path: Path) -> None:
    """The program generates the RNG state, which is not baked in: seeds govern it, and calls differ."""
    model = Dense(dropout_p=0.5)
    loaded = saved_and_loaded(exported(model, dense_inputs(6), ({1: Dim("S")},)), tmp_path).module()
    (x,) = dense_inputs(9)
    torch.manual_seed(3)
    first, second = loaded(x), loaded(x)
    torch.manual_seed(3)
    torch.testing.assert_close(first, model(x))
    assert not torch.equal(first, second)


def test_trains_after_export() -> None:
    model = Dense(causal=True)
    program = exported(model, dense_inputs(6), ({1: Dim("S")},)).module()
    (x,) = dense_inputs(9)
    actual = torch.autograd.grad(program(x).sin().sum(), list(program.parameters()))
    expected = torch.autograd.grad(model(x).sin().sum(), list(model.parameters()))
    torch.testing.assert_close(actual, expected)


def test_aot_inductor_package(tmp_path: Path) -> None:
    """Compiled code without Python calls back to our operator, which lives in the process that loads it."""
    model = Dense(causal=True).eval()
    with torch.no_grad():
        program = exported(model, dense_inputs(6), ({1: Dim("S", min=2)},))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        loaded = torch._inductor.aoti_load_package(package)
        for S in LENGTHS[1:]:
            inputs = dense_inputs(S)
            with testing.backends_used() as used:
                actual = loaded(*inputs)
            assert sum(used.values()) == 1
            torch.testing.assert_close(actual, model(*inputs))


MASKS = ("padding", "padding attn_mask", "padding causal", "attn_mask", "causal", "none")


@pytest.mark.parametrize(
    "B, batch_first, masks, appended",
    one_of(5, list(itertools.product((2, 5), (True, False), MASKS, (False, True)))),
)
def test_module_whose_length_may_be_its_batch(B: int, batch_first: bool, masks: str, appended: bool) -> None:
    module = flash4_torch.MultiheadAttention(8, 2, batch_first=batch_first, add_zero_attn=appended).eval()
    length = Dim("length", min=2)

    def arguments(S: int) -> dict[str, Any]:
        x = torch.randn(B, S, 8) if batch_first else torch.randn(S, B, 8)
        call: dict[str, Any] = {"query": x, "key": x, "value": x}
        if "padding" in masks:
            call["key_padding_mask"] = torch.arange(S) >= torch.full((B, 1), S - 1)
        if "attn_mask" in masks or "causal" in masks:
            call["attn_mask"] = torch.ones(S, S, dtype=torch.bool).triu(1)
        if "causal" in masks:
            call["is_causal"] = True
        return call

    tokens = {1 if batch_first else 0: length}
    shapes: dict[str, Any] = {"key_padding_mask": {1: length}, "attn_mask": {0: length, 1: length}}
    shapes |= dict.fromkeys(("query", "key", "value"), tokens) | {"is_causal": None}
    call = arguments(7)
    program = torch.export.export(
        module, (), call, dynamic_shapes={name: shapes[name] for name in call}
    ).module()
    for S in (2, 5, 7):
        again = arguments(S)
        torch.testing.assert_close(program(**again), module(**again))
