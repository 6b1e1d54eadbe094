"""Runs the PTX of compiled kernels on the CPU. `flash4_torch.testing.emulate` is its public interface.

A launch passes through these modules: `host` and `dsl` catch what CuTe-DSL launches, `ptx` parses, `control`
finds where lanes reconverge and which registers share space, `lower` turns instructions into operations of
the C++ engine (csrc_stubs/no_gpu), `engine` runs them, `report` says what was found. `build` compiles the
engine on first use; `mutate` deletes synchronisation to test the checks.
"""
