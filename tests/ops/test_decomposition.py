"""The operators decomposed into torch's own: equal to them, and what torch.onnx.export makes of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim

import flash4_torch
from everything import one_of
from flash4_torch import ops
from flash4_torch.errors import ArgumentError

H, D = 2, 4
FLASH4 = torch.ops.flash4


def compare(name: str, *args: Any) -> None:
    op = getattr(FLASH4, name).default
    expected, actual = op(*args), ops.decompositions[op](*args)
    if isinstance(expected, Tensor):
        expected, actual = (expected,), (actual,)
    assert len(actual) == len(expected)
    for x, y in zip(actual, expected, strict=True):
        assert x.is_contiguous() == y.is_contiguous()
        torch.testing.assert_close(x, y)


@st.composite
def scorings(draw: st.DrawFn) -> tuple[Any, ...]:
    """scale, window_left, window_right, softcap, dropout_p"""
    bound = st.one_of(st.none(), st.integers(-3, 6))
    return draw(st.floats(-2, 2)), draw(bound), draw(bound), draw(st.sampled_from([0.0, 0.7, 30.0])), 0.0


@st.composite
def masks(draw: st.DrawFn, B: int, Hq: int, Sq: int, Sk: int) -> Tensor | None:
    kind = draw(st.sampled_from(["none", "bool", "float", "half"]))
    if kind == "none":
        return None
    mask = torch.randn([draw(st.sampled_from([1, n])) for n in (B, Hq, Sq, Sk)])
    if kind == "bool":
        return mask > 0
    mask = mask.masked_fill(mask > 1, -torch.inf)
    return mask.half() if kind == "half" else mask.double().masked_fill(mask.double() < -1, -1e9)


@given(st.data())
def test_dense(data: st.DataObject) -> None:
    B, Sq, Sk = (data.draw(st.integers(1, 5)) for _ in range(3))
    Hk, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    q, k, v = (
        torch.randn(B, S, heads, width, dtype=dtype)
        for S, heads, width in ((Sq, Hk * group, D), (Sk, Hk, D), (Sk, Hk, 3))
    )
    mask, scoring = data.draw(masks(B, Hk * group, Sq, Sk)), data.draw(scorings())
    sinks = torch.randn(Hk * group, dtype=dtype) if data.draw(st.booleans()) else None
    compare("attention", q, k, v, mask, sinks, None, *scoring, False)
    _, lse, low = FLASH4.attention.default(q, k, v, mask, sinks, None, *scoring, False)
    low = low if low.numel() else None
    compare("attention_weights", q, k, lse, low, mask, sinks, None, *scoring, data.draw(st.booleans()))


@given(st.data())
def test_varlen(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4))
    (Tq, Tk), cu = (
        (sum(n) for n in zip(*lengths, strict=True)),
        [torch.tensor([0, *n], dtype=torch.int32).cumsum(0).int() for n in zip(*lengths, strict=True)],
    )
    q, k, v = (torch.randn(T, heads, D, dtype=torch.float64) for T, heads in ((Tq, 4), (Tk, 2), (Tk, 2)))
    if Tk:
        sinks = torch.randn(4, dtype=torch.float64) if data.draw(st.booleans()) else None
        compare("attention_varlen", q, k, v, *cu, sinks, None, 4, 4, *data.draw(scorings()), False)


def test_dropout_is_refused() -> None:
    q = torch.randn(1, 2, H, D)
    state = ops.draw_rng_state(q.device)
    with pytest.raises(ArgumentError, match=r"dropout_p is 0\.5, .* eval\(\)"):
        ops.decompositions[FLASH4.attention.default](
            q, q, q, None, None, state, 1.0, None, None, 0.0, 0.5, False
        )


# Exported programs


class Dense(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.view(*x.shape[:-1], 3, H, D).unbind(-3)
        return flash4_torch.attention(q, k[:, :, :1], v[:, :, :1], causal=True, window=(2, None))


class Packed(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = x.view(*x.shape[:-1], 3, H, D).unbind(-3)
        options: dict[str, Any] = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
        longest = x.shape[0]
        return flash4_torch.attention_varlen(
            q, k, v, max_seqlen_q=longest, max_seqlen_k=longest, causal=True, **options
        )


class SDPA(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return flash4_torch.scaled_dot_product_attention(x, x, x)


class Module(nn.Module):
    """The module, called with the masks that `masks` names, in that order."""

    def __init__(self, masks: str = "", need_weights: bool = False, **options: Any) -> None:
        super().__init__()
        self.masks, self.need_weights = masks.split(), need_weights
        self.attention = flash4_torch.MultiheadAttention(H * D, H, **options).eval()

    def forward(self, x: Tensor, *masks: Tensor) -> Any:
        named = dict(zip([name.partition(":")[0] for name in self.masks], masks, strict=True))
        causal = "attn_mask:causal" in self.masks
        out, weights = self.attention(
            x, x, x, **named, is_causal=causal, need_weights=self.need_weights, average_attn_weights=False
        )
        return (out, weights) if self.need_weights else out

    def inputs(self, S: int) -> tuple[Tensor, ...]:
        later = torch.ones(S, S, dtype=torch.bool).triu(1)
        made = {
            "key_padding_mask": torch.arange(S) >= torch.tensor([[S], [S - 1]]),
            "attn_mask:causal": later,
            "attn_mask:bool": later.T,
            "attn_mask:float": torch.randn(S, S),
        }
        x = torch.randn(2, S, H * D) if self.attention.batch_first else torch.randn(S, 2, H * D)
        return x, *(made[name] for name in self.masks)

    def shapes(self, S: Any) -> tuple[Any, ...]:
        return {1 if self.attention.batch_first else 0: S}, *(
            {1: S} if name == "key_padding_mask" else {0: S, 1: S} for name in self.masks
        )


def packed_inputs(T: int) -> tuple[Tensor, Tensor]:
    return torch.randn(T, 3 * H * D), torch.tensor([0, T // 2, T], dtype=torch.int32)


S = Dim("S", min=2)
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]], Any]] = {
    "dense": (Dense, lambda n: (torch.randn(2, n, 3 * H * D),), ({1: S},)),
    "packed": (Packed, packed_inputs, ({0: S}, None)),
    "sdpa": (SDPA, lambda n: (torch.randn(2, H, n, D),), ({2: S},)),
}
for _masks in (
    "",
    "key_padding_mask",
    "attn_mask:causal",
    "attn_mask:bool",
    "attn_mask:float",
    "key_padding_mask attn_mask:bool",
    "key_padding_mask attn_mask:causal",
):
    for _weights in (False, True):
        _model = Module(_masks, _weights, batch_first=not _masks.endswith("bool"))
        _make = partial(lambda model: model, _model)
        PROGRAMS[f"module {_masks} {_weights}"] = (_make, _model.inputs, _model.shapes(S))


def kernels(program: torch.export.ExportedProgram) -> set[str]:
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    return {target for target in targets if target.startswith("flash4.")}


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


# Copying a program instantiates a class that torch itself deprecates.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["dense", "packed", "module key_padding_mask attn_mask:causal True"])
def test_program_takes_the_operators_apart(name: str) -> None:
    make, inputs, shapes = PROGRAMS[name]
    model = make()
    program = torch.export.export(model, inputs(6), dynamic_shapes=forwarded(model, shapes))
    # torch.onnx.export reads this table; other exporters do not.
    table = torch._decomp.decomposition_table
    assert all(table[op] is not None for op in ops.decompositions)
    assert kernels(program) and kernels(program.run_decompositions()) == kernels(program)
    apart = program.run_decompositions({op: table[op] for op in ops.decompositions})
    assert not kernels(apart)
    for n in (2, 6, 9):
        given_ = inputs(n)
        for x, y in zip(as_tuple(apart.module()(*given_)), as_tuple(model(*given_)), strict=True):
            torch.testing.assert_close(x, y)


def forwarded(model: nn.Module, shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """`shapes` as torch.export wants them for the signature (x, *masks)."""
    return (shapes[0], shapes[1:]) if isinstance(model, Module) and shapes[1:] else shapes


def warns_of_itself(test: Callable[..., None]) -> Callable[..., None]:
    """The exporters use much of torch that torch deprecates, and warn of every size that they freeze."""
    for kind in ("DeprecationWarning", "FutureWarning", "UserWarning", "torch.jit.TracerWarning"):
        test = pytest.mark.filterwarnings(f"ignore::{kind}")(test)
    return test


@warns_of_itself
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("name", one_of(3, list(PROGRAMS)))
def test_onnx(tmp_path: Path, name: str, dynamo: bool) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    runtime = pytest.importorskip("onnxruntime")
    make, inputs, shapes = PROGRAMS[name]
    model = make().eval()
    file = str(tmp_path / "model.onnx")
    names = [f"input{i}" for i in range(len(shapes))]
    if dynamo:
        torch.onnx.export(
            model, inputs(6), file, dynamo=True, verbose=False, dynamic_shapes=forwarded(model, shapes)
        )
    else:
        axes = {name: dict.fromkeys(dims, "S") for name, dims in zip(names, shapes, strict=True) if dims}
        axes = {name: dict(dims) for name, dims in axes.items()}
        torch.onnx.export(model, inputs(6), file, dynamo=False, input_names=names, dynamic_axes=axes)
    session = runtime.InferenceSession(file)
    for n in (6, 2, 9):
        tensors = inputs(n)
        if dynamo:
            feed = dict(zip([x.name for x in session.get_inputs()], tensors, strict=True))
        else:
            # A mask that is not read is no input.
            wanted = {x.name for x in session.get_inputs()}
            feed = {name: x for name, x in zip(names, tensors, strict=True) if name in wanted}
        results = session.run(None, {name: x.numpy() for name, x in feed.items()})
        for x, y in zip(results, as_tuple(model(*tensors)), strict=True):
            torch.testing.assert_close(torch.from_numpy(x), y.detach(), rtol=1e-4, atol=1e-5)


@warns_of_itself
@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx_refuses_dropout(tmp_path: Path, dynamo: bool) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    model = Module(batch_first=True, dropout=0.5)
    model.attention.train()
    mode = {} if dynamo else {"training": torch.onnx.TrainingMode.TRAINING}
    with pytest.raises(Exception) as caught:
        torch.onnx.export(model, model.inputs(6), str(tmp_path / "x.onnx"), dynamo=dynamo, **mode)
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, ArgumentError):
        error = error.__cause__ or error.__context__
    assert error is not None and "export the model in eval()" in str(error)
