// A launch from start to end, under one of the schedules.
#pragma once

#include <chrono>
#include <memory>

#include "machine.h"

namespace flash4 {

struct Machine;

// A launch under way. Findings are in `launch.findings`; a Fault or a deadlock ends the launch early, and always leaves
// a finding.
class Execution {
public:
    explicit Execution(Launch& launch);
    ~Execution();

    // Goes on for about so long, or to the end. Returns whether the launch has ended.
    bool run(std::chrono::milliseconds slice);
    // Ends it with a finding of this kind, which says where every warp is.
    void give_up(const char* kind, const char* why);

private:
    template <class Action>
    void keeping_faults(Action&& action);
    Launch& launch_;
    std::unique_ptr<Machine> machine_;  // null: the launch has ended
};

}  // namespace flash4
