"""Tensor cores.

PTX ISA: Warp Level Matrix Instructions; Asynchronous Warpgroup Level Matrix Instructions; TensorCore 5th
Generation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from flash4_torch.emulator.lower.base import Context, EngineOp, check_modifiers, family, one_of
from flash4_torch.emulator.ptx import Address, Instruction, Negated, Operand, Register, Vector

# Each list is in the order of the C++ enumeration that its comment names.
ELEMENTS = ("f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8")  # Element, matrix.h
ACCUMULATORS = ("f32", "f16", "s32")  # Accumulator, fragment.h
SHAPES = ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")  # Pattern, tmem_access.cpp
KINDS = ("f16", "tf32", "f8f6f4", "i8")  # Kind, tcgen05.cpp
COPIES = (  # Spread, tcgen05.cpp
    ("128x256b", None),
    ("128x128b", None),
    ("64x128b", "warpx2::02_13"),
    ("64x128b", "warpx2::01_23"),
    ("32x128b", "warpx4"),
)

_REGISTERS_A_REPEAT = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
_GROUPS = {"cta_group::1": 1, "cta_group::2": 2}
_K_OF_32_BYTES = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}
_FP8 = {"e4m3", "e5m2"}


def _elements(operand: Operand, ctx: Context) -> tuple[Operand, ...]:
    """The operands in braces; a single operand may stand without them."""
    if isinstance(operand, Vector):
        return operand.elements
    if isinstance(operand, Register):
        return (operand,)
    raise ctx.unsupported(f"operand {operand}")


def _predicate(operand: Operand, ctx: Context) -> int:
    if isinstance(operand, Negated):
        raise ctx.unsupported("a negated predicate")
    return ctx.reg(operand, 0)


def _place(operand: Operand, width: int, ctx: Context) -> tuple[int, int]:
    if not isinstance(operand, Address):
        raise ctx.unsupported(f"operand {operand} where an address is needed")
    return ctx.address(operand, width)


# --- mma.sync

_WARP_MMA_ELEMENTS = {"f32": {"f16", "bf16", "tf32", *_FP8}, "f16": {"f16", *_FP8}}


@family("mma.sync")
def warp_mma(ins: Instruction, ctx: Context) -> EngineOp:
    """Lowers `mma.sync d, a, b, c`: floating-point types, M 16, N 8, 16 or 32 bytes of K."""
    match = re.fullmatch(r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col\.(\w+)\.(\w+)\.(\w+)\.(\w+)", ins.opcode)
    if not match:
        raise ctx.unsupported("this form of mma.sync")
    k, accumulator, a, b, c = match.groups()
    if accumulator != c or not {a, b} <= _WARP_MMA_ELEMENTS.get(accumulator, set()):
        raise ctx.unsupported("these types of mma.sync")
    if a != b and not {a, b} <= _FP8:
        raise ctx.malformed(f"A is .{a} and B is .{b}")
    k_bytes = {_K_OF_32_BYTES[a]: 32, _K_OF_32_BYTES[a] // 2: 16}.get(int(k))
    if k_bytes is None:
        raise ctx.malformed(
            f"K is {k}; for .{a} {_K_OF_32_BYTES[a] // 2} and {_K_OF_32_BYTES[a]} are possible"
        )
    accumulators = 2 if accumulator == "f16" else 4
    counts = {"D": accumulators, "A": k_bytes // 8, "B": k_bytes // 16, "C": accumulators}
    regs = []
    for (name, count), operand in zip(counts.items(), ins.operands, strict=True):
        registers = _elements(operand, ctx)
        if len(registers) != count:
            raise ctx.malformed(f"{len(registers)} registers of {name} where the opcode says {count}")
        regs += [ctx.reg(register, 4) for register in registers]
    return EngineOp(
        "mma.sync", regs, [k_bytes, ELEMENTS.index(a), ELEMENTS.index(b), ACCUMULATORS.index(accumulator)]
    )


# --- wgmma


@family("wgmma.fence", "wgmma.commit_group", "wgmma.wait_group")
def wgmma_synchronisation(ins: Instruction, ctx: Context) -> EngineOp:
    check_modifiers(ins, {"fence", "commit_group", "wait_group", "sync", "aligned"}, ctx)
    name = ".".join(ins.opcode.split(".")[:2])
    return EngineOp(name, attrs=[ctx.integer(operand, 0) for operand in ins.operands])


@family("wgmma.mma_async")
def wgmma(ins: Instruction, ctx: Context) -> EngineOp:
    """Lowers wgmma: D, A (descriptor or registers), B, scale-d, then the signs and majors its type allows."""
    match = re.fullmatch(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(\w+)\.(\w+)\.(\w+)(\.satfinite)?", ins.opcode
    )
    if not match:
        raise ctx.unsupported("this form of wgmma.mma_async")
    n, k, accumulator, a, b, saturate = match.groups()
    if int(n) not in range(8, 257, 8):
        raise ctx.malformed("N must be a multiple of 8 from 8 to 256")
    if (
        a not in ELEMENTS
        or b not in ELEMENTS
        or accumulator not in ACCUMULATORS
        or int(k) != _K_OF_32_BYTES[a]
    ):
        raise ctx.unsupported("these types of wgmma.mma_async")
    d, a_operand, descriptor, scale_d, *rest = ins.operands
    accumulators = _elements(d, ctx)
    if len(accumulators) != int(n) // (4 if accumulator == "f16" else 2):
        raise ctx.unsupported(f"{len(accumulators)} accumulators")
    in_registers = isinstance(a_operand, Vector)
    if in_registers and len(_elements(a_operand, ctx)) != 4:
        raise ctx.malformed("A in registers must be four of them")
    fragment = [ctx.reg(r, 4) for r in _elements(a_operand, ctx)] if in_registers else [ctx.reg(a_operand, 8)]
    negate_a, negate_b, a_mn, b_mn = _signs_and_majors(rest, in_registers, a, ctx)
    return EngineOp(
        "wgmma.mma_async",
        [*(ctx.reg(r, 4) for r in accumulators), *fragment, ctx.reg(descriptor, 8), _predicate(scale_d, ctx)],
        [
            int(n),
            ELEMENTS.index(a),
            ELEMENTS.index(b),
            ACCUMULATORS.index(accumulator),
            int(in_registers),
            negate_a,
            negate_b,
            a_mn,
            b_mn,
            int(saturate is not None),
        ],
    )


def _signs_and_majors(
    rest: Sequence[Operand], in_registers: bool, element: str, ctx: Context
) -> tuple[int, int, int, int]:
    """imm-scale-a and -b for floating point, then imm-trans-a (of a descriptor) and -b for 16-bit types."""
    values = [ctx.integer(operand) for operand in rest]
    signs = 0 if element in ("s8", "u8") else 2
    majors = (1 if in_registers else 2) if element in ("f16", "bf16") else 0
    if len(values) != signs + majors or any(s not in (1, -1, 0xFFFFFFFF) for s in values[:signs]):
        raise ctx.unsupported(f"immediates {values}")
    negated = [int(value != 1) for value in values[:signs]] or [0, 0]
    mn = [0] * (2 - majors) + values[signs:]
    return negated[0], negated[1], mn[0], mn[1]


# --- tcgen05


def _group(modifiers: set[str], ctx: Context) -> int:
    groups = [number for name, number in _GROUPS.items() if name in modifiers]
    if len(groups) != 1:
        raise ctx.unsupported("no cta_group")
    return groups[0]


@family("tcgen05.alloc")
def allocate(ins: Instruction, ctx: Context) -> EngineOp:
    modifiers = check_modifiers(ins, {"alloc", "sync", "aligned", "shared::cta", "b32", *_GROUPS}, ctx)
    generic = "shared::cta" not in modifiers
    register, offset = _place(ins.operands[0], 8 if generic else 4, ctx)
    return EngineOp(
        "tcgen05.alloc",
        [register, ctx.reg(ins.operands[1], 4)],
        [offset, _group(modifiers, ctx), int(generic)],
    )


@family("tcgen05.dealloc")
def deallocate(ins: Instruction, ctx: Context) -> EngineOp:
    modifiers = check_modifiers(ins, {"dealloc", "sync", "aligned", "b32", *_GROUPS}, ctx)
    return EngineOp("tcgen05.dealloc", [ctx.reg(r, 4) for r in ins.operands], [_group(modifiers, ctx)])


@family("tcgen05.relinquish_alloc_permit")
def relinquish(ins: Instruction, ctx: Context) -> EngineOp:
    check_modifiers(ins, {"relinquish_alloc_permit", "sync", "aligned", *_GROUPS}, ctx)
    return EngineOp("tcgen05.relinquish_alloc_permit")


@family("tcgen05.wait::ld", "tcgen05.wait::st")
def wait(ins: Instruction, ctx: Context) -> EngineOp:
    check_modifiers(ins, {"wait::ld", "wait::st", "sync", "aligned"}, ctx)
    return EngineOp(".".join(ins.opcode.split(".")[:2]))


@family("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence(ins: Instruction, ctx: Context) -> EngineOp:
    """A no-op.

    The tensor core works in issue order here, and the checker follows the barriers between threads.
    """
    return EngineOp("nop")


@family("tcgen05.ld", "tcgen05.st")
def move(ins: Instruction, ctx: Context) -> EngineOp:
    """Lowers `ld d, [address]` or `st [address], a`; 16x32bx2 also gives the distance of its second half."""
    loads = ins.opcode.startswith("tcgen05.ld")
    repeats = {f"x{1 << i}" for i in range(8)}
    halves = "pack::16b" if loads else "unpack::16b"
    modifiers = check_modifiers(ins, {"ld", "st", "sync", "aligned", "b32", halves, *SHAPES, *repeats}, ctx)
    shape, repeat = one_of(SHAPES, modifiers, ctx), one_of(sorted(repeats), modifiers, ctx)
    if loads:
        data, place, *split = ins.operands
    else:
        place, *split, data = ins.operands
    registers = _elements(data, ctx)
    if len(registers) != _REGISTERS_A_REPEAT[shape] * int(repeat[1:]) or len(split) != (shape == "16x32bx2"):
        raise ctx.unsupported("this number of operands")
    register, offset = _place(place, 4, ctx)
    return EngineOp(
        "tcgen05.ld" if loads else "tcgen05.st",
        [register, *(ctx.reg(r, 4) for r in registers)],
        [offset, SHAPES.index(shape), int(halves in modifiers), ctx.integer(split[0]) if split else 0],
    )


@family("tcgen05.ld.red")
def load_reduced(ins: Instruction, ctx: Context) -> EngineOp:
    """Lowers `ld.red d, min_or_max, [address]`, which reduces what each thread loads itself; f32 only.

    16x32bx2 also gives the distance of its second half.
    """
    shapes = {"32x32b", "16x32bx2"}
    repeats = {f"x{1 << i}" for i in range(1, 8)}
    known = {"ld", "red", "sync", "aligned", "f32", "min", "max", "abs", "NaN", *shapes, *repeats}
    modifiers = check_modifiers(ins, known, ctx)
    shape, repeat = one_of(sorted(shapes), modifiers, ctx), one_of(sorted(repeats), modifiers, ctx)
    data, result, place, *split = ins.operands
    registers = _elements(data, ctx)
    if "f32" not in modifiers or len(registers) != int(repeat[1:]) or len(split) != (shape == "16x32bx2"):
        raise ctx.unsupported("this type or number of operands")
    register, offset = _place(place, 4, ctx)
    distance = ctx.integer(split[0]) if split else 0
    flags = [int(name in modifiers) for name in ("max", "abs", "NaN")]
    return EngineOp(
        "tcgen05.ld.red",
        [register, *(ctx.reg(r, 4) for r in registers), ctx.reg(result, 4)],
        [offset, SHAPES.index(shape), 0, distance, *flags],
    )


@family("tcgen05.mma")
def mma(ins: Instruction, ctx: Context) -> EngineOp:
    """Lowers `mma [d], a, b, idesc, {masks}, enable-input-d, scale-input-d`; A is a descriptor or an address.

    Collector usage concerns the reuse of operands inside the tensor core and changes nothing.
    """
    kinds = {f"kind::{kind}": i for i, kind in enumerate(KINDS)}
    collector = {f"collector::a::{use}" for use in ("fill", "use", "lastuse", "discard")}
    modifiers = check_modifiers(ins, {"mma", *kinds, *_GROUPS, *collector}, ctx)
    kind = one_of(kinds, modifiers, ctx)
    group = _group(modifiers, ctx)
    d, a, b, descriptor, *rest = ins.operands
    masks = _elements(rest.pop(0), ctx) if rest and isinstance(rest[0], Vector) else ()
    enable, *scale = rest
    if len(masks) not in (0, 4 * group) or len(scale) > 1:
        raise ctx.unsupported("this number of operands")
    d_register, d_offset = _place(d, 4, ctx)
    in_tmem = isinstance(a, Address)
    a_register, a_offset = ctx.address(a, 4) if isinstance(a, Address) else (ctx.reg(a, 8), 0)
    return EngineOp(
        "tcgen05.mma",
        [
            d_register,
            a_register,
            ctx.reg(b, 8),
            ctx.reg(descriptor, 4),
            _predicate(enable, ctx),
            *(ctx.reg(mask, 4) for mask in masks),
        ],
        [d_offset, a_offset, kinds[kind], group, int(in_tmem), ctx.integer(scale[0], 0, 15) if scale else 0],
    )


@family("tcgen05.cp")
def copy(ins: Instruction, ctx: Context) -> EngineOp:
    shapes = {shape for shape, _ in COPIES} | {spread for _, spread in COPIES if spread}
    modifiers = check_modifiers(ins, {"cp", *_GROUPS, *shapes}, ctx)
    found = [i for i, form in enumerate(COPIES) if set(filter(None, form)) == modifiers & shapes]
    if not found:
        raise ctx.unsupported("this shape of tcgen05.cp")
    register, offset = _place(ins.operands[0], 4, ctx)
    return EngineOp(
        "tcgen05.cp", [register, ctx.reg(ins.operands[1], 8)], [offset, found[0], _group(modifiers, ctx)]
    )


@family("tcgen05.commit")
def commit(ins: Instruction, ctx: Context) -> EngineOp:
    known = {"commit", "mbarrier::arrive::one", "shared::cluster", "multicast::cluster", "b64", *_GROUPS}
    modifiers = check_modifiers(ins, known, ctx)
    generic = "shared::cluster" not in modifiers
    register, offset = _place(ins.operands[0], 8 if generic else 4, ctx)
    masks = [ctx.reg(mask, 4) for mask in ins.operands[1:]]
    if len(masks) != ("multicast::cluster" in modifiers):
        raise ctx.unsupported("this number of operands")
    return EngineOp("tcgen05.commit", [register, *masks], [offset, int(generic)])
