// Tensor maps: 128-byte descriptors of a tensor in global memory and of the tile that one copy moves (PTX ISA, tensors).
#pragma once

#include "machine.h"
#include "reduce.h"

namespace flash4::tma {

inline constexpr uint32_t kMaxRank = 5, kMapBytes = 128, kMapAlignment = 64;

// How the 16-byte chunks of a tile in shared memory are permuted within 128-byte lines, by their address.
enum class Swizzle : uint8_t { None, B32, B64, B128 };
inline uint32_t swizzled(Swizzle mode, uint32_t address) {
    const uint32_t lines = (1u << static_cast<uint32_t>(mode)) - 1;
    return address ^ ((address >> 7 & lines) << 4);
}
inline uint32_t swizzle_span(Swizzle mode) { return 16u << static_cast<uint32_t>(mode); }

// Dimension 0 is contiguous; sizes in elements, strides in bytes.
struct TensorMap {
    uint64_t address;
    uint32_t rank;
    ElementType type;
    Swizzle swizzle;
    uint64_t size[kMaxRank], stride[kMaxRank];
    uint32_t box[kMaxRank];

    uint32_t element() const { return element_bytes(type); }
    uint32_t row_bytes() const { return box[0] * element(); }
    uint32_t rows() const { return box[1] * box[2] * box[3] * box[4]; }
    uint32_t bytes() const { return rows() * row_bytes(); }
};

// Throws Fault for what the engine does not implement and for maps that the hardware refuses.
TensorMap decode(const uint8_t* descriptor);

// tensormap.replace: the fields by the names of PTX, with `dimension` for those that have one value for each.
enum class Field : uint8_t { Address, Rank, BoxDim, GlobalDim, GlobalStride, ElementStride, ElementType, Interleave, Swizzle, Fill };
void replace(uint8_t* descriptor, Field field, uint32_t dimension, uint64_t value);

}  // namespace flash4::tma
