"""Study: which synchronisation instructions of which kernels can be deleted without anything noticing?

    PYTHONPATH=.:tests/support:tests/emulator python tests/emulator/mutation_study.py result.json [part ...]

Only kernels with one of the parts in their names are studied; without any, all are. First the originals must
run in 50 schedules without findings and with the same outputs. Then every instruction that the original
executes and that `mutate.candidates` names is deleted, one at a time. Our attention kernels for sm_80 and
sm_100a are among the subjects, and flash-attn-4's where it is installed. Survivors keep the reason that an
earlier result.json gives for them: reasons are written by hand, as is the list of tcgen05.fence instructions
that a kernel does not need.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import cutlass
import torch
from torch import Tensor

import decode_calls
from flash4_torch import info
from flash4_torch.bench.fa4_emulated import flash_attn_4
from flash4_torch.configs import decode as decode_configs
from flash4_torch.configs import sm100, sm100_backward
from flash4_torch.configs.sizes import BackwardSizes, Sizes
from flash4_torch.configs.types import Features, Sm80Backward, Sm80Forward, Sm100Forward
from flash4_torch.emulator import host
from flash4_torch.emulator.mutate import candidates
from flash4_torch.emulator.ptx import Instruction
from flash4_torch.kernels.weights.launch import compile_weights
from kernel_calls import Call, Kernel, drawn
from kernel_runs import run, run_backward
from kernels import blackwell_gemm, cluster, hopper_gemm, pipeline, semaphore
from mutants import APART, EAGER, FUZZ, LATE, Bench, Judge, Run, Subject, judge_of, subject_of

ORIGINALS = [EAGER, LATE, *FUZZ]
MUTANTS = [LATE, *FUZZ[:4], EAGER]
# Sizes at which rings wrap and CTAs work on several tiles.
OURS = {
    "sm_90a": [
        pipeline.ring_case(
            "sw128", (640, 128), pipeline.Ring(cutlass.Float16, (64, 64), pipeline.KIND.K_SW128)
        ),
        pipeline.bulk_case(chunks=5, chunk=512),
        *(case for case in pipeline.CASES if case.name in ("grouped_copies", "signalled_copies")),
        hopper_gemm.case("stored_by_tma", m=512, by_tma=True),
        hopper_gemm.case("a_in_registers", m=512, k=64, a_in_registers=True),
        cluster.multicast_case(ctas=2, tiles=9),
        *(case for case in cluster.CASES if case.name in ("exchange", "hand_over", "cluster_sum")),
        *(case for case in semaphore.CASES if case.name == "take_turns"),
    ],
    "sm_100a": [
        blackwell_gemm.case("persistent", m=1024, accumulators=2, clusters=2, k=64),
        blackwell_gemm.case("stored_by_tma", m=768, accumulators=2, clusters=2, by_tma=True),
        blackwell_gemm.case("a_in_tmem", n=768, k=256, clusters=2, a_in_tmem=True, accumulators=2),
        blackwell_gemm.case("two_ctas", m=512, rows=256, ctas=2),
        blackwell_gemm.case("two_ctas_a_in_tmem", n=512, k=256, rows=256, ctas=2, a_in_tmem=True),
    ],
}

Rows = list[dict[str, Any]]


def main(arguments: Sequence[str]) -> None:
    path, *parts = arguments
    file = Path(path)
    known: Rows = json.loads(file.read_text())["kernels"] if file.exists() else []
    chosen = [s for s in subjects() if not parts or any(part in f"{s.name} {s.arch}" for part in parts)]
    names = {(s.name, s.arch) for s in chosen}
    rows = [row for row in known if (row["subject"], row["arch"]) not in names]
    for subject in chosen:
        rows += study(subject, known)
        file.write_text(json.dumps({"versions": versions(), "kernels": rows}, indent=1) + "\n")


def versions() -> dict[str, str]:
    peer = (
        {"flash-attn-4": metadata.version("flash-attn-4")} if importlib.util.find_spec("flash_attn") else {}
    )
    return {**info.versions(), **peer}


def subjects() -> Iterator[Subject]:
    for arch, cases in OURS.items():
        for case in cases:
            yield subject_of(case, arch)
    for D, uses in ((64, {}), (128, {"right": True}), (256, {"right": True})):
        yield own("forward", D, uses)
        yield own("backward", D, uses)
    yield own("forward", 128, {})
    yield own("backward", 128, {"right": True, "deterministic": True})
    yield by_mma_sync("forward", Sm80Forward(4, 2, 64, 2), 64, "bfloat16", right=True)
    shared = Sm80Forward(8, 1, 32, 1, column_warps=2)
    yield by_mma_sync("forward", shared, 256, "float32", right=True)
    yield by_mma_sync("backward", Sm80Backward(8, 1, 64, 2), 64, "bfloat16", right=True)
    ordered = Sm80Backward(8, 2, 64, 1)
    yield by_mma_sync("backward", ordered, 128, "bfloat16", right=True, deterministic=True)
    yield by_mma_sync("forward", Sm80Forward(4, 2, 64, 1, lazy_rescale=True), 128, "bfloat16", right=True)
    in_parts = Sm80Backward(4, 1, 64, 2, key_mmas=2, query_parts=2, dq_row_mmas=2)
    yield by_mma_sync("backward", in_parts, 64, "bfloat16")
    looping = in_parts._replace(scores_by_parts=True)
    yield by_mma_sync("backward", looping, 64, "bfloat16", right=True)
    overlapping = Sm80Backward(
        8, 2, 64, 2, key_mmas=2, own_in_regs=True, copies_after_scores=True, dq_row_mmas=2
    )
    for D, uses in (
        (128, {}),
        (96, {"right": True}),
        (96, {"dropout": True}),
        (128, {"right": True, "dropout": True}),
        (96, {"right": True, "deterministic": True}),
    ):
        # Tiles have six blocks of queries, four and two.
        yield by_mma_sync("backward", overlapping, D, "bfloat16", **uses)
    yield weights("sm_80")
    yield weights("sm_80", "float32")
    for arch in OURS:
        yield weights(arch)
        for rows, cache_dtype in product(decode_configs.ROWS, ("", decode_configs.FP8)):
            yield decode(arch, rows, cache_dtype)
    for rows in (decode_configs.WARPGROUP_ROWS, decode_configs.SHARED_ROWS):
        yield decode("sm_90a", rows, wgmma=True)
    if importlib.util.find_spec("flash_attn"):
        for arch in OURS:
            # The forward for sm_100a is persistent only where all tiles cost the same.
            yield attention(arch, "forward", forward, causal=arch == "sm_90a")
            yield attention(arch, "backward", backward, causal=True, tolerance=0.02)


class Place(NamedTuple):
    """The device that our launches run on: a bench and the tensors touched last."""

    bench: Bench
    touched: list[Tensor]

    @property
    def arch(self) -> str:
        return self.bench.arch

    @contextmanager
    def touching(self, *tensors: Tensor) -> Iterator[None]:
        self.bench.memory = [(x.data_ptr(), x.untyped_storage().nbytes()) for x in tensors]
        self.touched[:] = tensors
        yield


def own(name: str, D: int, uses: dict[str, bool]) -> Subject:
    """Our kernel for sm_100a; every CTA, or CTA pair, works on several tiles, of many blocks and of one."""
    features, forward = Features("bfloat16", D, D, **uses), name == "forward"
    sizes = ((512, 768), (300, 100)) if forward else ((256, 768), (100, 600))
    # The forward's config serves both sizes, and more than one tile of queries.
    config = (
        sm100.forward(features, Sizes(sizes[0][0], sizes[1][1], end_masked=True))
        if forward
        else sm100_backward.backward(features, BackwardSizes(768))
    )
    kernel: Kernel = (features, config)
    calls: list[Call] = [
        drawn(kernel, Hk=2, lengths=((Sq,), (Sk,)), num_sms=2 if forward else 2 * config.cluster)
        for Sq, Sk in sizes
    ]
    if not forward:
        calls.append(one_block(drawn(kernel, Hk=2, lengths=((100,), (900,)), num_sms=2 * config.cluster)))
    words = [f"D={D}", *uses]
    shape = f"B=1 Hq=4 Hk=2, Sq x Sk: {' and '.join(f'{Sq} x {Sk}' for Sq, Sk in sizes)}"
    shape += "" if forward else "; 100 x 900 with Hq=2"
    return attending(f"{name}, {', '.join(words)}", "sm_100a", shape, kernel, calls)


def by_mma_sync(name: str, config: Sm80Forward | Sm80Backward, D: int, dtype: str, **uses: bool) -> Subject:
    """Our kernel for sm_80, whose CTAs work on one tile: of many blocks, of two, and of one."""
    kernel: Kernel = (Features(dtype, D, D, **uses), config)
    sizes = (150, 330), (40, 130), (70, 20)
    p = 0.3 if uses.get("dropout") else 0.0
    calls = [drawn(kernel, Hk=1, lengths=((Sq,), (Sk,)), p=p) for Sq, Sk in sizes]
    words = [f"D={D}", *([dtype] if dtype == "float32" else []), *uses]
    if isinstance(config, Sm80Forward):
        words += ["lazy rescale"] * config.lazy_rescale
    else:
        words += ["blocks overlap"] * config.copies_after_scores
        words += ["queries in parts"] * (config.query_parts > 1)
    shape = f"B=1 Hk=1, Sq x Sk: {' and '.join(f'{Sq} x {Sk}' for Sq, Sk in sizes)}"
    return attending(f"{name}, {', '.join(words)}", "sm_80", shape, kernel, calls)


def attending(name: str, arch: str, shape: str, kernel: Kernel, calls: list[Call]) -> Subject:
    """A forward or a backward in some calls."""
    features, config = kernel
    is_forward = isinstance(config, (Sm80Forward, Sm100Forward))
    act = run if is_forward else run_backward

    @contextmanager
    def prepare(bench: Bench) -> Iterator[Run]:
        host.install(bench.launch, bench.arch, calls[0].num_sms)
        place = Place(bench, [])

        def act_once() -> list[Tensor]:
            results = []
            for call in calls:
                results += [x for x in act(kernel, call, nullcontext(place)) if x is not None]
                # The sums of dQ before rounding, which would hide a different order.
                results += [x for x in place.touched if features.deterministic and x.dtype == torch.float32]
            return results

        try:
            yield act_once
        finally:
            host.uninstall()

    # dQ is summed in any order.
    tolerance = 0.0 if is_forward or features.deterministic else 0.02
    return Subject(name, arch, shape, prepare, tolerance)


def weights(arch: str, dtype: str = "bfloat16") -> Subject:
    """The weights kernel with dropout; its ring of chunks goes round more than once."""
    features, torchs = Features(dtype, 128, 0, right=True, dropout=True), getattr(torch, dtype)
    q, k = (torch.randn(1, 130, heads, 128, generator=torch.manual_seed(0)).to(torchs) for heads in (6, 2))
    lse, rng_state = torch.full((1, 6, 130), 5.0), torch.tensor([5, 7])
    params = (128**-0.5, 0.0, 0, 0, 130, 1, 1, 25, 0, 1.1, 0)

    @contextmanager
    def prepare(bench: Bench) -> Iterator[Run]:
        host.install(bench.launch, bench.arch)
        try:
            compiled = compile_weights(features, True, tma=arch in OURS)

            def run_once() -> list[Tensor]:
                result = torch.full((1, 130, 130), torch.nan, dtype=torchs)
                tensors = (q, k, lse, result, rng_state)
                bench.memory = [(x.data_ptr(), x.untyped_storage().nbytes()) for x in tensors]
                compiled(q, k, lse, None, result, None, rng_state, params)
                return [result]

            yield run_once
        finally:
            host.uninstall()

    name = "weights, D=128, right, dropout" + (", float32" if dtype == "float32" else "")
    return Subject(name, arch, "B=1 Hq=6 Hk=2, 130 x 130", prepare)


def decode(arch: str, rows: int, cache_dtype: str = "", *, wgmma: bool = False) -> Subject:
    """The decode kernel; its ring goes round twice in each of two splits, and one sequence has one split."""
    form = decode_configs.DecodeForm(
        paged=True,
        cluster=4,
        ragged=True,
        lengths=True,
        cache_dtype=cache_dtype,
        wgmma=wgmma,
        runs=True,
    )
    features = Features("bfloat16", 128, 128, right=True)
    form = decode_configs.with_blocks(features, form, rows, has_many=True)
    # Each warpgroup has rows.
    Hq = 40 if wgmma else 4
    longest = (1500 if rows > decode_configs.WARPGROUP_ROWS else 700) * form.keys // decode_configs.KEYS
    kernel = decode_calls.Kernel(features, rows, form)
    generator = torch.manual_seed(0)
    q, k, v = (
        tuple(torch.randn(n, heads, 128, generator=generator).bfloat16() for n in lengths)
        for lengths, heads in (((5, 1), Hq), ((longest, 40), 2), ((longest, 40), 2))
    )
    scales = {}
    if cache_dtype:
        k, v = (tuple(x.to(decode_calls.FP8) for x in parts) for parts in (k, v))
        scales = {name: torch.full((2, 2), 0.5) for name in ("k_scale", "v_scale")}
    cache = decode_calls.make_cache(k, v, generator, "rows", 16)
    call = decode_calls.Call(q, k, v, cache, 128**-0.5, num_splits=2, **scales)

    @contextmanager
    def prepare(bench: Bench) -> Iterator[Run]:
        host.install(bench.launch, bench.arch)
        try:
            yield lambda: list(decode_calls.launch(Place(bench, []), kernel, call))
        finally:
            host.uninstall()

    shape = f"B=2 Hq={Hq} Hk=2, 5 x {longest} and 1 x 40, 2 splits"
    kind = [cache_dtype or ("wgmma" if wgmma else "")]
    name = ", ".join(["decode", *filter(None, kind), f"{rows} rows", "D=128", "right"])
    return Subject(name, arch, shape, prepare)


def one_block(call: Call) -> Call:
    """The call with one query head per KV head, so that a tile of keys has one block."""
    Hk = call.k.shape[2]
    return replace(call, q=call.q[:, :, :Hk].contiguous(), dout=call.dout[:, :, :Hk].contiguous())


def attention(
    arch: str, name: str, act: Callable[..., list[Tensor]], causal: bool, tolerance: float = 0.0
) -> Subject:
    """flash-attn-4 at a size at which every CTA works on several tiles; outputs hold NaN before."""
    B, Sq, Sk, Hq, Hk, D = 1, 512, 768, 2, 1, 128

    @contextmanager
    def prepare(bench: Bench) -> Iterator[Run]:
        torch.manual_seed(0)
        q, k, v, dout = (
            torch.randn(B, s, h, D).bfloat16() for s, h in ((Sq, Hq), (Sk, Hk), (Sk, Hk), (Sq, Hq))
        )
        with flash_attn_4(bench.launch, arch, num_sms=2) as interface, poisoned_memory():
            out, lse, *_ = interface._flash_attn_fwd(q, k, v, causal=causal, return_lse=True)
            bench.executed.clear()
            yield lambda: act(interface, q, k, v, out, dout, lse, causal=causal)

    shape = f"{B=} {Sq=} {Sk=} {Hq=} {Hk=} {D=} {causal=}"
    return Subject(f"flash-attn-4 {name}", arch, shape, prepare, tolerance)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside the block torch.empty gives NaN, not what an earlier run has left there."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def forward(interface: Any, q: Tensor, k: Tensor, v: Tensor, *_: Tensor, causal: bool) -> list[Tensor]:
    return list(interface._flash_attn_fwd(q, k, v, causal=causal, return_lse=True)[:2])


def backward(interface: Any, *saved: Tensor, causal: bool) -> list[Tensor]:
    return list(interface._flash_attn_bwd(*saved, causal=causal)[:3])


def study(subject: Subject, known: Rows) -> Rows:
    """A row for each of the subject's kernels."""
    with judge_of(subject) as judge:
        once = {kernel: counts.copy() for kernel, counts in judge.bench.executed.items()}
        for options in ORIGINALS:
            wrong = judge.differs(options)
            assert wrong is None, f"{subject.name} on {subject.arch} itself, {options}: {wrong}"
        executed = {kernel: set(counts) for kernel, counts in judge.bench.executed.items()}
        return [study_kernel(judge, kernel, executed[kernel], once[kernel], known) for kernel in executed]


def study_kernel(
    judge: Judge, kernel: host.Kernel, executed: set[int], once: Counter[int], known: Rows
) -> dict[str, Any]:
    """Deletes what was `executed` in any schedule; `once`: how often in a single eager run, by all warps."""
    program = judge.bench.programs[kernel].kernel
    every = candidates(program)
    row: dict[str, Any] = {
        "subject": judge.subject.name,
        "arch": judge.subject.arch,
        "kernel": short_name(kernel.name),
        "shape": judge.subject.shape,
        "candidates": len(every),
        "executed": 0,
        "detected": 0,
        "detected_by": Counter(),
        "apart": {name: {"executed": 0, "detected": 0} for name in APART},
        "fences_not_needed": [],
        "survivors": [],
    }
    row["fences_not_needed"] = [
        fence for earlier in same_kernel(row, known) for fence in earlier.get("fences_not_needed", ())
    ]
    for index in sorted(executed.intersection(every)):
        instruction = program.instructions[index]
        # What the eager schedule never reaches, the others reach seldom.
        by = judge.detects(kernel, index, MUTANTS if once[index] else ORIGINALS)
        apart = next((name for name in APART if instruction.opcode.startswith(name)), None)
        counts = row["apart"][apart] if apart else row
        counts["executed"] += 1
        counts["detected"] += by is not None
        if by and not apart:
            row["detected_by"][by] += 1
        elif not by and not apart:
            row["survivors"].append(survivor(instruction, once[index], reasons(row, known)))
    print(*(row[k] for k in ("subject", "arch", "kernel", "executed", "detected", "detected_by")), flush=True)
    for one in row["survivors"]:
        print("   ", *one.values())
    return row


def survivor(instruction: Instruction, times: int, reasons: dict[str, str]) -> dict[str, Any]:
    file, line = instruction.source or ("", 0)
    source = f"{Path(file).name}:{line}"
    return {
        "line": instruction.line,
        "ptx": instruction.text.strip(),
        "source": source,
        "executed": times,
        "reason": reasons.get(f"{instruction.line} {source}", ""),
    }


def reasons(row: dict[str, Any], known: Rows) -> dict[str, str]:
    """The reasons that an earlier study of this kernel gives for its survivors, by PTX line and source."""
    same = same_kernel(row, known)
    return {f"{s['line']} {s['source']}": s["reason"] for r in same for s in r["survivors"]}


def same_kernel(row: dict[str, Any], known: Rows) -> Rows:
    return [r for r in known if all(r[k] == row[k] for k in ("subject", "arch", "kernel"))]


def short_name(kernel: str) -> str:
    """The name without what the DSL mangles into it from the arguments."""
    plain = kernel.removeprefix("kernel_").removeprefix("cutlass_")
    return re.split("_object_at_|_[Tt]ensor|_Maps", plain)[0]


if __name__ == "__main__":
    main(sys.argv[1:])
