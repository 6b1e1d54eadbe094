"""Arithmetic, logic, comparisons, moves, conversions and the exchange between the lanes of a warp.

An engine operation is named after the PTX instruction, without what does not matter: `.rn` where it is the
default, `.approx`, the sign of a type where the bits do not depend on it. Destinations come first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum

from flash4_torch.emulator.lower.base import NO_REGISTER, Context, EngineOp, check_modifiers, family, one_of
from flash4_torch.emulator.ptx import Instruction, Negated, Operand, Pair, Register, Vector

_INTEGER = re.compile(r"[bus](8|16|32|64)")
_PACKED_INTEGER = ("u16x2", "s16x2")
_HALF = ("f16", "bf16", "f16x2", "bf16x2")
_REAL = ("f32", "f64", "f32x2", *_HALF)
_DIRECTED = {"rz": 1, "rm": 2, "rp": 3}  # Rounding in csrc_stubs/no_gpu/number.h


def _bits(type_name: str) -> int:
    """Bits of a lane that a value of the type takes."""
    size, _, count = re.sub("^[a-z]+", "", type_name).partition("x")
    return int(size) * int(count or 1)


def _width(type_name: str) -> int:
    """Bytes of a lane of the type's register."""
    return 8 if _bits(type_name) == 64 else 4


def _split(ins: Instruction) -> tuple[str, list[str], list[str]]:
    """Splits an opcode into the mnemonic, the modifiers and the types, which come last."""
    mnemonic, *rest = ins.opcode.split(".")
    first = len(rest)
    while first and (
        _INTEGER.fullmatch(rest[first - 1]) or rest[first - 1] in (*_PACKED_INTEGER, *_REAL, "pred")
    ):
        first -= 1
    return mnemonic, rest[:first], rest[first:]


def _only(modifiers: Iterable[str], known: Iterable[str], ctx: Context) -> None:
    unknown = set(modifiers) - set(known)
    if unknown:
        raise ctx.unsupported(f"modifier {', '.join(sorted(unknown))}")


def _one_type(types: list[str], ctx: Context) -> str:
    if len(types) != 1 or types[0] == "pred":
        raise ctx.malformed("one type is expected")
    return types[0]


def _signless(type_name: str) -> str:
    return "b" + type_name[1:]


def _bits_as_unsigned(type_name: str) -> str:
    return type_name.replace("b", "u", 1)


def _regs(ins: Instruction, ctx: Context, *widths: int) -> list[int]:
    """Registers of all operands; the last width also applies to any further operands."""
    padded = [*widths, *widths[-1:] * (len(ins.operands) - len(widths))]
    return [ctx.reg(operand, width) for operand, width in zip(ins.operands, padded, strict=True)]


def _predicate(operand: Operand, ctx: Context) -> tuple[int, int]:
    """The register, and 1 if it is to be read negated, else 0."""
    if isinstance(operand, Negated):
        return ctx.reg(operand.register, 0), 1
    return ctx.reg(operand, 0), 0


def _two(operand: Operand) -> tuple[Operand, Operand | None]:
    """The two destinations of `a|b`; for `a` alone the second is None."""
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)


def _optional(operand: Operand | None, width: int, ctx: Context) -> int:
    return NO_REGISTER if operand is None else ctx.reg(operand, width)


# --- Arithmetic


@family("add", "sub", "mul", "mad", "fma", "div", "rem", "neg", "abs", "min", "max")
def arithmetic(ins: Instruction, ctx: Context) -> EngineOp:
    """PTX ISA: Integer, Floating Point, Half Precision and Mixed Precision Arithmetic Instructions."""
    mnemonic, modifiers, types = _split(ins)
    if len(types) == 2 and types[0] == "f32":
        return _mixed(ins, ctx, mnemonic, modifiers, types)
    type_name = _one_type(types, ctx)
    if type_name not in _REAL:
        return _integer(ins, ctx, mnemonic, modifiers, type_name)
    if mnemonic == "mad":  # an old name of fma
        mnemonic = "fma"
    if mnemonic in ("min", "max"):
        return _extremum(ins, ctx, mnemonic, modifiers, type_name)
    return _real(ins, ctx, mnemonic, modifiers, type_name)


@family("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def function(ins: Instruction, ctx: Context) -> EngineOp:
    mnemonic, modifiers, types = _split(ins)
    return _real(ins, ctx, mnemonic, modifiers, _one_type(types, ctx))


def _real(ins: Instruction, ctx: Context, mnemonic: str, modifiers: list[str], type_name: str) -> EngineOp:
    _only(modifiers, {"rn", "ftz", "sat", "relu", "approx", "full", *_DIRECTED}, ctx)
    if type_name == "f64":  # there is nothing to flush
        modifiers = [m for m in modifiers if m != "ftz"]
    return _rounded(mnemonic, modifiers, [type_name], _regs(ins, ctx, _width(type_name)))


def _mixed(ins: Instruction, ctx: Context, mnemonic: str, modifiers: list[str], types: list[str]) -> EngineOp:
    _only(modifiers, {"rn", "sat", *_DIRECTED}, ctx)
    return _rounded(mnemonic, modifiers, types, _regs(ins, ctx, 4))


def _rounded(mnemonic: str, modifiers: list[str], types: list[str], regs: list[int]) -> EngineOp:
    rounding = [_DIRECTED[m] for m in modifiers if m in _DIRECTED]
    kept = [m for m in ("ftz", "sat", "relu") if m in modifiers]
    return EngineOp(".".join([mnemonic, *["directed"][: len(rounding)], *kept, *types]), regs, rounding)


def _extremum(
    ins: Instruction, ctx: Context, mnemonic: str, modifiers: list[str], type_name: str
) -> EngineOp:
    _only(modifiers, {"ftz", "NaN", "xorsign", "abs"}, ctx)
    three = len(ins.operands) == 4
    kept: list[str] = [m for m in ("NaN", "xorsign") if m in modifiers]
    if three:
        kept += ["abs", "three"] if "abs" in modifiers else ["three"]
    kept += ["ftz"] if "ftz" in modifiers else []
    return EngineOp(".".join([mnemonic, *kept, type_name]), _regs(ins, ctx, _width(type_name)))


_HALVES = {"mul": {"lo", "hi", "wide"}, "mad": {"lo", "hi", "wide", "sat", "cc"}}
_OTHER_MODIFIERS = {"add": {"sat", "cc"}, "sub": {"sat", "cc"}, "min": {"relu"}, "max": {"relu"}}
_SIGNLESS = {"add", "sub", "mul.lo", "mad.lo", "neg"}


def _integer(ins: Instruction, ctx: Context, mnemonic: str, modifiers: list[str], type_name: str) -> EngineOp:
    _only(modifiers, _HALVES.get(mnemonic, set()) | _OTHER_MODIFIERS.get(mnemonic, set()), ctx)
    if "cc" in modifiers:
        return _extended(ins, ctx, mnemonic, modifiers, type_name, carry_in=False)
    if mnemonic in ("min", "max") and len(ins.operands) != 3:
        raise ctx.malformed("integers have two sources")
    name = ".".join([mnemonic, *modifiers])
    width = _width(type_name)
    if "wide" in modifiers:
        wide = 8 if width == 4 and type_name[1:] == "32" else 4
        widths = (wide, width, width, wide)[: len(ins.operands)]
        return EngineOp(f"{name}.{type_name}", _regs(ins, ctx, *widths))
    return EngineOp(
        f"{name}.{_signless(type_name) if name in _SIGNLESS else type_name}", _regs(ins, ctx, width)
    )


@family("addc", "subc", "madc")
def with_carry(ins: Instruction, ctx: Context) -> EngineOp:
    """PTX ISA: Extended-Precision Integer Arithmetic Instructions."""
    mnemonic, modifiers, types = _split(ins)
    _only(modifiers, {"lo", "hi", "cc"}, ctx)
    return _extended(ins, ctx, mnemonic[:-1], modifiers, _one_type(types, ctx), carry_in=True)


def _extended(
    ins: Instruction, ctx: Context, mnemonic: str, modifiers: list[str], type_name: str, *, carry_in: bool
) -> EngineOp:
    half = [m for m in modifiers if m in ("lo", "hi")]
    flags = [*["in"][: int(carry_in)], *["out"][: modifiers.count("cc")]]
    if mnemonic != "mad":
        type_name = _signless(type_name)
    elif half == ["lo"]:
        type_name = "u" + type_name[1:]
    return EngineOp(".".join([mnemonic, *half, *flags, type_name]), _regs(ins, ctx, _width(type_name)))


@family("sad")
def absolute_difference(ins: Instruction, ctx: Context) -> EngineOp:
    _, modifiers, types = _split(ins)
    _only(modifiers, (), ctx)
    type_name = _one_type(types, ctx)
    return EngineOp(f"sad.{type_name}", _regs(ins, ctx, _width(type_name)))


@family("dp4a")
def dot_product(ins: Instruction, ctx: Context) -> EngineOp:
    return EngineOp(ins.opcode, _regs(ins, ctx, 4))


@family("copysign")
def copy_sign(ins: Instruction, ctx: Context) -> EngineOp:
    return EngineOp(ins.opcode, _regs(ins, ctx, _width(_one_type(_split(ins)[2], ctx))))


# --- Logic, shifts and bit fields


@family("and", "or", "xor", "not", "cnot")
def logic(ins: Instruction, ctx: Context) -> EngineOp:
    mnemonic, modifiers, types = _split(ins)
    _only(modifiers, (), ctx)
    width = 0 if types == ["pred"] else _width(_one_type(types, ctx))
    return EngineOp(f"{mnemonic}.{types[0]}", _regs(ins, ctx, width))


@family("shl", "shr")
def shift(ins: Instruction, ctx: Context) -> EngineOp:
    mnemonic, modifiers, types = _split(ins)
    _only(modifiers, (), ctx)
    type_name = _one_type(types, ctx)
    kind = _signless(type_name) if mnemonic == "shl" else _bits_as_unsigned(type_name)
    width = _width(type_name)
    return EngineOp(f"{mnemonic}.{kind}", _regs(ins, ctx, width, width, 4))


@family("shf")
def funnel_shift(ins: Instruction, ctx: Context) -> EngineOp:
    modifiers = check_modifiers(ins, {"l", "r", "wrap", "clamp", "b32"}, ctx)
    side, mode = one_of("lr", modifiers, ctx), one_of(("wrap", "clamp"), modifiers, ctx)
    return EngineOp(f"shf.{side}.b32", _regs(ins, ctx, 4), [int(mode == "wrap")])


@family("bfe")
def extract_field(ins: Instruction, ctx: Context) -> EngineOp:
    width = _width(_one_type(_split(ins)[2], ctx))
    return EngineOp(ins.opcode, _regs(ins, ctx, width, width, 4))


@family("bfi")
def insert_field(ins: Instruction, ctx: Context) -> EngineOp:
    width = _width(_one_type(_split(ins)[2], ctx))
    return EngineOp(ins.opcode, _regs(ins, ctx, width, width, width, 4))


@family("bfind")
def find_bit(ins: Instruction, ctx: Context) -> EngineOp:
    _, modifiers, types = _split(ins)
    _only(modifiers, {"shiftamt"}, ctx)
    type_name = _one_type(types, ctx)
    return EngineOp(f"bfind.{type_name}", _regs(ins, ctx, 4, _width(type_name)), [len(modifiers)])


@family("clz", "popc")
def count_bits(ins: Instruction, ctx: Context) -> EngineOp:
    return EngineOp(ins.opcode, _regs(ins, ctx, 4, _width(_one_type(_split(ins)[2], ctx))))


@family("brev")
def reverse_bits(ins: Instruction, ctx: Context) -> EngineOp:
    return EngineOp(ins.opcode, _regs(ins, ctx, _width(_one_type(_split(ins)[2], ctx))))


@family("lop3")
def lookup(ins: Instruction, ctx: Context) -> EngineOp:
    check_modifiers(ins, {"b32"}, ctx)
    *registers, table = ins.operands
    return EngineOp("lop3.b32", [ctx.reg(o, 4) for o in registers], [ctx.integer(table, 0, 255)])


# The byte selectors that the low two bits of c choose.
_PERMUTE_MODES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


@family("prmt")
def permute_bytes(ins: Instruction, ctx: Context) -> EngineOp:
    modifiers = check_modifiers(ins, {"b32", *_PERMUTE_MODES}, ctx) - {"b32"}
    if not modifiers:
        return EngineOp("prmt.b32", _regs(ins, ctx, 4))
    selectors = _PERMUTE_MODES[one_of(_PERMUTE_MODES, modifiers, ctx)]
    return EngineOp("prmt.mode.b32", _regs(ins, ctx, 4), [sum(s << 16 * i for i, s in enumerate(selectors))])


# --- Comparison and selection

# The engine's comparison, whether its sources are swapped, whether its result is negated.
_INTEGER_COMPARISONS = {
    "eq": ("eq", False, False),
    "ne": ("eq", False, True),
    "lt": ("lt", False, False),
    "gt": ("lt", True, False),
    "ge": ("lt", False, True),
    "le": ("lt", True, True),
}
_UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
# An unordered comparison, which also holds if a source is NaN, is the negation of the opposite ordered one.
_REAL_COMPARISONS = {
    "eq": ("eq", False, False),
    "ne": ("ne", False, False),
    "lt": ("lt", False, False),
    "le": ("le", False, False),
    "gt": ("lt", True, False),
    "ge": ("le", True, False),
    "num": ("num", False, False),
    "equ": ("ne", False, True),
    "neu": ("eq", False, True),
    "ltu": ("le", True, True),
    "leu": ("lt", True, True),
    "gtu": ("le", False, True),
    "geu": ("lt", False, True),
    "nan": ("num", False, True),
}
_COMBINATIONS = ("and", "or", "xor")


class _Comparison:
    """What setp and set share: the engine's comparison, its sources and its attributes.

    sources: the operands to compare and, optionally, the predicate to combine with.
    """

    def __init__(self, modifiers: list[str], type_name: str, sources: tuple[Operand, ...], ctx: Context):
        comparison, others = "".join(modifiers[:1]), modifiers[1:]
        _only(others, {"ftz", *_COMBINATIONS}, ctx)
        if (len(sources) > 2) != bool({*_COMBINATIONS} & {*others}):
            raise ctx.malformed("a predicate to combine with needs .and, .or or .xor, and they it")
        real = type_name in _REAL
        table = _REAL_COMPARISONS if real else _INTEGER_COMPARISONS
        comparison = comparison if real else _UNSIGNED_NAMES.get(comparison, comparison)
        if comparison not in table:
            raise ctx.unsupported(f"comparison {comparison}")
        base, exchanged, negated = table[comparison]
        kind = _signless(type_name) if base == "eq" and not real else type_name
        flushed = "ftz." if "ftz" in others and type_name == "f32" else ""
        self.name = f"{base}.{flushed}{kind}"
        a, b = reversed(sources[:2]) if exchanged else sources[:2]
        self.regs = [ctx.reg(a, _width(type_name)), ctx.reg(b, _width(type_name))]
        combined, other_negated = _predicate(sources[2], ctx) if len(sources) > 2 else (NO_REGISTER, 0)
        self.regs.append(combined)
        how = next((1 + _COMBINATIONS.index(m) for m in others if m in _COMBINATIONS), 0)
        self.attrs = [int(negated), how, other_negated]


@family("setp")
def set_predicate(ins: Instruction, ctx: Context) -> EngineOp:
    _, modifiers, types = _split(ins)
    with_this = _Comparison(modifiers, _one_type(types, ctx), ins.operands[1:], ctx)
    p, q = _two(ins.operands[0])
    return EngineOp(
        f"setp.{with_this.name}",
        [ctx.reg(p, 0), _optional(q, 0, ctx), *with_this.regs],
        with_this.attrs,
    )


_TRUE = {"u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF, "f32": 0x3F800000}


@family("set")
def set_value(ins: Instruction, ctx: Context) -> EngineOp:
    _, modifiers, types = _split(ins)
    if len(types) != 2 or types[0] not in _TRUE:
        raise ctx.unsupported("types")
    with_this = _Comparison(modifiers, types[1], ins.operands[1:], ctx)
    return EngineOp(
        f"set.{with_this.name}",
        [ctx.reg(ins.operands[0], 4), *with_this.regs],
        [*with_this.attrs, _TRUE[types[0]]],
    )


@family("selp")
def select(ins: Instruction, ctx: Context) -> EngineOp:
    _, modifiers, types = _split(ins)
    _only(modifiers, (), ctx)
    type_name = _one_type(types, ctx)
    register, negated = _predicate(ins.operands[3], ctx)
    regs = [ctx.reg(operand, _width(type_name)) for operand in ins.operands[:3]]
    return EngineOp(f"selp.b{_bits(type_name)}", [*regs, register], [negated])


@family("slct")
def select_by_sign(ins: Instruction, ctx: Context) -> EngineOp:
    _, modifiers, types = _split(ins)
    _only(modifiers, {"ftz"}, ctx)
    if len(types) != 2 or "pred" in types:
        raise ctx.malformed("two types are expected")
    value, sign = types
    width = _width(value)
    name = ".".join(["slct", *modifiers, f"b{_bits(value)}", sign])
    return EngineOp(name, _regs(ins, ctx, width, width, width, 4))


_CLASSES = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")


@family("testp")
def test_class(ins: Instruction, ctx: Context) -> EngineOp:
    _, modifiers, types = _split(ins)
    _only(modifiers, _CLASSES, ctx)
    type_name = _one_type(types, ctx)
    which = _CLASSES.index(one_of(_CLASSES, modifiers, ctx))
    return EngineOp(f"testp.{type_name}", _regs(ins, ctx, 0, _width(type_name)), [which])


# --- Moves

# The shift to the right that makes each clock register from the engine's clock.
_CLOCKS = {
    "%clock": 0,
    "%clock_hi": 32,
    "%clock64": 0,
    "%globaltimer": 0,
    "%globaltimer_lo": 0,
    "%globaltimer_hi": 32,
}


@family("mov")
def move(ins: Instruction, ctx: Context) -> EngineOp:
    _, modifiers, types = _split(ins)
    _only(modifiers, (), ctx)
    destination, source = ins.operands
    if types == ["pred"]:
        return EngineOp("mov.pred", _regs(ins, ctx, 0))
    type_name = _one_type(types, ctx)
    whole = f"b{_bits(type_name)}"
    width = _width(type_name)
    if isinstance(destination, Vector):
        parts = _Parts(destination, whole, ctx)
        return EngineOp(f"unpack.{parts.name}", [*parts.regs, ctx.reg(source, width)])
    if isinstance(source, Vector):
        parts = _Parts(source, whole, ctx)
        return EngineOp(f"pack.{parts.name}", [ctx.reg(destination, width), *parts.regs])
    if isinstance(source, Register) and source.name in _CLOCKS:
        return EngineOp(f"clock.{whole}", [ctx.reg(destination, width)], [_CLOCKS[source.name]])
    return EngineOp(f"mov.{whole}", _regs(ins, ctx, width))


class _Parts:
    """The elements of a vector that fills a register of type `whole`."""

    def __init__(self, vector: Vector, whole: str, ctx: Context):
        bits = _bits(whole) // len(vector.elements)
        self.name = f"{whole}.b{bits}"
        self.regs = [ctx.reg(element, 4) for element in vector.elements]


# --- Conversions


class _Format(IntEnum):
    """Mirrors `FormatName` in csrc_stubs/no_gpu/number.h."""

    F16 = 0
    BF16 = 1
    TF32 = 2
    E4M3 = 3
    E5M2 = 4
    E2M1 = 5
    E2M3 = 6
    E3M2 = 7


# `SourceKind` in csrc_stubs/no_gpu/convert.cpp.
_SOURCE_KINDS = {
    name: kind
    for kind, name in enumerate(("f32", "f64", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64"))
}
_PACKED_SOURCE = len(_SOURCE_KINDS)
_TO_INTEGRAL = {"rni": 0, "rzi": 1, "rmi": 2, "rpi": 3}
_ROUNDINGS = {"rn": 0, **_DIRECTED, "rna": 4}
_FAST_NARROWING = {"f16", "bf16", "f16x2", "bf16x2"}


@family("cvt")
def convert(ins: Instruction, ctx: Context) -> EngineOp:
    """PTX ISA: cvt."""
    modifiers = ins.opcode.split(".")[1:]
    if len(modifiers) < 2:
        raise ctx.malformed("two types are expected")
    *modifiers, to, source = modifiers
    if not all(t in _SOURCE_KINDS or _is_format(t) for t in (to, source)):
        raise ctx.unsupported(f"from type {source} to {to}")
    _only(modifiers, {"ftz", "sat", "satfinite", "relu", *_TO_INTEGRAL, *_ROUNDINGS}, ctx)
    if _INTEGER.fullmatch(to):
        lowering = _integer_to_integer if _INTEGER.fullmatch(source) else _real_to_integer
    elif to in ("f32", "f64"):
        lowering = _to_wide
    else:
        lowering = _to_narrow
    return lowering(ins, ctx, set(modifiers), to, source)


def _container(ins: Instruction, ctx: Context) -> int:
    """Bits of the destination, which may be wider than its type."""
    destination = ins.operands[0]
    assert isinstance(destination, Register)
    if destination.type in ("", "pred", "b128"):
        raise ctx.malformed(f"{destination.name} cannot hold the result")
    return max(16, _bits(destination.type))


def _limits(type_name: str) -> list[int]:
    """Lowest and highest value, as 64 bits each."""
    bits = _bits(type_name)
    if type_name[0] == "s":
        return [-(1 << (bits - 1)), (1 << (bits - 1)) - 1]
    highest = (1 << bits) - 1
    return [0, highest - (1 << 64) if bits == 64 else highest]


def _source(ins: Instruction, ctx: Context, type_name: str) -> int:
    if len(ins.operands) != 2:
        raise ctx.malformed("one source is expected")
    return ctx.reg(ins.operands[1], _width(type_name))


def _integer_to_integer(
    ins: Instruction, ctx: Context, modifiers: set[str], to: str, source: str
) -> EngineOp:
    _only(modifiers, {"sat"}, ctx)
    container = _container(ins, ctx)
    into = ctx.reg(ins.operands[0], 8 if container == 64 else 4)
    # A source register may be wider than the type that is read of it.
    is_low = not modifiers and _bits(source) < 64 and _is_of_64_bits(ins.operands[-1])
    regs = [into, ctx.reg(ins.operands[1], 8) if is_low else _source(ins, ctx, source)]
    if modifiers:
        return EngineOp(f"cvt.sat.b{container}.{source}", regs, _limits(to))
    if _bits(to) < container:
        # The value is truncated to its type, whose sign then fills the register.
        if _bits(source) == 64 or (_bits(source) < _bits(to) and source[0] != to[0]):
            raise ctx.unsupported(f"a destination of {container} bits")
        source = to if _bits(to) <= _bits(source) else source
    return EngineOp(f"cvt.b{container}.{source}{'.low' * is_low}", regs)


def _is_of_64_bits(operand: Operand) -> bool:
    return isinstance(operand, Register) and not operand.special and operand.type in ("b64", "u64", "s64")


def _real_to_integer(ins: Instruction, ctx: Context, modifiers: set[str], to: str, source: str) -> EngineOp:
    _only(modifiers, {"ftz", "sat", *_TO_INTEGRAL}, ctx)
    if source not in ("f16", "bf16", "f32", "f64"):
        raise ctx.unsupported(f"a source of type {source}")
    container = _container(ins, ctx)
    nan = 0 if source != "f64" and _bits(to) < 64 else 1 << (_bits(to) - 1)
    rounding = next((_TO_INTEGRAL[m] for m in modifiers if m in _TO_INTEGRAL), _TO_INTEGRAL["rzi"])
    return EngineOp(
        f"cvt.integer.b{container}.{source}",
        [ctx.reg(ins.operands[0], 8 if container == 64 else 4), _source(ins, ctx, source)],
        [
            *_limits(to),
            nan - (1 << 64) if nan >> 63 else nan,
            rounding,
            int("ftz" in modifiers and source == "f32"),
        ],
    )


def _to_wide(ins: Instruction, ctx: Context, modifiers: set[str], to: str, source: str) -> EngineOp:
    """Lowers conversions to f32 or f64."""
    _only(modifiers, {"ftz", "sat", "rn", *_DIRECTED, *_TO_INTEGRAL}, ctx)
    regs = [ctx.reg(ins.operands[0], _width(to)), _source(ins, ctx, source)]
    integral = modifiers & set(_TO_INTEGRAL)
    if integral:
        if to != source:
            raise ctx.unsupported("rounding to integers between types")
        return EngineOp(
            f"cvt.integral.{to}",
            regs,
            [_TO_INTEGRAL[integral.pop()], int("ftz" in modifiers), int("sat" in modifiers)],
        )
    kept = [m for m in ("ftz", "sat") if m in modifiers]
    rounding = [_DIRECTED[m] for m in modifiers if m in _DIRECTED]
    return EngineOp(".".join(["cvt", *["directed"][: len(rounding)], *kept, to, source]), regs, rounding)


def _to_narrow(ins: Instruction, ctx: Context, modifiers: set[str], to: str, source: str) -> EngineOp:
    """Lowers conversions of one or two elements to the formats of 19 bits or fewer."""
    _only(modifiers, {"ftz", "sat", "satfinite", "relu", *_ROUNDINGS, *_TO_INTEGRAL}, ctx)
    packed, elements = source not in _SOURCE_KINDS, 2 if to.endswith("x2") else 1
    sources = 1 if packed else elements
    if len(ins.operands) != 1 + sources or (packed and source.endswith("x2") != (elements == 2)):
        raise ctx.malformed("another number of elements than the result has")
    regs = [ctx.reg(ins.operands[0], 4), *(ctx.reg(o, _width_of_source(source)) for o in ins.operands[1:])]
    if to in _FAST_NARROWING and source == "f32" and modifiers == {"rn"}:
        return EngineOp(f"cvt.rn.{to}.f32", regs)
    if to == source and modifiers & set(_TO_INTEGRAL):
        rounding = one_of(_TO_INTEGRAL, modifiers, ctx)
        return EngineOp(f"cvt.integral.{to}", regs, [_TO_INTEGRAL[rounding], 0, int("sat" in modifiers)])
    return EngineOp(
        "cvt.narrow",
        regs,
        [
            _format(to, ctx),
            elements,
            next((_ROUNDINGS[m] for m in modifiers if m in _ROUNDINGS), 0),
            int("satfinite" in modifiers),
            int("relu" in modifiers),
            int("ftz" in modifiers and source == "f32"),
            int("sat" in modifiers),
            _PACKED_SOURCE if packed else _SOURCE_KINDS[source],
            _format(source, ctx) if packed else 0,
        ],
    )


def _width_of_source(type_name: str) -> int:
    return 8 if type_name in ("f64", "s64", "u64") else 4


def _is_format(type_name: str) -> bool:
    return type_name.removesuffix("x2").upper() in _Format.__members__ and type_name != "tf32x2"


def _format(type_name: str, ctx: Context) -> int:
    if not _is_format(type_name):
        raise ctx.unsupported(f"type {type_name}")
    return _Format[type_name.removesuffix("x2").upper()]


# --- What lanes exchange


@family("shfl.sync")
def shuffle(ins: Instruction, ctx: Context) -> EngineOp:
    modifiers = check_modifiers(ins, {"sync", "up", "down", "bfly", "idx", "b32"}, ctx) - {"sync", "b32"}
    value, inside = _two(ins.operands[0])
    sources = [ctx.reg(operand, 4) for operand in ins.operands[1:]]
    mode = one_of(("up", "down", "bfly", "idx"), modifiers, ctx)
    return EngineOp(f"shfl.{mode}", [ctx.reg(value, 4), _optional(inside, 0, ctx), *sources])


@family("vote.sync")
def vote(ins: Instruction, ctx: Context) -> EngineOp:
    kinds = {"any", "all", "uni", "ballot"}
    modifiers = check_modifiers(ins, {"sync", "pred", "b32"} | kinds, ctx)
    kind = one_of(sorted(kinds), modifiers, ctx)
    source, negated = _predicate(ins.operands[1], ctx)
    result = ctx.reg(ins.operands[0], 4 if kind == "ballot" else 0)
    return EngineOp(f"vote.{kind}", [result, source, ctx.reg(ins.operands[2], 4)], [negated])


@family("match.any.sync", "match.all.sync")
def match(ins: Instruction, ctx: Context) -> EngineOp:
    modifiers = check_modifiers(ins, {"any", "all", "sync", "b32", "b64"}, ctx)
    type_name = one_of(("b32", "b64"), modifiers, ctx)
    lanes, agree = _two(ins.operands[0])
    sources = [ctx.reg(ins.operands[1], _width(type_name)), ctx.reg(ins.operands[2], 4)]
    if "any" in modifiers:
        if agree:
            raise ctx.malformed("match.any has one destination")
        return EngineOp(f"match.any.{type_name}", [ctx.reg(lanes, 4), *sources])
    return EngineOp(f"match.all.{type_name}", [ctx.reg(lanes, 4), _optional(agree, 0, ctx), *sources])


@family("redux.sync")
def reduce(ins: Instruction, ctx: Context) -> EngineOp:
    operations = {"add", "min", "max", "and", "or", "xor"}
    modifiers = check_modifiers(ins, {"sync", "abs", "NaN", "u32", "s32", "b32", "f32"} | operations, ctx)
    operation = one_of(sorted(operations), modifiers, ctx)
    type_name = one_of(("u32", "s32", "b32", "f32"), modifiers, ctx)
    regs = _regs(ins, ctx, 4)
    if type_name == "f32":
        return EngineOp(
            "redux.f32", regs, [int(operation == "max"), int("abs" in modifiers), int("NaN" in modifiers)]
        )
    kind = type_name if operation in ("min", "max") else "b32"
    return EngineOp(f"redux.{operation}.{kind}", regs)


@family("activemask")
def active_mask(ins: Instruction, ctx: Context) -> EngineOp:
    return EngineOp("activemask", _regs(ins, ctx, 4))


@family("elect.sync")
def elect(ins: Instruction, ctx: Context) -> EngineOp:
    leader, elected = _two(ins.operands[0])
    return EngineOp("elect", [ctx.reg(leader, 4), _optional(elected, 0, ctx), ctx.reg(ins.operands[1], 4)])


@family("nanosleep")
def sleep(ins: Instruction, ctx: Context) -> EngineOp:
    return EngineOp("nanosleep")
