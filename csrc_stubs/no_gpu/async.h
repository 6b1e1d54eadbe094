// Asynchronous work: how the units (TMA, bulk copies, tensor cores) hand work to the scheduler, and how warps wait for
// it.
#pragma once

#include "machine.h"

namespace flash4 {

// A group of asynchronous operations that a warp's lane committed together and may wait for.
struct CommitGroup {
    uint32_t epoch = 0;    // highest epoch of its works (race.h)
    uint32_t reading = 0;  // works that have not finished reading their source
    uint32_t pending = 0;  // works that are not finished
};

// What the units keep for one warp. Groups are per warp; `lanes` of the instruction that commits and waits must be the
// same as those that issued, which all kernels obey (an elected lane, or all lanes).
struct GroupQueue {
    std::shared_ptr<CommitGroup> open = std::make_shared<CommitGroup>();  // not committed yet
    std::deque<std::shared_ptr<CommitGroup>> committed;                   // oldest first; finished ones are dropped
};

struct Warp::Units {
    // By lane: an elected lane's groups are its own.
    std::array<GroupQueue, kLanes> bulk, cp_async;
    GroupQueue wgmma;
    std::vector<uint32_t> wgmma_epochs;  // of all groups that were committed
    CommitGroup tmem_load, tmem_store;
    // Registers as wgmma sees them, by register_unit; empty before the first wgmma.fence.
    struct Busy {
        uint16_t reads = 0;          // as a fragment of A
        uint16_t writes = 0;         // as an accumulator
        const Op* writer = nullptr;  // the last that accumulates
        bool unfenced = false;       // written by the warp since its last wgmma.fence
    };
    std::vector<Busy> wgmma_registers;
    // The wgmmas of each group in `wgmma.committed`, then those of the open one.
    std::deque<std::vector<const Op*>> wgmma_uses{1};
    std::vector<uint32_t> wgmma_unfenced;  // units that are `unfenced`
    // Registers that hold what a tcgen05.ld not waited for has loaded, by register_unit: the load's epoch + 1, or 0.
    std::vector<uint32_t> tmem_loaded;
    std::vector<uint32_t> tmem_loaded_units;  // where it is not 0
};

// Registers of 32 lanes begin at multiples of this many bytes.
inline uint32_t register_unit(uint32_t offset) { return offset / 64; }

// Called by the step loop before an instruction of a warp with busy registers; throws or reports what the rules forbid,
// and joins a tcgen05.ld whose destination is consumed. Defined in wgmma.cpp and tmem.cpp.
void check_wgmma_registers(Warp& warp, const Op& op);
void check_tmem_registers(Warp& warp, const Op& op);

// Queue numbers for Work::queue: works of one queue are done in the order of their submission.
enum class QueueKind : uint64_t { Mma = 1, Wgmma, Bulk, TmemLoad, TmemStore, CpAsync };
inline uint64_t queue_of(QueueKind kind, const Cta& cta, uint32_t warp = 0) {
    return static_cast<uint64_t>(kind) << 32 | static_cast<uint64_t>(cta.rank) << 16 | warp;
}

}  // namespace flash4
