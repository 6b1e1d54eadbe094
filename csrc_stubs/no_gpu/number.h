// Bit-exact conversions between f32, f64 and the narrow floating-point formats.
//
// Written on integers and without branches where they are hot, so that loops over lanes vectorise on any CPU.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace flash4::number {

inline constexpr uint32_t kNan32 = 0x7FFFFFFFu;  // the NaN that the hardware produces, of any operands
inline constexpr uint64_t kNan64 = 0x7FFFFFFFFFFFFFFFull;

inline uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
inline float real(uint32_t x) { return std::bit_cast<float>(x); }

inline float canonical(float x) { return x == x ? x : real(kNan32); }
inline double canonical(double x) { return x == x ? x : std::bit_cast<double>(kNan64); }

// Subnormals become zeros of their sign (PTX ISA, .ftz).
inline float flush(float x) {
    const uint32_t b = bits(x);
    return real((b & 0x7F800000u) ? b : b & 0x80000000u);
}

inline float from_bf16(uint16_t b) { return real(uint32_t{b} << 16); }

// To nearest even; NaN becomes 0x7FFF.
inline uint16_t to_bf16(float x) {
    const uint32_t b = bits(x);
    const uint32_t rounded = (b + 0x7FFFu + (b >> 16 & 1)) >> 16;
    return static_cast<uint16_t>(x == x ? rounded : 0x7FFFu);
}

inline float from_f16(uint32_t h) {
    const uint32_t magnitude = h & 0x7FFFu, sign = (h & 0x8000u) << 16;
    // Both kinds of number are right after one exact operation: subnormals as multiples of 2^-24.
    const uint32_t normal = (magnitude << 13) + (magnitude >= 0x7C00u ? 0x70000000u : 0x38000000u);
    const uint32_t subnormal = bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    return real(sign | (magnitude < 0x400u ? subnormal : normal));
}

// To nearest even; NaN becomes 0x7FFF.
inline uint16_t to_f16(float x) {
    const uint32_t b = bits(x), sign = b >> 16 & 0x8000u, magnitude = b & 0x7FFFFFFFu;
    // Adding 1/2 leaves multiples of 2^-24 in the low bits, rounded by the addition itself.
    const uint32_t subnormal = bits(real(magnitude) + 0.5f) - bits(0.5f);
    const uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1)) >> 13;
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
    half = magnitude >= 0x47800000u ? 0x7C00u : half;
    half = magnitude > 0x7F800000u ? 0x7FFFu : half | sign;
    return static_cast<uint16_t>(half);
}

// Rounding to odd keeps enough to round once more, to a format with at least two bits less, as if directly.
inline double add_to_odd(double a, double b) {
    const double sum = a + b;
    // Knuth's two-sum: the exact error of the addition, NaN or 0 where the sum is not finite.
    const double b_part = sum - a;
    const double error = (a - (sum - b_part)) + (b - b_part);
    const uint64_t even = std::bit_cast<uint64_t>(sum);
    // The exact sum lies between `sum` and the number next to it, away from zero or towards it; that number is odd.
    const uint64_t odd = (error > 0) == (sum > 0) ? even | 1 : even - 1;
    return !(even & 1) && (error < 0 || error > 0) ? std::bit_cast<double>(odd) : sum;
}
inline float narrow_to_odd(double x) {
    const float near = static_cast<float>(x);
    const uint32_t even = bits(near);
    // One below an infinity is the largest finite number, which is odd.
    const uint32_t odd = std::fabs(static_cast<double>(near)) < std::fabs(x) ? even | 1 : even - 1;
    return !(even & 1) && static_cast<double>(near) != x ? real(odd) : near;
}

enum class Rounding : uint8_t { Nearest, Zero, Down, Up, NearestAway };

// A narrow format by its parameters; codes are magnitudes without the sign bit.
struct Format {
    uint32_t width;        // bits, sign included where there is one
    uint32_t mantissa;     // stored bits
    int32_t exponent_min;  // of the smallest normal number
    uint32_t largest;      // code of the largest finite number
    uint32_t infinity;     // code of what overflows: an infinity, or NaN where the format has none
    uint32_t nan;
};
enum class FormatName : uint8_t { F16, Bf16, Tf32, E4m3, E5m2, E2m1, E2m3, E3m2, kCount };
const Format& format(FormatName name);

struct Encoding {
    Rounding rounding = Rounding::Nearest;
    bool saturate = false;  // .satfinite: overflow and infinities become the largest finite number
    bool relu = false;      // negative numbers become +0
};
// Any rounding to any format. tf32 keeps its place in the upper bits of an f32.
uint32_t encode(double x, FormatName name, Encoding how);
double decode(uint32_t code, FormatName name);

}  // namespace flash4::number
