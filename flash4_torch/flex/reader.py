"""What functions like a known one read, in a tenth of the time that `reads` takes for its key.

`reads` decides whether a function is known, and its key says what it reads. A reader repeats that for other
functions of the same code: it finds the same kinds of things at the same places, or does not match. Functions
that one reader matches with equal numbers, and with tensors of equal shapes, strides, dtypes, devices and
classes, have equal keys, so that they are traced to equal programs. Neither tensors nor functions are kept.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import reads
from .reads import Unknown

Match = Callable[[Any, "Found"], bool]
"""Whether something is as it was; appends what it holds to what was found."""

_MOST_OF_CODE = 8
"""Readers of one code: they differ by what variables hold."""
_MOST_CODES = 1024
_EMPTY: dict[str, Any] = {}


class Found:
    """What a function reads now."""

    __slots__ = ("numbers", "objects", "reader", "tensors")

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.tensors: list[Tensor] = []
        """Each one once, in an order of the reader's."""
        self.numbers: list[int | str] = []
        """ints, and floats by their bits."""
        self.objects: list[Any] = []


class Reader:
    """What functions of one code read."""

    __slots__ = ("_attributes", "_function", "_keeps", "_names", "_torchs_own")

    def __init__(self, function: Callable[..., Any], keeps: Any) -> None:
        maker = _Maker()
        self._function = maker.called(function)
        self._attributes = maker.of_objects()
        self._names, self._torchs_own = frozenset(maker.names), maker.torchs_own()
        self._keeps = keeps
        """What the reader is found by: nothing else may get its address."""

    def found(self, function: Callable[..., Any]) -> Found | None:
        """What the function reads, if that is of the same kinds as before."""
        found = Found(self)
        if not self._function(function, found):
            return None
        for place, match in self._attributes:
            if not match(found.objects[place], found):
                return None
        for names, name, known in self._torchs_own:
            if names.get(name) is not known:
                return None
        for x in found.tensors:
            if x.__dict__ and not self._names.isdisjoint(x.__dict__):
                return None
        return found


_readers: dict[int, list[Reader]] = {}


def read(function: Callable[..., Any]) -> Found | None:
    """What a function reads now, if functions of its code have a reader that matches; no mode is active."""
    try:
        for reader in _readers.get(id(_key(function)), ()):
            found = reader.found(function)
            if found is not None:
                return found
    except (AttributeError, IndexError, TypeError, ValueError, Unknown):
        # A cell that is empty, or an object that is about to be made.
        pass
    return None


def add(function: Callable[..., Any]) -> None:
    """Makes a reader of functions like this one, which `reads_of` knows."""
    key = _key(function)
    readers = _readers.setdefault(id(key), [])
    if len(readers) < _MOST_OF_CODE:
        try:
            made = Reader(function, key)
        except Unknown:
            return
        if made.found(function) is not None:
            readers.append(made)
    if len(_readers) > _MOST_CODES:
        _readers.clear()


def _key(function: Any) -> Any:
    while type(function) is functools.partial:
        function = function.func
    if type(function) is types.MethodType:
        function = function.__func__
    return function.__code__ if type(function) is types.FunctionType else type(function)


class _Maker:
    """Goes over what a function reads in the order of `reads`, and makes what goes over it again."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        """Attributes that code uses."""
        self._tensors: list[Tensor] = []
        self._objects: list[tuple[Any, set[str]]] = []
        """Objects, and the names that hold them."""
        self._pairs: set[tuple[str, str]] = set()
        self._within: list[types.FunctionType] = []

    def called(self, x: Any) -> Match:
        if type(x) in reads.KINDS:
            return self.value(x)
        call = reads.call_of(x)
        function, own = self._method(call, x)
        return lambda y, found: reads.call_of(y) is call and function(call, found) and own(y, found)

    def value(self, x: Any) -> Match:
        kind = type(x)
        if kind is float:
            return _is_float
        if kind is int:
            return _is_int
        if kind in reads.PLAIN:
            return lambda y, found: y is x or (type(y) is kind and y == x)
        if kind is Tensor or kind is nn.Parameter:
            return self._tensor(x)
        if kind is tuple:
            return self._tuple(x)
        if kind is types.FunctionType:
            return self._function(x)
        if kind is functools.partial:
            return self._partial(x)
        if kind is types.ModuleType:
            return lambda y, found: y is x
        if kind is types.MethodType:
            function, own = self._method(x.__func__, x.__self__)
            return lambda y, found: type(y) is kind and function(y.__func__, found) and own(y.__self__, found)
        raise Unknown

    def _tensor(self, x: Tensor) -> Match:
        kind = type(x)
        for place, known in enumerate(self._tensors):
            if known is x:
                return _is_tensor(place)
        self._tensors.append(x)

        def is_new(y: Any, found: Found) -> bool:
            if type(y) is not kind:
                return False
            for known in found.tensors:
                if known is y:
                    return False
            found.tensors.append(y)
            return True

        return is_new

    def _tuple(self, x: tuple[Any, ...]) -> Match:
        parts, number = [self.value(each) for each in x], len(x)

        def is_same(y: Any, found: Found) -> bool:
            if type(y) is not tuple or len(y) != number:
                return False
            return all([part(each, found) for part, each in zip(parts, y, strict=True)])

        return is_same

    def _partial(self, x: functools.partial[Any]) -> Match:
        function, given = self.value(x.func), self.value((x.args, *x.keywords.items()))

        def is_same(y: Any, found: Found) -> bool:
            return (
                type(y) is functools.partial
                and not y.__dict__
                and function(y.func, found)
                and given((y.args, *y.keywords.items()), found)
            )

        return is_same

    def _function(self, f: types.FunctionType) -> Match:
        if any(f is outer for outer in self._within):
            raise Unknown
        self._within.append(f)
        code, read = f.__code__, reads.read_code(f.__code__)
        self.names |= read.attributes
        self._pairs |= read.pairs
        defaults = self.value(f.__defaults__)
        keywords = self.value(tuple((f.__kwdefaults__ or _EMPTY).items()))
        cells = [
            self._held(name, cell.cell_contents)
            for name, cell in zip(code.co_freevars, f.__closure__ or (), strict=True)
        ]
        of_globals = [self._global(f, name) for name in read.globals]
        self._within.pop()
        has_keywords = bool(f.__kwdefaults__)

        def is_same(g: Any, found: Found) -> bool:
            if type(g) is not types.FunctionType or g.__code__ is not code or g.__dict__:
                return False
            if not defaults(g.__defaults__, found):
                return False
            given = g.__kwdefaults__
            if (given or has_keywords) and not keywords(tuple((given or _EMPTY).items()), found):
                return False
            if cells:
                for match, cell in zip(cells, g.__closure__ or (), strict=True):
                    if not match(cell.cell_contents, found):
                        return False
            return all([of_function(g, found) for of_function in of_globals])

        return is_same

    def _global(self, f: types.FunctionType, name: str) -> Match:
        """What matches a function by its global."""
        if name in f.__globals__:
            match = self._held(name, f.__globals__[name])
            return lambda g, found: match(g.__globals__[name], found) if name in g.__globals__ else False
        known = reads.BUILTINS[name]
        return lambda g, found: name not in g.__globals__ and g.__builtins__.get(name) is known

    def _held(self, name: str, x: Any) -> Match:
        return self.value(x) if type(x) in reads.KINDS else self._object(x, name)

    def _method(self, f: Any, x: Any) -> tuple[Match, Match]:
        """What matches a function, and the object that is its first argument."""
        return self._function(f), self._object(x, f.__code__.co_varnames[0])

    def _object(self, x: Any, name: str) -> Match:
        kind = type(x)
        if type(kind) is not type:
            # Its attributes may be where they do not seem to be.
            raise Unknown
        for place, (known, names) in enumerate(self._objects):
            if known is x:
                names.add(name)
                return _is_object(place)
        self._objects.append((x, {name}))
        getter = getattr(kind, "__getattr__", None)

        def is_new(y: Any, found: Found) -> bool:
            if type(y) is not kind or getattr(kind, "__getattr__", None) is not getter:
                return False
            if getattr(kind, "__getattribute__") is not object.__getattribute__:  # noqa: B009
                return False
            for known in found.objects:
                if known is y:
                    return False
            found.objects.append(y)
            return True

        return is_new

    def of_objects(self) -> list[tuple[int, Match]]:
        """What matches objects, which are given by their places, by their attributes."""
        matches: list[tuple[int, Match]] = []
        done: set[tuple[int, str]] = set()
        while wanted := sorted(self._wanted() - done):
            for place, name in wanted:
                done.add((place, name))
                matches.append((place, self._attribute(self._objects[place][0], name)))
        return matches

    def _wanted(self) -> set[tuple[int, str]]:
        return {
            (place, attribute)
            for place, (_, names) in enumerate(self._objects)
            for name, attribute in self._pairs
            if name in names
        }

    def _attribute(self, x: Any, name: str) -> Match:
        kind = type(x)
        of_kind, own = reads.attribute_of(x, name)
        if getattr(kind, name, reads.ABSENT) is not of_kind:
            raise Unknown
        if own is reads.ABSENT and type(of_kind) is types.FunctionType:
            function, _ = self._method(of_kind, x)
            return lambda y, found: (
                getattr(kind, name, None) is of_kind
                and reads.own_attribute(y, name) is reads.ABSENT
                and function(of_kind, found)
            )
        value = of_kind if own is reads.ABSENT else own
        if value is reads.ABSENT:
            return lambda y, found: (
                getattr(kind, name, reads.ABSENT) is reads.ABSENT
                and reads.own_attribute(y, name) is reads.ABSENT
            )
        is_held = self._held(reads.DOT + name, value)
        is_own = own is not reads.ABSENT

        def is_same(y: Any, found: Found) -> bool:
            if getattr(kind, name, reads.ABSENT) is not of_kind:
                return False
            held = reads.own_attribute(y, name)
            if (held is not reads.ABSENT) is not is_own:
                return False
            return is_held(held if is_own else of_kind, found)

        return is_same

    def torchs_own(self) -> list[tuple[Any, str, Any]]:
        """Names and what torch has under them, which a function that is traced would take."""
        holders = torch, nn, nn.functional, torch.special, math
        return [
            (names, name, names.get(name))
            for name in sorted(self.names)
            for names in (*(kind.__dict__ for kind in Tensor.__mro__[:-1]), *map(vars, holders))
        ]


def _is_tensor(place: int) -> Match:
    return lambda x, found: x is found.tensors[place]


def _is_object(place: int) -> Match:
    return lambda x, found: x is found.objects[place]


def _is_float(x: Any, found: Found) -> bool:
    if type(x) is not float:
        return False
    # 0.0 equals -0.0, and NaN not itself.
    found.numbers.append(x.hex())
    return True


def _is_int(x: Any, found: Found) -> bool:
    if type(x) is not int:
        return False
    found.numbers.append(x)
    return True
