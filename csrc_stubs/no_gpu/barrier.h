// mbarrier objects (PTX ISA, Parallel Synchronization: mbarrier).
#pragma once

#include "machine.h"
#include "memory.h"

namespace flash4 {

// The valid mbarrier at a place in shared memory; throws Fault("mbarrier") when there is none.
MBarrier& mbarrier_at(SharedRef place);

// For arrivals by other CTAs and by asynchronous work; a finding when no fence followed the initialisation.
void require_fenced(SharedRef place, Origin by);

// Arrivals and bytes, from warps and from asynchronous work; complete the phase when nothing is missing.
// The caller has merged its clock into `clock` before.
void arrive(SharedRef place, uint32_t count);
void expect_tx(SharedRef place, int64_t bytes);
void complete_tx(SharedRef place, int64_t bytes);

}  // namespace flash4
