"""Products of the fifth-generation tensor core: operands, descriptors, and issuing them by one thread.

PTX ISA: TensorCore 5th Generation Family Instructions, Matrix and Instruction Descriptors. The high word of
an operand's descriptor and the whole instruction descriptor are known when a kernel is compiled; a GEMM is
one block of assembly that adds constants to the operands' low words. A CTA's products are done in order.

    S = Product("bfloat16", 128, 128, a=Matrix(128, 128), b=Matrix(128, 128))
    with cute.arch.elect_one():
        issue(S, tmem, word(S.a, sQ), word(S.b, sK), False)
        commit(full)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from ..common.smem_layouts import chunk_of

DEPTH = 16
"""What one instruction sums over, in 16-bit numbers."""
BYTES = 2
"""Of a number."""
UNIT = 16
"""Bytes in which descriptors count."""

_ROWS = 8
"""Of a swizzled group."""
_VERSION = 1 << 14
_SWIZZLE = {64: 2 << 29, 32: 4 << 29, 16: 6 << 29}
"""By columns of a chunk, 128, 64 and 32 bytes."""
_FLOAT32_SUMS = 1 << 4
_BFLOAT16 = (1 << 7) | (1 << 10)
_A_ALONG_ROWS, _B_ALONG_ROWS = 1 << 15, 1 << 16


class Matrix(NamedTuple):
    """rows x columns of 16-bit numbers in shared memory, as `smem_layouts` lays them out: chunks of columns.

    Row-major and column-major layouts of the same sizes are the same memory, so one matrix serves as an
    operand whose columns are summed over and as one whose rows are.
    """

    rows: int
    columns: int
    along_rows: bool = False
    """Whether the product sums over rows: A or B are then stored transposed ("MN-major")."""
    part: int | None = None
    """Columns that chunks have to divide, if not all of them."""

    @property
    def chunk(self) -> int:
        """Columns that lie together."""
        return chunk_of(self.part or self.columns)

    @property
    def depth(self) -> int:
        """What a product sums over."""
        return self.rows if self.along_rows else self.columns

    @property
    def units(self) -> int:
        """Size in the units of descriptors: what lies between one stage's low word and the next one's."""
        return self.rows * self.columns * BYTES // UNIT

    @property
    def high(self) -> int:
        """The high word of its descriptor: from one group of rows to the next, version and swizzle."""
        return self.group | _VERSION | _SWIZZLE[self.chunk]

    @property
    def group(self) -> int:
        """Units of 8 rows of a chunk."""
        return _ROWS * self.chunk * BYTES // UNIT

    @property
    def chunk_units(self) -> int:
        """Units of all rows of a chunk."""
        return self.rows * self.chunk * BYTES // UNIT

    def step(self, k: int) -> int:
        """What is added to the low word for the k-th instruction's part of the sum."""
        if self.along_rows:
            return k * DEPTH // _ROWS * self.group
        chunk, column = divmod(k * DEPTH, self.chunk)
        return chunk * self.chunk_units + column * BYTES // UNIT


class MmaOp(NamedTuple):
    """M x N of A B^T, both M x K and N x K in this notation whichever way they are stored.

    With two CTAs M and N are those of the pair: each CTA has half of the rows of A, of B and of the sums.
    """

    dtype: str
    M: int
    N: int
    a: Matrix | None
    """A CTA's own; None: in tensor memory, two numbers to a column."""
    b: Matrix
    cluster_size: int = 1

    @property
    def steps(self) -> int:
        """Instructions."""
        return self.b.depth // DEPTH

    @property
    def descriptor(self) -> int:
        """Of the instruction."""
        types = _FLOAT32_SUMS | (_BFLOAT16 if self.dtype == "bfloat16" else 0)
        turned = _A_ALONG_ROWS if self.a is not None and self.a.along_rows else 0
        turned |= _B_ALONG_ROWS if self.b.along_rows else 0
        return types | turned | self.N // 8 << 17 | self.M // 16 << 24


def word(matrix: Matrix, start: cute.Pointer) -> Int32:
    """The low word of the descriptor: where it starts, and the distance of chunks where they matter."""
    leading = matrix.chunk_units if matrix.along_rows else 1
    return Int32(start.toint()) // UNIT + (leading << 16)


def issue(
    product: MmaOp,
    sums: Int32,
    a: Int32,
    b: Int32,
    add: Any,
    first: int = 0,
    last: int | None = None,
    a_step: Callable[[int], int] = lambda k: k * DEPTH // 2,
) -> None:
    """Instructions `first <= k < last` of a product, by one thread.

    Args:
        sums: tensor-memory address of the M x N float32 sums.
        a, b: low words of the operands' descriptors, or for A in tensor memory its address.
        add: whether to add to the sums that are there; a Python bool or a Boolean.
        a_step: for A in tensor memory, at which column the k-th instruction's part starts.
    """
    A, B, in_tmem = product.a, product.b, product.a is None
    lines = [
        "{ .reg .pred add; .reg .b32 sums, at, kind, low, high_a, high_b; .reg .b64 a, b;",
        "mov.b32 sums, {$r0}; mov.b32 at, {$r1};",  # an address is no immediate
        f"mov.b32 kind, {product.descriptor:#x}; mov.b32 high_b, {B.high:#x};",
        "setp.ne.b32 add, {$r3}, 0;",
    ]
    if A is not None:
        lines.append(f"mov.b32 high_a, {A.high:#x};")
    for k in range(first, product.steps if last is None else last):
        lines.append(f"add.u32 low, {{$r2}}, {B.step(k)}; mov.b64 b, {{low, high_b}};")
        if A is not None:
            lines.append(f"add.u32 low, at, {A.step(k)}; mov.b64 a, {{low, high_a}};")
        source = f"[at + {a_step(k)}]" if in_tmem else "a"
        kind = f"tcgen05.mma.cta_group::{product.cluster_size}.kind::f16"
        lines.append(f"{kind} [sums], {source}, b, kind, add;")
        if k == first and add is not True:
            lines.append("setp.eq.b32 add, kind, kind;")
    cute.arch.inline_ptx("\n".join([*lines, "}"]), read_only_args=[sums, a, b, Int32(add)])


def commit(barrier: cute.Pointer, cluster_size: int = 1) -> None:
    """All products issued so far by this thread arrive there when they are done, with two CTAs in both."""
    if cluster_size == 1:
        tcgen05.commit(barrier)
    else:
        tcgen05.commit(barrier, (1 << cluster_size) - 1, tcgen05.CtaGroup.TWO)
