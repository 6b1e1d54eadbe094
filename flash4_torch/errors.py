"""The errors that flash4_torch defines.

A drop-in for a function or module of torch also raises torch's errors where that is the contract.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def nearest(given: str, allowed: Iterable[str]) -> str | None:
    """The allowed word closest to `given`, if one is close."""
    from difflib import get_close_matches

    words = {word.lower(): word for word in allowed}
    return next((words[near] for near in get_close_matches(given.lower(), words, 1)), None)


def hint(given: str, allowed: Iterable[str]) -> str:
    """Ending for a limit's sentence: "; did you mean causal?", or nothing if no allowed word is close."""
    near = nearest(given, allowed)
    return f"; did you mean {near}?" if near else ""


class Flash4Error(Exception):
    """Base class of the errors below."""


class ArgumentError(Flash4Error, ValueError):
    """An argument has a value that the call cannot take: `ArgumentError(argument, value, limit)`.

    Attributes:
        argument: name of the offending argument.
        value: what was passed (a shape, a dtype, a number ...).
        limit: sentence that says what is allowed.
    """

    # No __init__: torch.compile can trace a raise only if the exception class has none.
    def __str__(self) -> str:
        return f"{self.argument} is {self.value}, but {self.limit}"

    @property
    def argument(self) -> str:
        return str(self.args[0])

    @property
    def value(self) -> object:
        return self.args[1]

    @property
    def limit(self) -> str:
        return str(self.args[2])


class ShapeError(ArgumentError):
    """A tensor has the wrong rank or sizes."""


class DtypeError(ArgumentError, TypeError):
    """A tensor has a dtype that is not supported, or that does not match the other tensors."""


class DeviceError(ArgumentError):
    """Tensors of one call are on different devices, or on a device that cannot serve."""


class RangeError(ArgumentError):
    """A number is outside its range."""


class LayoutError(ArgumentError):
    """A tensor is not dense strided memory, but sparse, nested or in a library's own layout."""


class KeywordError(Flash4Error, TypeError):
    """A function has no argument of that name: `KeywordError(function, keyword, hint)`.

    It is a TypeError because that is what Python raises for an unknown keyword.
    """

    def __str__(self) -> str:
        function, keyword, hint = self.args
        return f"{function} has no argument {keyword!r}; {hint}"


class BackendError(Flash4Error, RuntimeError):
    """No backend (or not the forced one) can serve the call.

    Attributes:
        reasons: for each backend that was asked, sentences why it cannot.
    """

    def __init__(self, asked: str, reasons: Mapping[str, Sequence[str]]):
        lines = [f"  {name}: {sentence}" for name, why in reasons.items() for sentence in why]
        super().__init__("\n".join([f"no backend can serve {asked}:", *lines]))
        self.asked = asked
        self.reasons = {name: list(why) for name, why in reasons.items()}

    def __reduce__(self) -> tuple[type, tuple[str, dict[str, list[str]]]]:
        return type(self), (self.asked, self.reasons)


class CompileError(Flash4Error, RuntimeError):
    """A kernel cannot be compiled or loaded: `CompileError(kernel, reason)`."""

    def __str__(self) -> str:
        kernel, reason = self.args
        return f"cannot compile {kernel}: {reason}"


class TraceError(Flash4Error, NotImplementedError):
    """A score_mod or mask_mod cannot be traced: `TraceError(argument, function, operation, reason, where)`.

    Attributes:
        operation: what the function does that has no place in a kernel.
        where: file, line and text of the user's line, as far as it is known.
    """

    def __str__(self) -> str:
        argument, function, operation, reason, where = self.args
        return f"{argument} {function} uses {operation}: {reason} ({where})"

    @property
    def operation(self) -> str:
        return str(self.args[2])

    @property
    def where(self) -> str:
        return str(self.args[4])


class ExportError(Flash4Error, RuntimeError):
    """A folder of exported kernels cannot be written or used: `ExportError(folder, reason)`."""

    def __str__(self) -> str:
        folder, reason = self.args
        return f"exported kernels in {folder}: {reason}"


class DoubleBackwardError(Flash4Error, RuntimeError):
    """A gradient of a gradient was requested; attention is differentiable once."""

    def __str__(self) -> str:
        return (
            "flash4_torch's attention is differentiable once: its gradients have no gradient. "
            "For second derivatives use flash4_torch.testing.reference, which is plain torch."
        )


class NoGradientError(Flash4Error, RuntimeError):
    """A gradient was requested of a function that has none: `NoGradientError(function)`."""

    def __str__(self) -> str:
        return (
            f"flash4_torch.{self.args[0]} has no gradient: call it under torch.no_grad(), "
            "or train with flash4_torch.attention or attention_varlen."
        )


class CommunicationError(Flash4Error, RuntimeError):
    """Ranks that share a sequence lost each other: `CommunicationError(what, rank, peers, reason)`.

    One of them failed, or waited for longer than its process group's timeout.
    """

    def __str__(self) -> str:
        what, rank, peers, reason = self.args
        return f"{what} on rank {rank} waited for {peers}, which did not answer: {reason}"


class ForwardModeError(Flash4Error, NotImplementedError):
    """A forward-mode derivative was requested: a NotImplementedError, like torch's for a missing one."""

    def __str__(self) -> str:
        return (
            "flash4_torch's attention has no forward-mode derivative, only gradients. "
            "flash4_torch.testing.reference, which is plain torch, has both."
        )


class ScriptError(Flash4Error, NotImplementedError):
    """torch.jit.script was asked to compile a module."""

    def __str__(self) -> str:
        return (
            "torch.jit.script does not compile flash4_torch.MultiheadAttention; torch.compile and "
            "torch.export do. `module.__class__ = torch.nn.MultiheadAttention` makes it torch's own again."
        )


class NothingReplacedWarning(UserWarning):
    """`replace_attention` left modules alone that its caller may have meant."""
