"""From a parsed kernel to the engine's flat program.

Operations, register offsets and what registers hold at the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flash4_torch.emulator import control
from flash4_torch.emulator.errors import UnsupportedInstruction
from flash4_torch.emulator.lower import (  # noqa: F401  (they register their families)
    alu,
    copies,
    memory,
    sync,
    tensor,
)
from flash4_torch.emulator.lower.base import NO_REGISTER, EngineOp, find
from flash4_torch.emulator.lower.start import InitKind, RegisterStart
from flash4_torch.emulator.ptx import Address, Immediate, Instruction, Kernel, Operand, Register, Symbol

# What the system keeps at the start of a CTA's shared memory, from sm_90 on; kSharedBase in machine.h.
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
    """`operations` are the engine's names and numbers.

    Raises UnsupportedInstruction for what the engine does not have.
    """
    context = _Context(kernel, compact)
    numbers, regs, attrs, writes = [], [], [], []
    guard = np.full(len(kernel.instructions), NO_REGISTER, np.uint32)
    negated = np.zeros(len(kernel.instructions), np.uint8)
    for index, instruction in enumerate(kernel.instructions):
        context.instruction = instruction
        op = _lower_one(instruction, context)
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
    """Bit i: the instruction writes regs[i], of the first 32.

    A register that is named twice counts where it comes first.
    """
    offsets = {context.slots.offset[name] for name in control.access(instruction).writes}
    return sum(1 << i for i, reg in enumerate(regs[:32]) if reg in offsets and regs.index(reg) == i)


def _lower_one(instruction: Instruction, context: _Context) -> EngineOp:
    lowering = find(instruction.opcode)
    if lowering is None:
        raise context.unsupported("the engine does not know this instruction")
    return lowering(instruction, context)


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
            if operand.name == "_":
                return NO_REGISTER
            if operand.special:
                return self.start.special(operand.name, width, self)
            return self.slots.offset[operand.name]
        if isinstance(operand, Immediate):
            return self.start.constant(operand.bits(width), width)
        if isinstance(operand, Symbol):
            return self._symbol(operand.name, width)
        raise self.unsupported(f"operand {operand}")

    def _symbol(self, name: str, width: int) -> int:
        if name in self.shared:
            return self.start.register(InitKind.SHARED_ADDRESS, self.shared[name], width)
        if name in self.parameters:
            return self.start.register(InitKind.PARAM_ADDRESS, self.parameters[name], width)
        if name in self.kernel.globals:
            return self.start.constant(self.kernel.globals[name], width)
        raise self.unsupported(f"unknown symbol {name}")

    def address(self, address: Address, width: int) -> tuple[int, int]:
        if isinstance(address.base, int):
            return self.start.constant(address.base, width), address.offset
        return self.reg(address.base, width), address.offset

    def parameter(self, address: Address) -> int:
        assert isinstance(address.base, Symbol)
        return self.parameters[address.base.name] + address.offset

    def integer(self, operand: Operand) -> int:
        if not isinstance(operand, Immediate):
            raise self.unsupported(f"{operand} where an immediate is needed")
        return operand.value

    def label(self, operand: Operand) -> int:
        assert isinstance(operand, Symbol)
        return self.kernel.labels[operand.name]

    def unsupported(self, why: str) -> UnsupportedInstruction:
        ins = self.instruction
        return UnsupportedInstruction(f"{ins.opcode}: {why}", ins.line, ins.source)


def _place_shared(kernel: Kernel) -> tuple[dict[str, int], int]:
    """Offsets of the shared variables: static ones first, then the dynamic block."""
    offsets, end = {}, SHARED_BASE
    for variable in sorted(kernel.shared, key=lambda v: v.dynamic):
        end = -(-end // variable.alignment) * variable.alignment
        offsets[variable.name] = end
        end += variable.size
    return offsets, end
