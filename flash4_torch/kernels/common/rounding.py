"""Conversions between float32 registers and registers of a kernel's dtype, 16 bits or float32 itself."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import llvm


@cute.jit
def round_to(values: cute.Tensor, target: cute.Tensor) -> None:
    """Round float32 registers to the 16-bit registers of `target`, pair by pair; or copy them."""
    if cutlass.const_expr(target.element_type is Float32):
        for i in cutlass.range_constexpr(cute.size(target)):
            target[i] = values[i]
    else:
        _round_pairs(values, target)


def _round_pairs(values: cute.Tensor, target: cute.Tensor) -> None:
    kind = "bf16x2" if target.element_type is cutlass.BFloat16 else "f16x2"
    pairs = cute.recast_tensor(target, cutlass.Uint32)
    for i in range(cute.size(pairs)):
        pairs[i] = cute.arch.inline_ptx(
            f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
            write_only_types=[cutlass.Uint32],
            read_only_args=[values[2 * i + 1], values[2 * i]],
        )


@cute.jit
def widened(numbers: cute.Tensor) -> cute.Tensor:
    """Registers, widened to float32."""
    if cutlass.const_expr(numbers.element_type is Float32):
        return numbers
    count = cute.size(numbers)
    wide = cute.make_rmem_tensor(count, Float32)
    pairs = cute.recast_tensor(numbers, cutlass.Uint32)
    for i in cutlass.range_constexpr(count // 2):
        if cutlass.const_expr(numbers.element_type is cutlass.BFloat16):
            wide[2 * i], wide[2 * i + 1] = (
                float_of(pairs[i] << 16),
                float_of(pairs[i] & cutlass.Uint32(0xFFFF0000)),
            )
        else:
            wide[2 * i], wide[2 * i + 1] = cute.arch.inline_ptx(
                "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0};"
                " cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }",
                write_only_types=[Float32, Float32],
                read_only_args=[pairs[i]],
            )
    return wide


def bits_of(x: Float32) -> cutlass.Uint32:
    """The bits of a float32."""
    return cutlass.Uint32(llvm.bitcast(cutlass.Uint32.mlir_type, x.ir_value()))


def float_of(bits: cutlass.Uint32) -> Float32:
    """The float32 of these bits."""
    return Float32(llvm.bitcast(Float32.mlir_type, bits.ir_value()))
