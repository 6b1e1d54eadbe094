"""Loads, stores, atomics, matrix moves and addresses. PTX ISA: Data Movement and Conversion; atom, red."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum

from flash4_torch.emulator.lower.base import NO_REGISTER, Context, EngineOp, check_modifiers, family, one_of
from flash4_torch.emulator.ptx import Address, Immediate, Instruction, Operand, Register, Vector, type_bytes


class Space(IntEnum):
    """Mirrors `Space` in csrc_stubs/no_gpu/memory.h."""

    SHARED = 0
    GLOBAL = 1
    GENERIC = 2

    @property
    def address_bytes(self) -> int:
        return 4 if self is Space.SHARED else 8


class ElementType(IntEnum):
    """Mirrors `ElementType` in csrc_stubs/no_gpu/reduce.h."""

    U8 = 0
    U16 = 1
    U32 = 2
    S32 = 3
    U64 = 4
    S64 = 5
    F16 = 6
    F32 = 7
    F32_FLUSHED = 8
    F64 = 9
    BF16 = 10


class Reduction(IntEnum):
    """Mirrors `Reduction` in csrc_stubs/no_gpu/reduce.h."""

    ADD = 0
    MIN = 1
    MAX = 2
    AND = 3
    OR = 4
    XOR = 5
    INC = 6
    DEC = 7
    EXCH = 8


SPACES = {
    "shared": Space.SHARED,
    "shared::cta": Space.SHARED,
    "shared::cluster": Space.SHARED,
    "global": Space.GLOBAL,
    "const": Space.GLOBAL,
}
SCOPES = frozenset({"cta", "cluster", "gpu", "sys"})
STRONG = frozenset({"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"})
# These modifiers tell the caches what to expect, and there are no caches here.
HINTS = re.compile(r"nc|ca|cg|cs|lu|cv|wb|wt|weak|unified|L[12]::\w+(::\w+)?|level::\w+(::\w+)?")
VECTORS = frozenset({"v2", "v4", "v8"})
VECTOR_BYTES = 16  # for a lane's access to shared memory; twice as many to global memory
TYPE = re.compile(r"(?P<kind>[busf]|bf)(?P<bits>8|16|32|64)")
REDUCED_TYPES = {
    "u32": ElementType.U32,
    "b32": ElementType.U32,
    "s32": ElementType.S32,
    "u64": ElementType.U64,
    "b64": ElementType.U64,
    "s64": ElementType.S64,
    "f16": ElementType.F16,
    "f16x2": ElementType.F16,
    "bf16": ElementType.BF16,
    "bf16x2": ElementType.BF16,
    "f32": ElementType.F32,
    "f64": ElementType.F64,
}
# Bytes of memory per register of an atomic's type, where it is not 4.
REGISTER_BYTES = {"f16": 2, "bf16": 2, "u64": 8, "b64": 8, "s64": 8, "f64": 8}


_PASSED_OVER = SCOPES | VECTORS | {"param"}


def address_of(operand: Operand, space: Space, ctx: Context) -> tuple[int, int]:
    """Register and constant of an address in a state space."""
    if not isinstance(operand, Address):
        raise ctx.malformed("an address is needed")
    base = operand.base
    if (
        isinstance(base, Register)
        and not base.special
        and base.type.endswith("64") != (space is not Space.SHARED)
    ):
        raise ctx.unsupported(f"an address of another width than the state space's in {base.name}")
    return ctx.address(operand, space.address_bytes)


SHARED_WINDOW = 0x5A << 56  # kSharedWindow in csrc_stubs/no_gpu/memory.h


def place_of(operand: Operand, space: Space, ctx: Context) -> tuple[Space, int, int]:
    """State space, register and constant of an address; a 64-bit shared address becomes a generic one."""
    if (
        space is Space.SHARED
        and isinstance(operand, Address)
        and isinstance(operand.base, Register)
        and operand.base.type.endswith("64")
    ):
        base, offset = ctx.address(operand, 8)
        return Space.GENERIC, base, SHARED_WINDOW + offset
    return space, *address_of(operand, space, ctx)


def elements(operand: Operand) -> Sequence[Operand]:
    return operand.elements if isinstance(operand, Vector) else (operand,)


def check_vector(ins: Instruction, operand: Operand, each: int, space: Space, ctx: Context) -> None:
    """Raises unless the operand has the number of elements, of `each` bytes, that the opcode says."""
    count = max((int(m[1:]) for m in ins.opcode.split(".") if m in VECTORS), default=1)
    if len(elements(operand)) != count:
        raise ctx.malformed(f"{len(elements(operand))} registers where the opcode says {count}")
    limit = VECTOR_BYTES if space is Space.SHARED else 2 * VECTOR_BYTES
    if count * each > limit:
        raise ctx.malformed(f"{count * each} bytes at once; {limit} are possible")


def _split_access(ins: Instruction, ctx: Context) -> tuple[Space, str, int, bool]:
    """State space, kind and bits of the type, and whether the access is strong, for a load or store."""
    space, kind, bits, strong = Space.GENERIC, "", 0, False
    for modifier in ins.opcode.split(".")[1:]:
        if modifier in SPACES:
            space = SPACES[modifier]
        elif match := TYPE.fullmatch(modifier):
            kind, bits = match["kind"], int(match["bits"])
        elif modifier in STRONG:
            strong = True
        elif not (modifier in _PASSED_OVER or HINTS.fullmatch(modifier)):
            raise ctx.unsupported(f"modifier {modifier}")
    if not bits:
        raise ctx.unsupported("type")
    return space, kind, bits, strong


def _register_bits(operands: Sequence[Operand], ctx: Context) -> int | None:
    """Bits of the registers of one access; None if they are all sinks or constants."""
    types = {o.type for o in operands if isinstance(o, Register) and o.type}
    if types & {"pred", "b128"}:
        raise ctx.malformed("a register that cannot be loaded and stored")
    bits = {8 * type_bytes(type_name) for type_name in types}
    if len(bits) > 1:
        raise ctx.unsupported("registers of different widths")
    return bits.pop() if bits else None


@family("ld", "ldu")
def load(ins: Instruction, ctx: Context) -> EngineOp:
    space, kind, bits, strong = _split_access(ins, ctx)
    targets = elements(ins.operands[0])
    check_vector(ins, ins.operands[0], bits // 8, space, ctx)
    width = _register_bits(targets, ctx) or bits
    name = f"{'s' if kind == 's' and width > bits else 'u'}{bits}"
    if name[0] == "s":
        name += f".{width}"
    elif width == 64 and bits < 64:
        name += ".64"
    regs = [ctx.reg(t, 8 if width == 64 else 4) for t in targets]
    place = ins.operands[1]
    assert isinstance(place, Address)
    if ".param" in ins.opcode:
        if not isinstance(place.base, Register):
            return EngineOp(f"ld.param.{name}", regs, [ctx.parameter(place)])
        space = Space.GLOBAL
    space, base, offset = place_of(place, space, ctx)
    return EngineOp(f"ld.{space.name.lower()}.{name}", [base, *regs], [offset, int(strong)])


@family("st")
def store(ins: Instruction, ctx: Context) -> EngineOp:
    space, _, bits, strong = _split_access(ins, ctx)
    if ".param" in ins.opcode:
        raise ctx.unsupported("writing to parameters")
    sources = elements(ins.operands[1])
    check_vector(ins, ins.operands[1], bits // 8, space, ctx)
    width = _register_bits(sources, ctx) or bits
    name = f"u{bits}.64" if width == 64 and bits < 64 else f"u{bits}"
    space, base, offset = place_of(ins.operands[0], space, ctx)
    regs = [ctx.reg(s, 8 if width == 64 else 4) for s in sources]
    return EngineOp(f"st.{space.name.lower()}.{name}", [base, *regs], [offset, int(strong)])


@family("st.bulk")
def store_zeros(ins: Instruction, ctx: Context) -> EngineOp:
    modifiers = check_modifiers(ins, {"bulk", "weak", "shared::cta"}, ctx)
    space = Space.SHARED if "shared::cta" in modifiers else Space.GENERIC
    if len(ins.operands) > 2:
        ctx.integer(ins.operands[2], 0, 0)
    base, offset = address_of(ins.operands[0], space, ctx)
    return EngineOp("st.bulk", [base, ctx.reg(ins.operands[1], 8)], [offset, int(space is Space.GENERIC)])


@family("atom", "red")
def atomic(ins: Instruction, ctx: Context) -> EngineOp:
    """Lowers an atomic. The strongest ordering and scope serve all: see `acquire_flag` in memory.h."""
    parts = ins.opcode.split(".")[1:]
    space = next((SPACES[p] for p in parts if p in SPACES), Space.GENERIC)
    rest = [p for p in parts if not (p in SPACES or p in SCOPES or p in STRONG or p in VECTORS)]
    rest = [p for p in rest if p != "noftz" and not HINTS.fullmatch(p)]
    if len(rest) != 2:
        raise ctx.unsupported(f"modifiers {', '.join(rest)}")
    operation, kind = sorted(rest, key=REDUCED_TYPES.__contains__)
    operands = list(ins.operands)
    if "L2::cache_hint" in parts:
        operands.pop()
    old: Operand | None = operands.pop(0) if ins.opcode.startswith("atom") else None
    base, offset = address_of(operands[0], space, ctx)
    if len(operands) != (3 if operation == "cas" else 2):
        raise ctx.malformed(f"another number of operands than {operation} has")
    if operation == "cas":
        return _compare_and_swap(kind, old, [base, offset], space, operands[1:3], ctx)
    if operation.upper() not in Reduction.__members__ or kind not in REDUCED_TYPES:
        raise ctx.unsupported(f"{operation} of {kind}")
    element = REDUCED_TYPES[kind]
    if element is ElementType.F32 and operation == "add" and space is not Space.SHARED:
        element = ElementType.F32_FLUSHED
    each = REGISTER_BYTES.get(kind, 4)
    width = max(each, 4)
    for operand in (operands[1], *([old] if old else [])):
        check_vector(ins, operand, each, space, ctx)
    values = [ctx.reg(v, width) for v in elements(operands[1])]
    olds = [ctx.reg(o, width) for o in elements(old)] if old else [NO_REGISTER] * len(values)
    return EngineOp(
        "atom", [base, *olds, *values], [offset, space, Reduction[operation.upper()], element, each]
    )


def _compare_and_swap(
    kind: str, old: Operand | None, place: list[int], space: Space, values: list[Operand], ctx: Context
) -> EngineOp:
    if kind not in ("b16", "b32", "b64", "u32", "s32", "u64"):
        raise ctx.unsupported(f"cas of {kind}")
    size = int(kind[1:]) // 8
    width = max(size, 4)
    before = ctx.reg(old, width) if old else NO_REGISTER
    base, offset = place
    return EngineOp("atom.cas", [base, before, *(ctx.reg(v, width) for v in values)], [offset, space, size])


@family("ldmatrix", "stmatrix")
def matrix(ins: Instruction, ctx: Context) -> EngineOp:
    known = {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"}
    modifiers = check_modifiers(ins, known, ctx)
    loads = ins.opcode.startswith("ld")
    fragments, place = ins.operands if loads else reversed(ins.operands)
    if not modifiers & {"shared", "shared::cta"}:
        raise ctx.unsupported("generic address")
    base, offset = address_of(place, Space.SHARED, ctx)
    regs = [ctx.reg(f, 4) for f in elements(fragments)]
    if len(regs) != int(one_of(("x1", "x2", "x4"), modifiers, ctx)[1]):
        raise ctx.malformed(f"{len(regs)} registers")
    return EngineOp("ldmatrix" if loads else "stmatrix", [base, *regs], [offset, int("trans" in modifiers)])


@family("movmatrix")
def transpose_matrix(ins: Instruction, ctx: Context) -> EngineOp:
    check_modifiers(ins, {"sync", "aligned", "m8n8", "trans", "b16"}, ctx)
    return EngineOp("movmatrix", [ctx.reg(o, 4) for o in ins.operands])


@family("cvta")
def convert_address(ins: Instruction, ctx: Context) -> EngineOp:
    parts = set(ins.opcode.split(".")[1:])
    if "u64" not in parts or not parts <= {"to", "u64", "param", *SPACES}:
        raise ctx.unsupported("modifiers")
    shared = any(SPACES.get(p) is Space.SHARED for p in parts)
    name = ("cvta.to.shared" if "to" in parts else "cvta.shared") if shared else "cvta.same"
    return EngineOp(name, [ctx.reg(o, 8) for o in ins.operands])


@family("mapa")
def map_to_cta(ins: Instruction, ctx: Context) -> EngineOp:
    modifiers = check_modifiers(ins, {"shared::cluster", "u32", "u64"}, ctx)
    kind, width = ("u64", 8) if "u64" in modifiers else ("u32", 4)
    target, source, rank = ins.operands
    return EngineOp(f"mapa.{kind}", [ctx.reg(target, width), ctx.reg(source, width), ctx.reg(rank, 4)])


@family("getctarank")
def cta_rank(ins: Instruction, ctx: Context) -> EngineOp:
    modifiers = check_modifiers(ins, {"shared::cluster", "u32", "u64"}, ctx)
    kind, width = ("u64", 8) if "u64" in modifiers else ("u32", 4)
    return EngineOp(f"getctarank.{kind}", [ctx.reg(ins.operands[0], 4), ctx.reg(ins.operands[1], width)])


@family("isspacep")
def is_in_space(ins: Instruction, ctx: Context) -> EngineOp:
    space = ins.opcode.partition(".")[2]
    names = {"shared": "shared::cta", "const": "none", "local": "none", "param::entry": "param"}
    return EngineOp(
        f"isspacep.{names.get(space, space)}", [ctx.reg(ins.operands[0], 0), ctx.reg(ins.operands[1], 8)]
    )


@family("prefetch", "prefetchu", "applypriority", "cp.async.bulk.prefetch")
def prefetch(ins: Instruction, ctx: Context) -> EngineOp:
    """A prefetch does nothing: there are no caches."""
    return EngineOp("nop")


@family("createpolicy")
def cache_policy(ins: Instruction, ctx: Context) -> EngineOp:
    """A cache policy does nothing: instructions that take one ignore it."""
    return EngineOp("cvta.same", [ctx.reg(ins.operands[0], 8), ctx.reg(Immediate(0), 8)])
