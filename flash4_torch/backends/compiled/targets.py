"""The GPUs that our kernels are for: what compiles them, which tiles they take, and how that was proven."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ... import compile
from ...compile import arch as archs
from ...configs import sm90, sm90_backward, sm100, sm100_backward, sm103
from ...configs.sections import Section, Workload
from ...configs.types import Features, Scope

PREPROCESS = "flash4_torch.kernels.aux_kernels.bwd_preprocess:compile_preprocess"
POSTPROCESS = "flash4_torch.kernels.aux_kernels.bwd_postprocess:compile_postprocess"
GROUP_REDUCE = "flash4_torch.kernels.aux_kernels.bwd_group_reduce:compile_group_reduce"
MASK_BLOCKS = "flash4_torch.kernels.aux_kernels.mask_blocks:compile_mask_blocks"

Find = Callable[[str, tuple[object, ...]], compile.Function]
"""From an entry and what it is compiled for to the kernel."""


class ForwardConfig(Protocol):
    """What the host reads of a forward kernel's config."""

    @property
    def queries(self) -> int:
        """Query positions in a tile."""
        ...

    @property
    def keys(self) -> int:
        """Of a block."""
        ...

    @property
    def pack_gqa(self) -> int:
        """Query heads of one key head that share a tile's rows."""
        ...


class BackwardConfig(Protocol):
    """What the host reads of a backward kernel's config."""

    @property
    def queries(self) -> int:
        """Rows of a block."""
        ...

    @property
    def cluster_keys(self) -> int:
        """Of the tiles that are drawn together."""
        ...

    @property
    def tmem_order(self) -> bool:
        """Whether dQ is summed up in the order of tensor memory."""
        ...

    @property
    def scope(self) -> Scope:
        """What one work item covers."""
        ...


class ForwardTable(Protocol):
    """A module of `configs`."""

    def forward(
        self,
        features: Features,
        Sq: int,
        Sk: int,
        group: int = 1,
        seen: int | None = None,
        end_hidden: bool = False,
    ) -> ForwardConfig: ...

    def reachable(self, features: Features, group: int | None = None) -> tuple[ForwardConfig, ...]: ...

    def limits(self, features: Features) -> list[str]: ...


class BackwardTable(Protocol):
    """A module of `configs`."""

    def backward(
        self, features: Features, Sk: int, end_hidden: bool = False, alone: int = 0, group: int = 1
    ) -> BackwardConfig: ...

    def reachable(self, features: Features, group: int | None = None) -> tuple[BackwardConfig, ...]: ...

    # A table takes its own configs only.
    def section(self, features: Features, config: Any, work: Workload) -> Section: ...

    def limits(self, features: Features) -> list[str]: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Target:
    """One architecture; each is one object, which is what its identity goes by."""

    arch: str
    forward: str
    """The entry of the kernel."""
    forward_configs: ForwardTable
    backward: str
    backward_configs: BackwardTable
    l2_bytes: int
    """What stays in the L2 cache while the tiles that share it pass by."""
    proven: str

    @property
    def capability(self) -> tuple[int, int]:
        return next(c for c, arch in archs.BY_CAPABILITY.items() if arch == self.arch)

    def find(self, entry: str, static: tuple[object, ...]) -> compile.Function:
        """A compiled kernel."""
        return compile.function(entry, static, self.arch)


SM90A = Target(
    arch="sm_90a",
    forward="flash4_torch.kernels.sm90.fwd.launch:compile_forward",
    forward_configs=sm90,
    backward="flash4_torch.kernels.sm90.bwd.launch:compile_backward",
    backward_configs=sm90_backward,
    l2_bytes=32 << 20,
    proven="tested and timed on an H200; run in the emulator",
)

SM100A = Target(
    arch="sm_100a",
    forward="flash4_torch.kernels.sm100.fwd.launch:compile_forward",
    forward_configs=sm100,
    backward="flash4_torch.kernels.sm100.bwd.launch:compile_backward",
    backward_configs=sm100_backward,
    l2_bytes=50 << 20,  # as FlashAttention-4 has it, of 126 MB
    proven="run in the emulator; machine code read for registers and spills; never run on a GPU, never timed",
)

SM103A = replace(SM100A, arch="sm_103a", forward_configs=sm103)

TARGETS = {target.arch: target for target in (SM90A, SM100A, SM103A)}
"""By architecture."""
