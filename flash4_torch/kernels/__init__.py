"""Device code in CuTe-DSL. It imports cutlass, never torch; no other package imports it before it has to."""
