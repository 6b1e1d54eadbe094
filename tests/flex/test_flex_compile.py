"""flex_attention under torch.compile, checkpointing and autocast, against its eager self."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported, UserError
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

import flash4_torch
from everything import EVERYTHING
from flex_mods import H

# torch 2.11's inductor imports a module that uses TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


class Biased(nn.Module):
    """A layer with a learned bias, a number that may change, and a mask over documents."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(H, 64, dtype=torch.float64))
        self.gain = 0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: Any = None) -> Any:
        S, column = q.shape[2], q[0, :, :, 0]

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            near = torch.where(i - j < S // 2, 0.1 * S, 0.0)
            far = torch.where(j < column.shape[1] // 3, column[h, i], 0.0)
            return score * self.gain + self.table.exp()[h, (i - j).abs()] + near + far

        return flash4_torch.flex_attention(q, k, v, score_mod, block_mask, return_lse=True)


def call(S: int) -> list[Tensor]:
    return [torch.randn(2, H, S, 8, dtype=torch.float64).requires_grad_() for _ in range(3)]


def agree(model: Biased, other: Callable[..., Any], S: int, block_mask: Any = None) -> None:
    inputs = call(S)
    expected, found = model(*inputs, block_mask), other(*inputs, block_mask)
    upstream = [torch.randn_like(x) for x in expected]
    wanted = [*inputs, model.table]
    grads = [torch.autograd.grad(results, wanted, upstream) for results in (expected, found)]
    for x, y in zip((*expected, *grads[0]), (*found, *grads[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def masked(S: int) -> Any:
    document = torch.arange(64) // 9
    return flash4_torch.create_block_mask(
        lambda b, h, i, j: document[i] == document[j], None, None, S, S, "cpu", 16
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_graphs_do_not_break(backend: str) -> None:
    """Gradients of what a function captures come through, too, and new lengths compile once."""
    torch._dynamo.reset()
    model, counter = Biased(), CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for S in (20, 33, 41, 18):
        agree(model, compiled, S)
    assert counter.frame_count == 2
    agree(model, compiled, 33, masked(33))
    assert counter.frame_count == 3


@pytest.mark.skipif(not EVERYTHING, reason="a C++ compiler takes half a minute; FLASH4_TEST_ALL=1 runs it")
def test_inductor_agrees() -> None:
    torch._dynamo.reset()
    model = Biased()
    with fresh_cache():
        agree(model, torch.compile(model, fullgraph=True), 20, masked(20))


def test_compiled_functions_make_block_masks() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        S = q.shape[2]
        block_mask = flash4_torch.create_block_mask(
            lambda b, h, i, j: (i - j) % 5 < 3, None, None, S, S, q.device, 16
        )
        return flash4_torch.flex_attention(q, k, v, None, block_mask)

    torch._dynamo.reset()
    compiled, inputs = torch.compile(attend, backend="eager", fullgraph=True), call(33)
    torch.testing.assert_close(compiled(*inputs), attend(*inputs))


def test_a_size_that_decides_on_a_shape_is_fixed() -> None:
    """Another one is another program, and compiles again."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        S = q.shape[2]

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            ramp = torch.arange(S, dtype=torch.float64) / S
            return score + (ramp[i] - ramp).abs().sum()

        return flash4_torch.flex_attention(q, k, v, score_mod)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True)
    for S in (5, 7):
        inputs = call(S)
        torch.testing.assert_close(compiled(*inputs), attend(*inputs))
    assert counter.frame_count == 2


def loaded_again(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    return torch.export.load(file)


class Doubled(nn.Module):
    """Scores that need nothing beside them: while they are traced the graph gets no operation."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash4_torch.flex_attention(q, k, v, lambda score, b, h, i, j: score * 2)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_a_graph_has_no_trace_of_tracing() -> None:
    """Torch could not load an empty region of autocast or of no gradients."""
    inputs = tuple(x.detach() for x in call(20))
    exported = loaded_again(torch.export.export(Doubled(), inputs, strict=False))
    torch.testing.assert_close(exported.module()(*inputs), Doubled()(*inputs))


@pytest.mark.parametrize("strict", [True, False])
# The exporter reads a deprecated attribute of its own, and that of torch 2.11 a buffer of bytes.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_exported_programs_serve_other_lengths(strict: bool) -> None:
    model, S = Biased(), torch.export.Dim("S", min=4, max=60)
    inputs = [x.detach() for x in call(20)]
    exported = torch.export.export(model, tuple(inputs), dynamic_shapes=[{2: S}] * 3, strict=strict)
    exported = loaded_again(exported)
    names = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert names.count("flash4.flex_attention.default") == 1
    inputs = [x.detach() for x in call(37)]
    for x, y in zip(exported.module()(*inputs), model(*inputs), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_size_inside_of_a_captured_computation_is_fixed() -> None:
    """The exporter says so, rather than keep the shape of its example."""

    class Flat(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            first = q[0, 0, :, :2]
            return flash4_torch.flex_attention(
                q, q, q, lambda s, b, h, i, j: s + first.chunk(2)[1][i // 2, 0]
            )

    S = torch.export.Dim("S", min=4, max=60)
    with pytest.raises(UserError, match="specialized it to be a constant"):
        torch.export.export(Flat(), (call(20)[0].detach(),), dynamic_shapes=[{2: S}], strict=False)


def bessel(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.special.i0(score)  # here


def gambles(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score * torch.rand((), dtype=torch.float64)  # here


@pytest.mark.parametrize("function, operation", [(bessel, "aten.i0.default"), (gambles, "aten.rand.default")])
def test_what_cannot_be_traced_is_named_with_its_line(function: Any, operation: str) -> None:
    """The line is the user's in a compiled function, too: Dynamo has kept it."""
    torch._dynamo.reset()
    compiled = torch.compile(flash4_torch.flex_attention, backend="eager", fullgraph=True)
    with pytest.raises(Unsupported) as caught:
        compiled(*call(9), function)
    message = str(caught.value)
    assert "TraceError" in message and operation in message and function.__name__ in message
    assert Path(__file__).name in message and "# here" in message


def test_fakes_and_meta_tensors_compute_nothing() -> None:
    q = torch.randn(2, H, 12, 8)
    slopes = torch.rand(H)
    with FakeTensorMode() as mode:
        fake, learned = mode.from_tensor(q), torch.empty(H, requires_grad=True)
        out = flash4_torch.flex_attention(fake, fake, fake, lambda score, b, h, i, j: score * learned[h])
    assert isinstance(out, FakeTensor) and out.shape == q.shape and out.requires_grad
    q, slopes = q.to("meta"), slopes.to("meta")
    out = flash4_torch.flex_attention(q, q, q, lambda score, b, h, i, j: score * slopes[h])
    assert out.is_meta and out.shape == q.shape


def test_recomputed_activations_agree() -> None:
    model = Biased()
    agree(model, lambda *inputs: checkpoint(model, *inputs, use_reentrant=False), 20, masked(20))


def test_autocast_casts_the_inputs() -> None:
    """A function's own operations are not cast, also what it makes of captured tensors alone."""
    q, k, v = (x.detach().float() for x in call(20))
    gain = torch.rand(H, H)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + (gain @ gain)[h, j % H]

    torch._dynamo.reset()
    compiled: Any = torch.compile(flash4_torch.flex_attention, backend="aot_eager", fullgraph=True)
    narrow = flash4_torch.flex_attention(*(x.bfloat16() for x in (q, k, v)), score_mod)
    for attend in (flash4_torch.flex_attention, compiled):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attend(q, k.bfloat16(), v, score_mod)
        assert out.dtype == torch.bfloat16 and torch.equal(out, narrow)
