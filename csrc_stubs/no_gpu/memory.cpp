// Address spaces, and the loads and stores that a warp waits for (PTX ISA: ld, st, cvta, mapa, isspacep).
#include "memory.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "banks.h"

namespace flash4 {
namespace {

std::string hex(uint64_t value) {
    char text[24];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
    return text;
}

[[noreturn]] void misaligned(const char* space, uint64_t address, uint64_t bytes, uint32_t alignment) {
    throw Fault("misaligned", std::string(space) + " address " + hex(address) + " for " + std::to_string(bytes) +
                                  " bytes is not aligned to " + std::to_string(alignment));
}

[[noreturn]] void outside_shared(const Cluster& cluster, uint32_t address, uint32_t bytes) {
    const uint32_t rank = address >> kRankShift, offset = address & ((1u << kRankShift) - 1);
    std::string what = std::to_string(bytes) + " bytes at shared " + hex(offset) + " of CTA " + std::to_string(rank);
    if (rank >= cluster.ctas.size()) what += ": the cluster has " + std::to_string(cluster.ctas.size());
    else what += " are outside [" + hex(kSharedBase) + ", " + hex(cluster.ctas[rank]->shared.size()) + ")";
    throw Fault("out-of-bounds", what);
}

[[noreturn]] void outside_global(const Launch& launch, uint64_t address, uint64_t bytes) {
    std::string what = std::to_string(bytes) + " bytes at global " + hex(address) +
                       (launch.bounded ? " are in no tensor" : " are in nobody's memory");
    const Region* nearest = nullptr;
    uint64_t distance = ~0ull;
    for (const Region& region : launch.regions) {
        const uint64_t away = address < region.begin ? region.begin - address : address - region.begin;
        if (away >= distance) continue;
        distance = away;
        nearest = &region;
    }
    if (nearest) what += "; the nearest is [" + hex(nearest->begin) + ", " + hex(nearest->end) + ")";
    throw Fault("out-of-bounds", what);
}

bool inside(uint64_t begin, uint64_t end, uint64_t address, uint64_t bytes) {
    return address >= begin && bytes <= end - begin && address - begin <= end - begin - bytes;
}

// Where a process can own memory: neither at null pointers nor beyond what its page tables reach.
constexpr uint64_t kLowestAddress = 1 << 16, kHighestAddress = 1ull << 47;

bool global_allowed(const Launch& launch, uint64_t address, uint64_t bytes) {
    if (!launch.bounded) return inside(kLowestAddress, kHighestAddress, address, bytes);
    auto after = std::upper_bound(launch.regions.begin(), launch.regions.end(), address,
                                  [](uint64_t a, const Region& region) { return a < region.begin; });
    if (after != launch.regions.begin() && inside((after - 1)->begin, (after - 1)->end, address, bytes)) return true;
    const uint64_t params = reinterpret_cast<uint64_t>(launch.params.data());
    return inside(params, params + launch.params.size(), address, bytes);
}

bool shared_allowed(const Cta& cta, uint32_t offset, uint32_t bytes) {
    return inside(kSharedBase, cta.shared.size(), offset, bytes);
}

}  // namespace

SharedRef shared_at(Cluster& cluster, uint32_t address, uint32_t bytes, uint32_t alignment) {
    const uint32_t rank = address >> kRankShift, offset = address & ((1u << kRankShift) - 1);
    if (rank >= cluster.ctas.size() || !shared_allowed(*cluster.ctas[rank], offset, bytes))
        outside_shared(cluster, address, bytes);
    if (offset & (alignment - 1)) misaligned("shared", offset, bytes, alignment);
    return {cluster.ctas[rank].get(), offset};
}

SharedRef shared_at(Warp& warp, uint32_t address, uint32_t bytes, uint32_t alignment) {
    const SharedRef place = shared_at(*warp.cta->cluster, address, bytes, alignment);
    if (place.cta->finished)
        throw Fault("exited", "shared memory of CTA " + std::to_string(place.cta->rank) + ", which has exited");
    return place;
}

uint8_t* global_at(Launch& launch, uint64_t address, uint64_t bytes, uint32_t alignment) {
    if (!global_allowed(launch, address, bytes)) outside_global(launch, address, bytes);
    if (address & (alignment - 1)) misaligned("global", address, bytes, alignment);
    return reinterpret_cast<uint8_t*>(address);
}

Place place_at(Warp& warp, Space space, uint64_t address, uint32_t bytes, uint32_t alignment) {
    if (space == Space::Shared || (space == Space::Generic && is_shared(address))) {
        const SharedRef place = shared_at(warp, static_cast<uint32_t>(address), bytes, alignment);
        return {place.data(), place.cta, place.offset};
    }
    return {global_at(*warp.cta->launch, address, bytes, alignment)};
}

void acquire_flag(Warp& warp, Mask lanes, const void* flag) {
    Cluster& cluster = *warp.cta->cluster;
    if (!cluster.races) return;
    auto found = cluster.flag_clocks.find(reinterpret_cast<uint64_t>(flag));
    if (found != cluster.flag_clocks.end()) cluster.races->acquire(warp, lanes, found->second);
}

void release_flag(Warp& warp, Mask lanes, const void* flag) {
    Cluster& cluster = *warp.cta->cluster;
    if (cluster.races) cluster.races->release(warp, lanes, cluster.flag_clocks[reinterpret_cast<uint64_t>(flag)]);
}

namespace {

// --- where the lanes of one load or store go

struct Lanes {
    uint8_t* data[kLanes];    // lanes that do not execute point where the first one does
    Cta* cta[kLanes];         // only where `scattered`
    uint32_t offset[kLanes];  // in shared memory
    Cta* common = nullptr;    // all lanes are in the shared memory of this CTA
    bool scattered = false;   // several CTAs, or shared and global memory
};

// One lane at a time: finds the lane that is wrong, and serves accesses that go to several places.
template <Space space>
void resolve_each(Lanes& lanes, Warp& warp, const Op& op, Mask mask, uint32_t bytes) {
    lanes.scattered = true;
    const int first = first_lane(mask);
    for (int lane = 0; lane < kLanes; ++lane) {
        const int source = mask >> lane & 1 ? lane : first;
        const Place place =
            place_at(warp, space, lane_address(warp, space, op.reg[0], source, op.attr[0]), bytes, bytes);
        lanes.data[lane] = place.data;
        lanes.cta[lane] = place.cta;
        lanes.offset[lane] = place.offset;
    }
}

void resolve_shared(Lanes& lanes, Warp& warp, const Op& op, Mask mask, uint32_t bytes) {
    const uint32_t* reg = warp.u32(op.reg[0]);
    const uint32_t constant = static_cast<uint32_t>(op.attr[0]);
    const uint32_t first = reg[first_lane(mask)];
    uint32_t low = ~0u, high = 0, bits = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
        const uint32_t address = (mask >> lane & 1 ? reg[lane] : first) + constant;
        low = std::min(low, address);
        high = std::max(high, address);
        bits |= address;
        lanes.offset[lane] = address & ((1u << kRankShift) - 1);
    }
    Cluster& cluster = *warp.cta->cluster;
    const uint32_t rank = low >> kRankShift;
    if (high >> kRankShift != rank || rank >= cluster.ctas.size() || bits & (bytes - 1))
        return resolve_each<Space::Shared>(lanes, warp, op, mask, bytes);
    Cta& cta = *cluster.ctas[rank];
    const uint32_t span = high - low + bytes;
    if (cta.finished || !shared_allowed(cta, low & ((1u << kRankShift) - 1), span))
        return resolve_each<Space::Shared>(lanes, warp, op, mask, bytes);
    lanes.common = &cta;
    uint8_t* base = cta.shared.data();
    for (int lane = 0; lane < kLanes; ++lane) lanes.data[lane] = base + lanes.offset[lane];
}

template <Space space>
void resolve_global(Lanes& lanes, Warp& warp, const Op& op, Mask mask, uint32_t bytes) {
    const uint64_t* reg = warp.u64(op.reg[0]);
    const uint64_t first = reg[first_lane(mask)], constant = static_cast<uint64_t>(op.attr[0]);
    uint64_t low = ~0ull, high = 0, bits = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
        const uint64_t address = (mask >> lane & 1 ? reg[lane] : first) + constant;
        low = std::min(low, address);
        high = std::max(high, address);
        bits |= address;
        lanes.data[lane] = reinterpret_cast<uint8_t*>(address);
    }
    const bool in_one_region = !(bits & (bytes - 1)) && global_allowed(*warp.cta->launch, low, high - low + bytes);
    if (!in_one_region || (space == Space::Generic && (is_shared(low) || is_shared(high))))
        resolve_each<space>(lanes, warp, op, mask, bytes);
}

template <Space space>
void resolve(Lanes& lanes, Warp& warp, const Op& op, Mask mask, uint32_t bytes) {
    if constexpr (space == Space::Shared) resolve_shared(lanes, warp, op, mask, bytes);
    else resolve_global<space>(lanes, warp, op, mask, bytes);
}

// The pieces that lanes touch, joined where a lane goes on where the one before it ends. Lane i touches `bytes` from
// offset[i] on.
class Pieces {
public:
    Pieces(const uint32_t* offset, Mask mask, uint32_t bytes) {
        uint32_t last = ~0u;
        for (Mask rest = mask; rest; rest &= rest - 1) {
            const uint32_t at = offset[first_lane(rest)];
            if (rest == (mask & ~1u) && mask & 1) first_shared_ = at == last;
            if (at == last + bytes && count_) pieces_[count_ - 1].bytes += bytes;
            else if (at != last) pieces_[count_++] = {at, bytes};
            last = at;
        }
    }
    // `offset` and `bytes` as above.
    race::Pieces of(const uint32_t* offset, Mask mask, uint32_t bytes) const {
        return {{pieces_.data(), count_}, {offset[0], mask & 1 ? bytes : 0}, first_shared_};
    }

private:
    std::array<race::Piece, kLanes> pieces_;
    uint32_t count_ = 0;
    bool first_shared_ = false;
};

using Check = void (race::Checker::*)(Warp&, const Op&, Mask, Cta&, const race::Pieces&);
constexpr Check kRead = &race::Checker::read, kStrongRead = &race::Checker::read_strong, kWrite = &race::Checker::write,
                kAtomic = &race::Checker::atomic;

// The CTA whose shared memory all of the lanes are in, or null.
const Cta* only_cta(const Lanes& lanes, Mask mask) {
    if (!lanes.scattered) return lanes.common;
    const Cta* cta = lanes.cta[first_lane(mask)];
    for (Mask rest = mask; rest; rest &= rest - 1)
        if (lanes.cta[first_lane(rest)] != cta) return nullptr;
    return cta;
}

// Tells the race checkers about the accesses of a load or store to shared memory.
void check_races(Warp& warp, const Op& op, Mask mask, const Lanes& lanes, uint32_t bytes, Check check) {
    race::Checker* races = warp.cta->cluster->races.get();
    if (!races) return;
    if (const Cta* cta = only_cta(lanes, mask)) {
        const race::LanePlaces places{lanes.offset, mask, bytes};
        if (check == kRead) warp.cta->cluster->lanes->read(warp, op, *cta, places);
        if (check == kWrite) warp.cta->cluster->lanes->write(warp, op, *cta, places);
    }
    if (lanes.common) {
        (races->*check)(warp, op, mask, *lanes.common,
                        Pieces(lanes.offset, mask, bytes).of(lanes.offset, mask, bytes));
    } else if (lanes.scattered) {
        for (Mask rest = mask, alike; rest; rest &= ~alike) {
            const int lane = first_lane(rest);
            alike = 0;
            for (Mask others = rest; others; others &= others - 1)
                if (const int other = first_lane(others);
                    lanes.cta[other] == lanes.cta[lane] && lanes.offset[other] == lanes.offset[lane])
                    alike |= 1u << other;
            const race::Piece piece{lanes.offset[lane], bytes};
            if (lanes.cta[lane]) (races->*check)(warp, op, alike, *lanes.cta[lane], {{&piece, 1}, piece, true});
        }
    }
}

// --- loads and stores
// reg: address, then the elements of the vector; attr: constant of the address, whether the access is strong.

template <Space space, class Element, class Lane, class Extended>
Step load(Warp& warp, const Op& op, Mask mask) {
    const uint32_t elements = op.regs - 1u, bytes = elements * sizeof(Element);
    const bool strong = op.attr[1];
    Lanes lanes;
    resolve<space>(lanes, warp, op, mask, bytes);
    check_races(warp, op, mask, lanes, bytes, strong ? kStrongRead : kRead);
    for (uint32_t i = 0; i < elements; ++i) {
        if (op.reg[1 + i] == kNoRegister) continue;
        Lane* to = reinterpret_cast<Lane*>(warp.registers + op.reg[1 + i]);
        uint8_t* const* from = lanes.data;
        for_lanes(mask, [&](int lane) {
            Element value;
            std::memcpy(&value, from[lane] + i * sizeof(Element), sizeof value);
            to[lane] = static_cast<Lane>(static_cast<Extended>(value));
        });
    }
    Counters& counters = warp.cta->launch->counters;
    const uint64_t moved = static_cast<uint64_t>(__builtin_popcount(mask)) * bytes;
    (lanes.common ? counters.shared_read : counters.global_read) += moved;
    if (lanes.common) count_shared(warp, op, traffic_of(lanes.offset, mask, bytes));
    if (!strong) return Step::Next;
    for (Mask rest = mask; rest; rest &= rest - 1)
        acquire_flag(warp, rest & -rest, lanes.data[first_lane(rest)]);
    return Step::Yield;  // it may be a poll: others must run for it to succeed
}

template <Space space, class Element, class Lane>
Step store(Warp& warp, const Op& op, Mask mask) {
    const uint32_t elements = op.regs - 1u, bytes = elements * sizeof(Element);
    const bool strong = op.attr[1];
    Lanes lanes;
    resolve<space>(lanes, warp, op, mask, bytes);
    check_races(warp, op, mask, lanes, bytes, strong ? kAtomic : kWrite);
    const Lane* from[8];
    for (uint32_t i = 0; i < elements; ++i) from[i] = reinterpret_cast<const Lane*>(warp.registers + op.reg[1 + i]);
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        for (uint32_t i = 0; i < elements; ++i) {
            const Element value = static_cast<Element>(from[i][lane]);
            std::memcpy(lanes.data[lane] + i * sizeof(Element), &value, sizeof value);
        }
    }
    Counters& counters = warp.cta->launch->counters;
    const uint64_t moved = static_cast<uint64_t>(__builtin_popcount(mask)) * bytes;
    (lanes.common ? counters.shared_written : counters.global_written) += moved;
    if (lanes.common) count_shared(warp, op, traffic_of(lanes.offset, mask, bytes));
    if (space != Space::Shared) warp.cta->launch->polls = 0;
    if (strong)
        for (Mask rest = mask; rest; rest &= rest - 1)
            release_flag(warp, rest & -rest, lanes.data[first_lane(rest)]);
    return Step::Next;
}

// The last word of a name is the register's width, where it is not that of the element (8 and 16 bits live in 32).
// A signed element in a 16-bit register is extended to 16 bits only.
#define FLASH4_LOADS(name, space)                                                       \
    FLASH4_OP("ld." name ".u8", Memory, load<space, uint8_t, uint32_t, uint32_t>);      \
    FLASH4_OP("ld." name ".u16", Memory, load<space, uint16_t, uint32_t, uint32_t>);    \
    FLASH4_OP("ld." name ".u32", Memory, load<space, uint32_t, uint32_t, uint32_t>);    \
    FLASH4_OP("ld." name ".u64", Memory, load<space, uint64_t, uint64_t, uint64_t>);    \
    FLASH4_OP("ld." name ".u8.64", Memory, load<space, uint8_t, uint64_t, uint64_t>);   \
    FLASH4_OP("ld." name ".u16.64", Memory, load<space, uint16_t, uint64_t, uint64_t>); \
    FLASH4_OP("ld." name ".u32.64", Memory, load<space, uint32_t, uint64_t, uint64_t>); \
    FLASH4_OP("ld." name ".s8.16", Memory, load<space, int8_t, uint32_t, uint16_t>);    \
    FLASH4_OP("ld." name ".s8.32", Memory, load<space, int8_t, uint32_t, int32_t>);     \
    FLASH4_OP("ld." name ".s8.64", Memory, load<space, int8_t, uint64_t, int64_t>);     \
    FLASH4_OP("ld." name ".s16.32", Memory, load<space, int16_t, uint32_t, int32_t>);   \
    FLASH4_OP("ld." name ".s16.64", Memory, load<space, int16_t, uint64_t, int64_t>);   \
    FLASH4_OP("ld." name ".s32.64", Memory, load<space, int32_t, uint64_t, int64_t>)

#define FLASH4_STORES(name, space)                                             \
    FLASH4_OP("st." name ".u8", Memory, store<space, uint8_t, uint32_t>);      \
    FLASH4_OP("st." name ".u16", Memory, store<space, uint16_t, uint32_t>);    \
    FLASH4_OP("st." name ".u32", Memory, store<space, uint32_t, uint32_t>);    \
    FLASH4_OP("st." name ".u64", Memory, store<space, uint64_t, uint64_t>);    \
    FLASH4_OP("st." name ".u8.64", Memory, store<space, uint8_t, uint64_t>);   \
    FLASH4_OP("st." name ".u16.64", Memory, store<space, uint16_t, uint64_t>); \
    FLASH4_OP("st." name ".u32.64", Memory, store<space, uint32_t, uint64_t>)

FLASH4_LOADS("shared", Space::Shared);
FLASH4_LOADS("global", Space::Global);
FLASH4_LOADS("generic", Space::Generic);
FLASH4_STORES("shared", Space::Shared);
FLASH4_STORES("global", Space::Global);
FLASH4_STORES("generic", Space::Generic);

// reg: the elements; attr: byte in the parameters. All lanes get the same.
template <class Element, class Lane, class Extended>
Step load_parameter(Warp& warp, const Op& op, Mask mask) {
    const Parameters& params = warp.cta->launch->params;
    const uint64_t at = static_cast<uint64_t>(op.attr[0]);
    if (!inside(0, params.size(), at, op.regs * sizeof(Element)))
        throw Fault("out-of-bounds",
                    "byte " + std::to_string(at) + " of " + std::to_string(params.size()) + " bytes of parameters");
    for (uint32_t i = 0; i < op.regs; ++i) {
        if (op.reg[i] == kNoRegister) continue;
        Element value;
        std::memcpy(&value, params.data() + at + i * sizeof value, sizeof value);
        Lane* to = reinterpret_cast<Lane*>(warp.registers + op.reg[i]);
        for_lanes(mask, [&](int lane) { to[lane] = static_cast<Lane>(static_cast<Extended>(value)); });
    }
    return Step::Next;
}

FLASH4_OP("ld.param.u8", Memory, load_parameter<uint8_t, uint32_t, uint32_t>);
FLASH4_OP("ld.param.u16", Memory, load_parameter<uint16_t, uint32_t, uint32_t>);
FLASH4_OP("ld.param.u32", Memory, load_parameter<uint32_t, uint32_t, uint32_t>);
FLASH4_OP("ld.param.u64", Memory, load_parameter<uint64_t, uint64_t, uint64_t>);
FLASH4_OP("ld.param.u8.64", Memory, load_parameter<uint8_t, uint64_t, uint64_t>);
FLASH4_OP("ld.param.u16.64", Memory, load_parameter<uint16_t, uint64_t, uint64_t>);
FLASH4_OP("ld.param.u32.64", Memory, load_parameter<uint32_t, uint64_t, uint64_t>);
FLASH4_OP("ld.param.s8.16", Memory, load_parameter<int8_t, uint32_t, uint16_t>);
FLASH4_OP("ld.param.s8.32", Memory, load_parameter<int8_t, uint32_t, int32_t>);
FLASH4_OP("ld.param.s8.64", Memory, load_parameter<int8_t, uint64_t, int64_t>);
FLASH4_OP("ld.param.s16.32", Memory, load_parameter<int16_t, uint32_t, int32_t>);
FLASH4_OP("ld.param.s16.64", Memory, load_parameter<int16_t, uint64_t, int64_t>);
FLASH4_OP("ld.param.s32.64", Memory, load_parameter<int32_t, uint64_t, int64_t>);

// reg: address; bytes; attr: constant of the address, generic address. PTX ISA, st.bulk: fills with zeros.
Step store_zeros(Warp& warp, const Op& op, Mask mask) {
    const Space space = op.attr[1] ? Space::Generic : Space::Shared;
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        const uint64_t bytes = warp.u64(op.reg[1])[lane];
        const uint64_t address = lane_address(warp, space, op.reg[0], lane, op.attr[0]);
        if (bytes > warp.cta->shared.size()) throw Fault("out-of-bounds", "st.bulk of " + std::to_string(bytes) + " bytes");
        if (bytes % 8) throw Fault("misaligned", "st.bulk of " + std::to_string(bytes) + " bytes, not a multiple of 8");
        if (space == Space::Generic && !is_shared(address))
            throw Fault("out-of-bounds", "st.bulk to memory that is not shared");
        const SharedRef place = shared_at(warp, static_cast<uint32_t>(address), static_cast<uint32_t>(bytes), 8);
        if (race::Checker* races = warp.cta->cluster->races.get())
            races->write(warp, op, 1u << lane, *place.cta, place.offset, static_cast<uint32_t>(bytes));
        std::memset(place.data(), 0, bytes);
        warp.cta->launch->counters.shared_written += bytes;
        count_shared(warp, op, in_rows(bytes));
    }
    return Step::Next;
}
FLASH4_OP("st.bulk", Memory, store_zeros);

// --- addresses
// reg: destination, source.

Step shared_to_generic(Warp& warp, const Op& op, Mask mask) {
    uint64_t* to = warp.u64(op.reg[0]);
    const uint64_t* from = warp.u64(op.reg[1]);
    for_lanes(mask, [&](int lane) { to[lane] = from[lane] | kSharedWindow; });
    return Step::Next;
}

Step generic_to_shared(Warp& warp, const Op& op, Mask mask) {
    uint64_t* to = warp.u64(op.reg[0]);
    const uint64_t* from = warp.u64(op.reg[1]);
    for_lanes(mask, [&](int lane) { to[lane] = from[lane] & 0xFFFFFFFFu; });
    return Step::Next;
}

// Global memory and parameters have the same address in their space as in the generic one.
Step same_address(Warp& warp, const Op& op, Mask mask) {
    uint64_t* to = warp.u64(op.reg[0]);
    const uint64_t* from = warp.u64(op.reg[1]);
    for_lanes(mask, [&](int lane) { to[lane] = from[lane]; });
    return Step::Next;
}

// reg: destination, address, rank. The same offset in another CTA; a rank beyond the cluster faults when used.
template <class Lane>
Step map_to_cta(Warp& warp, const Op& op, Mask mask) {
    Lane* to = reinterpret_cast<Lane*>(warp.registers + op.reg[0]);
    const Lane* from = reinterpret_cast<const Lane*>(warp.registers + op.reg[1]);
    const uint32_t* rank = warp.u32(op.reg[2]);
    constexpr Lane kRankBits = Lane{0xFF} << kRankShift;
    for_lanes(mask, [&](int lane) { to[lane] = (from[lane] & ~kRankBits) | Lane{rank[lane] & 0xFF} << kRankShift; });
    return Step::Next;
}

template <class Lane>
Step cta_rank(Warp& warp, const Op& op, Mask mask) {
    uint32_t* to = warp.u32(op.reg[0]);
    const Lane* from = reinterpret_cast<const Lane*>(warp.registers + op.reg[1]);
    for_lanes(mask, [&](int lane) { to[lane] = static_cast<uint32_t>(from[lane] >> kRankShift) & 0xFF; });
    return Step::Next;
}

bool in_shared_of_cluster(const Warp&, uint64_t address) { return is_shared(address); }
bool in_shared_of_cta(const Warp& warp, uint64_t address) {
    return is_shared(address) && (static_cast<uint32_t>(address) >> kRankShift) == warp.cta->rank;
}
bool in_parameters(const Warp& warp, uint64_t address) {
    const Parameters& params = warp.cta->launch->params;
    const uint64_t begin = reinterpret_cast<uint64_t>(params.data());
    return inside(begin, begin + params.size(), address, 1);
}
bool in_global(const Warp& warp, uint64_t address) { return !is_shared(address) && !in_parameters(warp, address); }
bool nowhere(const Warp&, uint64_t) { return false; }

// reg: predicate, address.
template <bool (*inside_space)(const Warp&, uint64_t)>
Step is_in_space(Warp& warp, const Op& op, Mask mask) {
    Mask found = 0;
    for (Mask rest = mask; rest; rest &= rest - 1)
        if (inside_space(warp, warp.u64(op.reg[1])[first_lane(rest)])) found |= rest & -rest;
    Mask& predicate = warp.predicate(op.reg[0]);
    predicate = (predicate & ~mask) | found;
    return Step::Next;
}

FLASH4_OP("cvta.shared", Alu, shared_to_generic);
FLASH4_OP("cvta.to.shared", Alu, generic_to_shared);
FLASH4_OP("cvta.same", Alu, same_address);
FLASH4_OP("mapa.u32", Alu, map_to_cta<uint32_t>);
FLASH4_OP("mapa.u64", Alu, map_to_cta<uint64_t>);
FLASH4_OP("getctarank.u32", Alu, cta_rank<uint32_t>);
FLASH4_OP("getctarank.u64", Alu, cta_rank<uint64_t>);
FLASH4_OP("isspacep.shared::cta", Alu, is_in_space<in_shared_of_cta>);
FLASH4_OP("isspacep.shared::cluster", Alu, is_in_space<in_shared_of_cluster>);
FLASH4_OP("isspacep.global", Alu, is_in_space<in_global>);
FLASH4_OP("isspacep.param", Alu, is_in_space<in_parameters>);
FLASH4_OP("isspacep.none", Alu, is_in_space<nowhere>);

}  // namespace
}  // namespace flash4
