// The happens-before checker (race.h).
//
// Every granule refers to a history (history.h). An access looks at each history in its range once: memory that was
// used as one piece is judged as one piece.
#include "race.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "history.h"

namespace flash4::race {
namespace {

constexpr uint32_t kQuarters = 4;  // of tensor memory's lanes
constexpr size_t kUnits = static_cast<size_t>(Unit::kCount);

uint32_t epoch_in(const std::vector<uint32_t>& clock, Agent agent) { return agent < clock.size() ? clock[agent] : 0; }

void raise(std::vector<uint32_t>& clock, Agent agent, uint32_t epoch) {
    if (clock.size() <= agent) clock.resize(agent + 1);
    clock[agent] = std::max(clock[agent], epoch);
}

void raise_all(std::vector<uint32_t>& clock, const std::vector<uint32_t>& other) {
    if (clock.size() < other.size()) clock.resize(other.size());
    for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

// The two agents of a warp, in the order of bits: those of its other lanes and of its first one.
constexpr size_t kSides = 2;
enum Side : size_t { kOthers, kFirst };
using Sides = uint8_t;
constexpr Sides kBoth = 1 << kOthers | 1 << kFirst;

bool has(Sides sides, size_t side) { return sides >> side & 1; }

Sides sides_of(Mask lanes) {
    return static_cast<Sides>((lanes & 1) << kFirst | static_cast<uint32_t>((lanes & ~1u) != 0) << kOthers);
}

// A warp. Its accesses belong to the epoch after the last closed one, until some of its lanes publish their clock.
struct WarpAgent {
    Clock clocks[kSides];
    uint32_t closed = 0;                                // the last epoch that is
    bool accessed = false;                              // in the current epoch
    std::shared_ptr<const Clock> snapshots[kBoth + 1];  // of both sides' clocks, for tickets; null when one has changed
    struct {
        Agent agent = 0;  // 0: has not worked yet; agent 0 is a warp
        uint32_t epoch = 0;
    } units[kUnits];
};

// How reports call an agent.
struct Name {
    enum Kind : uint8_t { WarpItself, UnitOfWarp, Tensor, Copies } kind;
    Unit unit;
    uint32_t cta;
    uint32_t offset;  // of the copies' mbarrier
};

const char* name_of(Unit unit) {
    switch (unit) {
        case Unit::Bulk: return "a bulk store";
        case Unit::CpAsync: return "a cp.async";
        case Unit::CpAsyncOfFirst: return "a cp.async of lane 0";
        case Unit::Wgmma: return "a wgmma";
        case Unit::TmemLoad: return "a tcgen05.ld";
        case Unit::TmemStore: return "a tcgen05.st";
        default: return "work";
    }
}

const char* name_of(Kind kind) {
    switch (kind) {
        case Kind::Read:
        case Kind::StrongRead: return "read";
        case Kind::Write: return "write";
        case Kind::Atomic: return "atomic update";
        case Kind::Free: return "deallocation";
    }
    return "";
}

std::string hex(uint32_t value) {
    char text[16];
    std::snprintf(text, sizeof text, "0x%x", value);
    return text;
}

// A part of memory whose granules are checked together.
struct Range {
    uint32_t shadow;       // which, see State::shadows
    uint32_t first, last;  // granules, the last excluded
    uint32_t begin, end;   // bytes of shared memory
};

enum class Rule : uint8_t { Order, ProxyFence, Initialised };

// What is wrong with a range's access. `past` is the access it conflicts with; unused for Initialised.
struct Conflict {
    Rule rule;
    Access past;
    uint32_t first, last;  // granules
};

// Where granules cease to have the history that `first` has.
uint32_t end_of_run(const uint32_t* shadow, uint32_t first, uint32_t last) {
    constexpr uint32_t kStep = 16;  // granules that are compared at once
    const uint32_t history = shadow[first];
    const auto differ = [&](const uint32_t* granules) {
        uint32_t difference = 0;
        for (uint32_t i = 0; i < kStep; ++i) difference |= granules[i] ^ history;
        return difference != 0;
    };
    uint32_t end = first + 1;
    if (end < last && shadow[end] == history)
        while (end + kStep <= last && !differ(shadow + end)) end += kStep;
    while (end < last && shadow[end] == history) ++end;
    return end;
}

uint64_t pair_of(uint32_t op, uint32_t other) { return static_cast<uint64_t>(op) << 32 | other; }

}  // namespace

void Clock::merge(const Clock& other) {
    raise_all(seen, other.seen);
    raise_all(fenced, other.fenced);
}

void Clock::clear() {
    seen.clear();
    fenced.clear();
}

struct Checker::State {
    Cluster& cluster;
    const bool strict;
    const uint32_t warps_per_cta;
    std::vector<WarpAgent> warps;
    std::vector<uint32_t> products;              // epoch of the tensor core of each CTA
    std::unordered_map<uint64_t, Agent> copies;  // by CTA << 32 | offset of the mbarrier
    std::vector<Name> names;                     // by agent
    uint32_t serials = 0;

    // Of CTA i: 2i shared memory, 2i + 1 tensor memory ([quarter][column]).
    std::vector<std::vector<uint32_t>> shadows;
    Histories histories;
    std::unordered_set<uint64_t> reported;

    // The access at hand, and what its agent is ordered after, on either side of a warp.
    Access now{};
    const Clock* clocks[kSides] = {};
    std::shared_ptr<const Clock> together;  // keeps them, if the whole warp acts as one
    uint32_t after = 0;
    uint32_t memory = 0;  // rank of the CTA whose memory it is in
    uint64_t key = 0;  // tells whether the next call goes on with the same access; 0: it does not

    // What `now` makes of a history, for those that were met most recently.
    struct Memo {
        uint64_t stamp = 0;
        uint32_t from, to;
    };
    std::array<Memo, 64> memo;
    uint64_t stamp = 1;
    std::vector<Access> scratch;
    std::vector<Conflict> found;      // by the history at hand
    bool looked_closer = false;       // what was found, or not, is true of some granules only
    std::vector<Conflict> conflicts;  // of the range at hand

    explicit State(Cluster& c)
        : cluster(c),
          strict(c.launch->options.strict_uninitialised),
          warps_per_cta(static_cast<uint32_t>(c.ctas.front()->warps.size())),
          products(c.ctas.size()) {
        for (auto& cta : cluster.ctas) {
            shadows.emplace_back(cta->shared.size() / kGranule + 1);
            shadows.emplace_back(kQuarters * kTmemColumns);
            for (uint32_t i = 0; i < warps_per_cta; ++i) new_agent({Name::WarpItself, Unit::Warp, cta->rank, 0});
        }
        warps.resize(names.size());
        for (size_t i = 0; i < warps.size(); ++i) new_agent(names[i]);
        for (auto& cta : cluster.ctas) new_agent({Name::Tensor, Unit::Warp, cta->rank, 0});
    }

    // --- agents

    Agent new_agent(Name name) {
        names.push_back(name);
        return static_cast<Agent>(names.size() - 1);
    }
    // Agents of warps come first, those of their first lanes next.
    Agent agent_of(const Warp& warp) const { return warp.cta->rank * warps_per_cta + warp.index; }
    bool is_warp(Agent agent) const { return agent < warps.size(); }
    Agent on_side(Agent warp, size_t side) const {
        return side == kFirst ? warp + static_cast<Agent>(warps.size()) : warp;
    }
    Agent tensor_agent(uint32_t cta) const { return static_cast<Agent>(kSides * warps.size()) + cta; }
    Agent copies_agent(uint32_t cta, uint32_t offset) {
        Agent& agent = copies[static_cast<uint64_t>(cta) << 32 | offset];
        if (!agent) agent = new_agent({Name::Copies, Unit::Warp, cta, offset});
        return agent;
    }

    // A clock of the warp is about to change: what was derived from it is void.
    void change(WarpAgent& warp) {
        for (auto& snapshot : warp.snapshots) snapshot.reset();
        key = 0;
    }

    // Ends the warp's epoch, so that its later accesses are not taken for published; what the sides have accessed so
    // far is in their clocks then.
    void close(WarpAgent& warp, Agent agent, Sides sides) {
        if (warp.accessed) {
            warp.accessed = false;
            ++warp.closed;
            change(warp);
        }
        for (size_t side = 0; side < kSides; ++side) {
            const Agent self = on_side(agent, side);
            if (!has(sides, side) || epoch_in(warp.clocks[side].seen, self) == warp.closed) continue;
            raise(warp.clocks[side].seen, self, warp.closed);
            change(warp);
        }
    }

    void release(Agent agent, Sides sides, Clock& into) {
        WarpAgent& warp = warps[agent];
        close(warp, agent, sides);
        for (size_t side = 0; side < kSides; ++side)
            if (has(sides, side)) into.merge(warp.clocks[side]);
    }

    void acquire(Agent agent, Sides sides, const Clock& from) {
        if (from.seen.empty()) return;
        for (size_t side = 0; side < kSides; ++side)
            if (has(sides, side)) warps[agent].clocks[side].merge(from);
        change(warps[agent]);
    }

    void sync(Agent agent) {
        WarpAgent& warp = warps[agent];
        close(warp, agent, kBoth);
        warp.clocks[kOthers].merge(warp.clocks[kFirst]);
        warp.clocks[kFirst] = warp.clocks[kOthers];
        change(warp);
    }

    void fence(Clock& clock, uint32_t cta, bool own_cta_only) const {
        const auto ctas = static_cast<uint32_t>(products.size());
        if (ctas == 1) return raise_all(clock.fenced, clock.seen);
        const uint32_t first = own_cta_only ? cta : 0, last = own_cta_only ? cta + 1 : ctas;
        clock.fenced.resize(std::max(clock.fenced.size(), clock.seen.size() * ctas));
        for (Agent agent = 0; agent < clock.seen.size(); ++agent)
            for (uint32_t of = first; of < last; ++of) {
                uint32_t& fenced = clock.fenced[in_memory(agent, of)];
                fenced = std::max(fenced, clock.seen[agent]);
            }
    }

    // What the sides together are ordered after.
    std::shared_ptr<const Clock> snapshot(Agent agent, Sides sides) {
        WarpAgent& warp = warps[agent];
        close(warp, agent, sides);
        auto& kept = warp.snapshots[sides];
        if (!kept) {
            auto clock = std::make_shared<Clock>();
            release(agent, sides, *clock);
            kept = std::move(clock);
        }
        return kept;
    }

    Ticket ticket(Warp& warp, const Op& op, Mask lanes, Agent agent, uint32_t epoch) {
        const auto clock = snapshot(agent_of(warp), lanes == kTogether ? kBoth : sides_of(lanes));
        const Origin origin = warp.origin(op);
        return {.agent = agent,
                .epoch = epoch,
                .clock = clock,
                .cta = origin.cta,
                .warp = origin.warp,
                .op = origin.op,
                .after = epoch_in(clock->seen, agent),
                .serial = ++serials};
    }

    // --- the access at hand

    void begin(const Access& access, const Clock& others, const Clock& first, uint32_t its_after, uint64_t its_key) {
        if (histories.crowded()) histories.collect(shadows);
        now = access;
        clocks[kOthers] = &others;
        clocks[kFirst] = &first;
        after = its_after;
        key = its_key;
        ++stamp;
    }

    static Part part_of(Mask lanes) {
        if (lanes == kTogether) return Part::Together;
        if (!(lanes & 1)) return Part::Others;
        return lanes == 1 ? Part::First : Part::Each;
    }

    void act(Warp& warp, const Op& op, Mask lanes, Kind kind, Piece first, bool first_shared) {
        const Agent agent = agent_of(warp);
        const Part part = part_of(lanes);
        const uint64_t its_key = 1ull << 63 | static_cast<uint64_t>(agent) << 40 |
                                 static_cast<uint64_t>(op.index) << 8 | static_cast<uint64_t>(part) << 4 |
                                 static_cast<uint64_t>(kind);
        if (part != Part::Each) first = {};
        if (key == its_key && now.first == first && now.first_shared == first_shared) return;
        WarpAgent& state = warps[agent];
        const bool whole = part == Part::Together;
        if (whole) together = snapshot(agent, kBoth);
        state.accessed = true;
        const Access access{.agent = agent,
                            .epoch = state.closed + 1,
                            .serial = 0,
                            .origin = warp.origin(op),
                            .kind = kind,
                            .generic = true,
                            .bytes = kAllBytes,
                            .part = part,
                            .first_shared = first_shared,
                            .first = first};
        begin(access, whole ? *together : state.clocks[kOthers], whole ? *together : state.clocks[kFirst], 0, its_key);
    }

    void act(const Ticket& by, Kind kind, bool generic) {
        const uint64_t its_key = static_cast<uint64_t>(by.serial) << 32 | static_cast<uint64_t>(by.agent) << 4 |
                                 static_cast<uint64_t>(kind) << 1 | generic;
        if (key == its_key) return;
        const Origin origin{by.cta, by.warp, by.op};
        begin({by.agent, by.epoch, by.serial, origin, kind, generic, kAllBytes}, *by.clock, *by.clock, by.after,
              its_key);
    }

    static constexpr uint32_t kAnyGranule = ~0u;

    // Whose access of that granule it was, or may have been.
    static Sides sides_at(const Access& access, uint32_t granule) {
        switch (access.part) {
            case Part::First: return 1 << kFirst;
            case Part::Others:
            case Part::Together: return 1 << kOthers;
            case Part::Each: break;
        }
        if (granule == kAnyGranule) return kBoth;
        const uint32_t offset = granule * kGranule, end = access.first.offset + access.first.bytes;
        if (offset + kGranule <= access.first.offset || end <= offset) return 1 << kOthers;
        return access.first_shared ? kBoth : 1 << kFirst;
    }

    // Where Clock::fenced has the number of an agent for a CTA's memory.
    Agent in_memory(Agent agent, uint32_t cta) const { return agent * static_cast<Agent>(products.size()) + cta; }

    // Whether the access at hand is after a past one at a granule, by what its clocks say: epoch_of(clock, agent).
    template <class EpochOf>
    bool after_at(const Access& past, uint32_t granule, EpochOf&& epoch_of) const {
        const Sides mine = sides_at(now, granule), theirs = sides_at(past, granule);
        const bool own = past.agent == now.agent;
        if (own && past.origin.op == now.origin.op && past.epoch == now.epoch) return true;  // one instruction
        for (size_t i = 0; i < kSides; ++i)
            for (size_t j = 0; j < kSides; ++j) {
                if (!has(mine, i) || !has(theirs, j)) continue;
                // Program order. Where all lanes have done the same, a lane's own access stands for the others'.
                if (own && (now.part == Part::Together || (granule == kAnyGranule ? i == j : has(theirs, i)))) continue;
                if (past.epoch > epoch_of(*clocks[i], on_side(past.agent, j))) return false;
            }
        return true;
    }

    bool ordered_after(const Access& past, uint32_t granule) const {
        if (now.serial && past.serial == now.serial) return true;  // one instruction's work
        if (past.agent == now.agent && !is_warp(now.agent)) return past.epoch <= after;
        return after_at(past, granule, [](const Clock& clock, Agent agent) { return epoch_in(clock.seen, agent); });
    }

    // Generic writes reach the asynchronous proxy through a proxy fence only (PTX ISA, fence.proxy.async).
    bool fenced_after(const Access& past, uint32_t granule) const {
        if (now.generic || !past.generic || only_reads(past.kind)) return true;
        return after_at(past, granule, [&](const Clock& clock, Agent agent) {
            return epoch_in(clock.fenced, in_memory(agent, memory));
        });
    }

    // Notes what is wrong between a past access and the one at hand at the granules from `first` on.
    void compare(const Access& past, uint32_t first, uint32_t last) {
        const auto broken = [&](uint32_t granule) -> std::optional<Rule> {
            if (!ordered_after(past, granule)) return Rule::Order;
            if (!fenced_after(past, granule)) return Rule::ProxyFence;
            return std::nullopt;
        };
        auto rule = broken(kAnyGranule);
        if (rule && (now.part == Part::Each || past.part == Part::Each)) {
            looked_closer = true;
            for (rule.reset(); first < last && !rule; ++first) rule = broken(first);
        }
        if (rule) found.push_back({*rule, past, 0, 0});
    }

    // Whether nothing can conflict with `past` any more without conflicting with `now`.
    bool supersedes(const Access& past) const {
        if (past.bytes & ~now.bytes) return false;
        if (overwrites(now.kind)) return true;
        if (past.kind != now.kind) return false;
        if (past.agent == now.agent && past.part == now.part) return past.epoch <= now.epoch;
        return ordered_after(past, kAnyGranule);
    }

    // Whether `now` adds nothing to `past`.
    bool repeats(const Access& past) const {
        return past.agent == now.agent && past.epoch == now.epoch && past.serial == now.serial &&
               past.kind == now.kind && !(now.bytes & ~past.bytes) && past.part == now.part &&
               past.first == now.first && past.first_shared == now.first_shared;
    }

    // The history of the granules from `first` on, which share one, after `now`; `found` gets what is wrong.
    uint32_t extend(uint32_t from, uint32_t first, uint32_t last) {
        scratch.clear();
        looked_closer = false;
        bool repeated = false;
        uint8_t initialised = 0;
        for (const Access& past : histories[from]) {
            if (!only_reads(past.kind)) initialised |= past.bytes;
            if (may_conflict(past, now)) compare(past, first, last);
            if (repeats(past)) repeated = true;
            else if (supersedes(past)) continue;
            scratch.push_back(past);
        }
        if (strict && !overwrites(now.kind) && (now.bytes & ~initialised))
            found.push_back({Rule::Initialised, now, 0, 0});
        if (repeated && scratch.size() == histories[from].size()) return from;
        if (!repeated) scratch.push_back(now);
        return histories.add(scratch);
    }

    uint32_t next(uint32_t from, uint32_t first, uint32_t last) {
        Memo& known = memo[from % memo.size()];
        if (known.stamp == stamp && known.from == from) return known.to;
        const uint32_t to = extend(from, first, last);
        if (found.empty() && !looked_closer) known = {stamp, from, to};
        return to;
    }

    void note(uint32_t first, uint32_t last) {
        for (Conflict& conflict : found) {
            const auto is_same = [&](const Conflict& c) {
                return c.rule == conflict.rule && c.past.origin.op == conflict.past.origin.op;
            };
            auto same = std::find_if(conflicts.begin(), conflicts.end(), is_same);
            if (same == conflicts.end()) conflicts.push_back({conflict.rule, conflict.past, first, last});
            else same->last = last;
        }
        found.clear();
    }

    void touch(const Range& range) {
        enter(range.shadow / 2);
        uint32_t* shadow = shadows[range.shadow].data();
        for (uint32_t granule = range.first; granule < range.last;) {
            const uint32_t first = granule, from = shadow[granule];
            granule = end_of_run(shadow, first, range.last);
            const uint32_t to = next(from, first, granule);
            if (to != from) std::fill(shadow + first, shadow + granule, to);
            if (!found.empty()) note(first, granule);
        }
        for (const Conflict& conflict : conflicts) report(range, conflict);
        conflicts.clear();
    }

    // What was found out about histories is true of one CTA's memory only: proxy fences may be.
    void enter(uint32_t cta) {
        if (memory == cta) return;
        memory = cta;
        ++stamp;
    }

    void set_bytes(uint8_t bytes) {
        if (now.bytes == bytes) return;
        now.bytes = bytes;
        ++stamp;
    }

    void touch_shared(const Cta& cta, uint32_t offset, uint32_t bytes) {
        const uint32_t end = offset + bytes;
        while (offset < end) {
            const uint32_t granule = offset / kGranule, head = offset % kGranule;
            const bool whole = head == 0 && end - offset >= kGranule;
            const uint32_t stop = whole ? end / kGranule * kGranule : std::min(end, (granule + 1) * kGranule);
            set_bytes(whole ? kAllBytes : static_cast<uint8_t>(((1u << (stop - offset)) - 1) << head));
            touch({2 * cta.rank, granule, (stop + kGranule - 1) / kGranule, offset, stop});
            offset = stop;
        }
    }

    // Whether a piece is of whole granules with one history, which the memo knows: then that is all there is to do.
    bool touch_known(uint32_t* shadow, const Piece& piece) const {
        if ((piece.offset | piece.bytes) % kGranule || now.bytes != kAllBytes) return false;
        const uint32_t first = piece.offset / kGranule, last = first + piece.bytes / kGranule, from = shadow[first];
        const Memo& known = memo[from % memo.size()];
        if (known.stamp != stamp || known.from != from || end_of_run(shadow, first, last) != last) return false;
        if (known.to != from) std::fill(shadow + first, shadow + last, known.to);
        return true;
    }

    void touch_shared(const Cta& cta, std::span<const Piece> pieces) {
        enter(cta.rank);
        uint32_t* shadow = shadows[2 * cta.rank].data();
        for (const Piece& piece : pieces)
            if (!touch_known(shadow, piece)) touch_shared(cta, piece.offset, piece.bytes);
    }

    void touch_tensor(const Cta& cta, uint32_t quarters, uint32_t column, uint32_t columns) {
        for (uint32_t quarter = 0; quarter < kQuarters; ++quarter) {
            const uint32_t first = quarter * kTmemColumns + column;
            if (quarters >> quarter & 1) touch({2 * cta.rank + 1, first, first + columns, 0, 0});
        }
    }

    // --- reports

    static std::string place(const Range& range, const Conflict& conflict) {
        const std::string cta = " of CTA " + std::to_string(range.shadow / 2);
        if (range.shadow % 2 == 0) {
            const uint32_t begin = std::max(range.begin, conflict.first * kGranule);
            const uint32_t end = std::min(range.end, conflict.last * kGranule);
            return "shared memory [" + hex(begin) + ", " + hex(end) + ")" + cta;
        }
        const uint32_t lane = conflict.first / kTmemColumns * kLanes;
        const uint32_t first = conflict.first % kTmemColumns, last = first + (conflict.last - conflict.first) - 1;
        return "tensor memory columns " + std::to_string(first) + " to " + std::to_string(last) + ", lanes " +
               std::to_string(lane) + " to " + std::to_string(lane + kLanes - 1) + cta;
    }

    std::string doer(const Access& access) const {
        const Origin& origin = access.origin;
        const char* lane = access.part == Part::First ? "lane 0 of warp " : "warp ";
        const std::string warp = lane + std::to_string(origin.warp) + " of CTA " + std::to_string(origin.cta);
        const Name& name = names[access.agent];
        switch (name.kind) {
            case Name::WarpItself: return warp;
            case Name::UnitOfWarp: return std::string(name_of(name.unit)) + " of " + warp;
            case Name::Tensor: return "the tensor core of CTA " + std::to_string(name.cta) + " for " + warp;
            case Name::Copies: break;
        }
        return "a copy that completes on the mbarrier at " + hex(name.offset) + " of CTA " + std::to_string(name.cta) +
               " for " + warp;
    }

    std::string describe(const Range& range, const Conflict& conflict) const {
        const std::string where = place(range, conflict);
        const std::string access = std::string(name_of(now.kind)) + " of " + where + " by " + doer(now);
        if (conflict.rule == Rule::Initialised) return access + ": nobody has written it before";
        const std::string past = std::string(name_of(conflict.past.kind)) + " by " + doer(conflict.past);
        if (conflict.rule == Rule::Order) return access + " is not ordered with the " + past;
        const char* space = " (one with .shared::cta is for the memory of the CTA that executes it)";
        return access + ": no fence.proxy.async lies between it and the " + past + (products.size() > 1 ? space : "");
    }

    void report(const Range& range, const Conflict& conflict) {
        const bool race = conflict.rule != Rule::Initialised;
        Finding finding{.kind = race ? "race" : "uninitialised",
                        .message = {},
                        .at = now.origin,
                        .cta = cluster.ctas[now.origin.cta]->id,
                        .has_other = race};
        if (race) finding.other = conflict.past.origin;
        // The launch keeps the first message of a pair.
        const uint32_t other = race ? conflict.past.origin.op : ~0u;
        if (reported.insert(pair_of(now.origin.op, other)).second) finding.message = describe(range, conflict);
        cluster.launch->report(std::move(finding));
    }
};

Checker::Checker(Cluster& cluster) : state_(std::make_unique<State>(cluster)) {}
Checker::~Checker() = default;

void Checker::release(Warp& warp, Mask lanes, Clock& into) {
    state_->release(state_->agent_of(warp), sides_of(lanes), into);
}

void Checker::acquire(Warp& warp, Mask lanes, const Clock& from) {
    state_->cluster.lanes->meet(warp);
    state_->acquire(state_->agent_of(warp), sides_of(lanes), from);
}

void Checker::sync(Warp& warp, Mask lanes) {
    state_->cluster.lanes->meet(warp);
    if (sides_of(lanes) == kBoth) state_->sync(state_->agent_of(warp));
}

void Checker::proxy_fence(Warp& warp, Mask lanes, bool own_cta_only) {
    const Agent agent = state_->agent_of(warp);
    const Sides sides = sides_of(lanes);
    WarpAgent& self = state_->warps[agent];
    state_->close(self, agent, sides);
    for (size_t side = 0; side < kSides; ++side)
        if (has(sides, side)) state_->fence(self.clocks[side], warp.cta->rank, own_cta_only);
    state_->change(self);
}

void Checker::complete(const Ticket& ticket, Clock& into) {
    if (!ticket.clock) return;
    into.merge(*ticket.clock);
    raise(into.seen, ticket.agent, ticket.epoch);
}

Ticket Checker::issue(Warp& warp, const Op& op, Mask lanes, Unit unit) {
    auto& worker = state_->warps[state_->agent_of(warp)].units[static_cast<size_t>(unit)];
    if (!worker.agent) worker.agent = state_->new_agent({Name::UnitOfWarp, unit, warp.cta->rank, 0});
    return state_->ticket(warp, op, lanes, worker.agent, ++worker.epoch);
}

LaneTickets Checker::issue_by_lanes(Warp& warp, const Op& op, Mask lanes) {
    auto& units = state_->warps[state_->agent_of(warp)].units;
    auto &others = units[static_cast<size_t>(Unit::CpAsync)], &first = units[static_cast<size_t>(Unit::CpAsyncOfFirst)];
    for (Unit unit : {Unit::CpAsync, Unit::CpAsyncOfFirst})
        if (auto& agent = units[static_cast<size_t>(unit)].agent; !agent)
            agent = state_->new_agent({Name::UnitOfWarp, unit, warp.cta->rank, 0});
    first.epoch = ++others.epoch;
    LaneTickets tickets;
    if (lanes & ~1u) tickets.others = state_->ticket(warp, op, lanes & ~1u, others.agent, others.epoch);
    if (lanes & 1u) tickets.first = state_->ticket(warp, op, 1u, first.agent, first.epoch);
    if (tickets.others.serial) tickets.first.serial = tickets.others.serial;
    return tickets;
}

void Checker::join(Warp& warp, Mask lanes, Unit unit, uint32_t epoch) { join(warp, lanes, warp, unit, epoch); }

void Checker::join(Warp& warp, Mask lanes, const Warp& worker, Unit unit, uint32_t epoch) {
    WarpAgent& self = state_->warps[state_->agent_of(warp)];
    const auto& units = state_->warps[state_->agent_of(worker)].units;
    for (size_t side = 0; side < kSides; ++side) {
        const Unit own = unit == Unit::CpAsync && side == kFirst ? Unit::CpAsyncOfFirst : unit;
        const Agent agent = units[static_cast<size_t>(own)].agent;
        if (!agent || !has(sides_of(lanes), side) || epoch <= epoch_in(self.clocks[side].seen, agent)) continue;
        raise(self.clocks[side].seen, agent, epoch);
        state_->change(self);
    }
}

Ticket Checker::issue_mma(Warp& warp, const Op& op, Mask lanes, uint32_t cta) {
    Ticket ticket = state_->ticket(warp, op, lanes, state_->tensor_agent(cta), ++state_->products[cta]);
    ticket.after = ticket.epoch - 1;
    return ticket;
}

Ticket Checker::issue_copy(Warp& warp, const Op& op, Mask lanes, uint32_t cta, uint32_t offset, uint64_t phase) {
    return state_->ticket(warp, op, lanes, state_->copies_agent(cta, offset), static_cast<uint32_t>(phase + 1));
}

void Checker::read(Warp& warp, const Op& op, Mask lanes, Cta& cta, uint32_t offset, uint32_t bytes) {
    state_->act(warp, op, lanes, Kind::Read, {offset, bytes}, true);
    state_->touch_shared(cta, offset, bytes);
}

void Checker::write(Warp& warp, const Op& op, Mask lanes, Cta& cta, uint32_t offset, uint32_t bytes) {
    state_->act(warp, op, lanes, Kind::Write, {offset, bytes}, true);
    state_->touch_shared(cta, offset, bytes);
}

void Checker::atomic(Warp& warp, const Op& op, Mask lanes, Cta& cta, uint32_t offset, uint32_t bytes) {
    state_->act(warp, op, lanes, Kind::Atomic, {offset, bytes}, true);
    state_->touch_shared(cta, offset, bytes);
}

void Checker::read(Warp& warp, const Op& op, Mask lanes, Cta& cta, const Pieces& pieces) {
    state_->act(warp, op, lanes, Kind::Read, pieces.first, pieces.first_shared);
    state_->touch_shared(cta, pieces.all);
}

void Checker::write(Warp& warp, const Op& op, Mask lanes, Cta& cta, const Pieces& pieces) {
    state_->act(warp, op, lanes, Kind::Write, pieces.first, pieces.first_shared);
    state_->touch_shared(cta, pieces.all);
}

void Checker::atomic(Warp& warp, const Op& op, Mask lanes, Cta& cta, const Pieces& pieces) {
    state_->act(warp, op, lanes, Kind::Atomic, pieces.first, pieces.first_shared);
    state_->touch_shared(cta, pieces.all);
}

void Checker::read_strong(Warp& warp, const Op& op, Mask lanes, Cta& cta, const Pieces& pieces) {
    state_->act(warp, op, lanes, Kind::StrongRead, pieces.first, pieces.first_shared);
    state_->touch_shared(cta, pieces.all);
}

void Checker::read(const Ticket& by, Cta& cta, uint32_t offset, uint32_t bytes) {
    state_->act(by, Kind::Read, false);
    state_->touch_shared(cta, offset, bytes);
}

void Checker::write(const Ticket& by, Cta& cta, uint32_t offset, uint32_t bytes) {
    state_->act(by, Kind::Write, false);
    state_->touch_shared(cta, offset, bytes);
}

void Checker::reduce(const Ticket& by, Cta& cta, uint32_t offset, uint32_t bytes, bool generic) {
    state_->act(by, Kind::Atomic, generic);
    state_->touch_shared(cta, offset, bytes);
}

void Checker::write_generic(const Ticket& by, Cta& cta, uint32_t offset, uint32_t bytes) {
    state_->act(by, Kind::Write, true);
    state_->touch_shared(cta, offset, bytes);
}

void Checker::read_tmem(const Ticket& by, Cta& cta, uint32_t quarters, uint32_t column, uint32_t columns) {
    state_->act(by, Kind::Read, false);
    state_->set_bytes(kAllBytes);
    state_->touch_tensor(cta, quarters, column, columns);
}

void Checker::write_tmem(const Ticket& by, Cta& cta, uint32_t quarters, uint32_t column, uint32_t columns) {
    state_->act(by, Kind::Write, false);
    state_->set_bytes(kAllBytes);
    state_->touch_tensor(cta, quarters, column, columns);
}

void Checker::free_tmem(Warp& warp, const Op& op, Cta& cta, uint32_t column, uint32_t columns) {
    state_->act(warp, op, kTogether, Kind::Free, {}, false);
    state_->set_bytes(kAllBytes);
    state_->touch_tensor(cta, (1u << kQuarters) - 1, column, columns);
    auto& shadow = state_->shadows[2 * cta.rank + 1];
    for (uint32_t quarter = 0; quarter < kQuarters; ++quarter)
        std::fill_n(shadow.begin() + quarter * kTmemColumns + column, columns, Histories::kEmpty);
}

}  // namespace flash4::race
