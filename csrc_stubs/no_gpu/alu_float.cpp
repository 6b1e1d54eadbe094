// Floating-point arithmetic (PTX ISA: Floating Point, Half Precision and Mixed Precision Floating Point Instructions).
//
// Registers are always the destination and then the sources in PTX's order. NaN results are the hardware's one NaN.
// The .approx functions give the correctly rounded result, or one within 0.51 units in the last place where C's library
// or a polynomial in f64 is rounded to f32: always within PTX's bounds, and not the bits that the hardware
// approximates.
#include <cfenv>

#include "alu.h"

namespace flash4::alu {

DirectedRounding::DirectedRounding(number::Rounding rounding) : saved_(std::fegetround()) {
    constexpr int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
    std::fesetround(modes[static_cast<int>(rounding)]);
}
DirectedRounding::~DirectedRounding() { std::fesetround(saved_); }

namespace {

using number::bits;
using number::canonical;
using number::real;

struct Add {
    template <class T>
    static T apply(T a, T b) {
        return a + b;
    }
};
struct Sub {
    template <class T>
    static T apply(T a, T b) {
        return a - b;
    }
};
struct Mul {
    template <class T>
    static T apply(T a, T b) {
        return a * b;
    }
};
struct Fma {
    template <class T>
    static T apply(T a, T b, T c) {
        return std::fma(a, b, c);
    }
};
struct Div {
    template <class T>
    static T apply(T a, T b) {
        return a / b;
    }
};
struct Reciprocal {
    template <class T>
    static T apply(T a) {
        return T{1} / a;
    }
};
struct Sqrt {
    template <class T>
    static T apply(T a) {
        return std::sqrt(a);
    }
};
struct ReciprocalSqrt {
    template <class T>
    static T apply(T a) {
        return static_cast<T>(1 / std::sqrt(static_cast<double>(a)));
    }
};
struct Log2 {
    static float apply(float a) { return static_cast<float>(std::log2(static_cast<double>(a))); }
};
struct Sine {
    static float apply(float a) { return static_cast<float>(std::sin(static_cast<double>(a))); }
};
struct Cosine {
    static float apply(float a) { return static_cast<float>(std::cos(static_cast<double>(a))); }
};
struct Tanh {
    static float apply(float a) { return static_cast<float>(std::tanh(static_cast<double>(a))); }
};
struct Neg {
    static float apply(float a) { return real(bits(a) ^ 0x80000000u); }
    static double apply(double a) { return -a; }
};
struct Abs {
    static float apply(float a) { return real(bits(a) & 0x7FFFFFFFu); }
    static double apply(double a) { return std::fabs(a); }
};

// 2^a = 2^n 2^f with |f| <= 1/2; the Taylor polynomial of 2^f in f64 is off by at most 1e-11 of its value.
struct Exp2 {
    static float apply(float a) {
        double x = a;
        x = x > 130.0 ? 130.0 : x;
        x = x < -160.0 ? -160.0 : x;
        constexpr double kToInteger = 0x1.8p52;  // adding it leaves the nearest integer in the low bits
        const double shifted = x + kToInteger;
        const double f = (x - (shifted - kToInteger)) * 0.693147180559945309417;
        double sum = 1.0 / 362880;
        sum = sum * f + 1.0 / 40320;
        sum = sum * f + 1.0 / 5040;
        sum = sum * f + 1.0 / 720;
        sum = sum * f + 1.0 / 120;
        sum = sum * f + 1.0 / 24;
        sum = sum * f + 1.0 / 6;
        sum = sum * f + 0.5;
        sum = sum * f + 1.0;
        sum = sum * f + 1.0;
        const uint64_t power = (std::bit_cast<uint64_t>(shifted) << 52) + std::bit_cast<uint64_t>(1.0);
        return static_cast<float>(sum * std::bit_cast<double>(power));
    }
};

// NaN loses against a number, and -0 is less than +0.
struct Max {
    template <class T>
    static T apply(T a, T b) {
        const T larger = a == b ? (std::signbit(a) ? b : a) : (a > b ? a : b);
        return a != a ? b : b != b ? a : larger;
    }
};
struct Min {
    template <class T>
    static T apply(T a, T b) {
        const T smaller = a == b ? (std::signbit(a) ? a : b) : (a < b ? a : b);
        return a != a ? b : b != b ? a : smaller;
    }
};
// NaN wins (.NaN).
template <class F>
struct OrNan {
    template <class T>
    static T apply(T a, T b) {
        return a != a || b != b ? a + b : F::apply(a, b);
    }
};
// The magnitude from the magnitudes, the sign from both signs (.xorsign.abs).
template <class F>
struct XorSign {
    static float apply(float a, float b) {
        const float magnitude = F::apply(Abs::apply(a), Abs::apply(b));
        return magnitude != magnitude ? magnitude : real(bits(magnitude) | ((bits(a) ^ bits(b)) & 0x80000000u));
    }
};
template <class F>
struct OfMagnitudes {
    static float apply(float a, float b, float c) {
        return F::apply(F::apply(Abs::apply(a), Abs::apply(b)), Abs::apply(c));
    }
};
template <class F>
struct OfThree {
    static float apply(float a, float b, float c) { return F::apply(F::apply(a, b), c); }
};

template <class T>
T saturated(T x) {
    const T positive = x > T{0} ? x : T{0};
    return positive < T{1} ? positive : T{1};
}

template <class F, bool Ftz, bool Sat>
constexpr auto kArithmetic = [](auto... x) {
    const auto in = [](auto v) {
        if constexpr (Ftz) return number::flush(v);
        else return v;
    };
    auto result = canonical(F::apply(in(x)...));
    if constexpr (Ftz) result = number::flush(result);
    if constexpr (Sat) result = saturated(result);
    return result;
};

template <class T, size_t>
using Repeat = T;
template <auto F, class T, class Sources>
struct Mapped;
template <auto F, class T, size_t... I>
struct Mapped<F, T, std::index_sequence<I...>> {
    static constexpr Handler run = map<F, T, Repeat<T, I>...>;
};
// F from `Sources` registers of a type to one of the same type.
template <auto F, class T, size_t Sources>
constexpr Handler mapped = Mapped<F, T, std::make_index_sequence<Sources>>::run;

void add_name(const std::string& name, Handler run, Pipe pipe) { Registration(name.c_str(), run, pipe); }

template <Handler Run>
void register_rounded(const std::string& base, const std::string& rest, Pipe pipe) {
    add_name(base + rest, Run, pipe);
    add_name(base + ".directed" + rest, directed<Run>, pipe);
}

// "add.f32", "add.directed.ftz.sat.f32", ...
template <class F, size_t Sources>
void register_single(const std::string& base, Pipe pipe) {
    register_rounded<mapped<kArithmetic<F, false, false>, F32, Sources>>(base, ".f32", pipe);
    register_rounded<mapped<kArithmetic<F, true, false>, F32, Sources>>(base, ".ftz.f32", pipe);
    register_rounded<mapped<kArithmetic<F, false, true>, F32, Sources>>(base, ".sat.f32", pipe);
    register_rounded<mapped<kArithmetic<F, true, true>, F32, Sources>>(base, ".ftz.sat.f32", pipe);
}
template <class F, size_t Sources>
void register_pairs(const std::string& base) {
    register_rounded<mapped<kArithmetic<F, false, false>, F32x2, Sources>>(base, ".f32x2", Pipe::Fma);
    register_rounded<mapped<kArithmetic<F, true, false>, F32x2, Sources>>(base, ".ftz.f32x2", Pipe::Fma);
}
template <class F, size_t Sources>
void register_double(const std::string& base) {
    register_rounded<mapped<kArithmetic<F, false, false>, F64, Sources>>(base, ".f64", Pipe::Fma);
}
// Functions without a rounding: with and without .ftz.
template <class F, size_t Sources>
void register_function(const std::string& base, Pipe pipe) {
    add_name(base + ".f32", mapped<kArithmetic<F, false, false>, F32, Sources>, pipe);
    add_name(base + ".ftz.f32", mapped<kArithmetic<F, true, false>, F32, Sources>, pipe);
}

// --- Half precision. The exact result is first rounded to odd, then once to the type, which is one correct rounding.

template <class T>
constexpr bool kIsF16 = std::is_same_v<T, F16> || std::is_same_v<T, F16x2>;

template <class T>
float flush_half(float x) {
    constexpr float smallest = kIsF16<T> ? 0x1p-14f : 0x1p-126f;
    return std::fabs(x) < smallest ? std::copysign(0.0f, x) : x;
}

struct HalfFma {
    static double apply(float a, float b, float c) { return number::add_to_odd(static_cast<double>(a) * b, c); }
};
struct HalfAdd {
    static double apply(float a, float b) { return number::add_to_odd(a, b); }
};
struct HalfSub {
    static double apply(float a, float b) { return number::add_to_odd(a, -static_cast<double>(b)); }
};
struct HalfMul {
    static double apply(float a, float b) { return static_cast<double>(a) * b; }
};

enum class Clamp { None, Sat, Relu };

template <class T, class F, bool Ftz, Clamp How>
constexpr auto kHalf = [](auto... x) {
    const auto in = [](float v) { return Ftz ? flush_half<T>(v) : v; };
    float result = T::load(T::store(number::narrow_to_odd(F::apply(in(x)...))));
    if constexpr (Ftz) result = flush_half<T>(result);
    if constexpr (How == Clamp::Sat) result = saturated(result);
    if constexpr (How == Clamp::Relu) result = result < 0 ? 0.0f : result;
    return result;
};

template <class T, class F, size_t Sources>
void register_half_operation(const std::string& base, const std::string& type, Pipe pipe) {
    add_name(base + type, mapped<kHalf<T, F, false, Clamp::None>, T, Sources>, pipe);
    add_name(base + ".ftz" + type, mapped<kHalf<T, F, true, Clamp::None>, T, Sources>, pipe);
    add_name(base + ".sat" + type, mapped<kHalf<T, F, false, Clamp::Sat>, T, Sources>, pipe);
    add_name(base + ".ftz.sat" + type, mapped<kHalf<T, F, true, Clamp::Sat>, T, Sources>, pipe);
}
template <class T, class F, size_t Sources>
void register_half_function(const std::string& base, const std::string& type, Pipe pipe) {
    add_name(base + type, mapped<kHalf<T, F, false, Clamp::None>, T, Sources>, pipe);
    add_name(base + ".ftz" + type, mapped<kHalf<T, F, true, Clamp::None>, T, Sources>, pipe);
}

template <class T>
void register_half(const std::string& type) {
    register_half_operation<T, HalfAdd, 2>("add", type, Pipe::Fma);
    register_half_operation<T, HalfSub, 2>("sub", type, Pipe::Fma);
    register_half_operation<T, HalfMul, 2>("mul", type, Pipe::Fma);
    register_half_operation<T, HalfFma, 3>("fma", type, Pipe::Fma);
    add_name("fma.relu" + type, mapped<kHalf<T, HalfFma, false, Clamp::Relu>, T, 3>, Pipe::Fma);
    add_name("fma.ftz.relu" + type, mapped<kHalf<T, HalfFma, true, Clamp::Relu>, T, 3>, Pipe::Fma);
    register_half_function<T, Neg, 1>("neg", type, Pipe::Alu);
    register_half_function<T, Abs, 1>("abs", type, Pipe::Alu);
    register_half_function<T, Min, 2>("min", type, Pipe::Alu);
    register_half_function<T, Max, 2>("max", type, Pipe::Alu);
    register_half_function<T, OrNan<Min>, 2>("min.NaN", type, Pipe::Alu);
    register_half_function<T, OrNan<Max>, 2>("max.NaN", type, Pipe::Alu);
    register_half_function<T, XorSign<Min>, 2>("min.xorsign", type, Pipe::Alu);
    register_half_function<T, XorSign<Max>, 2>("max.xorsign", type, Pipe::Alu);
    register_half_function<T, XorSign<OrNan<Min>>, 2>("min.NaN.xorsign", type, Pipe::Alu);
    register_half_function<T, XorSign<OrNan<Max>>, 2>("max.NaN.xorsign", type, Pipe::Alu);
    register_half_function<T, Exp2, 1>("ex2", type, Pipe::Mufu);
    register_half_function<T, Tanh, 1>("tanh", type, Pipe::Mufu);
}

// --- Mixed precision: sources of half precision are exact in f32.

template <class T>
void register_mixed(const std::string& type) {
    register_rounded<map<kArithmetic<Fma, false, false>, F32, T, T, F32>>("fma", type, Pipe::Fma);
    register_rounded<map<kArithmetic<Fma, false, true>, F32, T, T, F32>>("fma", ".sat" + type, Pipe::Fma);
    register_rounded<map<kArithmetic<Add, false, false>, F32, T, F32>>("add", type, Pipe::Fma);
    register_rounded<map<kArithmetic<Add, false, true>, F32, T, F32>>("add", ".sat" + type, Pipe::Fma);
    register_rounded<map<kArithmetic<Sub, false, false>, F32, T, F32>>("sub", type, Pipe::Fma);
    register_rounded<map<kArithmetic<Sub, false, true>, F32, T, F32>>("sub", ".sat" + type, Pipe::Fma);
}

template <class F>
void register_extremum(const std::string& base) {
    register_function<F, 2>(base, Pipe::Alu);
    register_function<OrNan<F>, 2>(base + ".NaN", Pipe::Alu);
    register_function<XorSign<F>, 2>(base + ".xorsign", Pipe::Alu);
    register_function<XorSign<OrNan<F>>, 2>(base + ".NaN.xorsign", Pipe::Alu);
    register_function<OfThree<F>, 3>(base + ".three", Pipe::Alu);
    register_function<OfThree<OrNan<F>>, 3>(base + ".NaN.three", Pipe::Alu);
    register_function<OfMagnitudes<F>, 3>(base + ".abs.three", Pipe::Alu);
    register_function<OfMagnitudes<OrNan<F>>, 3>(base + ".NaN.abs.three", Pipe::Alu);
    add_name(base + ".f64", mapped<kArithmetic<F, false, false>, F64, 2>, Pipe::Alu);
}

const bool registered = [] {
    register_single<Add, 2>("add", Pipe::Fma);
    register_single<Sub, 2>("sub", Pipe::Fma);
    register_single<Mul, 2>("mul", Pipe::Fma);
    register_single<Fma, 3>("fma", Pipe::Fma);
    register_pairs<Add, 2>("add");
    register_pairs<Sub, 2>("sub");
    register_pairs<Mul, 2>("mul");
    register_pairs<Fma, 3>("fma");
    register_double<Add, 2>("add");
    register_double<Sub, 2>("sub");
    register_double<Mul, 2>("mul");
    register_double<Fma, 3>("fma");
    register_double<Div, 2>("div");
    register_double<Reciprocal, 1>("rcp");
    register_double<Sqrt, 1>("sqrt");
    register_double<ReciprocalSqrt, 1>("rsqrt");
    register_single<Div, 2>("div", Pipe::Mufu);
    register_single<Reciprocal, 1>("rcp", Pipe::Mufu);
    register_single<Sqrt, 1>("sqrt", Pipe::Mufu);
    register_function<ReciprocalSqrt, 1>("rsqrt", Pipe::Mufu);
    register_function<Exp2, 1>("ex2", Pipe::Mufu);
    register_function<Log2, 1>("lg2", Pipe::Mufu);
    register_function<Sine, 1>("sin", Pipe::Mufu);
    register_function<Cosine, 1>("cos", Pipe::Mufu);
    register_function<Tanh, 1>("tanh", Pipe::Mufu);
    register_function<Neg, 1>("neg", Pipe::Alu);
    register_function<Abs, 1>("abs", Pipe::Alu);
    add_name("neg.f64", mapped<kArithmetic<Neg, false, false>, F64, 1>, Pipe::Alu);
    add_name("abs.f64", mapped<kArithmetic<Abs, false, false>, F64, 1>, Pipe::Alu);
    register_extremum<Min>("min");
    register_extremum<Max>("max");
    register_half<F16>(".f16");
    register_half<F16x2>(".f16x2");
    register_half<BF16>(".bf16");
    register_half<BF16x2>(".bf16x2");
    register_mixed<F16>(".f32.f16");
    register_mixed<BF16>(".f32.bf16");
    return true;
}();

// copysign gives the second source the sign of the first.
FLASH4_OP("copysign.f32", Alu, map<[](float a, float b) { return std::copysign(b, a); }, F32, F32, F32>);
FLASH4_OP("copysign.f64", Alu, map<[](double a, double b) { return std::copysign(b, a); }, F64, F64, F64>);

}  // namespace
}  // namespace flash4::alu
