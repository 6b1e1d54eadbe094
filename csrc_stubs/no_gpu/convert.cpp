// cvt (PTX ISA: Data Movement and Conversion Instructions, cvt).
//
// The conversions that kernels use often have handlers of their own; the others share a slow one that takes the
// formats, the rounding and the limits from its attributes.
#include <algorithm>

#include "alu.h"

namespace flash4::alu {
namespace {

using number::Encoding;
using number::FormatName;
using number::Rounding;

constexpr auto same = [](auto a) { return a; };

// --- Integers to integers: "cvt.b32.s16" takes 16 bits with their sign to a register of 32, "cvt.b32.s16.low" the low
// 16 bits of a register of 64.

template <class S>
constexpr auto low = [](auto a) { return static_cast<typename S::Value>(a); };

template <class S>
void register_extension(const std::string& type) {
    Registration(("cvt.b16." + type + ".low").c_str(), map<low<S>, U16, U64>, Pipe::Convert);
    Registration(("cvt.b32." + type + ".low").c_str(), map<low<S>, U32, U64>, Pipe::Convert);
    Registration(("cvt.b64." + type + ".low").c_str(), map<low<S>, U64, U64>, Pipe::Convert);
    Registration(("cvt.b16." + type).c_str(), map<same, U16, S>, Pipe::Convert);
    Registration(("cvt.b32." + type).c_str(), map<same, U32, S>, Pipe::Convert);
    Registration(("cvt.b64." + type).c_str(), map<same, U64, S>, Pipe::Convert);
}

// The lowest and highest value of a destination type, each 64 bits of that type.
struct Limits {
    bool is_signed;
    int64_t low;
    uint64_t high;
    explicit Limits(const int64_t* attr) : is_signed(attr[0] < 0), low(attr[0]), high(static_cast<uint64_t>(attr[1])) {}
    uint64_t clamp(__int128 x) const {
        if (x < low) return static_cast<uint64_t>(low);
        return x > static_cast<__int128>(high) ? high : static_cast<uint64_t>(x);
    }
    uint64_t clamp(double x) const {
        if (x <= static_cast<double>(low)) return static_cast<uint64_t>(low);
        if (x >= static_cast<double>(high)) return high;
        return is_signed ? static_cast<uint64_t>(static_cast<int64_t>(x)) : static_cast<uint64_t>(x);
    }
};

// attr: lowest and highest value of the destination's type.
template <class D, class S>
Step saturate(Warp& w, const Op& op, Mask mask) {
    auto* d = cells<D>(w, op.reg[0]);
    const auto* a = cells<S>(w, op.reg[1]);
    const Limits limits(op.attr);
    for_lanes(mask, [&](int lane) {
        d[lane] = D::store(static_cast<typename D::Value>(limits.clamp(static_cast<__int128>(S::load(a[lane])))));
    });
    return Step::Next;
}

template <class S>
void register_integer_source(const std::string& type) {
    register_extension<S>(type);
    Registration(("cvt.sat.b16." + type).c_str(), saturate<U16, S>, Pipe::Convert);
    Registration(("cvt.sat.b32." + type).c_str(), saturate<U32, S>, Pipe::Convert);
    Registration(("cvt.sat.b64." + type).c_str(), saturate<U64, S>, Pipe::Convert);
    constexpr Handler to_f32 = map<same, F32, S>, to_f64 = map<same, F64, S>;
    Registration(("cvt.f32." + type).c_str(), to_f32, Pipe::Convert);
    Registration(("cvt.f64." + type).c_str(), to_f64, Pipe::Convert);
    Registration(("cvt.directed.f32." + type).c_str(), directed<to_f32>, Pipe::Convert);
    Registration(("cvt.directed.f64." + type).c_str(), directed<to_f64>, Pipe::Convert);
}

// --- Floating point to integers.

double to_integer(double x, Rounding rounding) {
    switch (rounding) {
        case Rounding::Zero: return std::trunc(x);
        case Rounding::Down: return std::floor(x);
        case Rounding::Up: return std::ceil(x);
        default: return std::nearbyint(x);
    }
}

// attr: lowest and highest value of the destination's type, what NaN becomes, the rounding, whether to flush.
template <class D, class S>
Step to_integers(Warp& w, const Op& op, Mask mask) {
    auto* d = cells<D>(w, op.reg[0]);
    const auto* a = cells<S>(w, op.reg[1]);
    const Limits limits(op.attr);
    const uint64_t nan = static_cast<uint64_t>(op.attr[2]);
    const auto rounding = static_cast<Rounding>(op.attr[3]);
    const bool flush = op.attr[4] != 0;
    for_lanes(mask, [&](int lane) {
        double x = S::load(a[lane]);
        if (flush) x = number::flush(static_cast<float>(x));
        d[lane] = D::store(static_cast<typename D::Value>(std::isnan(x) ? nan : limits.clamp(to_integer(x, rounding))));
    });
    return Step::Next;
}

// Floating point to integral values of the same type. attr: rounding, whether to flush, whether to clamp to [0, 1].
template <class T>
Step to_integral(Warp& w, const Op& op, Mask mask) {
    auto* d = cells<T>(w, op.reg[0]);
    const auto* a = cells<T>(w, op.reg[1]);
    for_lanes(mask, [&](int lane) {
        double x = T::load(a[lane]);
        if (op.attr[1]) x = number::flush(static_cast<float>(x));
        x = number::canonical(to_integer(x, static_cast<Rounding>(op.attr[0])));
        if (op.attr[2]) x = x > 0 ? std::min(x, 1.0) : 0.0;
        d[lane] = T::store(static_cast<typename T::Value>(x));
    });
    return Step::Next;
}

// --- Between floating-point types.

template <bool Ftz, bool Sat>
constexpr auto kToF32 = [](auto a) {
    float x = number::canonical(static_cast<float>(a));
    if constexpr (Ftz) x = number::flush(x);
    if constexpr (Sat) x = x > 0 ? std::min(x, 1.0f) : 0.0f;
    return x;
};
constexpr auto to_f64 = [](auto a) { return number::canonical(static_cast<double>(a)); };
constexpr auto to_f64_saturated = [](auto a) { return a > 0 ? std::min(static_cast<double>(a), 1.0) : 0.0; };

template <class S>
void register_float_source(const std::string& type) {
    Registration(("cvt.integer.b16." + type).c_str(), to_integers<U16, S>, Pipe::Convert);
    Registration(("cvt.integer.b32." + type).c_str(), to_integers<U32, S>, Pipe::Convert);
    Registration(("cvt.integer.b64." + type).c_str(), to_integers<U64, S>, Pipe::Convert);
    Registration(("cvt.integral." + type).c_str(), to_integral<S>, Pipe::Convert);
    Registration(("cvt.f32." + type).c_str(), map<kToF32<false, false>, F32, S>, Pipe::Convert);
    Registration(("cvt.ftz.f32." + type).c_str(), map<kToF32<true, false>, F32, S>, Pipe::Convert);
    Registration(("cvt.sat.f32." + type).c_str(), map<kToF32<false, true>, F32, S>, Pipe::Convert);
    Registration(("cvt.ftz.sat.f32." + type).c_str(), map<kToF32<true, true>, F32, S>, Pipe::Convert);
    Registration(("cvt.f64." + type).c_str(), map<to_f64, F64, S>, Pipe::Convert);
    Registration(("cvt.sat.f64." + type).c_str(), map<to_f64_saturated, F64, S>, Pipe::Convert);
}

const bool registered = [] {
    register_integer_source<U8>("u8");
    register_integer_source<S8>("s8");
    register_integer_source<U16>("u16");
    register_integer_source<S16>("s16");
    register_integer_source<U32>("u32");
    register_integer_source<S32>("s32");
    register_integer_source<U64>("u64");
    register_integer_source<S64>("s64");
    register_float_source<F16>("f16");
    register_float_source<BF16>("bf16");
    register_float_source<F32>("f32");
    register_float_source<F64>("f64");
    return true;
}();

FLASH4_OP("cvt.directed.f32.f64", Convert, directed<map<kToF32<false, false>, F32, F64>>);
FLASH4_OP("cvt.directed.ftz.f32.f64", Convert, directed<map<kToF32<true, false>, F32, F64>>);

FLASH4_OP("cvt.ftz.f64.f32", Convert, map<[](float a) { return to_f64(number::flush(a)); }, F64, F32>);

FLASH4_OP("cvt.rn.f16.f32", Convert, map<same, F16, F32>);
FLASH4_OP("cvt.rn.bf16.f32", Convert, map<same, BF16, F32>);

// d = {a, b}: the first source is the upper half.
constexpr auto pack_f16 = [](float a, float b) { return uint32_t{number::to_f16(a)} << 16 | number::to_f16(b); };
constexpr auto pack_bf16 = [](float a, float b) { return uint32_t{number::to_bf16(a)} << 16 | number::to_bf16(b); };
FLASH4_OP("cvt.rn.f16x2.f32", Convert, map<pack_f16, U32, F32, F32>);
FLASH4_OP("cvt.rn.bf16x2.f32", Convert, map<pack_bf16, U32, F32, F32>);

// --- Any narrow format.

// Bits from one element to the next in a register that packs them, from the lowest up.
uint32_t stride_of(FormatName name) {
    const uint32_t width = number::format(name).width;
    return name == FormatName::Tf32 ? 32 : width == 6 ? 8 : width;
}

// What a source register holds: an f32, an f64, an integer, or packed elements of a narrow format.
enum class SourceKind { F32, F64, S8, S16, S32, S64, U8, U16, U32, U64, Packed };

// An integer with as many bits as a double has, the lowest of which stands for all that were dropped: rounded to fewer
// bits it gives what the integer itself does.
double sticky(uint64_t magnitude) {
    constexpr uint64_t dropped = 0x7ff;
    if (magnitude >> 53 && magnitude & dropped) magnitude = (magnitude & ~dropped) | (dropped + 1);
    return static_cast<double>(magnitude);
}

double source_value(Warp& w, uint32_t reg, int lane, SourceKind kind, FormatName name, int element) {
    switch (kind) {
        case SourceKind::F32: return std::bit_cast<float>(w.u32(reg)[lane]);
        case SourceKind::F64: return std::bit_cast<double>(w.u64(reg)[lane]);
        case SourceKind::S8: return S8::load(w.u32(reg)[lane]);
        case SourceKind::S16: return S16::load(w.u32(reg)[lane]);
        case SourceKind::S32: return S32::load(w.u32(reg)[lane]);
        case SourceKind::S64: {
            const auto x = static_cast<int64_t>(w.u64(reg)[lane]);
            return x < 0 ? -sticky(-static_cast<uint64_t>(x)) : sticky(x);
        }
        case SourceKind::U8: return U8::load(w.u32(reg)[lane]);
        case SourceKind::U16: return U16::load(w.u32(reg)[lane]);
        case SourceKind::U32: return U32::load(w.u32(reg)[lane]);
        case SourceKind::U64: return sticky(w.u64(reg)[lane]);
        case SourceKind::Packed: return number::decode(w.u32(reg)[lane] >> (stride_of(name) * element), name);
    }
    return 0;
}

// reg: d, then the sources; with two of them the first is the upper element.
// attr: destination format, elements, rounding, .satfinite, .relu, flush the source, clamp to [0, 1], source kind,
// source format.
Step to_narrow(Warp& w, const Op& op, Mask mask) {
    const auto to = static_cast<FormatName>(op.attr[0]), from = static_cast<FormatName>(op.attr[8]);
    const int elements = static_cast<int>(op.attr[1]);
    const Encoding how{static_cast<Rounding>(op.attr[2]), op.attr[3] != 0, op.attr[4] != 0};
    const bool flush = op.attr[5] != 0, unit = op.attr[6] != 0;
    const auto kind = static_cast<SourceKind>(op.attr[7]);
    uint32_t* d = w.u32(op.reg[0]);
    for (Mask rest = mask; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        uint32_t word = 0;
        for (int i = 0; i < elements; ++i) {
            const uint32_t source = kind == SourceKind::Packed ? op.reg[1] : op.reg[elements - i];
            double x = source_value(w, source, lane, kind, from, i);
            if (flush) x = number::flush(static_cast<float>(x));
            if (unit) x = x > 0 ? std::min(x, 1.0) : 0.0;
            word |= number::encode(x, to, how) << (stride_of(to) * i);
        }
        d[lane] = word;
    }
    return Step::Next;
}
FLASH4_OP("cvt.narrow", Convert, to_narrow);

}  // namespace
}  // namespace flash4::alu
