"""torch's own flex_attention on our operator: opt-in, equal to torch's and to ours, gone when removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

import flash4_torch
from flash4_torch.integrations import torch_flex as door
from flash4_torch.testing import backends_used
from flex_mods import H, drawn_mask

# torch's function warns that it is not compiled, and that return_lse is old.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]
SERVED = {("flex_attention", "tiled"): 1}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def call(S: int = 20) -> tuple[list[Tensor], Tensor]:
    """(query, key, value), and a bias that learns."""
    shapes = (2, H, S, 8), (2, 2, S, 8), (2, 2, S, 6)
    tensors = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    return tensors, torch.randn(H, dtype=torch.float64).requires_grad_()


def attend(tensors: list[Tensor], bias: Tensor, function: Any = None, **options: Any) -> Any:
    S = tensors[0].shape[2]
    block_mask = flash4_torch.create_block_mask(drawn_mask(5, 2, 9), 2, H, S, S, "cpu", 16)
    options = {"enable_gqa": True, "return_lse": True, **options}
    score_mod = lambda score, b, h, i, j: score * bias[h] + (i - j) * 0.1  # noqa: E731
    return (function or flex_attention)(*tensors, score_mod, block_mask, **options)


def agree(ours: Any, theirs: Any, wanted: list[Tensor]) -> None:
    upstream = [torch.randn_like(x) for x in theirs]
    grads = [torch.autograd.grad(results, wanted, upstream) for results in (ours, theirs)]
    for x, y in zip((*ours, *grads[0]), (*theirs, *grads[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("backend", ["AUTO", "FLASH"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_torchs_function_gives_what_ours_gives(backend: str, is_compiled: bool) -> None:
    """Out, lse and all gradients, also of what functions capture, which torch's FLASH backend refuses."""
    tensors, bias = call()
    function = torch.compile(flex_attention, backend="aot_eager", fullgraph=True) if is_compiled else None
    with door.register(), backends_used() as used:
        theirs = attend(tensors, bias, function, kernel_options={"BACKEND": backend})
    assert used == SERVED
    agree(attend(tensors, bias, flash4_torch.flex_attention), theirs, [*tensors, bias])


@pytest.mark.parametrize("is_compiled", [False, True])
def test_narrower_keys_and_values_are_converted(is_compiled: bool) -> None:
    """torch takes them, without gradients; what is wider than query is refused."""
    (q, *others), _ = call()
    query = q.detach().float().requires_grad_()
    narrow = [
        x.detach().to(dtype).requires_grad_()
        for x, dtype in zip(others, (torch.half, torch.bfloat16), strict=True)
    ]
    options: dict[str, Any] = {"enable_gqa": True, "return_lse": True}
    run = torch.compile(flex_attention, backend="aot_eager") if is_compiled else flex_attention
    with door.register():
        theirs = run(query, *narrow, **options)
        with pytest.raises(Exception, match="or be narrower"):
            run(query.detach().half(), *(x.detach().float() for x in others), **options)
    ours = flash4_torch.flex_attention(query, *narrow, **options)
    wide = flash4_torch.flex_attention(query, *(x.float() for x in narrow), **options)
    upstream = [torch.randn_like(x) for x in ours]
    wanted = [query, *narrow]
    sides = [(*x, *torch.autograd.grad(x, wanted, upstream)) for x in (theirs, ours, wide)]
    for x, y, z in zip(*sides, strict=True):
        torch.testing.assert_close(x, y)
        torch.testing.assert_close(y, z)


def test_autocast_decides_on_dtypes() -> None:
    tensors = [x.detach().float() for x in call()[0]]
    with door.register(), torch.autocast("cpu", torch.bfloat16):
        found = flex_attention(*tensors, enable_gqa=True)
    assert found.dtype == torch.bfloat16
    narrow = [x.bfloat16() for x in tensors]
    torch.testing.assert_close(found, flash4_torch.flex_attention(*narrow, enable_gqa=True))


def test_what_was_compiled_before_is_compiled_anew() -> None:
    """A graph is of the operator that was there; after removal it is torch's again."""
    (tensors, bias), counter = call(), CompileCounterWithBackend("eager")
    compiled = torch.compile(flex_attention, backend=counter, fullgraph=True)
    counts = []
    for is_on in (False, True, False):
        registration = door.register() if is_on else None
        with backends_used() as used:
            attend([x.detach() for x in tensors], bias.detach(), compiled)
        counts.append(sum(used.values()))
        if registration is not None:
            registration.remove()
    assert counts == [0, 1, 0]


def test_registrations_nest_and_end_once() -> None:
    stock = torch_flex.flex_attention_hop
    outer, inner = door.register(), door.register()
    outer.remove()
    outer.remove()
    assert torch_flex.flex_attention_hop is not stock
    inner.remove()
    assert torch_flex.flex_attention_hop is stock


@pytest.mark.parametrize("backend", ["TRITON", "TRITON_DECODE"])
def test_other_backends_stay_torchs(backend: str) -> None:
    tensors, bias = call()
    plain = [x.detach() for x in tensors], bias.detach()
    with door.register(), backends_used() as used:
        theirs = attend(*plain, kernel_options={"BACKEND": backend})
    assert not used
    for x, y in zip(theirs, attend(*plain, flash4_torch.flex_attention), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    "given", [{}, {"score_mod": lambda s, b, h, i, j: s + i}], ids=["plain", "score_mod"]
)
def test_calls_without_a_mask_have_no_table(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own mask of everything is left out, so that kernels visit no lists."""
    tensors, _ = call()
    seen: list[Any] = []
    stock = door.attend_heads_first

    def recorded(q: Tensor, k: Tensor, v: Tensor, functions: Any, *rest: Any) -> Any:
        seen.append(functions.block_mask)
        return stock(q, k, v, functions, *rest)

    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(door, "attend_heads_first", recorded)
    with door.register():
        out = flex_attention(*tensors, **given, enable_gqa=True)
    assert seen == [None]
    ours = flash4_torch.flex_attention(*tensors, **given, enable_gqa=True)
    torch.testing.assert_close(out, ours, rtol=1e-12, atol=1e-12)


def test_max_scores_are_torchs() -> None:
    """Our function's, since torch's refuses to give them on a CPU; rows that see nothing have -inf."""
    (q, k, v), bias = call()
    mask: Callable[..., Tensor] = lambda b, h, i, j: (i != 3) & (i >= j)  # noqa: E731
    block_mask = flash4_torch.create_block_mask(mask, None, None, 20, 20, "cpu", 8)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score * bias[h] - (i - j).abs()

    places = torch.arange(2)[:, None, None, None], torch.arange(H)[:, None, None], torch.arange(20)[:, None]
    places = (*places, torch.arange(20))
    scores = score_mod(q @ k.repeat_interleave(2, 1).transpose(2, 3) / 8**0.5, *places)
    expected = scores.masked_fill(~mask(*places), -torch.inf).amax(-1)
    for function in (
        flash4_torch.flex_attention,
        torch.compile(flash4_torch.flex_attention, backend="aot_eager", fullgraph=True),
    ):
        out, aux = function(
            q, k, v, score_mod, block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True)
        )
        assert out.requires_grad and aux.lse.requires_grad and not aux.max_scores.requires_grad
        torch.testing.assert_close(aux.max_scores, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.autograd.grad((out, aux.lse), [q, bias], (torch.ones_like(out), torch.zeros_like(aux.lse)))
    _, aux = flash4_torch.flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(max_scores=True))
    assert aux.lse is None and aux.max_scores.shape == (2, H, 20)
