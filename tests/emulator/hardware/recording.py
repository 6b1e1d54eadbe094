"""What is known of launches that ran in the emulator: enough to run them elsewhere and compare."""

from __future__ import annotations

import hashlib
import pickle
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class Bound:
    """How far a result on the GPU may be from the emulator's.

    largest: an absolute difference, for all elements or for each; 0: the same values.
    reason: where a difference comes from.
    """

    largest: float | Tensor = 0.0
    reason: str = "every operation is exact or rounded as IEEE 754 says"


@dataclass
class Region:
    """A tensor's memory; `before` and `after` the launches are keys of `Recording.contents`.

    address: where the memory was, as the alignment of pointers may matter.
    model: a key of `Recording.contents`: the result that a model of the GPU's sums gives, if there is one.
    error: the root mean square of the difference between the emulator's result and the exact one, if known.
    """

    name: str
    dtype: torch.dtype
    address: int
    before: str
    after: str
    bound: Bound = field(default_factory=Bound)
    model: str | None = None
    error: float | None = None


@dataclass(frozen=True)
class Launch:
    """One launch.

    cubin: a key of `Recording.contents`. shared: bytes of dynamic shared memory.
    params: the bytes of each parameter.
    pointers: (parameter, offset, region, distance) for each address among the parameters.
    """

    kernel: str
    cubin: str
    ptx_sha256: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    shared: int
    cooperative: bool
    programmatic: bool
    params: tuple[bytes, ...]
    pointers: tuple[tuple[int, int, int, int], ...]


@dataclass
class Step:
    """Launches that follow each other, and the memory that they share."""

    name: str
    launches: list[Launch]
    regions: list[Region]


@dataclass
class Recording:
    """All recorded steps; `contents` holds cubins and memory by hash, each stored once and compressed."""

    versions: dict[str, str]
    steps: list[Step] = field(default_factory=list)
    contents: dict[str, bytes] = field(default_factory=dict)

    @staticmethod
    def hash(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    def keep(self, data: bytes) -> str:
        key = self.hash(data)
        if key not in self.contents:
            self.contents[key] = zlib.compress(data, 1)
        return key

    def bytes(self, key: str) -> bytes:
        return zlib.decompress(self.contents[key])

    def tensor(self, key: str, dtype: torch.dtype) -> Tensor:
        """The stored memory as a flat tensor."""
        data = bytearray(self.bytes(key))
        return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)

    def save(self, path: Path) -> None:
        path.write_bytes(pickle.dumps(self))

    @staticmethod
    def load(path: Path) -> Recording:
        loaded = pickle.loads(path.read_bytes())
        assert isinstance(loaded, Recording)
        return loaded
