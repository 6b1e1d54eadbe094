// mov: whole registers, and vectors packed into a register or taken out of it (PTX ISA, mov).
//
// The pipe is Move, so that what is known of a register's origin may follow its value.
#include "alu.h"

namespace flash4::alu {
namespace {

constexpr auto same = [](auto a) { return a; };
FLASH4_OP("mov.b16", Move, map<same, U16, U16>);
FLASH4_OP("mov.b32", Move, map<same, U32, U32>);
FLASH4_OP("mov.b64", Move, map<same, U64, U64>);

// reg: d, elements from the lowest up.
template <class Whole, class Part, size_t... I>
Step pack_elements(Warp& w, const Op& op, Mask mask, std::index_sequence<I...>) {
    using Word = typename Whole::Value;
    constexpr int bits = 8 * sizeof(Word) / sizeof...(I);
    auto* d = cells<Whole>(w, op.reg[0]);
    const typename Part::Cell* parts[] = {cells<Part>(w, op.reg[1 + I])...};
    for_lanes(mask, [&](int lane) { d[lane] = ((static_cast<Word>(Part::load(parts[I][lane])) << (bits * I)) | ...); });
    return Step::Next;
}
template <class Whole, class Part, size_t N>
Step pack(Warp& w, const Op& op, Mask mask) {
    return pack_elements<Whole, Part>(w, op, mask, std::make_index_sequence<N>{});
}
FLASH4_OP("pack.b32.b16", Move, pack<U32, U16, 2>);
FLASH4_OP("pack.b32.b8", Move, pack<U32, U8, 4>);
FLASH4_OP("pack.b16.b8", Move, pack<U16, U8, 2>);
FLASH4_OP("pack.b64.b32", Move, pack<U64, U32, 2>);
FLASH4_OP("pack.b64.b16", Move, pack<U64, U16, 4>);

// reg: elements from the lowest up, any of which may be absent, then the source. An element may take the source's
// place.
template <class Whole, class Part, size_t N>
Step unpack(Warp& w, const Op& op, Mask mask) {
    using Word = typename Whole::Value;
    constexpr int bits = 8 * sizeof(Word) / N;
    Word whole[kLanes];
    const auto* a = cells<Whole>(w, op.reg[N]);
    for (int lane = 0; lane < kLanes; ++lane) whole[lane] = Whole::load(a[lane]);
    for (size_t i = 0; i < N; ++i) {
        if (op.reg[i] == kNoRegister) continue;
        auto* d = cells<Part>(w, op.reg[i]);
        for_lanes(mask, [&](int lane) {
            d[lane] = Part::store(static_cast<typename Part::Value>(whole[lane] >> (bits * i)));
        });
    }
    return Step::Next;
}
FLASH4_OP("unpack.b32.b16", Move, unpack<U32, U16, 2>);
FLASH4_OP("unpack.b32.b8", Move, unpack<U32, U8, 4>);
FLASH4_OP("unpack.b16.b8", Move, unpack<U16, U8, 2>);
FLASH4_OP("unpack.b64.b32", Move, unpack<U64, U32, 2>);
FLASH4_OP("unpack.b64.b16", Move, unpack<U64, U16, 4>);

}  // namespace
}  // namespace flash4::alu
