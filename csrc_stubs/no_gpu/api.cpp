// The engine's C interface; flash4_torch/emulator/engine.py is its only user and mirrors these structures.
#include <cstring>
#include <memory>

#include "program.h"
#include "schedule.h"

using namespace flash4;

struct LaunchText {
    const Program* program;
    uint32_t grid[3], block[3], cluster[3];
    uint32_t dynamic_shared;
    const uint8_t* params;
    uint64_t param_bytes;
    const uint64_t* regions;  // begin, end, begin, end, ...; sorted
    uint64_t region_count;
    uint32_t bounded, schedule, arch, max_resident;
    uint64_t seed, max_instructions;
    uint8_t check_races, strict_uninitialised, strict_wait_ld, strict_exit, strict_lanes;
};

// A launch, and what is left of it to do.
struct Job {
    Launch launch;
    std::unique_ptr<Execution> execution;
};

struct FindingText {
    const char *kind, *message;
    uint32_t cta[3], cta_rank, warp, op;
    uint32_t has_other, other_cta, other_warp, other_op;
    uint64_t times;
};

extern "C" {

uint64_t flash4_operation_count() { return operation_count(); }
const char* flash4_operation_name(uint64_t index) { return operation_name(index); }
uint32_t flash4_operation_pipe(uint64_t index) { return static_cast<uint32_t>(operation_pipe(index)); }

Program* flash4_program_new(const ProgramText* text) { return make_program(*text).release(); }
void flash4_program_free(Program* program) { delete program; }

// Null where there is no memory for it.
Job* flash4_launch_new(const LaunchText* text) try {
    auto job = std::make_unique<Job>();
    Launch* launch = &job->launch;
    launch->program = text->program;
    launch->grid = {text->grid[0], text->grid[1], text->grid[2]};
    launch->block = {text->block[0], text->block[1], text->block[2]};
    launch->cluster = {text->cluster[0], text->cluster[1], text->cluster[2]};
    launch->dynamic_shared = text->dynamic_shared;
    launch->params.assign(text->params, text->param_bytes);
    for (uint64_t i = 0; i < text->region_count; ++i)
        launch->regions.push_back({text->regions[2 * i], text->regions[2 * i + 1]});
    launch->bounded = text->bounded;
    Options& options = launch->options;
    options.schedule = static_cast<Schedule>(text->schedule);
    options.seed = text->seed;
    options.arch = static_cast<int>(text->arch);
    options.max_resident = text->max_resident;
    options.max_instructions = text->max_instructions;
    options.check_races = text->check_races;
    options.strict_uninitialised = text->strict_uninitialised;
    options.strict_wait_ld = text->strict_wait_ld;
    options.strict_exit = text->strict_exit;
    options.strict_lanes = text->strict_lanes;
    job->execution = std::make_unique<Execution>(*launch);
    return job.release();
} catch (const std::bad_alloc&) {
    return nullptr;
}
// Goes on for about so many milliseconds; whether the launch has ended. Between these calls a caller may do what it
// likes: handle signals, look at a clock, free the launch.
uint32_t flash4_launch_run(Job* job, uint32_t milliseconds) {
    return job->execution->run(std::chrono::milliseconds(milliseconds));
}
void flash4_launch_give_up(Job* job, const char* kind, const char* why) { job->execution->give_up(kind, why); }
void flash4_launch_free(Job* job) { delete job; }

uint64_t flash4_finished_ctas(const Job* job) { return job->launch.finished_ctas; }
uint64_t flash4_finding_count(const Job* job) { return job->launch.findings.size(); }
void flash4_finding(const Job* job, uint64_t index, FindingText* out) {
    const Finding& f = job->launch.findings[index];
    *out = {f.kind.c_str(),
            f.message.c_str(),
            {f.cta.x, f.cta.y, f.cta.z},
            f.at.cta,
            f.at.warp,
            f.at.op,
            f.has_other,
            f.other.cta,
            f.other.warp,
            f.other.op,
            f.times};
}
const Counters* flash4_counters(const Job* job) { return &job->launch.counters; }
const uint64_t* flash4_counts(const Job* job, uint64_t* length) {
    *length = job->launch.counts.size();
    return job->launch.counts.data();
}
const uint64_t* flash4_shared_bytes(const Job* job) { return job->launch.shared_bytes.data(); }
const uint64_t* flash4_shared_passes(const Job* job) { return job->launch.shared_passes.data(); }
}
