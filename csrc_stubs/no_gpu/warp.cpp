// The step loop, and SIMT divergence: lanes that part at a branch meet again at its immediate post-dominator.
#include "warp.h"

#include <algorithm>
#include <cstring>

#include "async.h"

namespace flash4 {
namespace {

constexpr uint32_t kNowhere = 0xFFFFFFFFu;  // the sides of a branch never meet

void remove(Warp& warp, Group* group) {
    warp.groups.remove_if([&](const Group& g) { return &g == group; });
    if (warp.group == group) warp.group = warp.groups.empty() ? nullptr : &warp.groups.front();
}

// A group whose lanes have reached the meeting point of their join: they go on together once all are there.
// Returns whether the group still exists.
bool meet(Warp& warp, Group& group) {
    while (group.join && group.pc == group.join->at) {
        Join& join = *group.join;
        join.arrived |= group.mask;
        if (join.arrived != join.expected) {
            remove(warp, &group);
            return false;
        }
        group.mask = join.arrived;
        group.join = join.outer;
    }
    return true;
}

// Takes lanes out of all joins that wait for them, and wakes what then waits for nobody.
void leave_joins(Warp& warp, std::shared_ptr<Join> join, Mask lanes) {
    for (; join; join = join->outer) {
        join->expected &= ~lanes;
        if (join->expected && join->arrived == join->expected) {
            warp.groups.push_back({.pc = join->at, .mask = join->arrived, .join = join->outer});
            meet(warp, warp.groups.back());
        }
    }
}

// attr: target.
Step branch(Warp& warp, const Op& op, Mask mask) {
    Group& group = *warp.group;
    const uint32_t target = static_cast<uint32_t>(op.attr[0]);
    if (mask == group.mask) {
        group.pc = target;
        meet(warp, group);
        return Step::Jumped;
    }
    const uint32_t at = warp.program->reconverge[op.index];
    // A loop's exit meets at the same point each time round: the lanes that left before wait there already.
    if (at != kNowhere && !(group.join && group.join->at == at))
        group.join = std::make_shared<Join>(Join{.at = at, .expected = group.mask, .arrived = 0, .outer = group.join});
    warp.groups.push_back({.pc = target, .mask = mask, .join = group.join});
    Group& taken = warp.groups.back();
    group.mask &= ~mask;
    ++group.pc;
    meet(warp, taken);
    if (meet(warp, group)) warp.group = &group;
    return Step::Jumped;
}

// reg: index; attr: the targets. A table branch sends every lane by its own index.
Step branch_table(Warp& warp, const Op& op, Mask mask) {
    const uint32_t* index = warp.u32(op.reg[0]);
    const int lane = first_lane(mask);
    Mask same = 0;
    for (Mask rest = mask; rest; rest &= rest - 1)
        if (index[first_lane(rest)] == index[lane]) same |= 1u << first_lane(rest);
    if (same != warp.group->mask) throw Fault("unsupported", "brx.idx whose lanes take different targets");
    if (index[lane] >= op.attrs) throw Fault("out-of-bounds", "brx.idx beyond its table");
    warp.group->pc = static_cast<uint32_t>(op.attr[index[lane]]);
    meet(warp, *warp.group);
    return Step::Jumped;
}

Step leave(Warp& warp, const Op&, Mask mask) {
    Group& group = *warp.group;
    const std::shared_ptr<Join> join = group.join;
    warp.exited |= mask;
    group.mask &= ~mask;
    ++group.pc;
    if (!group.mask) remove(warp, &group);
    else meet(warp, group);
    leave_joins(warp, join, mask);
    warp.group = warp.groups.empty() ? nullptr : &warp.groups.front();
    warp.cta->cluster->event();
    return Step::Jumped;
}

Step trap(Warp&, const Op&, Mask) { throw Fault("trap", "the kernel executed trap"); }

// attr: the member mask, when static; reg: the member mask.
Step warp_sync(Warp& warp, const Op& op, Mask mask) {
    Group& group = *warp.group;
    const Mask members = warp.u32(op.reg[0])[first_lane(mask)] & ~warp.exited;
    const auto waits_too = [&](const Group& other) {
        return other.at_warp_sync && &other != &group && other.mask & members;
    };
    Mask here = mask;
    for (Group& other : warp.groups)
        if (waits_too(other)) here |= other.mask;
    if ((here & members) != members) {
        group.at_warp_sync = true;
        return Step::Blocked;
    }
    group.at_warp_sync = false;
    if (race::Checker* races = warp.cta->cluster->races.get()) races->sync(warp, members);
    for (auto next = warp.groups.begin(); next != warp.groups.end();) {
        Group& other = *next++;  // it may be gone once it has met others
        if (!waits_too(other)) continue;
        other.at_warp_sync = false;
        other.blocked_at = ~0ull;
        ++other.pc;
        meet(warp, other);
    }
    return Step::Next;
}

Step nothing(Warp&, const Op&, Mask) { return Step::Next; }

FLASH4_OP("bra", Control, branch);
FLASH4_OP("brx.idx", Control, branch_table);
FLASH4_OP("exit", Control, leave);
FLASH4_OP("trap", Control, trap);
FLASH4_OP("bar.warp.sync", Sync, warp_sync);
FLASH4_OP("nop", Control, nothing);

bool ready(const Group& group, uint64_t events) { return group.blocked_at == ~0ull || group.blocked_at != events; }

// Makes another group that may run the current one. Returns whether there is one.
bool switch_group(Warp& warp) {
    const uint64_t events = warp.cta->cluster->events;
    for (Group& group : warp.groups)
        if (ready(group, events)) {
            // To the back, so that groups which poll take turns.
            warp.groups.splice(
                warp.groups.end(), warp.groups,
                std::find_if(warp.groups.begin(), warp.groups.end(), [&](const Group& g) { return &g == &group; }));
            warp.group = &group;
            return true;
        }
    return false;
}

uint64_t init_value(const Warp& warp, const Init& init, uint32_t lane) {
    const Cta& cta = *warp.cta;
    const Launch& launch = *cta.launch;
    const Dim3 &block = launch.block, &grid = launch.grid, &shape = launch.cluster;
    const uint32_t thread = warp.index * kLanes + lane, bit = 1u << lane;
    const Dim3 in_cluster{cta.id.x % shape.x, cta.id.y % shape.y, cta.id.z % shape.z};
    const uint32_t dynamic = launch.dynamic_shared;
    switch (init.kind) {
        case InitKind::Value: return static_cast<uint64_t>(init.value);
        case InitKind::SharedAddress: return (cta.rank << kRankShift) + static_cast<uint32_t>(init.value);
        case InitKind::ParamAddress:
            return reinterpret_cast<uint64_t>(launch.params.data()) + static_cast<uint64_t>(init.value);
        case InitKind::TidX: return thread % block.x;
        case InitKind::TidY: return thread / block.x % block.y;
        case InitKind::TidZ: return thread / (block.x * block.y);
        case InitKind::NtidX: return block.x;
        case InitKind::NtidY: return block.y;
        case InitKind::NtidZ: return block.z;
        case InitKind::CtaidX: return cta.id.x;
        case InitKind::CtaidY: return cta.id.y;
        case InitKind::CtaidZ: return cta.id.z;
        case InitKind::NctaidX: return grid.x;
        case InitKind::NctaidY: return grid.y;
        case InitKind::NctaidZ: return grid.z;
        case InitKind::LaneId: return lane;
        case InitKind::WarpId: return warp.index;
        case InitKind::NwarpId: return cta.warps.size();
        case InitKind::SmId: return (cta.cluster->number * shape.count() + cta.rank) % launch.options.max_resident;
        case InitKind::NsmId: return launch.options.max_resident;
        case InitKind::GridId: return 1;
        case InitKind::ClusterCtaidX: return in_cluster.x;
        case InitKind::ClusterCtaidY: return in_cluster.y;
        case InitKind::ClusterCtaidZ: return in_cluster.z;
        case InitKind::ClusterNctaidX: return shape.x;
        case InitKind::ClusterNctaidY: return shape.y;
        case InitKind::ClusterNctaidZ: return shape.z;
        case InitKind::ClusterCtaRank: return cta.rank;
        case InitKind::ClusterNctaRank: return shape.count();
        case InitKind::ClusteridX: return cta.id.x / shape.x;
        case InitKind::ClusteridY: return cta.id.y / shape.y;
        case InitKind::ClusteridZ: return cta.id.z / shape.z;
        case InitKind::NclusteridX: return grid.x / shape.x;
        case InitKind::NclusteridY: return grid.y / shape.y;
        case InitKind::NclusteridZ: return grid.z / shape.z;
        case InitKind::IsExplicitCluster: return shape.count() > 1 ? ~0ull : 0;
        case InitKind::DynamicSmemSize: return dynamic;
        case InitKind::TotalSmemSize: return cta.shared.size();
        case InitKind::LanemaskEq: return bit;
        case InitKind::LanemaskLt: return bit - 1;
        case InitKind::LanemaskLe: return bit | (bit - 1);
        case InitKind::LanemaskGt: return ~(bit | (bit - 1));
        case InitKind::LanemaskGe: return ~(bit - 1);
    }
    return 0;
}

}  // namespace

void start(Warp& warp, uint32_t threads) {
    const Program& program = *warp.program;
    uint32_t* words = reinterpret_cast<uint32_t*>(warp.registers);
    std::fill_n(words, program.register_bytes / 4, kPoison);
    for (const Init& init : program.inits) {
        if (init.bytes == 0) {
            warp.predicate(init.offset) = init.value ? kAllLanes : 0;
            continue;
        }
        for (uint32_t lane = 0; lane < kLanes; ++lane) {
            const uint64_t value = init_value(warp, init, lane);
            if (init.bytes == 8) warp.u64(init.offset)[lane] = value;
            else warp.u32(init.offset)[lane] = static_cast<uint32_t>(value);
        }
    }
    const Mask lanes = threads >= kLanes ? kAllLanes : (1u << threads) - 1;
    warp.exited = ~lanes;
    warp.groups.clear();
    warp.groups.push_back({.pc = 0, .mask = lanes});
    warp.group = &warp.groups.front();
    warp.units = std::make_shared<Warp::Units>();
}

Slice run(Warp& warp, uint64_t budget) {
    if (warp.done()) return Slice::Done;
    Cluster& cluster = *warp.cta->cluster;
    if (!ready(*warp.group, cluster.events) && !switch_group(warp)) return Slice::Blocked;
    const Op* ops = warp.program->ops.data();
    while (budget--) {
        Group& group = *warp.group;
        const Op& op = ops[group.pc];
        Mask mask = group.mask;
        if (op.guard != kNoRegister) {
            const Mask p = warp.predicate(op.guard);
            mask &= op.guard_negated ? ~p : p;
        }
        Step step = Step::Next;
        if (mask) {
            if (warp.busy_registers) {
                check_wgmma_registers(warp, op);
                check_tmem_registers(warp, op);
            }
            step = op.run(warp, op, mask);
            if (step == Step::Blocked) {
                group.blocked_at = cluster.events;
                if (!switch_group(warp)) return Slice::Blocked;
                continue;
            }
        }
        ++warp.counts[op.index];
        ++warp.executed;
        if (step == Step::Jumped) {  // the group may be gone; it was not blocked
            if (warp.done()) return Slice::Done;
            if (!ready(*warp.group, cluster.events) && !switch_group(warp)) return Slice::Blocked;
            continue;
        }
        group.blocked_at = ~0ull;
        ++group.pc;
        if (group.join && group.pc == group.join->at && !meet(warp, group) && !switch_group(warp))
            return Slice::Blocked;
        if (step == Step::Yield) {
            switch_group(warp);
            return Slice::Polled;
        }
    }
    switch_group(warp);  // no lanes starve the others
    return Slice::Ran;
}

bool runnable(const Warp& warp) {
    const uint64_t events = warp.cta->cluster->events;
    return std::any_of(warp.groups.begin(), warp.groups.end(), [&](const Group& g) { return ready(g, events); });
}

int time_out(Warp& warp) {
    int count = 0;
    for (Group& group : warp.groups)
        if (may_time_out(warp.program->ops[group.pc])) {
            group.timed_out = true;
            group.blocked_at = ~0ull;
            ++count;
        }
    return count;
}

std::string describe(const Warp& warp) {
    std::string text;
    for (const Group& group : warp.groups) {
        const Op& op = warp.program->ops[group.pc];
        char head[96];
        std::snprintf(head, sizeof head, "\n  CTA %u warp %u lanes %08x at @op:%u ", warp.cta->rank, warp.index,
                      group.mask, op.index);
        text += head + describe_wait(warp, group, op);
    }
    return text;
}

}  // namespace flash4
