#include "number.h"

#include <algorithm>

namespace flash4::number {
namespace {

constexpr uint32_t kTf32Shift = 13;  // tf32 is an f32 whose low bits are zero

double rounded(double x, Rounding rounding, bool negative) {
    switch (rounding) {
        case Rounding::Nearest: return std::nearbyint(x);
        case Rounding::Zero: return std::trunc(x);
        case Rounding::Down: return negative ? std::ceil(x) : std::floor(x);
        case Rounding::Up: return negative ? std::floor(x) : std::ceil(x);
        case Rounding::NearestAway: return std::round(x);
    }
    return x;
}

bool rounds_to_infinity(Rounding rounding, bool negative) {
    if (rounding == Rounding::Zero) return false;
    if (rounding == Rounding::Down) return negative;
    return rounding != Rounding::Up || !negative;
}

// The code of a finite magnitude: its multiple of the spacing around it counts up from the code of the spacing's first
// number.
uint32_t magnitude_code(double magnitude, const Format& f, Rounding rounding, bool negative) {
    const int exponent = magnitude == 0 ? f.exponent_min : std::max(std::ilogb(magnitude), f.exponent_min);
    const int spacing = exponent - static_cast<int>(f.mantissa);
    const double multiple = rounded(std::ldexp(magnitude, -spacing), rounding, negative);
    const int64_t code =
        (static_cast<int64_t>(exponent - f.exponent_min) << f.mantissa) + static_cast<int64_t>(multiple);
    return static_cast<uint32_t>(std::min<int64_t>(code, f.largest + int64_t{1}));
}

}  // namespace

const Format& format(FormatName name) {
    static constexpr Format formats[] = {
        {16, 10, -14, 0x7BFF, 0x7C00, 0x7FFF},      // f16
        {16, 7, -126, 0x7F7F, 0x7F80, 0x7FFF},      // bf16
        {19, 10, -126, 0x3FBFF, 0x3FC00, 0x3FFFF},  // tf32
        {8, 3, -6, 0x7E, 0x7F, 0x7F},               // e4m3
        {8, 2, -14, 0x7B, 0x7C, 0x7F},              // e5m2
        {4, 1, 0, 0x7, 0x7, 0x7},                   // e2m1
        {6, 3, 0, 0x1F, 0x1F, 0x1F},                // e2m3
        {6, 2, -2, 0x1F, 0x1F, 0x1F},               // e3m2
    };
    return formats[static_cast<int>(name)];
}

uint32_t encode(double x, FormatName name, Encoding how) {
    const Format& f = format(name);
    const uint32_t shift = name == FormatName::Tf32 ? kTf32Shift : 0;
    if (std::isnan(x)) return name == FormatName::Tf32 ? kNan32 : f.nan;
    const bool negative = std::signbit(x);
    if (negative && how.relu) return 0;
    uint32_t code = f.infinity;
    if (std::isfinite(x)) {
        code = magnitude_code(std::fabs(x), f, how.rounding, negative);
        if (code > f.largest) code = rounds_to_infinity(how.rounding, negative) ? f.infinity : f.largest;
    }
    if (how.saturate) code = std::min(code, f.largest);
    return (code | static_cast<uint32_t>(negative) << (f.width - 1)) << shift;
}

double decode(uint32_t code, FormatName name) {
    const Format& f = format(name);
    if (name == FormatName::Tf32) code >>= kTf32Shift;
    const bool negative = code >> (f.width - 1) & 1;
    const uint32_t magnitude = code & ((1u << (f.width - 1)) - 1);
    double value;
    if (magnitude > f.largest) {
        value = magnitude == f.infinity && f.infinity != f.nan ? INFINITY : NAN;
    } else {
        const uint32_t field = magnitude >> f.mantissa, fraction = magnitude & ((1u << f.mantissa) - 1);
        const int exponent = f.exponent_min - static_cast<int>(f.mantissa) + static_cast<int>(std::max(field, 1u)) - 1;
        value = std::ldexp(static_cast<double>(fraction | (field ? 1u << f.mantissa : 0)), exponent);
    }
    return negative ? -value : value;
}

}  // namespace flash4::number
