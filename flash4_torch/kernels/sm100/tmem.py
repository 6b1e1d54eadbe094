"""Tensor memory (TMEM): 128 lanes of 512 columns of 32 bits. A warp reaches 32 lanes, by its index modulo 4.

Addresses are 32 bits, lane and column. A thread loads and stores columns of its own lane. Loads and stores
are asynchronous: `wait_loads` and `wait_stores` await them. `fence_before` stands before a barrier that
signals other threads, or the tensor core, and `fence_after` stands after it.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm, nvvm

COLUMNS = 512
LANE = 1 << 16
"""Distance of the addresses of neighbouring lanes."""
WARP_LANES = 32


@cute.jit
def allocate(holder: cute.Pointer, cluster_size: cutlass.Constexpr = 1) -> None:
    """Allocate all of TMEM, by one warp, so that it starts at address 0, which `holder` in SMEM gets, too.

    Columns are then constants (ptxas.md, P14). Other CTAs that want TMEM wait until it is free.
    """
    cute.arch.alloc_tmem(COLUMNS, holder, is_two_cta=cluster_size == 2)
    cute.arch.relinquish_tmem_alloc_permit(is_two_cta=cluster_size == 2)


@cute.jit
def free(cluster_size: cutlass.Constexpr = 1) -> None:
    """Free TMEM, by the warp that allocated it, when nobody uses it any more."""
    pointer = cute.make_ptr(Int32, 0, cute.AddressSpace.tmem, assumed_align=16)
    cute.arch.dealloc_tmem(pointer, COLUMNS, is_two_cta=cluster_size == 2)


@cute.jit
def own_lanes(column: Int32, warp: Int32) -> Int32:
    """Address of a column in the lanes that a warp reaches."""
    return column + warp % 4 * (WARP_LANES * LANE)


def load(address: Int32, values: cute.Tensor) -> None:
    """Load neighbouring columns of the thread's lane, a power of two of them, to float32 registers."""
    count = cute.size(values)
    kind = ir.VectorType.get([count], Int32.mlir_type)
    words = nvvm.tcgen05_ld(kind, nvvm.Tcgen05LdStShape.SHAPE_32X32B, _pointer(address))
    for i in range(count):
        word = llvm.extractelement(words, arith.constant(Int32.mlir_type, i))
        values[i] = Float32(llvm.bitcast(Float32.mlir_type, word))


def store(address: Int32, values: cute.Tensor) -> None:
    """Store registers of 32 bits, a power of two of them, to neighbouring columns of the thread's lane."""
    count = cute.size(values)
    words = llvm.mlir_undef(ir.VectorType.get([count], Int32.mlir_type))
    for i in range(count):
        word = llvm.bitcast(Int32.mlir_type, values[i].ir_value())
        words = llvm.insertelement(words, word, arith.constant(Int32.mlir_type, i))
    nvvm.tcgen05_st(nvvm.Tcgen05LdStShape.SHAPE_32X32B, _pointer(address), words)


def wait_loads() -> None:
    cute.arch.fence_view_async_tmem_load()


def wait_stores() -> None:
    cute.arch.fence_view_async_tmem_store()


def fence_before() -> None:
    """Stands between work on TMEM and the synchronisation that signals it."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)


def fence_after() -> None:
    """Stands between that synchronisation and further work on TMEM."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)


def _pointer(address: Int32) -> ir.Value:
    return llvm.inttoptr(llvm.PointerType.get(6), address.ir_value())
