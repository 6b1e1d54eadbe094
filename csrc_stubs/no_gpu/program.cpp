// The table of operations, and programs made of them.
#include "program.h"

#include <cstring>

namespace flash4 {
namespace {

struct Entry {
    std::string name;
    Handler run;
    Pipe pipe;
};

std::vector<Entry>& table() {
    static std::vector<Entry> entries;  // filled by static initialisers of every file
    return entries;
}

}  // namespace

Registration::Registration(const char* name, Handler run, Pipe pipe) { table().push_back({name, run, pipe}); }

size_t operation_count() { return table().size(); }
const char* operation_name(size_t index) { return table()[index].name.c_str(); }
Pipe operation_pipe(size_t index) { return table()[index].pipe; }

std::unique_ptr<Program> make_program(const ProgramText& text) {
    auto program = std::make_unique<Program>();
    const uint32_t n = text.ops;
    program->regs.assign(text.regs, text.regs + text.reg_begin[n]);
    program->attrs.assign(text.attrs, text.attrs + text.attr_begin[n]);
    program->reconverge.assign(text.reconverge, text.reconverge + n);
    program->ops.reserve(n);
    for (uint32_t i = 0; i < n; ++i) {
        const Entry& entry = table()[text.operation[i]];
        program->ops.push_back({
            .run = entry.run,
            .reg = program->regs.data() + text.reg_begin[i],
            .attr = program->attrs.data() + text.attr_begin[i],
            .guard = text.guard[i],
            .guard_negated = text.guard_negated[i] != 0,
            .pipe = entry.pipe,
            .regs = static_cast<uint16_t>(text.reg_begin[i + 1] - text.reg_begin[i]),
            .attrs = static_cast<uint16_t>(text.attr_begin[i + 1] - text.attr_begin[i]),
            .index = i,
            .writes = text.writes[i],
        });
    }
    program->inits.reserve(text.inits);
    for (uint32_t i = 0; i < text.inits; ++i)
        program->inits.push_back(
            {static_cast<InitKind>(text.init_kind[i]), text.init_bytes[i], text.init_offset[i], text.init_value[i]});
    program->register_bytes = text.register_bytes;
    program->static_shared_bytes = text.static_shared_bytes;
    program->register_cap = text.register_cap;
    return program;
}

}  // namespace flash4
