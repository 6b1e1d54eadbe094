"""The seam to CuTe-DSL: a compiled function's launches arrive as they were made, and errors come back."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cutlass
import numpy as np
import pytest
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack
from hypothesis import given
from hypothesis import strategies as st

from flash4_torch import env
from flash4_torch.emulator import build, host
from flash4_torch.emulator.limits import refuse_impossible
from tensor_map import SWIZZLES, TensorMap

THREADS = 64
ARCHS = sorted(host.ARCHITECTURES)
FLAVOURS = [
    pytest.param("", id="plain"),
    pytest.param(
        "--enable-tvm-ffi",
        id="tvm-ffi",
        marks=pytest.mark.skipif(not importlib.util.find_spec("tvm_ffi"), reason="tvm_ffi is not installed"),
    ),
]


@pytest.fixture(autouse=True)
def _lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """PTX has line information, though `make test` asks for none."""
    monkeypatch.setenv(env.EMULATOR_LINES.name, "1")


@cute.kernel
def shift_kernel(source: cute.Tensor, target: cute.Tensor, by: cutlass.Float32) -> None:
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < source.shape[0]:
        target[i] = source[i] + by


@cute.jit
def shift(source: cute.Tensor, target: cute.Tensor, by: cutlass.Float32, smem: cutlass.Constexpr) -> None:
    blocks = (source.shape[0] + THREADS - 1) // THREADS
    shift_kernel(source, target, by).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], smem=smem)


@cute.jit
def shift_in_clusters(source: cute.Tensor, target: cute.Tensor, by: cutlass.Float32) -> None:
    shift_kernel(source, target, by).launch(
        grid=[4, 2, 1], block=[THREADS, 1, 1], cluster=[2, 1, 1], use_pdl=True
    )


@cute.jit
def shift_cooperatively(source: cute.Tensor, target: cute.Tensor, by: cutlass.Float32) -> None:
    shift_kernel(source, target, by).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], cooperative=True)


@cute.jit
def shift_twice(source: cute.Tensor, target: cute.Tensor, by: cutlass.Float32) -> None:
    shift_kernel(source, target, by).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])
    shift_kernel(target, source, by).launch(grid=[2, 1, 1], block=[THREADS, 1, 1])


class Shifter:
    """Functions with the same name for every `factor`: the name does not contain it."""

    def __init__(self, factor: float):
        self.factor = factor

    @cute.kernel
    def kernel(self, target: cute.Tensor) -> None:
        target[0] = target[0] * cutlass.Float32(self.factor)

    @cute.jit
    def __call__(self, target: cute.Tensor) -> None:
        self.kernel(target).launch(grid=[1, 1, 1], block=[1, 1, 1])


@pytest.fixture
def launches() -> Iterator[list[host.Launch]]:
    """What was launched since the test installed `launches.append`."""
    yield []
    host.uninstall()


def pointer(launch: host.Launch, parameter: int) -> int:
    """The first eight bytes of a parameter: the address of a tensor of static layout."""
    return ctypes.c_uint64.from_address(launch.args[parameter]).value


def compiled(function: Any, flavour: str, *args: Any) -> Any:
    args = tuple(from_dlpack(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
    return cute.compile(function, *args, options=flavour)


def as_argument(tensor: torch.Tensor, flavour: str) -> Any:
    """The tensor as an argument; TVM-FFI takes tensors as they are."""
    return tensor if flavour else from_dlpack(tensor)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("arch", ARCHS)
def test_launch_arrives(arch: str, flavour: str, launches: list[host.Launch]) -> None:
    seen = []

    def run(launch: host.Launch) -> None:
        launches.append(launch)
        by = ctypes.c_float.from_address(launch.args[2]).value
        seen.append([pointer(launch, 0), pointer(launch, 1), by])

    host.install(run, arch)
    source, target = torch.zeros(100), torch.zeros(100)
    function = compiled(shift, flavour, source, target, cutlass.Float32(1), 1024)
    other = torch.zeros(100)
    function(as_argument(other, flavour), as_argument(target, flavour), 2.5)

    (launch,) = launches
    assert (launch.grid, launch.block, launch.cluster) == ((2, 1, 1), (THREADS, 1, 1), (1, 1, 1))
    assert launch.smem_bytes == 1024
    assert not launch.cooperative and not launch.programmatic
    assert seen == [[other.data_ptr(), target.data_ptr(), 2.5]]
    assert len(launch.args) == launch.kernel.parameters == 3
    assert f".entry {launch.kernel.name}(" in launch.kernel.ptx
    assert f".target {arch}" in launch.kernel.ptx
    assert "ld.global" in launch.kernel.ptx, "a CPU tensor was not taken for the device's"
    assert Path(__file__).name in launch.kernel.ptx, "no line information"


def test_launch_attributes_arrive(launches: list[host.Launch]) -> None:
    host.install(launches.append, "sm_100a")
    tensor = torch.zeros(100)
    for function in (shift_in_clusters, shift_cooperatively):
        function(from_dlpack(tensor), from_dlpack(tensor), cutlass.Float32(1))
    clustered, cooperative = launches
    assert (clustered.grid, clustered.cluster) == ((4, 2, 1), (2, 1, 1))
    assert clustered.programmatic and not clustered.cooperative
    assert cooperative.cooperative and not cooperative.programmatic


def test_one_function_launches_two_kernels(launches: list[host.Launch]) -> None:
    host.install(launches.append, "sm_100a")
    tensor = torch.zeros(100)
    shift_twice(from_dlpack(tensor), from_dlpack(tensor), cutlass.Float32(1))
    first, second = launches
    assert (first.grid, second.grid) == ((1, 1, 1), (2, 1, 1))
    assert first.kernel.name != second.kernel.name and first.kernel.ptx == second.kernel.ptx


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_kernels_of_one_name_keep_their_own_ptx(flavour: str, launches: list[host.Launch]) -> None:
    host.install(launches.append, "sm_100a")
    tensor = torch.zeros(1)
    # All are compiled before one is loaded; otherwise the last one's files would be found for each.
    functions = [compiled(Shifter(factor), flavour, tensor) for factor in (3.0, 5.0, 3.0)]
    for function in functions:
        function(as_argument(tensor, flavour))
    assert len({launch.kernel.name for launch in launches}) == 1
    assert ["0f40400000" in launch.kernel.ptx for launch in launches] == [True, False, True]
    assert ["0f40A00000" in launch.kernel.ptx for launch in launches] == [False, True, False]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_an_error_reaches_the_caller(flavour: str, launches: list[host.Launch]) -> None:
    error = KeyError("what the kernel did wrong")

    def run(launch: host.Launch) -> None:
        launches.append(launch)
        if len(launches) == 1:
            raise error

    host.install(run, "sm_100a")
    tensor = torch.zeros(100)
    function = compiled(shift, flavour, tensor, tensor, cutlass.Float32(1), 0)
    args = (as_argument(tensor, flavour), as_argument(tensor, flavour), 1.0)
    with pytest.raises(KeyError) as caught:
        function(*args)
    assert caught.value is error
    assert caught.value.__cause__ is not None
    function(*args)
    assert len(launches) == 2, "an error must not outlast its call"


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_threads_get_their_own_errors(flavour: str, launches: list[host.Launch]) -> None:
    """Errors stay in the thread that made them: torch's backward runs in threads of its own."""

    def run(launch: host.Launch) -> None:
        raise ValueError(str(ctypes.c_float.from_address(launch.args[2]).value))

    host.install(run, "sm_100a")
    tensor = torch.zeros(100)
    function = compiled(shift, flavour, tensor, tensor, cutlass.Float32(1), 0)

    def error_of(number: float) -> str:
        with pytest.raises(ValueError) as caught:
            function(as_argument(tensor, flavour), as_argument(tensor, flavour), number)
        return str(caught.value)

    numbers = [float(n) for n in range(32)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(error_of, numbers)) == list(map(str, numbers))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_functions_outlive_the_emulator_only_to_refuse(flavour: str, launches: list[host.Launch]) -> None:
    host.install(launches.append, "sm_100a")
    tensor = torch.zeros(100)
    function = compiled(shift, flavour, tensor, tensor, cutlass.Float32(1), 0)
    argument = host.as_device(tensor) if flavour else from_dlpack(tensor)
    function(argument, argument, 1.0)
    host.uninstall()
    with pytest.raises(Exception, match=r"uninstalled|cudaErrorLaunchFailure"):
        function(argument, argument, 1.0)
    assert len(launches) == 1


def test_uninstalling_leaves_the_dsl_as_it_was(launches: list[host.Launch]) -> None:
    executor = importlib.import_module("cutlass.base_dsl.jit_executor").JitExecutor
    compiler = importlib.import_module("cutlass.base_dsl.compiler").Compiler
    op = importlib.import_module("cutlass._mlir_helpers.op")
    settings = importlib.import_module("cutlass.cutlass_dsl.cutlass").CuTeDSL._get_dsl().envar
    names = ("shared_libs", "_arch", "lineinfo", "disable_file_caching")

    def state() -> list[Any]:
        changed = executor.run_compiled_program, compiler.compile, compiler.jit
        places = op._find_user_frame, op._fast_frameinfo
        return [*changed, *places, *(getattr(settings, name) for name in names)]

    before = state()
    host.install(launches.append, "sm_90a")
    assert all(now != then for now, then in zip(state()[:-1], before, strict=False))
    host.install(launches.append, "sm_100a")
    host.uninstall()
    host.uninstall()
    assert state() == before


def test_install_works_before_the_dsl_is_imported() -> None:
    """The architecture then comes from FLASH4_ARCH."""
    script = """
import sys
from flash4_torch.emulator import host
assert "cutlass" not in sys.modules
host.install(lambda launch: print(launch.kernel.ptx.split(".target ")[1].split()[0]))
import test_host, torch
from cutlass.cute.runtime import from_dlpack
test_host.shift_cooperatively(from_dlpack(torch.zeros(9)), from_dlpack(torch.zeros(9)), 1.0)
host.uninstall()
from cutlass.cutlass_dsl.cutlass import CuTeDSL
assert "flash4" not in CuTeDSL._get_dsl().envar.shared_libs
"""
    before = env.change({"FLASH4_ARCH": "sm_90a"})
    try:
        result = subprocess.run(
            [sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, text=True
        )
    finally:
        env.change(before)
    assert (result.returncode, result.stdout.split()) == (0, ["sm_90a"]), result.stderr


def test_the_runtime_library_may_be_there_already() -> None:
    """Compiled functions look for symbols in the whole process first, then in the library they are given."""
    script = """
import ctypes
from cutlass import cute
(runtime,) = cute.runtime.find_runtime_libraries(enable_tvm_ffi=False)
ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
import test_host, torch
from cutlass.cute.runtime import from_dlpack
from flash4_torch.emulator import host
host.install(lambda launch: print("launched"), "sm_90a")
test_host.shift_cooperatively(from_dlpack(torch.zeros(9)), from_dlpack(torch.zeros(9)), 1.0)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert result.stdout == "launched\n", result.stderr


def test_the_number_of_sms_is_told(launches: list[host.Launch]) -> None:
    host.install(launches.append, "sm_100a", num_sms=6)
    hardware = cutlass.utils.HardwareInfo()
    assert hardware.get_device_multiprocessor_count() == 6
    assert hardware.get_max_active_clusters(2) == 3


def test_unknown_architectures_are_refused() -> None:
    with pytest.raises(ValueError, match="sm_75"):
        host.install(lambda launch: None, "sm_75")


@pytest.mark.parametrize(
    "what, changes",
    [
        ("threads", {"block": [1024, 2, 1]}),
        ("cluster", {"grid": [32, 1, 1], "cluster": [32, 1, 1]}),
        ("multiple of cluster", {"grid": [3, 1, 1], "cluster": [2, 1, 1]}),
        ("multiple of cluster", {"grid": [0, 1, 1]}),
        ("shared memory", {"smem": 228 << 10}),
    ],
)
def test_impossible_launches_are_refused(what: str, changes: dict[str, Any]) -> None:
    launch = {"grid": [2, 1, 1], "block": [1, 1, 1], "cluster": [1, 1, 1], "smem": 0} | changes
    grid, block, cluster = (tuple(launch[name]) for name in ("grid", "block", "cluster"))
    with pytest.raises(host.LaunchError, match=what):
        refuse_impossible(grid, block, cluster, launch["smem"])


@pytest.mark.parametrize(
    ("arch", "kib"), [(80, 163), (86, 99), (87, 163), (89, 99), (90, 227), (120, 99), (121, 99)]
)
def test_shared_memory_is_that_of_the_architecture(arch: int, kib: int) -> None:
    one = (1, 1, 1)
    refuse_impossible(one, one, one, kib << 10, arch=arch)
    with pytest.raises(host.LaunchError, match=f"a CTA can have {kib << 10}"):
        refuse_impossible(one, one, one, (kib << 10) + 1, arch=arch)


def test_there_are_no_clusters_before_hopper() -> None:
    launch = (2, 1, 1), (1, 1, 1), (2, 1, 1), 0
    refuse_impossible(*launch, arch=90)
    with pytest.raises(host.LaunchError, match="no clusters before sm_90"):
        refuse_impossible(*launch, arch=89)


@given(st.lists(st.integers(0, 5), max_size=4), st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
def test_a_device_tensor_is_the_same_memory(shape: list[int], dtype: torch.dtype) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    view = host.as_device(tensor)
    assert view.__dlpack_device__() == (2, 0)
    assert host.as_device(view) is view
    assert tensor.__dlpack_device__() == (1, 0), "the tensor itself must stay a CPU tensor"
    argument = from_dlpack(view)
    assert argument.memspace == cute.AddressSpace.gmem
    assert argument.shape == tuple(shape)
    assert tensor.numel() == 0 or argument._dltensor_wrapper.data_ptr == tensor.data_ptr()


def test_numpy_arrays_can_be_device_tensors() -> None:
    assert from_dlpack(host.as_device(np.zeros((2, 3), np.float32))).shape == (2, 3)


def test_tensors_elsewhere_are_refused() -> None:
    class OnGpu:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 1

    with pytest.raises(ValueError, match=r"CPU tensors.*2, 1"):
        host.as_device(OnGpu())


DRIVER_TYPES = {"uint8": 0, "int32": 3, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}


@given(
    st.sampled_from(sorted(DRIVER_TYPES)),
    st.lists(
        st.tuples(st.integers(1, 2**32), st.integers(0, 2**36 - 1), st.integers(1, 256)),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(sorted(SWIZZLES)),
    st.integers(0, 2**44).map(lambda n: 16 * n),
)
def test_tensor_maps_can_be_made_by_the_driver_call(
    element: str, dimensions: list[tuple[int, int, int]], swizzle: int, address: int
) -> None:
    sizes, strides, box = zip(*dimensions, strict=True)
    strides = tuple(16 * stride for stride in strides[1:])
    expected = TensorMap(address, element, sizes, strides, box, swizzle).encode().view(np.uint32)
    expected[2] &= ~np.uint32(0x40002)  # set in every map that host code writes; nothing depends on it

    made = np.zeros(32, np.uint32)
    rank = len(sizes)
    error = ctypes.CDLL(str(build.runtime())).flash4_cuTensorMapEncodeTiled(
        made.ctypes.data_as(ctypes.c_void_p),
        DRIVER_TYPES[element],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        SWIZZLES[swizzle],
        0,
        0,
    )
    assert error == 0
    np.testing.assert_array_equal(made, expected)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    before = env.change({env.CACHE_DIR.name: str(tmp_path / "cache")})
    yield tmp_path / "cache"
    env.change(before)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "inner.h").write_text("#define ANSWER 41\n")
    (tmp_path / "outer.h").write_text('#include "inner.h"\n')
    path = tmp_path / "answer.cpp"
    path.write_text('#include "outer.h"\nextern "C" int answer() { return ANSWER; }\n')
    return path


def test_a_change_anywhere_builds_anew_and_nothing_else_does(cache: Path, source: Path) -> None:
    first = build.shared_object("libanswer", [source], ["-fPIC"])
    written = first.stat().st_mtime_ns
    assert build.shared_object("libanswer", [source], ["-fPIC"]) == first
    assert first.stat().st_mtime_ns == written
    (source.parent / "inner.h").write_text("#define ANSWER 42\n")
    second = build.shared_object("libanswer", [source], ["-fPIC"])
    assert [ctypes.CDLL(str(path)).answer() for path in (first, second)] == [41, 42]
    assert build.shared_object("libanswer", [source], ["-fPIC", "-O1"]) not in (first, second)


def test_flags_of_the_environment_come_last(
    monkeypatch: pytest.MonkeyPatch, cache: Path, source: Path
) -> None:
    source.write_text('extern "C" int answer() { return ANSWER; }\n')
    plain = build.shared_object("libanswer", [source], ["-fPIC", "-DANSWER=1"])
    monkeypatch.setenv(env.EMULATOR_FLAGS.name, "-UANSWER '-DANSWER=1 + 1'")
    other = build.shared_object("libanswer", [source], ["-fPIC", "-DANSWER=1"])
    assert [ctypes.CDLL(str(path)).answer() for path in (plain, other)] == [1, 2]


def test_processes_may_build_at_once(cache: Path, source: Path) -> None:
    script = (
        "import sys, pathlib; from flash4_torch.emulator import build;"
        "print(build.shared_object('libanswer', [pathlib.Path(sys.argv[1])], ['-fPIC']))"
    )
    command = [sys.executable, "-c", script, str(source)]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {builder.communicate()[0].strip() for builder in builders}
    assert len(paths) == 1
    assert ctypes.CDLL(paths.pop()).answer() == 41
    assert {path.suffix for path in (cache / "build").iterdir()} == {".lock", ".o", ".so"}


def test_what_the_compiler_says_is_told(cache: Path, source: Path) -> None:
    source.write_text("int answer() { return nonsense; }")
    with pytest.raises(build.BuildError, match="nonsense"):
        build.shared_object("libanswer", [source], ["-fPIC"])
    assert not list((cache / "build").glob("*.so"))


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, cache: Path, source: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.BuildError, match=r"g\+\+"):
        build.shared_object("libanswer", [source])


def test_a_cache_that_cannot_be_written_is_named(cache: Path, source: Path) -> None:
    cache.write_text("a file where a folder should be")
    with pytest.raises(build.BuildError, match="FLASH4_CACHE_DIR"):
        build.shared_object("libanswer", [source])
