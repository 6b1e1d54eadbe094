#include "reduce.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <type_traits>

#include "isa.h"

namespace flash4 {
namespace {

struct Bf16 {
    uint16_t bits;
    explicit operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
    // Round to nearest even; NaN stays NaN.
    static Bf16 from(float value) {
        const uint32_t all = std::bit_cast<uint32_t>(value);
        if (std::isnan(value)) return {0x7FFF};
        return {static_cast<uint16_t>((all + 0x7FFF + (all >> 16 & 1)) >> 16)};
    }
};

float flushed(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value; }

template <class T>
concept Small = std::is_same_v<T, Bf16> || std::is_same_v<T, _Float16>;

template <Small T>
T narrow(float value) {
    if constexpr (std::is_same_v<T, Bf16>) return Bf16::from(value);
    else return static_cast<_Float16>(value);
}

// The sum of two 11-bit or 8-bit significands is exact in f32 or rounds the same way twice: one rounding is seen.
struct Add {
    template <class T>
    static T apply(T a, T b) {
        if constexpr (Small<T>) return narrow<T>(static_cast<float>(a) + static_cast<float>(b));
        else return a + b;
    }
};
// Atomic f32 addition in global memory flushes subnormal inputs and results (PTX ISA, red).
struct AddFlushed {
    static float apply(float a, float b) { return flushed(flushed(a) + flushed(b)); }
};
// A NaN loses against a number (PTX ISA, min and max).
struct Min {
    template <class T>
    static T apply(T a, T b) {
        if constexpr (Small<T>) return narrow<T>(std::fmin(static_cast<float>(a), static_cast<float>(b)));
        else return b < a ? b : a;
    }
};
struct Max {
    template <class T>
    static T apply(T a, T b) {
        if constexpr (Small<T>) return narrow<T>(std::fmax(static_cast<float>(a), static_cast<float>(b)));
        else return a < b ? b : a;
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
struct Inc {
    template <class T>
    static T apply(T a, T b) {
        return a >= b ? 0 : a + 1;
    }
};
struct Dec {
    template <class T>
    static T apply(T a, T b) {
        return a == 0 || a > b ? b : a - 1;
    }
};
struct Exchange {
    template <class T>
    static T apply(T, T b) {
        return b;
    }
};

template <class Combine, class T>
void combine(uint8_t* memory, const uint8_t* value) {
    T a, b;
    std::memcpy(&a, memory, sizeof a);
    std::memcpy(&b, value, sizeof b);
    a = Combine::apply(a, b);
    std::memcpy(memory, &a, sizeof a);
}

template <class Combine>
Reducer of_integer(ElementType type) {
    switch (type) {
        case ElementType::U32: return combine<Combine, uint32_t>;
        case ElementType::S32: return combine<Combine, int32_t>;
        case ElementType::U64: return combine<Combine, uint64_t>;
        case ElementType::S64: return combine<Combine, int64_t>;
        default: return nullptr;
    }
}

template <class Combine>
Reducer of_small(ElementType type) {
    switch (type) {
        case ElementType::F16: return combine<Combine, _Float16>;
        case ElementType::Bf16: return combine<Combine, Bf16>;
        default: return of_integer<Combine>(type);
    }
}

Reducer of_add(ElementType type) {
    switch (type) {
        case ElementType::F32: return combine<Add, float>;
        case ElementType::F32Flushed: return combine<AddFlushed, float>;
        case ElementType::F64: return combine<Add, double>;
        case ElementType::U32:
        case ElementType::S32: return combine<Add, uint32_t>;  // wraps around
        case ElementType::U64:
        case ElementType::S64: return combine<Add, uint64_t>;
        default: return of_small<Add>(type);
    }
}

template <class Combine>
Reducer of_counter(ElementType type) {
    return type == ElementType::U32 ? combine<Combine, uint32_t> : nullptr;
}

Reducer find(Reduction reduction, ElementType type) {
    switch (reduction) {
        case Reduction::Add: return of_add(type);
        case Reduction::Min: return of_small<Min>(type);
        case Reduction::Max: return of_small<Max>(type);
        case Reduction::And: return of_integer<And>(type);
        case Reduction::Or: return of_integer<Or>(type);
        case Reduction::Xor: return of_integer<Xor>(type);
        case Reduction::Inc: return of_counter<Inc>(type);
        case Reduction::Dec: return of_counter<Dec>(type);
        case Reduction::Exchange: return of_integer<Exchange>(type);
        case Reduction::kCount: break;
    }
    return nullptr;
}

}  // namespace

uint32_t element_bytes(ElementType type) {
    constexpr uint8_t bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4};
    if (type >= ElementType::kCount)
        throw Fault("unsupported", "element type " + std::to_string(static_cast<int>(type)) + " in memory");
    return bytes[static_cast<int>(type)];
}

Reducer reducer(Reduction reduction, ElementType type) {
    if (Reducer found = find(reduction, type)) return found;
    throw Fault("unsupported", "reduction " + std::to_string(static_cast<int>(reduction)) + " of element type " +
                                   std::to_string(static_cast<int>(type)));
}

Reducer global_reducer(Reduction reduction, ElementType type) {
    const bool flushes = reduction == Reduction::Add && type == ElementType::F32;
    return reducer(reduction, flushes ? ElementType::F32Flushed : type);
}

void reduce(Reducer reducer, uint32_t element, uint8_t* memory, const uint8_t* values, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes; at += element) reducer(memory + at, values + at);
}

}  // namespace flash4
