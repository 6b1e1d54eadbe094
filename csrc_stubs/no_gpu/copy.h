// What asynchronous copies share: completion on an mbarrier, or in a group of the lane that issued them.
#pragma once

#include "async.h"
#include "barrier.h"
#include "memory.h"

namespace flash4 {

// --- on an mbarrier

struct Arrival {
    SharedRef barrier;
    race::Ticket ticket;
};
// At issue, by these lanes; the copy belongs to the barrier's current phase.
Arrival announce(Warp& warp, const Op& op, Mask lanes, SharedRef barrier);
// When the bytes have landed.
void land(const Arrival& arrival, uint32_t bytes);

// --- in a group

using GroupQueues = std::array<GroupQueue, kLanes>;

// The open groups of these lanes, each once.
std::vector<std::shared_ptr<CommitGroup>> open_groups(GroupQueues& queues, Mask mask);
void commit_groups(GroupQueues& queues, Mask mask);

// Whether all but the newest `newest` groups of the lanes are done, or, with `read_only`, have read their sources.
// `epoch` is then the highest one that has been waited for, `waited` the lanes that had anything to wait for.
bool groups_done(GroupQueues& queues, Mask mask, uint64_t newest, bool read_only, uint32_t& epoch, Mask& waited);

// Bulk stores: reads shared memory some time later, then, later still, gives the bytes to `write`, which touches global
// memory only. `lanes` are those that issue it.
void submit_bulk_store(Warp& warp, const Op& op, Mask lanes, const char* what, SharedRef source, uint32_t bytes,
                       std::function<void(const uint8_t*)> write);

// --- accesses of shared memory by asynchronous work, for the race checker

inline void check_read(const race::Ticket& by, SharedRef place, uint32_t bytes) {
    if (by.clock) place.cta->cluster->races->read(by, *place.cta, place.offset, bytes);
}
inline void check_write(const race::Ticket& by, SharedRef place, uint32_t bytes) {
    if (by.clock) place.cta->cluster->races->write(by, *place.cta, place.offset, bytes);
}
inline void check_reduce(const race::Ticket& by, SharedRef place, uint32_t bytes, bool generic) {
    if (by.clock) place.cta->cluster->races->reduce(by, *place.cta, place.offset, bytes, generic);
}
// By a unit that accesses through the generic proxy.
inline void check_write_generic(const race::Ticket& by, SharedRef place, uint32_t bytes) {
    if (by.clock) place.cta->cluster->races->write_generic(by, *place.cta, place.offset, bytes);
}

}  // namespace flash4
