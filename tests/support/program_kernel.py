"""A kernel that evaluates programs of score_mod and mask_mod, one after the other, for the same scores."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32
from torch import Tensor

from flash4_torch.compile import jit
from flash4_torch.flex.program import Program
from flash4_torch.kernels.common import host, programs
from flash4_torch.kernels.common.lowering import Layout, Lowering, lower
from flash4_torch.kernels.common.mods import ModArgs
from flash4_torch.kernels.common.programs import Arguments
from flash4_torch.reference.programs import evaluate, scalar_tensors
from flash4_torch.testing import emulate

THREADS = 8
ROWS, COLUMNS = 2 * THREADS, 1
"""A thread has two rows of as many keys."""
BATCH, HEAD = 1, 1
FIRST_KEY = 2


class Case(NamedTuple):
    program: Program
    tensors: tuple[Tensor, ...] = ()
    scalars: tuple[float, ...] = ()


@cute.jit
def evaluation(
    scores: cute.Tensor,
    results: cute.Tensor,
    arguments: ModArgs,
    texts: cutlass.Constexpr,
    packed: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """results (programs, ROWS, COLUMNS) of scores (ROWS, COLUMNS); arguments of one program after another."""
    kernel = evaluation_kernel(scores, results, arguments, texts, packed)
    kernel.launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def evaluation_kernel(
    scores: cute.Tensor,
    results: cute.Tensor,
    arguments: ModArgs,
    texts: cutlass.Constexpr,
    packed: cutlass.Constexpr,
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    # One number of the DSL's, and one of a layout, which compares in a way of its own.
    rows = (thread, Int32(cute.make_identity_tensor((ROWS,))[thread + THREADS][0]))
    heads = tuple(row % 2 for row in rows) if packed else (Int32(HEAD), Int32(HEAD))
    _evaluate_all(scores, results, arguments, texts, packed, rows, heads)


def _evaluate_all(
    scores: Any, results: Any, arguments: ModArgs, texts: Any, packed: bool, rows: Any, heads: Any
) -> None:
    tensors, scalars = iter(arguments.tensors or ()), iter(arguments.scalars or ())
    for p, text in enumerate(texts):
        lowering = lower(text, Layout(packed))
        own = _own(lowering, tensors, scalars)
        tile = programs.begin(lowering, own, Int32(BATCH), heads, rows)
        _write(lowering, own, tile, scores, results, rows, p)


def _own(lowering: Lowering, tensors: Any, scalars: Any) -> Arguments:
    program = lowering.program
    counts = len(program.tensors), len(program.scalars)
    taken = (itertools.islice(x, n) for x, n in zip((tensors, scalars), counts, strict=True))
    return Arguments(*map(tuple, taken))


def _write(
    lowering: Lowering, own: Arguments, tile: Any, scores: Any, results: Any, rows: Any, p: int
) -> None:
    def put(r: int, c: int, result: Any) -> None:
        if type(result) is Boolean:
            result = Float32(cutlass.select_(result, Float32(1.0), Float32(0.0)))
        results[p, rows[r], c] = result.to(Float32)

    keys = programs.Columns(Int32(FIRST_KEY), tuple(range(COLUMNS)))
    programs.apply(lowering, own, tile, keys, lambda r, c: scores[rows[r], c], put)


@functools.cache
def _compiled(arch: str, all_programs: tuple[Program, ...], packed: bool) -> Any:
    """The kernel, for any tensors and scalars; a device of that architecture must be active."""
    tensors = tuple(
        host.strided(programs.STORED[t.dtype], max(t.rank, 1)) for p in all_programs for t in p.tensors
    )
    scalars = tuple(programs.PASSED[dtype](0) for p in all_programs for dtype in p.scalars)
    shapes = (ROWS, COLUMNS), (len(all_programs), ROWS, COLUMNS)
    scores, results = (host.compact(Float32, shape) for shape in shapes)
    arguments = ModArgs(tensors or None, scalars or None, None)
    texts = tuple(p.text() for p in all_programs)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    with jit.quiet():
        return cute.compile(
            evaluation, scores, results, arguments, texts, packed, stream, options="--enable-tvm-ffi"
        )


def on_device(cases: Sequence[Case], scores: Tensor, arch: str, packed: bool, **schedule: Any) -> Tensor:
    """Results (programs, ROWS, COLUMNS), float32, in the emulator."""
    results = torch.full((len(cases), ROWS, COLUMNS), torch.nan)
    captured = tuple(x.detach() if x.dim() else x.detach().reshape(1) for case in cases for x in case.tensors)
    numbers = tuple(
        x if "float" in dtype else int(x)
        for case in cases
        for dtype, x in zip(case.program.scalars, case.scalars, strict=True)
    )
    with emulate.device(arch, **schedule) as device:
        kernel = _compiled(arch, tuple(case.program for case in cases), packed)
        with device.touching(scores, results, *captured):
            kernel(scores, results, (captured or None, numbers or None, None, None, None))
    return results


def expected(case: Case, scores: Tensor, packed: bool) -> Tensor:
    """The results (ROWS, COLUMNS) of the reference."""
    rows = torch.arange(ROWS, dtype=torch.int32).view(1, 1, -1, 1)
    heads = rows % 2 if packed else torch.full_like(rows, HEAD)
    keys = torch.arange(FIRST_KEY, FIRST_KEY + COLUMNS, dtype=torch.int32).view(1, 1, 1, -1)
    lanes = [torch.full_like(rows[:, :, :1], BATCH), heads, rows, keys]
    if len(case.program.inputs) > 4:
        lanes.insert(0, scores.view(1, 1, ROWS, COLUMNS))
    numbers = scalar_tensors(case.program, case.scalars, scores.device)
    (found,) = evaluate(case.program, lanes, [x.detach() for x in case.tensors], numbers)
    return found.expand(1, 1, ROWS, COLUMNS)[0, 0].float()
