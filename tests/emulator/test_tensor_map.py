"""The layout of tensor maps: CuTe-DSL's compiled host code writes the same bytes as `TensorMap.encode`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

from flash4_torch.emulator import host
from tensor_map import TensorMap

MAP_WORDS = 16  # host code writes only half of the map


@cute.kernel
def takes_a_map(atom: cute.CopyAtom, tensor: cute.Tensor):
    cpasync.prefetch_descriptor(atom)


def launcher(box: tuple[int, ...], swizzle: tuple[int, int, int]):
    """A host function that makes a tensor map; `swizzle` as CuTe names it, in elements."""

    @cute.jit
    def launch(tensor: cute.Tensor):
        layout = cute.make_composed_layout(
            cute.make_swizzle(*swizzle), 0, cute.make_ordered_layout(box, order=tuple(range(len(box))))
        )
        atom, coordinates = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, box
        )
        takes_a_map(atom, coordinates).launch(grid=(1, 1, 1), block=(32, 1, 1))

    return launch


@pytest.fixture
def maps() -> Iterator[list[np.ndarray]]:
    """The tensor maps of all launches."""
    found: list[np.ndarray] = []

    def keep(launch: host.Launch) -> None:
        found.append(np.frombuffer(ctypes.string_at(launch.args[0], 4 * MAP_WORDS), np.uint32))

    host.install(keep, "sm_90a")
    yield found
    host.uninstall()


PLAIN = (0, 4, 3)
# Element as PyTorch and we name it; sizes; elements between rows; box; CuTe's swizzle; our span and atom.
CASES = [
    ("uint8", "uint8", (64, 32), 64, (16, 8), PLAIN, 0, 16),
    ("int16", "uint16", (64, 32), 72, (16, 8), PLAIN, 0, 16),
    ("int32", "uint32", (64, 32), 64, (16, 8), PLAIN, 0, 16),
    ("int64", "uint64", (64, 32), 64, (16, 8), PLAIN, 0, 16),
    ("float64", "float64", (64, 32), 64, (16, 8), PLAIN, 0, 16),
    ("float32", "float32", (40,), 40, (8,), PLAIN, 0, 16),
    ("float16", "float16", (40, 30, 20), 48, (8, 2, 3), PLAIN, 0, 16),
    ("bfloat16", "bfloat16", (80, 3, 4, 3, 6), 80, (16, 2, 3, 2, 5), (1, 4, 3), 32, 16),
    ("float16", "float16", (64, 32), 64, (32, 8), (2, 4, 3), 64, 16),
    ("float16", "float16", (64, 32), 64, (64, 8), (3, 4, 3), 128, 16),
    ("float32", "float32", (64, 32), 64, (32, 8), (2, 5, 2), 128, 32),
]


@pytest.mark.parametrize("torch_type, element, sizes, pitch, box, cute_swizzle, span, atom", CASES)
def test_host_code_writes_the_map_that_we_read(
    maps: list[np.ndarray],
    torch_type: str,
    element: str,
    sizes: tuple[int, ...],
    pitch: int,
    box: tuple[int, ...],
    cute_swizzle: tuple[int, int, int],
    span: int,
    atom: int,
) -> None:
    storage = torch.zeros(*reversed(sizes[1:]), pitch, dtype=getattr(torch, torch_type))
    tensor = storage[..., : sizes[0]].permute(*reversed(range(len(sizes))))
    launcher(box, cute_swizzle)(from_dlpack(tensor, assumed_align=16))
    strides = tuple(s * tensor.element_size() for s in tensor.stride()[1:])
    expected = TensorMap(tensor.data_ptr(), element, sizes, strides, box, span, atom).encode()
    np.testing.assert_array_equal(maps[0], expected.view(np.uint32)[:MAP_WORDS])
