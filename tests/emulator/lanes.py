"""Runs a few PTX instructions once for every element of some arrays, and generates such arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from flash4_torch.emulator.engine import run_ptx

LANES = 32

drawn = st.integers(0, 2**32 - 1).map(np.random.default_rng)
# Both a warp in which only some lanes run, and whole warps.
counts = st.sampled_from([7, 32, 77])
few = settings(max_examples=4, derandomize=True, deadline=None)


def evaluate(body: str, sources: list[np.ndarray], *results: type) -> list[np.ndarray]:
    """The results of `body`, which reads %s0, %s1, ... and writes %d0, %d1, ...; one thread for each element.

    sources: arrays (n,) of 2, 4 or 8 bytes an element; bool gives a predicate.
    results: their dtypes; bool for a predicate.
    Unless n is a multiple of 32, the last warp runs with only some of its lanes.
    """
    n = len(sources[0])
    inputs = [a.astype(np.uint32) if a.dtype == bool else np.ascontiguousarray(a) for a in sources]
    outputs: list[np.ndarray] = [np.zeros(n, np.uint32 if r is bool else r) for r in results]
    arrays = [*inputs, *outputs]
    lines = [f".reg .b64 %p{i}; ld.param.u64 %p{i}, [p{i}];" for i in range(len(arrays))]
    for i, array in enumerate(arrays):
        size = array.dtype.itemsize
        lines.append(f"mad.wide.u32 %p{i}, %i, {size}, %p{i};")
    for i, source in enumerate(sources):
        lines.append(_load(f"%s{i}", f"%p{i}", source.dtype))
    lines += [_declare(f"%d{i}", result) for i, result in enumerate(results)]
    lines.append(body)
    for i, result in enumerate(results, len(sources)):
        lines.append(_store(f"%d{i - len(sources)}", f"%p{i}", result))
    text = _kernel(n, len(arrays), "\n".join(lines))
    run_ptx(text, arrays, grid=(-(-n // LANES), 1, 1))
    return [out.astype(bool) if r is bool else out for r, out in zip(results, outputs, strict=True)]


def _kernel(n: int, arrays: int, body: str) -> str:
    params = ", ".join(f".param .u64 p{i}" for i in range(arrays))
    return f"""
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k({params})
{{
    .reg .b32 %i, %cta;
    .reg .pred %beyond;
    mov.u32 %i, %tid.x;
    mov.u32 %cta, %ctaid.x;
    mad.lo.s32 %i, %cta, {LANES}, %i;
    setp.ge.u32 %beyond, %i, {n};
    @%beyond bra beyond;
    {body}
    ret;
beyond:
    exit;
}}
"""


def _declare(name: str, dtype: type | np.dtype) -> str:
    kind = "pred" if dtype in (bool, np.dtype(bool)) else f"b{8 * np.dtype(dtype).itemsize}"
    return f".reg .{kind} {name};"


def _load(name: str, pointer: str, dtype: np.dtype) -> str:
    declaration = _declare(name, dtype)
    if dtype.kind == "b":
        word = f".reg .b32 {name}_word; ld.global.b32 {name}_word, [{pointer}];"
        return f"{declaration} {word} setp.ne.s32 {name}, {name}_word, 0;"
    return f"{declaration} ld.global.b{8 * dtype.itemsize} {name}, [{pointer}];"


def _store(name: str, pointer: str, dtype: type) -> str:
    if dtype is bool:
        word = f".reg .b32 {name}_word; selp.b32 {name}_word, 1, 0, {name};"
        return f"{word} st.global.b32 [{pointer}], {name}_word;"
    return f"st.global.b{8 * np.dtype(dtype).itemsize} [{pointer}], {name};"


def bits_of(kind: str) -> int:
    return int(kind[1:])


def unsigned(bits: int) -> type:
    return {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]


def integers(rng: np.random.Generator, n: int, bits: int) -> np.ndarray:
    """Arbitrary bits, small numbers of either sign, and single bits."""
    top = (1 << bits) - 1
    anything = rng.integers(0, top, n, np.uint64, endpoint=True)
    small = rng.integers(-3, 4, n).astype(np.uint64) & np.uint64(top)
    single = np.uint64(1) << rng.integers(0, bits, n, np.uint64)
    which = rng.integers(0, 4, n)
    return np.where(which == 0, small, np.where(which == 1, single, anything)).astype(unsigned(bits))


def number(code: int, kind: str) -> int:
    bits = bits_of(kind)
    code &= (1 << bits) - 1
    return code - (1 << bits) if kind[0] == "s" and code >> (bits - 1) else code
