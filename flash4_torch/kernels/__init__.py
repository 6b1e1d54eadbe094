"""Device code in CuTe-DSL. Imports cutlass, never torch; nothing above imports it before it is needed."""
