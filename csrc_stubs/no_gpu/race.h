// Happens-before over shared and tensor memory.
//
// Every warp is two agents: its first lane, which elections name and which speaks for the warp, and its other lanes.
// Nothing orders the two but bar.warp.sync and barriers that both wait for: neither that they run together nor a
// shuffle, vote or election (PTX ISA, Memory Consistency Model: program order is a thread's). The two count epochs
// together. Every unit that works for a warp asynchronously is an agent, too. A clock says up to which epoch of every
// agent its holder has been ordered after ("seen"), and up to which epoch the agent's generic-proxy writes have also
// passed a proxy fence on the way ("fenced"), which the asynchronous proxy needs (ibid., proxies). A proxy fence may be
// for the shared memory of the CTA that executes it only, so the second number is kept for each CTA's memory. Clocks
// and agents are a cluster's own: memory that only one cluster can reach needs no ordering with other clusters.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "isa.h"

namespace flash4 {
struct Cta;
struct Cluster;
struct Origin;

namespace race {

using Agent = uint32_t;

struct Clock {
    std::vector<uint32_t> seen;    // by agent; shorter means zeros
    std::vector<uint32_t> fenced;  // by agent, and for each by the CTA whose memory it is
    void merge(const Clock& other);
    void clear();
};

// The units that work for one warp, each an agent of its own. Bulk: reads of its bulk stores; BulkWrite is not tracked
// (it touches global memory only). CpAsync copies for the lanes other than the first, which has its own unit: a lane
// waits for its own copies. Both count epochs together.
enum class Unit : uint8_t { Warp, Bulk, CpAsync, CpAsyncOfFirst, Wgmma, TmemLoad, TmemStore, kCount };

// A piece of asynchronous work as an agent: what it is ordered after, and its own epoch. Copy it into the work's
// closure.
struct Ticket {
    Agent agent = 0;
    uint32_t epoch = 0;
    std::shared_ptr<const Clock> clock;  // null when races are not checked
    uint16_t cta = 0, warp = 0;          // origin
    uint32_t op = 0;
    uint32_t after = 0;   // works of the same agent up to this epoch come before it
    uint32_t serial = 0;  // tells works of one epoch apart; never 0 once issued
};

// What one instruction asks of both units of cp.async.
struct LaneTickets {
    Ticket others, first;
    const Ticket& of(int lane) const { return lane ? others : first; }
};

// A part of a CTA's shared memory.
struct Piece {
    uint32_t offset, bytes;
    bool operator==(const Piece&) const = default;
};

// What an instruction touches: all pieces, and which of them is the first lane's (no bytes: it touches none).
struct Pieces {
    std::span<const Piece> all;
    Piece first;
    bool first_shared;  // other lanes touch that piece, too
};

// In place of lanes: what the whole warp does as one, whichever lane names the address. It is ordered after what is
// before it in any lane, and before what all lanes have published or waited for.
inline constexpr Mask kTogether = 0;

class Checker {
public:
    explicit Checker(Cluster& cluster);
    ~Checker();

    // --- synchronisation by some lanes of a warp. Each advances the warp's epoch where it must.
    void release(Warp& warp, Mask lanes, Clock& into);  // into += what the lanes are ordered after, and their accesses
    void acquire(Warp& warp, Mask lanes, const Clock& from);
    void sync(Warp& warp, Mask lanes);                        // bar.warp.sync
    // fence.proxy.async: all they have seen becomes fenced, in all CTAs' memory or in that of their own.
    void proxy_fence(Warp& warp, Mask lanes, bool own_cta_only);
    static void complete(const Ticket& ticket, Clock& into);  // the work is done, as are those of its agent before it

    // --- asynchronous work. `issue` for a unit of the warp; all its epochs are joined in order by `join`.
    Ticket issue(Warp& warp, const Op& op, Mask lanes, Unit unit);
    LaneTickets issue_by_lanes(Warp& warp, const Op& op, Mask lanes);  // cp.async
    // The lanes have waited for the unit's work up to epoch, each for its own cp.async; the second form: for another warp's unit.
    void join(Warp& warp, Mask lanes, Unit unit, uint32_t epoch);
    void join(Warp& warp, Mask lanes, const Warp& worker, Unit unit, uint32_t epoch);
    // The tensor core of a CTA (tcgen05.mma, cp): works in order, so each is ordered after the one before it.
    Ticket issue_mma(Warp& warp, const Op& op, Mask lanes, uint32_t cta);
    // A copy that completes on the mbarrier at `offset` of `cta`, in that barrier's phase number `phase`.
    Ticket issue_copy(Warp& warp, const Op& op, Mask lanes, uint32_t cta, uint32_t offset, uint64_t phase);

    // --- accesses. Granules are 4 bytes of shared memory, and one column of 32 lanes of tensor memory.
    // Each of the lanes touches all the bytes.
    void read(Warp& warp, const Op& op, Mask lanes, Cta& cta, uint32_t offset, uint32_t bytes);
    void write(Warp& warp, const Op& op, Mask lanes, Cta& cta, uint32_t offset, uint32_t bytes);
    // Never races with other atomics.
    void atomic(Warp& warp, const Op& op, Mask lanes, Cta& cta, uint32_t offset, uint32_t bytes);
    // Each of the lanes touches a piece.
    void read(Warp& warp, const Op& op, Mask lanes, Cta& cta, const Pieces& pieces);
    void write(Warp& warp, const Op& op, Mask lanes, Cta& cta, const Pieces& pieces);
    void atomic(Warp& warp, const Op& op, Mask lanes, Cta& cta, const Pieces& pieces);
    // Volatile, relaxed and acquire loads: nor do they.
    void read_strong(Warp& warp, const Op& op, Mask lanes, Cta& cta, const Pieces& pieces);
    void read(const Ticket& by, Cta& cta, uint32_t offset, uint32_t bytes);  // asynchronous proxy
    void write(const Ticket& by, Cta& cta, uint32_t offset, uint32_t bytes);
    // cp.reduce.async.bulk and, through the generic proxy, red.async: never race with atomics.
    void reduce(const Ticket& by, Cta& cta, uint32_t offset, uint32_t bytes, bool generic);
    // cp.async (not bulk) is asynchronous but accesses through the generic proxy.
    void write_generic(const Ticket& by, Cta& cta, uint32_t offset, uint32_t bytes);
    // `quarters`: bit i for lanes 32i to 32i+31.
    void read_tmem(const Ticket& by, Cta& cta, uint32_t quarters, uint32_t column, uint32_t columns);
    void write_tmem(const Ticket& by, Cta& cta, uint32_t quarters, uint32_t column, uint32_t columns);
    // tcgen05.dealloc: by the warp itself, and conflicts with every access before. The columns' next owner starts
    // afresh.
    void free_tmem(Warp& warp, const Op& op, Cta& cta, uint32_t column, uint32_t columns);

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace race
}  // namespace flash4
