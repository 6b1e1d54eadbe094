"""The cycle model of the FlashAttention-4 paper: how long an SM's units are busy, from a launch's counts.

A launch takes as long as its busiest unit, as if all units always worked concurrently, on all SMs alike. The
model leaves out latencies, waits, waves of CTAs and clocks under load. So a prediction is a bound that no
kernel exceeds; it serves to compare kernels of the same structure and to see what limits them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .instruction_counts import SHARED, Counts

LANES, PASS_BYTES = 32, 128


class Machine(NamedTuple):
    """An SM's throughput per clock, the number of SMs, and the clock rate."""

    arch: str
    flops: int
    """FLOPs of dense 16-bit MMAs per clock."""
    exponentials: int
    shared_bytes: int
    issues: int
    """Warp instructions per clock, one per quadrant."""
    num_sms: int
    hertz: float
    source: str


MACHINES = {
    "b200": Machine("sm_100a", 8192, 16, 128, 4, 148, 1.85e9, "FlashAttention-4 paper, arXiv 2603.05451"),
}

UNITS = ("mma", "mufu", "shared", "issue")


class Cycles(NamedTuple):
    """Clocks that the units of one SM are busy, in the order of UNITS.

    shared leaves out copies from global memory, as the paper does, and includes bank conflicts. issue, which
    the paper does not have, is that of the fullest quadrant, with one slot for each instruction that is not
    dropped.
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


def cycles(weight: Counts, machine: Machine) -> Cycles:
    """Cycles of a whole launch, as if it ran on one SM."""
    passes = sum(weight.passes[kind] for kind in SHARED if kind != "copies in")
    return Cycles(
        mma=weight.mma_flops / machine.flops,
        mufu=weight.count("mufu") * LANES / machine.exponentials,
        shared=passes * PASS_BYTES / machine.shared_bytes,
        issue=max(weight.quadrants) * len(weight.quadrants) / machine.issues,
    )


def flops_per_second(flops: float, launches: Sequence[Counts], machine: Machine) -> float:
    """FLOP/s that `launches`, one after the other on all SMs, reach for work that counts as `flops`."""
    busy = sum(max(cycles(weight, machine)) for weight in launches)
    return flops / busy * machine.num_sms * machine.hertz
