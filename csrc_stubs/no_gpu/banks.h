// How much of shared memory one instruction of a warp touches, and how often its 32 banks of 4 bytes must be asked.
#pragma once

#include <algorithm>
#include <array>

#include "machine.h"

namespace flash4 {

inline constexpr uint32_t kBanks = 32, kPassBytes = kBanks * 4;

struct Traffic {
    uint64_t bytes;  // distinct ones
    uint64_t passes;
};

// What asynchronous units and tensor cores move, without conflicts.
inline Traffic in_rows(uint64_t bytes) { return {bytes, (bytes + kPassBytes - 1) / kPassBytes}; }

inline void count_shared(Warp& warp, const Op& op, Traffic traffic) {
    warp.shared_bytes[op.index] += traffic.bytes;
    warp.shared_passes[op.index] += traffic.passes;
}

// Distinct words, and the most of them that lie in one bank.
struct Words {
    std::array<uint32_t, kBanks * 4> word;
    uint32_t count = 0;

    void add(uint32_t offset, uint32_t words) {
        for (uint32_t i = 0; i < words; ++i) word[count++] = offset / 4 + i;
    }
    uint32_t distinct() {
        std::sort(word.begin(), word.begin() + count);
        return static_cast<uint32_t>(std::unique(word.begin(), word.begin() + count) - word.begin());
    }
    uint32_t passes() {
        const uint32_t n = distinct();
        std::array<uint32_t, kBanks> asked{};
        for (uint32_t i = 0; i < n; ++i) ++asked[word[i] % kBanks];
        return *std::max_element(asked.begin(), asked.end());
    }
};

// Lanes of `mask` access `bytes` each (a power of two up to 16) from their offset on. As many neighbouring lanes are
// served together as ask for 128 bytes; all of them where no two words that they ask for share a bank.
inline Traffic traffic_of(const uint32_t* offset, Mask mask, uint32_t bytes) {
    const int first = first_lane(mask);
    bool together = mask == kAllLanes, alike = true;
    for (int lane = 0; lane < kLanes; ++lane) {
        together &= offset[lane] == offset[first] + static_cast<uint32_t>(lane) * bytes;
        alike &= !(mask >> lane & 1) || offset[lane] == offset[first];
    }
    if (alike) return {bytes, 1};
    if (together && bytes >= 4 && offset[first] % kPassBytes == 0) return in_rows(uint64_t{kLanes} * bytes);
    const uint32_t words = std::max(bytes / 4, 1u), group = kLanes / words;
    Words all;
    uint64_t passes = 0;
    for (uint32_t begin = 0; begin < kLanes; begin += group) {
        Words some;
        for (uint32_t lane = begin; lane < begin + group; ++lane)
            if (mask >> lane & 1) {
                some.add(offset[lane], words);
                all.add(offset[lane], words);
            }
        if (some.count) passes += some.passes();
    }
    Words copy = all;
    if (copy.passes() == 1) passes = 1;
    return {std::min<uint64_t>(uint64_t{all.distinct()} * 4, uint64_t(__builtin_popcount(mask)) * bytes), passes};
}

}  // namespace flash4
