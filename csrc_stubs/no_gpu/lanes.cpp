// Races among the lanes of one warp (lanes.h).
#include "lanes.h"

#include <algorithm>
#include <string>

#include "machine.h"

namespace flash4::race {

Lanes::Lanes(Cluster& cluster)
    : cluster_(cluster), warps_per_cta_(static_cast<uint32_t>(cluster.ctas.front()->warps.size())) {
    const size_t warps = warps_per_cta_ * cluster.ctas.size();
    meetings_.assign(warps, 1);
    waits_.resize(warps);
    for (auto& cta : cluster.ctas) granules_.emplace_back(cta->shared.size() / kBytes + 1);
}

void Lanes::meet(const Warp& warp) { ++meetings_[warp.cta->rank * warps_per_cta_ + warp.index]; }

Lanes::Now Lanes::now(const Warp& warp, const Op& op, bool writes) {
    const uint32_t index = warp.cta->rank * warps_per_cta_ + warp.index;
    ++serial_;
    return {.warp = index, .meetings = meetings_[index], .op = op.index, .writes = writes, .records = true};
}

void Lanes::read(const Warp& warp, const Op& op, const Cta& cta, const LanePlaces& places) {
    touch(now(warp, op, false), cta, places);
}

void Lanes::write(const Warp& warp, const Op& op, const Cta& cta, const LanePlaces& places) {
    touch(now(warp, op, true), cta, places);
}

void Lanes::read_together(const Warp& warp, const Op& op, const Cta& cta, const LanePlaces& rows) {
    const Now by = now(warp, op, false);
    for (Mask rest = rows.mask; rest; rest &= rest - 1) touch(by, cta, rows.offset[first_lane(rest)], rows.bytes, kAll);
}

void Lanes::write_together(const Warp& warp, const Op& op, const Cta& cta, const LanePlaces& rows) {
    const Now by = now(warp, op, true);
    for (Mask rest = rows.mask; rest; rest &= rest - 1) touch(by, cta, rows.offset[first_lane(rest)], rows.bytes, kAll);
}

void Lanes::ask(const Warp& warp, const Op& op, const Cta& cta, const LanePlaces& places) {
    Now by = now(warp, op, true);
    by.records = false;  // `copy` does
    touch(by, cta, places);
}

void Lanes::copy(const Origin& origin, uint32_t epoch, const Cta& cta, uint32_t offset, uint32_t bytes, int lane) {
    const uint32_t warp = origin.cta * warps_per_cta_ + origin.warp;
    for (uint32_t at = offset; at < offset + bytes; at += kBytes) {
        Accesses& write = granules_[cta.rank][at / kBytes].write;
        write = {.meetings = meetings_[warp], .warp = warp, .op = origin.op, .serial = ++serial_, .epoch = epoch};
        write.who.fill(static_cast<Who>(lane));
    }
}

void Lanes::wait(const Warp& warp, uint32_t epoch) {
    const uint32_t index = warp.cta->rank * warps_per_cta_ + warp.index;
    auto& waits = waits_[index];
    if (waits.empty() || waits.back().first < epoch) waits.emplace_back(epoch, meetings_[index]);
}

void Lanes::touch(const Now& now, const Cta& cta, const LanePlaces& places) {
    for (Mask rest = places.mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        touch(now, cta, places.offset[lane], places.bytes, static_cast<Who>(lane));
    }
}

void Lanes::touch(const Now& now, const Cta& cta, uint32_t offset, uint32_t bytes, Who who) {
    for (uint32_t at = offset, end = offset + bytes, next; at < end; at = next) {
        next = std::min(end, (at / kBytes + 1) * kBytes);
        Granule& granule = granules_[cta.rank][at / kBytes];
        for (uint32_t byte = at; byte < next; ++byte) {
            const bool written = conflicts(now, granule.write, byte % kBytes, who);
            if (!written && !(now.writes && conflicts(now, granule.read, byte % kBytes, who))) continue;
            const Accesses& past = written ? granule.write : granule.read;
            report(now, cta, byte, who, past, past.who[byte % kBytes], written);
            break;
        }
        if (now.records) record(now, now.writes ? granule.write : granule.read, at % kBytes, next - at, who);
    }
}

void Lanes::record(const Now& now, Accesses& past, uint32_t first, uint32_t count, Who who) const {
    const bool at_once = past.serial == serial_;
    if (past.warp != now.warp || past.meetings != now.meetings || past.epoch) {
        past = {.who = {}, .meetings = now.meetings, .warp = now.warp, .op = 0, .serial = 0, .epoch = 0};
        past.who.fill(kNobody);
    }
    past.op = now.op;
    past.serial = serial_;
    for (uint32_t i = first; i < first + count; ++i) {
        Who& known = past.who[i];
        if (now.writes) known = at_once && known != kNobody && known != who ? kAtOnce : who;
        else known = known == kNobody || known == who ? who : kSeveral;
    }
}

uint32_t Lanes::meetings_of(const Accesses& past) const {
    if (!past.epoch) return past.meetings;
    // Until somebody waits for the copy, the happens-before checker says that it is not ordered with its reader.
    const auto& waits = waits_[past.warp];
    const auto first = std::lower_bound(waits.begin(), waits.end(), std::pair(past.epoch, 0u));
    return first == waits.end() ? 0 : first->second;
}

bool Lanes::conflicts(const Now& now, const Accesses& past, uint32_t byte, Who who) const {
    const Who known = past.who[byte];
    if (known == who || known == kNobody || known == kAtOnce || past.warp != now.warp) return false;
    return past.serial != serial_ && meetings_of(past) == now.meetings;
}

void Lanes::report(const Now& now, const Cta& cta, uint32_t offset, Who who, const Accesses& past, Who other,
                   bool past_writes) {
    const auto by = [](Who lane) {
        if (lane == kAll) return std::string("all lanes");
        return lane == kSeveral ? std::string("several lanes") : "lane " + std::to_string(lane);
    };
    const uint32_t rank = now.warp / warps_per_cta_, index = now.warp % warps_per_cta_;
    const Origin at{static_cast<uint16_t>(rank), static_cast<uint16_t>(index), now.op};
    Finding finding{.kind = "race",
                    .message = {},
                    .at = at,
                    .other = {at.cta, at.warp, past.op},
                    .cta = cluster_.ctas[rank]->id,
                    .has_other = true};
    if (reported_.insert(static_cast<uint64_t>(now.op) << 32 | past.op).second) {
        char place[32];
        std::snprintf(place, sizeof place, "0x%x", offset);
        finding.message = std::string(now.writes ? "write" : "read") + " of shared memory at " + place + " of CTA " +
                          std::to_string(cta.rank) + " by " + by(who) + " of warp " + std::to_string(index) +
                          " of CTA " + std::to_string(rank) + " is not ordered with the " +
                          (past.epoch ? "cp.async" : past_writes ? "write" : "read") + " by " + by(other) + " of that warp";
    }
    cluster_.launch->report(std::move(finding));
}

}  // namespace flash4::race
