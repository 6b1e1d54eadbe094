// The machine's state: a launch runs clusters of CTAs of warps; a warp owns a register file of 32-lane registers.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <list>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "isa.h"
#include "lanes.h"
#include "race.h"

namespace flash4 {

// Every byte that nobody has written yet holds this pattern: NaN as f64, f32, f16, bf16 and both fp8 formats, and an
// address far outside everything as an integer.
inline constexpr uint32_t kPoison = 0x7FFF7FFFu;

struct Dim3 {
    uint32_t x = 1, y = 1, z = 1;
    uint64_t count() const { return uint64_t{x} * y * z; }
};

enum class Schedule : uint8_t { Eager, Late, Fuzz };

struct Options {
    Schedule schedule = Schedule::Eager;
    uint64_t seed = 0;
    bool check_races = true;
    bool strict_uninitialised = false;           // reading shared or tensor memory that nobody wrote is a finding
    bool strict_exit = false;                    // so is exiting before a bulk store has read its shared memory
    bool strict_wait_ld = false;                 // so is consuming a tcgen05.ld's register before tcgen05.wait::ld
    bool strict_lanes = false;  // tcgen05.wait orders a lane after its own loads and stores only, not the warp's
    uint32_t max_resident = 132;                 // CTAs that the device holds at a time
    uint64_t max_instructions = 20'000'000'000;  // of a launch, before it counts as run away
    int arch = 100;                              // 100 for sm_100a
};

// A per-lane constant or special register, set when a warp starts.
enum class InitKind : uint8_t {
    Value,          // `value` in all lanes
    SharedAddress,  // address of shared offset `value` of this CTA
    ParamAddress,   // address of byte `value` of the parameters
    TidX,
    TidY,
    TidZ,
    NtidX,
    NtidY,
    NtidZ,
    CtaidX,
    CtaidY,
    CtaidZ,
    NctaidX,
    NctaidY,
    NctaidZ,
    LaneId,
    WarpId,
    NwarpId,
    SmId,
    NsmId,
    GridId,
    ClusterCtaidX,
    ClusterCtaidY,
    ClusterCtaidZ,
    ClusterNctaidX,
    ClusterNctaidY,
    ClusterNctaidZ,
    ClusterCtaRank,
    ClusterNctaRank,
    ClusteridX,
    ClusteridY,
    ClusteridZ,
    NclusteridX,
    NclusteridY,
    NclusteridZ,
    IsExplicitCluster,
    DynamicSmemSize,
    TotalSmemSize,
    LanemaskEq,
    LanemaskLt,
    LanemaskLe,
    LanemaskGt,
    LanemaskGe,
};
struct Init {
    InitKind kind;
    uint8_t bytes;  // 4 or 8 a lane
    uint32_t offset;
    int64_t value;
};

struct Program {
    std::vector<Op> ops;
    std::vector<uint32_t> regs;
    std::vector<int64_t> attrs;
    std::vector<Init> inits;
    std::vector<uint32_t> reconverge;  // for each op that may branch: where its lanes meet again
    uint32_t register_bytes = 0;
    uint32_t static_shared_bytes = 0;  // offset at which dynamic shared memory begins
    uint32_t register_cap = 0;         // .maxnreg or what the first setmaxnreg.inc implies, or 0
};

// Where an access or a piece of asynchronous work came from.
struct Origin {
    uint16_t cta;   // rank in the cluster
    uint16_t warp;  // index in the CTA
    uint32_t op;    // index in the program
};

struct Cta;
struct Cluster;
struct Launch;

// Lanes of one branch that wait for each other where its two sides meet.
struct Join {
    uint32_t at;    // program counter of the meeting point
    Mask expected;  // lanes that have neither arrived nor exited
    Mask arrived;
    std::shared_ptr<Join> outer;
};

// Lanes of a warp that share a program counter.
struct Group {
    uint32_t pc = 0;
    Mask mask = 0;
    std::shared_ptr<Join> join;   // innermost
    uint64_t blocked_at = ~0ull;  // the cluster's event count when it blocked; ~0: not blocked
    bool timed_out = false;       // the try_wait it is blocked in is to return false
    bool at_warp_sync = false;    // blocked in bar.warp.sync
};

struct Warp {
    Cta* cta = nullptr;
    const Program* program = nullptr;
    uint32_t index = 0;                // within the CTA
    uint8_t* registers = nullptr;      // 64-byte aligned
    Group* group = nullptr;            // the lanes that run now
    std::list<Group> groups;           // all that run or are blocked; lanes that wait at a join are in none
    Mask exited = 0;                   // lanes that are gone, and those that the block never had
    Mask carry = 0;                    // the condition-code register of add.cc and its like
    uint32_t register_count = 0;       // of each thread, as setmaxnreg last set it
    uint64_t cluster_arrived = ~0ull;  // the cluster barrier's generation at which it arrived last; ~0: never
    uint64_t executed = 0;
    // What its first lane and the others were ordered after at their last releasing fence.
    race::Clock fenced_first, fenced_others;
    uint64_t* counts = nullptr;  // executed instructions by program counter
    uint64_t *shared_bytes = nullptr, *shared_passes = nullptr;  // and what these have moved, see Launch

    // --- owned by the asynchronous units, see async.h, wgmma.cpp, tcgen05.cpp, tma.cpp
    struct Units;
    std::shared_ptr<Units> units;
    // Registers that asynchronous work still writes or reads: the step loop calls `check_busy` when this is not 0.
    uint32_t busy_registers = 0;

    uint32_t* u32(uint32_t offset) { return reinterpret_cast<uint32_t*>(registers + offset); }
    int32_t* s32(uint32_t offset) { return reinterpret_cast<int32_t*>(registers + offset); }
    float* f32(uint32_t offset) { return reinterpret_cast<float*>(registers + offset); }
    uint64_t* u64(uint32_t offset) { return reinterpret_cast<uint64_t*>(registers + offset); }
    int64_t* s64(uint32_t offset) { return reinterpret_cast<int64_t*>(registers + offset); }
    double* f64(uint32_t offset) { return reinterpret_cast<double*>(registers + offset); }
    Mask& predicate(uint32_t offset) { return *u32(offset); }  // one bit per lane

    Origin origin(const Op& op) const;
    bool done() const { return exited == kAllLanes; }
};

// Calls body(lane) for the lanes of `mask`; the full warp in a loop that the compiler vectorises.
template <class Body>
inline __attribute__((always_inline)) void for_lanes(Mask mask, Body&& body) {
    if (mask == kAllLanes) {
#pragma GCC ivdep
        for (int lane = 0; lane < kLanes; ++lane) body(lane);
    } else {
        for (Mask rest = mask; rest; rest &= rest - 1) body(__builtin_ctz(rest));
    }
}
inline int first_lane(Mask mask) { return __builtin_ctz(mask); }

// Throws unless all lanes execute the instruction, which is an aligned one.
inline void need_whole_warp(Mask mask, const char* what) {
    if (mask != kAllLanes) throw Fault("divergence", std::string(what) + " by a part of the warp only");
}

struct NamedBarrier {
    uint32_t expected = 0;  // threads; 0 while nobody is at it
    uint32_t arrived = 0;
    Mask waiting[32] = {};           // lanes of each warp that wait in this generation
    Mask released[32] = {};          // lanes that waited in a completed generation and have not gone on yet
    uint32_t voters = 0, votes = 0;  // of barrier.red: threads that gave a predicate, and whose holds
    uint32_t voters_of[32] = {};     // what a released warp has yet to read of them
    uint32_t votes_of[32] = {};
    race::Clock clock, completed;
};

// An mbarrier object; its operations are in barrier.h.
struct MBarrier {
    uint32_t expected = 0;  // arrivals of a whole phase
    uint32_t pending = 0;   // arrivals still missing in this phase
    int64_t tx = 0;         // bytes announced and not yet arrived (may be negative before the announcement)
    uint64_t phase = 0;     // completed phases
    // A barrier that other CTAs or the asynchronous proxy arrive at must have been made visible to them
    // (PTX ISA: fence.mbarrier_init, fence.proxy.async) by the warp that initialised it.
    const Warp* initialised_by = nullptr;
    bool fenced = false;
    race::Clock clock;      // released into the current phase
    race::Clock completed;  // of the last completed phase
};

inline constexpr uint32_t kTmemLanes = 128, kTmemColumns = 512;
struct TmemGrant {
    uint32_t column, columns;
};

struct Cta {
    Cluster* cluster = nullptr;
    Launch* launch = nullptr;
    uint32_t rank = 0;  // in the cluster
    Dim3 id;
    std::vector<uint8_t> shared;  // by offset; [0, kSharedBase) belongs to the system
    std::unordered_map<uint32_t, std::unique_ptr<MBarrier>> mbarriers;  // by offset
    std::array<NamedBarrier, 16> named;
    std::vector<uint32_t> tmem;               // [column][lane]; empty before the first tcgen05.alloc
    std::vector<uint8_t> tmem_owner;          // by column: 0 free, else allocation number
    std::vector<TmemGrant> tmem_pair_grants;  // of cta_group::2, kept in the even CTA of the pair
    uint32_t tmem_pair_taken = 0;             // how many of them this CTA has taken
    bool tmem_relinquished = false;
    Origin tmem_allocated_at{};  // by the last tcgen05.alloc
    // What follows the tensor core's last work at once; gone when that is done.
    std::weak_ptr<std::vector<std::function<void()>>> tensor_core_followers;
    std::vector<Warp> warps;
    uint32_t free_registers = 0;  // per-warp units given back by setmaxnreg.dec
    bool finished = false;
};

inline constexpr uint32_t kSharedBase = 1024;
inline constexpr int kRankShift = 24;  // a shared::cluster address is rank << 24 | offset

// A piece of asynchronous work that some unit will do later. See async.h.
struct Work {
    uint64_t queue;  // works of one queue run in order; 0: not ordered with anything
    Origin origin;
    const char* what;  // "TMA load", for reports
    std::function<void()> perform;
    uint32_t reads_cta = ~0u;  // rank whose shared or tensor memory it uses, for exit checks
    bool only_reads = false;   // a store's first half: it reads shared memory and changes none
    bool may_outlive = false;  // its remaining effect touches global memory only, so CTAs may exit before it
};

struct Cluster {
    Launch* launch = nullptr;
    uint64_t number = 0;
    Dim3 id;
    std::vector<std::unique_ptr<Cta>> ctas;
    std::deque<Work> pending;
    uint64_t events = 1;  // counts everything that may let a blocked warp go on
    uint32_t stalled_rounds = 0;
    std::unique_ptr<race::Checker> races;  // null: not checked
    std::unique_ptr<race::Lanes> lanes;    // null where `races` is
    // barrier.cluster: arrived threads, generation, ...
    uint32_t cluster_arrived = 0;
    uint64_t cluster_generation = 0;
    race::Clock cluster_clock, cluster_completed;
    std::unordered_map<uint64_t, race::Clock>
        flag_clocks;  // released by strong accesses, by host address; see memory.h
    bool finished = false;

    void event();
    // Queues work; in the eager schedule it is done at once.
    void submit(Work work);
};

struct Region {
    uint64_t begin, end;
};

struct Finding {
    std::string kind, message;
    Origin at{}, other{};
    Dim3 cta;  // of `at`
    bool has_other = false;
    uint64_t times = 1;
};

struct Counters {
    uint64_t shared_read = 0, shared_written = 0, global_read = 0, global_written = 0;  // bytes
    uint64_t mma = 0, mma_flops = 0, barrier_waits = 0, instructions = 0;
    uint64_t async_bytes = 0;  // moved by TMA and bulk copies
};

// The launch's parameters, aligned as tensor maps need it.
class Parameters {
public:
    void assign(const uint8_t* bytes, size_t count) {
        lines_.resize((count + sizeof(Line) - 1) / sizeof(Line));
        std::copy_n(bytes, count, data());
        size_ = count;
    }
    uint8_t* data() { return reinterpret_cast<uint8_t*>(lines_.data()); }
    const uint8_t* data() const { return reinterpret_cast<const uint8_t*>(lines_.data()); }
    size_t size() const { return size_; }

private:
    struct alignas(64) Line {
        uint8_t bytes[64];
    };
    std::vector<Line> lines_;
    size_t size_ = 0;
};

struct Launch {
    const Program* program = nullptr;
    Dim3 grid, block, cluster;
    uint32_t dynamic_shared = 0;
    Parameters params;
    std::vector<Region> regions;  // global memory that the kernel may touch, sorted
    bool bounded = false;         // whether it may touch nothing else; if not, anything that a process can own
    Options options;
    std::mt19937_64 random;
    Counters counters;
    std::vector<uint64_t> counts;  // [warp in CTA][op]
    // [warp in CTA][op]: bytes of shared memory that the instruction read or wrote, itself or through the unit that it
    // gave work to, and the accesses to its 32 banks at once that this takes; see banks.h. What a matrix descriptor
    // names counts once an instruction.
    std::vector<uint64_t> shared_bytes, shared_passes;
    std::vector<Finding> findings;
    uint64_t finished_ctas = 0;
    uint64_t polls = 0;  // vain polls since anything happened anywhere

    void report(Finding finding);  // merges repeats
};

inline void Cluster::event() {
    ++events;
    stalled_rounds = 0;
    launch->polls = 0;
}
inline Origin Warp::origin(const Op& op) const {
    return {static_cast<uint16_t>(cta->rank), static_cast<uint16_t>(index), op.index};
}

}  // namespace flash4
