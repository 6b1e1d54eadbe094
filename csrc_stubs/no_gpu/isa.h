// What an instruction is to the engine: a handler, the registers it names, and its static attributes.
//
// The Python front end (flash4_torch/emulator/lower.py) resolves every PTX instruction to one registered operation by
// name. A handler documents the order of `reg` and `attr` beside its definition.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace flash4 {

inline constexpr int kLanes = 32;
using Mask = uint32_t;  // one bit per lane
inline constexpr Mask kAllLanes = 0xFFFFFFFFu;

struct Warp;
struct Op;

enum class Step : uint8_t {
    Next,     // done, go on with the following instruction
    Jumped,   // done, the handler has set the program counter
    Blocked,  // not done: run it again after something has happened in the cluster
    Yield,    // done, but it polled in vain: let others run before the following instruction
};

// Which execution pipe of the hardware an instruction occupies; only for the counters.
enum class Pipe : uint8_t { Alu, Fma, Mufu, Convert, Control, Memory, Sync, Async, Mma, Move, kCount };

// Runs one instruction of one warp for the lanes in `mask`, which is never empty.
using Handler = Step (*)(Warp&, const Op&, Mask mask);

inline constexpr uint32_t kNoRegister = 0xFFFFFFFFu;  // an operand that was absent, or `_`

struct Op {
    Handler run;
    const uint32_t* reg;  // byte offsets in the warp's register file
    const int64_t* attr;
    uint32_t guard;  // byte offset of the predicate that guards it, or kNoRegister
    bool guard_negated;
    Pipe pipe;
    uint16_t regs, attrs;  // how many
    uint32_t index;        // position in the program, the program counter's unit
    uint32_t writes = 0;   // bit i: the instruction writes reg[i] (of the first 32) and does not read it there
};

// Registers an operation under its name at load time: FLASH4_OP("add.s32", Alu, add<int32_t>);
struct Registration {
    Registration(const char* name, Handler run, Pipe pipe);
};
#define FLASH4_CONCAT_(a, b) a##b
#define FLASH4_CONCAT(a, b) FLASH4_CONCAT_(a, b)
#define FLASH4_OP(name, pipe, ...)                                                                   \
    static const ::flash4::Registration FLASH4_CONCAT(registration_, __COUNTER__)(name, __VA_ARGS__, \
                                                                                  ::flash4::Pipe::pipe)

// A wrong program: thrown by handlers, reported with warp, PTX line and source line, and ends the launch.
struct Fault : std::runtime_error {
    std::string kind;  // "out-of-bounds", "misaligned", "mbarrier", ...
    Fault(std::string kind, const std::string& what) : std::runtime_error(what), kind(std::move(kind)) {}
};

}  // namespace flash4
