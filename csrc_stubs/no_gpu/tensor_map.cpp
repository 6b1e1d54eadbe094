#include "tensor_map.h"

#include <cstring>

namespace flash4::tma {
namespace {

// Where the fields are. Found by comparing the maps that host code writes for varied types, swizzles, boxes and
// strides, and what tensormap.replace changes on an H200.
struct Bits {
    uint32_t word, shift, width;
};
constexpr Bits kRank{2, 4, 3}, kType{2, 7, 4}, kInterleave{2, 11, 2}, kSwizzle{2, 13, 2}, kFillNan{2, 15, 1},
    kTf32{2, 16, 1}, kAtom{2, 19, 2}, kElementStrides{13, 0, 15};
constexpr uint32_t kAtom16 = 0, kAtom32 = 1;  // bytes that a swizzle leaves together

constexpr uint32_t mask(uint32_t width) { return width == 32 ? ~0u : (1u << width) - 1; }

uint32_t word(const uint8_t* descriptor, uint32_t index) {
    uint32_t value;
    std::memcpy(&value, descriptor + 4 * index, sizeof value);
    return value;
}

uint32_t get(const uint8_t* descriptor, Bits at) { return word(descriptor, at.word) >> at.shift & mask(at.width); }

void set(uint8_t* descriptor, Bits at, uint64_t value) {
    const uint32_t field = mask(at.width) << at.shift;
    const uint32_t changed = (word(descriptor, at.word) & ~field) | (static_cast<uint32_t>(value) << at.shift & field);
    std::memcpy(descriptor + 4 * at.word, &changed, sizeof changed);
}

// Strides of dimensions from 1 on, in units of 16 bytes: 32 bits in a word each, and 4 more bits in a common word.
Bits stride_low(uint32_t dimension) { return {3 + dimension - 1, 0, 32}; }
Bits stride_high(uint32_t dimension) { return {7, 4 * (dimension - 1), 4}; }
Bits size_at(uint32_t dimension) { return {8 + dimension, 0, 32}; }
Bits element_stride_at(uint32_t dimension) { return {13, 3 * dimension, 3}; }
Bits box_at(uint32_t dimension) { return dimension == 0 ? Bits{13, 24, 8} : Bits{14, 8 * (dimension - 1), 8}; }

// tf32 is f32 with a mark.
void set_type(uint8_t* descriptor, ElementType type) {
    const bool tf32 = type == ElementType::Tf32 || type == ElementType::Tf32Flushed;
    const ElementType stored = type == ElementType::Tf32          ? ElementType::F32
                               : type == ElementType::Tf32Flushed ? ElementType::F32Flushed
                                                                  : type;
    set(descriptor, kType, static_cast<uint64_t>(stored));
    set(descriptor, kTf32, tf32);
}

[[noreturn]] void refuse(const std::string& why) { throw Fault("tensor-map", why); }

[[noreturn]] void unsupported(const std::string& what) { throw Fault("unsupported", "a tensor map with " + what); }

Swizzle swizzle_of(const uint8_t* descriptor) {
    const uint32_t mode = get(descriptor, kSwizzle), atom = get(descriptor, kAtom);
    if (atom == kAtom16) return static_cast<Swizzle>(mode);
    if (atom == kAtom32 && mode == static_cast<uint32_t>(Swizzle::B128)) return Swizzle::B128Atom32;
    unsupported("swizzle mode " + std::to_string(mode) + " of atomicity " + std::to_string(atom));
}

void check_supported(const uint8_t* descriptor) {
    if (get(descriptor, kInterleave)) unsupported("an interleaved layout");
    if (get(descriptor, kElementStrides)) unsupported("element strides");
}

void check(const TensorMap& map) {
    if (map.address % 16) refuse("the tensor's address is not a multiple of 16 bytes");
    if (map.row_bytes() % 16)
        refuse("the box's rows have " + std::to_string(map.row_bytes()) + " bytes, not a multiple of 16");
    if (map.swizzle != Swizzle::None && map.row_bytes() > swizzle_span(map.swizzle))
        refuse("the box's rows have " + std::to_string(map.row_bytes()) + " bytes, more than the swizzle's " +
               std::to_string(swizzle_span(map.swizzle)));
    if (map.fill_nan && map.type < ElementType::F16) refuse("integers outside the tensor cannot read as NaN");
}

}  // namespace

TensorMap decode(const uint8_t* descriptor) {
    TensorMap map{};
    std::memcpy(&map.address, descriptor, sizeof map.address);
    map.rank = get(descriptor, kRank) + 1;
    map.type = static_cast<ElementType>(get(descriptor, kType));
    if (map.rank > kMaxRank) refuse("rank " + std::to_string(map.rank) + ": this is no tensor map");
    check_supported(descriptor);
    map.swizzle = swizzle_of(descriptor);
    map.fill_nan = get(descriptor, kFillNan);
    map.tf32 = get(descriptor, kTf32);
    for (uint32_t i = 0; i < kMaxRank; ++i) {
        const bool used = i < map.rank;
        map.size[i] = used ? uint64_t{get(descriptor, size_at(i))} + 1 : 1;
        map.box[i] = used ? get(descriptor, box_at(i)) + 1 : 1;
        if (i == 0) map.stride[i] = map.element();
        else
            map.stride[i] =
                used ? (get(descriptor, stride_low(i)) | uint64_t{get(descriptor, stride_high(i))} << 32) * 16 : 0;
    }
    check(map);
    return map;
}

void replace(uint8_t* descriptor, Field field, uint32_t dimension, uint64_t value) {
    switch (field) {
        case Field::Address: std::memcpy(descriptor, &value, sizeof value); return;
        case Field::Rank: return set(descriptor, kRank, value);
        case Field::BoxDim: return set(descriptor, box_at(dimension), value - 1);
        case Field::GlobalDim: return set(descriptor, size_at(dimension), value - 1);
        case Field::GlobalStride:
            set(descriptor, stride_low(dimension + 1), value / 16);
            return set(descriptor, stride_high(dimension + 1), value / 16 >> 32);
        case Field::ElementStride: return set(descriptor, element_stride_at(dimension), value - 1);
        case Field::ElementType: return set_type(descriptor, static_cast<ElementType>(value));
        case Field::Interleave: return set(descriptor, kInterleave, value);
        case Field::Swizzle: return set(descriptor, kSwizzle, value);
        case Field::Fill: return set(descriptor, kFillNan, value);
    }
}

}  // namespace flash4::tma
