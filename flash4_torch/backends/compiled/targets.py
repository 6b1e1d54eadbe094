"""The GPUs that our kernels are for: their entries, their config tables, and how they were proven."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ... import compile
from ...compile import arch as archs
from ...configs import (
    sm80,
    sm80_backward,
    sm80_splits,
    sm90,
    sm90_backward,
    sm90_splits,
    sm100,
    sm100_backward,
    sm100_splits,
    sm103,
)
from ...configs.decode import ADA, AMPERE, GA102, HOPPER, Gpu
from ...configs.sections import Section, Workload
from ...configs.sizes import BackwardSizes, Sizes
from ...configs.splits import Splits
from ...configs.types import Features, Scope

PREPROCESS = "flash4_torch.kernels.aux_kernels.bwd_preprocess:compile_preprocess"
POSTPROCESS = "flash4_torch.kernels.aux_kernels.bwd_postprocess:compile_postprocess"
GROUP_REDUCE = "flash4_torch.kernels.aux_kernels.bwd_group_reduce:compile_group_reduce"
SINKS_GRADIENT = "flash4_torch.kernels.aux_kernels.bwd_sinks:compile_sinks_gradient"
DECODE = "flash4_torch.kernels.decode.launch:compile_decode"
WEIGHTS = "flash4_torch.kernels.weights.launch:compile_weights"
APPEND_KVCACHE = "flash4_torch.kernels.aux_kernels.append_kvcache:compile_append"
MERGE_STATES = "flash4_torch.kernels.aux_kernels.merge_states:compile_merge"
BLOCK_BITS = "flash4_torch.kernels.aux_kernels.block_bits:compile_block_bits"
BLOCK_LISTS = "flash4_torch.kernels.aux_kernels.block_lists:compile_block_lists"
BLOCK_ROWS = "flash4_torch.kernels.aux_kernels.block_rows:compile_block_rows"
BLOCK_TABLES = "flash4_torch.kernels.aux_kernels.block_tables:compile_block_tables"
ROW_INTERVALS = "flash4_torch.kernels.aux_kernels.row_intervals:compile_row_intervals"
MASK_BLOCKS = "flash4_torch.kernels.aux_kernels.mask_blocks:compile_mask_blocks"
MASK_TRANSPOSE = "flash4_torch.kernels.aux_kernels.mask_transpose:compile_mask_transpose"

Find = Callable[[str, tuple[object, ...]], compile.Function]
"""Function from an entry and its static arguments to the compiled kernel."""


class ForwardConfig(Protocol):
    """The part of a forward kernel's config that the host reads."""

    @property
    def queries(self) -> int:
        """Query positions in a tile."""
        ...

    def shared_memory(self, features: Features) -> int: ...

    @property
    def keys(self) -> int:
        """Keys in a block."""
        ...

    @property
    def pack_gqa(self) -> int:
        """Query heads of one KV head that share a tile's rows."""
        ...

    @property
    def ragged_k(self) -> bool:
        """Whether a row may end within a block of keys for another reason than the band."""
        ...


class BackwardConfig(Protocol):
    """The part of a backward kernel's config that the host reads."""

    @property
    def queries(self) -> int:
        """Query rows in a block."""
        ...

    def shared_memory(self, features: Features) -> int: ...

    @property
    def cluster_keys(self) -> int:
        """Keys in the tiles that a cluster fetches together."""
        ...

    @property
    def copies_masks(self) -> bool:
        """Whether the kernel copies tiles of a floating mask as they lie."""
        ...

    @property
    def tmem_order(self) -> bool:
        """Whether dQ is accumulated in TMEM order."""
        ...

    @property
    def dq_by_register(self) -> bool:
        """Whether neighbouring sums of dQ are the same register of neighbouring threads."""
        ...

    @property
    def scope(self) -> Scope:
        """The part of the problem that one work item covers."""
        ...

    @property
    def preprocesses(self) -> bool:
        """Whether the kernel computes the row statistics itself, in place of the preprocess kernel."""
        ...


class Row(Protocol):
    """What is read of a table's row."""

    @property
    def D(self) -> int: ...

    @property
    def Dv(self) -> int: ...

    @property
    def why(self) -> str: ...


class ForwardTable(Protocol):
    """Interface of a module of `configs` for the forward."""

    def forward(self, features: Features, sizes: Sizes) -> ForwardConfig: ...

    def reachable(self, features: Features, group: int | None = None) -> tuple[ForwardConfig, ...]: ...

    def row(self, features: Features, sizes: Sizes) -> Row: ...

    def limits(self, features: Features) -> list[str]: ...


class BackwardTable(Protocol):
    """Interface of a module of `configs` for the backward."""

    def backward(self, features: Features, sizes: BackwardSizes) -> BackwardConfig: ...

    def reachable(self, features: Features, group: int | None = None) -> tuple[BackwardConfig, ...]: ...

    # A table takes only its own configs.
    def section(self, features: Features, config: Any, work: Workload) -> Section: ...

    def row(self, features: Features, kv_head_rows: int = 0) -> Row: ...

    def limits(self, features: Features) -> list[str]: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Target:
    """One architecture; there is one object per architecture, and it compares by identity."""

    arch: str
    forward: str
    """Entry of the forward kernel."""
    forward_configs: ForwardTable
    split_configs: Splits
    """How the keys of calls with few tiles are split."""
    backward: str
    """Entry of the backward's main kernel."""
    backward_configs: BackwardTable
    l2_bytes: int
    """Bytes that stay in the L2 cache while the tiles that share them run."""
    has_wgmma: bool = False
    """Whether there are warpgroup MMAs."""
    has_float32: bool = False
    """Whether forward and backward take float32."""
    has_tma: bool = True
    """Whether the kernel for attention weights loads by TMA."""
    decode: Gpu = HOPPER
    """What the decode kernel is made for."""
    has_pages: bool = True
    """Whether the forward reads keys and values in pages."""
    has_bounds: bool = True
    """Whether forward and backward read bounds of rows, where a mask shows each row an interval of keys."""
    proven: str

    @property
    def capability(self) -> tuple[int, int]:
        return next(c for c, arch in archs.BY_CAPABILITY.items() if arch == self.arch)

    def find(self, entry: str, static: tuple[object, ...]) -> compile.Function:
        """The compiled kernel of an entry and its static arguments."""
        return compile.function(entry, static, self.arch)


SM90A = Target(
    arch="sm_90a",
    forward="flash4_torch.kernels.sm90.fwd.launch:compile_forward",
    forward_configs=sm90,
    split_configs=sm90_splits.SPLITS,
    backward="flash4_torch.kernels.sm90.bwd.launch:compile_backward",
    backward_configs=sm90_backward,
    l2_bytes=32 << 20,
    has_wgmma=True,
    proven="tested and timed on an H200; run in the emulator",
)

SM100A = Target(
    arch="sm_100a",
    forward="flash4_torch.kernels.sm100.fwd.launch:compile_forward",
    forward_configs=sm100,
    split_configs=sm100_splits.SPLITS,
    backward="flash4_torch.kernels.sm100.bwd.launch:compile_backward",
    backward_configs=sm100_backward,
    l2_bytes=50 << 20,  # FlashAttention-4's value; the cache has 126 MB
    proven="run in the emulator; SASS read for registers and spills; never run on a GPU, never timed",
)

SM103A = replace(SM100A, arch="sm_103a", forward_configs=sm103, split_configs=sm100_splits.SPLITS_OF_ULTRA)

SM80 = Target(
    arch="sm_80",
    forward="flash4_torch.kernels.sm80.fwd.launch:compile_forward",
    forward_configs=sm80.LARGE,
    split_configs=sm80_splits.LARGE,
    backward="flash4_torch.kernels.sm80.bwd.launch:compile_backward",
    backward_configs=sm80_backward.LARGE,
    l2_bytes=20 << 20,  # half of an A100's: each half serves half of the SMs
    has_float32=True,
    has_tma=False,
    decode=AMPERE,
    has_pages=False,
    has_bounds=False,
    proven="run in the emulator and, for sm_90a, on an H200; read for spills; never run on a GPU of its own",
)
SM86, SM89, SM120A, SM121A = (
    replace(
        SM80,
        arch=arch,
        forward_configs=sm80.SMALL,
        split_configs=sm80_splits.SMALL,
        backward_configs=sm80_backward.SMALL,
        l2_bytes=mib << 20,
        decode=gpu,
    )
    # Two thirds of the caches of an A10, an L4, an RTX 5060 and a GB10, the smallest or the most usual ones.
    for arch, mib, gpu in (
        ("sm_86", 4, GA102),
        ("sm_89", 32, ADA),
        ("sm_120a", 20, ADA),
        ("sm_121a", 16, ADA),
    )
)
SM87 = replace(
    SM80,
    arch="sm_87",
    l2_bytes=2 << 20,  # half of an Orin's
    proven="as those for sm_80, whose code it is; run in the emulator; never run on a GPU of its own",
)
SM121A = replace(SM121A, proven=SM87.proven.replace("sm_80", "sm_120a"))

TARGETS = {target.arch: target for target in (SM80, SM86, SM87, SM89, SM90A, SM100A, SM103A, SM120A, SM121A)}
"""Targets by architecture: the kernels that are made for it."""
SM80_FAMILY = tuple(target for target in TARGETS.values() if target.forward == SM80.forward)
"""Targets of the kernels by mma.sync, where there are none made for the architecture itself."""
SM80_ON_REQUEST = tuple(
    replace(
        SM80,
        arch=target.arch,
        l2_bytes=target.l2_bytes,
        forward_configs=sm80.ON_REQUEST,
        split_configs=sm80_splits.ON_REQUEST,
        backward_configs=sm80_backward.ON_REQUEST,
    )
    for target in TARGETS.values()
    if target not in SM80_FAMILY
)
"""The same kernels on GPUs that have kernels of their own: for what these refuse, and to compare both."""
WIDEST = 256
"""The widest heads of kernels that are made for 9.0 and 10.x."""


def serving(target: Target, features: Features) -> Target:
    """The target whose kernels serve the features on a GPU of `target`: kernels by mma.sync have float32
    and wide heads.
    """
    if not features.is_float32 and max(features.D, features.Dv) <= WIDEST:
        return target
    return next((other for other in SM80_ON_REQUEST if other.arch == target.arch), target)
