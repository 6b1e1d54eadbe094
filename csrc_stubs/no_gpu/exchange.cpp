// What the lanes of a warp do together: shuffles, votes, matches, reductions and elections; and clocks.
// PTX ISA: Data Movement (shfl.sync), Parallel Synchronization and Communication (vote, match, redux, activemask,
// elect).
#include <algorithm>
#include <array>

#include "alu.h"

namespace flash4::alu {
namespace {

// Whether the lanes that the instruction's member mask names are there: all that have not exited must execute it
// together, and only they may. Lanes that run elsewhere may still exit, so the instruction waits for them (false);
// others do not come.
bool gathered(Warp& w, uint32_t reg, Mask mask) {
    const Mask named = w.u32(reg)[first_lane(mask)], missing = named & ~w.exited & ~mask;
    char text[160];
    if (const Mask strangers = mask & ~named) {
        std::snprintf(text, sizeof text, "lanes %08x execute the instruction and are not in the member mask %08x",
                      strangers, named);
        throw Fault("divergence", text);
    }
    Mask elsewhere = 0;
    for (const Group& group : w.groups)
        if (&group != w.group) elsewhere |= group.mask;
    if (const Mask absent = missing & ~elsewhere) {
        std::snprintf(text, sizeof text,
                      "the member mask %08x names lanes %08x, which do not execute the instruction with lanes %08x",
                      named, absent, mask);
        throw Fault("divergence", text);
    }
    return !missing;
}

void assign(Mask& to, Mask value, Mask lanes) { to = (to & ~lanes) | (value & lanes); }

template <class T>
std::array<T, kLanes> copy(const T* values) {
    std::array<T, kLanes> all;
    std::copy_n(values, kLanes, all.begin());
    return all;
}

enum class Shuffle { Up, Down, Butterfly, Index };

// The lane that `lane` would read, and whether it is within the segment. c = segment mask << 8 | clamp.
struct Source {
    int lane;
    bool inside;
};
template <Shuffle How>
Source shuffle_source(int lane, uint32_t b, uint32_t c) {
    const int clamp = c & 31, segment = c >> 8 & 31, by = b & 31;
    const int first = lane & segment, last = first | (clamp & ~segment);
    if constexpr (How == Shuffle::Up) return {lane - by, lane - by >= last};
    const int from = How == Shuffle::Down ? lane + by : How == Shuffle::Butterfly ? lane ^ by : first | (by & ~segment);
    return {from, from <= last};
}

// reg: d, p (may be absent), a, b, c, member mask.
template <Shuffle How>
Step shuffle(Warp& w, const Op& op, Mask mask) {
    if (!gathered(w, op.reg[5], mask)) return Step::Blocked;
    const auto a = copy(w.u32(op.reg[2]));
    const uint32_t *b = w.u32(op.reg[3]), *c = w.u32(op.reg[4]);
    std::array<uint32_t, kLanes> result;
    Mask inside = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
        const Source source = shuffle_source<How>(lane, b[lane], c[lane]);
        const int from = source.inside ? source.lane : lane;
        // What a lane reads from one that does not take part is undefined; kernels may ignore it, and not use it.
        result[lane] = mask >> from & 1 ? a[from] : kPoison;
        inside |= static_cast<Mask>(source.inside) << lane;
    }
    if (op.reg[0] != kNoRegister) {
        uint32_t* d = w.u32(op.reg[0]);
        for_lanes(mask, [&](int lane) { d[lane] = result[lane]; });
    }
    if (op.reg[1] != kNoRegister) assign(w.predicate(op.reg[1]), inside, mask);
    return Step::Next;
}
FLASH4_OP("shfl.up", Alu, shuffle<Shuffle::Up>);
FLASH4_OP("shfl.down", Alu, shuffle<Shuffle::Down>);
FLASH4_OP("shfl.bfly", Alu, shuffle<Shuffle::Butterfly>);
FLASH4_OP("shfl.idx", Alu, shuffle<Shuffle::Index>);

// reg: d (a predicate, or 32 bits for the ballot), a, member mask. attr: whether to negate a.
Mask votes(Warp& w, const Op& op, Mask mask) { return (w.predicate(op.reg[1]) ^ (op.attr[0] ? kAllLanes : 0)) & mask; }
Step ballot(Warp& w, const Op& op, Mask mask) {
    if (!gathered(w, op.reg[2], mask)) return Step::Blocked;
    const Mask result = votes(w, op, mask);
    uint32_t* d = w.u32(op.reg[0]);
    for_lanes(mask, [&](int lane) { d[lane] = result; });
    return Step::Next;
}
template <auto F>
Step vote(Warp& w, const Op& op, Mask mask) {
    if (!gathered(w, op.reg[2], mask)) return Step::Blocked;
    assign(w.predicate(op.reg[0]), F(votes(w, op, mask), mask) ? kAllLanes : 0, mask);
    return Step::Next;
}
FLASH4_OP("vote.ballot", Alu, ballot);
FLASH4_OP("vote.any", Alu, vote<[](Mask yes, Mask) { return yes != 0; }>);
FLASH4_OP("vote.all", Alu, vote<[](Mask yes, Mask all) { return yes == all; }>);
FLASH4_OP("vote.uni", Alu, vote<[](Mask yes, Mask all) { return yes == all || yes == 0; }>);

// reg: d, a, member mask: the lanes whose a is equal.
template <class T>
Step match_any(Warp& w, const Op& op, Mask mask) {
    if (!gathered(w, op.reg[2], mask)) return Step::Blocked;
    const auto a = copy(cells<T>(w, op.reg[1]));
    uint32_t* d = w.u32(op.reg[0]);
    for_lanes(mask, [&](int lane) {
        Mask equal = 0;
        for (int other = 0; other < kLanes; ++other) equal |= static_cast<Mask>(a[other] == a[lane]) << other;
        d[lane] = equal & mask;
    });
    return Step::Next;
}
// reg: d, p (may be absent), a, member mask: all lanes and true if they all agree, else 0 and false.
template <class T>
Step match_all(Warp& w, const Op& op, Mask mask) {
    if (!gathered(w, op.reg[3], mask)) return Step::Blocked;
    const auto a = copy(cells<T>(w, op.reg[2]));
    bool agree = true;
    for (Mask rest = mask; rest; rest &= rest - 1) agree &= a[first_lane(rest)] == a[first_lane(mask)];
    uint32_t* d = w.u32(op.reg[0]);
    for_lanes(mask, [&](int lane) { d[lane] = agree ? mask : 0; });
    if (op.reg[1] != kNoRegister) assign(w.predicate(op.reg[1]), agree ? kAllLanes : 0, mask);
    return Step::Next;
}
FLASH4_OP("match.any.b32", Alu, match_any<U32>);
FLASH4_OP("match.any.b64", Alu, match_any<U64>);
FLASH4_OP("match.all.b32", Alu, match_all<U32>);
FLASH4_OP("match.all.b64", Alu, match_all<U64>);

// reg: d, a, member mask.
template <class T, auto F>
Step reduce(Warp& w, const Op& op, Mask mask) {
    if (!gathered(w, op.reg[2], mask)) return Step::Blocked;
    const auto* a = cells<T>(w, op.reg[1]);
    auto result = T::load(a[first_lane(mask)]);
    for (Mask rest = mask & (mask - 1); rest; rest &= rest - 1) result = F(result, T::load(a[first_lane(rest)]));
    auto* d = cells<T>(w, op.reg[0]);
    for_lanes(mask, [&](int lane) { d[lane] = T::store(result); });
    return Step::Next;
}
constexpr auto least = [](auto a, auto b) { return b < a ? b : a; };
constexpr auto most = [](auto a, auto b) { return a < b ? b : a; };
FLASH4_OP("redux.add.b32", Alu, reduce<U32, [](uint32_t a, uint32_t b) { return a + b; }>);
FLASH4_OP("redux.and.b32", Alu, reduce<U32, [](uint32_t a, uint32_t b) { return a & b; }>);
FLASH4_OP("redux.or.b32", Alu, reduce<U32, [](uint32_t a, uint32_t b) { return a | b; }>);
FLASH4_OP("redux.xor.b32", Alu, reduce<U32, [](uint32_t a, uint32_t b) { return a ^ b; }>);
FLASH4_OP("redux.min.u32", Alu, reduce<U32, least>);
FLASH4_OP("redux.max.u32", Alu, reduce<U32, most>);
FLASH4_OP("redux.min.s32", Alu, reduce<S32, least>);
FLASH4_OP("redux.max.s32", Alu, reduce<S32, most>);

// reg: d, a, member mask. attr: 1 for the maximum, .abs, .NaN. Without .NaN a NaN counts only where all are NaN.
Step reduce_f32(Warp& w, const Op& op, Mask mask) {
    if (!gathered(w, op.reg[2], mask)) return Step::Blocked;
    const bool maximum = op.attr[0], absolute = op.attr[1], nan_wins = op.attr[2];
    const uint32_t* a = w.u32(op.reg[1]);
    float result = number::real(number::kNan32);
    bool any_nan = false;
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const uint32_t word = a[first_lane(rest)] & (absolute ? 0x7FFFFFFFu : ~0u);
        const float x = number::real(word);
        any_nan |= std::isnan(x);
        // +0 counts as more than -0.
        const bool less = x < result || (x == result && std::signbit(x) > std::signbit(result));
        const bool more = x > result || (x == result && std::signbit(x) < std::signbit(result));
        if (!std::isnan(x) && (std::isnan(result) || (maximum ? more : less))) result = x;
    }
    const uint32_t word = nan_wins && any_nan ? number::kNan32 : number::bits(result);
    uint32_t* d = w.u32(op.reg[0]);
    for_lanes(mask, [&](int lane) { d[lane] = word; });
    return Step::Next;
}
FLASH4_OP("redux.f32", Alu, reduce_f32);

// reg: d.
Step active_mask(Warp& w, const Op& op, Mask mask) {
    uint32_t* d = w.u32(op.reg[0]);
    for_lanes(mask, [&](int lane) { d[lane] = mask; });
    return Step::Next;
}
FLASH4_OP("activemask", Alu, active_mask);

// reg: d (may be absent), p, member mask. The hardware's choice is unspecified; this is the lowest lane.
Step elect(Warp& w, const Op& op, Mask mask) {
    if (!gathered(w, op.reg[2], mask)) return Step::Blocked;
    const int leader = first_lane(mask);
    if (op.reg[0] != kNoRegister) {
        uint32_t* d = w.u32(op.reg[0]);
        for_lanes(mask, [&](int lane) { d[lane] = static_cast<uint32_t>(leader); });
    }
    if (op.reg[1] != kNoRegister) assign(w.predicate(op.reg[1]), 1u << leader, mask);
    return Step::Next;
}
FLASH4_OP("elect", Alu, elect);

Step sleep(Warp&, const Op&, Mask) { return Step::Yield; }
FLASH4_OP("nanosleep", Control, sleep);

// reg: d. A clock that counts the instructions of its warp. attr: bits to shift it right by.
template <class T>
Step read_clock(Warp& w, const Op& op, Mask mask) {
    const uint64_t now = w.executed >> op.attr[0];
    auto* d = cells<T>(w, op.reg[0]);
    for_lanes(mask, [&](int lane) { d[lane] = static_cast<typename T::Cell>(now); });
    return Step::Next;
}
FLASH4_OP("clock.b32", Alu, read_clock<U32>);
FLASH4_OP("clock.b64", Alu, read_clock<U64>);

}  // namespace
}  // namespace flash4::alu
