"""The cycle model of the FlashAttention-4 paper: how long an SM's units are busy with what a launch weighs.

A launch takes as long as its busiest unit, as if all of them always worked at once, on all SMs alike.
Latencies, waits, waves of CTAs and clocks under load are not in it. So a prediction is a bound that no kernel
exceeds, of use to compare kernels of the same structure and to see what limits them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .instruction_counts import SHARED, Weight

LANES, PASS_BYTES = 32, 128


class Machine(NamedTuple):
    """What an SM does in a clock, and how many clocks there are."""

    arch: str
    flops: int
    """Dense products of 16-bit numbers."""
    exponentials: int
    shared_bytes: int
    issues: int
    """Warp instructions, one a quadrant."""
    num_sms: int
    hertz: float
    source: str


MACHINES = {
    "b200": Machine("sm_100a", 8192, 16, 128, 4, 148, 1.85e9, "FlashAttention-4 paper, arXiv 2603.05451"),
}

UNITS = ("mma", "mufu", "shared", "issue")


class Cycles(NamedTuple):
    """Clocks that the units of one SM are busy, as UNITS names them.

    shared leaves out what arrives from global memory, as the paper does, and counts conflicts of banks.
    issue, which the paper does not have, goes by the fullest quadrant and takes each instruction that is not
    dropped for one slot.
    """

    mma: float
    mufu: float
    shared: float
    issue: float

    @property
    def bottleneck(self) -> str:
        return UNITS[self.index(max(self))]

    def over(self, units: float) -> Cycles:
        return Cycles(*(cycles / units for cycles in self))


def cycles(weight: Weight, machine: Machine) -> Cycles:
    """Of all that a launch does, on one SM."""
    passes = sum(weight.passes[kind] for kind in SHARED if kind != "copies in")
    return Cycles(
        mma=weight.mma_flops / machine.flops,
        mufu=weight.count("mufu") * LANES / machine.exponentials,
        shared=passes * PASS_BYTES / machine.shared_bytes,
        issue=max(weight.quadrants) * len(weight.quadrants) / machine.issues,
    )


def flops_per_second(flops: float, launches: Sequence[Weight], machine: Machine) -> float:
    """What `launches`, one after the other, reach at work that counts as `flops`, on all SMs."""
    busy = sum(max(cycles(weight, machine)) for weight in launches)
    return flops / busy * machine.num_sms * machine.hertz
