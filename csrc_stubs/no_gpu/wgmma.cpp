// Warpgroup matrix products (PTX ISA, Asynchronous Warpgroup Level Matrix Multiply-Accumulate). Each warp of the group
// computes its 16 rows by itself, when the work is performed: until then its registers are busy.
#include <algorithm>
#include <cstring>
#include <span>

#include "async.h"
#include "banks.h"
#include "fragment.h"

namespace flash4 {
namespace {

constexpr uint32_t kRows = kFragmentRows;  // of a warp

// reg: accumulators, A (four registers or a descriptor), descriptor of B, scale-d.
// attr: N, element of A, of B, accumulator, A in registers, negate A, negate B, A MN-major, B MN-major, saturate.
struct Shape {
    uint32_t n;
    Element a, b;
    Accumulator accumulator;
    bool a_in_registers, negate_a, negate_b, a_mn, b_mn, saturate;

    explicit Shape(const Op& op)
        : n(static_cast<uint32_t>(op.attr[0])),
          a(static_cast<Element>(op.attr[1])),
          b(static_cast<Element>(op.attr[2])),
          accumulator(static_cast<Accumulator>(op.attr[3])),
          a_in_registers(op.attr[4]),
          negate_a(op.attr[5]),
          negate_b(op.attr[6]),
          a_mn(op.attr[7]),
          b_mn(op.attr[8]),
          saturate(op.attr[9]) {}

    uint32_t accumulators() const { return accumulator_registers(accumulator, n); }
    uint32_t a_registers() const { return a_in_registers ? 4 : 1; }
};

// What an instruction takes along when it is issued.
struct Job {
    Warp* warp;
    const Op* op;
    race::Ticket ticket;
    uint64_t a, b;  // descriptors
    bool accumulate;
};

void perform(const Job& job) {
    static thread_local Tile a, b;
    alignas(64) static thread_local Sums sums;
    Warp& warp = *job.warp;
    Cta& cta = *warp.cta;
    const Op& op = *job.op;
    const Shape shape(op);
    const uint32_t first = warp.index % 4 * kRows;
    if (shape.a_in_registers) read_fragment(warp, op.reg + shape.accumulators(), shape.a, kRows, kTileBytes, a);
    else gather(job.ticket, cta, wgmma_matrix(job.a), shape.a, shape.a_mn, {.first = first, .count = kRows}, a);
    gather(job.ticket, cta, wgmma_matrix(job.b), shape.b, shape.b_mn, {.first = 0, .count = shape.n}, b);
    if (shape.negate_a != shape.negate_b) negate(a, shape.a);
    if (job.accumulate && shape.accumulator != Accumulator::S32)
        load_sums(warp, op.reg, shape.accumulator, shape.n, sums);
    else std::memset(sums, 0, sizeof sums);
    for (uint32_t row = 0; row < kRows; row += 4)
        multiply_add(a.value + row, b.value, tile_k(shape.a), shape.n, sums[row]);
    if (shape.accumulator == Accumulator::S32)
        add_integer_sums(warp, op.reg, job.accumulate, shape.saturate, shape.n, sums);
    else store_sums(warp, op.reg, shape.accumulator, shape.n, sums);
}

void require_whole_warp(const Warp& warp, Mask mask) {
    if (mask != kAllLanes) throw Fault("wgmma", "executed by part of the warp " + std::to_string(warp.index));
    if (warp.cta->launch->options.arch != 90) throw Fault("unsupported", "wgmma exists on sm_90a only");
}

// --- registers in use

// Busy entries of an instruction's accumulators, then of its fragment of A.
template <class Body>
void for_registers(Warp::Units& units, const Op& op, Body&& body) {
    const Shape shape(op);
    for (uint32_t i = 0; i < shape.accumulators(); ++i) body(units.wgmma_registers[register_unit(op.reg[i])], true);
    if (!shape.a_in_registers) return;
    for (uint32_t i = 0; i < 4; ++i)
        body(units.wgmma_registers[register_unit(op.reg[shape.accumulators() + i])], false);
}

void occupy(Warp& warp, const Op& op) {
    Warp::Units& units = *warp.units;
    for_registers(units, op, [&](Warp::Units::Busy& busy, bool accumulates) {
        ++(accumulates ? busy.writes : busy.reads);
        if (accumulates) busy.writer = &op;
    });
    units.wgmma_uses.back().push_back(&op);
    ++warp.busy_registers;
}

void release_oldest_group(Warp& warp) {
    Warp::Units& units = *warp.units;
    for (const Op* op : units.wgmma_uses.front()) {
        for_registers(units, *op,
                      [](Warp::Units::Busy& busy, bool accumulates) { --(accumulates ? busy.writes : busy.reads); });
        --warp.busy_registers;
    }
    units.wgmma_uses.pop_front();
}

void report_register(Warp& warp, const Op& op, const std::string& what, const Op* other) {
    Finding finding{.kind = "wgmma-register",
                    .message = what + ", before a wgmma.wait_group",
                    .at = warp.origin(op),
                    .cta = warp.cta->id};
    if (other) {
        finding.other = warp.origin(*other);
        finding.has_other = true;
    }
    warp.cta->launch->report(std::move(finding));
}

void report_fence(Warp& warp, const Op& op, const char* what) {
    warp.cta->launch->report({.kind = "wgmma-fence", .message = what, .at = warp.origin(op), .cta = warp.cta->id});
}

// --- instructions

// From the first one on all that the warp writes is watched.
void watch_registers(Warp& warp) {
    auto& registers = warp.units->wgmma_registers;
    if (!registers.empty()) return;
    registers.resize(register_unit(warp.program->register_bytes) + 1);
    ++warp.busy_registers;
}

Step fence(Warp& warp, const Op&, Mask mask) {
    require_whole_warp(warp, mask);
    watch_registers(warp);
    Warp::Units& units = *warp.units;
    for (uint32_t unit : units.wgmma_unfenced) units.wgmma_registers[unit].unfenced = false;
    units.wgmma_unfenced.clear();
    return Step::Next;
}

Step mma(Warp& warp, const Op& op, Mask mask) {
    require_whole_warp(warp, mask);
    const Shape shape(op);
    const uint32_t* operands = op.reg + shape.accumulators();
    Cta& cta = *warp.cta;
    Warp::Units& units = *warp.units;
    if (units.wgmma_registers.empty()) {
        report_fence(warp, op, "no wgmma.fence before the warp's first wgmma.mma_async");
        watch_registers(warp);
    }
    Job job{.warp = &warp,
            .op = &op,
            .ticket = {},
            .a = shape.a_in_registers ? 0 : warp.u64(operands[0])[0],
            .b = warp.u64(operands[shape.a_registers()])[0],
            .accumulate = (warp.predicate(operands[shape.a_registers() + 1]) & 1) != 0};
    if (cta.cluster->races) job.ticket = cta.cluster->races->issue(warp, op, kAllLanes, race::Unit::Wgmma);
    occupy(warp, op);
    std::shared_ptr<CommitGroup> group = units.wgmma.open;
    ++group->pending;
    group->epoch = job.ticket.epoch;
    cta.launch->counters.mma += warp.index % 4 == 0;
    cta.launch->counters.mma_flops += 2ull * kRows * shape.n * tile_k(shape.a);
    // The four warps of a group read B together.
    count_shared(warp, op, in_rows(kTileBytes * ((shape.a_in_registers ? 0 : kRows) + (warp.index % 4 ? 0 : shape.n))));
    cta.cluster->submit({.queue = queue_of(QueueKind::Wgmma, cta, warp.index),
                         .origin = warp.origin(op),
                         .what = "wgmma.mma_async",
                         .perform =
                             [job, group] {
                                 perform(job);
                                 --group->pending;
                             },
                         .reads_cta = cta.rank});
    return Step::Next;
}

Step commit(Warp& warp, const Op&, Mask mask) {
    require_whole_warp(warp, mask);
    GroupQueue& groups = warp.units->wgmma;
    warp.units->wgmma_epochs.push_back(groups.open->epoch);
    groups.committed.push_back(std::move(groups.open));
    groups.open = std::make_shared<CommitGroup>();
    warp.units->wgmma_uses.emplace_back();
    warp.cta->cluster->event();
    return Step::Next;
}

std::span<Warp> warpgroup_of(Warp& warp) {
    std::vector<Warp>& warps = warp.cta->warps;
    const size_t first = warp.index / 4 * 4;
    return std::span(warps).subspan(first, std::min<size_t>(4, warps.size() - first));
}

// Whether a warp's part of group number `group` is done.
bool part_is_done(const Warp& warp, size_t group) {
    const auto& committed = warp.units->wgmma.committed;
    const size_t total = warp.units->wgmma_epochs.size(), first = total - committed.size();
    return group < first || (group < total && !committed[group - first]->pending);
}

// A group is the warpgroup's (PTX ISA: wgmma.commit_group): it is complete when the parts of all four warps are, and
// who waits for it is ordered after them all. attr: how many of the newest groups may still be pending.
Step wait(Warp& warp, const Op& op, Mask mask) {
    require_whole_warp(warp, mask);
    auto& committed = warp.units->wgmma.committed;
    while (committed.size() > static_cast<size_t>(op.attr[0])) {
        const size_t group = warp.units->wgmma_epochs.size() - committed.size();
        const auto parts = warpgroup_of(warp);
        if (!std::all_of(parts.begin(), parts.end(), [&](const Warp& part) { return part_is_done(part, group); }))
            return Step::Blocked;
        if (race::Checker* races = warp.cta->cluster->races.get())
            for (const Warp& part : parts)
                races->join(warp, kAllLanes, part, race::Unit::Wgmma, part.units->wgmma_epochs[group]);
        committed.pop_front();
        release_oldest_group(warp);
    }
    return Step::Next;
}

FLASH4_OP("wgmma.fence", Sync, fence);
FLASH4_OP("wgmma.mma_async", Mma, mma);
FLASH4_OP("wgmma.commit_group", Sync, commit);
FLASH4_OP("wgmma.wait_group", Sync, wait);

// Accumulators in flight may be named only by a product of the same shape that goes on accumulating in them.
void check_product(Warp& warp, const Op& op) {
    const Shape shape(op);
    bool unfenced = false;
    for_registers(*warp.units, op, [&](const Warp::Units::Busy& busy, bool accumulates) {
        unfenced |= busy.unfenced;
        if (accumulates && busy.reads)
            report_register(warp, op, "accumulates in a register that another wgmma reads as A", nullptr);
        if (!busy.writes) return;
        const Shape other(*busy.writer);
        if (!accumulates) report_register(warp, op, "reads A from an accumulator in flight", busy.writer);
        else if (other.n != shape.n || other.accumulator != shape.accumulator)
            report_register(warp, op, "accumulates where a wgmma of another shape is in flight", busy.writer);
    });
    if (unfenced) report_fence(warp, op, "no wgmma.fence since one of its registers was written");
}

bool written(const Op& op, uint32_t i) { return i < 32 && op.writes >> i & 1; }

// A move keeps what its source was: compilers move registers about after the fence, which costs no instruction in the
// end.
bool moves_fenced(const Warp::Units& units, const Op& op) {
    if (op.pipe != Pipe::Move) return false;
    for (uint32_t i = 0; i < op.regs; ++i)
        if (op.reg[i] != kNoRegister && !written(op, i) && units.wgmma_registers[register_unit(op.reg[i])].unfenced)
            return false;
    return true;
}

void check_use(Warp& warp, const Op& op, const Warp::Units::Busy& busy, bool writes) {
    if (busy.writes) report_register(warp, op, "uses an accumulator in flight", busy.writer);
    else if (busy.reads && writes)
        report_register(warp, op, "overwrites a register that a wgmma in flight reads as A", nullptr);
}

}  // namespace

void check_wgmma_registers(Warp& warp, const Op& op) {
    Warp::Units& units = *warp.units;
    if (units.wgmma_registers.empty()) return;
    if (op.run == &mma) return check_product(warp, op);
    const bool fenced = moves_fenced(units, op);
    for (uint32_t i = 0; i < op.regs; ++i) {
        if (op.reg[i] == kNoRegister) continue;
        const uint32_t unit = register_unit(op.reg[i]);
        Warp::Units::Busy& busy = units.wgmma_registers[unit];
        check_use(warp, op, busy, written(op, i));
        if (!written(op, i) || fenced || busy.unfenced) continue;
        busy.unfenced = true;
        units.wgmma_unfenced.push_back(unit);
    }
}

}  // namespace flash4
