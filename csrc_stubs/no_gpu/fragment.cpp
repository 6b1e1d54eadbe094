#include "fragment.h"

#include <cstring>

#include "number.h"

namespace flash4 {
namespace {

// A lane's part of D comes in pairs of neighbouring columns (PTX ISA, wgmma: matrix fragment for D). The pairs number p
// of all lanes, lane after lane, are a block of 8 rows by 8 columns.
constexpr uint32_t kBlock = 8;
using Pairs = float[2 * kLanes];
static_assert(2 * kLanes == kBlock * kBlock);

uint32_t block_row(uint32_t p, uint32_t row) { return p % 2 * kBlock + row; }
uint32_t block_column(uint32_t p) { return p / 2 * kBlock; }

void load_pairs(Warp& warp, const uint32_t* registers, Accumulator type, uint32_t p, Pairs& pairs) {
    if (type == Accumulator::F16) {
        const uint32_t* both = warp.u32(registers[p]);
        for (int lane = 0; lane < kLanes; ++lane) {
            pairs[2 * lane] = number::from_f16(static_cast<uint16_t>(both[lane]));
            pairs[2 * lane + 1] = number::from_f16(static_cast<uint16_t>(both[lane] >> 16));
        }
    } else {
        const float *first = warp.f32(registers[2 * p]), *second = warp.f32(registers[2 * p + 1]);
        for (int lane = 0; lane < kLanes; ++lane) {
            pairs[2 * lane] = first[lane];
            pairs[2 * lane + 1] = second[lane];
        }
    }
}

void store_pairs(Warp& warp, const uint32_t* registers, Accumulator type, uint32_t p, const Pairs& pairs) {
    if (type == Accumulator::F16) {
        uint32_t* both = warp.u32(registers[p]);
        for (int lane = 0; lane < kLanes; ++lane)
            both[lane] = number::to_f16(pairs[2 * lane]) | uint32_t{number::to_f16(pairs[2 * lane + 1])} << 16;
    } else {
        float *first = warp.f32(registers[2 * p]), *second = warp.f32(registers[2 * p + 1]);
        for (int lane = 0; lane < kLanes; ++lane) {
            first[lane] = pairs[2 * lane];
            second[lane] = pairs[2 * lane + 1];
        }
    }
}

void gather_pairs(const Sums& sums, uint32_t p, Pairs& pairs) {
    for (uint32_t row = 0; row < kBlock; ++row)
        std::memcpy(pairs + kBlock * row, &sums[block_row(p, row)][block_column(p)], kBlock * sizeof(float));
}

}  // namespace

void load_sums(Warp& warp, const uint32_t* registers, Accumulator type, uint32_t n, Sums& sums) {
    alignas(64) Pairs pairs;
    for (uint32_t p = 0; p < n / 4; ++p) {
        load_pairs(warp, registers, type, p, pairs);
        for (uint32_t row = 0; row < kBlock; ++row)
            std::memcpy(&sums[block_row(p, row)][block_column(p)], pairs + kBlock * row, kBlock * sizeof(float));
    }
}

void store_sums(Warp& warp, const uint32_t* registers, Accumulator type, uint32_t n, const Sums& sums) {
    alignas(64) Pairs pairs;
    for (uint32_t p = 0; p < n / 4; ++p) {
        gather_pairs(sums, p, pairs);
        store_pairs(warp, registers, type, p, pairs);
    }
}

void add_integer_sums(Warp& warp, const uint32_t* registers, bool accumulate, bool saturate, uint32_t n,
                      const Sums& sums) {
    alignas(64) Pairs pairs;
    for (uint32_t p = 0; p < n / 4; ++p) {
        gather_pairs(sums, p, pairs);
        for (uint32_t half = 0; half < 2; ++half) {
            int32_t* d = warp.s32(registers[2 * p + half]);
            for (uint32_t lane = 0; lane < kLanes; ++lane)
                d[lane] = add_integer(accumulate ? d[lane] : 0, pairs[2 * lane + half], saturate);
        }
    }
}

void read_fragment(Warp& warp, const uint32_t* registers, Element element, uint32_t rows, uint32_t k_bytes,
                   Tile& tile) {
    const uint32_t blocks = rows / kBlock, count = blocks * k_bytes / 16;
    uint32_t words[kFragmentRows * kTileWords] = {};
    for (uint32_t j = 0; j < count; ++j)
        for (uint32_t lane = 0; lane < kLanes; ++lane)
            words[(lane / 4 + j % blocks * kBlock) * kTileWords + lane % 4 + j / blocks * 4] =
                warp.u32(registers[j])[lane];
    spread(element, words, 1, kTileWords, rows, tile.value);
}

}  // namespace flash4
