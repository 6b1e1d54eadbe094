// Allocation of tensor memory (PTX ISA, Tensor Memory Allocation and Management Instructions).
#include <algorithm>
#include <optional>

#include "memory.h"
#include "tcgen05.h"

namespace flash4 {
namespace {

constexpr uint32_t kLeastColumns = 32;

void make_tensor_memory(Cta& cta) {
    if (!cta.tmem.empty()) return;
    cta.tmem.assign(static_cast<size_t>(kTmemLanes) * kTmemColumns, kPoison);
    cta.tmem_owner.assign(kTmemColumns, 0);
}

// An allocation number that no column of the CTA carries.
uint8_t unused_number(const Cta& cta) {
    uint8_t number = 1;
    while (std::find(cta.tmem_owner.begin(), cta.tmem_owner.end(), number) != cta.tmem_owner.end()) ++number;
    return number;
}

bool is_free(const Cta& cta, uint32_t column, uint32_t columns) {
    const auto begin = cta.tmem_owner.begin() + column;
    return std::all_of(begin, begin + columns, [](uint8_t owner) { return owner == 0; });
}

void own(Cta& cta, TmemGrant grant) {
    std::fill_n(cta.tmem_owner.begin() + grant.column, grant.columns, unused_number(cta));
}

// The first place, aligned to its size, that is free in both CTAs (or in the one).
std::optional<TmemGrant> place(Cta& cta, Cta* peer, uint32_t columns) {
    make_tensor_memory(cta);
    if (peer) make_tensor_memory(*peer);
    for (uint32_t column = 0; column + columns <= kTmemColumns; column += columns) {
        if (!is_free(cta, column, columns) || (peer && !is_free(*peer, column, columns))) continue;
        own(cta, {column, columns});
        if (peer) own(*peer, {column, columns});
        return TmemGrant{column, columns};
    }
    return std::nullopt;
}

// Both CTAs of a pair execute the same allocations in the same order; the first to come places it for both.
std::optional<TmemGrant> place_pair(Cta& cta, uint32_t columns) {
    Cta& peer = peer_of(cta);
    auto& grants = (cta.rank % 2 ? peer : cta).tmem_pair_grants;
    if (cta.tmem_pair_taken == grants.size()) {
        const auto grant = place(cta, &peer, columns);
        if (!grant) return std::nullopt;
        grants.push_back(*grant);
    }
    const TmemGrant grant = grants[cta.tmem_pair_taken];
    if (grant.columns != columns) throw Fault("tmem", "the CTAs of a pair allocate different numbers of columns");
    ++cta.tmem_pair_taken;
    return grant;
}

// reg: shared address to write the result to, columns; attr: offset, cta_group, the address is generic.
Step allocate(Warp& warp, const Op& op, Mask mask) {
    require_tensor_memory(warp);
    require_whole_warp(warp, mask);
    Cta& cta = *warp.cta;
    const int lane = first_lane(mask);
    const uint32_t columns = warp.u32(op.reg[1])[lane];
    if (columns < kLeastColumns || columns > kTmemColumns || (columns & (columns - 1)))
        throw Fault("tmem", "tcgen05.alloc of " + std::to_string(columns) +
                                " columns; it must be a power of two from 32 to 512");
    if (cta.tmem_relinquished) throw Fault("tmem", "tcgen05.alloc after tcgen05.relinquish_alloc_permit");
    const auto grant = op.attr[1] == 2 ? place_pair(cta, columns) : place(cta, nullptr, columns);
    if (!grant) return Step::Blocked;
    // The low half of a generic address is the shared one.
    const uint32_t address = op.attr[2] ? static_cast<uint32_t>(warp.u64(op.reg[0])[lane]) : warp.u32(op.reg[0])[lane];
    const SharedRef result = shared_at(warp, address + static_cast<uint32_t>(op.attr[0]), 4, 4);
    *reinterpret_cast<uint32_t*>(result.data()) = grant->column;
    if (cta.cluster->races) cta.cluster->races->write(warp, op, mask, *result.cta, result.offset, 4);
    cta.tmem_allocated_at = warp.origin(op);
    return Step::Next;
}

// reg: tensor memory address, columns; attr: cta_group.
Step deallocate(Warp& warp, const Op& op, Mask mask) {
    require_tensor_memory(warp);
    require_whole_warp(warp, mask);
    Cta& cta = *warp.cta;
    const int lane = first_lane(mask);
    const uint32_t column = TmemAddress(warp.u32(op.reg[0])[lane]).column, columns = warp.u32(op.reg[1])[lane];
    require_allocated(cta, column, columns);
    const uint8_t number = cta.tmem_owner[column];
    const auto first = std::find(cta.tmem_owner.begin(), cta.tmem_owner.end(), number);
    if (first - cta.tmem_owner.begin() != column || std::count(first, cta.tmem_owner.end(), number) != columns)
        throw Fault("tmem", "tcgen05.dealloc of columns that were not allocated together");
    if (cta.cluster->races) cta.cluster->races->free_tmem(warp, op, cta, column, columns);
    std::fill_n(first, columns, 0);
    cta.cluster->event();
    return Step::Next;
}

Step relinquish(Warp& warp, const Op&, Mask mask) {
    require_tensor_memory(warp);
    require_whole_warp(warp, mask);
    warp.cta->tmem_relinquished = true;
    return Step::Next;
}

FLASH4_OP("tcgen05.alloc", Sync, allocate);
FLASH4_OP("tcgen05.dealloc", Sync, deallocate);
FLASH4_OP("tcgen05.relinquish_alloc_permit", Sync, relinquish);

}  // namespace

void require_allocated(const Cta& cta, uint32_t column, uint32_t columns) {
    if (columns == 0 || columns > kTmemColumns || column > kTmemColumns - columns)
        throw Fault("tmem", "columns " + std::to_string(column) + " to " + std::to_string(column + columns) +
                                " of tensor memory, which has 512");
    const auto begin = cta.tmem_owner.begin() + column;
    if (cta.tmem_owner.empty() || std::find(begin, begin + columns, 0) != begin + columns)
        throw Fault("tmem", "columns " + std::to_string(column) + " to " + std::to_string(column + columns) +
                                " of CTA " + std::to_string(cta.rank) + " are not allocated");
}

void require_tensor_memory(const Warp& warp) {
    if (warp.cta->launch->options.arch < 100) throw Fault("unsupported", "tcgen05 exists from sm_100a on");
}

void require_whole_warp(const Warp& warp, Mask mask) {
    if (mask != kAllLanes)
        throw Fault("tcgen05", ".sync.aligned instruction executed by part of warp " + std::to_string(warp.index));
}

Cta& peer_of(Cta& cta) {
    const uint32_t rank = cta.rank ^ 1;
    if (rank >= cta.cluster->ctas.size()) throw Fault("tcgen05", "cta_group::2 in a cluster of an odd number of CTAs");
    return *cta.cluster->ctas[rank];
}

void check_tmem_freed(Cta& cta) {
    const auto kept =
        std::count_if(cta.tmem_owner.begin(), cta.tmem_owner.end(), [](uint8_t owner) { return owner != 0; });
    if (!kept) return;
    cta.launch->report(
        {.kind = "tmem-leak",
         .message = "the CTA has exited with " + std::to_string(kept) + " columns of tensor memory allocated",
         .at = cta.tmem_allocated_at,
         .cta = cta.id});
}

}  // namespace flash4
