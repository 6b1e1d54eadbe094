"""Programs as kernels compute them: every operation of the table and every spelling, against plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
import program_kernel
import test_flex_spellings as spellings
from everything import EVERYTHING, examples, one_of
from flash4_torch.flex import table
from flash4_torch.flex.program import Node, Program, Ref, TensorType
from flash4_torch.flex.trace import SCORE, trace
from flash4_torch.kernels.common.lowering import LIBRARY, MOST_NUMBERS, Layout, Level, limits, lower
from program_kernel import COLUMNS, FIRST_KEY, ROWS, Case, expected, on_device

ARCHS = ["sm_90a", "sm_100a"]
INPUTS = ("float32", "int32", "int32", "int32", "int32")
ROW, COLUMN = Ref(3), Ref(4)
HALVES = ("float16", "bfloat16") if EVERYTHING else ("bfloat16",)
FLOATS = ("float32", "float64")
INTEGERS = ("int32", "int64", "uint8", "int8", "int16") if EVERYTHING else ("int32",)
ONLY_INTEGERS = frozenset(op for op in table.ARITHMETIC | table.UNARY if op.startswith("bitwise"))
ONLY_FLOATS = frozenset(["div", "pow", "atan2"])
DIVISIONS = frozenset(["div_floor", "div_trunc", "remainder", "fmod"])
NUMBERS = [0.0, -0.0, 0.3, -0.7, 1.0, -1.0, 2.5, -3.5, 7.0, 31.25, -100.0, 1e-30, 3e38]
SPECIAL = [float("inf"), -float("inf"), float("nan")]


def dtypes_of(op: str) -> Iterator[str]:
    if op not in ONLY_INTEGERS:
        yield "float32"
        if EVERYTHING or op in DIVISIONS:
            yield from ("float64", *HALVES) if op not in LIBRARY | {"pow"} else ()
    if op not in ONLY_FLOATS | table.FLOATING:
        yield from INTEGERS
    if op in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "maximum", "minimum"):
        yield "bool"


def elementwise(op: str, dtype: str, operands: int) -> Program:
    """The operation, of an element by row, one by column, and one by both."""
    tensors = [TensorType(dtype, 1), TensorType(dtype, 1), TensorType(dtype, 2)][:operands]
    places = [(ROW,), (COLUMN,), (ROW, COLUMN)]
    nodes = [Node("gather", (Ref(5 + i), *places[i]), dtype) for i in range(operands)]
    found = tuple(Ref(5 + operands + i) for i in range(operands))
    is_bool = op in table.COMPARISONS | table.LOGIC
    nodes.append(Node(op, found, "bool" if is_bool else dtype))
    return Program(INPUTS, tuple(tensors), (), tuple(nodes), (Ref(5 + 2 * operands),))


def conversion(source: str, dtype: str) -> Program:
    nodes = (Node("gather", (Ref(5), ROW), source), Node("convert", (Ref(6),), dtype))
    return Program(INPUTS, (TensorType(source, 1),), (), nodes, (Ref(7),))


def choice(op: str, dtype: str) -> Program:
    """where or clamp."""
    first = "bool" if op == "where" else dtype
    tensors = TensorType(first, 1), TensorType(dtype, 1), TensorType(dtype, 2)
    places = [(ROW,), (COLUMN,), (ROW, COLUMN)]
    nodes = [Node("gather", (Ref(5 + i), *places[i]), tensors[i].dtype) for i in range(3)]
    nodes.append(Node(op, (Ref(8), Ref(9), Ref(10)), dtype))
    return Program(INPUTS, tensors, (), tuple(nodes), (Ref(11),))


BINARY = table.ARITHMETIC | table.COMPARISONS | (table.LOGIC - {"logical_not"})
UNARY = table.FLOATING | table.UNARY | {"logical_not"}
OPERATIONS = {
    **{f"{op} {d}": elementwise(op, d, 2) for op in sorted(BINARY) for d in dtypes_of(op)},
    **{f"{op} {d}": elementwise(op, d, 1) for op in sorted(UNARY) for d in dtypes_of(op)},
    **{f"{x} to {y}": conversion(x, y) for x in ("float32", "float64", "int64", "bool", "int8")
       for y in (*HALVES, *FLOATS, *INTEGERS, "bool")},
    **{f"{op} {d}": choice(op, d) for op in ("where", "clamp") for d in (*FLOATS, *HALVES, "int32", "uint8")},
}  # fmt: skip
_SHAPES = {1: (ROWS + FIRST_KEY,), 2: (ROWS, FIRST_KEY + COLUMNS)}


def values(name: str, program: Program, seed: int) -> tuple[Tensor, ...]:
    """Captured tensors for an operation, of numbers at which it is defined."""
    generator = torch.Generator().manual_seed(seed)
    op = name.split()[0]

    def drawn(i: int, wanted: TensorType) -> Tensor:
        shape = _SHAPES[wanted.rank]
        dtype = getattr(torch, wanted.dtype)
        if not dtype.is_floating_point:
            low = 0 if wanted.dtype in ("uint8", "bool") else -9
            numbers = torch.randint(low, 10, shape, generator=generator)
            if i == 1 and (op in DIVISIONS or "shift" in op):
                numbers = numbers.abs() + (op in DIVISIONS)
                numbers = -numbers if low and seed % 2 and op in DIVISIONS else numbers
            return numbers.to(dtype)
        # What a number out of range becomes as an integer is not defined, nor are remainders of such.
        rounds = " to " in name and not program.nodes[-1].dtype.startswith(("float", "bfloat", "bool"))
        # The series of sin ends where float64 has no fraction left.
        smaller = rounds or op in DIVISIONS | {"sin", "cos", "tan"}
        pool = NUMBERS[:-1] if smaller else [*NUMBERS, *SPECIAL]
        numbers = torch.tensor(pool, dtype=torch.float64)[
            torch.randint(len(pool), shape, generator=generator)
        ]
        if program.nodes[-1].dtype in ("uint8",) and rounds:
            numbers = numbers.abs()
        if i == 1 and op in DIVISIONS:
            numbers = torch.where(numbers.abs() < 0.1, 1.5, numbers)
        return numbers.to(dtype)

    return tuple(drawn(i, wanted) for i, wanted in enumerate(program.tensors))


def close(name: str, found: Tensor, right: Tensor) -> bool:
    rounded = name.split()[1] in HALVES and name.split()[0] in table.FLOATING | {"pow"}
    tolerance = 1e-2 if rounded else 2e-6 if name.split()[0] in LIBRARY | {"pow"} else 1e-6
    # Kernels may round numbers below the normal ones to 0.
    return torch.allclose(found, right, rtol=tolerance, atol=2e-37, equal_nan=True)


@pytest.mark.parametrize("arch", one_of(2, ARCHS))
@settings(max_examples=examples(3, 40), phases=[Phase.generate])
@given(seed=st.integers(0, 1 << 20))
def test_every_operation_is_torchs(arch: str, seed: int) -> None:
    cases = [Case(program, values(name, program, seed)) for name, program in OPERATIONS.items()]
    scores = torch.zeros(ROWS, COLUMNS)
    found = on_device(cases, scores, arch, packed=False)
    wrong = []
    for name, case, x in zip(OPERATIONS, cases, found, strict=True):
        y = expected(case, scores, False)
        if not close(name, x, y):
            differs = ~torch.isclose(x, y, equal_nan=True)
            wrong.append(f"{name}: {x[differs][:3].tolist()} instead of {y[differs][:3].tolist()}")
    assert not wrong, "\n".join(wrong)


def spelled(T: Tensor, monkeypatch: pytest.MonkeyPatch) -> dict[str, Case]:
    """The spellings with that captured tensor, as far as kernels compute them."""
    monkeypatch.setattr(spellings, "T", T)
    found = {}
    for name, function in spellings.SPELLINGS.items():
        made = trace(function, SCORE, torch.device("cpu"), torch.float32, ())
        if not limits(name, made.program):
            found[name] = Case(made.program, tuple(made.tensors), tuple(made.scalars))
    return found


def check_all(cases: dict[str, Case], scores: Tensor, arch: str, packed: bool) -> None:
    found = on_device([*cases.values()], scores, arch, packed)
    for (name, case), x in zip(cases.items(), found, strict=True):
        torch.testing.assert_close(x, expected(case, scores, packed), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(("arch", "packed"), one_of(3, [(arch, p) for arch in ARCHS for p in (False, True)]))
def test_every_spelling_is_torchs(arch: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    whole = torch.linspace(-1.2, 1.7, 20 * 25)
    T = whole.view(25, 20).T if packed else whole.view(20, 25)
    cases, scores = spelled(T, monkeypatch), torch.randn(ROWS, COLUMNS)
    assert cases.keys() == spellings.SPELLINGS.keys()
    check_all(cases, scores, arch, packed)


def test_doubles_are_computed_but_for_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    T = torch.linspace(-1.2, 1.7, 20 * 25, dtype=torch.float64).view(20, 25)
    cases, scores = spelled(T, monkeypatch), torch.randn(ROWS, COLUMNS)
    assert len(spellings.SPELLINGS) > len(cases) > len(spellings.SPELLINGS) // 2
    check_all(cases, scores, "sm_90a", False)


def test_an_index_outside_of_a_tensor_is_clamped() -> None:
    """Loads of hidden scores touch nothing else; the emulator would see them."""
    inputs, tensor = INPUTS, TensorType("float32", 2)
    far = (Node("mul", (ROW, COLUMN), "int32"), Node("neg", (Ref(6),), "int32"))
    nodes = (*far, Node("gather", (Ref(5), Ref(6), Ref(7)), "float32"))
    table_ = torch.arange(12.0).view(3, 4)
    case = Case(Program(inputs, (tensor,), (), nodes, (Ref(8),)), (table_,))
    (found,) = on_device([case], torch.zeros(ROWS, COLUMNS), "sm_90a", False)
    far_away = torch.arange(ROWS)[:, None] * torch.arange(FIRST_KEY, FIRST_KEY + COLUMNS)
    behind = torch.where(far_away > 0, (4 - far_away).clamp(min=0), 0)
    assert torch.equal(found, table_[far_away.clamp(max=2), behind])


def test_values_are_computed_once_for_what_they_depend_on() -> None:
    T = torch.randn(20)

    def modify(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * (i - j) + T[h] * (i - j).abs() + T[i] * T[j] + T[i] * (h * b)

    program = trace(modify, SCORE, torch.device("cpu"), torch.float32, ()).program
    assert [node.op for node in program.nodes].count("sub") == 2

    def ops(level: Level, packed: bool) -> list[str]:
        lowering = lower(program.text(), Layout(packed))
        first = lowering.program.first_node
        return sorted(lowering.program.nodes[n - first].op for n in lowering.nodes(level))

    assert ops(Level.TILE, False) == ["convert", "gather", "mul"]
    assert ops(Level.ROW, False) == ["gather", "mul"]
    assert ops(Level.COLUMN, False) == ops(Level.COLUMN, True) == ["gather"]
    assert ops(Level.SCORE, False) == ops(Level.SCORE, True)
    # The difference of positions is one of floating numbers, made once.
    assert ops(Level.SCORE, False).count("distance") == 1
    assert not {"sub", "convert"} & set(ops(Level.SCORE, False))
    assert ops(Level.TILE, True) == []
    assert ops(Level.ROW, True) == ["convert", "gather", "gather", "mul", "mul"]


def dividing(op: str, places: tuple[tuple[Ref, ...], tuple[Ref, ...]], *after: str) -> Program:
    """A quotient of elements at those places, and what is done to it."""
    ranks = [max(len(place), 1) for place in places]
    nodes = [Node("gather", (Ref(5 + i), *(place or (0,))), "float32") for i, place in enumerate(places)]
    found = (Ref(7), Ref(8)) if op == "div" else (Ref(8),)
    nodes.append(Node(op, found, "float32"))
    for i, name in enumerate(after):
        nodes.append(Node(name, (Ref(9 + i),), "float32"))
    types = tuple(TensorType("float32", rank) for rank in ranks)
    return Program(INPUTS, types, (), tuple(nodes), (Ref(9 + len(after)),))


EVERYWHERE, PLACES = (), {"row": (ROW,), "column": (COLUMN,), "score": (ROW, COLUMN)}


@pytest.mark.parametrize("arch", one_of(2, ARCHS))
@settings(max_examples=examples(3, 40), phases=[Phase.generate])
@given(seed=st.integers(0, 1 << 20))
def test_quotients_are_torchs_and_exact_where_their_last_bit_decides(arch: str, seed: int) -> None:
    """Whatever is divided by whatever; what is rounded to an integer afterwards is not another integer."""
    torch.manual_seed(seed)
    programs, rounded = {}, {}
    for x, first in PLACES.items():
        for y, second in {"tile": EVERYWHERE, **PLACES}.items():
            programs[f"{x}/{y}"] = dividing("div", (first, second))
            rounded[f"{x}/{y}"] = dividing("div", (first, second), "neg", "floor")
    programs["1/x"] = dividing("reciprocal", ((ROW,), (ROW, COLUMN)))
    numbers = torch.tensor([*NUMBERS, *SPECIAL, 2.0**126, -(2.0**127)])

    def drawn(wanted: TensorType, pool: Tensor) -> Tensor:
        return pool[torch.randint(len(pool), _SHAPES[wanted.rank])]

    scores, integers = torch.zeros(ROWS, COLUMNS), torch.arange(1.0, 50.0)
    cases = [Case(p, tuple(drawn(t, numbers) for t in p.tensors)) for p in programs.values()]
    found = on_device(cases, scores, arch, packed=False)
    for name, case, x in zip(programs, cases, found, strict=True):
        y = expected(case, scores, False)
        is_close = torch.isclose(x, y, rtol=4e-7, atol=2e-37, equal_nan=True)
        assert is_close.all(), f"{name}: {x[~is_close].tolist()} instead of {y[~is_close].tolist()}"
    cases = []
    for p in rounded.values():
        divisor = drawn(p.tensors[1], integers)
        multiple = divisor.flatten()[0] if len(p.nodes[1].args) == 2 and p.nodes[1].args[1] == 0 else 1.0
        cases.append(Case(p, (drawn(p.tensors[0], integers) * multiple, divisor)))
    found = on_device(cases, scores, arch, packed=False)
    for name, case, x in zip(rounded, cases, found, strict=True):
        assert torch.equal(x, expected(case, scores, False)), f"floor of -{name}"


def test_distances_are_converted_once_for_a_row() -> None:
    """Positions beyond 2^24, which are no float32, are subtracted before; columns add constants."""
    seen = lower(
        trace(
            lambda s, b, h, i, j: s + (i - j).abs(), SCORE, torch.device("cpu"), torch.float32, ()
        ).program.text(),
        Layout(),
    )
    assert [node.op for node in seen.program.nodes] == ["distance", "neg", "abs", "add"]


SLOPES = torch.tensor([[0.7, -0.3, 1.4], [0.1, 2.0, -1.1]])
LINEAR: dict[str, Any] = {
    "by head": lambda s, b, h, i, j: s + SLOPES[h, 1] * (j - i),
    "from the other side": lambda s, b, h, i, j: s - (i - j) * SLOPES[h, 0] * 0.5,
    "divided": lambda s, b, h, i, j: s + (j - i) / (1.0 + SLOPES[0, h].abs()),
    "by head and row": lambda s, b, h, i, j: s + (j - i) * (SLOPES[h, 2] * i.float()),
    "of a key": lambda s, b, h, i, j: s * 0.5 + SLOPES[h, 0] * j,
    "of a key, by row": lambda s, b, h, i, j: s + (i.float() * SLOPES[1, h]) * j,
}


@pytest.mark.parametrize("packed", [False, True], ids=["one head", "packed heads"])
def test_what_is_linear_in_a_key_is_one_fma_a_score(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No product and no conversion of a distance is left for each score; values are torch's."""
    monkeypatch.setattr(program_kernel, "COLUMNS", 5)
    cases = {}
    for name, function in LINEAR.items():
        made = trace(function, SCORE, torch.device("cpu"), torch.float32, ())
        cases[name] = Case(made.program, tuple(made.tensors), tuple(made.scalars))
        lowering = lower(made.program.text(), Layout(packed))
        often = [*lowering.nodes(Level.SCORE), *lowering.nodes(Level.COLUMN)]
        ops = [lowering.program.nodes[n - lowering.program.first_node].op for n in often]
        assert ops.count("ramp") == 1
        assert not {"distance", "convert"} & set(ops)
        assert ops.count("mul") == (name == "of a key")
    check_all(cases, torch.randn(ROWS, 5), "sm_90a", packed)


def test_a_product_that_is_rounded_down_stays_one() -> None:
    made = trace(
        lambda s, b, h, i, j: s + (SLOPES[h, 0] * (j - i)).floor(),
        SCORE,
        torch.device("cpu"),
        torch.float32,
        (),
    )
    ops = [node.op for node in lower(made.program.text(), Layout()).program.nodes]
    assert "ramp" not in ops
    assert "distance" in ops


def test_what_kernels_lack_is_said() -> None:
    def reasons(function: Any) -> str:
        return " ".join(
            limits("score_mod", trace(function, SCORE, torch.device("cpu"), torch.float32, ()).program)
        )

    wide = torch.randn(9, MOST_NUMBERS)
    assert f"{MOST_NUMBERS + 2} numbers for each score" in reasons(lambda s, b, h, i, j: s + wide[i].sum())
    doubles = torch.randn(9, dtype=torch.float64)
    assert "exp in float64" in reasons(lambda s, b, h, i, j: s + doubles[i].exp())
    assert "an integer's power" in reasons(lambda s, b, h, i, j: s + i**j)
    assert reasons(lambda s, b, h, i, j: s + i**3) == ""
