// Atomic operations that a warp waits for (PTX ISA, Parallel Synchronization: atom, red).
#include <cstring>

#include "banks.h"
#include "memory.h"
#include "reduce.h"

namespace flash4 {
namespace {

// Integers serve as flags between warps; floating-point numbers are only summed up.
bool is_flag(ElementType type) { return type <= ElementType::S64; }

void check_races(Warp& warp, const Op& op, Mask lane, const Place& place, uint32_t bytes, ElementType type) {
    race::Checker* races = warp.cta->cluster->races.get();
    if (races && place.cta) races->atomic(warp, op, lane, *place.cta, place.offset, bytes);
    if (!is_flag(type)) return;
    acquire_flag(warp, lane, place.data);
    release_flag(warp, lane, place.data);
}

void count(Warp& warp, const Op& op, const Place& place, uint32_t bytes) {
    Counters& counters = warp.cta->launch->counters;
    (place.cta ? counters.shared_read : counters.global_read) += bytes;
    (place.cta ? counters.shared_written : counters.global_written) += bytes;
    if (place.cta) count_shared(warp, op, {2ull * bytes, 2});
}

// An operation that changes nothing may be a poll, or try a lock that another warp holds.
Step done(Warp& warp, bool changed) {
    if (!changed) return Step::Yield;
    warp.cta->launch->polls = 0;
    return Step::Next;
}

// The bytes of one lane of a register.
uint8_t* lane_bytes(Warp& warp, uint32_t reg, uint32_t bytes, int lane) {
    return warp.registers + reg + static_cast<uint32_t>(lane) * (bytes == 8 ? 8 : 4);
}

// Puts a value that was in memory into a lane; 16 bits leave the upper half of theirs zero.
void set_lane(Warp& warp, uint32_t reg, uint32_t bytes, int lane, const uint8_t* value) {
    if (reg == kNoRegister) return;
    uint8_t* to = lane_bytes(warp, reg, bytes, lane);
    std::memset(to, 0, bytes == 8 ? 8 : 4);
    std::memcpy(to, value, bytes);
}

// reg: address, then old values (or kNoRegister), then as many new ones.
// attr: constant of the address, Space, Reduction, ElementType, bytes of memory that one register holds.
Step atomic(Warp& warp, const Op& op, Mask mask) {
    const Space space = static_cast<Space>(op.attr[1]);
    const ElementType type = static_cast<ElementType>(op.attr[3]);
    const Reducer combine = reducer(static_cast<Reduction>(op.attr[2]), type);
    const uint32_t each = static_cast<uint32_t>(op.attr[4]), registers = (op.regs - 1u) / 2, bytes = each * registers;
    bool changed = false;
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        const Place place = place_at(warp, space, lane_address(warp, space, op.reg[0], lane, op.attr[0]), bytes, bytes);
        check_races(warp, op, 1u << lane, place, bytes, type);
        count(warp, op, place, bytes);
        for (uint32_t i = 0; i < registers; ++i) {
            uint8_t value[8], before[8], *memory = place.data + i * each;
            std::memcpy(value, lane_bytes(warp, op.reg[1 + registers + i], each, lane), each);
            std::memcpy(before, memory, each);
            set_lane(warp, op.reg[1 + i], each, lane, before);
            reduce(combine, element_bytes(type), memory, value, each);
            changed |= std::memcmp(before, memory, each) != 0;
        }
    }
    return done(warp, changed);
}

// reg: address, old value, compared, new value; attr: constant of the address, Space, bytes.
Step compare_and_swap(Warp& warp, const Op& op, Mask mask) {
    const Space space = static_cast<Space>(op.attr[1]);
    const uint32_t bytes = static_cast<uint32_t>(op.attr[2]);
    bool changed = false;
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        const Place place = place_at(warp, space, lane_address(warp, space, op.reg[0], lane, op.attr[0]), bytes, bytes);
        check_races(warp, op, 1u << lane, place, bytes, ElementType::U32);
        count(warp, op, place, bytes);
        uint8_t compared[8], value[8];
        std::memcpy(compared, lane_bytes(warp, op.reg[2], bytes, lane), bytes);
        std::memcpy(value, lane_bytes(warp, op.reg[3], bytes, lane), bytes);
        const bool equal = !std::memcmp(place.data, compared, bytes);
        set_lane(warp, op.reg[1], bytes, lane, place.data);
        if (equal) std::memcpy(place.data, value, bytes);
        changed |= equal;
    }
    return done(warp, changed);
}

FLASH4_OP("atom", Memory, atomic);
FLASH4_OP("atom.cas", Memory, compare_and_swap);

}  // namespace
}  // namespace flash4
