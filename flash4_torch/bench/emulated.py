"""Kernels whose instructions are counted: ours and flash-attn-4's, run in the emulator, launch by launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from .. import api, env
from ..testing.emulate import Device, Options, device
from .cases import Cell
from .fa4_emulated import flash_attn_4
from .instruction_counts import Counts, count_instructions
from .providers import has_fa4

Attend = Callable[[Cell, str], list[Counts]]
"""Function from a cell and a direction to the counts of its launches. Raises LookupError or BackendError if
no kernel that uses the tensor cores serves the cell."""

OURS, UPSTREAM = "flash4", "fa4"
_SMS = 8
"""SMs of the GPU that our kernels are chosen for: few, as tiles are compared, and with many SMs keys of few
tiles would be split."""


@contextmanager
def ours(arch: str) -> Iterator[Attend]:
    """Our kernels, as dispatch chooses them on a small GPU of that architecture."""
    before = env.change({env.BACKEND.name: "emulator", env.ARCH.name: arch})
    try:
        with device(arch, races=False, num_sms=_SMS) as emulated:

            def attend(cell: Cell, direction: str) -> list[Counts]:
                emulated.reports.clear()  # drops those of a failed call
                q, k, v, dout = (x.requires_grad_() for x in cell.inputs("cpu"))
                out = api.attention(q, k, v, causal=cell.causal, deterministic=False)
                weights = _taken(emulated)
                if direction == "forward":
                    return weights
                out.backward(dout.detach())
                return _taken(emulated)

            yield attend
    finally:
        env.change(before)


@contextmanager
def upstream(arch: str) -> Iterator[Attend]:
    """The kernels of flash-attn-4, as it chooses them."""
    emulated = Device(arch, Options(races=False))
    with flash_attn_4(emulated.launch, arch) as interface:

        def attend(cell: Cell, direction: str) -> list[Counts]:
            emulated.reports.clear()
            q, k, v, dout = cell.inputs("cpu")
            out, lse, *_ = interface._flash_attn_fwd(q, k, v, causal=cell.causal, return_lse=True)
            weights = _taken(emulated)
            if direction == "forward":
                return weights
            interface._flash_attn_bwd(q, k, v, out, dout, lse, causal=cell.causal)
            return _taken(emulated)

        yield attend


CONTENDERS: Mapping[str, Callable[[str], AbstractContextManager[Attend]]] = {
    OURS: ours,
    UPSTREAM: upstream,
}


def installed() -> set[str]:
    """The contenders that this machine has."""
    return {OURS} | ({UPSTREAM} if has_fa4() else set())


def _taken(emulated: Device) -> list[Counts]:
    """Counts of the launches since the last call. Raises LookupError if none used the tensor cores."""
    weights = [count_instructions(report) for report in emulated.reports]
    emulated.reports.clear()
    if not any(weight.mma_flops for weight in weights):
        raise LookupError(f"no kernel for the tensor cores of {emulated.arch} serves this")
    return weights
