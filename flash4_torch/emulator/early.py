"""Kernels that may begin before the kernel ahead of them has ended (programmatic dependent launch)."""

from __future__ import annotations

from flash4_torch.emulator.errors import LaunchError
from flash4_torch.emulator.ptx import Instruction, Kernel, Symbol

_ACCESSES = {"ld", "ldu", "st", "atom", "red", "cp", "multimem"}
_ELSEWHERE = {"param", "shared", "const", "local"}


def refuse_early_access(kernel: Kernel) -> None:
    """Raises LaunchError unless each thread waits (griddepcontrol.wait) before it touches global memory.

    The order of the PTX text counts, so that a kernel which waits on several ways is refused, too.
    """
    is_wait = (x.opcode == "griddepcontrol.wait" and not x.guard for x in kernel.instructions)
    wait = next((n for n, found in enumerate(is_wait) if found), None)
    if wait is None:
        raise LaunchError(
            f"{kernel.name} may begin before the kernel ahead has ended, and does not wait for it"
        )
    for instruction in kernel.instructions[:wait]:
        if reason := _passes(instruction, kernel, wait):
            where = f" ({instruction.source[0]}:{instruction.source[1]})" if instruction.source else ""
            raise LaunchError(
                f"PTX line {instruction.line}{where}: {kernel.name} may begin before the kernel ahead has "
                f"ended, and {instruction.opcode} {reason} before griddepcontrol.wait"
            )


def _passes(instruction: Instruction, kernel: Kernel, wait: int) -> str:
    """What an instruction ahead of the wait does that it must not do, or nothing."""
    name, *modifiers = instruction.opcode.split(".")
    if name in ("ret", "exit", "brx", "call"):
        return "leaves"
    if name == "bra":
        (target,) = instruction.operands
        known = isinstance(target, Symbol) and kernel.labels.get(target.name, wait + 1) <= wait
        return "" if known else "leaves"
    spaces = {modifier.split("::")[0] for modifier in modifiers}
    return "touches global memory" if name in _ACCESSES and not spaces & _ELSEWHERE else ""
