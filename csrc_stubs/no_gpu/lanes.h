// Races among the lanes of one warp, over shared memory.
//
// The happens-before checker (race.h) knows a warp as two agents. Here every lane counts: two lanes that touch the same
// byte, one of them to write it, need something between that can order them. That is bar.warp.sync or the wait for a
// barrier, not that they run together, and no shuffle, vote or election (PTX ISA, Memory Consistency Model: program order
// is a thread's). Whatever may order some lanes counts as ordering all: a finding is never false.
//
// A lane that waits for its cp.async sees what it copied itself; the other lanes see it after the next meeting.
// ldmatrix and stmatrix are of all lanes: which of them touches a row is not said.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_set>
#include <utility>
#include <vector>

#include "isa.h"

namespace flash4 {
struct Cta;
struct Cluster;
struct Origin;

namespace race {

// Where the lanes of an access are in shared memory: lane i touches `bytes` from offset[i] on.
struct LanePlaces {
    const uint32_t* offset;
    Mask mask;
    uint32_t bytes;
};

class Lanes {
public:
    explicit Lanes(Cluster& cluster);

    // Something may have ordered the warp's lanes.
    void meet(const Warp& warp);

    // Each lane touches its own place, at once with the others.
    void read(const Warp& warp, const Op& op, const Cta& cta, const LanePlaces& places);
    void write(const Warp& warp, const Op& op, const Cta& cta, const LanePlaces& places);
    // All lanes touch all places.
    void read_together(const Warp& warp, const Op& op, const Cta& cta, const LanePlaces& rows);
    void write_together(const Warp& warp, const Op& op, const Cta& cta, const LanePlaces& rows);

    // cp.async: lanes ask for copies, which are done later; `epoch` counts those of the warp. Then lanes wait for them.
    void ask(const Warp& warp, const Op& op, const Cta& cta, const LanePlaces& places);
    void copy(const Origin& origin, uint32_t epoch, const Cta& cta, uint32_t offset, uint32_t bytes, int lane);
    void wait(const Warp& warp, uint32_t epoch);

private:
    // Who touches a byte: the number of a lane, or one of these. What several lanes write at once is the same, and each
    // may read it as its own.
    using Who = uint8_t;
    static constexpr Who kNobody = 0xFF, kSeveral = 0xFE, kAll = 0xFD, kAtOnce = 0xFC;
    static constexpr uint32_t kBytes = 4;  // of a granule

    // The last accesses of a granule of one kind, between two meetings of a warp.
    struct Accesses {
        std::array<Who, kBytes> who;
        uint32_t meetings = 0;  // of the warp, before; 0: there are none
        uint32_t warp = 0, op = 0;
        uint32_t serial = 0;  // of the instruction
        uint32_t epoch = 0;   // of a cp.async, or 0
    };
    struct Granule {
        Accesses read, write;
    };
    // The access at hand.
    struct Now {
        uint32_t warp, meetings, op;
        bool writes, records;
    };

    Cluster& cluster_;
    uint32_t warps_per_cta_;
    uint32_t serial_ = 0;
    std::vector<uint32_t> meetings_;  // by warp of the cluster
    // By warp: epochs of cp.async that some lane has waited for, and the meetings before.
    std::vector<std::vector<std::pair<uint32_t, uint32_t>>> waits_;
    std::vector<std::vector<Granule>> granules_;  // by CTA
    std::unordered_set<uint64_t> reported_;

    Now now(const Warp& warp, const Op& op, bool writes);
    void touch(const Now& now, const Cta& cta, const LanePlaces& places);
    void touch(const Now& now, const Cta& cta, uint32_t offset, uint32_t bytes, Who who);
    // Records the access; `past` is of its kind.
    void record(const Now& now, Accesses& past, uint32_t first, uint32_t count, Who who) const;
    // Whether the byte's last access is by others of this warp, and nothing has ordered them since.
    bool conflicts(const Now& now, const Accesses& past, uint32_t byte, Who who) const;
    uint32_t meetings_of(const Accesses& past) const;
    void report(const Now& now, const Cta& cta, uint32_t offset, Who who, const Accesses& past, Who other,
                bool past_writes);
};

}  // namespace race
}  // namespace flash4
