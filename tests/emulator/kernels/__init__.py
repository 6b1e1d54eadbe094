"""Small CuTe-DSL kernels, each around one family of instructions, with inputs and a torch reference.

A module per family ends in `CASES`, a tuple of `Case`; `all_cases` gathers them, so that a test may loop over
everything:

    for case in all_cases("sm_90a"):
        arguments = case.arguments(seed=0)
        expected = case.reference(*arguments)
        run(case.compile("sm_90a"), case.converted(arguments))
        case.check(arguments, expected)
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack
from torch import Tensor

from flash4_torch.emulator.device import as_device

ARCHS = ("sm_90a", "sm_100a")
FP8 = {torch.float8_e4m3fn: cutlass.Float8E4M3FN, torch.float8_e5m2: cutlass.Float8E5M2}


@dataclass(frozen=True)
class Case:
    """One kernel with one set of static choices.

    host: the `@cute.jit` function that launches; it takes the arguments that `make` makes, then `constants`
    by name.
    make: makes the arguments with torch's global generator. Outputs come last; they hold `poison`, or the
    values that the kernel accumulates onto.
    reference: maps the arguments as they were before the launch to what the last ones hold after it.
    archs: the architectures for which it compiles.
    constants: `cutlass.Constexpr` arguments.
    rtol, atol: how far from the reference a result may be; by default it must be the same, bit for bit.
    """

    name: str
    host: Callable[..., None]
    make: Callable[[], tuple[Any, ...]]
    reference: Callable[..., tuple[Tensor, ...]]
    archs: tuple[str, ...] = ARCHS
    constants: Mapping[str, Any] = field(default_factory=dict)
    rtol: float = 0.0
    atol: float = 0.0

    def arguments(self, seed: int = 0) -> tuple[Any, ...]:
        """CPU tensors, Python numbers, and DSL objects as they are; equal for equal seeds."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make()

    def converted(self, arguments: tuple[Any, ...]) -> list[Any]:
        """The arguments as the compiled function takes them: static layouts on the same memory, numbers."""
        return [as_cute(argument) for argument in arguments]

    def compile(self, arch: str, options: str = "") -> Any:
        """The compiled host function for `arch`, which is one of `archs`. Needs no GPU."""
        assert arch in self.archs, f"{self.name} has no kernel for {arch}"
        return cute.compile(
            self.host,
            *self.converted(self.arguments()),
            **self.constants,
            options=f"--gpu-arch {arch} {options}".strip(),
        )

    def check(self, arguments: tuple[Any, ...], expected: tuple[Tensor, ...]) -> None:
        """Raise AssertionError unless the last arguments hold the expected values."""
        outputs = arguments[len(arguments) - len(expected) :]
        for output, wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(
                output, wanted.to(output.dtype), rtol=self.rtol, atol=self.atol, equal_nan=True
            )

    def __str__(self) -> str:
        return self.name


def as_cute(argument: Any) -> Any:
    """The argument as the DSL takes it.

    A tensor counts as a GPU's: the DSL has asynchronous copies from global memory only.
    """
    if isinstance(argument, Tensor):
        if argument.dtype in FP8:
            tensor = from_dlpack(as_device(argument.view(torch.uint8)), assumed_align=16)
            tensor.element_type = FP8[argument.dtype]
            return tensor
        return from_dlpack(as_device(argument), assumed_align=16)
    if isinstance(argument, float):
        return cutlass.Float32(argument)
    return cutlass.Int32(argument) if isinstance(argument, int) else argument


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A future output: NaN, or for integers a value that no kernel writes."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else 99, dtype=dtype)


def all_cases(arch: str | None = None) -> Iterator[Case]:
    """The cases of all modules here, or only those for `arch` if it is given."""
    for module in pkgutil.iter_modules(__path__):
        for case in importlib.import_module(f"{__name__}.{module.name}").CASES:
            if arch is None or arch in case.archs:
                yield case
