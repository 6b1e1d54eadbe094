"""PTX text as data: `parse` gives a module's kernels with their instructions, variables and parameters.

The parser reads what compilers emit and what inline assembly holds: modules of kernels, without functions and
calls. Anything it does not know is an error that names the line; nothing is skipped. Names local to a `{ }`
scope are made unique by a suffix (`p#3`).
"""

from __future__ import annotations

import ctypes
import math
import re
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, NoReturn

import numpy as np

from flash4_torch.emulator.errors import PtxError, Source

Dim3 = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Register:
    """A virtual register, a special register (`%tid.x`), or the sink `_`.

    type: as declared ("pred", "b32", "f32", ...); "" for special registers and the sink.
    """

    name: str
    type: str = ""
    special: bool = False


SINK = Register("_")


@dataclass(frozen=True, slots=True)
class Immediate:
    """An integer, or the bits of a floating-point number.

    kind: "int", "f32" (0f...) or "f64" (0d..., 1.5).
    """

    value: int
    kind: str = "int"

    def bits(self, width: int) -> int:
        """The bits of the number in an operand of `width` bytes, 4 or 8; in a predicate (0) its truth value.

        A floating-point number is converted to the operand's width.
        """
        if width == 0:
            return int(self.value != 0)
        if self.kind == "f32" and width == 8:
            return _bits("d", _number("f", self.value))
        if self.kind == "f64" and width == 4:
            return _bits("f", _number("d", self.value))
        return self.value & ((1 << 8 * width) - 1)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A parameter, a variable or a label, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b}`; also the labels that a `brx.idx` may go to."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Address:
    """`[base+offset]`, or `[base, {coordinates}]` of a tensor; the offset counts bytes."""

    base: Register | Symbol | int
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """`a|b`: two destinations of one instruction."""

    first: Register
    second: Register


@dataclass(frozen=True, slots=True)
class Negated:
    """`!a`, a predicate that is read inverted."""

    register: Register


Operand = Register | Immediate | Symbol | Vector | Address | Pair | Negated


@dataclass(frozen=True, slots=True)
class Guard:
    """`@register` or, negated, `@!register`: the instruction acts in the lanes where it holds."""

    register: Register
    negated: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    opcode: with all modifiers.
    line: line of the PTX text, counted from 1.
    source: file and line that the compiler attributes it to; for inlined code the innermost.
    text: as written, on one line.
    """

    guard: Guard | None
    opcode: str
    operands: tuple[Operand, ...]
    line: int
    source: Source | None
    text: str


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter; `offset` is where the driver packs it. Sizes count bytes."""

    name: str
    size: int
    alignment: int
    offset: int


@dataclass(frozen=True)
class Variable:
    """A shared or local variable. `dynamic`: its size comes with the launch. Sizes count bytes."""

    name: str
    size: int
    alignment: int
    dynamic: bool = False


@dataclass(frozen=True, eq=False)
class GlobalVariable:
    """A `.global` or `.const` variable; the kernels of the module share its storage (bytes, aligned)."""

    name: str
    constant: bool
    data: np.ndarray

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)


@dataclass(frozen=True, eq=False)
class Kernel:
    """An entry.

    registers: virtual registers and their declared types.
    shared: the shared variables it can name, its own and those of the module that it uses.
    labels: the index of the instruction that each label names.
    reqntid, maxntid, cluster: threads (CTAs of a cluster) by axis, as .reqntid, .maxntid, .reqnctapercluster
    give them, or None.
    minnctapersm, max_registers: as .minnctapersm and .maxnreg give them, or None.
    """

    name: str
    params: tuple[Parameter, ...]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    registers: dict[str, str]
    shared: tuple[Variable, ...]
    local: tuple[Variable, ...]
    variables: tuple[GlobalVariable, ...]
    reqntid: Dim3 | None = None
    maxntid: Dim3 | None = None
    cluster: Dim3 | None = None
    minnctapersm: int | None = None
    max_registers: int | None = None

    @cached_property
    def globals(self) -> dict[str, int]:
        """The address of each `.global` and `.const` variable."""
        return {v.name: v.address for v in self.variables}


@dataclass(frozen=True, eq=False)
class Module:
    """A PTX text: `version` as written ("8.8"), `target` as written ("sm_90a")."""

    version: str
    target: str
    kernels: tuple[Kernel, ...]

    @property
    def arch(self) -> int:
        """The target's number: 90 for sm_90a."""
        return int(re.sub(r"\D", "", self.target))


def parse(text: str) -> Module:
    """Reads a PTX text. Raises PtxError."""
    return _ModuleParser(text).parse()


_NAME = r"[A-Za-z_$%][\w$]*"

_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.DOTALL)

# `.align` and the type come before the name; only scalars and arrays of scalars occur in the texts we read.
_VARIABLE = rf"""(?P<variable>(?:\.(?P<linkage>visible|extern|weak)\s+)?
    \.(?P<space>shared|global|const|local)\s+ (?:\.align\s+(?P<align>\d+)\s+)? \.(?P<type>[a-z]\w*)\s+
    (?P<var_name>{_NAME})\s* (?P<dims>(?:\[\s*\w*\s*\]\s*)*) (?:=\s*(?P<initial>[^;]*))?;)"""

_LOCATION = r"(?P<location>\.loc\s+(?P<file>\d+)\s+(?P<line>\d+)[^\n]*)"
_PRAGMA = r'(?P<pragma>\.pragma\s+"[^"\n]*"\s*;)'
_UNKNOWN = r"(?P<unknown>\S[^\s;{}]*)"

_MODULE_ITEM = re.compile(
    rf"""\s*(?:
    (?P<header>\.(?P<key>version|target|address_size)\s+(?P<value>[^\n]*))
    | (?P<path>\.file\s+(?P<number>\d+)\s+"(?P<file_name>[^"\n]*)"[^\n]*)
    | (?P<debug>\.section\s+[\w.]+\s*\{{[^}}]*\}})
    | (?P<entry>(?:\.(?:visible|weak)\s+)?\.entry\s+(?P<name>{_NAME})\s*(?:\((?P<params>[^)]*)\))?
        (?P<limits>[^{{;]*)\{{)
    | {_VARIABLE} | {_LOCATION} | {_PRAGMA}
    | (?P<end>\Z) | {_UNKNOWN}
    )""",
    re.VERBOSE,
)

_PARAMETER = re.compile(
    rf"""\s*\.param\s+ (?:\.align\s+(?P<align>\d+)\s+)? \.(?P<type>[a-z]\w*)\s+
    (?:\.ptr\b\s*(?:\.(?:global|shared|const|local)\s+)?(?:\.align\s+\d+\s+)?)?
    (?P<name>{_NAME})\s*(?:\[\s*(?P<count>\d+)\s*\])?\s*""",
    re.VERBOSE,
)

_LIMIT = re.compile(r"\.(?P<name>\w+)\s*(?P<numbers>\d[\d\s,]*)?")
_LIMITS = {
    *("reqntid", "maxntid", "minnctapersm", "maxnctapersm", "maxnreg"),
    *("reqnctapercluster", "maxclusterrank", "explicitcluster", "blocksareclusters"),
}

_BODY_ITEM = re.compile(
    rf"""\s*(?:
    (?P<instruction>(?:@\s*(?P<negated>!?)\s*(?P<guard>{_NAME})\s+)?
        (?P<opcode>[a-z]\w*(?:(?:\.|::)\w+)*)(?=[\s;{{])
        (?P<operands>[^;{{}}]*(?:\{{[^{{}}]*\}}[^;{{}}]*)*);)
    | (?P<open>\{{) | (?P<close>\}})
    | (?P<table>(?P<table_name>{_NAME})\s*:\s*\.branchtargets\s+(?P<targets>[^;]*);)
    | (?P<label>(?P<label_name>{_NAME})\s*:)
    | (?P<registers>\.reg\s+\.(?P<reg_type>\w+)\s+(?P<reg_names>[^;]*);)
    | {_LOCATION} | {_VARIABLE} | {_PRAGMA} | (?P<empty>;) | {_UNKNOWN}
    )""",
    re.VERBOSE,
)

_REGISTER_NAMES = re.compile(rf"\s*(?P<stem>{_NAME})(?:<(?P<count>\d+)>)?\s*")

# An operand and the comma after it; brackets and braces keep their commas.
_ITEM = re.compile(r"\s*((?:\[[^\]]*\]|\{[^}]*\}|[^,\[\]{}])+)(?:,|\Z)")

_ADDRESS = re.compile(
    rf"""\[\s*(?P<base>{_NAME}|\w+)\s*(?:(?P<sign>[+-])\s*(?P<offset>-?\w+)\s*)?
    (?:,\s*(?P<coordinates>\{{[^}}]*\}})\s*)?\]""",
    re.VERBOSE,
)
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?")
_FLOAT_BITS = re.compile(r"(?P<minus>-?)0(?P<kind>[fFdD])(?P<digits>[0-9a-fA-F]+)")
_DECIMAL = re.compile(r"-?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?")

_SPECIAL = re.compile(
    r"""%(?:(?:n?tid|n?ctaid|n?clusterid|cluster_n?ctaid)\.[xyz]
    | laneid|n?warpid|n?smid|gridid|is_explicit_cluster|cluster_n?ctarank|lanemask_(?:eq|lt|le|gt|ge)
    | clock|clock_hi|clock64|globaltimer|globaltimer_lo|globaltimer_hi|pm\d+|pm\d+_64|envreg\d+
    | (?:total|aggr|dynamic)_smem_size|reserved_smem_offset_(?:begin|end|cap|[01])|current_graph_exec)""",
    re.VERBOSE,
)

_TYPES = {
    **{kind + size: int(size) // 8 for size in ("8", "16", "32", "64") for kind in "bus"},
    **{"f16": 2, "f32": 4, "f64": 8, "f16x2": 4, "b128": 16},
}


MAX_DIGITS = 1000  # of any number
MAX_REGISTERS = 1 << 20  # virtual registers of a kernel
MAX_ALIGNMENT = 1 << 16
MAX_PARAMETER_BYTES = 32764  # of all parameters (PTX ISA, Kernel Function Parameters)
MAX_VARIABLE_BYTES = 1 << 30


def type_bytes(name: str) -> int:
    """Bytes of a fundamental type ("b32": 4). Raises KeyError; predicates have no size."""
    return _TYPES[name]


class _Text:
    """The text without comments, and the line numbers of its positions."""

    def __init__(self, text: str):
        self.text = _COMMENT.sub(_without_comment, text)
        self._ends = [m.start() for m in re.finditer("\n", self.text)]
        if endless := re.search(rf"\d{{{MAX_DIGITS}}}", self.text):
            self.fail(f"a number of {MAX_DIGITS} digits", endless.start())

    def line(self, position: int) -> int:
        return bisect_right(self._ends, position - 1) + 1

    def fail(self, message: str, position: int) -> NoReturn:
        excerpt = " ".join(self.text[position : position + 200].split())
        raise PtxError(message, self.line(position), excerpt.partition(";")[0][:120])


def _without_comment(match: re.Match[str]) -> str:
    found = match.group()
    return found if found.startswith('"') else " " + "\n" * found.count("\n")


class _ModuleParser:
    """Parser of the module scope; `_BodyParser` reads bodies. They are finished once file names are known."""

    def __init__(self, text: str):
        self.text = _Text(text)
        self.headers: dict[str, str] = {}
        self.files: dict[int, str] = {}
        self.shared: list[Variable] = []
        self.variables: list[GlobalVariable] = []
        self.entries: list[tuple[re.Match[str], _BodyParser]] = []

    def parse(self) -> Module:
        position = 0
        while True:
            match = _MODULE_ITEM.match(self.text.text, position)
            assert match is not None
            if match.lastgroup == "end":
                break
            position = self._item(match)
        for key in ("version", "target"):
            if key not in self.headers:
                self.text.fail(f"no .{key}", 0)
        target = self.headers["target"].split(",")[0].strip()
        if not re.fullmatch(r"sm_\d{2,3}[af]?", target):
            self.text.fail(f"no architecture: .target {target}", 0)
        kernels = tuple(self._kernel(match, body) for match, body in self.entries)
        return Module(self.headers["version"].strip(), target, kernels)

    def _item(self, match: re.Match[str]) -> int:
        """Reads one item and returns where the next begins."""
        kind = match.lastgroup
        if kind == "header":
            self.headers[match["key"]] = match["value"]
        elif kind == "path":
            self.files[int(match["number"])] = match["file_name"]
        elif kind == "variable":
            self._variable(match)
        elif kind == "entry":
            body = _BodyParser(self.text, match.end())
            self.entries.append((match, body))
            return body.end
        elif kind == "unknown":
            self.text.fail("unknown directive", match.start("unknown"))
        return match.end()

    def _variable(self, match: re.Match[str]) -> None:
        if match["space"] == "shared":
            self.shared.append(_variable(match, self.text))
        elif match["space"] == "local" or match["linkage"] == "extern":
            message = "variables of other modules and local ones at module scope are not supported"
            self.text.fail(message, match.start("variable"))
        else:
            self.variables.append(_global_variable(match, self.text))

    def _kernel(self, match: re.Match[str], body: _BodyParser) -> Kernel:
        params = _parameters(match, self.text)
        outer = {p.name for p in params} | {v.name for v in self.shared} | {v.name for v in self.variables}
        instructions = body.instructions(outer, self.files)
        limits = self._limits(match)
        used = body.used_symbols
        return Kernel(
            name=match["name"],
            params=params,
            instructions=instructions,
            labels=body.label_indices,
            registers=body.registers,
            shared=(*(v for v in self.shared if v.name in used), *body.shared),
            local=tuple(body.local),
            variables=tuple(self.variables),
            reqntid=_dim3(limits.get("reqntid")),
            maxntid=_dim3(limits.get("maxntid")),
            cluster=_dim3(limits.get("reqnctapercluster")),
            minnctapersm=_first(limits.get("minnctapersm")),
            max_registers=_first(limits.get("maxnreg")),
        )

    def _limits(self, match: re.Match[str]) -> dict[str, tuple[int, ...]]:
        limits = {}
        for limit in _all(_LIMIT, match, "limits", self.text):
            if limit["name"] not in _LIMITS:
                self.text.fail("unknown directive", limit.start())
            limits[limit["name"]] = tuple(int(n) for n in (limit["numbers"] or "").replace(",", " ").split())
        return limits


def _dim3(numbers: tuple[int, ...] | None) -> Dim3 | None:
    if numbers is None:
        return None
    x, y, z = (*numbers, 1, 1, 1)[:3]
    return x, y, z


def _first(numbers: tuple[int, ...] | None) -> int | None:
    return numbers[0] if numbers else None


def _all(pattern: re.Pattern[str], match: re.Match[str], group: str, text: _Text) -> Iterator[re.Match[str]]:
    """Matches of `pattern` that fill a group of `match` except for white space and commas between them."""
    position, end = match.span(group)
    while position < end:
        if text.text[position].isspace() or text.text[position] == ",":
            position += 1
            continue
        found = pattern.match(text.text, position, end)
        if found is None:
            text.fail(f"cannot read {group}", position)
        yield found
        position = found.end()


def _parameters(match: re.Match[str], text: _Text) -> tuple[Parameter, ...]:
    params: list[Parameter] = []
    end = 0
    for found in _all(_PARAMETER, match, "params", text) if match["params"] else ():
        element = _size_of(found["type"], text, found.start())
        alignment = _alignment(found, element, text)
        offset = -(-end // alignment) * alignment
        size = element * int(found["count"] or 1)
        if offset + size > MAX_PARAMETER_BYTES:
            text.fail(f"parameters of more than {MAX_PARAMETER_BYTES} bytes", found.start())
        params.append(Parameter(found["name"], size, alignment, offset))
        end = offset + size
    return tuple(params)


def _size_of(type_name: str, text: _Text, position: int) -> int:
    if type_name not in _TYPES:
        text.fail(f"type .{type_name} is not supported here", position)
    return _TYPES[type_name]


def _alignment(match: re.Match[str], element: int, text: _Text) -> int:
    """The declared alignment in bytes, or that of an element."""
    alignment = int(match["align"] or element)
    if alignment & (alignment - 1) or not 0 < alignment <= MAX_ALIGNMENT:
        text.fail(f"an alignment must be a power of two up to {MAX_ALIGNMENT}", match.start())
    return alignment


def _counts(match: re.Match[str], text: _Text) -> list[int | None]:
    """The numbers of elements in an array's brackets; None for empty brackets."""
    counts: list[int | None] = []
    for number in re.findall(r"\[\s*(\w*)\s*\]", match["dims"]):
        if number and not _INTEGER.fullmatch(number):
            text.fail(f"{number} is not a number of elements", match.start("dims"))
        counts.append(_integer(number.rstrip("U")) if number else None)
    return counts


def _bytes_of(counts: Sequence[int], element: int, match: re.Match[str], text: _Text) -> int:
    size = element * math.prod(counts)
    if size > MAX_VARIABLE_BYTES:
        text.fail(f"a variable of {size} bytes; {MAX_VARIABLE_BYTES} are possible", match.start("variable"))
    return size


def _variable(match: re.Match[str], text: _Text) -> Variable:
    element = _size_of(match["type"], text, match.start("type"))
    counts = _counts(match, text)
    if match["initial"] is not None:
        text.fail("only .global and .const variables can have an initial value", match.start("initial"))
    size = _bytes_of([count or 0 for count in counts], element, match, text)
    return Variable(match["var_name"], size, _alignment(match, element, text), dynamic=None in counts)


def _global_variable(match: re.Match[str], text: _Text) -> GlobalVariable:
    element = _size_of(match["type"], text, match.start("type"))
    values = [_immediate(v) for v in re.findall(r"[^\s,{}]+", match["initial"] or "")]
    if None in values:
        text.fail("an initial value must be a number", match.start("initial"))
    counts = [len(values) if count is None else count for count in _counts(match, text)]
    size = _bytes_of(counts, element, match, text)
    try:
        content = b"".join(_encode(v, match["type"]) for v in values if v)
    except (OverflowError, struct.error):
        text.fail("an initial value is too large for its type", match.start("initial"))
    if len(content) > size:
        text.fail("more initial values than elements", match.start("initial"))
    data = _aligned(size, _alignment(match, element, text))
    data[: len(content)] = np.frombuffer(content, np.uint8)
    return GlobalVariable(match["var_name"], match["space"] == "const", data)


def _encode(value: Immediate, type_name: str) -> bytes:
    size = _TYPES[type_name]
    if type_name in ("f32", "f64") and value.kind == "int":
        return struct.pack("<f" if size == 4 else "<d", value.value)
    return (value.bits(size) if size >= 4 else value.value & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def _aligned(size: int, alignment: int) -> np.ndarray:
    block = np.zeros(size + alignment, np.uint8)
    start = -block.ctypes.data % alignment
    return block[start : start + size]


@dataclass
class _Scope:
    """Names of a `{ }`; `suffix` distinguishes them from those of other scopes."""

    parent: _Scope | None
    suffix: str
    registers: dict[str, Register] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    operands: dict[str, Operand] = field(default_factory=dict)

    def chain(self) -> Iterator[_Scope]:
        scope: _Scope | None = self
        while scope:
            yield scope
            scope = scope.parent


class _Statement(NamedTuple):
    """An instruction whose operands are still to be read: labels may follow later."""

    match: re.Match[str]
    scope: _Scope
    location: tuple[int, int] | None


class _BodyParser:
    """Parser of a kernel's body.

    The constructor reads declarations and labels; `instructions` then reads the operands.
    """

    def __init__(self, text: _Text, position: int):
        self.text = text
        self.registers: dict[str, str] = {}
        self.label_indices: dict[str, int] = {}
        self.shared: list[Variable] = []
        self.local: list[Variable] = []
        self.used_symbols: set[str] = set()
        self._outer: set[str] = set()
        self._statements: list[_Statement] = []
        self._location: tuple[int, int] | None = None
        self._scopes = 0
        self._scope: _Scope | None = _Scope(None, "")
        self.end: int = self._read_items(position)

    def _read_items(self, position: int) -> int:
        while self._scope is not None:
            match = _BODY_ITEM.match(self.text.text, position)
            if match is None:
                self.text.fail("the kernel's body has no end", position)
            self._item(match, self._scope)
            position = match.end()
        return position

    def _item(self, match: re.Match[str], scope: _Scope) -> None:
        kind = match.lastgroup
        if kind == "instruction":
            self._statements.append(_Statement(match, scope, self._location))
        elif kind == "open":
            self._scopes += 1
            self._scope = _Scope(scope, f"#{self._scopes}")
        elif kind == "close":
            self._scope = scope.parent
        elif kind == "label":
            self._label(match, scope)
        elif kind == "registers":
            self._declare(match, scope)
        elif kind == "location":
            self._location = (int(match["file"]), int(match["line"]))
        elif kind == "table":
            scope.tables[match["table_name"]] = [name.strip() for name in match["targets"].split(",")]
        elif kind == "variable":
            self._variable(match)
        elif kind == "unknown":
            self.text.fail("unknown directive or instruction", match.start("unknown"))

    def _label(self, match: re.Match[str], scope: _Scope) -> None:
        name = match["label_name"]
        if name in scope.labels:
            self.text.fail("label defined twice", match.start("label"))
        scope.labels[name] = name + scope.suffix
        self.label_indices[name + scope.suffix] = len(self._statements)

    def _declare(self, match: re.Match[str], scope: _Scope) -> None:
        kind = match["reg_type"]
        if kind != "pred" and kind not in _TYPES:
            self.text.fail(f"registers of type .{kind} are not supported", match.start("registers"))
        for found in _all(_REGISTER_NAMES, match, "reg_names", self.text):
            if int(found["count"] or 1) > MAX_REGISTERS - len(self.registers):
                self.text.fail(f"more than {MAX_REGISTERS} registers", found.start())
            numbers = range(int(found["count"])) if found["count"] else [""]
            for number in numbers:
                name = f"{found['stem']}{number}"
                register = Register(name + scope.suffix, kind)
                scope.registers[name] = register
                self.registers[register.name] = kind

    def _variable(self, match: re.Match[str]) -> None:
        if match["space"] not in ("shared", "local"):
            self.text.fail("a kernel declares only shared and local variables", match.start("variable"))
        if self._scope is None or self._scope.parent:
            self.text.fail("variables in an inner scope are not supported", match.start("variable"))
        variables = self.shared if match["space"] == "shared" else self.local
        variables.append(_variable(match, self.text))

    def instructions(self, outer: set[str], files: dict[int, str]) -> tuple[Instruction, ...]:
        """The body's instructions.

        outer: names of parameters and of the module's variables; files: file names by number.
        """
        self._outer = outer | {v.name for v in (*self.shared, *self.local)}
        result = [self._instruction(statement, files) for statement in self._statements]
        if self._falls_off(result):
            line = self.text.line(self.end)
            result.append(Instruction(None, "ret", (), line, result[-1].source if result else None, "ret"))
        return tuple(result)

    def _falls_off(self, instructions: list[Instruction]) -> bool:
        """Whether control can reach the body's end, where a kernel returns."""
        if not instructions or len(instructions) in self.label_indices.values():
            return True
        last = instructions[-1]
        return last.guard is not None or last.opcode.split(".")[0] not in (
            "ret",
            "exit",
            "bra",
            "brx",
            "trap",
        )

    def _instruction(self, statement: _Statement, files: dict[int, str]) -> Instruction:
        match, scope, location = statement
        start = match.start("instruction")
        guard = None
        if match["guard"]:
            register = self._operand(match["guard"], scope, start)
            if not isinstance(register, Register):
                self.text.fail("a guard must be a predicate register", start)
            guard = Guard(register, bool(match["negated"]))
        source = None
        if location and location[1] > 0:
            if location[0] not in files:
                self.text.fail(f".loc names file {location[0]}, which no .file declares", start)
            source = (files[location[0]], location[1])
        return Instruction(
            guard,
            match["opcode"],
            tuple(self._operand(item, scope, start) for item in self._items(match["operands"], start)),
            self.text.line(start),
            source,
            " ".join(match["instruction"][:-1].split()),
        )

    def _items(self, operands: str, start: int) -> list[str]:
        """Operands, split at the commas outside of brackets and braces."""
        if "[" not in operands and "{" not in operands:
            return [item.strip() for item in operands.split(",")] if operands.strip() else []
        items, position = [], 0
        while position < len(operands):
            match = _ITEM.match(operands, position)
            if match is None:
                self.text.fail("cannot read the operands", start)
            items.append(match[1].strip())
            position = match.end()
        return items

    def _operand(self, text: str, scope: _Scope, start: int) -> Operand:
        found = scope.operands.get(text)
        if found is None:
            found = scope.operands[text] = self._read(text, scope, start)
        return found

    def _read(self, text: str, scope: _Scope, start: int) -> Operand:
        if text.startswith("["):
            return self._address(text, scope, start)
        if text.startswith("{") and text.endswith("}"):
            return Vector(self._elements(text, scope, start))
        if text.startswith("!"):
            return Negated(self._register(text[1:].strip(), scope, start))
        if "|" in text:
            first, _, second = text.partition("|")
            return Pair(*(self._register(part.strip(), scope, start) for part in (first, second)))
        immediate = _immediate(text)
        return immediate if immediate is not None else self._named(text, scope, start)

    def _elements(self, text: str, scope: _Scope, start: int) -> tuple[Operand, ...]:
        return tuple(self._operand(item.strip(), scope, start) for item in text[1:-1].split(","))

    def _register(self, text: str, scope: _Scope, start: int) -> Register:
        operand = self._named(text, scope, start) if _immediate(text) is None else None
        if not isinstance(operand, Register):
            self.text.fail(f"{text} is not a register", start)
        return operand

    def _named(self, name: str, scope: _Scope, start: int) -> Operand:
        if name == "_":
            return SINK
        for outer in scope.chain():
            if name in outer.registers:
                return outer.registers[name]
            if name in outer.labels:
                return Symbol(outer.labels[name])
            if name in outer.tables:
                return Vector(tuple(self._operand(label, outer, start) for label in outer.tables[name]))
        if name in self._outer:
            self.used_symbols.add(name)
            return Symbol(name)
        if _SPECIAL.fullmatch(name):
            return Register(name, special=True)
        if name == "WARP_SZ":
            return Immediate(32)
        self.text.fail(f"{name or 'an empty operand'} is not a declared name or a number", start)

    def _address(self, text: str, scope: _Scope, start: int) -> Address:
        match = _ADDRESS.fullmatch(text)
        if match is None:
            self.text.fail(f"cannot read the address {text}", start)
        base = self._operand(match["base"], scope, start)
        offset = _immediate(match["offset"] or "0")
        if offset is None or offset.kind != "int":
            self.text.fail(f"the offset of {text} must be an integer", start)
        value = -offset.value if match["sign"] == "-" else offset.value
        coordinates = self._elements(match["coordinates"], scope, start) if match["coordinates"] else ()
        if isinstance(base, Immediate) and base.kind == "int":
            return Address(base.value, value, coordinates)
        if isinstance(base, Register | Symbol):
            return Address(base, value, coordinates)
        self.text.fail(f"the base of {text} must be a register, a variable or a number", start)


def _immediate(text: str) -> Immediate | None:
    """A number, or None if the text is not one."""
    first = text[:1]
    if not (first.isdigit() or first in ("-", ".")):
        return None
    if _INTEGER.fullmatch(text):
        return Immediate(_integer(text.rstrip("U")))
    match = _FLOAT_BITS.fullmatch(text)
    if match and len(match["digits"]) == (8 if match["kind"] in "fF" else 16):
        bits = int(match["digits"], 16)
        if match["minus"]:
            bits ^= 1 << (4 * len(match["digits"]) - 1)
        return Immediate(bits, "f32" if match["kind"] in "fF" else "f64")
    if _DECIMAL.fullmatch(text):
        return Immediate(_bits("d", float(text)), "f64")
    return None


def _integer(text: str) -> int:
    digits = text.lstrip("-")
    octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    value = int(digits, 8 if octal else 0)
    return -value if text.startswith("-") else value


def _bits(form: str, value: float) -> int:
    """The bits of a number rounded to a float (form "f") or double ("d")."""
    rounded = ctypes.c_float(value).value if form == "f" else value
    return int.from_bytes(struct.pack("<" + form, rounded), "little")


def _number(form: str, bits: int) -> float:
    return float(struct.unpack("<" + form, bits.to_bytes(struct.calcsize(form), "little"))[0])
