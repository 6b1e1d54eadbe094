// mma.sync: products of small matrices that a warp holds in registers (PTX ISA, Warp Level Matrix Instructions: mma).
#include <cstring>

#include "fragment.h"

namespace flash4 {
namespace {

constexpr uint32_t kRows = kFragmentRows, kColumns = 8;

// D may name registers of A, B and C: all of these are read first.
// reg: D, A, B, C; attr: bytes of K (16 or 32), element of A, of B, accumulator.
Step mma(Warp& warp, const Op& op, Mask mask) {
    static thread_local Tile a, b;
    alignas(64) static thread_local Sums sums;
    need_whole_warp(mask, "mma.sync");
    const uint32_t k_bytes = static_cast<uint32_t>(op.attr[0]);
    const Element of_a = static_cast<Element>(op.attr[1]), of_b = static_cast<Element>(op.attr[2]);
    const Accumulator type = static_cast<Accumulator>(op.attr[3]);
    const uint32_t* registers_a = op.reg + accumulator_registers(type, kColumns);
    const uint32_t* registers_b = registers_a + k_bytes / 8;
    const uint32_t* registers_c = registers_b + k_bytes / 16;
    const uint32_t k = k_bytes / bytes_of(of_a);

    read_fragment(warp, registers_a, of_a, kRows, k_bytes, a);
    read_fragment(warp, registers_b, of_b, kColumns, k_bytes, b);
    load_sums(warp, registers_c, type, kColumns, sums);
    for (uint32_t row = 0; row < kRows; row += 4) multiply_add(a.value + row, b.value, k, kColumns, sums[row]);
    store_sums(warp, op.reg, type, kColumns, sums);

    Counters& counters = warp.cta->launch->counters;
    ++counters.mma;
    counters.mma_flops += 2ull * kRows * kColumns * k;
    return Step::Next;
}

FLASH4_OP("mma.sync", Mma, mma);

}  // namespace
}  // namespace flash4
