"""Asynchronous copies and their groups, and tensor maps. PTX ISA: Data Movement, asynchronous copies."""

from __future__ import annotations

import re
from enum import IntEnum

from flash4_torch.emulator.lower.base import NO_REGISTER, Context, EngineOp, check_modifiers, family, one_of
from flash4_torch.emulator.lower.memory import (
    REDUCED_TYPES,
    SPACES,
    ElementType,
    Reduction,
    Space,
    address_of,
    check_vector,
    elements,
)
from flash4_torch.emulator.ptx import Address, Immediate, Instruction, Operand, Register

COPY = -1  # stands where a reduction's number is expected

_SHARED = {"shared::cta", "shared::cluster"}
_COMPLETION = "mbarrier::complete_tx::bytes"
_COMMON = {"L2::cache_hint", "bulk_group", _COMPLETION}


class _Operands:
    """An instruction's operands, taken one after the other; the cache policy at the end is left out."""

    def __init__(self, ins: Instruction, ctx: Context):
        self.left = list(ins.operands)
        if "L2::cache_hint" in ins.opcode:
            self.left.pop()
        self.ctx = ctx

    def address(self, space: Space) -> tuple[int, int]:
        return address_of(self.next(), space, self.ctx)

    def next(self) -> Operand:
        if not self.left:
            raise self.ctx.malformed("an operand is missing")
        return self.left.pop(0)

    def reg(self, width: int) -> int:
        return self.ctx.reg(self.next(), width)

    def optional(self, present: bool, width: int) -> int:
        return self.reg(width) if present else NO_REGISTER

    def tensor(self) -> tuple[int, int, list[int]]:
        """Register and constant of a tensor map's address, and the coordinates."""
        operand = self.next()
        assert isinstance(operand, Address)
        base, offset = address_of(operand, Space.GENERIC, self.ctx)
        return base, offset, [self.ctx.reg(c, 4) for c in operand.coordinates]

    def finish(self) -> None:
        if self.left:
            raise self.ctx.malformed("an operand too many")


def _reduction(name: str, ctx: Context) -> Reduction:
    if name.upper() not in Reduction.__members__:
        raise ctx.unsupported(f"reduction {name}")
    return Reduction[name.upper()]


@family("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def tensor_copy(ins: Instruction, ctx: Context) -> EngineOp:
    reduction, modifiers = COPY, ins.opcode.partition(".tensor.")[2].split(".")
    if len(modifiers) < 4:
        raise ctx.malformed("the opcode must name a rank, two spaces and more")
    rank, target, source, *rest = modifiers
    if ins.opcode.startswith("cp.reduce"):
        reduction = _reduction(rest.pop(0), ctx)
    known = {"tile", "multicast::cluster", "cta_group::1", "cta_group::2"} | _COMMON
    if unknown := set(rest) - known:
        raise ctx.unsupported(f"modifier {', '.join(sorted(unknown))}")
    operands = _Operands(ins, ctx)
    if target == "global" and source == "shared::cta":
        op = _tensor_store(operands, reduction)
        coordinates = len(op.regs) - 2
    elif target in _SHARED and source == "global":
        op = _tensor_load(operands, rest)
        coordinates = len(op.regs) - 4
    else:
        raise ctx.unsupported(f"from {source} to {target}")
    operands.finish()
    if rank != f"{coordinates}d" or not 1 <= coordinates <= 5:
        raise ctx.malformed(f"{coordinates} coordinates")
    return op


def _tensor_load(operands: _Operands, modifiers: list[str]) -> EngineOp:
    tile, tile_offset = operands.address(Space.SHARED)
    tensor_map, map_offset, coordinates = operands.tensor()
    barrier, barrier_offset = operands.address(Space.SHARED)
    ctas = operands.optional("multicast::cluster" in modifiers, 4)
    pairs = "cta_group::2" in modifiers
    return EngineOp(
        "tma.load",
        [tile, tensor_map, barrier, ctas, *coordinates],
        [tile_offset, map_offset, barrier_offset, int(pairs)],
    )


def _tensor_store(operands: _Operands, reduction: int) -> EngineOp:
    tensor_map, map_offset, coordinates = operands.tensor()
    tile, tile_offset = operands.address(Space.SHARED)
    return EngineOp("tma.store", [tensor_map, tile, *coordinates], [map_offset, tile_offset, reduction])


@family("cp.async.bulk", "cp.reduce.async.bulk")
def bulk_copy(ins: Instruction, ctx: Context) -> EngineOp:
    target, source, *rest = [*ins.opcode.partition(".bulk.")[2].split("."), ""]
    modifiers = set(rest) - _COMMON - {""}
    reduction, kind = COPY, ElementType.U8
    if ins.opcode.startswith("cp.reduce"):
        named = [m for m in rest if m in modifiers and m != "noftz"]
        if len(named) < 2:
            raise ctx.malformed("the opcode must name an operation and a type")
        name, type_name = named[-2:]
        if type_name not in REDUCED_TYPES:
            raise ctx.unsupported(f"type {type_name}")
        reduction, kind = _reduction(name, ctx), REDUCED_TYPES[type_name]
        modifiers -= {name, type_name, "noftz"}
    multicast = "multicast::cluster" in modifiers
    if unknown := modifiers - {"multicast::cluster"}:
        raise ctx.unsupported(f"modifier {', '.join(sorted(unknown))}")
    spaces = (SPACES.get(target), SPACES.get(source))
    if None in spaces or spaces == (Space.GLOBAL, Space.GLOBAL):
        raise ctx.unsupported(f"from {source} to {target}")
    operands = _Operands(ins, ctx)
    to, to_offset = operands.address(SPACES[target])
    origin, origin_offset = operands.address(SPACES[source])
    size = operands.reg(4)
    regs, attrs = [to, origin, size], [to_offset, origin_offset]
    if spaces == (Space.GLOBAL, Space.SHARED):
        operands.finish()
        return EngineOp("bulk.store", regs, [*attrs, reduction, kind])
    barrier, barrier_offset = operands.address(Space.SHARED)
    ctas = operands.optional(multicast, 4)
    operands.finish()
    if spaces == (Space.SHARED, Space.SHARED):
        return EngineOp("bulk.copy", [*regs, barrier], [*attrs, barrier_offset, reduction, kind])
    return EngineOp("bulk.load", [*regs, barrier, ctas], [*attrs, barrier_offset])


@family("cp.async.bulk.commit_group")
def bulk_commit(ins: Instruction, ctx: Context) -> EngineOp:
    return EngineOp("bulk.commit")


@family("cp.async.bulk.wait_group")
def bulk_wait(ins: Instruction, ctx: Context) -> EngineOp:
    return EngineOp("bulk.wait", attrs=[ctx.integer(ins.operands[0], 0), int(ins.opcode.endswith(".read"))])


@family("cp.async")
def async_copy(ins: Instruction, ctx: Context) -> EngineOp:
    known = {"async", "ca", "cg", "shared", "shared::cta", "global", "L2::cache_hint"}
    modifiers = check_modifiers(ins, known | {f"L2::{n}B" for n in (64, 128, 256)}, ctx)
    sizes = {"ca": (4, 8, 16), "cg": (16,)}[one_of(("ca", "cg"), modifiers, ctx)]
    one_of(("shared", "shared::cta"), modifiers, ctx)
    one_of(("global",), modifiers, ctx)
    operands = _Operands(ins, ctx)
    to, to_offset = operands.address(Space.SHARED)
    source, source_offset = operands.address(Space.GLOBAL)
    size = ctx.integer(operands.next())
    if size not in sizes:
        raise ctx.malformed(f"{size} bytes; possible: {', '.join(map(str, sizes))}")
    ignores = (
        bool(operands.left) and isinstance(operands.left[0], Register) and operands.left[0].type == "pred"
    )
    ignored = operands.optional(ignores, 0)
    reads = operands.optional(bool(operands.left), 4)
    operands.finish()
    return EngineOp("cp.async", [to, source, reads, ignored], [to_offset, source_offset, size])


@family("cp.async.commit_group")
def async_commit(ins: Instruction, ctx: Context) -> EngineOp:
    check_modifiers(ins, {"async", "commit_group"}, ctx)
    return EngineOp("cp.async.commit")


@family("cp.async.wait_group")
def async_wait(ins: Instruction, ctx: Context) -> EngineOp:
    check_modifiers(ins, {"async", "wait_group"}, ctx)
    return EngineOp("cp.async.wait", attrs=[ctx.integer(ins.operands[0], 0)])


@family("cp.async.wait_all")
def async_wait_all(ins: Instruction, ctx: Context) -> EngineOp:
    check_modifiers(ins, {"async", "wait_all"}, ctx)
    return EngineOp("cp.async.wait_all")


@family("cp.async.mbarrier.arrive")
def async_arrive(ins: Instruction, ctx: Context) -> EngineOp:
    modifiers = check_modifiers(
        ins, {"async", "mbarrier", "arrive", "noinc", "shared", "shared::cta", "b64"}, ctx
    )
    barrier, offset = address_of(ins.operands[0], Space.SHARED, ctx)
    return EngineOp("cp.async.arrive", [barrier], [offset, int("noinc" in modifiers)])


@family("st.async", "red.async")
def async_store(ins: Instruction, ctx: Context) -> EngineOp:
    ignored = {"async", "weak", "relaxed", "cluster", "shared::cluster", _COMPLETION, "v2", "v4"}
    rest = [m for m in ins.opcode.split(".")[1:] if m not in ignored]
    kind = rest.pop() if rest else ""
    match = re.fullmatch(r"[busf](32|64)", kind)
    if not match or len(rest) != int(ins.opcode.startswith("red")):
        raise ctx.unsupported(f"modifiers {'.'.join([*rest, kind])}")
    reduction = _reduction(rest[0], ctx) if rest else COPY
    each = int(match[1]) // 8
    check_vector(ins, ins.operands[1], each, Space.GLOBAL, ctx)
    to, to_offset = address_of(ins.operands[0], Space.SHARED, ctx)
    values = [ctx.reg(v, each) for v in elements(ins.operands[1])]
    barrier, barrier_offset = address_of(ins.operands[2], Space.SHARED, ctx)
    return EngineOp(
        "st.async", [to, barrier, *values], [to_offset, barrier_offset, each, reduction, REDUCED_TYPES[kind]]
    )


class _Field(IntEnum):
    """Mirrors `Field` in csrc_stubs/no_gpu/tensor_map.h."""

    GLOBAL_ADDRESS = 0
    RANK = 1
    BOX_DIM = 2
    GLOBAL_DIM = 3
    GLOBAL_STRIDE = 4
    ELEMENT_STRIDE = 5
    ELEMTYPE = 6
    INTERLEAVE_LAYOUT = 7
    SWIZZLE_MODE = 8
    FILL_MODE = 9


@family("tensormap.replace")
def replace_field(ins: Instruction, ctx: Context) -> EngineOp:
    _, _, mode, field, *rest = [*ins.opcode.split("."), "", ""]
    if mode != "tile" or field.upper() not in _Field.__members__:
        raise ctx.unsupported(f"field {field} of mode {mode}")
    space = next((SPACES[m] for m in rest if m in SPACES), Space.GENERIC)
    address, *middle, value = ins.operands
    base, offset = address_of(address, space, ctx)
    dimension = ctx.integer(middle[0], 0, 4) if middle else 0
    width = 8 if "b64" in rest else 4
    return EngineOp(
        "tensormap.replace",
        [base, ctx.reg(value, width)],
        [offset, space, _Field[field.upper()], dimension, width],
    )


@family("tensormap.cp_fenceproxy")
def publish_map(ins: Instruction, ctx: Context) -> EngineOp:
    target, source, size = ins.operands
    if size != Immediate(128):
        raise ctx.unsupported(f"size {size}")
    to, to_offset = address_of(target, Space.GLOBAL, ctx)
    origin, origin_offset = address_of(source, Space.SHARED, ctx)
    return EngineOp("tensormap.publish", [to, origin], [to_offset, origin_offset])
