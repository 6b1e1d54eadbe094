// Fragments: the parts of A, B and D that the lanes of a warp hold in registers (PTX ISA, wgmma: Register Fragments;
// mma: Matrix Fragments).
#pragma once

#include "matrix.h"

namespace flash4 {

// In the order of `ACCUMULATORS` in flash4_torch/emulator/lower/tensor.py.
enum class Accumulator : uint8_t { F32, F16, S32 };

inline constexpr uint32_t kFragmentRows = 16;  // of A and D in a warp

// D of a warp in fp32, row by row.
using Sums = float[kFragmentRows][kTileRows];

// Registers of a lane that hold its part of D, which has `n` columns.
inline uint32_t accumulator_registers(Accumulator type, uint32_t n) { return n / (type == Accumulator::F16 ? 4 : 2); }

// The first `n` columns, from and to floating-point accumulators.
void load_sums(Warp& warp, const uint32_t* registers, Accumulator type, uint32_t n, Sums& sums);
void store_sums(Warp& warp, const uint32_t* registers, Accumulator type, uint32_t n, const Sums& sums);

// Integers: `sums` are products only, which are added to the accumulators or replace them.
void add_integer_sums(Warp& warp, const uint32_t* registers, bool accumulate, bool saturate, uint32_t n,
                      const Sums& sums);

// A or B with 16 or 32 bytes of K: `rows` of M or N, 8 or 16. A register holds 4 bytes of K of one row; further
// registers hold the rows 8 further on, then the bytes 16 further on.
void read_fragment(Warp& warp, const uint32_t* registers, Element element, uint32_t rows, uint32_t k_bytes, Tile& tile);

}  // namespace flash4
