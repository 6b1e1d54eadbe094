// Integer arithmetic, logic and bit fields (PTX ISA: Integer Arithmetic, Extended-Precision, Logic and Shift
// Instructions).
//
// Registers are always the destination and then the sources in PTX's order.
#include <algorithm>

#include "alu.h"

namespace flash4::alu {
namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;

// Twice as wide, for high halves and wide products.
template <class T>
struct WiderOf;
template <>
struct WiderOf<int16_t> {
    using Type = int32_t;
};
template <>
struct WiderOf<uint16_t> {
    using Type = uint32_t;
};
template <>
struct WiderOf<int32_t> {
    using Type = int64_t;
};
template <>
struct WiderOf<uint32_t> {
    using Type = uint64_t;
};
template <>
struct WiderOf<int64_t> {
    using Type = __int128;
};
template <>
struct WiderOf<uint64_t> {
    using Type = unsigned __int128;
};
template <class T>
using Wider = typename WiderOf<T>::Type;

template <class T>
constexpr int kBits = 8 * sizeof(T);

// Arithmetic wraps around, so it is done on unsigned numbers that C++ does not promote to a signed type.
template <class T>
using Wrapping = std::conditional_t<(sizeof(T) < 4), uint32_t, Unsigned<T>>;

struct Add {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>(Wrapping<T>(a) + Wrapping<T>(b));
    }
};
struct Sub {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>(Wrapping<T>(a) - Wrapping<T>(b));
    }
};
struct MulLo {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>(Wrapping<T>(a) * Wrapping<T>(b));
    }
};
struct MulHi {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>((Wider<T>(a) * Wider<T>(b)) >> kBits<T>);
    }
};
struct MadLo {
    template <class T>
    static T apply(T a, T b, T c) {
        return Add::apply(MulLo::apply(a, b), c);
    }
};
struct MadHi {
    template <class T>
    static T apply(T a, T b, T c) {
        return Add::apply(MulHi::apply(a, b), c);
    }
};
// The result of a division by zero is unspecified (all ones here), and the most negative number over -1 wraps around.
struct Div {
    template <class T>
    static T apply(T a, T b) {
        if (b == 0) return static_cast<T>(~T{0});
        if (std::is_signed_v<T> && b == static_cast<T>(-1)) return Sub::apply(T{0}, a);
        return static_cast<T>(a / b);
    }
};
struct Rem {
    template <class T>
    static T apply(T a, T b) {
        if (b == 0) return static_cast<T>(~T{0});
        if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
        return static_cast<T>(a % b);
    }
};
struct Min {
    template <class T>
    static T apply(T a, T b) {
        return b < a ? b : a;
    }
};
struct Max {
    template <class T>
    static T apply(T a, T b) {
        return a < b ? b : a;
    }
};
struct MinRelu {
    template <class T>
    static T apply(T a, T b) {
        return std::max(Min::apply(a, b), T{0});
    }
};
struct MaxRelu {
    template <class T>
    static T apply(T a, T b) {
        return std::max(Max::apply(a, b), T{0});
    }
};
struct Neg {
    template <class T>
    static T apply(T a) {
        return Sub::apply(T{0}, a);
    }
};
struct Abs {
    template <class T>
    static T apply(T a) {
        return a < 0 ? Neg::apply(a) : a;
    }
};
struct Sad {
    template <class T>
    static T apply(T a, T b, T c) {
        return Add::apply(c, a < b ? Sub::apply(b, a) : Sub::apply(a, b));
    }
};
struct Shr {
    template <class T>
    static T apply(T a, uint32_t by) {
        return static_cast<T>(by < kBits<T> ? a >> by : a < 0 ? ~T{0} : 0);
    }
};
struct And {
    template <class T>
    static T apply(T a, T b) {
        return a & b;
    }
};
struct Or {
    template <class T>
    static T apply(T a, T b) {
        return a | b;
    }
};
struct Xor {
    template <class T>
    static T apply(T a, T b) {
        return a ^ b;
    }
};
struct Not {
    template <class T>
    static T apply(T a) {
        return static_cast<T>(~a);
    }
};
struct CNot {
    template <class T>
    static T apply(T a) {
        return a == 0;
    }
};
struct Shl {
    template <class T>
    static T apply(T a, uint32_t by) {
        return static_cast<T>(by < kBits<T> ? Wrapping<T>(a) << (by % kBits<T>) : 0);
    }
};

template <class F>
constexpr auto kUnary = [](auto a) { return F::apply(a); };
template <class F>
constexpr auto kBinary = [](auto a, auto b) { return F::apply(a, b); };
template <class F>
constexpr auto kTernary = [](auto a, auto b, auto c) { return F::apply(a, b, c); };

template <class F, class T>
constexpr Handler unary = map<kUnary<F>, T, T>;
template <class F, class T>
constexpr Handler binary = map<kBinary<F>, T, T, T>;
template <class F, class T>
constexpr Handler ternary = map<kTernary<F>, T, T, T, T>;
template <class F, class T>
constexpr Handler shift = map<kBinary<F>, T, T, U32>;

// Operations whose bits do not depend on the sign are registered for .b types only.
FLASH4_OP("add.b16", Alu, binary<Add, U16>);
FLASH4_OP("add.b32", Alu, binary<Add, U32>);
FLASH4_OP("add.b64", Alu, binary<Add, U64>);
FLASH4_OP("add.b16x2", Alu, binary<Add, U16x2>);
FLASH4_OP("sub.b16", Alu, binary<Sub, U16>);
FLASH4_OP("sub.b32", Alu, binary<Sub, U32>);
FLASH4_OP("sub.b64", Alu, binary<Sub, U64>);
FLASH4_OP("mul.lo.b16", Alu, binary<MulLo, U16>);
FLASH4_OP("mul.lo.b32", Alu, binary<MulLo, U32>);
FLASH4_OP("mul.lo.b64", Alu, binary<MulLo, U64>);
FLASH4_OP("mad.lo.b16", Alu, ternary<MadLo, U16>);
FLASH4_OP("mad.lo.b32", Alu, ternary<MadLo, U32>);
FLASH4_OP("mad.lo.b64", Alu, ternary<MadLo, U64>);
FLASH4_OP("neg.b16", Alu, unary<Neg, U16>);
FLASH4_OP("neg.b32", Alu, unary<Neg, U32>);
FLASH4_OP("neg.b64", Alu, unary<Neg, U64>);
FLASH4_OP("abs.s16", Alu, unary<Abs, S16>);
FLASH4_OP("abs.s32", Alu, unary<Abs, S32>);
FLASH4_OP("abs.s64", Alu, unary<Abs, S64>);

FLASH4_OP("and.b16", Alu, binary<And, U16>);
FLASH4_OP("and.b32", Alu, binary<And, U32>);
FLASH4_OP("and.b64", Alu, binary<And, U64>);
FLASH4_OP("or.b16", Alu, binary<Or, U16>);
FLASH4_OP("or.b32", Alu, binary<Or, U32>);
FLASH4_OP("or.b64", Alu, binary<Or, U64>);
FLASH4_OP("xor.b16", Alu, binary<Xor, U16>);
FLASH4_OP("xor.b32", Alu, binary<Xor, U32>);
FLASH4_OP("xor.b64", Alu, binary<Xor, U64>);
FLASH4_OP("not.b16", Alu, unary<Not, U16>);
FLASH4_OP("not.b32", Alu, unary<Not, U32>);
FLASH4_OP("not.b64", Alu, unary<Not, U64>);
FLASH4_OP("cnot.b16", Alu, unary<CNot, U16>);
FLASH4_OP("cnot.b32", Alu, unary<CNot, U32>);
FLASH4_OP("cnot.b64", Alu, unary<CNot, U64>);
FLASH4_OP("shl.b16", Alu, shift<Shl, U16>);
FLASH4_OP("shl.b32", Alu, shift<Shl, U32>);
FLASH4_OP("shl.b64", Alu, shift<Shl, U64>);

// The operations that a signed and an unsigned type do differently.
template <class T>
void register_signed(const std::string& type) {
    const auto add = [&](const char* name, Handler run) {
        Registration((name + ("." + type)).c_str(), run, Pipe::Alu);
    };
    add("mul.hi", binary<MulHi, T>);
    add("mad.hi", ternary<MadHi, T>);
    add("div", binary<Div, T>);
    add("rem", binary<Rem, T>);
    add("min", binary<Min, T>);
    add("max", binary<Max, T>);
    add("sad", ternary<Sad, T>);
    add("shr", shift<Shr, T>);
}

template <class T, class Wide>
void register_wide(const std::string& type) {
    constexpr auto product = [](auto a, auto b) {
        return static_cast<typename Wide::Value>(a) * static_cast<typename Wide::Value>(b);
    };
    constexpr auto product_sum = [](auto a, auto b, auto c) {
        using V = typename Wide::Value;
        return Add::apply(static_cast<V>(static_cast<V>(a) * static_cast<V>(b)), c);
    };
    Registration(("mul.wide." + type).c_str(), map<product, Wide, T, T>, Pipe::Alu);
    Registration(("mad.wide." + type).c_str(), map<product_sum, Wide, T, T, Wide>, Pipe::Alu);
}

const bool registered_signed = [] {
    register_signed<U16>("u16");
    register_signed<S16>("s16");
    register_signed<U32>("u32");
    register_signed<S32>("s32");
    register_signed<U64>("u64");
    register_signed<S64>("s64");
    register_wide<U16, U32>("u16");
    register_wide<S16, S32>("s16");
    register_wide<U32, U64>("u32");
    register_wide<S32, S64>("s32");
    return true;
}();

FLASH4_OP("min.relu.s32", Alu, binary<MinRelu, S32>);
FLASH4_OP("max.relu.s32", Alu, binary<MaxRelu, S32>);
FLASH4_OP("min.u16x2", Alu, binary<Min, U16x2>);
FLASH4_OP("max.u16x2", Alu, binary<Max, U16x2>);
FLASH4_OP("min.s16x2", Alu, binary<Min, S16x2>);
FLASH4_OP("max.s16x2", Alu, binary<Max, S16x2>);
FLASH4_OP("min.relu.s16x2", Alu, binary<MinRelu, S16x2>);
FLASH4_OP("max.relu.s16x2", Alu, binary<MaxRelu, S16x2>);

constexpr auto saturate = [](int64_t x) { return static_cast<int32_t>(std::clamp<int64_t>(x, INT32_MIN, INT32_MAX)); };
FLASH4_OP("add.sat.s32", Alu, map<[](int64_t a, int64_t b) { return saturate(a + b); }, S32, S32, S32>);
FLASH4_OP("sub.sat.s32", Alu, map<[](int64_t a, int64_t b) { return saturate(a - b); }, S32, S32, S32>);
FLASH4_OP("mad.hi.sat.s32", Alu,
          map<[](int64_t a, int64_t b, int64_t c) { return saturate((a * b >> 32) + c); }, S32, S32, S32, S32>);

// c and the products of four bytes each.
template <class A, class B>
constexpr auto kDot = [](uint32_t a, uint32_t b, uint32_t c) {
    for (int shift = 0; shift < 32; shift += 8)
        c += static_cast<uint32_t>(static_cast<A>(a >> shift) * static_cast<B>(b >> shift));
    return c;
};
template <class A, class B>
constexpr Handler dot_product = map<kDot<A, B>, U32, U32, U32, U32>;
FLASH4_OP("dp4a.u32.u32", Alu, dot_product<uint8_t, uint8_t>);
FLASH4_OP("dp4a.u32.s32", Alu, dot_product<uint8_t, int8_t>);
FLASH4_OP("dp4a.s32.u32", Alu, dot_product<int8_t, uint8_t>);
FLASH4_OP("dp4a.s32.s32", Alu, dot_product<int8_t, int8_t>);

// --- Bit fields

FLASH4_OP("clz.b32", Alu, map<[](uint32_t a) { return std::countl_zero(a); }, U32, U32>);
FLASH4_OP("clz.b64", Alu, map<[](uint64_t a) { return std::countl_zero(a); }, U32, U64>);
FLASH4_OP("popc.b32", Alu, map<[](uint32_t a) { return std::popcount(a); }, U32, U32>);
FLASH4_OP("popc.b64", Alu, map<[](uint64_t a) { return std::popcount(a); }, U32, U64>);

constexpr auto reverse = []<class T>(T a) {
    T result = 0;
    for (int i = 0; i < kBits<T>; ++i) result |= (a >> i & 1) << (kBits<T> - 1 - i);
    return result;
};
FLASH4_OP("brev.b32", Alu, map<reverse, U32, U32>);
FLASH4_OP("brev.b64", Alu, map<reverse, U64, U64>);

// attr: 1 for .shiftamt, the distance from the top bit. All ones when there is no bit that differs from the sign.
constexpr auto find_bit = []<class T>(int64_t shift_amount, T a) -> uint32_t {
    const Unsigned<T> magnitude = a < 0 ? ~a : a;
    if (!magnitude) return ~0u;
    const uint32_t above = static_cast<uint32_t>(std::countl_zero(magnitude));
    return shift_amount ? above : kBits<T> - 1 - above;
};
FLASH4_OP("bfind.u32", Alu, map_with<find_bit, U32, U32>);
FLASH4_OP("bfind.s32", Alu, map_with<find_bit, U32, S32>);
FLASH4_OP("bfind.u64", Alu, map_with<find_bit, U32, U64>);
FLASH4_OP("bfind.s64", Alu, map_with<find_bit, U32, S64>);

// Position and length are taken modulo 256. Bits beyond the top repeat the field's sign, which then is the top bit.
constexpr auto extract = []<class T>(T a, uint32_t position, uint32_t length) -> T {
    position &= 0xFF;
    length &= 0xFF;
    if (!length) return 0;
    const uint32_t top = std::min<uint32_t>(position + length - 1, kBits<T> - 1);
    const bool fill = std::is_signed_v<T> && (Unsigned<T>(a) >> top & 1);
    const Unsigned<T> field = position < kBits<T> ? Unsigned<T>(a) >> position : 0;
    const uint32_t kept = position > top ? 0 : top - position + 1;
    const Unsigned<T> keep = kept >= kBits<T> ? ~Unsigned<T>{0} : (Unsigned<T>{1} << kept) - 1;
    return static_cast<T>((field & keep) | (fill ? ~keep : 0));
};
FLASH4_OP("bfe.u32", Alu, map<extract, U32, U32, U32, U32>);
FLASH4_OP("bfe.s32", Alu, map<extract, S32, S32, U32, U32>);
FLASH4_OP("bfe.u64", Alu, map<extract, U64, U64, U32, U32>);
FLASH4_OP("bfe.s64", Alu, map<extract, S64, S64, U32, U32>);

constexpr auto insert = []<class T>(T field, T into, uint32_t position, uint32_t length) -> T {
    position &= 0xFF;
    length &= 0xFF;
    if (position >= kBits<T>) return into;
    const T keep = (length >= kBits<T> ? ~T{0} : (T{1} << length) - 1) << position;
    return (into & ~keep) | (field << position & keep);
};
FLASH4_OP("bfi.b32", Alu, map<insert, U32, U32, U32, U32, U32>);
FLASH4_OP("bfi.b64", Alu, map<insert, U64, U64, U64, U32, U32>);

// attr: immLut, bit (4a + 2b + c) of which is the result for bits a, b, c.
constexpr auto lookup = [](int64_t table, uint32_t a, uint32_t b, uint32_t c) {
    uint32_t result = 0;
    for (uint32_t row = 0; row < 8; ++row)
        result |= (table >> row & 1 ? ~0u : 0u) & (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
    return result;
};
FLASH4_OP("lop3.b32", Alu, map_with<lookup, U32, U32, U32, U32>);

// attr: 1 to wrap the amount modulo 32, 0 to clamp it to 32.
constexpr auto amount_of = [](int64_t wrap, uint32_t by) { return wrap ? by & 31 : std::min(by, 32u); };
constexpr auto funnel_left = [](int64_t wrap, uint32_t low, uint32_t high, uint32_t by) {
    return static_cast<uint32_t>((uint64_t{high} << 32 | low) << amount_of(wrap, by) >> 32);
};
constexpr auto funnel_right = [](int64_t wrap, uint32_t low, uint32_t high, uint32_t by) {
    return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> amount_of(wrap, by));
};
FLASH4_OP("shf.l.b32", Alu, map_with<funnel_left, U32, U32, U32, U32>);
FLASH4_OP("shf.r.b32", Alu, map_with<funnel_right, U32, U32, U32, U32>);

// Four nibbles of the selector, each the number of a byte of {b, a}; its top bit asks for the byte's sign instead.
constexpr auto permute = [](uint32_t a, uint32_t b, uint32_t select) {
    const uint64_t bytes = uint64_t{b} << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t nibble = select >> (4 * i) & 0xF;
        const uint32_t byte = bytes >> (8 * (nibble & 7)) & 0xFF;
        result |= (nibble & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte) << (8 * i);
    }
    return result;
};
FLASH4_OP("prmt.b32", Alu, map<permute, U32, U32, U32, U32>);

// The other modes name a selector by the low bits of c. attr: the four selectors, 16 bits each.
constexpr auto permute_by_mode = [](int64_t selectors, uint32_t a, uint32_t b, uint32_t c) {
    return permute(a, b, static_cast<uint32_t>(selectors >> (16 * (c & 3))) & 0xFFFF);
};
FLASH4_OP("prmt.mode.b32", Alu, map_with<permute_by_mode, U32, U32, U32, U32>);

// --- Extended precision: the carry is one bit a lane, and after a subtraction it is the borrow.

template <bool Subtract, bool In, bool Out, class T>
T with_carry(Warp& w, int lane, T a, T b) {
    const Mask bit = 1u << lane;
    const T in = In && (w.carry & bit);
    const T result = Subtract ? a - b - in : a + b + in;
    const bool carry = Subtract ? a < b || (in && a == b) : result < a || (in && result == a);
    if constexpr (Out) w.carry = carry ? w.carry | bit : w.carry & ~bit;
    return result;
}

template <bool Subtract, bool In, bool Out, class T>
Step extended(Warp& w, const Op& op, Mask mask) {
    auto *d = cells<T>(w, op.reg[0]), *a = cells<T>(w, op.reg[1]), *b = cells<T>(w, op.reg[2]);
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        d[lane] = with_carry<Subtract, In, Out>(w, lane, a[lane], b[lane]);
    }
    return Step::Next;
}

template <class Product, bool In, bool Out, class T>
Step extended_mad(Warp& w, const Op& op, Mask mask) {
    auto *d = cells<T>(w, op.reg[0]), *a = cells<T>(w, op.reg[1]), *b = cells<T>(w, op.reg[2]),
         *c = cells<T>(w, op.reg[3]);
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        const auto product = T::store(Product::apply(T::load(a[lane]), T::load(b[lane])));
        d[lane] = with_carry<false, In, Out>(w, lane, product, c[lane]);
    }
    return Step::Next;
}

// Names end in the flags: ".in" adds the carry, ".out" sets it.
template <bool In, bool Out>
void register_extended(const std::string& flags) {
    const auto add = [&](const char* name, const char* type, Handler run) {
        Registration((name + flags + "." + type).c_str(), run, Pipe::Alu);
    };
    add("add", "b32", extended<false, In, Out, U32>);
    add("add", "b64", extended<false, In, Out, U64>);
    add("sub", "b32", extended<true, In, Out, U32>);
    add("sub", "b64", extended<true, In, Out, U64>);
    add("mad.lo", "u32", extended_mad<MulLo, In, Out, U32>);
    add("mad.lo", "u64", extended_mad<MulLo, In, Out, U64>);
    add("mad.hi", "u32", extended_mad<MulHi, In, Out, U32>);
    add("mad.hi", "u64", extended_mad<MulHi, In, Out, U64>);
    add("mad.hi", "s32", extended_mad<MulHi, In, Out, S32>);
    add("mad.hi", "s64", extended_mad<MulHi, In, Out, S64>);
}

const bool registered_extended = [] {
    register_extended<false, true>(".out");
    register_extended<true, false>(".in");
    register_extended<true, true>(".in.out");
    return true;
}();

}  // namespace
}  // namespace flash4::alu
