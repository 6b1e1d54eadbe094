// Address spaces and checked access.
#pragma once

#include "machine.h"

namespace flash4 {

struct SharedRef {
    Cta* cta;
    uint32_t offset;
    uint8_t* data() const { return cta->shared.data() + offset; }
};

// The shared memory at a shared::cluster address; throws Fault when it is not inside a CTA of the cluster.
// `alignment` is in bytes. For a warp the CTA must also still be running.
SharedRef shared_at(Warp& warp, uint32_t address, uint32_t bytes, uint32_t alignment);
SharedRef shared_at(Cluster& cluster, uint32_t address, uint32_t bytes, uint32_t alignment);

// Global memory: the address is one of this process; throws Fault when it is outside all registered regions.
// The parameters of the launch count as global memory here: generic addresses reach them too.
uint8_t* global_at(Launch& launch, uint64_t address, uint64_t bytes, uint32_t alignment);

// Generic addresses of shared memory carry this tag in their upper half (PTX ISA, State Spaces: generic addressing).
inline constexpr uint64_t kSharedWindow = 0x5A00000000000000ull;
inline bool is_shared(uint64_t generic) { return generic >> 32 == kSharedWindow >> 32; }

// The state spaces that instructions name. Shared addresses have 32 bits, the others 64.
enum class Space : uint8_t { Shared, Global, Generic };

// Where one lane's access goes.
struct Place {
    uint8_t* data;
    Cta* cta = nullptr;  // whose shared memory; null: global memory
    uint32_t offset = 0;
    SharedRef shared() const { return {cta, offset}; }
};
Place place_at(Warp& warp, Space space, uint64_t address, uint32_t bytes, uint32_t alignment);

// A lane's address: the value of a register, of the width that the space has, plus a constant.
inline uint64_t lane_address(Warp& warp, Space space, uint32_t reg, int lane, int64_t offset) {
    if (space == Space::Shared) return static_cast<uint32_t>(warp.u32(reg)[lane] + offset);
    return warp.u64(reg)[lane] + static_cast<uint64_t>(offset);
}

// Happens-before through strong accesses (volatile, relaxed, acquire, release, atomic) of flags in memory. All of them
// are taken to acquire and release: with a fence beside it a relaxed one does, and a finding must never be false.
void acquire_flag(Warp& warp, Mask lanes, const void* flag);
void release_flag(Warp& warp, Mask lanes, const void* flag);

}  // namespace flash4
