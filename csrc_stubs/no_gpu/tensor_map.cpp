#include "tensor_map.h"

#include <cstring>

namespace flash4::tma {
namespace {

// Where the fields are, by 32-bit word. Found by compiling copies of varied types, swizzles, boxes and strides, and comparing
// what the host code wrote; tests/emulator/test_tma.py does so again.
constexpr uint32_t kFormat = 2, kStrides = 3, kStridesHigh = 7, kSizes = 8, kBox0 = 13, kBoxes = 14;

struct Bits {
    uint32_t word, shift, width;
};
constexpr Bits kRank{kFormat, 4, 3}, kType{kFormat, 7, 4}, kSwizzle{kFormat, 13, 3};

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

// Strides are kept in units of 16 bytes; those of dimensions 1 to 4 in a word each, with 4 more bits of each in another.
Bits stride_low(uint32_t dimension) { return {kStrides + dimension - 1, 0, 32}; }
Bits stride_high(uint32_t dimension) { return {kStridesHigh, 4 * (dimension - 1), 4}; }
Bits size_at(uint32_t dimension) { return {kSizes + dimension, 0, 32}; }
Bits box_at(uint32_t dimension) { return dimension == 0 ? Bits{kBox0, 24, 8} : Bits{kBoxes, 8 * (dimension - 1), 8}; }

[[noreturn]] void refuse(const std::string& why) { throw Fault("tensor-map", why); }

void check(const TensorMap& map) {
    if (map.address % 16) refuse("the tensor's address is not a multiple of 16 bytes");
    if (map.row_bytes() % 16) refuse("the box's rows have " + std::to_string(map.row_bytes()) + " bytes, not a multiple of 16");
    if (map.swizzle != Swizzle::None && map.row_bytes() > swizzle_span(map.swizzle))
        refuse("the box's rows have " + std::to_string(map.row_bytes()) + " bytes, more than the swizzle's " + std::to_string(swizzle_span(map.swizzle)));
    if (map.swizzle != Swizzle::None && map.row_bytes() < swizzle_span(map.swizzle))
        throw Fault("unsupported", "a tensor map whose box is narrower than its swizzle");
}

}  // namespace

TensorMap decode(const uint8_t* descriptor) {
    TensorMap map{};
    std::memcpy(&map.address, descriptor, sizeof map.address);
    map.rank = get(descriptor, kRank) + 1;
    map.type = static_cast<ElementType>(get(descriptor, kType));
    if (map.rank > kMaxRank) refuse("rank " + std::to_string(map.rank) + ": this is no tensor map");
    const uint32_t swizzle = get(descriptor, kSwizzle);
    if (swizzle > static_cast<uint32_t>(Swizzle::B128)) throw Fault("unsupported", "swizzle mode " + std::to_string(swizzle) + " of a tensor map");
    map.swizzle = static_cast<Swizzle>(swizzle);
    for (uint32_t i = 0; i < kMaxRank; ++i) {
        const bool used = i < map.rank;
        map.size[i] = used ? uint64_t{get(descriptor, size_at(i))} + 1 : 1;
        map.box[i] = used ? get(descriptor, box_at(i)) + 1 : 1;
        if (i == 0) map.stride[i] = map.element();
        else map.stride[i] = used ? (get(descriptor, stride_low(i)) | uint64_t{get(descriptor, stride_high(i))} << 32) * 16 : 0;
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
        case Field::ElementType: return set(descriptor, kType, value);
        case Field::Swizzle: return set(descriptor, kSwizzle, value);
        default: throw Fault("unsupported", "tensormap.replace of this field");
    }
}

}  // namespace flash4::tma
