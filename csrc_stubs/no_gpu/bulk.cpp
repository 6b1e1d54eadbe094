// Copies without a tensor map: cp.async.bulk, cp.reduce.async.bulk, cp.async, st.async, red.async, and their groups
// (PTX ISA, Data Movement: asynchronous copies).
#include <algorithm>
#include <cstring>

#include "banks.h"
#include "copy.h"
#include "reduce.h"

namespace flash4 {
namespace {

constexpr uint32_t kBulkAlignment = 16;

SharedRef shared_operand(Warp& warp, const Op& op, int reg, int attr, int lane, uint32_t bytes, uint32_t alignment) {
    return shared_at(warp, warp.u32(op.reg[reg])[lane] + static_cast<uint32_t>(op.attr[attr]), bytes, alignment);
}

uint8_t* global_operand(Warp& warp, const Op& op, int reg, int attr, int lane, uint32_t bytes, uint32_t alignment) {
    return global_at(*warp.cta->launch, warp.u64(op.reg[reg])[lane] + static_cast<uint64_t>(op.attr[attr]), bytes,
                     alignment);
}

uint32_t bulk_size(Warp& warp, uint32_t reg, int lane) {
    const uint32_t bytes = warp.u32(reg)[lane];
    if (bytes % kBulkAlignment)
        throw Fault("misaligned", "a bulk copy of " + std::to_string(bytes) + " bytes, not a multiple of 16");
    return bytes;
}

void submit_bulk_load(Warp& warp, const Op& op, Mask lane, const uint8_t* source, SharedRef to, SharedRef barrier,
                      uint32_t bytes) {
    Cluster& cluster = *warp.cta->cluster;
    const Arrival arrival = announce(warp, op, lane, barrier);
    count_shared(warp, op, in_rows(bytes));
    auto perform = [=, &cluster] {
        check_write(arrival.ticket, to, bytes);
        std::memcpy(to.data(), source, bytes);
        cluster.launch->counters.async_bytes += bytes;
        land(arrival, bytes);
    };
    cluster.submit({.queue = 0,
                    .origin = warp.origin(op),
                    .what = "bulk load",
                    .perform = std::move(perform),
                    .reads_cta = to.cta->rank});
}

// reg: destination, source, bytes, barrier, CTA mask or kNoRegister.
// attr: constants of destination, source and barrier.
Step bulk_load(Warp& warp, const Op& op, Mask mask) {
    Cluster& cluster = *warp.cta->cluster;
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        const uint32_t bytes = bulk_size(warp, op.reg[2], lane);
        const uint8_t* source = global_operand(warp, op, 1, 1, lane, bytes, kBulkAlignment);
        const SharedRef to = shared_operand(warp, op, 0, 0, lane, bytes, kBulkAlignment);
        const SharedRef barrier = shared_operand(warp, op, 3, 2, lane, 8, 8);
        if (op.reg[4] == kNoRegister) {
            submit_bulk_load(warp, op, 1u << lane, source, to, barrier, bytes);
            continue;
        }
        for (uint32_t left = warp.u32(op.reg[4])[lane] & 0xFFFF; left; left &= left - 1) {
            const uint32_t rank = static_cast<uint32_t>(__builtin_ctz(left)) << kRankShift;
            submit_bulk_load(warp, op, 1u << lane, source, shared_at(cluster, rank | to.offset, bytes, kBulkAlignment),
                             shared_at(cluster, rank | barrier.offset, 8, 8), bytes);
        }
    }
    return Step::Next;
}

// reg: destination, source, bytes; attr: constants of destination and source, Reduction or -1, ElementType.
Step bulk_store(Warp& warp, const Op& op, Mask mask) {
    const ElementType type = static_cast<ElementType>(op.attr[3]);
    const Reducer combine = op.attr[2] < 0 ? nullptr : global_reducer(static_cast<Reduction>(op.attr[2]), type);
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        const uint32_t bytes = bulk_size(warp, op.reg[2], lane);
        uint8_t* to = global_operand(warp, op, 0, 0, lane, bytes, kBulkAlignment);
        const SharedRef source = shared_operand(warp, op, 1, 1, lane, bytes, kBulkAlignment);
        submit_bulk_store(warp, op, 1u << lane, combine ? "bulk reduction" : "bulk store", source, bytes,
                          [=](const uint8_t* data) {
                              if (combine) reduce(combine, element_bytes(type), to, data, bytes);
                              else std::copy_n(data, bytes, to);  // also of none, where `data` is null
                          });
    }
    return Step::Next;
}

// Within the cluster. reg: destination, source, bytes, barrier.
// attr: constants of destination, source and barrier, Reduction or -1, ElementType.
Step bulk_copy(Warp& warp, const Op& op, Mask mask) {
    Cluster& cluster = *warp.cta->cluster;
    const ElementType type = static_cast<ElementType>(op.attr[4]);
    const Reducer combine = op.attr[3] < 0 ? nullptr : reducer(static_cast<Reduction>(op.attr[3]), type);
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        const uint32_t bytes = bulk_size(warp, op.reg[2], lane);
        const SharedRef to = shared_operand(warp, op, 0, 0, lane, bytes, kBulkAlignment);
        const SharedRef source = shared_operand(warp, op, 1, 1, lane, bytes, kBulkAlignment);
        const Arrival arrival = announce(warp, op, 1u << lane, shared_operand(warp, op, 3, 2, lane, 8, 8));
        count_shared(warp, op, in_rows(2ull * bytes));
        auto perform = [=, &cluster] {
            check_read(arrival.ticket, source, bytes);
            if (combine) {
                check_reduce(arrival.ticket, to, bytes, false);
                reduce(combine, element_bytes(type), to.data(), source.data(), bytes);
            } else {
                check_write(arrival.ticket, to, bytes);
                std::memmove(to.data(), source.data(), bytes);
            }
            cluster.launch->counters.async_bytes += bytes;
            land(arrival, bytes);
        };
        cluster.submit({.queue = 0,
                        .origin = warp.origin(op),
                        .what = "bulk copy in the cluster",
                        .perform = std::move(perform),
                        .reads_cta = source.cta->rank});
    }
    return Step::Next;
}

Step bulk_commit(Warp& warp, const Op&, Mask mask) {
    commit_groups(warp.units->bulk, mask);
    return Step::Next;
}

Step wait_for(Warp& warp, GroupQueues& queues, Mask mask, uint64_t newest, bool read_only, race::Unit unit) {
    uint32_t epoch;
    Mask waited;
    if (!groups_done(queues, mask, newest, read_only, epoch, waited)) return Step::Blocked;
    if (race::Checker* races = warp.cta->cluster->races.get(); races && epoch) {
        races->join(warp, waited, unit, epoch);
        if (unit == race::Unit::CpAsync) warp.cta->cluster->lanes->wait(warp, epoch);
    }
    return Step::Next;
}

// attr: how many groups may be unfinished, only reading the source counts.
Step bulk_wait(Warp& warp, const Op& op, Mask mask) {
    return wait_for(warp, warp.units->bulk, mask, static_cast<uint64_t>(op.attr[0]), op.attr[1], race::Unit::Bulk);
}

FLASH4_OP("bulk.load", Async, bulk_load);
FLASH4_OP("bulk.store", Async, bulk_store);
FLASH4_OP("bulk.copy", Async, bulk_copy);
FLASH4_OP("bulk.commit", Async, bulk_commit);
FLASH4_OP("bulk.wait", Sync, bulk_wait);

// --- cp.async: every lane copies 4, 8 or 16 bytes

struct LaneCopy {
    SharedRef to;
    const uint8_t* source;
    uint32_t source_bytes;  // the rest is filled with zeros
    int lane;
};

// How many bytes a lane reads; none when it ignores its source.
uint32_t source_bytes(Warp& warp, const Op& op, int lane, uint32_t bytes) {
    if (op.reg[3] != kNoRegister && warp.predicate(op.reg[3]) >> lane & 1) return 0;
    if (op.reg[2] == kNoRegister) return bytes;
    const uint32_t reads = warp.u32(op.reg[2])[lane];
    if (reads > bytes)
        throw Fault("unsupported", "cp.async of " + std::to_string(bytes) + " bytes from " + std::to_string(reads) +
                                       ": what it copies is undefined");
    return reads;
}

// reg: destination, source, bytes to read or kNoRegister, predicate that ignores the source or kNoRegister.
// attr: constants of destination and source, bytes to write.
Step async_copy(Warp& warp, const Op& op, Mask mask) {
    Cluster& cluster = *warp.cta->cluster;
    const uint32_t bytes = static_cast<uint32_t>(op.attr[2]);
    std::vector<LaneCopy> copies;
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        const uint32_t reads = source_bytes(warp, op, lane, bytes);
        const uint8_t* source = reads ? global_operand(warp, op, 1, 1, lane, reads, bytes) : nullptr;
        copies.push_back({shared_operand(warp, op, 0, 0, lane, bytes, bytes), source, reads, lane});
        if (cluster.lanes) {
            uint32_t offset[kLanes];
            offset[lane] = copies.back().to.offset;
            cluster.lanes->ask(warp, op, *copies.back().to.cta, {offset, 1u << lane, bytes});
        }
    }
    count_shared(warp, op, in_rows(copies.size() * bytes));
    race::LaneTickets tickets;
    if (cluster.races) tickets = cluster.races->issue_by_lanes(warp, op, mask);
    const auto groups = open_groups(warp.units->cp_async, mask);
    for (const auto& group : groups) {
        group->epoch = std::max(group->epoch, tickets.of(first_lane(mask)).epoch);
        ++group->pending;
    }
    auto perform = [=, &cluster, copies = std::move(copies), origin = warp.origin(op)] {
        for (const LaneCopy& copy : copies) {
            const race::Ticket& ticket = tickets.of(copy.lane);
            check_write_generic(ticket, copy.to, bytes);
            if (cluster.lanes)
                cluster.lanes->copy(origin, ticket.epoch, *copy.to.cta, copy.to.offset, bytes, copy.lane);
            if (copy.source_bytes) std::memcpy(copy.to.data(), copy.source, copy.source_bytes);
            std::memset(copy.to.data() + copy.source_bytes, 0, bytes - copy.source_bytes);
        }
        cluster.launch->counters.async_bytes += copies.size() * bytes;
        for (const auto& group : groups) --group->pending;
    };
    cluster.submit({.queue = queue_of(QueueKind::CpAsync, *warp.cta, warp.index),
                    .origin = warp.origin(op),
                    .what = "cp.async",
                    .perform = std::move(perform),
                    .reads_cta = warp.cta->rank});
    return Step::Next;
}

Step async_commit(Warp& warp, const Op&, Mask mask) {
    commit_groups(warp.units->cp_async, mask);
    return Step::Next;
}

// attr: how many groups may be unfinished.
Step async_wait(Warp& warp, const Op& op, Mask mask) {
    return wait_for(warp, warp.units->cp_async, mask, static_cast<uint64_t>(op.attr[0]), false, race::Unit::CpAsync);
}

// All that the lanes have issued, committed or not.
Step async_wait_all(Warp& warp, const Op&, Mask mask) {
    for (const auto& open : open_groups(warp.units->cp_async, mask))
        if (open->pending) return Step::Blocked;
    commit_groups(warp.units->cp_async, mask);
    return wait_for(warp, warp.units->cp_async, mask, 0, false, race::Unit::CpAsync);
}

// The barrier's arrival follows the copies that the lane has issued: those of one warp are done in order.
// reg: barrier; attr: constant of its address, noinc: the arrival was counted when the barrier was initialised.
Step async_arrive(Warp& warp, const Op& op, Mask mask) {
    Cluster& cluster = *warp.cta->cluster;
    const bool counted = op.attr[1];
    std::vector<std::pair<SharedRef, int>> arrivals;  // by lanes
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        const SharedRef place = shared_operand(warp, op, 0, 0, lane, 8, 8);
        MBarrier& barrier = mbarrier_at(place);
        if (!counted) ++barrier.pending;
        if (cluster.races) cluster.races->atomic(warp, op, 1u << lane, *place.cta, place.offset, 8);
        arrivals.emplace_back(place, lane);
    }
    race::LaneTickets tickets;
    if (cluster.races) tickets = cluster.races->issue_by_lanes(warp, op, mask);
    auto perform = [=, arrivals = std::move(arrivals)] {
        for (const auto& [place, lane] : arrivals) {
            race::Checker::complete(tickets.of(lane), mbarrier_at(place).clock);
            arrive(place, 1);
        }
    };
    cluster.submit({.queue = queue_of(QueueKind::CpAsync, *warp.cta, warp.index),
                    .origin = warp.origin(op),
                    .what = "arrival of cp.async",
                    .perform = std::move(perform),
                    .reads_cta = warp.cta->rank});
    return Step::Next;
}

FLASH4_OP("cp.async", Async, async_copy);
FLASH4_OP("cp.async.commit", Async, async_commit);
FLASH4_OP("cp.async.wait", Sync, async_wait);
FLASH4_OP("cp.async.wait_all", Sync, async_wait_all);
FLASH4_OP("cp.async.arrive", Sync, async_arrive);

// --- st.async and red.async: every lane writes a few registers to another CTA's shared memory

// reg: address, barrier, values.
// attr: constants of both addresses, bytes of memory that one register holds, Reduction or -1, ElementType.
Step async_store(Warp& warp, const Op& op, Mask mask) {
    Cluster& cluster = *warp.cta->cluster;
    const uint32_t each = static_cast<uint32_t>(op.attr[2]), values = op.regs - 2u, bytes = each * values;
    const ElementType type = static_cast<ElementType>(op.attr[4]);
    const Reducer combine = op.attr[3] < 0 ? nullptr : reducer(static_cast<Reduction>(op.attr[3]), type);
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        const SharedRef to = shared_operand(warp, op, 0, 0, lane, bytes, bytes);
        const Arrival arrival = announce(warp, op, 1u << lane, shared_operand(warp, op, 1, 1, lane, 8, 8));
        count_shared(warp, op, in_rows(bytes));
        std::array<uint8_t, 32> data;
        for (uint32_t i = 0; i < values; ++i)
            std::memcpy(data.data() + i * each, warp.registers + op.reg[2 + i] + static_cast<uint32_t>(lane) * each,
                        each);
        auto perform = [=] {
            if (combine) {
                check_reduce(arrival.ticket, to, bytes, true);
                reduce(combine, element_bytes(type), to.data(), data.data(), bytes);
            } else {
                check_write_generic(arrival.ticket, to, bytes);
                std::memcpy(to.data(), data.data(), bytes);
            }
            land(arrival, bytes);
        };
        cluster.submit({.queue = 0,
                        .origin = warp.origin(op),
                        .what = combine ? "red.async" : "st.async",
                        .perform = std::move(perform),
                        .reads_cta = to.cta->rank});
    }
    return Step::Next;
}

FLASH4_OP("st.async", Async, async_store);

}  // namespace
}  // namespace flash4
