// Tensor memory: addresses, and who owns which columns.
#pragma once

#include "machine.h"

namespace flash4 {

// PTX ISA, Tensor Memory Addressing: the lane in the upper half of an address, the column in the lower.
struct TmemAddress {
    uint32_t lane, column;
    explicit TmemAddress(uint32_t address) : lane(address >> 16), column(address & 0xFFFFu) {}
};

inline uint32_t* tmem_column(Cta& cta, uint32_t column) { return cta.tmem.data() + column * kTmemLanes; }

// Throws Fault unless the CTA has allocated all these columns.
void require_allocated(const Cta& cta, uint32_t column, uint32_t columns);

// Throws Fault unless the machine has tensor memory and the whole warp executes a `.sync.aligned` instruction.
void require_tensor_memory(const Warp& warp);
void require_whole_warp(const Warp& warp, Mask mask);

// The other CTA of a pair (.cta_group::2); throws Fault where there is none.
Cta& peer_of(Cta& cta);

// Reports tensor memory that the CTA has not freed when it exits.
void check_tmem_freed(Cta& cta);

}  // namespace flash4
