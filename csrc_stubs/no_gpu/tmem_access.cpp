// Moves between registers and tensor memory (PTX ISA, tcgen05.ld, tcgen05.st and tcgen05.wait). Both are asynchronous:
// a load takes its values when it is issued but is ordered before the warp only by wait::ld or when a loaded register
// is consumed; a store is done later, and waited for by wait::st.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "async.h"
#include "number.h"
#include "tcgen05.h"

namespace flash4 {
namespace {

// In the order of `SHAPES` in flash4_torch/emulator/lower/tensor.py.
enum class Pattern : uint8_t { Lanes32x32, Lanes16x64, Lanes16x128, Lanes16x256, Lanes16x32x2 };

// reg: address, then the data; attr: offset, pattern, two 16-bit halves in two columns, distance of the second half of
// 16x32bx2.
struct Access {
    Pattern pattern;
    bool halves;
    uint32_t registers, split, lane, column;

    // `others`: registers besides the data.
    Access(Warp& warp, const Op& op, uint32_t others = 1)
        : pattern(static_cast<Pattern>(op.attr[1])),
          halves(op.attr[2]),
          registers(op.regs - others),
          split(static_cast<uint32_t>(op.attr[3])),
          lane(0),
          column(0) {
        const uint32_t* addresses = warp.u32(op.reg[0]);
        for (int i = 1; i < kLanes; ++i)
            if (addresses[i] != addresses[0])
                throw Fault("tcgen05", "the lanes of a warp give different tensor memory addresses");
        const TmemAddress address(addresses[0] + static_cast<uint32_t>(op.attr[0]));
        lane = address.lane;
        column = address.column;
        const uint32_t quarter = warp.index % 4 * kLanes, half = lane - quarter;
        if (half != 0 && !(half == 16 && pattern != Pattern::Lanes32x32))
            throw Fault("tmem", "warp " + std::to_string(warp.index) + " accesses lane " + std::to_string(lane) +
                                    " of tensor memory; its lanes are " + std::to_string(quarter) + " to " +
                                    std::to_string(quarter + kLanes - 1));
    }

    // Columns next to each other that are touched; 16x32bx2 touches as many again `split` columns on.
    uint32_t columns() const {
        uint32_t words = registers;
        if (pattern == Pattern::Lanes16x64 || pattern == Pattern::Lanes16x128 || pattern == Pattern::Lanes16x256)
            words *= 2;
        return halves ? 2 * words : words;
    }
    uint32_t quarter() const { return 1u << lane / kLanes; }
};

struct Cell {
    uint32_t lane, column;  // relative to the access
};

// Where register i of a thread lies (PTX ISA, tcgen05 Data Movement Shape).
Cell cell(const Access& access, uint32_t i, uint32_t thread) {
    const uint32_t scale = access.halves ? 2 : 1;
    switch (access.pattern) {
        case Pattern::Lanes32x32: return {thread, i * scale};
        case Pattern::Lanes16x64: return {thread / 4 + thread % 2 * 8, (thread / 2 % 2 + i * 2) * scale};
        case Pattern::Lanes16x128: return {thread / 4 + i % 2 * 8, (thread % 4 + i / 2 * 4) * scale};
        case Pattern::Lanes16x256: return {thread / 4 + i / 2 % 2 * 8, (thread % 4 * 2 + i % 2 + i / 4 * 8) * scale};
        case Pattern::Lanes16x32x2: return {thread % 16, i * scale + thread / 16 * access.split};
    }
    return {};
}

template <class Body>
void for_ranges(const Access& access, Body&& body) {
    body(access.column, access.columns());
    if (access.pattern == Pattern::Lanes16x32x2) body(access.column + access.split, access.columns());
}

// The 32 lanes' word of register i, one by one or as a row.
void load_register(Cta& cta, const Access& access, uint32_t i, uint32_t* to) {
    if (access.pattern == Pattern::Lanes32x32 && !access.halves) {
        std::memcpy(to, tmem_column(cta, access.column + i) + access.lane, kLanes * 4);
        return;
    }
    for (uint32_t thread = 0; thread < kLanes; ++thread) {
        const Cell c = cell(access, i, thread);
        const uint32_t* from = tmem_column(cta, access.column + c.column) + access.lane + c.lane;
        to[thread] = access.halves ? (from[0] & 0xFFFFu) | from[kTmemLanes] << 16 : from[0];
    }
}

void store_register(Cta& cta, const Access& access, uint32_t i, const uint32_t* from) {
    if (access.pattern == Pattern::Lanes32x32 && !access.halves) {
        std::memcpy(tmem_column(cta, access.column + i) + access.lane, from, kLanes * 4);
        return;
    }
    for (uint32_t thread = 0; thread < kLanes; ++thread) {
        const Cell c = cell(access, i, thread);
        uint32_t* to = tmem_column(cta, access.column + c.column) + access.lane + c.lane;
        if (access.halves) {
            to[0] = from[thread] & 0xFFFFu;
            to[kTmemLanes] = from[thread] >> 16;
        } else {
            to[0] = from[thread];
        }
    }
}

// --- registers that hold loaded values

void mark(Warp& warp, uint32_t reg, uint32_t epoch_plus_1) {
    Warp::Units& units = *warp.units;
    if (units.tmem_loaded.empty()) units.tmem_loaded.resize(register_unit(warp.program->register_bytes) + 1);
    uint32_t& loaded = units.tmem_loaded[register_unit(reg)];
    if (!loaded && epoch_plus_1) {
        units.tmem_loaded_units.push_back(register_unit(reg));
        ++warp.busy_registers;
    }
    loaded = epoch_plus_1;
}

// Forgets the registers of loads up to an epoch, and those that have been overwritten.
void unmark(Warp& warp, uint32_t epoch_plus_1) {
    Warp::Units& units = *warp.units;
    auto& kept = units.tmem_loaded_units;
    warp.busy_registers -= static_cast<uint32_t>(std::erase_if(kept, [&](uint32_t unit) {
        uint32_t& loaded = units.tmem_loaded[unit];
        if (loaded > epoch_plus_1) return false;
        loaded = 0;
        return true;
    }));
}

// PTX leaves open whether an aligned wait, which all lanes reach together, orders each after the others' loads and
// stores. If not, that is for bar.warp.sync; what the first lane does itself shares a granule with the others.
Mask who_waits(const Warp& warp) { return warp.cta->launch->options.strict_lanes ? ~1u : kAllLanes; }

void order_loads(Warp& warp, uint32_t epoch) {
    if (race::Checker* races = warp.cta->cluster->races.get(); races && epoch)
        races->join(warp, who_waits(warp), race::Unit::TmemLoad, epoch);
    unmark(warp, epoch + 1);
}

// --- instructions

// Takes what `access` names; returns the load's epoch + 1, or 0 where nobody watches registers.
uint32_t take(Warp& warp, const Op& op, const Access& access) {
    Cta& cta = *warp.cta;
    race::Checker* races = cta.cluster->races.get();
    race::Ticket ticket;
    if (races) ticket = races->issue(warp, op, kAllLanes, race::Unit::TmemLoad);
    for_ranges(access, [&](uint32_t column, uint32_t columns) {
        require_allocated(cta, column, columns);
        if (races) races->read_tmem(ticket, cta, access.quarter(), column, columns);
    });
    warp.units->tmem_load.epoch = ticket.epoch;
    const bool watched = races || cta.launch->options.strict_wait_ld;
    for (uint32_t i = 0; i < access.registers; ++i) {
        const uint32_t reg = op.reg[i + 1];
        if (reg == kNoRegister) continue;
        load_register(cta, access, i, warp.u32(reg));
        if (watched) mark(warp, reg, ticket.epoch + 1);
    }
    return watched ? ticket.epoch + 1 : 0;
}

Step load(Warp& warp, const Op& op, Mask mask) {
    require_tensor_memory(warp);
    require_whole_warp(warp, mask);
    take(warp, op, Access(warp, op));
    return Step::Next;
}

// Loads, and gives each thread the least or greatest of its own; NaN wins where asked for, else it loses. +0 is more
// than -0. reg: as for a load, then the result; attr: as for a load, then 1 for the maximum, .abs, .NaN.
Step load_reduced(Warp& warp, const Op& op, Mask mask) {
    require_tensor_memory(warp);
    require_whole_warp(warp, mask);
    if (warp.cta->launch->options.arch != 103) throw Fault("unsupported", "tcgen05.ld.red exists on sm_103a only");
    const Access access(warp, op, 2);
    const uint32_t epoch = take(warp, op, access), result = op.reg[op.regs - 1];
    const bool maximum = op.attr[4], absolute = op.attr[5], nan_wins = op.attr[6];
    uint32_t words[kLanes];
    for (uint32_t i = 0; i < access.registers; ++i) {
        load_register(*warp.cta, access, i, words);
        for (int lane = 0; lane < kLanes; ++lane) {
            uint32_t& best = warp.u32(result)[lane];
            const uint32_t word = words[lane] & (absolute ? 0x7FFFFFFFu : ~0u);
            const float x = number::real(word), y = number::real(i ? best : word);
            const bool less = x < y || (x == y && std::signbit(x) > std::signbit(y));
            const bool more = x > y || (x == y && std::signbit(x) < std::signbit(y));
            const bool wins = std::isnan(x) ? nan_wins : std::isnan(y) ? !nan_wins : maximum ? more : less;
            if (i == 0 || wins) best = std::isnan(x) ? number::kNan32 : word;
        }
    }
    if (epoch) mark(warp, result, epoch);
    return Step::Next;
}

// A store on its way.
struct Store {
    Warp* warp;
    const Op* op;
    Access access;
    race::Ticket ticket;
    std::vector<uint32_t> words;  // [register][lane]
};

void perform(const Store& store) {
    Cta& cta = *store.warp->cta;
    for_ranges(store.access, [&](uint32_t column, uint32_t columns) {
        require_allocated(cta, column, columns);
        if (cta.cluster->races)
            cta.cluster->races->write_tmem(store.ticket, cta, store.access.quarter(), column, columns);
    });
    for (uint32_t i = 0; i < store.access.registers; ++i)
        store_register(cta, store.access, i, store.words.data() + i * kLanes);
    --store.warp->units->tmem_store.pending;
}

Step store(Warp& warp, const Op& op, Mask mask) {
    require_tensor_memory(warp);
    require_whole_warp(warp, mask);
    Cta& cta = *warp.cta;
    Store job{.warp = &warp,
              .op = &op,
              .access = Access(warp, op),
              .ticket = {},
              .words = std::vector<uint32_t>((op.regs - 1u) * kLanes)};
    for (uint32_t i = 0; i < job.access.registers; ++i)
        std::memcpy(job.words.data() + i * kLanes, warp.u32(op.reg[i + 1]), kLanes * 4);
    CommitGroup& pending = warp.units->tmem_store;
    if (cta.cluster->races) job.ticket = cta.cluster->races->issue(warp, op, kAllLanes, race::Unit::TmemStore);
    pending.epoch = job.ticket.epoch;
    ++pending.pending;
    cta.cluster->submit({.queue = queue_of(QueueKind::TmemStore, cta, warp.index),
                         .origin = warp.origin(op),
                         .what = "tcgen05.st",
                         .perform = [job = std::move(job)] { perform(job); },
                         .reads_cta = cta.rank});
    return Step::Next;
}

Step wait_load(Warp& warp, const Op&, Mask mask) {
    require_whole_warp(warp, mask);
    order_loads(warp, warp.units->tmem_load.epoch);
    return Step::Next;
}

Step wait_store(Warp& warp, const Op&, Mask mask) {
    require_whole_warp(warp, mask);
    const CommitGroup& stores = warp.units->tmem_store;
    if (stores.pending) return Step::Blocked;
    if (warp.cta->cluster->races && stores.epoch)
        warp.cta->cluster->races->join(warp, who_waits(warp), race::Unit::TmemStore, stores.epoch);
    return Step::Next;
}

FLASH4_OP("tcgen05.ld", Memory, load);
FLASH4_OP("tcgen05.ld.red", Memory, load_reduced);
FLASH4_OP("tcgen05.st", Memory, store);
FLASH4_OP("tcgen05.wait::ld", Sync, wait_load);
FLASH4_OP("tcgen05.wait::st", Sync, wait_store);

bool written(const Op& op, uint32_t i) { return i < 32 && op.writes >> i & 1; }

// The newest load (epoch + 1) among the registers that an instruction reads.
uint32_t newest_read(const Warp::Units& units, const Op& op) {
    uint32_t newest = 0;
    for (uint32_t i = 0; i < op.regs; ++i)
        if (op.reg[i] != kNoRegister && !written(op, i))
            newest = std::max(newest, units.tmem_loaded[register_unit(op.reg[i])]);
    return newest;
}

}  // namespace

// Hardware orders an instruction after the load of a register that it consumes. A move only passes the register on:
// compilers place moves and packs before the wait.
void check_tmem_registers(Warp& warp, const Op& op) {
    Warp::Units& units = *warp.units;
    if (units.tmem_loaded_units.empty() || op.run == &load || op.run == &load_reduced) return;
    uint32_t loaded = newest_read(units, op);
    if (loaded && op.pipe != Pipe::Move) {
        if (warp.cta->launch->options.strict_wait_ld)
            warp.cta->launch->report({.kind = "wait-ld",
                                      .message = "uses what a tcgen05.ld loads, before tcgen05.wait::ld",
                                      .at = warp.origin(op),
                                      .cta = warp.cta->id});
        order_loads(warp, loaded - 1);
        loaded = 0;
    }
    for (uint32_t i = 0; i < op.regs && i < 32; ++i)
        if (op.reg[i] != kNoRegister && written(op, i)) mark(warp, op.reg[i], loaded);
}

}  // namespace flash4
