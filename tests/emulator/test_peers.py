"""Kernels that others wrote run correctly in the emulator and without a finding.

The tests are opt-in, as we depend on none of these kernels. flash-attn-4 is tested where it can be imported
(the optional dependencies `peers`), NVIDIA's CuTe-DSL examples where FLASH4_CUTLASS_EXAMPLES names the folder
examples/python/CuTeDSL of a CUTLASS checkout.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch import Tensor

from flash4_torch.bench.fa4_emulated import flash_attn_4, pretended_gpu
from flash4_torch.emulator import host
from flash4_torch.testing import assert_close_as_peer, reference
from flash4_torch.testing.emulate import Device, Options

# Warnings about what they import and pass are not our concern.
pytestmark = pytest.mark.filterwarnings("ignore")

ARCHS = sorted(host.ARCHITECTURES)


def fuzz(*seeds: int) -> list[Options]:
    return [Options(schedule="fuzz", seed=seed) for seed in seeds]


LATE = Options(schedule="late")
FEW = [LATE, *fuzz(1, 2)]
MANY = [Options(schedule="eager"), LATE, *fuzz(*range(48))]


# --- flash-attn-4


def installed() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


needs_flash_attn_4 = pytest.mark.skipif(not installed(), reason="flash-attn-4 is not installed")


@dataclass(frozen=True)
class Shape:
    D: int
    Sq: int
    Sk: int
    Hq: int = 2
    Hk: int = 2
    B: int = 1
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        name = f"D{self.D}-Sq{self.Sq}-Sk{self.Sk}-H{self.Hq}:{self.Hk}-B{self.B}"
        return f"{name}{'-causal' * self.causal}-{str(self.dtype).removeprefix('torch.')}"

    def draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Random q (B, Sq, Hq, D), k and v (B, Sk, Hk, D), and dout like q."""
        D, Sq, Sk, Hq, Hk, B = self.D, self.Sq, self.Sk, self.Hq, self.Hk, self.B
        shapes = [(B, Sq, Hq, D), (B, Sk, Hk, D), (B, Sk, Hk, D), (B, Sq, Hq, D)]
        q, k, v, dout = (torch.randn(shape).to(self.dtype) for shape in shapes)
        return q, k, v, dout


SHAPES = [
    Shape(64, 256, 256, causal=True, B=2),
    Shape(64, 129, 257, Hq=4, Hk=2, dtype=torch.float16),
    Shape(64, 257, 130, Hq=4, Hk=1, causal=True),
    Shape(128, 128, 384, causal=True, dtype=torch.float16),
    Shape(128, 200, 100, Hq=4, Hk=1, B=2),
    Shape(128, 1, 300, Hq=2, Hk=1, causal=True),
    Shape(256, 256, 256, Hq=2, Hk=1),
    Shape(256, 130, 190, causal=True, dtype=torch.float16),
]
# Their backward sums dQ in an order that only the deterministic mode fixes.
SMALL = [Shape(64, 130, 130, Hq=2, Hk=1, causal=True), Shape(128, 128, 256, Hq=1, Hk=1)]


def attend(
    interface: ModuleType, shape: Shape, inputs: tuple[Tensor, ...], deterministic: bool
) -> list[Tensor]:
    """out, lse and the gradients of q, k and v."""
    q, k, v, dout = inputs
    out, lse, *_ = interface._flash_attn_fwd(q, k, v, causal=shape.causal, return_lse=True)
    gradients = interface._flash_attn_bwd(
        q, k, v, out, dout, lse, causal=shape.causal, deterministic=deterministic
    )
    return [out, lse, *gradients[:3]]


def plain(shape: Shape, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """The same results by plain torch in `dtype`."""
    q, k, v = (x.to(dtype).requires_grad_() for x in inputs[:3])
    out, lse = reference(q, k, v, causal=shape.causal, dtype=dtype)
    gradients = torch.autograd.grad(out, (q, k, v), inputs[3].to(dtype))
    return [out.detach(), lse.detach(), *gradients]


def check(shape: Shape, results: list[Tensor], inputs: tuple[Tensor, ...]) -> None:
    exact, peer = plain(shape, inputs, torch.float64), plain(shape, inputs, shape.dtype)
    for name, *tensors in zip(("out", "lse", "dq", "dk", "dv"), results, exact, peer, strict=True):
        assert_close_as_peer(*tensors, what=name)


@needs_flash_attn_4
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_flash_attn_4(arch: str, shape: Shape) -> None:
    device = Device(arch)
    inputs = shape.draw()
    forward = []
    with flash_attn_4(device.launch, arch) as interface:
        for device.options in FEW:
            results = attend(interface, shape, inputs, deterministic=False)
            check(shape, results, inputs)
            forward.append(results[:2])
    for out, lse in forward[1:]:
        assert torch.equal(out, forward[0][0]) and torch.equal(lse, forward[0][1])


@needs_flash_attn_4
@pytest.mark.parametrize("shape", SMALL, ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_flash_attn_4_gives_the_same_bits_in_fifty_schedules(arch: str, shape: Shape) -> None:
    device = Device(arch)
    inputs = shape.draw()
    with flash_attn_4(device.launch, arch) as interface:
        first = attend(interface, shape, inputs, deterministic=True)
        check(shape, first, inputs)
        for device.options in MANY:
            results = attend(interface, shape, inputs, deterministic=True)
            assert all(map(torch.equal, results, first)), device.options


@needs_flash_attn_4
def test_flash_attn_4_copies_queries_without_a_proxy_fence() -> None:
    """cp.async loads q, which tcgen05.mma reads, if the query heads of a KV head do not divide a tile.

    PTX ISA, "Async proxy": data that one proxy writes and the other reads needs a fence.proxy.async in
    between.
    """
    shape = Shape(64, 129, 130, Hq=3, Hk=1, causal=True)
    device = Device("sm_100a", LATE, check=False)
    inputs = shape.draw()
    with flash_attn_4(device.launch, "sm_100a") as interface:
        results = attend(interface, shape, inputs, deterministic=False)
    check(shape, results, inputs)
    findings = [finding for report in device.reports for finding in report.findings]
    assert findings
    for finding in findings:
        assert finding.other
        assert "no fence.proxy.async" in finding.message
        assert "tcgen05.mma" in finding.at.ptx and finding.other.ptx.startswith("cp.async")


# --- NVIDIA's examples

EXAMPLES = os.environ.get("FLASH4_CUTLASS_EXAMPLES")
needs_examples = pytest.mark.skipif(not EXAMPLES, reason="FLASH4_CUTLASS_EXAMPLES is not set")


def run_example(path: str, arguments: str, device: Device) -> None:
    """Runs an example as a script: it makes its inputs, launches and compares by itself."""
    assert EXAMPLES
    script = Path(EXAMPLES) / path
    places = [str(script.parent), EXAMPLES, str(Path(EXAMPLES) / "cute")]
    with (
        pretended_gpu(device.launch, device.arch),
        mock.patch.object(sys, "path", [*places, *sys.path]),
        mock.patch.object(sys, "argv", [str(script), *arguments.split()]),
    ):
        runpy.run_path(str(script), run_name="__main__")
    assert device.reports, "nothing was launched"


GEMM = "--mnkl 256,256,128,1"
ATTENTION = "--q_shape 1,256,2,64 --k_shape 1,256,2,64"
TUTORIAL = "cute/blackwell/tutorial"
KERNELS = [
    ("sm_90a", "cute/hopper/kernel/dense_gemm/dense_gemm.py", GEMM),
    ("sm_90a", "cute/hopper/kernel/dense_gemm/dense_gemm_persistent.py", GEMM),
    ("sm_90a", "cute/hopper/kernel/attention/fmha.py", ATTENTION),
    ("sm_90a", "cute/hopper/kernel/attention/fmha.py", f"{ATTENTION} --is_causal"),
    ("sm_100a", "cute/blackwell/kernel/dense_gemm/dense_gemm.py", GEMM),
    ("sm_100a", "cute/blackwell/kernel/dense_gemm/dense_gemm_persistent.py", GEMM),
    ("sm_100a", "cute/blackwell/kernel/attention/fmha/fmha.py", ATTENTION),
    *(("sm_100a", f"{TUTORIAL}/tutorial_gemm/fp16_gemm_{i}.py", "--mnk 512,256,128") for i in range(4)),
    *(
        ("sm_100a", f"{TUTORIAL}/tutorial_tma/tma_v{i}.py", "--M 256 --N 256 --num_warmup 0 --num_iters 1")
        for i in range(3)
    ),
]


@needs_examples
@pytest.mark.parametrize("options", [LATE, *fuzz(1)], ids=lambda options: options.schedule)
@pytest.mark.parametrize(("arch", "path", "arguments"), KERNELS)
def test_examples(arch: str, path: str, arguments: str, options: Options) -> None:
    run_example(path, arguments, Device(arch, options))


PRIMITIVES = """
    async_pipeline bar_warp_sync barrier_cta_red barrier_cta_sync cp_async_bulk cp_async_bulk_prefetch
    cp_async_mbarrier_arrive_cluster cp_async_mbarrier_arrive_cta cp_async_shared_global
    cp_async_shared_global_swizzled elect_sync ldmatrix_stmatrix mbarrier mbarrier_lifecycle
    pipeline_software_fill red reduction/block_smem_reduce reduction/cluster_smem_reduce
    reduction/thread_vector_reduce reduction/warp_vector_reduce redux_sync shfl_sync
    tcgen05/1cta_mma_basic tcgen05/1cta_mma_mn_major tcgen05/1cta_mma_pipeline tcgen05/2cta_mma_basic
    tcgen05/2cta_mma_tma_store tcgen05/clusterMxN_2cta_mma tcgen05/mcast_clusterMxN_1cta_mma
    tcgen05/mcast_clusterMxN_2cta_mma tma/tma_1cta_mbarrier tma/tma_load_store tma/tma_load_to_ldmatrix
    tma/tma_pipeline_count2 tma/tma_pipeline_pingpong tma/tma_pipeline_warpspec tma/tma_store
    tma/tma_swizzle_modes tma/tma_tensormap_replace tutorial/07_vectorized_array vote_sync
    warp_named_barrier
"""


@needs_examples
@pytest.mark.parametrize("name", PRIMITIVES.split())
def test_primitives(name: str) -> None:
    run_example(f"experimental/primitives/{name}.py", "", Device("sm_100a", LATE))


BACKWARD = "--s_q 256 --s_k 256 --h_q 1 --h_k 1 --d 64"
# Examples that violate the PTX ISA, with a finding's kind and an instruction that it names.
WRONG = [
    # TMEM is freed when the epilogue is done, but the last MMA into it may not be.
    ("cute/blackwell/kernel/attention/fmha/fmha_bwd", BACKWARD, "tmem", "tcgen05.mma"),
    # The CTA whose shared memory is read may have exited: no cluster barrier comes before its end.
    ("experimental/primitives/mapa", "", "exited", "ld"),
    # Relaxed arrivals at the cluster's barrier do not publish what the TMA has written.
    ("experimental/primitives/tma/tma_multicast", "", "race", "ld"),
    # A stage is filled again without a barrier after the threads' reads of it.
    ("experimental/primitives/tma/tma_pipeline_single_warp", "", "race", "cp.async.bulk.tensor"),
    # Every warp stores to lane 0, which belongs to the first.
    ("experimental/primitives/tcgen05/1cta_mma_a_from_tmem", "", "tmem", "tcgen05.st"),
    # tcgen05.wait::st does not wait for tcgen05.cp.
    ("experimental/primitives/reduction/cluster_tmem_reduce", "", "exit-pending", "tcgen05.cp"),
    # Every warp initialises the same mbarriers.
    ("experimental/primitives/tutorial/05_minimal_tensor_mma", "", "race", "mbarrier.init"),
    ("experimental/primitives/tutorial/10_minimal_tensor_mma_fp8", "", "race", "mbarrier.init"),
    (
        "experimental/primitives/tutorial/gemm_M128_N128_Kany_TN_warpspec_multistage",
        "",
        "race",
        "mbarrier.init",
    ),
    # The sums overwrite the maximum before all warps have read it.
    ("experimental/primitives/tutorial/06_softmax", "", "race", "st"),
]


@needs_examples
@pytest.mark.parametrize(("path", "arguments", "kind", "instruction"), WRONG)
def test_what_examples_do_wrong_is_found(path: str, arguments: str, kind: str, instruction: str) -> None:
    device = Device("sm_100a", LATE, check=False)
    with suppress(AssertionError):  # its own comparison may fail, too
        run_example(f"{path}.py", arguments, device)
    findings = [finding for report in device.reports for finding in report.findings]
    assert any(f.kind == kind and without_guard(f.at.ptx).startswith(instruction) for f in findings), findings


def without_guard(ptx: str) -> str:
    return re.sub(r"^@\S+\s+", "", ptx)
