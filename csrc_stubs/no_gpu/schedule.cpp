// Who runs next. Eager: asynchronous work is done as soon as it is issued. Late: only when no warp can go on without
// it, the newest first; what has read its source and is on its way to global memory waits for all else, and if nobody
// waits for it, for the end of the launch. Fuzz: warps, the lengths of their turns and the moments of asynchronous work
// are drawn from a seed.
#include "schedule.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <optional>

#include "async.h"
#include "tcgen05.h"
#include "warp.h"

namespace flash4 {
namespace {

constexpr uint64_t kTurn = 4096;             // instructions of a warp before others may run
constexpr uint64_t kFuzzTurn = 96;           // at most, in the fuzz schedule
constexpr uint32_t kFuzzResident = 4;        // clusters that the fuzz schedule interleaves
constexpr uint64_t kMaxPolls = 4'000'000;    // vain polls in a row that count as a deadlock
constexpr uint64_t kPatience = 64;           // vain polls until work is done that the late schedule holds back
constexpr uint32_t kMaxStalledRounds = 256;  // rounds of timed-out waits that changed nothing
constexpr uint32_t kFuzzTurnsPerLook = 16;   // turns between looks at the clock
constexpr const char* kDeadlock = "deadlock";

enum class Outcome : uint8_t { Progress, Polling, Finished };

// Storage for the register files of the CTAs that are resident.
class RegisterFiles {
public:
    explicit RegisterFiles(size_t bytes) : bytes_((bytes + 63) & ~size_t{63}) {}
    uint8_t* take() {
        if (free_.empty()) {
            auto* file = static_cast<uint8_t*>(std::aligned_alloc(64, std::max<size_t>(bytes_, 64)));
            if (!file) throw std::bad_alloc();
            all_.emplace_back(file, &std::free);
            return file;
        }
        uint8_t* file = free_.back();
        free_.pop_back();
        return file;
    }
    void give_back(uint8_t* file) { free_.push_back(file); }

private:
    size_t bytes_;
    std::vector<std::unique_ptr<uint8_t, void (*)(void*)>> all_;
    std::vector<uint8_t*> free_;
};

}  // namespace

struct Machine {
    Launch& launch;
    RegisterFiles files;
    std::vector<std::unique_ptr<Cluster>> resident;
    std::vector<Work> outliving;  // of clusters that are gone
    uint64_t clusters, next = 0;
    uint64_t resident_limit;
    size_t current = 0;  // of the resident clusters, which ran last

    explicit Machine(Launch& l) : launch(l), files(l.program->register_bytes) {
        const uint64_t size = launch.cluster.count();
        clusters = launch.grid.count() / size;
        resident_limit = std::max<uint64_t>(1, launch.options.max_resident / size);
    }
    bool done() const { return next == clusters && resident.empty(); }
};

namespace {

// The clusters of a grid are numbered along x, then y, then z.
Dim3 cluster_id(const Launch& launch, uint64_t number) {
    const uint32_t nx = launch.grid.x / launch.cluster.x, ny = launch.grid.y / launch.cluster.y;
    const auto rest = static_cast<uint32_t>(number / nx);
    return {static_cast<uint32_t>(number % nx), rest % ny, rest / ny};
}

// Registers a thread gets at launch, which PTX leaves to the assembler: what the file divides to, but never more than a
// setmaxnreg.inc asks for.
uint32_t registers_per_thread(const Launch& launch, uint32_t warps) {
    const uint32_t share = std::min(255u, 65536u / (warps * kLanes)) & ~7u;
    return launch.program->register_cap ? std::min(share, launch.program->register_cap) : share;
}

void admit(Machine& machine) {
    Launch& launch = machine.launch;
    const Dim3 shape = launch.cluster;
    auto cluster = std::make_unique<Cluster>();
    cluster->launch = &launch;
    cluster->number = machine.next++;
    cluster->id = cluster_id(launch, cluster->number);
    const uint32_t threads = static_cast<uint32_t>(launch.block.count()), warps = (threads + kLanes - 1) / kLanes;
    for (uint32_t rank = 0; rank < shape.count(); ++rank) {
        auto cta = std::make_unique<Cta>();
        cta->cluster = cluster.get();
        cta->launch = &launch;
        cta->rank = rank;
        cta->id = {cluster->id.x * shape.x + rank % shape.x, cluster->id.y * shape.y + rank / shape.x % shape.y,
                   cluster->id.z * shape.z + rank / (shape.x * shape.y)};
        cta->shared.resize(launch.program->static_shared_bytes + launch.dynamic_shared);
        uint32_t* words = reinterpret_cast<uint32_t*>(cta->shared.data());
        std::fill_n(words, cta->shared.size() / 4, kPoison);
        cta->warps.resize(warps);
        for (uint32_t w = 0; w < warps; ++w) {
            Warp& warp = cta->warps[w];
            warp.cta = cta.get();
            warp.program = launch.program;
            warp.index = w;
            warp.registers = machine.files.take();
            const size_t table = w * launch.program->ops.size();
            warp.counts = launch.counts.data() + table;
            warp.shared_bytes = launch.shared_bytes.data() + table;
            warp.shared_passes = launch.shared_passes.data() + table;
            warp.register_count = registers_per_thread(launch, warps);
            start(warp, threads - w * kLanes);
        }
        cluster->ctas.push_back(std::move(cta));
    }
    if (launch.options.check_races) {
        cluster->races = std::make_unique<race::Checker>(*cluster);
        cluster->lanes = std::make_unique<race::Lanes>(*cluster);
    }
    machine.resident.push_back(std::move(cluster));
}

// --- asynchronous work

// The works that may be done now: the first of each queue. An index into `pending`.
std::optional<size_t> choose_work(Cluster& cluster) {
    if (cluster.pending.empty()) return std::nullopt;
    std::vector<uint64_t> queues;
    std::vector<size_t> eligible;
    for (size_t i = 0; i < cluster.pending.size(); ++i) {
        const uint64_t queue = cluster.pending[i].queue;
        if (queue && std::find(queues.begin(), queues.end(), queue) != queues.end()) continue;
        if (queue) queues.push_back(queue);
        eligible.push_back(i);
    }
    if (cluster.launch->options.schedule == Schedule::Late) {
        const auto newest = std::find_if(eligible.rbegin(), eligible.rend(),
                                         [&](size_t i) { return !cluster.pending[i].may_outlive; });
        return newest == eligible.rend() ? eligible.back() : *newest;
    }
    return eligible[cluster.launch->random() % eligible.size()];
}

void perform(Cluster& cluster, size_t index) {
    Work work = std::move(cluster.pending[index]);
    cluster.pending.erase(cluster.pending.begin() + static_cast<ptrdiff_t>(index));
    try {
        work.perform();
    } catch (const Fault& fault) {
        cluster.launch->report({.kind = fault.kind,
                                .message = std::string(work.what) + ": " + fault.what(),
                                .at = work.origin,
                                .cta = cluster.ctas[work.origin.cta]->id});
        throw;
    }
    cluster.event();
}

// --- ends

void finish(Cta& cta) {
    Cluster& cluster = *cta.cluster;
    cta.finished = true;
    ++cluster.launch->finished_ctas;
    const bool strict = cluster.launch->options.strict_exit;
    for (const Work& work : cluster.pending)
        if (!work.may_outlive && (strict || !work.only_reads) &&
            (work.reads_cta == ~0u ? work.origin.cta : work.reads_cta) == cta.rank)
            cluster.launch->report({.kind = "exit-pending",
                                    .message = std::string("the CTA has exited before its ") + work.what + " was done",
                                    .at = work.origin,
                                    .cta = cta.id});
    check_tmem_freed(cta);
}

void retire(Machine& machine, Cluster& cluster) {
    if (machine.launch.options.schedule == Schedule::Late) {
        const auto outlives = [](const Work& work) { return work.may_outlive; };
        std::copy_if(cluster.pending.begin(), cluster.pending.end(), std::back_inserter(machine.outliving), outlives);
        std::erase_if(cluster.pending, outlives);
    }
    while (auto index = choose_work(cluster)) perform(cluster, *index);
    for (auto& cta : cluster.ctas)
        for (Warp& warp : cta->warps) machine.files.give_back(warp.registers);
    cluster.finished = true;
}

[[noreturn]] void give_up(Cluster& cluster, const char* kind, const char* why) {
    std::string text = why;
    Origin at{};
    for (auto& cta : cluster.ctas)
        for (Warp& warp : cta->warps) {
            if (warp.done()) continue;
            text += describe(warp);
            if (!warp.groups.empty())
                at = {static_cast<uint16_t>(cta->rank), static_cast<uint16_t>(warp.index), warp.groups.front().pc};
        }
    for (const Work& work : cluster.pending) text += std::string("\n  pending: ") + work.what;
    cluster.launch->report({.kind = kind, .message = text, .at = at, .cta = cluster.ctas[at.cta]->id});
    throw Fault(kind, why);
}

// --- one turn of a cluster

Slice turn(Cluster& cluster, Warp& warp, uint64_t budget) {
    const bool was_done = warp.done();
    const uint64_t executed = warp.executed;
    Slice slice;
    try {
        slice = run(warp, budget);
    } catch (const Fault& fault) {
        cluster.launch->report(
            {.kind = fault.kind,
             .message = fault.what(),
             .at = {static_cast<uint16_t>(warp.cta->rank), static_cast<uint16_t>(warp.index), warp.group->pc},
             .cta = warp.cta->id});
        throw;
    }
    cluster.launch->counters.instructions += warp.executed - executed;
    Cta& cta = *warp.cta;
    if (slice == Slice::Done && !was_done &&
        std::all_of(cta.warps.begin(), cta.warps.end(), [](const Warp& w) { return w.done(); }))
        finish(cta);
    return slice;
}

bool all_done(const Cluster& cluster) {
    return std::all_of(cluster.ctas.begin(), cluster.ctas.end(), [](const auto& cta) { return cta->finished; });
}

// Nobody in the cluster can run: do asynchronous work, or let bounded waits run out, or give up.
void unblock(Cluster& cluster) {
    if (auto index = choose_work(cluster)) return perform(cluster, *index);
    int released = 0;
    if (++cluster.stalled_rounds <= kMaxStalledRounds)
        for (auto& cta : cluster.ctas)
            for (Warp& warp : cta->warps) released += time_out(warp);
    if (!released) give_up(cluster, kDeadlock, "no warp can go on and no asynchronous work is pending:");
}

// Every warp once, in order.
Outcome round_robin(Cluster& cluster) {
    bool ran = false, polled = false;
    const uint64_t events = cluster.events;
    for (auto& cta : cluster.ctas)
        for (Warp& warp : cta->warps) {
            if (warp.done()) continue;
            const Slice slice = turn(cluster, warp, kTurn);
            ran |= slice == Slice::Ran || slice == Slice::Done;
            polled |= slice == Slice::Polled;
        }
    if (all_done(cluster)) return Outcome::Finished;
    if (ran || cluster.events != events) return Outcome::Progress;
    const bool held_back = std::all_of(cluster.pending.begin(), cluster.pending.end(),
                                       [](const Work& work) { return work.may_outlive; });
    const bool patient = held_back && cluster.launch->options.schedule == Schedule::Late &&
                         cluster.launch->polls < kPatience;
    if (!polled || (!cluster.pending.empty() && !patient)) {
        unblock(cluster);
        return Outcome::Progress;
    }
    return Outcome::Polling;
}

// A few turns of warps drawn at random, asynchronous work between them.
Outcome random_turns(Cluster& cluster) {
    std::mt19937_64& random = cluster.launch->random;
    std::vector<Warp*> live;
    for (auto& cta : cluster.ctas)
        for (Warp& warp : cta->warps)
            if (!warp.done() && runnable(warp)) live.push_back(&warp);
    if (live.empty()) {
        if (all_done(cluster)) return Outcome::Finished;
        unblock(cluster);
        return Outcome::Progress;
    }
    if (random() % 4 == 0)
        if (auto index = choose_work(cluster)) perform(cluster, *index);
    Warp& warp = *live[random() % live.size()];
    const Slice slice = turn(cluster, warp, 1 + random() % kFuzzTurn);
    if (slice == Slice::Polled && live.size() == 1 && !cluster.pending.empty()) unblock(cluster);
    if (all_done(cluster)) return Outcome::Finished;
    return slice == Slice::Polled ? Outcome::Polling : Outcome::Progress;
}

// One turn of one cluster.
void step(Machine& machine) {
    Launch& launch = machine.launch;
    const bool fuzz = launch.options.schedule == Schedule::Fuzz;
    const uint64_t limit = fuzz ? std::min<uint64_t>(machine.resident_limit, kFuzzResident) : 1;
    while (machine.resident.size() < limit && machine.next < machine.clusters) admit(machine);
    if (fuzz) machine.current = launch.random() % machine.resident.size();
    machine.current %= machine.resident.size();
    Cluster& cluster = *machine.resident[machine.current];
    const Outcome outcome = fuzz ? random_turns(cluster) : round_robin(cluster);
    if (launch.counters.instructions > launch.options.max_instructions)
        give_up(cluster, kDeadlock, "the launch has run away:");
    if (outcome == Outcome::Finished) {
        retire(machine, cluster);
        launch.polls = 0;
        machine.resident.erase(machine.resident.begin() + static_cast<ptrdiff_t>(machine.current));
    } else if (outcome == Outcome::Polling) {
        if (++launch.polls > kMaxPolls)
            give_up(cluster, kDeadlock, "warps poll memory that nobody changes any more:");
        // It may wait for a CTA that has not started: start the next one beside it while the device has room.
        ++machine.current;
        if (machine.resident.size() < machine.resident_limit && machine.next < machine.clusters) {
            admit(machine);
            machine.current = machine.resident.size() - 1;
        }
    }
}

// Goes on until the time is over or the launch is done.
void run_until(Machine& machine, std::chrono::steady_clock::time_point end) {
    // Turns are short in the fuzz schedule, and looking at the clock takes time.
    const uint32_t turns = machine.launch.options.schedule == Schedule::Fuzz ? kFuzzTurnsPerLook : 1;
    while (!machine.done() && std::chrono::steady_clock::now() < end)
        for (uint32_t i = 0; i < turns && !machine.done(); ++i) step(machine);
}

void finish(Machine& machine) {
    for (; !machine.outliving.empty(); machine.outliving.pop_back()) machine.outliving.back().perform();
}

// Of the same instructions; which of two comes first differs from run to run.
bool same(const Finding& a, const Finding& b) {
    if (a.kind != b.kind || a.has_other != b.has_other) return false;
    if (!a.has_other) return a.at.op == b.at.op;
    return std::minmax(a.at.op, a.other.op) == std::minmax(b.at.op, b.other.op);
}

}  // namespace

void Cluster::submit(Work work) {
    pending.push_back(std::move(work));
    if (launch->options.schedule == Schedule::Eager) perform(*this, pending.size() - 1);
}

void Launch::report(Finding finding) {
    for (Finding& known : findings)
        if (same(known, finding)) {
            ++known.times;
            return;
        }
    findings.push_back(std::move(finding));
}

Execution::Execution(Launch& launch) : launch_(launch) {
    launch.random.seed(launch.options.seed);
    const size_t warps = (launch.block.count() + kLanes - 1) / kLanes;
    for (auto* table : {&launch.counts, &launch.shared_bytes, &launch.shared_passes})
        table->assign(warps * launch.program->ops.size(), 0);
    machine_ = std::make_unique<Machine>(launch);
}
Execution::~Execution() = default;

// What ends a launch early is among its findings, wherever it was thrown.
template <class Action>
void Execution::keeping_faults(Action&& action) {
    const auto end = [&](const std::string& kind, const char* what) {
        if (launch_.findings.empty()) launch_.report({.kind = kind, .message = what, .cta = {0, 0, 0}});
        machine_.reset();
    };
    try {
        action();
    } catch (const Fault& fault) {
        end(fault.kind, fault.what());
    } catch (const std::exception& failure) {  // of the emulator itself: out of memory, say
        launch_.report({.kind = "engine", .message = failure.what(), .cta = {0, 0, 0}});
        machine_.reset();
    }
}

bool Execution::run(std::chrono::milliseconds slice) {
    keeping_faults([&] {
        if (!machine_) return;
        run_until(*machine_, std::chrono::steady_clock::now() + slice);
        if (!machine_->done()) return;
        finish(*machine_);
        machine_.reset();
    });
    return !machine_;
}

void Execution::give_up(const char* kind, const char* why) {
    keeping_faults([&] {
        if (!machine_) return;
        if (machine_->resident.empty()) throw Fault(kind, why);
        flash4::give_up(*machine_->resident[machine_->current % machine_->resident.size()], kind, why);
    });
}

}  // namespace flash4
