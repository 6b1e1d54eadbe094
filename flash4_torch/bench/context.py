"""Section `context`: one sequence over many GPUs against one GPU that does all of it.

Under torchrun, with a process for each GPU, whole calls are timed, beside torch's own ring::

    torchrun --nproc-per-node 2 --local-ranks-filter 0 -m flash4_torch bench context --out context.json

In one process a GPU does what one rank of N would: its hops and merges, or its heads, without messages and
without packing them. That is the most efficiency that N ranks can have; and `predicted` adds messages that do
not fit under the computation, at bandwidths that are assumed in one process, and measured under torchrun.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from .. import ops
from ..distributed import ring, ring_attention, ulysses_attention
from ..distributed.groups import Axis
from ..distributed.layout import Shards
from ..distributed.plan import Problem
from ..integrations import torch_sdpa
from ..masks import Band
from ..problem import CallOptions, Saved
from . import gpu
from .report import Row, dtype_name, table
from .settings import Settings, usual_dtype

TITLE = "context parallelism: one GPU's time for a sequence over N times that of N, causal, GQA 4"

_LENGTHS = (32768, 131072, 524288)
_HEADS = ((16, 4, 128), (32, 8, 64))
_RANKS = (2, 8, 64)
"""Ranks of which one process plays one."""
_ASSUMED_BANDWIDTHS = {"NVLink": 370e9, "400 Gb/s": 45e9}
"""Bytes per second in one direction."""
_SAMPLES = 3
_LONGEST_S = 2.0
"""Seconds of a call beyond which it is timed once."""


class Cell(NamedTuple):
    Hq: int
    Hk: int
    D: int
    S: int
    direction: str

    @property
    def B(self) -> int:
        return 1


def cells(settings: Settings) -> list[Cell]:
    """The cells of this machine that `settings` selects; quick keeps the shortest sequence."""
    lengths, heads = (_LENGTHS, _HEADS) if settings.on_gpu else ((1024,), ((4, 4, 16),))
    found = [
        Cell(*head, S, direction)
        for S, head, direction in itertools.product(lengths, heads, ("forward", "step"))
    ]
    return [
        cell
        for cell in found
        if settings.selection.takes(cell._asdict()) and not (settings.quick and cell.S > lengths[0])
    ]


def start(settings: Settings) -> bool:
    """Joins torchrun's other processes, and returns whether this one is to print."""
    if not dist.is_torchelastic_launched():
        return True
    if settings.on_gpu:
        torch.cuda.set_device(dist.get_node_local_rank())
    if not dist.is_initialized():
        dist.init_process_group("nccl" if settings.on_gpu else "gloo")
    return dist.get_rank() == 0


def measure(settings: Settings) -> Iterator[Row]:
    """Rows of each cell; under torchrun every process has the same ones."""
    for cell in cells(settings):
        tensors = _tensors(cell, settings)
        alone = _alone(cell, tensors, settings)
        rows = _of_ranks if dist.is_initialized() else _of_one_rank
        for row in rows(cell, tensors, alone, settings):
            found: Row = {
                **cell._asdict(),
                "dtype": dtype_name(tensors[0].dtype),
                "one_gpu_seconds": alone,
                **row,
                "gpu": gpu.state(),
            }
            print(_line(found), file=sys.stderr, flush=True)
            yield found
    if dist.is_torchelastic_launched():
        dist.destroy_process_group()


def _tensors(cell: Cell, settings: Settings) -> list[Tensor]:
    """q, k, v and dout of the whole sequence, equal on all ranks."""
    generator = torch.Generator(settings.device).manual_seed(0)
    shapes = [(1, cell.S, H, cell.D) for H in (cell.Hq, cell.Hk, cell.Hk, cell.Hq)]
    dtype = usual_dtype(settings.device)
    return [torch.randn(x, generator=generator, device=settings.device, dtype=dtype) for x in shapes]


def _step(cell: Cell, attend: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], Any]:
    """A call of `attend`, with its backward if the cell's direction is a step."""
    q, k, v, dout = tensors
    if cell.direction == "forward":

        def forward() -> Any:
            with torch.no_grad():
                return attend(q, k, v)

        return forward
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    return lambda: torch.autograd.grad(attend(*inputs), inputs, dout)


def _alone(cell: Cell, tensors: list[Tensor], settings: Settings) -> float:
    options = CallOptions(scale=cell.D**-0.5, window_right=0)
    return _seconds(_step(cell, _attend_with(options), tensors), settings)


def _attend_with(options: CallOptions) -> Callable[..., Tensor]:
    return lambda q, k, v: ops.attention(q, k, v, None, None, None, options)[0]


def _seconds(call: Callable[[], Any], settings: Settings) -> float:
    """The best of a few times, on the slowest rank of each."""
    best = float("inf")
    call()
    for _ in range(_SAMPLES):
        if dist.is_initialized():
            dist.barrier()
        _synchronize(settings)
        begun = time.perf_counter()
        call()
        _synchronize(settings)
        best = min(best, _slowest(time.perf_counter() - begun, settings))
        if best > _LONGEST_S:
            break
    return best


def _slowest(seconds: float, settings: Settings) -> float:
    if not dist.is_initialized():
        return seconds
    value = torch.tensor([seconds], dtype=torch.float64, device=settings.device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value.item())


def _synchronize(settings: Settings) -> None:
    if settings.on_gpu:
        torch.cuda.synchronize()


# One process: what one rank of N computes.


def _of_one_rank(cell: Cell, tensors: list[Tensor], alone: float, settings: Settings) -> Iterator[Row]:
    for ranks in _RANKS if settings.on_gpu else _RANKS[:1]:
        if cell.S % (2 * ranks) == 0:
            seconds = _seconds(_ring_alone(cell, tensors, ranks), settings)
            per_hop = _ring_bytes(cell, ranks, tensors[0].element_size())
            yield _row("ring, one rank", ranks, seconds, alone, _predicted(seconds, alone, ranks, per_hop))
        if cell.Hq % ranks == 0 and cell.Hk % ranks == 0:
            mine = [x[:, :, : x.shape[2] // ranks] for x in tensors]
            options = CallOptions(scale=cell.D**-0.5, window_right=0)
            seconds = _seconds(_step(cell, _attend_with(options), mine), settings)
            moved = _ulysses_bytes(cell, ranks, tensors[0].element_size())
            predicted = {
                name: alone / ranks / (seconds + moved / bandwidth)
                for name, bandwidth in _ASSUMED_BANDWIDTHS.items()
            }
            yield _row("ulysses, one rank", ranks, seconds, alone, predicted)


def _row(how: str, ranks: int, seconds: float, alone: float, predicted: dict[str, float]) -> Row:
    efficiency = alone / ranks / seconds
    return {"how": how, "ranks": ranks, "seconds": seconds, "efficiency": efficiency, "predicted": predicted}


def _ring_alone(cell: Cell, tensors: list[Tensor], ranks: int) -> Callable[[], Any]:
    """Rank 0's hops of a zigzag ring, which take its own keys for those of others."""
    part = cell.S // ranks
    q, k, v, dout = (x[:, :part].contiguous() for x in tensors)
    options = CallOptions(scale=cell.D**-0.5, window_right=0)
    shards = Shards("zigzag", ranks, cell.S)
    it = ring.Ring(Axis("", ranks, 0), Problem(shards, shards, Band(None, 0)), options, None)

    def hops() -> Iterator[Any]:
        for distance in range(ranks):
            step = it.hop(distance)
            yield step, ring.Held(ring.taken(k, step.parts), ring.taken(v, step.parts), step.parts)

    def step() -> Any:
        out, lse = ring.attend_to(hops(), it, q, cell.D)
        if cell.direction == "forward":
            return out
        dk, dv = ring.Sum(k), ring.Sum(v)
        queries = ring.Queries(q, Saved(dout, None, out, lse))
        for step, held in hops():
            for keys, dk_part, dv_part in ring.gradients_of(step, it, held, queries).in_parts():
                dk.add(keys, dk_part)
                dv.add(keys, dv_part)
        return queries.finished(), dk.finished(), dv.finished()

    def without_history() -> Any:
        with torch.no_grad():
            return step()

    return without_history


def _ring_bytes(cell: Cell, ranks: int, itemsize: int) -> float:
    """Bytes that a rank sends in a hop, the mean of all: K and V, and in a step again and their gradients."""
    shards = Shards("zigzag", ranks, cell.S)
    problem = Problem(shards, shards, Band(None, 0))
    keys = [
        sum(map(len, ring.hop(problem, rank, source).parts))
        for rank in range(min(ranks, 4))
        for source in range(ranks)
        if rank != source
    ]
    tensors = 2 if cell.direction == "forward" else 6
    return tensors * cell.Hk * cell.D * itemsize * sum(keys) / max(len(keys), 1)


def _ulysses_bytes(cell: Cell, ranks: int, itemsize: int) -> float:
    """Bytes that a rank sends to others: q, k, v and out, and in a step also their gradients."""
    rows = cell.S // ranks * (2 * cell.Hq + 2 * cell.Hk) * cell.D * itemsize * (ranks - 1) / ranks
    return rows if cell.direction == "forward" else 2 * rows


def _predicted(
    seconds: float, alone: float, ranks: int, per_hop: float, bandwidths: dict[str, float] | None = None
) -> dict[str, float]:
    """Efficiencies by bandwidth: a hop takes its computation or its messages, whichever is longer."""
    found = {}
    for name, bandwidth in (bandwidths or _ASSUMED_BANDWIDTHS).items():
        each, message = seconds / ranks, per_hop / bandwidth
        found[name] = alone / ranks / (each + (ranks - 1) * max(each, message))
    return found


# Many processes: whole calls.


def _of_ranks(cell: Cell, tensors: list[Tensor], alone: float, settings: Settings) -> Iterator[Row]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    bandwidth = _bandwidth(settings)
    if cell.S % (2 * ranks) == 0:
        mine = [_zigzag(x, ranks, rank) for x in tensors]
        call = _step(cell, lambda q, k, v: ring_attention(q, k, v, causal=True), mine)
        seconds = _seconds(call, settings)
        per_hop = _ring_bytes(cell, ranks, tensors[0].element_size())
        compute = _seconds(_ring_alone(cell, tensors, ranks), settings)
        predicted = _predicted(compute, alone, ranks, per_hop, {"measured": bandwidth})
        yield _row("ring", ranks, seconds, alone, predicted) | {"bandwidth": bandwidth}
    if cell.Hq % ranks == 0:
        part = cell.S // ranks
        mine = [x[:, rank * part : (rank + 1) * part].contiguous() for x in tensors]
        call = _step(cell, lambda q, k, v: ulysses_attention(q, k, v, causal=True), mine)
        yield _row("ulysses", ranks, _seconds(call, settings), alone, {}) | {"bandwidth": bandwidth}
    yield _torch_ring("torch's ring", cell, tensors, alone, settings)
    torch_sdpa.register()
    activate_flash_attention_impl(torch_sdpa.NAME)
    try:
        yield _torch_ring("torch's ring, our kernels", cell, tensors, alone, settings)
    finally:
        restore_flash_attention_impl()


def _zigzag(x: Tensor, ranks: int, rank: int) -> Tensor:
    chunks = Shards("zigzag", ranks, x.shape[1]).chunks(rank)
    return torch.cat([x[:, chunk.start : chunk.stop] for chunk in chunks], 1)


def _bandwidth(settings: Settings, size: int = 1 << 26) -> float:
    """Bytes per second from each rank to the next, all at once."""
    size = size if settings.on_gpu else 1 << 20
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sent = torch.empty(size, dtype=torch.uint8, device=settings.device)
    received = torch.empty_like(sent)

    def pass_on() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return size / _seconds(pass_on, settings)


def _torch_ring(how: str, cell: Cell, tensors: list[Tensor], alone: float, settings: Settings) -> Row:
    """torch's own ring, in the same run; a row without a time says why there is none."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ranks = dist.get_world_size()
    mesh = init_device_mesh(torch.device(settings.device).type, (ranks,))
    try:
        q, k, v, dout = (x.transpose(1, 2).clone() for x in tensors)
        buffers = [q, k, v, dout]
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)),
        ):

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

            seconds = _seconds(_step(cell, attend, buffers), settings)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return {"how": how, "ranks": ranks, "left_out": reason}
    return _row(how, ranks, seconds, alone, {})


def _line(row: Row) -> str:
    sizes = " ".join(f"{name}={row[name]}" for name in ("S", "Hq", "Hk", "D", "direction"))
    if "seconds" not in row:
        return f"{sizes} {row['how']}: left out, {row['left_out']}"
    return f"{sizes} {row['how']} of {row['ranks']}: {row['seconds'] * 1e3:.2f} ms, {row['efficiency']:.3f}"


def text(rows: list[Row]) -> str:
    head = ("S", "D", "direction", "how", "ranks", "ms", "efficiency", "predicted")
    return table(
        head,
        [
            (
                row["S"],
                row["D"],
                row["direction"],
                row["how"],
                row["ranks"],
                f"{row['seconds'] * 1e3:.2f}" if "seconds" in row else "",
                f"{row['efficiency']:.3f}" if "seconds" in row else row["left_out"],
                ", ".join(f"{name} {value:.3f}" for name, value in row.get("predicted", {}).items()),
            )
            for row in rows
        ],
    )
