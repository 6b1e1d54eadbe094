"""The errors of the emulator's front end."""

from __future__ import annotations

Source = tuple[str, int]


class EmulatorError(RuntimeError):
    """Base class: the emulator cannot run a program."""


class LaunchError(EmulatorError, ValueError):
    """A launch that no GPU would accept, or arguments that the kernel does not take."""


class PtxError(EmulatorError):
    """A PTX text that the parser cannot read.

    Attributes:
        line: line of the PTX text, counted from 1.
        text: the offending piece of it.
    """

    def __init__(self, message: str, line: int, text: str):
        super().__init__(f"PTX line {line}: {message}: {text}")
        self.line = line
        self.text = text


class UnsupportedInstruction(EmulatorError):
    """An instruction, or a form of one, that the engine does not have.

    Attributes:
        opcode: the instruction with its modifiers, and what is unsupported about it.
        line: line of the PTX text, counted from 1.
        source: file and line of the kernel's source, where the PTX carries line information.
    """

    def __init__(self, opcode: str, line: int, source: Source | None):
        where = f" ({source[0]}:{source[1]})" if source else ""
        super().__init__(f"PTX line {line}{where}: unsupported instruction {opcode}")
        self.opcode = opcode
        self.line = line
        self.source = source
