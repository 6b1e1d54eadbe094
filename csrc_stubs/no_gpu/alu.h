// How plain arithmetic is written: a function of scalars, applied to the lanes of registers of given PTX types.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "machine.h"
#include "number.h"

namespace flash4::alu {

// How a PTX type lies in a register: `kPerLane` elements a lane, each in a cell of its own.
// Cells are integers throughout, so that no register is seen through two unrelated types.
template <class V, class C, int PerLane = 1>
struct Bits {
    using Value = V;
    using Cell = C;
    static constexpr int kPerLane = PerLane;
    static V load(C cell) {
        if constexpr (std::is_floating_point_v<V>) return std::bit_cast<V>(cell);
        else return static_cast<V>(cell);
    }
    static C store(V value) {
        if constexpr (std::is_floating_point_v<V>) return std::bit_cast<C>(value);
        else return static_cast<C>(static_cast<std::make_unsigned_t<V>>(value));
    }
};
using U8 = Bits<uint8_t, uint32_t>;
using S8 = Bits<int8_t, uint32_t>;
using U16 = Bits<uint16_t, uint32_t>;
using S16 = Bits<int16_t, uint32_t>;
using U32 = Bits<uint32_t, uint32_t>;
using S32 = Bits<int32_t, uint32_t>;
using U64 = Bits<uint64_t, uint64_t>;
using S64 = Bits<int64_t, uint64_t>;
using F32 = Bits<float, uint32_t>;
using F64 = Bits<double, uint64_t>;
using U16x2 = Bits<uint16_t, uint16_t, 2>;
using S16x2 = Bits<int16_t, uint16_t, 2>;
using F32x2 = Bits<float, uint32_t, 2>;

// The half-precision types are handed over as f32, which holds them exactly.
template <class C, int PerLane>
struct Float16 {
    using Value = float;
    using Cell = C;
    static constexpr int kPerLane = PerLane;
    static float load(C cell) { return number::from_f16(static_cast<uint16_t>(cell)); }
    static C store(float value) { return number::to_f16(value); }
};
template <class C, int PerLane>
struct BFloat16 {
    using Value = float;
    using Cell = C;
    static constexpr int kPerLane = PerLane;
    static float load(C cell) { return number::from_bf16(static_cast<uint16_t>(cell)); }
    static C store(float value) { return number::to_bf16(value); }
};
using F16 = Float16<uint32_t, 1>;
using F16x2 = Float16<uint16_t, 2>;
using BF16 = BFloat16<uint32_t, 1>;
using BF16x2 = BFloat16<uint16_t, 2>;

template <class Type>
typename Type::Cell* cells(Warp& w, uint32_t offset) {
    return reinterpret_cast<typename Type::Cell*>(w.registers + offset);
}

// Calls body(index) for every element of the lanes in `mask`.
template <int PerLane, class Body>
inline __attribute__((always_inline)) void for_elements(Mask mask, Body&& body) {
    if constexpr (PerLane == 1) {
        for_lanes(mask, body);
    } else if (mask == kAllLanes) {
#pragma GCC ivdep
        for (int i = 0; i < PerLane * kLanes; ++i) body(i);
    } else {
        for (Mask rest = mask; rest; rest &= rest - 1)
            for (int i = 0; i < PerLane; ++i) body(PerLane * first_lane(rest) + i);
    }
}

// reg: destination, sources. Not inlined, so that its arithmetic stays within a Rounding of its caller.
template <auto F, class D, class... S>
[[gnu::noinline]] Step map(Warp& w, const Op& op, Mask mask) {
    static_assert(((D::kPerLane == S::kPerLane) && ...));
    return [&]<size_t... I>(std::index_sequence<I...>) {
        auto* d = cells<D>(w, op.reg[0]);
        const auto s = std::tuple{static_cast<const typename S::Cell*>(cells<S>(w, op.reg[1 + I]))...};
        for_elements<D::kPerLane>(
            mask, [&](int i) { d[i] = D::store(static_cast<typename D::Value>(F(S::load(std::get<I>(s)[i])...))); });
        return Step::Next;
    }(std::index_sequence_for<S...>{});
}

// The same with attr[0] as F's first argument.
template <auto F, class D, class... S>
[[gnu::noinline]] Step map_with(Warp& w, const Op& op, Mask mask) {
    static_assert(((D::kPerLane == S::kPerLane) && ...));
    return [&]<size_t... I>(std::index_sequence<I...>) {
        auto* d = cells<D>(w, op.reg[0]);
        const auto s = std::tuple{static_cast<const typename S::Cell*>(cells<S>(w, op.reg[1 + I]))...};
        const int64_t attr = op.attr[0];
        for_elements<D::kPerLane>(mask, [&](int i) {
            d[i] = D::store(static_cast<typename D::Value>(F(attr, S::load(std::get<I>(s)[i])...)));
        });
        return Step::Next;
    }(std::index_sequence_for<S...>{});
}

// The CPU's rounding direction, for as long as this lives.
class DirectedRounding {
public:
    explicit DirectedRounding(number::Rounding rounding);
    ~DirectedRounding();
    DirectedRounding(const DirectedRounding&) = delete;

private:
    int saved_;
};

// attr: ..., the rounding last. Runs a handler in that direction.
template <Handler Inner>
Step directed(Warp& w, const Op& op, Mask mask) {
    const DirectedRounding scope(static_cast<number::Rounding>(op.attr[op.attrs - 1]));
    return Inner(w, op, mask);
}

}  // namespace flash4::alu
