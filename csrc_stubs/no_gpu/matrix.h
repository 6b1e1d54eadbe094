// Operands of the tensor cores: tiles of shared memory that matrix descriptors describe, in fp32, and their product.
//
// wgmma and tcgen05 take 32 bytes of K in an instruction whatever the element: 16 of 16 bits, 8 of tf32, 32 of 8 bits.
#pragma once

#include "machine.h"

namespace flash4 {

// In the order of `ELEMENTS` in flash4_torch/emulator/lower/tensor.py.
enum class Element : uint8_t { F16, BF16, TF32, E4M3, E5M2, S8, U8 };
uint32_t bytes_of(Element element);

inline constexpr uint32_t kTileBytes = 32;  // of K in one instruction
inline constexpr uint32_t kTileWords = kTileBytes / 4;
inline constexpr uint32_t kTileRows = 256;  // the largest M or N
inline uint32_t tile_k(Element element) { return kTileBytes / bytes_of(element); }

enum class Swizzle : uint8_t { None, B32, B64, B128, B128Atom32 };

// Offsets in bytes; `start` is an offset in the CTA's shared memory.
struct SharedMatrix {
    uint32_t start, leading, stride, base_offset;
    Swizzle swizzle;
};
SharedMatrix wgmma_matrix(uint64_t descriptor);    // PTX ISA, Asynchronous wgmma: Matrix Descriptor Format
SharedMatrix tcgen05_matrix(uint64_t descriptor);  // PTX ISA, tcgen05: Shared Memory Descriptor

// A or B in fp32: row r (of M or N) at k is value[k * kTileRows + r].
struct Tile {
    alignas(64) float value[kTileBytes * kTileRows];
};

// Which rows of a shared-memory operand to fetch, and to which rows of the tile.
struct Rows {
    uint32_t first, count, to = 0;  // multiples of 8; of 16 where the operand is MN-major in 8 bits
};
void gather(const race::Ticket& by, Cta& cta, const SharedMatrix& matrix, Element element, bool mn_major, Rows rows,
            Tile& tile);

// The bytes of a K-major matrix, row after row: `chunks` of 16 bytes each. `rows.to` does not matter.
void fetch(const race::Ticket& by, Cta& cta, const SharedMatrix& matrix, Rows rows, uint32_t chunks, uint8_t* to);

// A tile from words: word w of row r is words[w * word_step + r * row_step], and one of the steps is 1.
void spread(Element element, const uint32_t* words, size_t word_step, size_t row_step, uint32_t rows, float* to);

void negate(Tile& tile, Element element);

// d[i * kTileRows + j] += sum over k of scalars[k][i] * vectors[k][j], for i < 4 and j < count; `count` is rounded up
// to 16. Both operands point into tiles. Products are exact, sums fp32 in the order of k.
void multiply_add(const float* scalars, const float* vectors, uint32_t k, uint32_t count, float* d);

// Adds what a tensor core made of integers: wrapping, or clamped.
int32_t add_integer(int32_t accumulator, float product, bool saturate);

}  // namespace flash4
