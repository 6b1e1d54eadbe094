"""Tensor maps for hand-written PTX: their 128 bytes as host code writes them, and what a copy means.

Dimensions are listed contiguous first, as PTX lists coordinates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

# Numbers of NumPy types for tensormap.replace's .elemtype; bfloat16 has no NumPy type and is given by name.
ELEMENT_TYPES = {
    "uint8": 0,
    "uint16": 1,
    "uint32": 2,
    "int32": 3,
    "uint64": 4,
    "int64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 9,
    "bfloat16": 10,
}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # keys: bytes of a row
MAP_BYTES = 128


@dataclass(frozen=True)
class TensorMap:
    """A tensor and the box that one copy moves.

    address: address of the first element.
    element: name of the type.
    sizes, box: elements by dimension.
    strides: bytes, for the dimensions from 1 on.
    swizzle: bytes within which chunks are exchanged, 0 for none.
    atom: bytes of a chunk, 16 or 32.
    fill_nan: elements outside read as NaN, not as 0.
    """

    address: int
    element: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    atom: int = 16
    fill_nan: bool = False

    @property
    def element_bytes(self) -> int:
        return 2 if self.element == "bfloat16" else np.dtype(self.element).itemsize

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.element_bytes

    @property
    def pitch(self) -> int:
        """Bytes from one row of the tile to the next."""
        return max(self.box[0] * self.element_bytes, self.swizzle)

    @property
    def tile_bytes(self) -> int:
        return int(np.prod(self.box[1:])) * self.pitch

    def encode(self) -> np.ndarray:
        """The 128 bytes, aligned to 128."""
        words = aligned_bytes(MAP_BYTES).view(np.uint32)
        words[:] = 0
        rank = len(self.sizes)
        words[:2] = np.array([self.address], np.uint64).view(np.uint32)
        words[2] = 0x40002 | (rank - 1) << 4 | ELEMENT_TYPES[self.element] << 7 | SWIZZLES[self.swizzle] << 13
        words[2] |= int(self.fill_nan) << 15 | (self.atom // 32) << 19
        for d, stride in enumerate(self.strides):
            assert stride % 16 == 0
            words[3 + d] = stride // 16 & 0xFFFFFFFF
            words[7] |= (stride // 16 >> 32) << 4 * d
        for d, (size, box) in enumerate(zip(self.sizes, self.box, strict=True)):
            words[8 + d] = size - 1
            words[13 if d == 0 else 14] |= (box - 1) << (24 if d == 0 else 8 * (d - 1))
        return words.view(np.uint8)

    def places(self, start: Sequence[int]) -> Iterator[tuple[int, int | None]]:
        """The byte in the tile of each element of the box at `start`, and in the tensor (None: outside).

        The tile lies at a multiple of 1024 bytes. PTX ISA, "Swizzling modes".
        """
        for number, index in enumerate(itertools.product(*(range(n) for n in reversed(self.box)))):
            at = [s + i for s, i in zip(start, reversed(index), strict=True)]
            inside = all(0 <= a < n for a, n in zip(at, self.sizes, strict=True))
            strides = (self.element_bytes, *self.strides)
            byte = sum(a * s for a, s in zip(at, strides, strict=True)) if inside else None
            row, column = divmod(number, self.box[0])
            yield swizzle(row * self.pitch + column * self.element_bytes, self.swizzle, self.atom), byte


def swizzle(byte: int, span: int, atom: int = 16) -> int:
    """The place of a byte of a tile: chunks of `atom` bytes are exchanged within `span` bytes.

    The number of its 128-byte line, modulo the number of chunks, selects the chunk to exchange with.
    """
    chunks = max(span // atom, 1)
    return byte ^ (byte // 128 % chunks) * atom


def aligned_bytes(count: int, alignment: int = 128) -> np.ndarray:
    """Zeroed bytes at a multiple of `alignment`."""
    space = np.zeros(count + alignment, np.uint8)
    begin = -space.ctypes.data % alignment
    return space[begin : begin + count]


def random_bytes(count: int, seed: int) -> np.ndarray:
    """Random bytes at a multiple of 128 bytes."""
    array = aligned_bytes(count)
    array[:] = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    return array
