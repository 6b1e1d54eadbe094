// Comparison and selection, and logic on predicates (PTX ISA: Comparison and Selection Instructions).
#include "alu.h"

namespace flash4::alu {
namespace {

enum class Combine { None, And, Or, Xor };

Mask combine(Combine how, Mask a, Mask b) {
    switch (how) {
        case Combine::None: return a;
        case Combine::And: return a & b;
        case Combine::Or: return a | b;
        case Combine::Xor: return a ^ b;
    }
    return a;
}

void assign(Mask& to, Mask value, Mask lanes) { to = (to & ~lanes) | (value & lanes); }

// A bit for every lane, those that do not execute included.
template <auto F, class T>
Mask compare(Warp& w, uint32_t a_offset, uint32_t b_offset) {
    const auto *a = cells<T>(w, a_offset), *b = cells<T>(w, b_offset);
    Mask result = 0;
    for (int lane = 0; lane < kLanes; ++lane)
        result |= static_cast<Mask>(F(T::load(a[lane]), T::load(b[lane]))) << lane;
    return result;
}

// attr, from `first` on: whether to negate the comparison, how to combine it with a predicate, whether to negate that.
struct Combination {
    Mask inverted;
    Combine how;
    Mask other;
    Combination(Warp& w, const Op& op, uint32_t reg)
        : inverted(op.attr[0] ? kAllLanes : 0), how(static_cast<Combine>(op.attr[1])), other(0) {
        if (how != Combine::None) other = w.predicate(reg) ^ (op.attr[2] ? kAllLanes : 0);
    }
    Mask operator()(Mask compared) const { return combine(how, compared, other); }
};

// reg: p, q (the opposite comparison; may be absent), a, b, c (combined with; may be absent). attr: see Combination.
template <auto F, class T>
Step set_predicates(Warp& w, const Op& op, Mask mask) {
    const Combination with(w, op, op.reg[4]);
    const Mask compared = compare<F, T>(w, op.reg[2], op.reg[3]) ^ with.inverted;
    if (op.reg[0] != kNoRegister) assign(w.predicate(op.reg[0]), with(compared), mask);
    if (op.reg[1] != kNoRegister) assign(w.predicate(op.reg[1]), with(~compared), mask);
    return Step::Next;
}

// reg: d, a, b, c (may be absent). attr: see Combination; then what d holds where it is true.
template <auto F, class T>
Step set_value(Warp& w, const Op& op, Mask mask) {
    const Combination with(w, op, op.reg[3]);
    const Mask compared = with(compare<F, T>(w, op.reg[1], op.reg[2]) ^ with.inverted);
    const uint32_t yes = static_cast<uint32_t>(op.attr[3]);
    uint32_t* d = w.u32(op.reg[0]);
    for_lanes(mask, [&](int lane) { d[lane] = compared >> lane & 1 ? yes : 0; });
    return Step::Next;
}

template <auto F, class T>
void register_comparison(const std::string& name) {
    Registration(("setp." + name).c_str(), set_predicates<F, T>, Pipe::Alu);
    Registration(("set." + name).c_str(), set_value<F, T>, Pipe::Alu);
}

constexpr auto equal = [](auto a, auto b) { return a == b; };
constexpr auto less = [](auto a, auto b) { return a < b; };
constexpr auto less_equal = [](auto a, auto b) { return a <= b; };
constexpr auto differ = [](auto a, auto b) { return a < b || a > b; };
constexpr auto numbers = [](auto a, auto b) { return a == a && b == b; };

template <auto F>
constexpr auto flushed = [](float a, float b) { return F(number::flush(a), number::flush(b)); };

// All other comparisons are these with sources exchanged or the result negated.
template <class T>
void register_ordered(const std::string& type) {
    register_comparison<equal, T>("eq." + type);
    register_comparison<less, T>("lt." + type);
    register_comparison<less_equal, T>("le." + type);
    register_comparison<differ, T>("ne." + type);
    register_comparison<numbers, T>("num." + type);
}

const bool registered = [] {
    register_comparison<equal, U16>("eq.b16");
    register_comparison<equal, U32>("eq.b32");
    register_comparison<equal, U64>("eq.b64");
    register_comparison<less, U16>("lt.u16");
    register_comparison<less, S16>("lt.s16");
    register_comparison<less, U32>("lt.u32");
    register_comparison<less, S32>("lt.s32");
    register_comparison<less, U64>("lt.u64");
    register_comparison<less, S64>("lt.s64");
    register_ordered<F32>("f32");
    register_ordered<F64>("f64");
    register_ordered<F16>("f16");
    register_ordered<BF16>("bf16");
    register_comparison<flushed<equal>, F32>("eq.ftz.f32");
    register_comparison<flushed<less>, F32>("lt.ftz.f32");
    register_comparison<flushed<less_equal>, F32>("le.ftz.f32");
    register_comparison<flushed<differ>, F32>("ne.ftz.f32");
    register_comparison<flushed<numbers>, F32>("num.ftz.f32");
    return true;
}();

// reg: d, a, b, p. attr: whether to negate p.
template <class T>
Step select(Warp& w, const Op& op, Mask mask) {
    auto* d = cells<T>(w, op.reg[0]);
    const auto *a = cells<T>(w, op.reg[1]), *b = cells<T>(w, op.reg[2]);
    const Mask p = w.predicate(op.reg[3]) ^ (op.attr[0] ? kAllLanes : 0);
    for_lanes(mask, [&](int lane) { d[lane] = T::store(T::load(p >> lane & 1 ? a[lane] : b[lane])); });
    return Step::Next;
}
FLASH4_OP("selp.b16", Alu, select<U16>);
FLASH4_OP("selp.b32", Alu, select<U32>);
FLASH4_OP("selp.b64", Alu, select<U64>);

constexpr auto by_sign = [](auto a, auto b, auto c) { return c >= 0 ? a : b; };
constexpr auto by_flushed_sign = [](auto a, auto b, float c) { return number::flush(c) >= 0 ? a : b; };
FLASH4_OP("slct.b16.s32", Alu, map<by_sign, U16, U16, U16, S32>);
FLASH4_OP("slct.b32.s32", Alu, map<by_sign, U32, U32, U32, S32>);
FLASH4_OP("slct.b64.s32", Alu, map<by_sign, U64, U64, U64, S32>);
FLASH4_OP("slct.b16.f32", Alu, map<by_sign, U16, U16, U16, F32>);
FLASH4_OP("slct.b32.f32", Alu, map<by_sign, U32, U32, U32, F32>);
FLASH4_OP("slct.b64.f32", Alu, map<by_sign, U64, U64, U64, F32>);
FLASH4_OP("slct.ftz.b16.f32", Alu, map<by_flushed_sign, U16, U16, U16, F32>);
FLASH4_OP("slct.ftz.b32.f32", Alu, map<by_flushed_sign, U32, U32, U32, F32>);
FLASH4_OP("slct.ftz.b64.f32", Alu, map<by_flushed_sign, U64, U64, U64, F32>);

// reg: p, a. attr: the class, in the order of TestClass.
enum class TestClass { Finite, Infinite, Number, NotANumber, Normal, Subnormal };
template <class T>
Step test_property(Warp& w, const Op& op, Mask mask) {
    const auto* a = cells<T>(w, op.reg[1]);
    const auto kind = static_cast<TestClass>(op.attr[0]);
    Mask result = 0;
    for_lanes(mask, [&](int lane) {
        const auto x = T::load(a[lane]);
        bool holds = false;
        switch (kind) {
            case TestClass::Finite: holds = std::isfinite(x); break;
            case TestClass::Infinite: holds = std::isinf(x); break;
            case TestClass::Number: holds = !std::isnan(x); break;
            case TestClass::NotANumber: holds = std::isnan(x); break;
            case TestClass::Normal: holds = std::isnormal(x) || x == 0; break;
            case TestClass::Subnormal: holds = std::fpclassify(x) == FP_SUBNORMAL; break;
        }
        result |= static_cast<Mask>(holds) << lane;
    });
    assign(w.predicate(op.reg[0]), result, mask);
    return Step::Next;
}
FLASH4_OP("testp.f32", Alu, test_property<F32>);
FLASH4_OP("testp.f64", Alu, test_property<F64>);

// --- Predicates. reg: destination, sources.

template <auto F>
Step predicate_logic(Warp& w, const Op& op, Mask mask) {
    const Mask a = w.predicate(op.reg[1]), b = w.predicate(op.reg[op.regs - 1]);
    assign(w.predicate(op.reg[0]), F(a, b), mask);
    return Step::Next;
}
FLASH4_OP("and.pred", Alu, predicate_logic<[](Mask a, Mask b) { return a & b; }>);
FLASH4_OP("or.pred", Alu, predicate_logic<[](Mask a, Mask b) { return a | b; }>);
FLASH4_OP("xor.pred", Alu, predicate_logic<[](Mask a, Mask b) { return a ^ b; }>);
FLASH4_OP("not.pred", Alu, predicate_logic<[](Mask a, Mask) { return ~a; }>);
FLASH4_OP("mov.pred", Alu, predicate_logic<[](Mask a, Mask) { return a; }>);

}  // namespace
}  // namespace flash4::alu
