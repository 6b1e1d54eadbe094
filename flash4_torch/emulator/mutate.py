"""Kernels with one synchronisation instruction removed, to find out whether anything notices its absence.

    for index in candidates(kernel):
        program = Program(without(kernel, index), arch=100)

A mutant that runs like the original under every schedule has lost an instruction that the kernel does not
need, or one whose absence the emulator cannot see. `Device.transform` (flash4_torch.testing.emulate) applies
mutants to launches.
"""

from __future__ import annotations

from dataclasses import replace

from flash4_torch.emulator.ptx import Immediate, Instruction, Kernel

_WAITS = ("mbarrier.try_wait", "mbarrier.test_wait")
_SYNCHRONISATION = (
    *_WAITS,
    "mbarrier.arrive",
    "mbarrier.arrive_drop",
    "mbarrier.expect_tx",
    "mbarrier.complete_tx",
    "bar",
    "barrier",
    "fence",
    "membar",
    "tcgen05.commit",
    "tcgen05.wait",
    "tcgen05.fence",
    "wgmma.fence",
    "wgmma.commit_group",
    "wgmma.wait_group",
    "cp.async.commit_group",
    "cp.async.wait_group",
    "cp.async.wait_all",
    "cp.async.mbarrier.arrive",
    "cp.async.bulk.commit_group",
    "cp.async.bulk.wait_group",
)


def candidates(kernel: Kernel) -> list[int]:
    """Indices of the instructions that order or complete something.

    Instructions that also do something else are left out: the initialisation of barriers, setmaxnreg, elect.
    """
    return [i for i, ins in enumerate(kernel.instructions) if _is_one_of(ins, _SYNCHRONISATION)]


def without(kernel: Kernel, index: int) -> Kernel:
    """The kernel with one instruction replaced by `nop`, or a wait by what sets its predicate to true."""
    instructions = list(kernel.instructions)
    removed = instructions[index]
    if _is_one_of(removed, _WAITS):
        yes = (removed.operands[0], Immediate(0), Immediate(0))
        instructions[index] = replace(removed, opcode="setp.eq.s32", operands=yes)
    else:
        instructions[index] = replace(removed, opcode="nop", operands=())
    return replace(kernel, instructions=tuple(instructions))


def _is_one_of(ins: Instruction, opcodes: tuple[str, ...]) -> bool:
    starts = tuple(opcode + separator for opcode in opcodes for separator in (".", "::"))
    return ins.opcode in opcodes or ins.opcode.startswith(starts)
