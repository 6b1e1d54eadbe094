"""The operators as torch.library sees them: its own checks pass, and fakes return like the real ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.library import opcheck
from torch.utils._pytree import tree_map_only

import flash4_torch
from cases import Case, cases, laid_out
from everything import one_of
from flash4_torch import ops
from flash4_torch.errors import DoubleBackwardError
from flash4_torch.reference.scoring import working_dtype

FORWARD = ("attention", "attention_varlen", "attention_weights")
LAYOUTS = ("contiguous", "heads_first", "sliced")


@dataclass(frozen=True)
class CallOptions:
    """The options of a call besides its q, k and v."""

    mask: str = ""
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    sinks: bool = False
    flag: bool = False
    """`deterministic`, or `average_heads` of the weights."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        return 0.3, self.left, self.right, self.softcap, self.dropout_p, self.flag

    @property
    def rng_state(self) -> Tensor | None:
        return torch.tensor([5, 7]) if self.dropout_p else None

    @property
    def scored_by(self) -> tuple[Tensor | None, Tensor | None]:
        """The sinks of four heads, and the RNG state."""
        return torch.randn(4).requires_grad_() if self.sinks else None, self.rng_state


VARIANTS = {
    "plain": CallOptions(),
    "window, softcap": CallOptions(left=2, right=-1, softcap=2.0, flag=True),
    "float mask, dropout": CallOptions(mask="float", dropout_p=0.3, flag=True),
    "bool mask": CallOptions(mask="bool", right=0),
    "sinks": CallOptions(sinks=True, right=0),
}


def attn_mask(kind: str, shape: tuple[int, ...]) -> Tensor | None:
    bias = torch.randn(shape)
    return {"": None, "bool": bias > 0, "float": bias.requires_grad_()}[kind]


def forward_arguments(name: str, options: CallOptions, layout: str) -> tuple[Any, ...]:
    """A small call of a forward operator: grouped heads, Sq != Sk, D != Dv."""
    if name == "attention_varlen":
        q, k, v = (
            laid_out((1, T, H, D), torch.float32, layout, seed)[0].detach().requires_grad_()
            for seed, (T, H, D) in enumerate([(5, 4, 8), (7, 2, 8), (7, 2, 6)])
        )
        lengths = torch.tensor([0, 3, 3, 5]), torch.tensor([0, 4, 6, 7])
        return q, k, v, *lengths, *options.scored_by, 3, 4, *options.arguments
    q, k, v = (
        laid_out((2, S, H, D), torch.float32, layout, seed)
        for seed, (S, H, D) in enumerate([(5, 4, 8), (7, 2, 8), (7, 2, 6)])
    )
    mask = attn_mask(options.mask, (1, 4, 5, 7))
    if name == "attention_weights":
        return q, k, torch.randn(2, 4, 5) + 2.0, None, mask, *options.scored_by, *options.arguments
    return q, k, v, mask, *options.scored_by, *options.arguments


def backward_arguments(name: str, forward: tuple[Any, ...], layout: str) -> tuple[Any, ...]:
    """The backward operator's call that follows a forward one; nothing in it requires a gradient."""
    forward = without_grad(forward)
    results = operator(name)(*forward)
    if name == "attention_weights":
        return torch.randn_like(results), *forward, forward[4] is not None and forward[4].dtype != torch.bool
    out, lse, *low = results
    low = [x if x.numel() else None for x in low]
    if out.dim() == 4:
        dout = laid_out(tuple(out.shape), out.dtype, layout, 9).detach()
    else:
        dout = laid_out((1, *out.shape), out.dtype, layout, 9)[0].detach()
    saved = dout, torch.randn_like(lse), *forward[:3], out, lse, *low, *forward[3:]
    if name == "attention_varlen":
        return saved
    return *saved, forward[3] is not None and forward[3].dtype != torch.bool


def operator(name: str) -> Any:
    return getattr(torch.ops.flash4, name).default


def without_grad(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tree_map_only(Tensor, Tensor.detach, arguments)


def with_grad(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tree_map_only(Tensor, lambda x: x.requires_grad_() if x.is_floating_point() else x, arguments)


variants = pytest.mark.parametrize("variant", one_of(2, list(VARIANTS)))
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def served(name: str, variant: str) -> CallOptions:
    """The variant's options, as far as the operator has them."""
    options = VARIANTS[variant]
    return CallOptions(**{**vars(options), "mask": ""}) if name == "attention_varlen" else options


@pytest.mark.parametrize("name", FORWARD)
@layouts
@variants
def test_forward_operators_with_grad(name: str, layout: str, variant: str) -> None:
    arguments = forward_arguments(name, served(name, variant), layout)
    assert arguments[0].requires_grad
    opcheck(operator(name), arguments)


@pytest.mark.parametrize("name", FORWARD)
@layouts
@variants
def test_forward_operators_without_grad(name: str, layout: str, variant: str) -> None:
    opcheck(operator(name), without_grad(forward_arguments(name, served(name, variant), layout)))


@pytest.mark.parametrize("name", FORWARD)
@layouts
@variants
def test_backward_operators(name: str, layout: str, variant: str) -> None:
    forward = forward_arguments(name, served(name, variant), layout)
    opcheck(operator(f"{name}_backward"), backward_arguments(name, forward, layout))


@pytest.mark.parametrize("name", FORWARD)
def test_backward_operators_with_grad_refuse_a_second_derivative(name: str) -> None:
    forward = forward_arguments(name, served(name, "float mask, dropout"), "contiguous")
    arguments = with_grad(backward_arguments(name, forward, "contiguous"))
    backward = operator(f"{name}_backward")
    opcheck(backward, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    with pytest.raises(DoubleBackwardError):
        backward(*arguments)[0].sum().backward()


def strides(x: Tensor) -> list[int]:
    """Strides of dimensions longer than 1; inductor looks at no others either."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and x.numel()]


def assert_fake_is_like_real(name: str, arguments: tuple[Any, ...]) -> None:
    """Runs an operator for real and on fakes of its arguments; compares shapes, dtypes and strides."""
    real = operator(name)(*arguments)
    mode = FakeTensorMode()
    with mode:
        fake = operator(name)(*tree_map_only(Tensor, mode.from_tensor, arguments))
    real, fake = ((x,) if isinstance(x, Tensor) else x for x in (real, fake))
    for r, f in zip(real, fake, strict=True):
        assert (f.shape, f.dtype, strides(f)) == (r.shape, r.dtype, strides(r))
        assert r.is_contiguous()


def band_of(case: Case) -> tuple[int | None, int | None]:
    left, right = case.kwargs["window"]
    return left, 0 if case.kwargs["causal"] else right


@given(cases(), st.sampled_from([0.0, 0.5]), st.booleans())
def test_fakes_of_dense_operators(case: Case, dropout_p: float, flag: bool) -> None:
    mask = case.kwargs["attn_mask"]
    mask = None if mask is None else mask[(None,) * (4 - mask.dim())]
    rng_state = ops.draw_rng_state(case.q.device) if dropout_p else None
    options = (0.3, *band_of(case), case.kwargs["softcap"], dropout_p, flag)
    options = (mask, case.kwargs["sinks"], rng_state, *options)
    lse = case.q.new_zeros(*case.q.shape[:3], dtype=working_dtype(case.q.dtype)).transpose(1, 2)
    for name, inputs in {
        "attention": (case.q, case.k, case.v),
        "attention_weights": (case.q, case.k, lse, None),
    }.items():
        arguments = without_grad((*inputs, *options))
        assert_fake_is_like_real(name, arguments)
        assert_fake_is_like_real(f"{name}_backward", backward_arguments(name, arguments, "contiguous"))


@given(cases(attn_mask=None), st.lists(st.integers(0, 40), max_size=3), st.sampled_from([0.0, 0.5]))
def test_fakes_of_varlen_operators(case: Case, cuts: list[int], dropout_p: float) -> None:
    q, k, v = (x.detach().flatten(0, 1) for x in (case.q, case.k, case.v))
    Tq, Tk = q.shape[0], k.shape[0]
    lengths = (torch.tensor([0, *sorted(min(cut, T) for cut in cuts), T]) for T in (Tq, Tk))
    rng_state = ops.draw_rng_state(q.device) if dropout_p else None
    options = (0.3, *band_of(case), case.kwargs["softcap"], dropout_p, False)
    arguments = (q, k, v, *lengths, case.kwargs["sinks"], rng_state, Tq, Tk, *options)
    assert_fake_is_like_real("attention_varlen", arguments)
    backward = backward_arguments("attention_varlen", arguments, "contiguous")
    assert_fake_is_like_real("attention_varlen_backward", backward)


def test_lengths_that_are_left_out_need_no_values() -> None:
    """A fake tensor raises if its values are read, which on a GPU would be where the host waits."""
    with FakeTensorMode():
        x, ends = torch.empty(7, 2, 8), torch.tensor([0, 3, 7])
        calls: list[dict[str, Any]] = [{}, {"max_seqlen_k": 4}, {"max_seqlen_q": 4, "return_lse": True}]
        for lengths in calls:
            results = flash4_torch.attention_varlen(x, x, x, cu_seqlens_q=ends, cu_seqlens_k=ends, **lengths)
            assert (results[0] if "return_lse" in lengths else results).shape == x.shape
        with pytest.raises(DataDependentOutputException):
            flash4_torch.attention_varlen(
                x, x, x, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=ends.diff().max()
            )
