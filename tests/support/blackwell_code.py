"""The instructions of the compiled Blackwell kernels, asserted on their PTX and on their SASS."""

from __future__ import annotations

import re
from typing import Any

import cubin
from flash4_torch.configs.types import SHARED_MEMORY
from flash4_torch.emulator.host import Launch

_PAIRS = ("FFMA2", "FADD2", "FMUL2")
_REGISTERS = 64 * 1024
_CLAIMED = re.compile(r"tcgen05\.alloc\.\S+\s+\[%\w+\], (%\w+);")


def assert_ptx_is_as_planned(launch: Launch, plan: Any, ctas: int, stores: bool = True) -> None:
    """MMAs, TMEM allocation and commits are for as many CTAs as planned, and roles have their registers."""
    ptx = launch.kernel.ptx
    of_ctas = ("mma", "commit", "alloc", "dealloc", "relinquish_alloc_permit")
    for name in of_ctas:
        assert set(re.findall(rf"tcgen05\.{name}\.cta_group::(\d)", ptx)) == {str(ctas)}, name
    for name in (r"tcgen05\.ld\.", r"cp\.async\.bulk\.tensor\.\dd\.shared", r"\.f32x2"):
        assert re.search(name, ptx), name
    assert bool(re.search(r"tcgen05\.st\.", ptx)) == stores
    (holder,) = _CLAIMED.findall(ptx)
    assert re.search(rf"mov\.b32\s+{holder}, 512;", ptx), "not all columns of tensor memory"
    wanted = {int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+);", ptx)}
    assert wanted == set(plan.registers)
    assert launch.smem_bytes <= SHARED_MEMORY


def assert_code_is_as_planned(code: cubin.Code, plan: Any, products: int, stores: bool = True) -> None:
    """`products`: the MMA instructions of one round; `stores`: whether weights are stored to TMEM."""
    kinds = code.kinds
    assert kinds["UTCHMMA"] >= products
    assert all(kinds[name] for name in ("UTCBAR", "UTCATOMSWS", "LDTM", "UTMALDG")), kinds
    assert bool(kinds["STTM"]) == stores
    assert sum(kinds[name] for name in _PAIRS), kinds
    assert code.budgets == set(plan.registers)
    assert code.registers * plan.threads <= _REGISTERS
