"""What a warp's registers hold when it starts: immediates, special registers and addresses of variables."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

LANES = 32


class InitKind(IntEnum):
    """Mirrors `InitKind` in csrc_stubs/no_gpu/machine.h."""

    VALUE = 0
    SHARED_ADDRESS = 1
    PARAM_ADDRESS = 2


# Mirrors the rest of that enumeration, in its order. PTX ISA: Special Registers.
_SPECIALS = (
    *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
    *("%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid"),
    *(f"%cluster_{name}.{axis}" for name in ("ctaid", "nctaid") for axis in "xyz"),
    *("%cluster_ctarank", "%cluster_nctarank"),
    *(f"%{name}.{axis}" for name in ("clusterid", "nclusterid") for axis in "xyz"),
    *("%is_explicit_cluster", "%dynamic_smem_size", "%total_smem_size"),
    *(f"%lanemask_{which}" for which in ("eq", "lt", "le", "gt", "ge")),
)
SPECIALS = {name: 3 + i for i, name in enumerate(_SPECIALS)}


class Init(NamedTuple):
    kind: int
    width: int
    offset: int
    value: int


class RegisterStart:
    """Allocates registers after those of the kernel, one for each distinct start value."""

    def __init__(self, first_free: int):
        self._end = first_free
        self._registers: dict[tuple[int, int, int], int] = {}
        self._sinks: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        """Size of the register file."""
        return -(-self._end // 64) * 64

    def register(self, kind: int, value: int, width: int) -> int:
        """The offset of the register that holds `value` of `kind`: `width` bytes a lane (0: predicate)."""
        key = (kind, value, width)
        if key not in self._registers:
            self._registers[key] = self._place(width)
        return self._registers[key]

    def sink(self, width: int) -> int:
        """The offset of a register that nobody reads."""
        if width not in self._sinks:
            self._sinks[width] = self._place(width)
        return self._sinks[width]

    def _place(self, width: int) -> int:
        begin = -(-self._end // 64) * 64
        self._end = begin + (width * LANES if width else 4)
        return begin

    def constant(self, value: int, width: int) -> int:
        bits = 64 if width == 8 else 32
        value &= (1 << bits) - 1
        return self.register(InitKind.VALUE, value - (1 << 64) if value >= 1 << 63 else value, width)

    def special(self, name: str, width: int, context: Any) -> int:
        if (name == "%is_explicit_cluster") != (width == 0):
            raise context.malformed(f"{name} has another width than this operand")
        if name in ("%WARP_SZ", "WARP_SZ"):
            return self.constant(LANES, width)
        if name not in SPECIALS:
            raise context.unsupported(f"special register {name}")
        return self.register(SPECIALS[name], 0, width)

    def inits(self) -> Iterator[Init]:
        for (kind, value, width), offset in self._registers.items():
            yield Init(kind, width, offset, value)
