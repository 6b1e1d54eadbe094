"""Tensor memory: 128 lanes of 512 columns of 32 bits. A warp reaches the 32 lanes of its place among four.

Addresses are 32 bits, lane and column. What a thread loads or stores is some columns of its own lane. Loads
and stores are asynchronous: `wait_loads` and `wait_stores`; before and after barriers that tell other
threads, or the tensor core, stand `fence_before` and `fence_after`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm, nvvm

COLUMNS = 512
LANE = 1 << 16
"""From one lane to the next."""
WARP_LANES = 32


@cute.jit
def allocate(holder: cute.Pointer, cluster_size: cutlass.Constexpr = 1) -> None:
    """All of it, by one warp, so that it starts at address 0, which `holder` in shared memory gets, too.

    Other CTAs that want some wait until it is free.
    """
    cute.arch.alloc_tmem(COLUMNS, holder, is_two_cta=cluster_size == 2)
    cute.arch.relinquish_tmem_alloc_permit(is_two_cta=cluster_size == 2)


@cute.jit
def free(cluster_size: cutlass.Constexpr = 1) -> None:
    """By the warp that allocated it, when nobody uses it any more."""
    pointer = cute.make_ptr(Int32, 0, cute.AddressSpace.tmem, assumed_align=16)
    cute.arch.dealloc_tmem(pointer, COLUMNS, is_two_cta=cluster_size == 2)


@cute.jit
def own_lanes(column: Int32, warp: Int32) -> Int32:
    """The address of a column in the lanes that a warp reaches."""
    return column + warp % 4 * (WARP_LANES * LANE)


def load(address: Int32, values: cute.Tensor) -> None:
    """Neighbouring columns of the thread's lane to float32 registers, as many as a power of two."""
    count = cute.size(values)
    kind = ir.VectorType.get([count], Int32.mlir_type)
    words = nvvm.tcgen05_ld(kind, nvvm.Tcgen05LdStShape.SHAPE_32X32B, _pointer(address))
    for i in range(count):
        word = llvm.extractelement(words, arith.constant(Int32.mlir_type, i))
        values[i] = Float32(llvm.bitcast(Float32.mlir_type, word))


def store(address: Int32, values: cute.Tensor) -> None:
    """Registers of 32 bits, as many as a power of two, to neighbouring columns of the thread's lane."""
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
    """Between work on tensor memory and the synchronisation that tells of it."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)


def fence_after() -> None:
    """Between that synchronisation and work on tensor memory."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)


def _pointer(address: Int32) -> ir.Value:
    return llvm.inttoptr(llvm.PointerType.get(6), address.ir_value())
