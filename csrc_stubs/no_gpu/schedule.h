// A launch from start to end, under one of the schedules.
#pragma once

#include "machine.h"

namespace flash4 {

// Runs all CTAs. Findings are in `launch.findings` afterwards; a Fault or a deadlock ends the launch early.
void execute(Launch& launch);

}  // namespace flash4
