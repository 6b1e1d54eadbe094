"""Tracing: keys that say what a function does, and errors that say where it does what a kernel cannot."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flash4_torch
from flash4_torch.errors import ArgumentError, DeviceError, DtypeError, ShapeError, TraceError
from flash4_torch.flex import table
from flash4_torch.flex.derive import derivative
from flash4_torch.flex.program import Ref, parse
from flash4_torch.flex.trace import MASK, SCORE, Traced, trace
from flash4_torch.reference import programs
from flex_mods import MASKS, MODS, H, Mod, Sizes

CPU = torch.device("cpu")
TABLE = torch.rand(4, 5)


def scored(function: Mod) -> Traced:
    return trace(function, SCORE, CPU)


def softcapped(cap: float, table: Tensor) -> Mod:
    return lambda score, b, h, i, j: torch.where(i - j < int(cap * 100), torch.tanh(score / cap), table[h, 0])


def test_values_are_no_part_of_the_key() -> None:
    """New numbers, tensors and sizes need nothing new; the numbers arrive as arguments."""
    traced = [scored(softcapped(2.0, torch.rand(4, 5))), scored(softcapped(3.5, torch.rand(7, 2)))]
    assert traced[0].program == traced[1].program and traced[0].program.key == traced[1].program.key
    assert traced[0].scalars != traced[1].scalars and {2.0, 200.0} <= set(traced[0].scalars)


def test_what_a_function_does_is_its_key() -> None:
    functions: list[Mod] = [
        lambda score, b, h, i, j: score + i,
        lambda score, b, h, i, j: score + j,
        lambda score, b, h, i, j: score - i,
        lambda score, b, h, i, j: score**2,
        lambda score, b, h, i, j: score**3,
        lambda score, b, h, i, j: score + TABLE[h, i],
        lambda score, b, h, i, j: score + TABLE[i, h],
        lambda score, b, h, i, j: score + TABLE.double()[i, h],
        lambda score, b, h, i, j: score + TABLE[i].sum(),
        lambda score, b, h, i, j: score + TABLE[i, :3].sum(),
    ]
    assert len({scored(function).program.key for function in functions}) == len(functions)


def test_where_a_function_keeps_tensors_does_not_matter() -> None:
    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(TABLE)

        def forward(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + self.table[h, i]

    def given(x: Tensor, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + x[h][i]

    closed: Mod = lambda score, b, h, i, j: score + TABLE[h, i]  # noqa: E731
    found = [scored(f) for f in (Bias(), functools.partial(given, TABLE), closed)]
    assert len({x.program.key for x in found}) == 1
    assert all(x.tensors[0].data_ptr() == TABLE.data_ptr() for x in found)


@pytest.mark.parametrize("make", [*MODS, *MASKS], ids=lambda f: f.__name__)
def test_programs_are_text_and_in_the_table(make: Any) -> None:
    """A text says all of a program, of its derivative too, and both keep to the table."""
    if make in MASKS:
        found = [trace(make(Sizes(64)), MASK, CPU).program]
    else:
        traced = scored(make(Sizes(64)).mod)
        found = [traced.program]
        wanted = tuple(x.requires_grad for x in traced.tensors)
        derived = derivative(traced.program, wanted)
        found.append(derived.program)
        for tensor, node in derived.gathers:
            assert wanted[tensor] and node.args[0] == Ref(derived.program.first_tensor + tensor)
            indices = [x for x in node.args[1:] if isinstance(x, Ref)]
            assert set(indices) <= set(derived.program.outputs)
    for program in found:
        assert parse(program.text()) == program
        assert {node.op for node in program.nodes} <= set(table.OPERATIONS)


@pytest.mark.parametrize("op", sorted(table.ARITHMETIC | table.COMPARISONS | table.LOGIC))
def test_every_elementwise_operation_has_a_reference(op: str) -> None:
    x = torch.tensor([True, False])
    number = x.int() + 1 if op.startswith("bitwise") else x + 1.5
    arguments = (number,) if op == "logical_not" else (number, number)
    assert programs.function_of(op)(*arguments).shape == (2,)


@pytest.mark.parametrize("op", sorted(table.FLOATING | table.UNARY))
def test_every_function_has_a_reference_and_a_derivative(op: str) -> None:
    """Traced by its name in torch, it agrees with torch in value and slope."""
    if op == "bitwise_not":
        return
    function: Callable[[Tensor], Tensor] = getattr(torch, op)
    x = torch.linspace(0.1, 0.9, 6, dtype=torch.float64).requires_grad_()

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return function(score) * 1.0

    program = trace(modify, SCORE, CPU, torch.float64).program
    assert op in {node.op for node in program.nodes}
    lanes = [torch.zeros(1, 1, 1, 1, dtype=torch.int32)] * 4
    scalars = programs.scalar_tensors(program, [1.0] * len(program.scalars), CPU)
    inputs = [x.detach().view(1, 1, 1, 6), *lanes]
    (found,) = programs.evaluate(program, inputs, [], scalars)
    expected = function(x) * 1.0
    assert torch.allclose(found.flatten(), expected.double(), rtol=1e-14)
    derived = derivative(program, ()).program
    ones = torch.ones(1, 1, 1, 6, dtype=torch.float64)
    slope, *_ = programs.evaluate(derived, [*inputs, ones], [], scalars)
    if expected.requires_grad:
        (expected,) = torch.autograd.grad(expected.sum(), x)
    else:
        expected = torch.zeros(6)
    assert torch.allclose(slope.expand(1, 1, 1, 6).flatten(), expected.double(), rtol=1e-13)


def test_constant_exponents_stay_constant() -> None:
    """A derivative holds no power of a computed exponent, which would need a logarithm of the score."""
    program = scored(lambda score, b, h, i, j: score**3 + (score + 1) ** 2).program
    for found in (program, derivative(program, ()).program):
        for node in found.nodes:
            if node.op == "pow":
                exponent = found.node(node.args[1])
                assert exponent is not None and exponent.op == "constant"


def branches(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    if score > 0:  # here
        return score
    return -score


def prints(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    print(score)  # here
    return score


def formats(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    assert f"{i}"  # here
    return score


def gambles(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + torch.rand(())  # here


def writes(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    TABLE[0] += 1  # here
    return score


def reads(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + TABLE[0, 0].item()  # here


def counts(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score * int(i)  # here


def bessel(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    allowed = torch.special.i0(TABLE)[h, 0]
    return torch.special.i0(score) + allowed  # here


def indexes_sums(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + (TABLE[h] * TABLE[j])[i]  # here


def masks_by_rows(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + TABLE[0, torch.arange(2) + i].sum()  # here


def sorts(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return TABLE[h].sort()[0][0] + score  # here


def lists(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + TABLE.tolist()[0][0]  # here


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()  # here

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def rounds(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return StraightThrough.apply(score)


def gathers(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + TABLE[0].gather(0, i.long().reshape(1))[0]  # here


def reads_bits(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + score.view(torch.int32)  # here


def adds_far(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + (i + 2**40)  # here


def counts_rows(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + F.embedding(i, TABLE, scale_grad_by_freq=True)[0]  # here


@pytest.mark.parametrize(
    "function, operation",
    [
        (rounds, "torch.autograd.Function"),
        (gathers, "aten.gather.default"),
        (reads_bits, "aten.view.dtype"),
        (adds_far, "aten.add.Tensor"),
        (counts_rows, "aten.embedding.default"),
        (branches, "a tensor's value"),
        (lists, "a tensor's values (tolist())"),
        (prints, "printing"),
        (formats, "printing"),
        (gambles, "aten.rand.default"),
        (writes, "aten.add_.Tensor"),
        (reads, "a tensor's value"),
        (counts, "a tensor's value"),
        (bessel, "aten.i0.default"),
        (sorts, "aten.sort.default"),
        (indexes_sums, "aten.index.Tensor"),
        (masks_by_rows, "aten.index.Tensor"),
    ],
)
def test_what_cannot_be_traced_is_named_with_its_line(function: Mod, operation: str) -> None:
    before = TABLE.clone()
    with pytest.raises(TraceError) as caught:
        scored(function)
    assert operation in caught.value.operation
    assert caught.value.where.startswith(__file__) and caught.value.where.endswith("# here")
    assert function.__name__ in str(caught.value) and torch.equal(TABLE, before)


def test_results_of_the_wrong_kind_are_refused() -> None:
    wrong: list[tuple[Any, str, type[Exception]]] = [
        (lambda score, b, h, i, j: 3, SCORE, ArgumentError),
        (lambda score, b, h, i, j: i, SCORE, DtypeError),
        (lambda score, b, h, i, j: score + TABLE[h], SCORE, ArgumentError),
        (lambda b, h, i, j: i, MASK, DtypeError),
        (lambda b, h, i, j: True, MASK, ArgumentError),
    ]
    for function, kind, error in wrong:
        with pytest.raises(error, match=kind):
            trace(function, kind, CPU)


def test_a_users_own_error_is_passed_on() -> None:
    with pytest.raises(ZeroDivisionError):
        scored(lambda score, b, h, i, j: score * (1 // 0))


def test_bad_calls_are_named() -> None:
    q = torch.randn(2, H, 9, 8)
    k = torch.randn(2, 2, 9, 8)
    mask = flash4_torch.create_block_mask(lambda b, h, i, j: i >= j, None, None, 9, 9, "cpu")
    longer = flash4_torch.create_block_mask(lambda b, h, i, j: i >= j, 3, None, 12, 9, "cpu")
    wide = flash4_torch.create_block_mask(lambda b, h, i, j: i >= j, 3, None, 9, 9, "cpu")
    call: Any = flash4_torch.flex_attention
    bad: list[tuple[str, type[Exception], Callable[[], Any]]] = [
        ("enable_gqa=True", ShapeError, lambda: call(q, k, k)),
        ("4 dimensions", ShapeError, lambda: call(q[0], k, k)),
        ("query's dtype", DtypeError, lambda: call(q, k.double(), k, enable_gqa=True)),
        ("query's dtype", DtypeError, lambda: call(q, k, k.int(), enable_gqa=True)),
        ("key is", DtypeError, lambda: call(q.half(), k.bfloat16(), k.half(), enable_gqa=True)),
        ("query", DtypeError, lambda: call(q.int(), k, k, enable_gqa=True)),
        ("query's device", DeviceError, lambda: call(q, k.to("meta"), k, enable_gqa=True)),
        ("block_mask is for lengths", ShapeError, lambda: call(q, q, q, block_mask=longer)),
        ("block_mask is", ShapeError, lambda: call(q, q, q, block_mask=wide)),
        ("kernel_options", ArgumentError, lambda: call(q, q, q, kernel_options=3)),
        ("score_mod is Tensor", ArgumentError, lambda: call(q, q, q, q)),
        ("its last dimension", ShapeError, lambda: call(q, q[..., :4], q)),
        ("sliced", RuntimeError, lambda: call(q, q, q, block_mask=mask[:, :, :1])),
    ]
    for message, error, function in bad:
        with pytest.raises(error, match=message):
            function()
