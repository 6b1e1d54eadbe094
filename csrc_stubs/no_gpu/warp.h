// Running one warp: the step loop and the divergence of its lanes.
#pragma once

#include "machine.h"

namespace flash4 {

enum class Slice : uint8_t {
    Ran,      // used up its budget
    Blocked,  // every group of lanes waits for something in the cluster
    Polled,   // a poll was in vain
    Done,     // all lanes have exited
};

// Sets up the register file and the lanes of a warp of `threads` threads (1 to 32).
void start(Warp& warp, uint32_t threads);

// Runs up to `budget` instructions. Throws Fault; `warp.group` is then the group that ran.
Slice run(Warp& warp, uint64_t budget);

// Whether a group of lanes could go on, so far as events tell.
bool runnable(const Warp& warp);

// Lets the try_waits that the warp is blocked in return false. Returns how many there were.
int time_out(Warp& warp);

// "warp 3 of CTA 1 at op 17: waits for ...", for deadlock reports.
std::string describe(const Warp& warp);

// Whether an instruction is an mbarrier.try_wait, and what a blocked instruction waits for; both in barrier.cpp.
bool may_time_out(const Op& op);
std::string describe_wait(const Warp& warp, const Group& group, const Op& op);

}  // namespace flash4
