"""Nested inputs without gradients: in their own memory, as a batch, and the same bits as in any other way."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flash4_torch import fast_path, ops, testing
from flash4_torch.attend import PackedRequest, Request
from flash4_torch.fast_path import Door, Returned
from flash4_torch.nn import MultiheadAttention, multihead, ragged
from flash4_torch.nn.ragged import Ragged
from flash4_torch.problem import CallOptions

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")

E, H = 16, 2
LENGTHS = [[5], [4, 4, 4], [3, 6, 1], [3, 0, 5], [0, 0], [0]]
lengths = pytest.mark.parametrize("lengths", LENGTHS)


def nested(lengths: list[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nested.nested_tensor([torch.randn(n, E, generator=generator).to(dtype) for n in lengths])


def module(dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> MultiheadAttention:
    torch.manual_seed(0)
    return MultiheadAttention(E, H, dropout, batch_first=True, dtype=dtype).train(dropout > 0.0)


def same(a: Tensor, b: Tensor) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.unbind(), b.unbind(), strict=True))


def called(attention: MultiheadAttention, *call: Tensor) -> Tensor:
    torch.manual_seed(1)
    return attention(*call, need_weights=False)[0]


def packed(attention: MultiheadAttention, *call: Tensor) -> Tensor:
    """The output by packed copies of the sequences."""
    copies = mock.patch.object(ragged, "_rows_in_place", return_value=None)
    with copies, mock.patch.object(Ragged, "length", None):
        return called(attention, *call)


@given(
    st.sampled_from(LENGTHS),
    st.one_of(st.none(), st.integers(1, 7)),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.sampled_from([0.0, 0.5]),
)
def test_the_same_bits(lengths: list[int], keys: int | None, dtype: torch.dtype, dropout: float) -> None:
    """Self-attention and other keys; twice, because the second call may be a prepared one."""
    query = nested(lengths, dtype)
    key = query if keys is None else nested([keys] * len(lengths), dtype, seed=1)
    attention = module(dtype, dropout)
    with torch.no_grad():
        expected = packed(attention, query, key, key)
        for _ in range(2):
            out = called(attention, query, key, key)
            assert same(out, expected) and out.is_contiguous()
            assert out._nested_tensor_size().equal(query._nested_tensor_size())


@lengths
def test_sequences_are_not_copied(lengths: list[int]) -> None:
    x = nested(lengths)
    copied = Ragged("x", x.requires_grad_()).values
    assert copied.requires_grad and (copied.data_ptr() != x.values().data_ptr() or not sum(lengths))
    with torch.no_grad():
        found = Ragged("x", x)
        assert found.values.data_ptr() == x.values().data_ptr() and found.values.shape == (sum(lengths), E)
        assert found.lengths == lengths and found.max_seqlen == max(lengths)
        assert found.cu_seqlens.tolist() == [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        assert found.length == (lengths[0] if lengths[0] and len({*lengths}) == 1 else None)


def _transposed(lengths: list[int]) -> tuple[Tensor, Tensor]:
    columns = [torch.randn(E, n) for n in lengths]
    return torch.nested.nested_tensor(columns).transpose(1, 2), torch.nested.nested_tensor(
        [x.t().contiguous() for x in columns]
    )


def _of_larger_memory(lengths: list[int]) -> tuple[Tensor, Tensor]:
    x = nested(lengths)
    layout = x._nested_tensor_size(), x._nested_tensor_strides(), x._nested_tensor_storage_offsets()
    memory = torch.cat([x.values(), torch.full((3 * E,), torch.nan)])
    return torch._nested_view_from_buffer(memory, *layout), x


def _with_gaps(lengths: list[int]) -> tuple[Tensor, Tensor]:
    wide = torch.nested.nested_tensor([torch.randn(n, 3 * E) for n in lengths])
    part = wide.chunk(3, -1)[1]
    return part, torch.nested.nested_tensor([x.clone() for x in part.unbind()])


@pytest.mark.parametrize("make", [_transposed, _of_larger_memory, _with_gaps])
@pytest.mark.parametrize("lengths", [[5], [4, 4], [3, 6, 1]])
def test_memory_in_another_order(make: Any, lengths: list[int]) -> None:
    odd, usual = make(lengths)
    with torch.no_grad():
        assert Ragged("x", odd).values.data_ptr() != odd.values().data_ptr()
        out, _ = module()(odd, odd, odd, need_weights=False)
        expected, _ = module()(usual, usual, usual, need_weights=False)
    assert same(out, expected)


def test_sequences_of_several_widths() -> None:
    x = torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(4, 4)])
    with torch.no_grad(), pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        Ragged("x", x)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_a_batch(grad: bool, dropout: float) -> None:
    """Gradients and dropout are those of packed sequences."""
    x, attention = nested([4, 4]), module(dropout=dropout)
    with (
        mock.patch.object(multihead, "Request", side_effect=Request) as request,
        torch.set_grad_enabled(grad),
    ):
        attention(x, x, x, need_weights=False)
    assert request.called != (grad or dropout > 0.0)


@lengths
def test_results_may_change_in_place(lengths: list[int]) -> None:
    x, factor = nested(lengths), nested(lengths, seed=1).requires_grad_()
    with torch.no_grad():
        out, _ = module()(x, x, x, need_weights=False)
    before = [y.clone() for y in out.unbind()]
    out.mul_(factor)
    (grad,) = torch.autograd.grad(out.values().sum(), factor)
    assert all(torch.equal(a, b) for a, b in zip(grad.unbind(), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    x = nested([4, 4])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype != torch.float32):
        with torch.no_grad():
            out, _ = module()(x, x, x, need_weights=False)
        expected, _ = module()(x, x, x, need_weights=False)
    assert out.dtype == dtype and same(out, expected.detach())


@pytest.mark.parametrize(("lengths", "operator"), [([4, 4], "attention"), ([4, 3], "attention_varlen")])
def test_who_observes_sees_the_operator(lengths: list[int], operator: str) -> None:
    x, attention = nested(lengths), module()
    with torch.no_grad():
        for _ in range(2):
            attention(x, x, x, need_weights=False)
        with testing.backends_used() as used:
            attention(x, x, x, need_weights=False)
    assert used[operator, "cpu"] == 1


# Packed sequences on the fast path, which a CPU has none of


def _request() -> PackedRequest:
    q, ends = torch.empty(7, H, 8, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
    return PackedRequest(Door("some", varlen=True), q, q, q, ends, ends, 4, 4, CallOptions(0.5))


def test_packed_sequences_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    q, ends = torch.randn(7, H, 8), torch.tensor([0, 4, 7], dtype=torch.int32)
    monkeypatch.setattr(fast_path, "lookup", None)
    assert (
        PackedRequest(*_request()[:1], q, q, q, ends, ends, 4, 4, CallOptions(0.5)).served().shape == q.shape
    )


def test_packed_sequences_take_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    request, lookup, record = _request(), mock.Mock(), mock.Mock()
    monkeypatch.setattr(fast_path, "lookup", lookup)
    monkeypatch.setattr(fast_path, "record", record)
    lookup.return_value = "signature", None
    assert request.served().shape == (7, H, 8)
    signature, door, inputs, options, max_seqlens, returned = record.call_args.args
    assert (signature, door, options, max_seqlens) == ("signature", request.door, request.options, (4, 4))
    assert inputs.cu_seqlens_q is request.cu_seqlens_q and inputs.cu_seqlens_k is request.cu_seqlens_k
    assert returned == Returned(lse=False)

    prepared = mock.Mock()
    lookup.return_value = None, prepared
    monkeypatch.setattr(ops, "attention_varlen", None)
    assert request.served() is prepared.run.return_value
    beside = request.cu_seqlens_q, request.cu_seqlens_k, None
    prepared.run.assert_called_once_with(request.q, request.k, request.v, *beside)
    assert lookup.call_args.args == (
        request.door,
        request.q,
        request.k,
        request.v,
        beside,
        (*request.options, 4, 4),
    )
