#include "copy.h"

#include <algorithm>
#include <cstring>

#include "banks.h"

namespace flash4 {

Arrival announce(Warp& warp, const Op& op, Mask lanes, SharedRef barrier) {
    const uint64_t phase = mbarrier_at(barrier).phase;
    require_fenced(barrier, warp.origin(op));
    race::Checker* races = warp.cta->cluster->races.get();
    if (!races) return {barrier, {}};
    races->atomic(warp, op, lanes, *barrier.cta, barrier.offset, 8);
    return {barrier, races->issue_copy(warp, op, lanes, barrier.cta->rank, barrier.offset, phase)};
}

void land(const Arrival& arrival, uint32_t bytes) {
    race::Checker::complete(arrival.ticket, mbarrier_at(arrival.barrier).clock);
    complete_tx(arrival.barrier, bytes);
}

std::vector<std::shared_ptr<CommitGroup>> open_groups(GroupQueues& queues, Mask mask) {
    std::vector<std::shared_ptr<CommitGroup>> groups;
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const auto& open = queues[first_lane(rest)].open;
        if (std::find(groups.begin(), groups.end(), open) == groups.end()) groups.push_back(open);
    }
    return groups;
}

// Lanes that commit together share their next group: it makes no difference to what they wait for, and is cheaper.
void commit_groups(GroupQueues& queues, Mask mask) {
    const auto next = std::make_shared<CommitGroup>();
    for (Mask rest = mask; rest; rest &= rest - 1) {
        GroupQueue& queue = queues[first_lane(rest)];
        queue.committed.push_back(std::move(queue.open));
        queue.open = next;
    }
}

bool groups_done(GroupQueues& queues, Mask mask, uint64_t newest, bool read_only, uint32_t& epoch, Mask& waited) {
    epoch = 0;
    waited = 0;
    for (Mask rest = mask; rest; rest &= rest - 1) {
        auto& committed = queues[first_lane(rest)].committed;
        const uint64_t groups = committed.size() - std::min<uint64_t>(committed.size(), newest);
        for (uint64_t i = 0; i < groups; ++i) {
            const CommitGroup& group = *committed[i];
            if (read_only ? group.reading : group.pending) return false;
            if (group.epoch) waited |= rest & -rest;
            epoch = std::max(epoch, group.epoch);
        }
    }
    for (Mask rest = mask; rest; rest &= rest - 1) {
        auto& committed = queues[first_lane(rest)].committed;
        while (!committed.empty() && !committed.front()->pending && committed.size() > newest) committed.pop_front();
    }
    return true;
}

void submit_bulk_store(Warp& warp, const Op& op, Mask lanes, const char* what, SharedRef source, uint32_t bytes,
                       std::function<void(const uint8_t*)> write) {
    Cluster& cluster = *warp.cta->cluster;
    const auto groups = open_groups(warp.units->bulk, lanes);
    const Origin origin = warp.origin(op);
    count_shared(warp, op, in_rows(bytes));
    race::Ticket ticket;
    if (cluster.races) ticket = cluster.races->issue(warp, op, lanes, race::Unit::Bulk);
    for (const auto& group : groups) {
        group->epoch = std::max(group->epoch, ticket.epoch);
        ++group->reading;
        ++group->pending;
    }
    auto read = [=, &cluster, write = std::move(write)] {
        check_read(ticket, source, bytes);
        auto data = std::make_shared<std::vector<uint8_t>>(source.data(), source.data() + bytes);
        for (const auto& group : groups) --group->reading;
        cluster.launch->counters.async_bytes += bytes;
        cluster.submit({.queue = 0,
                        .origin = origin,
                        .what = what,
                        .perform =
                            [=] {
                                write(data->data());
                                for (const auto& group : groups) --group->pending;
                            },
                        .may_outlive = true});
    };
    cluster.submit({.queue = 0,
                    .origin = origin,
                    .what = what,
                    .perform = std::move(read),
                    .reads_cta = source.cta->rank,
                    .only_reads = true});
}

}  // namespace flash4
