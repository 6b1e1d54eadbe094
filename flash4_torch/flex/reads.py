"""Everything that a user's function reads, as a key: functions of equal keys are traced to equal programs.

A function is known if its code, and that of the functions it calls, does nothing but to compute with what it
is given and with closure cells, globals and defaults, which are looked up for every key: numbers, tensors,
tuples, functions of this kind, objects of which nothing but plain attributes and methods is used, and torch's
functions and methods by names that stand here. An object may be in a function's place, a module without hooks
among them. A tensor has no values while a function is traced; what else
it could tell is in the key. All else, such as a property, makes a function unknown: it is traced anew in each
call.
"""

from __future__ import annotations

import dis
import functools
import inspect
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
_OF_OBJECTS = ("LOAD_ATTR", "LOAD_METHOD")
_LOADS = frozenset(
    """LOAD_DEREF LOAD_GLOBAL LOAD_FAST LOAD_FAST_CHECK LOAD_FAST_AND_CLEAR LOAD_FAST_LOAD_FAST LOAD_ATTR
    LOAD_METHOD""".split()  # noqa: SIM905
)
_STORES = ("STORE_FAST", "STORE_DEREF", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST")
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_CALL_OF_MODULES = inspect.getattr_static(nn.Module, "__call__")
_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    "_compiled_call_impl",
)
ABSENT = object()
DOT = "."
"""The sign before an attribute's name, where it stands beside names of variables."""
BUILTINS: dict[str, Any] = {f.__name__: f for f in (*_PURE, slice, sum, tuple, zip)}
_MODULES = ("torch", "torch.nn", "torch.nn.functional", "torch.special", "math")
PLAIN = frozenset({int, bool, str, type(None), type(Ellipsis), torch.dtype, torch.device})
_HOLDERS = (
    *(Tensor, nn.Parameter, *(kind for kind in PLAIN if kind is not type(None)), float, tuple, range, slice),
    *(
        types.FunctionType,
        types.BuiltinFunctionType,
        functools.partial,
        torch,
        nn,
        nn.functional,
        torch.special,
        math,
    ),
)
"""What a function may have in hand that is no object of the user's."""
KINDS = PLAIN | {
    *(float, Tensor, nn.Parameter, tuple, types.FunctionType, types.MethodType, functools.partial),
    *(types.ModuleType, types.BuiltinFunctionType, list, dict, set, frozenset, bytes, complex),
}
"""Kinds of values that are no objects of the user's."""
_DEEPEST = 16
_MOST_CODES = 4096


class Unknown(Exception):
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
    bare: frozenset[str] = frozenset()
    """Names, of attributes with a dot, that it loads for more than an attribute."""
    pairs: frozenset[tuple[str, str]] = frozenset()
    """Names with the attributes that it loads from what they hold."""
    locals: frozenset[str] = frozenset()


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
        key = found.called(function), found.of_objects()
        return Reads((torch.get_default_dtype(), key, found.torchs_own()), tuple(found.tensors))
    except Unknown:
        return None


class _Found:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._names: set[str] = set()
        self._bare: set[str] = set()
        self._pairs: set[tuple[str, str]] = set()
        self._objects: dict[int, tuple[Any, set[str]]] = {}
        """Objects by their places, and the names that hold them."""
        self._others: set[str] = set()
        """Names that hold what is no object."""
        self._places: dict[int, int] = {}
        """Tensors and functions by their address; both live as long as the function that is asked about."""

    def called(self, x: Any) -> Hashable:
        """The function that is asked about, or what an object does that is called like one."""
        return self.value(x, 0) if type(x) in KINDS else self._method(call_of(x), 0, x)

    def value(self, x: Any, depth: int) -> Hashable:
        kind = type(x)
        if depth > _DEEPEST:
            raise Unknown
        if kind is float:
            # 0.0 equals -0.0, and NaN not itself.
            return kind, x.hex()
        if kind in PLAIN:
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
        if kind is types.MethodType:
            return kind, self._method(x.__func__, depth, x.__self__)
        raise Unknown

    def _held(self, name: str, x: Any, depth: int) -> Hashable:
        """What a variable or an attribute holds: a value, or an object."""
        if type(x) in KINDS:
            self._others.add(name)
            return self.value(x, depth)
        return self._object(x, name)

    def _method(self, f: Any, depth: int, x: Any) -> Hashable:
        """A function whose first argument is an object."""
        if type(f) is not types.FunctionType or not f.__code__.co_argcount:
            raise Unknown
        own = f.__code__.co_varnames[0]
        return self._function(f, depth, own), self._object(x, own)

    def _object(self, x: Any, name: str) -> Hashable:
        """An object whose attributes are where they seem to be; `of_objects` reads those that are used."""
        kind = type(x)
        reader: Any = kind.__getattribute__
        if reader is not object.__getattribute__ or getattr(kind, "__getattr__", None) not in (
            None,
            nn.Module.__getattr__,
        ):
            raise Unknown
        if isinstance(x, (type, types.ModuleType, Tensor)) or not hasattr(x, "__dict__"):
            raise Unknown
        place = self._places.setdefault(id(x), len(self._places))
        self._objects.setdefault(place, (x, set()))[1].add(name)
        return _Same(kind), place

    def of_objects(self) -> Hashable:
        """What is read of objects, and of those that are read of them."""
        found: dict[tuple[int, str], Hashable] = {}
        while wanted := sorted(self._attributes() - found.keys()):
            for place, name in wanted:
                found[place, name] = self._attribute(self._objects[place][0], name)
        holding = {name for _, names in self._objects.values() for name in names}
        # An object that is used for more than its attributes may do anything.
        if not holding.isdisjoint(self._bare):
            raise Unknown
        for name, attribute in self._pairs:
            if not _may_be_read(attribute) and (name not in holding or name in self._others):
                raise Unknown
        return tuple(found.items())

    def _attributes(self) -> set[tuple[int, str]]:
        """Objects' places and their attributes that code reads."""
        return {
            (place, attribute)
            for place, (_, names) in self._objects.items()
            for name, attribute in self._pairs
            if name in names
        }

    def _attribute(self, x: Any, name: str) -> Hashable:
        of_kind, own = attribute_of(x, name)
        if own is ABSENT and type(of_kind) is types.FunctionType:
            return self._method(of_kind, 1, x)
        if hasattr(type(of_kind), "__get__"):
            raise Unknown
        value = of_kind if own is ABSENT else own
        return None if value is ABSENT else self._held(DOT + name, value, 1)

    def _tensor(self, x: Tensor) -> Hashable:
        place = self._places.setdefault(id(x), len(self._places))
        if not any(x is known for known in self.tensors):
            self.tensors.append(x)
        if x.layout != torch.strided or x.is_nested:
            raise Unknown
        return type(x), place, x.shape, x.stride(), x.dtype, x.device

    def _function(self, f: types.FunctionType, depth: int, own: str = "") -> Hashable:
        """own: the name of an argument that is an object."""
        if id(f) in self._places:
            return types.FunctionType, self._places[id(f)]
        self._places[id(f)] = len(self._places)
        code = read_code(f.__code__)
        if not code.is_known or f.__dict__:
            raise Unknown
        self._names |= code.attributes
        self._bare |= code.bare
        self._pairs |= code.pairs
        self._others |= code.locals - {own}
        try:
            cells = {
                name: cell.cell_contents
                for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
            }
        except ValueError:
            raise Unknown from None
        given = f.__defaults__, tuple((f.__kwdefaults__ or {}).items())
        of_cells = tuple(self._held(name, x, depth + 1) for name, x in cells.items())
        of_globals = tuple(self._global(f, name, depth + 1) for name in code.globals)
        return f.__code__, self.value(given, depth + 1), of_cells, of_globals

    def _global(self, f: types.FunctionType, name: str, depth: int) -> Hashable:
        if name in f.__globals__:
            return self._held(name, f.__globals__[name], depth)
        function: Any = f
        of_builtins = function.__builtins__
        if name in BUILTINS and of_builtins.get(name) is BUILTINS[name]:
            return name
        raise Unknown

    def torchs_own(self) -> Hashable:
        """What torch and its tensors have now under the names that are used."""
        if any(x.__dict__ and not self._names.isdisjoint(x.__dict__) for x in self.tensors):
            raise Unknown
        holders = torch, nn, nn.functional, torch.special, math
        return tuple(
            _Same(held)
            for name in sorted(self._names)
            for held in (getattr(Tensor, name, None), *(vars(holder).get(name) for holder in holders))
        )


def attribute_of(x: Any, name: str) -> tuple[Any, Any]:
    """What the class of an object has under a name, and what the object itself has; ABSENT without one."""
    return inspect.getattr_static(type(x), name, ABSENT), own_attribute(x, name)


def own_attribute(x: Any, name: str) -> Any:
    """What an object has under a name, a module's parameters, buffers and modules among it."""
    own = x.__dict__
    if name in own:
        return own[name]
    if isinstance(x, nn.Module):
        for each in _OF_MODULES:
            held = own.get(each)
            if held and name in held:
                return held[name]
    return ABSENT


def call_of(x: Any) -> Any:
    """The method that a call of the object runs: for a module without hooks its forward."""
    call = inspect.getattr_static(type(x), "__call__", None)
    if not isinstance(x, nn.Module):
        return call
    hooks = any(vars(x).get(name) for name in _HOOKS) or nn.modules.module._has_any_global_hook()
    if call is not _CALL_OF_MODULES or hooks or "forward" in vars(x):
        raise Unknown
    return inspect.getattr_static(type(x), "forward", None)


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


def read_code(code: types.CodeType) -> _Code:
    found = _codes.get(id(code))
    if found is None:
        if len(_codes) >= _MOST_CODES:
            _codes.clear()
        found = _codes[id(code)] = _analysed(code)
    return found


def _analysed(code: types.CodeType) -> _Code:
    names: dict[str, None] = {}
    attributes: set[str] = set()
    bare: set[str] = set()
    pairs: set[tuple[str, str]] = set()
    before: tuple[str, ...] = ()
    for instruction, following in _instructions(code):
        operation, argument = instruction.opname, instruction.argval
        if operation in _OF_OBJECTS:
            attributes.add(argument)
            if not before and not _may_be_read(argument):
                return _Code(code, False)
        before, used = (), argument if isinstance(argument, tuple) else (argument,)
        if operation in _OF_OBJECTS:
            used = (DOT + argument,)
        if operation in _LOADS and following is not None and following.opname in _OF_OBJECTS:
            # Of two names that are loaded at once the last one.
            pairs.add((used[-1], following.argval))
            bare.update(used[:-1])
            before = used
        elif operation in _LOADS or operation in _STORES:
            bare.update(used)
        if operation == "LOAD_GLOBAL":
            names[argument] = None
        elif operation not in _OPERATIONS or (operation == "STORE_DEREF" and argument in code.co_freevars):
            return _Code(code, False)
    own = frozenset(name for each in _codes_of(code) for name in each.co_varnames)
    return _Code(code, True, tuple(names), frozenset(attributes), frozenset(bare), frozenset(pairs), own)


@functools.lru_cache(maxsize=4096)
def _may_be_read(name: str) -> bool:
    """Whether an attribute of anything tells nothing but what a key has: it is of the list, or of objects."""
    return name in _ATTRIBUTES or not any(hasattr(holder, name) for holder in _HOLDERS)


def _instructions(code: types.CodeType) -> Iterator[tuple[dis.Instruction, dis.Instruction | None]]:
    """The instructions of code and of the functions that it defines, with those that follow them."""
    for each in _codes_of(code):
        own = list(dis.get_instructions(each))
        yield from zip(own, [*own[1:], None], strict=True)


def _codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and that of the functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_of(constant)
