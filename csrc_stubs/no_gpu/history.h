// What has happened to shared and tensor memory, as far as it can still matter to the race checker.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "machine.h"

namespace flash4::race {

inline constexpr uint32_t kGranule = 4;    // bytes of shared memory
inline constexpr uint8_t kAllBytes = 0xF;  // of a granule

enum class Kind : uint8_t { Read, StrongRead, Write, Atomic, Free };

inline bool overwrites(Kind kind) { return kind == Kind::Write || kind == Kind::Free; }
inline bool only_reads(Kind kind) { return kind == Kind::Read || kind == Kind::StrongRead; }

// Which lanes of a warp: the first, others, each of both in its own place, or all together (race.h).
enum class Part : uint8_t { First, Others, Each, Together };

struct Access {
    Agent agent;  // of a warp: that of its other lanes
    uint32_t epoch;
    uint32_t serial;  // of the asynchronous work; 0 for what a warp does itself
    Origin origin;
    Kind kind;
    bool generic;   // through the generic proxy
    uint8_t bytes;  // of the granule, a bit each
    Part part = Part::Together;
    bool first_shared = false;  // with Part::Each: others touch the first lane's piece, too
    Piece first{};              // with Part::Each: the first lane's
};

inline bool may_conflict(const Access& a, const Access& b) {
    if (!(a.bytes & b.bytes)) return false;
    if (overwrites(a.kind) || overwrites(b.kind)) return true;
    return (a.kind == Kind::Atomic && b.kind == Kind::Read) || (a.kind == Kind::Read && b.kind == Kind::Atomic);
}

// A history is the accesses of a granule that a later one may still conflict with. Histories never change and have
// numbers; granules share them, so that a granule costs four bytes.
class Histories {
public:
    static constexpr uint32_t kEmpty = 0;

    std::span<const Access> operator[](uint32_t history) const {
        const Extent& extent = extents_[history];
        return {accesses_.data() + extent.first, extent.count};
    }

    uint32_t add(std::span<const Access> accesses) {
        extents_.push_back({static_cast<uint32_t>(accesses_.size()), static_cast<uint32_t>(accesses.size())});
        accesses_.insert(accesses_.end(), accesses.begin(), accesses.end());
        return static_cast<uint32_t>(extents_.size() - 1);
    }

    bool crowded() const { return extents_.size() > limit_; }

    // Drops the histories that no granule refers to any more, and renumbers the others.
    void collect(std::span<std::vector<uint32_t>> shadows) {
        Histories kept;
        std::vector<uint32_t> number(extents_.size(), kEmpty);
        for (auto& shadow : shadows)
            for (uint32_t& history : shadow) {
                if (history == kEmpty) continue;
                if (number[history] == kEmpty) number[history] = kept.add((*this)[history]);
                history = number[history];
            }
        kept.limit_ = std::max(limit_, 2 * kept.extents_.size());
        *this = std::move(kept);
    }

private:
    struct Extent {
        uint32_t first, count;
    };
    std::vector<Extent> extents_{{0, 0}};
    std::vector<Access> accesses_;
    size_t limit_ = 1 << 16;
};

}  // namespace flash4::race
