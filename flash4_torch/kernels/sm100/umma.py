"""MMAs of the fifth-generation tensor core (tcgen05): operands, descriptors, and issuing by one thread.

PTX ISA: TensorCore 5th Generation Family Instructions, Matrix and Instruction Descriptors. The high word of
an operand's descriptor and the whole instruction descriptor are known when a kernel is compiled; a GEMM is
one block of assembly that adds constants to the operands' low words. A CTA's MMAs complete in order.

    S = MmaOp("bfloat16", 128, 128, a=Matrix(128, 128), b=Matrix(128, 128))
    with cute.arch.elect_one():
        issue(S, tmem_address, word(S.a, sQ), word(S.b, sK), False)
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
"""Depth of one instruction: the number of 16-bit elements that it sums over."""
BYTES = 2
"""Bytes of an element."""
UNIT = 16
"""Bytes of the unit in which descriptors count."""

_ROWS = 8
"""Rows of a swizzled group."""
_VERSION = 1 << 14
_SWIZZLE = {64: 2 << 29, 32: 4 << 29, 16: 6 << 29}
"""Swizzle bits by columns of a chunk, which are 128, 64 and 32 bytes."""
_FLOAT32_SUMS = 1 << 4
_BFLOAT16 = (1 << 7) | (1 << 10)
_A_ALONG_ROWS, _B_ALONG_ROWS = 1 << 15, 1 << 16


class Matrix(NamedTuple):
    """rows x columns of 16-bit elements in SMEM, as `smem_layouts` lays them out: chunks of columns.

    Row-major and column-major layouts of the same sizes are the same memory, so one matrix serves both as an
    operand whose columns are summed over and as one whose rows are.
    """

    rows: int
    columns: int
    along_rows: bool = False
    """Whether the MMA sums over rows: A or B is then stored transposed ("MN-major")."""
    part: int | None = None
    """Number of columns that a chunk has to divide; None: all of them."""

    @property
    def chunk(self) -> int:
        """Columns of a chunk, which lie together."""
        return chunk_of(self.part or self.columns)

    @property
    def depth(self) -> int:
        """Number of elements that an MMA sums over."""
        return self.rows if self.along_rows else self.columns

    @property
    def units(self) -> int:
        """Size in the units of descriptors: the distance from one stage's low word to the next one's."""
        return self.rows * self.columns * BYTES // UNIT

    @property
    def high(self) -> int:
        """High word of its descriptor: the distance between groups of rows, version and swizzle."""
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
        """Offset of the k-th instruction's part of the sum, which is added to the low word."""
        if self.along_rows:
            return k * DEPTH // _ROWS * self.group
        chunk, column = divmod(k * DEPTH, self.chunk)
        return chunk * self.chunk_units + column * BYTES // UNIT


class MmaOp(NamedTuple):
    """An M x N MMA, A B^T: in this notation A is M x K and B is N x K, whichever way they are stored.

    With two CTAs, M and N are those of the pair: each has half of the rows of A, of B and of the accumulator.
    """

    dtype: str
    M: int
    N: int
    a: Matrix | None
    """The CTA's own part of A; None: A lies in TMEM, two elements to a column."""
    b: Matrix
    cluster_size: int = 1

    @property
    def steps(self) -> int:
        """Number of instructions."""
        return self.b.depth // DEPTH

    @property
    def descriptor(self) -> int:
        """The instruction descriptor."""
        types = _FLOAT32_SUMS | (_BFLOAT16 if self.dtype == "bfloat16" else 0)
        turned = _A_ALONG_ROWS if self.a is not None and self.a.along_rows else 0
        turned |= _B_ALONG_ROWS if self.b.along_rows else 0
        return types | turned | self.N // 8 << 17 | self.M // 16 << 24


def word(matrix: Matrix, start: cute.Pointer) -> Int32:
    """Low word of the descriptor: the start address, and the distance between chunks where it matters."""
    leading = matrix.chunk_units if matrix.along_rows else 1
    return Int32(start.toint()) // UNIT + (leading << 16)


def issue(
    op: MmaOp,
    sums: Int32,
    a: Int32,
    b: Int32,
    add: Any,
    first: int = 0,
    last: int | None = None,
    a_step: Callable[[int], int] = lambda k: k * DEPTH // 2,
) -> None:
    """Issue instructions `first <= k < last` of an MMA, by one thread.

    Args:
        sums: TMEM address of the M x N float32 accumulator.
        a, b: low words of the operands' descriptors; for A in TMEM, its address.
        add: whether to add to what the accumulator holds; a Python bool or a Boolean.
        a_step: for A in TMEM, the column at which the k-th instruction's part starts.
    """
    A, B, in_tmem = op.a, op.b, op.a is None
    lines = [
        "{ .reg .pred add; .reg .b32 sums, at, kind, low, high_a, high_b; .reg .b64 a, b;",
        "mov.b32 sums, {$r0}; mov.b32 at, {$r1};",  # an address cannot be an immediate
        f"mov.b32 kind, {op.descriptor:#x}; mov.b32 high_b, {B.high:#x};",
        "setp.ne.b32 add, {$r3}, 0;",
    ]
    if A is not None:
        lines.append(f"mov.b32 high_a, {A.high:#x};")
    for k in range(first, op.steps if last is None else last):
        lines.append(f"add.u32 low, {{$r2}}, {B.step(k)}; mov.b64 b, {{low, high_b}};")
        if A is not None:
            lines.append(f"add.u32 low, at, {A.step(k)}; mov.b64 a, {{low, high_a}};")
        source = f"[at + {a_step(k)}]" if in_tmem else "a"
        kind = f"tcgen05.mma.cta_group::{op.cluster_size}.kind::f16"
        lines.append(f"{kind} [sums], {source}, b, kind, add;")
        if k == first and add is not True:
            lines.append("setp.eq.b32 add, kind, kind;")
    cute.arch.inline_ptx("\n".join([*lines, "}"]), read_only_args=[sums, a, b, Int32(add)])


def commit(barrier: cute.Pointer, cluster_size: int = 1) -> None:
    """All MMAs issued so far by this thread arrive at the barrier when done; with two CTAs, in both."""
    if cluster_size == 1:
        tcgen05.commit(barrier)
    else:
        tcgen05.commit(barrier, (1 << cluster_size) - 1, tcgen05.CtaGroup.TWO)
