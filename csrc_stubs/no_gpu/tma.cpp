// Tensor copies between global and shared memory, tile mode (PTX ISA: cp.async.bulk.tensor and its .reduce form).
#include <algorithm>
#include <cstring>

#include "banks.h"
#include "copy.h"
#include "tensor_map.h"

namespace flash4 {
namespace {

using tma::kMaxRank;
using tma::Swizzle;
using tma::TensorMap;

constexpr uint32_t kTileAlignment = 128;
constexpr uint32_t kChunk = 16;  // bytes that are moved together

// One box of a tensor: where it begins, in elements; may reach outside on all sides.
struct Box {
    TensorMap map;
    int64_t start[kMaxRank];
};

// The part of a box's row that lies inside the tensor.
struct Row {
    uint32_t number;        // in the box
    uint64_t address;       // of the first byte that is inside
    uint32_t begin, bytes;  // of the inside part, relative to the row; 0 bytes: all outside
};

template <class Body>
void for_rows(const Box& box, Body&& body) {
    const TensorMap& map = box.map;
    const int64_t size0 = static_cast<int64_t>(map.size[0]), width = map.box[0];
    const int64_t low = std::clamp<int64_t>(-box.start[0], 0, width),
                  high = std::clamp<int64_t>(size0 - box.start[0], low, width);
    const uint32_t element = map.element();
    for (uint32_t number = 0; number < map.rows(); ++number) {
        uint64_t address = map.address + static_cast<uint64_t>(box.start[0] + low) * element;
        bool inside = high > low;
        uint32_t rest = number;
        for (uint32_t d = 1; d < map.rank; ++d) {
            const int64_t at = box.start[d] + rest % map.box[d];
            rest /= map.box[d];
            inside &= at >= 0 && at < static_cast<int64_t>(map.size[d]);
            address += static_cast<uint64_t>(at) * map.stride[d];
        }
        body(Row{number, address, static_cast<uint32_t>(low) * element,
                 inside ? static_cast<uint32_t>(high - low) * element : 0});
    }
}

// Whole chunks of a row's part that lies inside: an H200 stores these, into what follows the tensor's row.
uint32_t stored_bytes(const Row& row) { return (row.bytes + kChunk - 1) / kChunk * kChunk; }
uint32_t exact_bytes(const Row& row) { return row.bytes; }

// All global memory that a box touches must be the kernel's.
void check_global(Launch& launch, const Box& box, uint32_t (*touched)(const Row&)) {
    uint64_t low = ~0ull, high = 0;
    for_rows(box, [&](const Row& row) {
        if (!row.bytes) return;
        low = std::min(low, row.address);
        high = std::max(high, row.address + touched(row));
    });
    if (high) global_at(launch, low, high - low, 1);
}

// Calls body(byte in the tile, byte in the row, bytes) for the pieces of a row that lie together in a tile.
// The permutation depends on the tile's offset in shared memory.
template <class Body>
void for_chunks(const TensorMap& map, uint32_t tile_offset, uint32_t row, Body&& body) {
    const uint32_t bytes = map.row_bytes(), begin = tile_offset + row * map.pitch();
    const uint32_t step = map.swizzle == Swizzle::None ? bytes : 16;
    for (uint32_t at = 0; at < bytes; at += step) body(tma::swizzled(map.swizzle, begin + at) - tile_offset, at, step);
}

// Calls body(byte in the tile, bytes) for the parts of a tile that its rows take: all of it, unless they are narrow.
template <class Body>
void for_parts(const TensorMap& map, uint32_t tile_offset, Body&& body) {
    if (map.pitch() == map.row_bytes()) return body(0u, map.tile_bytes());
    for (uint32_t row = 0; row < map.rows(); ++row)
        for_chunks(map, tile_offset, row, [&](uint32_t in_tile, uint32_t, uint32_t bytes) { body(in_tile, bytes); });
}

// What elements outside the tensor read as.
void fill_row(const TensorMap& map, std::vector<uint8_t>& row) {
    constexpr uint8_t nan[] = {0xF7, 0x7F};
    for (size_t i = 0; i < row.size(); ++i) row[i] = map.fill_nan ? nan[i % 2] : 0;
}

// To the nearest number with 10 bits of fraction, ties away from zero.
void round_to_tf32(uint8_t* elements, uint32_t bytes) {
    for (uint32_t at = 0; at < bytes; at += 4) {
        uint32_t bits;
        std::memcpy(&bits, elements + at, sizeof bits);
        const bool finite = (~bits & 0x7F800000u) != 0;
        if (finite) bits = (bits + 0x1000u) & ~0x1FFFu;
        std::memcpy(elements + at, &bits, sizeof bits);
    }
}

void load_box(const Box& box, SharedRef tile) {
    std::vector<uint8_t> row(box.map.row_bytes());
    uint8_t* to = tile.data();
    for_rows(box, [&](const Row& part) {
        if (part.bytes < row.size()) fill_row(box.map, row);
        if (part.bytes)
            std::memcpy(row.data() + part.begin, reinterpret_cast<const uint8_t*>(part.address), part.bytes);
        if (box.map.tf32) round_to_tf32(row.data() + part.begin, part.bytes);
        for_chunks(box.map, tile.offset, part.number, [&](uint32_t in_tile, uint32_t in_row, uint32_t bytes) {
            std::memcpy(to + in_tile, row.data() + in_row, bytes);
        });
    });
}

// `combine` null: copies, else reduces into what is there.
void store_box(const Box& box, uint32_t tile_offset, const uint8_t* tile, Reducer combine) {
    std::vector<uint8_t> row(box.map.row_bytes());
    for_rows(box, [&](const Row& part) {
        if (!part.bytes) return;
        for_chunks(box.map, tile_offset, part.number, [&](uint32_t in_tile, uint32_t in_row, uint32_t bytes) {
            std::memcpy(row.data() + in_row, tile + in_tile, bytes);
        });
        uint8_t* to = reinterpret_cast<uint8_t*>(part.address);
        if (combine) reduce(combine, box.map.element(), to, row.data() + part.begin, part.bytes);
        else std::memcpy(to, row.data() + part.begin, stored_bytes(part));
    });
}

TensorMap map_at(Warp& warp, uint32_t reg, int lane, int64_t offset) {
    const uint64_t address = warp.u64(reg)[lane] + static_cast<uint64_t>(offset);
    return tma::decode(place_at(warp, Space::Generic, address, tma::kMapBytes, tma::kMapAlignment).data);
}

Box box_at(Warp& warp, TensorMap map, const uint32_t* coordinates, uint32_t count, int lane) {
    if (map.rank != count)
        throw Fault("tensor-map",
                    std::to_string(count) + " coordinates for a tensor map of rank " + std::to_string(map.rank));
    Box box{map, {}};
    for (uint32_t i = 0; i < count; ++i) box.start[i] = warp.s32(coordinates[i])[lane];
    // An H200 stops with an illegal instruction.
    if (box.start[0] * static_cast<int64_t>(map.element()) % kChunk)
        throw Fault("misaligned",
                    "the innermost coordinate, " + std::to_string(box.start[0]) + ", is not at a multiple of 16 bytes");
    // An H200 leaves chunks of 16 bytes together nevertheless.
    if (map.swizzle == Swizzle::B128Atom32 && warp.cta->launch->options.arch < 100)
        throw Fault("tensor-map", "a swizzle of 32-byte chunks before sm_100");
    return box;
}

SharedRef in_cta(Cluster& cluster, uint32_t rank, SharedRef like) {
    if (rank >= cluster.ctas.size())
        throw Fault("out-of-bounds",
                    "CTA " + std::to_string(rank) + " of a cluster of " + std::to_string(cluster.ctas.size()));
    return {cluster.ctas[rank].get(), like.offset};
}

// Where a copy to one CTA signals: to the barrier that was named, or, of a copy to several CTAs, to the one at the same
// place in each, or in each one's even or odd neighbour when the CTAs work in pairs.
SharedRef barrier_of(Cluster& cluster, SharedRef named, uint32_t rank, bool multicast, bool pairs) {
    if (!multicast) return named;
    return in_cta(cluster, pairs ? (rank & ~1u) | (named.cta->rank & 1) : rank, named);
}

void check_barrier(SharedRef tile, SharedRef barrier, bool pairs) {
    const uint32_t apart = tile.cta->rank ^ barrier.cta->rank;
    if (apart > (pairs ? 1u : 0u))
        throw Fault("mbarrier", "a copy to CTA " + std::to_string(tile.cta->rank) + " cannot signal CTA " +
                                    std::to_string(barrier.cta->rank));
}

void submit_load(Warp& warp, const Op& op, Mask lane, const Box& box, SharedRef tile, SharedRef barrier) {
    Cluster& cluster = *warp.cta->cluster;
    const Arrival arrival = announce(warp, op, lane, barrier);
    const uint32_t bytes = box.map.bytes();
    count_shared(warp, op, in_rows(bytes));
    auto perform = [=, &cluster] {
        for_parts(box.map, tile.offset,
                  [&](uint32_t at, uint32_t part) { check_write(arrival.ticket, {tile.cta, tile.offset + at}, part); });
        load_box(box, tile);
        cluster.launch->counters.async_bytes += bytes;
        land(arrival, bytes);
    };
    cluster.submit({.queue = 0,
                    .origin = warp.origin(op),
                    .what = "TMA load",
                    .perform = std::move(perform),
                    .reads_cta = tile.cta->rank});
}

// reg: tile, tensor map, barrier, CTA mask or kNoRegister, coordinates.
// attr: constants of the first three, CTAs in pairs.
Step tensor_load(Warp& warp, const Op& op, Mask mask) {
    Cluster& cluster = *warp.cta->cluster;
    const bool pairs = op.attr[3], multicast = op.reg[3] != kNoRegister;
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        const Box box = box_at(warp, map_at(warp, op.reg[1], lane, op.attr[1]), op.reg + 4, op.regs - 4u, lane);
        check_global(*cluster.launch, box, exact_bytes);
        const SharedRef tile = shared_at(warp, warp.u32(op.reg[0])[lane] + static_cast<uint32_t>(op.attr[0]),
                                         box.map.tile_bytes(), kTileAlignment);
        const SharedRef barrier = shared_at(warp, warp.u32(op.reg[2])[lane] + static_cast<uint32_t>(op.attr[2]), 8, 8);
        if (!multicast) check_barrier(tile, barrier, pairs);
        const uint32_t ctas = multicast ? warp.u32(op.reg[3])[lane] & 0xFFFF : 1u << tile.cta->rank;
        for (uint32_t left = ctas; left; left &= left - 1) {
            const uint32_t rank = static_cast<uint32_t>(__builtin_ctz(left));
            submit_load(warp, op, 1u << lane, box, in_cta(cluster, rank, tile),
                        barrier_of(cluster, barrier, rank, multicast, pairs));
        }
    }
    return Step::Next;
}

// An H200 stops with an illegal instruction.
void check_not_negative(const Box& box) {
    for (uint32_t d = 0; d < box.map.rank; ++d)
        if (box.start[d] < 0)
            throw Fault("out-of-bounds", "a store at the negative coordinate " + std::to_string(box.start[d]));
}

// The lanes of `mask` whose tensor map, tile and coordinates are those of its first one.
Mask lanes_alike(Warp& warp, const Op& op, Mask mask) {
    const int first = first_lane(mask);
    Mask alike = 0;
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        bool same = warp.u64(op.reg[0])[lane] == warp.u64(op.reg[0])[first];
        for (uint32_t i = 1; i < op.regs; ++i) same &= warp.u32(op.reg[i])[lane] == warp.u32(op.reg[i])[first];
        alike |= static_cast<Mask>(same) << lane;
    }
    return alike;
}

// reg: tensor map, tile, coordinates; attr: constants of the first two, Reduction or -1. A store that all lanes of a
// warp issue, as CuTe-DSL lets them, is done once; a reduction cannot be.
Step tensor_store(Warp& warp, const Op& op, Mask mask) {
    const bool reduces = op.attr[2] >= 0;
    for (Mask rest = mask, lanes; rest; rest &= ~lanes) {
        const int lane = first_lane(rest);
        lanes = reduces ? 1u << lane : lanes_alike(warp, op, rest);
        const Box box = box_at(warp, map_at(warp, op.reg[0], lane, op.attr[0]), op.reg + 2, op.regs - 2u, lane);
        check_not_negative(box);
        check_global(*warp.cta->launch, box, op.attr[2] < 0 ? stored_bytes : exact_bytes);
        const SharedRef tile = shared_at(warp, warp.u32(op.reg[1])[lane] + static_cast<uint32_t>(op.attr[1]),
                                         box.map.tile_bytes(), kTileAlignment);
        const Reducer combine = reduces ? global_reducer(static_cast<Reduction>(op.attr[2]), box.map.type) : nullptr;
        submit_bulk_store(warp, op, lanes, combine ? "TMA reduction" : "TMA store", tile, box.map.tile_bytes(),
                          [=](const uint8_t* data) { store_box(box, tile.offset, data, combine); });
    }
    return Step::Next;
}

// reg: address of the tensor map, new value.
// attr: constant of the address, Space, Field, dimension, bytes of the value.
Step replace_field(Warp& warp, const Op& op, Mask mask) {
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        const Space space = static_cast<Space>(op.attr[1]);
        const Place place = place_at(warp, space, lane_address(warp, space, op.reg[0], lane, op.attr[0]),
                                     tma::kMapBytes, tma::kMapAlignment);
        race::Checker* races = warp.cta->cluster->races.get();
        if (races && place.cta) races->write(warp, op, 1u << lane, *place.cta, place.offset, tma::kMapBytes);
        const uint64_t value = op.attr[4] == 8 ? warp.u64(op.reg[1])[lane] : warp.u32(op.reg[1])[lane];
        tma::replace(place.data, static_cast<tma::Field>(op.attr[2]), static_cast<uint32_t>(op.attr[3]), value);
    }
    return Step::Next;
}

// reg: global destination, shared source (32 bits); attr: constants of both. All lanes name the same.
Step publish_map(Warp& warp, const Op& op, Mask mask) {
    const int lane = first_lane(mask);
    const Place to = place_at(warp, Space::Generic, warp.u64(op.reg[0])[lane] + static_cast<uint64_t>(op.attr[0]),
                              tma::kMapBytes, tma::kMapBytes);
    const SharedRef from =
        shared_at(warp, warp.u32(op.reg[1])[lane] + static_cast<uint32_t>(op.attr[1]), tma::kMapBytes, tma::kMapBytes);
    if (race::Checker* races = warp.cta->cluster->races.get())
        races->read(warp, op, mask, *from.cta, from.offset, tma::kMapBytes);
    std::memcpy(to.data, from.data(), tma::kMapBytes);
    return Step::Next;
}

FLASH4_OP("tma.load", Async, tensor_load);
FLASH4_OP("tma.store", Async, tensor_store);
FLASH4_OP("tensormap.replace", Memory, replace_field);
FLASH4_OP("tensormap.publish", Memory, publish_map);

}  // namespace
}  // namespace flash4
