"""Everything that a user's function reads, as a key: functions of equal keys are traced to equal programs.

A function is known if its code, and that of the functions it calls, does nothing but to compute with what it
is given and with closure cells, globals and defaults, which are looked up for every key: numbers, tensors,
tuples, functions of this kind, and torch's functions and methods by names that stand here. A tensor has no
values while a function is traced; what else it could tell is in the key. All else, such as an attribute of a
user's object, makes a function unknown: it is traced anew in each call.
"""

from __future__ import annotations

import dis
import functools
import math
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_OPERATIONS = frozenset(
    """BINARY_ADD BINARY_AND BINARY_FLOOR_DIVIDE BINARY_LSHIFT BINARY_MATRIX_MULTIPLY BINARY_MODULO
    BINARY_MULTIPLY BINARY_OP BINARY_OR BINARY_POWER BINARY_RSHIFT BINARY_SLICE BINARY_SUBSCR BINARY_SUBTRACT
    BINARY_TRUE_DIVIDE BINARY_XOR BUILD_LIST BUILD_SLICE BUILD_TUPLE CACHE CALL CALL_FUNCTION
    CALL_FUNCTION_EX CALL_FUNCTION_KW CALL_KW CALL_METHOD COMPARE_OP CONTAINS_OP COPY COPY_FREE_VARS DUP_TOP
    DUP_TOP_TWO END_FOR EXTENDED_ARG FOR_ITER GET_ITER IS_OP JUMP_ABSOLUTE JUMP_BACKWARD JUMP_FORWARD
    JUMP_IF_FALSE_OR_POP JUMP_IF_TRUE_OR_POP KW_NAMES LIST_APPEND LIST_EXTEND LIST_TO_TUPLE LOAD_ATTR
    LOAD_CLOSURE LOAD_CONST LOAD_DEREF LOAD_FAST LOAD_FAST_AND_CLEAR LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST
    LOAD_GLOBAL LOAD_METHOD MAKE_CELL MAKE_FUNCTION NOP POP_JUMP_BACKWARD_IF_FALSE POP_JUMP_BACKWARD_IF_NONE
    POP_JUMP_BACKWARD_IF_NOT_NONE POP_JUMP_BACKWARD_IF_TRUE POP_JUMP_FORWARD_IF_FALSE
    POP_JUMP_FORWARD_IF_NONE POP_JUMP_FORWARD_IF_NOT_NONE POP_JUMP_FORWARD_IF_TRUE POP_JUMP_IF_FALSE
    POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE POP_JUMP_IF_TRUE POP_TOP PRECALL PUSH_NULL RESUME RETURN_CONST
    RETURN_VALUE ROT_THREE ROT_TWO SET_FUNCTION_ATTRIBUTE STORE_DEREF STORE_FAST STORE_FAST_LOAD_FAST
    STORE_FAST_STORE_FAST SWAP TO_BOOL UNARY_INVERT UNARY_NEGATIVE UNARY_NOT UNARY_POSITIVE
    RERAISE UNPACK_SEQUENCE""".split()  # noqa: SIM905
)
"""CPython's operations, of 3.10 to 3.13, that touch nothing but their frame and their operands."""

_ATTRIBUTES = frozenset(
    """T abs absolute acos acosh add addcdiv addcmul all amax amin any arange asin asinh atan atan2 atanh
    bfloat16 bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor bool ceil
    chunk clamp clamp_max clamp_min clone contiguous copysign cos cosh cumsum detach device dim div dot double
    dtype e elu embedding eq erf erfc exp exp2 expand expm1 flatten float float16 float32 float64 floor
    floor_divide fmod full full_like functional gather ge gelu gt half hardsigmoid hardswish hardtanh
    index_select inf int int16 int32 int64 int8 isfinite isinf isnan le leaky_relu lerp linspace log log10
    log1p log2 logical_and logical_not logical_or logical_xor logsigmoid long lt mT masked_fill matmul max
    maximum mean min minimum mul nan ndim ne neg negative new_full new_ones new_zeros nn numel ones ones_like
    permute pi pow reciprocal relu remainder reshape round rsqrt rsub shape sigmoid sign silu sin sinh size
    softplus special sqrt square squeeze sub sum t take tan tanh tau tensor to transpose true_divide trunc
    type_as uint8 unbind unsqueeze view where zeros zeros_like""".split()  # noqa: SIM905
)
"""Attributes and methods that tell nothing of a tensor but its shape and the like, and change nothing."""

_PURE = (abs, all, any, bool, divmod, enumerate, float, int, len, list, max, min, pow, range, reversed, round)
_BUILTINS: dict[str, Any] = {f.__name__: f for f in (*_PURE, slice, sum, tuple, zip)}
_MODULES = ("torch", "torch.nn", "torch.nn.functional", "torch.special", "math")
_PLAIN = frozenset({int, bool, str, type(None), type(Ellipsis), torch.dtype, torch.device})
_DEEPEST = 16
_MOST_CODES = 4096


class _Unknown(Exception):
    """A function reads what no key can hold."""


class Reads(NamedTuple):
    key: Hashable
    tensors: tuple[Tensor, ...]
    """All tensors that are read, in an order that the key gives."""


class _Code(NamedTuple):
    """What code reads, with the functions that it defines."""

    code: types.CodeType
    """Kept here, so that no other code gets its address."""
    is_known: bool
    globals: tuple[str, ...] = ()
    attributes: frozenset[str] = frozenset()


def reads_of(function: Callable[..., Any]) -> Reads | None:
    """What a function reads now; None if it is not known, or a mode might change what it does."""
    if (
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
    ):
        return None
    found = _Found()
    try:
        key = found.value(function, 0)
        return Reads((torch.get_default_dtype(), key, found.torchs_own()), tuple(found.tensors))
    except _Unknown:
        return None


class _Found:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._names: set[str] = set()
        self._places: dict[int, int] = {}
        """Tensors and functions by their address; both live as long as the function that is asked about."""

    def value(self, x: Any, depth: int) -> Hashable:
        kind = type(x)
        if depth > _DEEPEST:
            raise _Unknown
        if kind is float:
            # 0.0 equals -0.0, and NaN not itself.
            return kind, x.hex()
        if kind in _PLAIN:
            return kind, x
        if kind is Tensor or kind is nn.Parameter:
            return self._tensor(x)
        if kind is tuple:
            return kind, *(self.value(each, depth + 1) for each in x)
        if kind is types.FunctionType:
            return self._function(x, depth)
        if kind is functools.partial and not x.__dict__:
            return kind, *(self.value(each, depth + 1) for each in (x.func, x.args, *x.keywords.items()))
        if kind is types.ModuleType and x.__name__ in _MODULES:
            return kind, x.__name__
        raise _Unknown

    def _tensor(self, x: Tensor) -> Hashable:
        place = self._places.setdefault(id(x), len(self._places))
        if not any(x is known for known in self.tensors):
            self.tensors.append(x)
        if x.layout != torch.strided or x.is_nested:
            raise _Unknown
        return type(x), place, x.shape, x.stride(), x.dtype, x.device

    def _function(self, f: types.FunctionType, depth: int) -> Hashable:
        if id(f) in self._places:
            return types.FunctionType, self._places[id(f)]
        self._places[id(f)] = len(self._places)
        code = _read(f.__code__)
        if not code.is_known or f.__dict__:
            raise _Unknown
        self._names |= code.attributes
        try:
            cells = tuple(cell.cell_contents for cell in f.__closure__ or ())
        except ValueError:
            raise _Unknown from None
        given = cells, f.__defaults__, tuple((f.__kwdefaults__ or {}).items())
        of_globals = tuple(self._global(f, name, depth + 1) for name in code.globals)
        return f.__code__, self.value(given, depth + 1), of_globals

    def _global(self, f: types.FunctionType, name: str, depth: int) -> Hashable:
        if name in f.__globals__:
            return self.value(f.__globals__[name], depth)
        function: Any = f
        of_builtins = function.__builtins__
        if name in _BUILTINS and of_builtins.get(name) is _BUILTINS[name]:
            return name
        raise _Unknown

    def torchs_own(self) -> Hashable:
        """What torch and its tensors have now under the names that are used."""
        if any(x.__dict__ and not self._names.isdisjoint(x.__dict__) for x in self.tensors):
            raise _Unknown
        holders = torch, nn, nn.functional, torch.special, math
        return tuple(
            _Same(held)
            for name in sorted(self._names)
            for held in (getattr(Tensor, name, None), *(vars(holder).get(name) for holder in holders))
        )


class _Same:
    """An object that equals itself alone, kept so that no other gets its address."""

    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.x is other.x

    def __hash__(self) -> int:
        return id(self.x)


_codes: dict[int, _Code] = {}


def _read(code: types.CodeType) -> _Code:
    found = _codes.get(id(code))
    if found is None:
        if len(_codes) >= _MOST_CODES:
            _codes.clear()
        found = _codes[id(code)] = _analysed(code)
    return found


def _analysed(code: types.CodeType) -> _Code:
    names: dict[str, None] = {}
    attributes: set[str] = set()
    for instruction in _instructions(code):
        operation, argument = instruction.opname, instruction.argval
        if operation == "LOAD_GLOBAL":
            names[argument] = None
        elif operation in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(argument)
        elif operation not in _OPERATIONS or (operation == "STORE_DEREF" and argument in code.co_freevars):
            return _Code(code, False)
    return _Code(code, attributes <= _ATTRIBUTES, tuple(names), frozenset(attributes))


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """The instructions of code and of the functions that it defines."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)
