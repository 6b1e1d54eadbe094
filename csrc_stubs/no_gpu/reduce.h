// Element types in memory, and reductions of one element into another: for atomics, bulk reductions and tensor maps.
#pragma once

#include <cstdint>

namespace flash4 {

// Numbered as tensormap.replace numbers its .elemtype (PTX ISA, tensormap.replace).
enum class ElementType : uint8_t {
    U8,
    U16,
    U32,
    S32,
    U64,
    S64,
    F16,
    F32,
    F32Flushed,
    F64,
    Bf16,
    Tf32,
    Tf32Flushed,
    kCount
};
uint32_t element_bytes(ElementType type);  // throws Fault for a type that is packed below a byte

enum class Reduction : uint8_t { Add, Min, Max, And, Or, Xor, Inc, Dec, Exchange, kCount };

// *memory = reduction(*memory, *value), unaligned pointers allowed.
using Reducer = void (*)(uint8_t* memory, const uint8_t* value);
Reducer reducer(Reduction reduction, ElementType type);  // throws Fault where PTX has no such reduction
// As it is done in global memory: f32 addition flushes subnormal numbers (PTX ISA, red, cp.reduce.async.bulk).
Reducer global_reducer(Reduction reduction, ElementType type);

// Reduces `bytes` bytes of elements, one after the other.
void reduce(Reducer reducer, uint32_t element, uint8_t* memory, const uint8_t* values, uint64_t bytes);

}  // namespace flash4
