// Synchronisation: mbarriers, named and cluster barriers, fences, setmaxnreg.
#include "barrier.h"

#include <algorithm>
#include <cstring>

#include "warp.h"

namespace flash4 {
namespace {

constexpr uint32_t kMaxCount = (1u << 20) - 1;  // PTX ISA, mbarrier: "Contents of the mbarrier object"

std::string at(SharedRef place) {
    char text[64];
    std::snprintf(text, sizeof text, "mbarrier at shared 0x%x of CTA %u", place.offset, place.cta->rank);
    return text;
}

MBarrier* find(SharedRef place) {
    auto found = place.cta->mbarriers.find(place.offset);
    return found == place.cta->mbarriers.end() ? nullptr : found->second.get();
}

void complete_phase_if_due(SharedRef place, MBarrier& barrier) {
    if (barrier.pending || barrier.tx) return;
    ++barrier.phase;
    barrier.pending = barrier.expected;
    std::swap(barrier.completed, barrier.clock);
    barrier.clock.clear();
    place.cta->cluster->event();
}

// PTX ISA, mbarrier: "Contents of the mbarrier object".
void add_bytes(SharedRef place, MBarrier& barrier, int64_t bytes) {
    barrier.tx += bytes;
    if (barrier.tx > kMaxCount || barrier.tx < -static_cast<int64_t>(kMaxCount))
        throw Fault("mbarrier", at(place) + ": transaction count " + std::to_string(barrier.tx) + " is out of range");
}

// Every mbarrier instruction has reg[0]: address; attr[0]: offset, attr[1]: the address is generic.
uint32_t address_of(Warp& warp, const Op& op, int lane) {
    const uint32_t offset = static_cast<uint32_t>(op.attr[0]);
    if (!op.attr[1]) return warp.u32(op.reg[0])[lane] + offset;
    const uint64_t address = warp.u64(op.reg[0])[lane];
    if (!is_shared(address)) throw Fault("mbarrier", "the address is not in shared memory");
    return static_cast<uint32_t>(address) + offset;
}

SharedRef place_of(Warp& warp, const Op& op, int lane) { return shared_at(warp, address_of(warp, op, lane), 8, 8); }

race::Checker* races(Warp& warp) { return warp.cta->cluster->races.get(); }

// Every use of a barrier must be ordered after its initialisation.
void use(Warp& warp, const Op& op, Mask lanes, SharedRef place) {
    if (races(warp)) races(warp)->atomic(warp, op, lanes, *place.cta, place.offset, 8);
}

// What an arrival makes visible to those that wait: all before it, or if it is relaxed all before the last releasing
// fence.
void publish(Warp& warp, Mask lanes, bool relaxed, race::Clock& into) {
    if (!races(warp)) return;
    if (!relaxed) return races(warp)->release(warp, lanes, into);
    if (lanes & 1) into.merge(warp.fenced_first);
    if (lanes & ~1u) into.merge(warp.fenced_others);
}

// reg: address, count.
Step init(Warp& warp, const Op& op, Mask mask) {
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        const SharedRef place = place_of(warp, op, lane);
        const uint32_t count = warp.u32(op.reg[1])[lane];
        if (count == 0 || count > kMaxCount)
            throw Fault("mbarrier", at(place) + " initialised with count " + std::to_string(count));
        if (MBarrier* old = find(place); old && (old->pending != old->expected || old->tx))
            throw Fault("mbarrier", at(place) + " initialised again in the middle of a phase");
        if (races(warp)) races(warp)->write(warp, op, 1u << lane, *place.cta, place.offset, 8);
        auto barrier = std::make_unique<MBarrier>();
        barrier->expected = barrier->pending = count;
        barrier->initialised_by = &warp;
        place.cta->mbarriers[place.offset] = std::move(barrier);
        std::memset(place.data(), 0, 8);
    }
    return Step::Next;
}

// reg: address.
Step invalidate(Warp& warp, const Op& op, Mask mask) {
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        const SharedRef place = place_of(warp, op, lane);
        const MBarrier& barrier = mbarrier_at(place);
        if (barrier.pending != barrier.expected || barrier.tx)
            throw Fault("mbarrier", at(place) + " invalidated in the middle of a phase");
        if (races(warp)) races(warp)->write(warp, op, 1u << lane, *place.cta, place.offset, 8);
        place.cta->mbarriers.erase(place.offset);
    }
    return Step::Next;
}

// reg: address, count or bytes (or kNoRegister: 1), state token (or kNoRegister);
// attr[2..]: announces bytes, lowers the expected count, relaxed.
Step arrive_op(Warp& warp, const Op& op, Mask mask) {
    const bool announces = op.attr[2], drops = op.attr[3], relaxed = op.attr[4];
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        const SharedRef place = place_of(warp, op, lane);
        MBarrier& barrier = mbarrier_at(place);
        if (place.cta != warp.cta) require_fenced(place, warp.origin(op));
        use(warp, op, 1u << lane, place);
        if (op.reg[2] != kNoRegister) warp.u64(op.reg[2])[lane] = barrier.phase;
        const uint32_t value = op.reg[1] == kNoRegister ? 1 : warp.u32(op.reg[1])[lane];
        const uint32_t count = announces ? 1 : value;
        publish(warp, 1u << lane, relaxed, barrier.clock);
        if (drops) {
            if (barrier.expected < count) throw Fault("mbarrier", at(place) + ": arrive_drop below zero");
            barrier.expected -= count;
        }
        if (announces) add_bytes(place, barrier, value);
        arrive(place, count);
    }
    return Step::Next;
}

// reg: address, bytes; attr[2]: +1 to announce or -1 to complete.
Step transaction(Warp& warp, const Op& op, Mask mask) {
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        const SharedRef place = place_of(warp, op, lane);
        use(warp, op, 1u << lane, place);
        expect_tx(place, op.attr[2] * static_cast<int64_t>(warp.u32(op.reg[1])[lane]));
    }
    return Step::Next;
}

struct Question {
    uint32_t address;
    uint64_t phase;
    bool operator==(const Question&) const = default;
};

// In the fuzz schedule a try_wait sometimes runs into its time limit (PTX ISA: "the time limit is system-dependent");
// with odd seeds often, so that what a kernel does then is tried as well.
bool runs_out_of_time(Warp& warp) {
    Launch& launch = *warp.cta->launch;
    return launch.options.schedule == Schedule::Fuzz && launch.random() % (launch.options.seed % 2 ? 2 : 64) == 0;
}

// reg: address, predicate, phase parity or state; attr[2..]: by parity, may block, relaxed.
Step wait_op(Warp& warp, const Op& op, Mask mask) {
    const bool by_parity = op.attr[2], may_block = op.attr[3], relaxed = op.attr[4];
    const auto question_of = [&](int lane) -> Question {
        return {address_of(warp, op, lane),
                by_parity ? warp.u32(op.reg[2])[lane] & 1 : warp.u64(op.reg[2])[lane]};
    };
    Mask complete = 0;
    for (Mask rest = mask, alike; rest; rest &= ~alike) {  // nearly always all lanes ask the same
        const int lane = first_lane(rest);
        const Question question = question_of(lane);
        alike = 0;
        for (Mask others = rest; others; others &= others - 1)
            if (question_of(first_lane(others)) == question) alike |= others & -others;
        const SharedRef place = place_of(warp, op, lane);
        const MBarrier& barrier = mbarrier_at(place);
        const bool done = by_parity ? (barrier.phase & 1) != question.phase : barrier.phase != question.phase;
        if (!done) continue;
        complete |= alike;
        use(warp, op, alike, place);
        if (races(warp) && !relaxed) races(warp)->acquire(warp, alike, barrier.completed);
    }
    Group& group = *warp.group;
    if (complete != mask && may_block && !group.timed_out && !runs_out_of_time(warp)) return Step::Blocked;
    ++warp.cta->launch->counters.barrier_waits;
    group.timed_out = false;
    Mask& predicate = warp.predicate(op.reg[1]);
    predicate = (predicate & ~mask) | complete;
    return complete == mask || may_block ? Step::Next : Step::Yield;
}

FLASH4_OP("mbarrier.init", Sync, init);
FLASH4_OP("mbarrier.inval", Sync, invalidate);
FLASH4_OP("mbarrier.arrive", Sync, arrive_op);
FLASH4_OP("mbarrier.tx", Sync, transaction);
FLASH4_OP("mbarrier.wait", Sync, wait_op);

// --- named barriers (PTX ISA: bar, barrier)

constexpr uint32_t kThreadsOfWarp = kLanes;

NamedBarrier& named_barrier(Warp& warp, const Op& op, Mask mask) {
    const uint32_t number = warp.u32(op.reg[0])[first_lane(mask)];
    if (number >= warp.cta->named.size()) throw Fault("barrier", "named barrier " + std::to_string(number) + " of 16");
    return warp.cta->named[number];
}

// Lets the warps that wait go on, each with the votes of its generation.
void release_all(NamedBarrier& barrier, size_t warps) {
    for (size_t i = 0; i < warps; ++i) {
        if (!barrier.waiting[i]) continue;
        barrier.released[i] |= barrier.waiting[i];
        barrier.waiting[i] = 0;
        barrier.voters_of[i] = barrier.voters;
        barrier.votes_of[i] = barrier.votes;
    }
    barrier.expected = barrier.arrived = barrier.voters = barrier.votes = 0;
    std::swap(barrier.completed, barrier.clock);
    barrier.clock.clear();
}

// Counts are of whole warps: lane 0 arrives for the lanes that the block does not fill, and an aligned barrier also for
// those that have exited.
uint32_t arrivals(const Warp& warp, Mask mask, bool aligned) {
    if (aligned) return kThreadsOfWarp;
    const uint32_t threads = static_cast<uint32_t>(warp.cta->launch->block.count()) - warp.index * kThreadsOfWarp;
    const uint32_t absent = kThreadsOfWarp - std::min(threads, kThreadsOfWarp);
    return static_cast<uint32_t>(__builtin_popcount(mask)) + (mask & 1 ? absent : 0);
}

// A barrier without a count is for the threads that have not exited (CUDA C++ Programming Guide, Independent Thread
// Scheduling).
bool all_wait(const NamedBarrier& barrier, const Cta& cta) {
    for (const Warp& warp : cta.warps)
        if (barrier.waiting[warp.index] != ~warp.exited) return false;
    return true;
}

void arrive_at(NamedBarrier& barrier, Warp& warp, const Op& op, Mask mask) {
    const bool waits = op.attr[0], aligned = op.attr[1];
    const std::string number = std::to_string(warp.u32(op.reg[0])[first_lane(mask)]);
    const uint32_t all = static_cast<uint32_t>(warp.cta->warps.size()) * kThreadsOfWarp;
    const uint32_t expected = op.reg[1] == kNoRegister ? all : warp.u32(op.reg[1])[first_lane(mask)];
    if (expected == 0 || expected % kThreadsOfWarp)
        throw Fault("barrier", "thread count " + std::to_string(expected) + " is no multiple of 32");
    if (barrier.expected && barrier.expected != expected)
        throw Fault("barrier", "named barrier " + number + " is used with " + std::to_string(expected) +
                                   " threads while others wait for " + std::to_string(barrier.expected));
    barrier.expected = expected;
    barrier.arrived += arrivals(warp, mask, aligned);
    if (barrier.arrived > expected)
        throw Fault("barrier", "more arrivals at named barrier " + number + " than the " + std::to_string(expected) +
                                   " it waits for");
    if (races(warp)) races(warp)->release(warp, mask, barrier.clock);
    if (waits) barrier.waiting[warp.index] |= mask;
    warp.cta->cluster->event();
}

// reg: barrier, thread count (or kNoRegister: all threads of the CTA); attr: waits, aligned.
Step named(Warp& warp, const Op& op, Mask mask) {
    const bool waits = op.attr[0], aligned = op.attr[1];
    if (aligned && mask != ~warp.exited)
        throw Fault("divergence", "an aligned barrier is executed by some lanes of the warp only");
    NamedBarrier& barrier = named_barrier(warp, op, mask);
    const uint32_t w = warp.index;
    if (waits && (barrier.released[w] & mask) == mask) {
        barrier.released[w] &= ~mask;
        if (races(warp)) races(warp)->acquire(warp, mask, barrier.completed);
        ++warp.cta->launch->counters.barrier_waits;
        return Step::Next;
    }
    if (!waits || !(barrier.waiting[w] & mask)) arrive_at(barrier, warp, op, mask);
    if (barrier.arrived < barrier.expected && (op.reg[1] != kNoRegister || !all_wait(barrier, *warp.cta)))
        return waits ? Step::Blocked : Step::Next;
    release_all(barrier, warp.cta->warps.size());
    if (!waits) return Step::Next;
    barrier.released[w] &= ~mask;
    if (races(warp)) races(warp)->acquire(warp, mask, barrier.completed);
    ++warp.cta->launch->counters.barrier_waits;
    return Step::Next;
}
FLASH4_OP("barrier", Sync, named);

enum class Vote : uint8_t { Popc, And, Or };

// A barrier that also counts the threads whose predicate holds (PTX ISA: barrier.red).
// reg: as above, source predicate, result; attr: as above, the source is negated, Vote.
Step reduce(Warp& warp, const Op& op, Mask mask) {
    NamedBarrier& barrier = named_barrier(warp, op, mask);
    const uint32_t w = warp.index;
    if (!((barrier.waiting[w] | barrier.released[w]) & mask)) {
        const Mask holds = op.attr[2] ? ~warp.predicate(op.reg[2]) : warp.predicate(op.reg[2]);
        barrier.voters += static_cast<uint32_t>(__builtin_popcount(mask));
        barrier.votes += static_cast<uint32_t>(__builtin_popcount(holds & mask));
    }
    const Step step = named(warp, op, mask);
    if (step != Step::Next) return step;
    const uint32_t votes = barrier.votes_of[w];
    const Vote vote = static_cast<Vote>(op.attr[3]);
    if (vote == Vote::Popc) {
        uint32_t* to = warp.u32(op.reg[3]);
        for_lanes(mask, [&](int lane) { to[lane] = votes; });
        return Step::Next;
    }
    const bool holds = vote == Vote::And ? votes == barrier.voters_of[w] : votes != 0;
    Mask& to = warp.predicate(op.reg[3]);
    to = holds ? to | mask : to & ~mask;
    return Step::Next;
}
FLASH4_OP("barrier.red", Sync, reduce);

// --- the cluster's barrier (PTX ISA: barrier.cluster). Threads that have exited count as arrived.

void complete_cluster_if_due(Cluster& cluster) {
    for (auto& cta : cluster.ctas)
        for (Warp& warp : cta->warps)
            if (!warp.done() && warp.cluster_arrived != cluster.cluster_generation) return;
    cluster.cluster_arrived = 0;
    ++cluster.cluster_generation;
    std::swap(cluster.cluster_completed, cluster.cluster_clock);
    cluster.cluster_clock.clear();
    cluster.event();
}

// attr: relaxed.
Step cluster_arrive(Warp& warp, const Op& op, Mask mask) {
    Cluster& cluster = *warp.cta->cluster;
    if (warp.cluster_arrived == cluster.cluster_generation)
        throw Fault("barrier", "barrier.cluster.arrive twice without a wait between");
    if (mask != ~warp.exited)
        throw Fault("divergence", "barrier.cluster.arrive is executed by some lanes of the warp only");
    warp.cluster_arrived = cluster.cluster_generation;
    cluster.cluster_arrived += static_cast<uint32_t>(__builtin_popcount(mask));
    publish(warp, mask, op.attr[0], cluster.cluster_clock);
    complete_cluster_if_due(cluster);
    cluster.event();
    return Step::Next;
}

Step cluster_wait(Warp& warp, const Op&, Mask mask) {
    Cluster& cluster = *warp.cta->cluster;
    if (warp.cluster_arrived == ~0ull) throw Fault("barrier", "barrier.cluster.wait without an arrive before it");
    if (warp.cluster_arrived == cluster.cluster_generation) {
        complete_cluster_if_due(cluster);  // the last missing threads may have exited
        if (warp.cluster_arrived == cluster.cluster_generation) return Step::Blocked;
    }
    if (cluster.races) cluster.races->acquire(warp, mask, cluster.cluster_completed);
    if (mask == ~warp.exited) warp.cluster_arrived = ~0ull;  // each wait needs an arrive of its own
    ++cluster.launch->counters.barrier_waits;
    return Step::Next;
}
FLASH4_OP("barrier.cluster.arrive", Sync, cluster_arrive);
FLASH4_OP("barrier.cluster.wait", Sync, cluster_wait);

// --- fences

void fence_barriers_of(Warp& warp) {
    for (auto& entry : warp.cta->mbarriers)
        if (entry.second->initialised_by == &warp) entry.second->fenced = true;
}

// What is before a releasing fence is published by the relaxed arrivals after it.
Step fence_release(Warp& warp, const Op&, Mask mask) {
    if (!races(warp)) return Step::Next;
    const auto fence = [&](Mask lanes, race::Clock& fenced) {
        if (!lanes) return;
        fenced.clear();
        races(warp)->release(warp, lanes, fenced);
    };
    fence(mask & 1, warp.fenced_first);
    fence(mask & ~1u, warp.fenced_others);
    return Step::Next;
}

Step fence_mbarrier_init(Warp& warp, const Op& op, Mask mask) {
    fence_barriers_of(warp);
    return fence_release(warp, op, mask);
}

// attr: whether it is for the shared memory of the own CTA only.
Step fence_proxy_async(Warp& warp, const Op& op, Mask mask) {
    fence_barriers_of(warp);
    if (races(warp)) races(warp)->proxy_fence(warp, mask, op.attr[0]);
    return Step::Next;
}
FLASH4_OP("fence.release", Sync, fence_release);
FLASH4_OP("fence.mbarrier_init", Sync, fence_mbarrier_init);
FLASH4_OP("fence.proxy.async", Sync, fence_proxy_async);

// --- setmaxnreg: a warp's registers come out of what its CTA has left over (PTX ISA: setmaxnreg)

// attr: new count, increases.
Step set_max_registers(Warp& warp, const Op& op, Mask) {
    const uint32_t wanted = static_cast<uint32_t>(op.attr[0]);
    const bool increases = op.attr[1];
    if (wanted % 8 || wanted < 24 || wanted > 256)
        throw Fault("setmaxnreg", std::to_string(wanted) + " is not a multiple of 8 in 24 to 256");
    Cta& cta = *warp.cta;
    if (!increases) {
        if (wanted > warp.register_count)
            throw Fault("setmaxnreg",
                        ".dec to " + std::to_string(wanted) + " from " + std::to_string(warp.register_count));
        cta.free_registers += warp.register_count - wanted;
        cta.cluster->event();
    } else {
        if (wanted < warp.register_count)
            throw Fault("setmaxnreg",
                        ".inc to " + std::to_string(wanted) + " from " + std::to_string(warp.register_count));
        if (wanted - warp.register_count > cta.free_registers) return Step::Blocked;
        cta.free_registers -= wanted - warp.register_count;
    }
    warp.register_count = wanted;
    return Step::Next;
}
FLASH4_OP("setmaxnreg", Sync, set_max_registers);

}  // namespace

MBarrier& mbarrier_at(SharedRef place) {
    MBarrier* barrier = find(place);
    if (!barrier) throw Fault("mbarrier", at(place) + " has not been initialised");
    return *barrier;
}

void require_fenced(SharedRef place, Origin by) {
    MBarrier& barrier = mbarrier_at(place);
    if (barrier.fenced || !place.cta->launch->options.check_races) return;
    barrier.fenced = true;  // once is enough
    place.cta->launch->report(
        {.kind = "mbarrier-init",
         .message = at(place) + " is used by another CTA or the asynchronous proxy, but no fence.mbarrier_init or "
                                "fence.proxy.async followed its initialisation",
         .at = by,
         .cta = place.cta->cluster->ctas[by.cta]->id});
}

void arrive(SharedRef place, uint32_t count) {
    MBarrier& barrier = mbarrier_at(place);
    if (count > barrier.pending)
        throw Fault("mbarrier", at(place) + ": " + std::to_string(count) + " arrivals where " +
                                    std::to_string(barrier.pending) + " are pending");
    barrier.pending -= count;
    complete_phase_if_due(place, barrier);
    place.cta->cluster->event();
}

void expect_tx(SharedRef place, int64_t bytes) {
    MBarrier& barrier = mbarrier_at(place);
    add_bytes(place, barrier, bytes);
    complete_phase_if_due(place, barrier);
}

void complete_tx(SharedRef place, int64_t bytes) { expect_tx(place, -bytes); }

bool may_time_out(const Op& op) { return op.run == wait_op && op.attr[3]; }

std::string describe_wait(const Warp& warp, const Group& group, const Op& op) {
    char text[160];
    const int lane = first_lane(group.mask);
    Warp& w = const_cast<Warp&>(warp);
    if (op.run == wait_op) {
        const SharedRef place = place_of(w, op, lane);
        const MBarrier& barrier = mbarrier_at(place);
        std::snprintf(text, sizeof text,
                      "waits for parity %u of %s: %llu phases complete, %u of %u arrivals and %lld bytes missing",
                      w.u32(op.reg[2])[lane] & 1, at(place).c_str(), static_cast<unsigned long long>(barrier.phase),
                      barrier.pending, barrier.expected, static_cast<long long>(barrier.tx));
    } else if (op.run == named || op.run == reduce) {
        const NamedBarrier& barrier = warp.cta->named[w.u32(op.reg[0])[lane]];
        std::snprintf(text, sizeof text, "waits at named barrier %u: %u of %u threads have arrived",
                      w.u32(op.reg[0])[lane], barrier.arrived, barrier.expected);
    } else if (op.run == cluster_wait) {
        std::snprintf(text, sizeof text, "waits for barrier.cluster: %u threads have arrived",
                      warp.cta->cluster->cluster_arrived);
    } else if (op.run == set_max_registers) {
        std::snprintf(text, sizeof text, "waits for registers: setmaxnreg.inc from %u to %lld, %u are free",
                      warp.register_count, static_cast<long long>(op.attr[0]), warp.cta->free_registers);
    } else if (group.at_warp_sync) {
        std::snprintf(text, sizeof text, "waits for the other lanes in bar.warp.sync");
    } else {
        std::snprintf(text, sizeof text, "%s", group.blocked_at == ~0ull ? "could run" : "waits");
    }
    return text;
}

}  // namespace flash4
