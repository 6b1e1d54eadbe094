"""The interface of lowering: PTX opcode and operands become an engine operation, registers and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from flash4_torch.emulator.ptx import Address, Instruction, Operand

NO_REGISTER = 0xFFFFFFFF


@dataclass
class EngineOp:
    """One operation of the engine.

    It has a registered name, register offsets and static numbers, in the handler's order.
    """

    name: str
    regs: list[int] = field(default_factory=list)
    attrs: list[int] = field(default_factory=list)


class Context(Protocol):
    """What a lowering function may ask about the kernel that it lowers."""

    def reg(self, operand: Operand, width: int) -> int:
        """The byte offset of an operand's register: `width` bytes a lane (4 or 8), or 0 for a predicate.

        Immediates, special registers and symbols get a register that is set when the warp starts; `_` gets
        one that nobody reads. A sub-word type (b8, b16) lives in 4 bytes. Raises PtxError for a register of
        another width.
        """

    def address(self, address: Address, width: int) -> tuple[int, int]:
        """(register offset, constant byte offset) of `[base+offset]`; the base is `width` bytes wide."""

    def parameter(self, address: Address) -> int:
        """The byte offset within the launch's parameters of `[param_name+offset]`."""

    def integer(self, operand: Operand, low: int = -(2**31), high: int = 2**32 - 1) -> int:
        """The value of an operand that must be an integer immediate from `low` to `high`."""

    def label(self, operand: Operand) -> int:
        """The index of the instruction that a label names."""

    def unsupported(self, why: str) -> Exception:
        """The error to raise for an operand or modifier that the engine does not implement."""

    def malformed(self, why: str) -> Exception:
        """The error to raise for what is not PTX."""


Lowering = Callable[[Instruction, Context], EngineOp]
FAMILIES: dict[str, Lowering] = {}


def family(*prefixes: str) -> Callable[[Lowering], Lowering]:
    """Registers a lowering function for all opcodes that equal a prefix or continue it with a dot.

    The longest prefix wins.
    """

    def register(function: Lowering) -> Lowering:
        for prefix in prefixes:
            FAMILIES[prefix] = function
        return function

    return register


def find(opcode: str) -> Lowering | None:
    """The function for an opcode, or None."""
    parts = opcode.split(".")
    for length in range(len(parts), 0, -1):
        found = FAMILIES.get(".".join(parts[:length]))
        if found:
            return found
    return None


def check_modifiers(ins: Instruction, known: Iterable[str], ctx: Context) -> set[str]:
    """The opcode's modifiers as a set; raises for one that is not known."""
    modifiers = set(ins.opcode.split(".")[1:])
    unknown = modifiers - set(known)
    if unknown:
        raise ctx.unsupported(f"modifier {', '.join(sorted(unknown))}")
    return modifiers


def one_of(names: Iterable[str], modifiers: Iterable[str], ctx: Context) -> str:
    """The only one of `names` that is among an opcode's modifiers."""
    names = tuple(names)
    found = [name for name in names if name in set(modifiers)]
    if len(found) != 1:
        raise ctx.malformed(f"the opcode must have one of .{', .'.join(names)}")
    return found[0]
