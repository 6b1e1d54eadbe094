"""Lowers a parsed kernel to the engine's flat program.

The program holds operations, register offsets and what registers hold at the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flash4_torch.emulator import control
from flash4_torch.emulator.errors import PtxError, UnsupportedInstruction
from flash4_torch.emulator.lower import (  # noqa: F401  (they register their families)
    alu,
    copies,
    memory,
    sync,
    tensor,
)
from flash4_torch.emulator.lower.base import NO_REGISTER, Lowering, find
from flash4_torch.emulator.lower.forms import check_form
from flash4_torch.emulator.lower.start import InitKind, RegisterStart
from flash4_torch.emulator.ptx import (
    SINK,
    Address,
    Immediate,
    Instruction,
    Kernel,
    Operand,
    Register,
    Symbol,
    type_bytes,
)

# What the system reserves at the start of a CTA's shared memory, from sm_90 on; kSharedBase in machine.h.
SHARED_BASE = 1024


@dataclass(frozen=True)
class Lowered:
    """Arrays as `ProgramText` in csrc_stubs/no_gpu/program.h names them."""

    operation: np.ndarray
    guard: np.ndarray
    guard_negated: np.ndarray
    reg_begin: np.ndarray
    regs: np.ndarray
    writes: np.ndarray
    attr_begin: np.ndarray
    attrs: np.ndarray
    reconverge: np.ndarray
    start: RegisterStart
    static_shared_bytes: int


def lower(kernel: Kernel, operations: Mapping[str, int], *, compact: bool = True) -> Lowered:
    """Lowers a kernel; `operations` maps the engine's operation names to their numbers.

    Raises UnsupportedInstruction for what the engine does not have, PtxError for what is not PTX.
    """
    lowerings = [_lowering_of(instruction, kernel) for instruction in kernel.instructions]
    context = _Context(kernel, compact)
    numbers, regs, attrs, writes = [], [], [], []
    guard = np.full(len(kernel.instructions), NO_REGISTER, np.uint32)
    negated = np.zeros(len(kernel.instructions), np.uint8)
    for index, (instruction, lowering) in enumerate(zip(kernel.instructions, lowerings, strict=True)):
        context.instruction = instruction
        op = lowering(instruction, context)
        if op.name not in operations:
            raise context.unsupported(f"no operation {op.name}")
        numbers.append(operations[op.name])
        regs.append(op.regs)
        attrs.append(op.attrs)
        writes.append(_written(instruction, op.regs, context))
        if instruction.guard:
            guard[index] = context.reg(instruction.guard.register, 0)
            negated[index] = instruction.guard.negated
    return Lowered(
        operation=np.array(numbers, np.uint32),
        guard=guard,
        guard_negated=negated,
        reg_begin=_begins(regs),
        regs=np.array([r for row in regs for r in row], np.uint32),
        writes=np.array(writes, np.uint32),
        attr_begin=_begins(attrs),
        attrs=np.array([a for row in attrs for a in row], np.int64),
        reconverge=np.array(control.reconvergence(kernel), np.uint32),
        start=context.start,
        static_shared_bytes=context.shared_bytes,
    )


def _begins(rows: list[list[int]]) -> np.ndarray:
    return np.cumsum([0, *map(len, rows)]).astype(np.uint32)


def _written(instruction: Instruction, regs: list[int], context: _Context) -> int:
    """A bit mask of the first 32 registers: bit i is set if the instruction writes regs[i].

    A register that is named twice counts at its first place.
    """
    offsets = {context.slots.offset[name] for name in control.access(instruction).writes}
    return sum(1 << i for i, reg in enumerate(regs[:32]) if reg in offsets and regs.index(reg) == i)


def _lowering_of(instruction: Instruction, kernel: Kernel) -> Lowering:
    lowering = find(instruction.opcode)
    if lowering is None:
        raise _unsupported(instruction, "the engine does not know this instruction")
    check_form(instruction, kernel)
    return lowering


def _unsupported(instruction: Instruction, why: str) -> UnsupportedInstruction:
    return UnsupportedInstruction(f"{instruction.opcode}: {why}", instruction.line, instruction.source)


class _Context:
    """The kernel's registers, symbols and labels, as lowering functions ask for them (see base.Context)."""

    def __init__(self, kernel: Kernel, compact: bool):
        self.kernel = kernel
        self.instruction: Instruction = kernel.instructions[0]
        self.slots = control.assign(kernel, compact=compact)
        self.start = RegisterStart(self.slots.bytes)
        self.parameters = {p.name: p.offset for p in kernel.params}
        self.shared, self.shared_bytes = _place_shared(kernel)

    def reg(self, operand: Operand, width: int) -> int:
        if isinstance(operand, Register):
            if operand == SINK:
                return self.start.sink(width)
            if operand.special:
                return self.start.special(operand.name, width, self)
            if _width(operand.type) != width:
                raise self.malformed(f"{operand.name} is .{operand.type} where {_words(width)} is needed")
            return self.slots.offset[operand.name]
        if isinstance(operand, Immediate):
            return self.start.constant(operand.bits(width), width)
        if isinstance(operand, Symbol) and width:
            return self._symbol(operand.name, width)
        raise self.malformed(f"an operand of another kind where {_words(width)} is needed")

    def _symbol(self, name: str, width: int) -> int:
        if name in self.shared:
            return self.start.register(InitKind.SHARED_ADDRESS, self.shared[name], width)
        if name in self.parameters:
            return self.start.register(InitKind.PARAM_ADDRESS, self.parameters[name], width)
        if name in self.kernel.globals:
            return self.start.constant(self.kernel.globals[name], width)
        raise self.unsupported(f"unknown symbol {name}")

    def address(self, address: Address, width: int) -> tuple[int, int]:
        if not -(2**31) <= address.offset < 2**32:
            raise self.malformed(f"the address has the offset {address.offset}; it must have 32 bits")
        if isinstance(address.base, int):
            return self.start.constant(address.base, width), address.offset
        return self.reg(address.base, width), address.offset

    def parameter(self, address: Address) -> int:
        if not isinstance(address.base, Symbol) or address.base.name not in self.parameters:
            raise self.malformed("the address is not that of a parameter")
        offset = self.parameters[address.base.name] + address.offset
        if not 0 <= offset < 2**31:
            raise self.malformed(f"byte {offset} of the parameters")
        return offset

    def integer(self, operand: Operand, low: int = -(2**31), high: int = 2**32 - 1) -> int:
        if not isinstance(operand, Immediate) or operand.kind != "int" or not low <= operand.value <= high:
            raise self.malformed(f"an integer from {low} to {high} is needed")
        return operand.value

    def label(self, operand: Operand) -> int:
        if not isinstance(operand, Symbol):
            raise self.malformed("a label is needed")
        return self.kernel.labels[operand.name]

    def unsupported(self, why: str) -> UnsupportedInstruction:
        return _unsupported(self.instruction, why)

    def malformed(self, why: str) -> PtxError:
        return PtxError(why, self.instruction.line, self.instruction.text)


def _width(type_name: str) -> int:
    """Bytes of a lane of a register as `reg` counts them; 16 for b128, which no instruction takes."""
    return 0 if type_name == "pred" else max(4, type_bytes(type_name))


def _words(width: int) -> str:
    return {0: "a predicate", 4: "a register of up to 32 bits", 8: "a register of 64 bits"}[width]


def _place_shared(kernel: Kernel) -> tuple[dict[str, int], int]:
    """Offsets of the shared variables: static ones first, then the dynamic block."""
    offsets, end = {}, SHARED_BASE
    for variable in sorted(kernel.shared, key=lambda v: v.dynamic):
        end = -(-end // variable.alignment) * variable.alignment
        offsets[variable.name] = end
        end += variable.size
    return offsets, end
