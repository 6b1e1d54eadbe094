// The fifth-generation tensor core: products, copies into tensor memory, and commits (PTX ISA, TensorCore 5th
// Generation). All that a CTA issues is done in order, later.
#include "tcgen05.h"

#include <cmath>
#include <cstring>

#include "async.h"
#include "banks.h"
#include "barrier.h"
#include "matrix.h"
#include "number.h"

namespace flash4 {
namespace {

// In the order of `KINDS` in flash4_torch/emulator/lower/tensor.py.
enum class Kind : uint8_t { F16, TF32, F8F6F4, I8 };
enum class Output : uint8_t { F16, F32, S32 };

// PTX ISA, tcgen05: Instruction Descriptor.
struct Shape {
    Output output;
    Element a, b;
    bool saturate, negate_a, negate_b, a_mn, b_mn;
    uint32_t m, n, ctas;
};

[[noreturn]] void bad_descriptor(const std::string& why) {
    throw Fault("descriptor", "tcgen05 instruction descriptor: " + why);
}

Element element_of(Kind kind, uint32_t code) {
    if (kind == Kind::F16 && code == 0) return Element::F16;
    if (kind == Kind::F16 && code == 1) return Element::BF16;
    if (kind == Kind::TF32 && code == 2) return Element::TF32;
    if (kind == Kind::F8F6F4 && code == 0) return Element::E4M3;
    if (kind == Kind::F8F6F4 && code == 1) return Element::E5M2;
    if (kind == Kind::I8 && code == 0) return Element::U8;
    if (kind == Kind::I8 && code == 1) return Element::S8;
    if (kind == Kind::F8F6F4 && code >= 3 && code <= 5)
        throw Fault("unsupported", "tcgen05.mma of elements of 4 or 6 bits");
    bad_descriptor("element type " + std::to_string(code) + " does not belong to the kind of the instruction");
}

Output output_of(Kind kind, uint32_t code) {
    const bool fits = kind == Kind::I8 ? code == 2 : kind == Kind::TF32 ? code == 1 : code <= 1;
    if (!fits) bad_descriptor("type " + std::to_string(code) + " of D does not belong to the kind of the instruction");
    return static_cast<Output>(code);
}

// PTX ISA, tcgen05.mma: Shape. N comes in steps of 8 for 64 rows, else of 16.
void check_size(const Shape& s) {
    const bool rows = s.ctas == 1 ? s.m == 64 || s.m == 128 : s.m == 128 || s.m == 256;
    const uint32_t step = s.m == 64 ? 8 : 16;
    if (!rows || s.n == 0 || s.n > kTileRows || s.n % step)
        bad_descriptor("M=" + std::to_string(s.m) + ", N=" + std::to_string(s.n) + " with " + std::to_string(s.ctas) +
                       " CTAs");
}

Shape shape_of(Kind kind, uint32_t bits, uint32_t ctas) {
    if (bits >> 2 & 1) throw Fault("unsupported", "sparse tcgen05.mma");
    const Shape shape{.output = output_of(kind, bits >> 4 & 3),
                      .a = element_of(kind, bits >> 7 & 7),
                      .b = element_of(kind, bits >> 10 & 7),
                      .saturate = (bits >> 3 & 1) != 0,
                      .negate_a = (bits >> 13 & 1) != 0,
                      .negate_b = (bits >> 14 & 1) != 0,
                      .a_mn = (bits >> 15 & 1) != 0,
                      .b_mn = (bits >> 16 & 1) != 0,
                      .m = (bits >> 24 & 31) * 16,
                      .n = (bits >> 17 & 63) * 8,
                      .ctas = ctas};
    check_size(shape);
    return shape;
}

// A part of D in one CTA: `lanes` lanes from `lane` hold rows of A from `row` times rows of B from `column`.
struct Part {
    uint32_t lane, lanes, row, column;
};

// PTX ISA, tcgen05: Data Path Layout Organization. With 64 rows a CTA, one CTA uses half of each warp's lanes; two CTAs
// let the upper 64 lanes hold the right half of the columns.
std::vector<Part> parts_of(const Shape& s) {
    if (s.ctas == 2 && s.m == 128) return {{0, 64, 0, 0}, {64, 64, 0, s.n / 2}};
    if (s.m == 64) return {{0, 16, 0, 0}, {32, 16, 16, 0}, {64, 16, 32, 0}, {96, 16, 48, 0}};
    return {{0, 128, 0, 0}};
}
uint32_t columns_of(const Shape& s) { return s.ctas == 2 && s.m == 128 ? s.n / 2 : s.n; }

constexpr uint32_t kMaxMasks = 8;

// One product as it was issued.
struct Product {
    Cta* cta;
    race::Ticket ticket;
    Shape shape;
    TmemAddress d, tmem_a{0};
    uint64_t a, b;  // descriptors
    bool a_in_tmem, accumulate;
    float scale;                        // of what D held
    uint32_t disabled[kMaxMasks] = {};  // lanes that stay as they are, CTA by CTA
};

void check_lanes(const Product& p) {
    const bool half = p.shape.m == 64 && p.shape.ctas == 1;
    if (p.d.lane != 0 && !(half && p.d.lane == 16))
        throw Fault("tmem", "tcgen05.mma into lane " + std::to_string(p.d.lane));
    if (!p.a_in_tmem) return;
    if (p.tmem_a.lane != p.d.lane) throw Fault("tmem", "tcgen05.mma with A and D in different lanes of tensor memory");
    if (p.shape.a_mn) bad_descriptor("A in tensor memory cannot be MN-major");
}

// The row of A that a part begins with, in the tile: A from tensor memory is multiplied in the lanes that hold it.
uint32_t first_row(const Product& p, const Part& part) { return p.a_in_tmem ? part.lane + p.d.lane : part.row; }

void fetch_a(const Product& p, Cta& cta, Tile& tile) {
    if (!p.a_in_tmem)
        return gather(p.ticket, cta, tcgen05_matrix(p.a), p.shape.a, p.shape.a_mn,
                      {.first = 0, .count = p.shape.m / p.shape.ctas}, tile);
    require_allocated(cta, p.tmem_a.column, kTileWords);
    if (cta.cluster->races) cta.cluster->races->read_tmem(p.ticket, cta, 0xF, p.tmem_a.column, kTileWords);
    spread(p.shape.a, tmem_column(cta, p.tmem_a.column), kTmemLanes, 1, kTmemLanes, tile.value);
}

// What a product reads of shared memory, in both CTAs of a pair together.
uint64_t operand_bytes(const Product& p) { return uint64_t{kTileBytes} * (p.shape.n + (p.a_in_tmem ? 0 : p.shape.m)); }

// Each CTA of a pair holds half of B's rows.
void fetch_b(const Product& p, Tile& tile) {
    const uint32_t rows = p.shape.n / p.shape.ctas;
    for (uint32_t i = 0; i < p.shape.ctas; ++i) {
        Cta& cta = *p.cta->cluster->ctas[p.shape.ctas == 2 ? (p.cta->rank & ~1u) + i : p.cta->rank];
        gather(p.ticket, cta, tcgen05_matrix(p.b), p.shape.b, p.shape.b_mn, {.first = 0, .count = rows, .to = i * rows},
               tile);
    }
}

void load_column(const Product& p, const uint32_t* from, uint32_t lanes, float* to) {
    if (!p.accumulate || p.shape.output == Output::S32) {
        std::memset(to, 0, lanes * 4);
    } else if (p.shape.output == Output::F16) {
        for (uint32_t i = 0; i < lanes; ++i) to[i] = number::from_f16(static_cast<uint16_t>(from[i])) * p.scale;
    } else {
        const float* values = reinterpret_cast<const float*>(from);
        for (uint32_t i = 0; i < lanes; ++i) to[i] = values[i] * p.scale;
    }
}

uint32_t stored(const Product& p, float sum, uint32_t old) {
    switch (p.shape.output) {
        case Output::F16: return number::to_f16(sum);  // a 16-bit element takes a column of its own
        case Output::F32: return __builtin_bit_cast(uint32_t, sum);
        case Output::S32:
            return static_cast<uint32_t>(
                add_integer(p.accumulate ? static_cast<int32_t>(old) : 0, sum, p.shape.saturate));
    }
    return 0;
}

// `disabled`: the masks of the lanes' CTA.
void store_column(const Product& p, const uint32_t* disabled, uint32_t lane, const float* from, uint32_t lanes,
                  uint32_t* to) {
    const bool all = !(disabled[0] | disabled[1] | disabled[2] | disabled[3]);
    if (all && p.shape.output == Output::F32) {
        std::memcpy(to, from, lanes * 4);
        return;
    }
    for (uint32_t i = 0; i < lanes; ++i)
        if (!(disabled[(lane + i) / 32] >> (lane + i) % 32 & 1)) to[i] = stored(p, from[i], to[i]);
}

void multiply(const Product& p, Cta& cta, const Tile& a, const Tile& b, const uint32_t* disabled) {
    alignas(64) float sums[4][kTileRows];
    const uint32_t k = tile_k(p.shape.a), columns = columns_of(p.shape);
    for (const Part& part : parts_of(p.shape)) {
        const uint32_t lane = part.lane + p.d.lane;
        for (uint32_t c = 0; c < columns; c += 4) {
            uint32_t* to[4];
            for (uint32_t i = 0; i < 4; ++i) {
                to[i] = tmem_column(cta, p.d.column + c + i) + lane;
                load_column(p, to[i], part.lanes, sums[i]);
            }
            multiply_add(b.value + part.column + c, a.value + first_row(p, part), k, part.lanes, sums[0]);
            for (uint32_t i = 0; i < 4; ++i) store_column(p, disabled, lane, sums[i], part.lanes, to[i]);
        }
    }
}

// Which warps' lanes the product writes.
uint32_t quarters(const uint32_t* disabled) {
    uint32_t mask = 0;
    for (uint32_t i = 0; i < 4; ++i)
        if (~disabled[i]) mask |= 1u << i;
    return mask;
}

void perform(const Product& p) {
    static thread_local Tile a, b;
    fetch_b(p, b);
    for (uint32_t i = 0; i < p.shape.ctas; ++i) {
        Cta& cta = *p.cta->cluster->ctas[p.shape.ctas == 2 ? (p.cta->rank & ~1u) + i : p.cta->rank];
        fetch_a(p, cta, a);
        if (p.shape.negate_a != p.shape.negate_b) negate(a, p.shape.a);
        require_allocated(cta, p.d.column, columns_of(p.shape));
        const uint32_t* disabled = p.disabled + 4 * i;
        if (cta.cluster->races)
            cta.cluster->races->write_tmem(p.ticket, cta, quarters(disabled), p.d.column, columns_of(p.shape));
        multiply(p, cta, a, b, disabled);
    }
}

// reg: D, A (address or descriptor), B, instruction descriptor, enable-input-d, then four masks a CTA, or none.
// attr: offset of D, offset of A, kind, cta_group, A in tensor memory, exponent of scale-input-d.
Product product_of(Warp& warp, const Op& op, int lane) {
    const bool a_in_tmem = op.attr[4];
    Product p{
        .cta = warp.cta,
        .ticket = {},
        .shape = shape_of(static_cast<Kind>(op.attr[2]), warp.u32(op.reg[3])[lane], static_cast<uint32_t>(op.attr[3])),
        .d = TmemAddress(warp.u32(op.reg[0])[lane] + static_cast<uint32_t>(op.attr[0])),
        .a = a_in_tmem ? 0 : warp.u64(op.reg[1])[lane],
        .b = warp.u64(op.reg[2])[lane],
        .a_in_tmem = a_in_tmem,
        .accumulate = (warp.predicate(op.reg[4]) >> lane & 1) != 0,
        .scale = std::ldexp(1.0f, -static_cast<int>(op.attr[5]))};
    if (a_in_tmem) p.tmem_a = TmemAddress(warp.u32(op.reg[1])[lane] + static_cast<uint32_t>(op.attr[1]));
    for (uint32_t i = 5; i < op.regs; ++i) p.disabled[i - 5] = warp.u32(op.reg[i])[lane];
    check_lanes(p);
    if (p.shape.ctas == 2) peer_of(*warp.cta);
    return p;
}

// Hands work to the tensor core of the CTA.
void submit(Warp& warp, const Op& op, const char* what, std::function<void()> perform) {
    Cta& cta = *warp.cta;
    auto followers = std::make_shared<std::vector<std::function<void()>>>();
    cta.tensor_core_followers = followers;
    cta.cluster->submit({.queue = queue_of(QueueKind::Mma, cta),
                         .origin = warp.origin(op),
                         .what = what,
                         .perform =
                             [perform = std::move(perform), followers = std::move(followers)] {
                                 perform();
                                 for (const auto& follower : *followers) follower();
                             },
                         .reads_cta = cta.rank});
}

// Runs when all that the CTA has handed to its tensor core is done: a commit is no work of its own.
void when_done(Cta& cta, std::function<void()> follower) {
    if (auto followers = cta.tensor_core_followers.lock()) followers->push_back(std::move(follower));
    else follower();
}

race::Ticket issue(Warp& warp, const Op& op, int lane) {
    race::Checker* races = warp.cta->cluster->races.get();
    return races ? races->issue_mma(warp, op, 1u << lane, warp.cta->rank) : race::Ticket{};
}

// Instructions that one thread issues: once for each lane that executes them.
template <class Body>
Step by_lane(Warp& warp, Mask mask, Body&& body) {
    require_tensor_memory(warp);
    for (Mask rest = mask; rest; rest &= rest - 1) body(first_lane(rest));
    return Step::Next;
}

Step mma(Warp& warp, const Op& op, Mask mask) {
    return by_lane(warp, mask, [&](int lane) {
        Product p = product_of(warp, op, lane);
        p.ticket = issue(warp, op, lane);
        Counters& counters = warp.cta->launch->counters;
        ++counters.mma;
        counters.mma_flops += 2ull * p.shape.m * p.shape.n * tile_k(p.shape.a);
        count_shared(warp, op, in_rows(operand_bytes(p)));
        submit(warp, op, "tcgen05.mma", [p] { perform(p); });
    });
}

// --- copies from shared memory

// In the order of `COPIES` in flash4_torch/emulator/lower/tensor.py.
enum class Spread : uint8_t { Rows128x256, Rows128x128, Rows64Warps02, Rows64Warps01, Rows32 };

// Of the source, in rows and in chunks of 16 bytes.
uint32_t rows_of(Spread spread) { return spread <= Spread::Rows128x128 ? 128 : spread == Spread::Rows32 ? 32 : 64; }
uint32_t chunks_of(Spread spread) { return spread == Spread::Rows128x256 ? 2 : 1; }

// Which row of the source a lane receives.
uint32_t source_row(Spread spread, uint32_t lane) {
    switch (spread) {
        case Spread::Rows64Warps02: return lane % 64;
        case Spread::Rows64Warps01: return lane / 64 * 32 + lane % 32;
        case Spread::Rows32: return lane % 32;
        default: return lane;
    }
}

void copy_into(const race::Ticket& ticket, Cta& cta, Spread spread, uint64_t descriptor, uint32_t column) {
    const uint32_t chunks = chunks_of(spread), words = chunks * 4, rows = rows_of(spread);
    uint32_t raw[kTmemLanes * kTileWords];
    fetch(ticket, cta, tcgen05_matrix(descriptor), {.first = 0, .count = rows}, chunks,
          reinterpret_cast<uint8_t*>(raw));
    require_allocated(cta, column, words);
    if (cta.cluster->races) cta.cluster->races->write_tmem(ticket, cta, 0xF, column, words);
    for (uint32_t w = 0; w < words; ++w)
        for (uint32_t lane = 0; lane < kTmemLanes; ++lane)
            tmem_column(cta, column + w)[lane] = raw[source_row(spread, lane) * words + w];
}

// reg: tensor memory address, descriptor; attr: offset, shape, cta_group.
Step copy(Warp& warp, const Op& op, Mask mask) {
    return by_lane(warp, mask, [&](int lane) {
        Cta* cta = warp.cta;
        Cta* peer = op.attr[2] == 2 ? &peer_of(*cta) : nullptr;
        const TmemAddress to(warp.u32(op.reg[0])[lane] + static_cast<uint32_t>(op.attr[0]));
        if (to.lane) throw Fault("tmem", "tcgen05.cp to lane " + std::to_string(to.lane));
        const Spread spread = static_cast<Spread>(op.attr[1]);
        const uint64_t descriptor = warp.u64(op.reg[1])[lane];
        const race::Ticket ticket = issue(warp, op, lane);
        count_shared(warp, op, in_rows(uint64_t{rows_of(spread)} * chunks_of(spread) * 16 * (peer ? 2 : 1)));
        submit(warp, op, "tcgen05.cp", [=] {
            copy_into(ticket, *cta, spread, descriptor, to.column);
            if (peer) copy_into(ticket, *peer, spread, descriptor, to.column);
        });
    });
}

// --- commit

void signal(const race::Ticket& ticket, SharedRef barrier) {
    race::Checker::complete(ticket, mbarrier_at(barrier).clock);
    arrive(barrier, 1);
}

// The CTAs that a commit signals, at the barrier's offset in each.
std::vector<SharedRef> targets(Cluster& cluster, SharedRef barrier, uint32_t cta_mask) {
    std::vector<SharedRef> places;
    for (Mask rest = cta_mask; rest; rest &= rest - 1) {
        const uint32_t rank = static_cast<uint32_t>(first_lane(rest));
        places.push_back(shared_at(cluster, rank << kRankShift | barrier.offset, 8, 8));
    }
    return places;
}

// reg: mbarrier, and the mask of CTAs for multicast; attr: offset, the address is generic.
Step commit(Warp& warp, const Op& op, Mask mask) {
    return by_lane(warp, mask, [&](int lane) {
        const uint32_t address =
            op.attr[1] ? static_cast<uint32_t>(warp.u64(op.reg[0])[lane]) : warp.u32(op.reg[0])[lane];
        const SharedRef barrier = shared_at(warp, address + static_cast<uint32_t>(op.attr[0]), 8, 8);
        Cluster& cluster = *warp.cta->cluster;
        const auto places =
            op.regs == 1 ? std::vector{barrier} : targets(cluster, barrier, warp.u32(op.reg[1])[lane] & 0xFFFFu);
        when_done(*warp.cta, [ticket = issue(warp, op, lane), places] {
            for (SharedRef place : places) signal(ticket, place);
        });
    });
}

FLASH4_OP("tcgen05.mma", Mma, mma);
FLASH4_OP("tcgen05.cp", Mma, copy);
FLASH4_OP("tcgen05.commit", Sync, commit);

}  // namespace
}  // namespace flash4
