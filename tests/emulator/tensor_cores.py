"""Operands for the tests of tensor cores: numbers in narrow formats, and their places in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

SHARED_BYTES = 192 * 1024
K_BYTES = 32  # bytes of K of one instruction


@dataclass(frozen=True)
class Format:
    """An element type: its bytes, NumPy's unsigned type of that size, and torch's type where there is one."""

    size: int
    torch_type: torch.dtype | None

    @property
    def raw_type(self) -> np.dtype:
        return np.dtype(f"u{self.size}")

    @property
    def k(self) -> int:
        return K_BYTES // self.size


FORMATS = {
    "f16": Format(2, torch.float16),
    "bf16": Format(2, torch.bfloat16),
    "tf32": Format(4, None),
    "e4m3": Format(1, torch.float8_e4m3fn),
    "e5m2": Format(1, torch.float8_e5m2),
    "s8": Format(1, torch.int8),
    "u8": Format(1, torch.uint8),
}


def random_operand(element: str, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(bits [rows, K], the f64 values that they encode [rows, K])."""
    generator = torch.Generator().manual_seed(seed)
    form = FORMATS[element]
    if form.torch_type is None:  # tf32: the tensor core ignores the low 13 bits
        numbers = torch.randn(rows, form.k, generator=generator).numpy()
        bits = numbers.view(np.uint32)
        return bits, (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if form.torch_type in (torch.int8, torch.uint8):
        low = -128 if element == "s8" else 0
        values = torch.randint(low, low + 256, (rows, form.k), generator=generator).to(form.torch_type)
    else:
        values = torch.randn(rows, form.k, generator=generator).to(form.torch_type)
    bits = values.view(torch.uint8).numpy().view(form.raw_type)
    return bits, values.to(torch.float64).numpy()


# Bytes of a swizzled row, and the exclusive-or: (mask of the row number, first address bit that changes).
SWIZZLES = {
    "none": (16, 0, 0),
    "32B": (32, 1, 4),
    "64B": (64, 3, 4),
    "128B": (128, 7, 4),
    "128B_32B": (128, 3, 5),
}


@dataclass(frozen=True)
class Layout:
    """How an operand lies in shared memory (PTX ISA, Canonical Layouts of matrix descriptors).

    gap: bytes added to both strides; a multiple of 1024.
    step: index of the 32 bytes of K in a swizzled row, K-major only.
    """

    swizzle: str
    mn_major: bool
    gap: int = 0
    step: int = 0

    def strides(self, rows: int, size: int) -> tuple[int, int]:
        """(leading, stride) byte offsets."""
        width, _, _ = SWIZZLES[self.swizzle]
        k = K_BYTES // size
        if self.swizzle == "none":
            # Columns of core matrices of 8 rows by 16 bytes, one below the other.
            blocks = k // 8 if self.mn_major else rows // 8
            far, near = blocks * 128 + self.gap, 128
            return (near, far) if self.mn_major else (far, near)
        if not self.mn_major:
            return 16, 8 * width + self.gap
        group = 4 if self.swizzle == "128B_32B" else 8
        stride = group * width + self.gap
        return -(-k // group) * stride, stride

    def offsets(self, rows: int, size: int) -> np.ndarray:
        """Byte offset of each element [rows, K] from the operand's beginning, which is a multiple of 1024."""
        leading, stride = self.strides(rows, size)
        width, mask, bit = SWIZZLES[self.swizzle]
        row, k = np.meshgrid(np.arange(rows), np.arange(K_BYTES // size), indexing="ij")
        if self.mn_major:
            along, across = row * size, k
        else:
            along, across = k * size, row
        if self.swizzle == "none":
            chunk, core = (stride, leading) if self.mn_major else (leading, stride)
            return along // 16 * chunk + along % 16 + across // 8 * core + across % 8 * 16
        group = 4 if self.swizzle == "128B_32B" else 8
        linear = across // group * stride + across % group * width
        linear += along // width * leading + along % width if self.mn_major else along + 32 * self.step
        return linear ^ ((linear >> 7 & mask) << bit)

    def place(self, memory: np.ndarray, at: int, bits: np.ndarray) -> int:
        """Writes an operand's bits [rows, K] into bytes; returns the next multiple of 1024 that is free."""
        size = bits.dtype.itemsize
        offsets = at + self.offsets(bits.shape[0], size)
        raw = np.ascontiguousarray(bits).view(np.uint8).reshape(*bits.shape, size)
        memory[offsets[..., None] + np.arange(size)] = raw
        return (int(offsets.max()) // 1024 + 1) * 1024

    def wgmma_descriptor(self, at: int, rows: int, size: int) -> int:
        """Descriptor of an operand at a byte offset of dynamic shared memory; the kernel adds its address."""
        code = {"none": 0, "128B": 1, "64B": 2, "32B": 3}[self.swizzle]
        return self._fields(at, rows, size) | code << 62

    def tcgen05_descriptor(self, at: int, rows: int, size: int) -> int:
        code = {"none": 0, "128B_32B": 1, "128B": 2, "64B": 4, "32B": 6}[self.swizzle]
        return self._fields(at, rows, size) | 1 << 46 | code << 61

    def _fields(self, at: int, rows: int, size: int) -> int:
        leading, stride = self.strides(rows, size)
        return at + 32 * self.step >> 4 | leading >> 4 << 16 | stride >> 4 << 32


def steps(swizzle: str) -> int:
    """The number of K steps in a swizzled row."""
    return max(SWIZZLES[swizzle][0] // K_BYTES, 1)


SWIZZLED_K = Layout("128B", False)  # the layout of most kernels

# Copies the image of shared memory that %source points to, to %base.
COPY_IMAGE = (
    """
    .reg .b32 %base, %tid, %at, %x<5>;
    .reg .b64 %source, %wide;
    .reg .pred %more;
    mov.u32 %tid, %tid.x;
    mov.u32 %base, memory;
    shl.b32 %at, %tid, 4;
COPY:
    cvt.u64.u32 %wide, %at;
    add.s64 %wide, %source, %wide;
    ld.global.v4.b32 {%x0, %x1, %x2, %x3}, [%wide];
    add.u32 %x4, %base, %at;
    st.shared.v4.b32 [%x4], {%x0, %x1, %x2, %x3};
    add.u32 %at, %at, 2048;
    setp.lt.u32 %more, %at, """
    + f"{SHARED_BYTES};"
    + """
    @%more bra COPY;
    fence.proxy.async.shared::cta;
"""
)
