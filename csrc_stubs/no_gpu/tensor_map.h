// Tensor maps: 128-byte descriptors of a tensor in global memory and of the tile that one copy moves.
#pragma once

#include <algorithm>

#include "machine.h"
#include "reduce.h"

namespace flash4::tma {

inline constexpr uint32_t kMaxRank = 5, kMapBytes = 128, kMapAlignment = 64;

// How the chunks of a tile in shared memory are permuted, by their address: chunks of 16 bytes within spans of 32, 64
// or 128 bytes, or of 32 bytes within 128.
enum class Swizzle : uint8_t { None, B32, B64, B128, B128Atom32 };

inline uint32_t swizzled(Swizzle mode, uint32_t address) {
    if (mode == Swizzle::B128Atom32) return address ^ ((address >> 7 & 3) << 5);
    const uint32_t lines = (1u << static_cast<uint32_t>(mode)) - 1;
    return address ^ ((address >> 7 & lines) << 4);
}

// Bytes within which chunks are exchanged; 1 where they are not.
inline uint32_t swizzle_span(Swizzle mode) {
    constexpr uint8_t spans[] = {1, 32, 64, 128, 128};
    return spans[static_cast<int>(mode)];
}

// Dimension 0 is contiguous; sizes in elements, strides in bytes.
struct TensorMap {
    uint64_t address;
    uint32_t rank;
    ElementType type;
    Swizzle swizzle;
    bool fill_nan;  // elements outside the tensor read as NaN, not as 0
    bool tf32;      // f32 is rounded to tf32 when it is loaded
    uint64_t size[kMaxRank], stride[kMaxRank];
    uint32_t box[kMaxRank];

    uint32_t element() const { return element_bytes(type); }
    uint32_t row_bytes() const { return box[0] * element(); }
    uint32_t rows() const { return box[1] * box[2] * box[3] * box[4]; }
    uint32_t bytes() const { return rows() * row_bytes(); }
    // A row of a tile begins this many bytes after the one before it: narrow rows are spread over whole spans.
    uint32_t pitch() const { return std::max(row_bytes(), swizzle_span(swizzle)); }
    uint32_t tile_bytes() const { return rows() * pitch(); }
};

// Throws Fault for what the engine does not implement and for maps that the hardware refuses.
TensorMap decode(const uint8_t* descriptor);

// tensormap.replace: the fields by the names of PTX, with `dimension` for those that have one value for each.
enum class Field : uint8_t {
    Address,
    Rank,
    BoxDim,
    GlobalDim,
    GlobalStride,
    ElementStride,
    ElementType,
    Interleave,
    Swizzle,
    Fill
};
void replace(uint8_t* descriptor, Field field, uint32_t dimension, uint64_t value);

}  // namespace flash4::tma
