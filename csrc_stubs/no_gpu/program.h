// A program as the front end hands it over, and the table of operations that it is made of.
#pragma once

#include <memory>

#include "machine.h"

namespace flash4 {

// Flat arrays, so that they pass through a C interface. `*_begin` have one entry more than there are ops.
struct ProgramText {
    uint32_t ops;
    const uint32_t* operation;  // index in the table of operations
    const uint32_t* guard;
    const uint8_t* guard_negated;
    const uint32_t* reg_begin;
    const uint32_t* regs;
    const uint32_t* writes;  // as Op::writes
    const uint32_t* attr_begin;
    const int64_t* attrs;
    const uint32_t* reconverge;
    uint32_t inits;
    const uint8_t* init_kind;
    const uint8_t* init_bytes;  // a lane; 0 for a predicate
    const uint32_t* init_offset;
    const int64_t* init_value;
    uint32_t register_bytes, static_shared_bytes, register_cap;
};

size_t operation_count();
const char* operation_name(size_t index);
Pipe operation_pipe(size_t index);

std::unique_ptr<Program> make_program(const ProgramText& text);

}  // namespace flash4
