"""Section `context`: one sequence over many GPUs against one GPU that does all of it.

Under torchrun, with a process for each GPU, whole calls are timed, beside torch's own ring::

    torchrun --nproc-per-node 2 --local-ranks-filter 0 -m flash4_torch bench context --out context.json

In one process a GPU does what the first or the last rank of N would, whichever takes longer: its hops and
merges on its heads, without messages and without packing them. That is the most efficiency that N ranks can
have; and `predicted` adds messages that do not fit under the computation, at bandwidths of other machines in
one process, and at those of the same run under torchrun.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from .. import ops
from ..distributed import context_parallel_attention, ring, shard_sequence
from ..distributed.groups import RING, ULYSSES, Axis
from ..distributed.layout import Shards
from ..distributed.plan import Problem
from ..integrations import torch_sdpa
from ..masks import Band
from ..problem import CallOptions, Saved
from . import gpu, overlap
from .report import Row, dtype_name, table
from .settings import Settings, usual_dtype

TITLE = "context parallelism: one GPU's time for a sequence over N times that of N, causal, GQA 4"

_LENGTHS = (32768, 131072, 524288)
_LONGEST = 1048576
"""A length for four ranks or more."""
_HEADS = ((16, 4, 128), (32, 8, 64))
_RANKS = (2, 8, 64)
"""Ranks of which one process plays one."""
_BANDWIDTHS = {"NVLink": (266e9, 105e9), "400 Gb/s": (45e9, 105e9)}
"""Bytes per second in one direction, of a ring's messages and of an exchange of heads with its packing: those
between two H200s, and 400 Gb/s for a ring between nodes, inside of which heads are exchanged."""
_SAMPLES = 3
_LONG_S = 2.0
"""Seconds of a call beyond which it is timed once."""
_COMPARED = 131072
"""The longest sequence whose results are compared with one GPU's."""
_TOLERANCE = 0.02
"""The largest difference of results, of their norm: bfloat16 ones, rounded for each hop, differ by 0.005."""


class Cell(NamedTuple):
    Hq: int
    Hk: int
    D: int
    S: int
    direction: str

    @property
    def B(self) -> int:
        return 1


class Split(NamedTuple):
    """How ranks share a sequence: a ring of groups, inside of which ranks divide heads."""

    ring: int
    ulysses: int

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses

    def __str__(self) -> str:
        if self.ulysses == 1:
            return "ring"
        return "ulysses" if self.ring == 1 else f"ring {self.ring} x ulysses {self.ulysses}"

    def heads(self, cell: Cell) -> tuple[int, int]:
        """Query heads and KV heads of a rank, which repeats KV heads that are fewer than ranks."""
        copies = self.ulysses // math.gcd(self.ulysses, cell.Hk)
        return cell.Hq // self.ulysses, cell.Hk * copies // self.ulysses


def cells(settings: Settings, ranks: int = 1) -> list[Cell]:
    """The cells of this machine that `settings` selects; quick keeps the shortest sequence."""
    lengths: tuple[int, ...] = (1024,)
    heads = _HEADS if settings.on_gpu else ((4, 4, 16),)
    if settings.on_gpu:
        lengths = (*_LENGTHS, _LONGEST) if ranks >= 4 else _LENGTHS
    found = [
        Cell(*head, S, direction)
        for S, head, direction in itertools.product(lengths, heads, ("forward", "step"))
    ]
    return [
        cell
        for cell in found
        if settings.selection.takes(cell._asdict()) and not (settings.quick and cell.S > lengths[0])
    ]


def splits(cell: Cell, ranks: int) -> list[Split]:
    """All ways in which ranks can share the cell's sequence."""
    found = [Split(ranks // n, n) for n in range(1, ranks + 1) if ranks % n == 0]
    return [x for x in found if cell.Hq % x.ulysses == 0 and cell.S % (2 * x.ranks) == 0]


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
    many = dist.is_initialized()
    for cell in cells(settings, dist.get_world_size() if many else 1):
        clock = partial(_seconds, device=settings.device)
        if cell.S > _COMPARED:
            # Long calls are made once: what a first call compiles was compiled by shorter ones.
            clock = partial(_once, device=settings.device)
            list(_rows(cell._replace(S=cell.S // 8), settings, clock))
        for row in _rows(cell, settings, clock):
            print(_line(row), file=sys.stderr, flush=True)
            yield row
    if dist.is_torchelastic_launched():
        dist.destroy_process_group()


Call = Callable[[], Any]
Clock = Callable[[Call], float]
"""Seconds of a call."""


def _rows(cell: Cell, settings: Settings, clock: Clock) -> Iterator[Row]:
    tensors = _tensors(cell, settings)
    whole = _step(cell, _attend_with(_options(cell)), tensors)
    alone = clock(whole)
    rows = _of_ranks if dist.is_initialized() else _of_one_rank
    for row in rows(cell, tensors, alone, settings, clock):
        yield {
            **cell._asdict(),
            "dtype": dtype_name(tensors[0].dtype),
            "one_gpu_seconds": alone,
            **row,
            "gpu": gpu.state(),
        }


def _tensors(cell: Cell, settings: Settings) -> list[Tensor]:
    """q, k, v and dout of the whole sequence, equal on all ranks."""
    generator = torch.Generator(settings.device).manual_seed(0)
    shapes = [(1, cell.S, H, cell.D) for H in (cell.Hq, cell.Hk, cell.Hk, cell.Hq)]
    dtype = usual_dtype(settings.device)
    return [torch.randn(x, generator=generator, device=settings.device, dtype=dtype) for x in shapes]


def _step(cell: Cell, attend: Callable[..., Tensor], tensors: list[Tensor]) -> Call:
    """A call of `attend` that returns out or, if the cell's direction is a step, gradients."""
    q, k, v, dout = tensors
    if cell.direction == "forward":

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (attend(q, k, v),)

        return forward
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    return lambda: torch.autograd.grad(attend(*inputs), inputs, dout)


def _options(cell: Cell) -> CallOptions:
    return CallOptions(scale=cell.D**-0.5, window_right=0)


def _attend_with(options: CallOptions) -> Callable[..., Tensor]:
    return lambda q, k, v: ops.attention(q, k, v, None, None, None, options)[0]


def _seconds(call: Call, device: str) -> float:
    """The best of some times after a first one, on the slowest rank of each."""
    call()
    return min(_once(call, device) for _ in range(_SAMPLES))


def _once(call: Call, device: str) -> float:
    if dist.is_initialized():
        dist.barrier()
    _synchronize(device)
    begun = time.perf_counter()
    call()
    _synchronize(device)
    return _slowest(time.perf_counter() - begun, device)


def _slowest(seconds: float, device: str) -> float:
    if not dist.is_initialized():
        return seconds
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value.item())


def _is_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"


def _synchronize(device: str) -> None:
    if _is_gpu(device):
        torch.cuda.synchronize()


def _row(how: str, ranks: int, seconds: float, alone: float) -> Row:
    return {"how": how, "ranks": ranks, "seconds": seconds, "efficiency": alone / ranks / seconds}


# One process: what one rank of N computes.


def _of_one_rank(
    cell: Cell, tensors: list[Tensor], alone: float, settings: Settings, clock: Clock
) -> Iterator[Row]:
    for ranks in _RANKS if settings.on_gpu else _RANKS[:1]:
        for split in splits(cell, ranks):
            # With a zigzag the first and the last rank have hops of the two extreme shapes.
            seconds = max(clock(_rank_alone(cell, tensors, split, rank)) for rank in {0, split.ring - 1})
            predicted = {
                name: _predicted(cell, split, seconds, alone, *bandwidths)
                for name, bandwidths in _BANDWIDTHS.items()
            }
            yield _row(f"{split}, one rank", ranks, seconds, alone) | {"predicted": predicted}


def _rank_alone(cell: Cell, tensors: list[Tensor], split: Split, rank: int = 0) -> Call:
    """What a rank of the ring computes on its heads, with its own keys for those of others."""
    Hq, Hk = split.heads(cell)
    q, k, v, dout = tensors
    mine = [q[:, :, :Hq], k[:, :, :Hk], v[:, :, :Hk], dout[:, :, :Hq]]
    if split.ring == 1:
        return _step(cell, _attend_with(_options(cell)), [x.contiguous() for x in mine])
    return _ring_alone(cell, mine, split.ring, rank)


def _ring_alone(cell: Cell, tensors: list[Tensor], ranks: int, rank: int) -> Call:
    """A rank's hops of a zigzag ring, which take its own keys for those of others."""
    part = cell.S // ranks
    q, k, v, dout = (x[:, :part].contiguous() for x in tensors)
    shards = Shards("zigzag", ranks, cell.S)
    it = ring.Ring(Axis("", ranks, rank), Problem(shards, shards, Band(None, 0)), _options(cell), None)

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


def _predicted(
    cell: Cell, split: Split, seconds: float, alone: float, bandwidth: float, exchange: float
) -> float:
    """The efficiency if a rank computes for `seconds`.

    A hop takes its computation or its messages, whichever is longer; heads are exchanged for the sequence
    between computations. bandwidth, exchange: bytes per second of both.
    """
    each, message = seconds / split.ring, _ring_bytes(cell, split) / bandwidth
    hops = each + (split.ring - 1) * max(each, message)
    return alone / split.ranks / (hops + _ulysses_bytes(cell, split) / exchange)


def _ring_bytes(cell: Cell, split: Split) -> float:
    """Bytes that a rank sends in a hop, the mean of all: K and V, and in a step again and their gradients."""
    ranks = split.ring
    shards = Shards("zigzag", ranks, cell.S)
    problem = Problem(shards, shards, Band(None, 0))
    keys = [
        sum(map(len, ring.hop(problem, rank, source).parts))
        for rank in range(min(ranks, 4))
        for source in range(ranks)
        if rank != source
    ]
    tensors = 2 if cell.direction == "forward" else 6
    return tensors * split.heads(cell)[1] * cell.D * _ITEMSIZE * sum(keys) / max(len(keys), 1)


def _ulysses_bytes(cell: Cell, split: Split) -> float:
    """Bytes that a rank sends to others: q, k, v and out, and in a step also their gradients."""
    heads = split.ulysses * sum(split.heads(cell))
    rows = cell.S // split.ranks * 2 * heads * cell.D * _ITEMSIZE * (split.ulysses - 1) / split.ulysses
    return rows if cell.direction == "forward" else 2 * rows


_ITEMSIZE = 2
"""Bytes of a number on a GPU, in bfloat16."""


# Many processes: whole calls.


def _of_ranks(
    cell: Cell, tensors: list[Tensor], alone: float, settings: Settings, clock: Clock
) -> Iterator[Row]:
    ranks = dist.get_world_size()
    speeds = {"bandwidth": _bandwidth(settings.device), "exchange": _exchange(settings.device)}
    for split in splits(cell, ranks):
        mesh = _mesh(split, settings.device)
        mine = [shard_sequence(x, mesh) for x in tensors]
        call = _step(cell, partial(context_parallel_attention, mesh=mesh, causal=True), mine)
        row = _row(str(split), ranks, clock(call), alone) | speeds
        if cell.S <= _COMPARED:
            whole = _step(cell, _attend_with(_options(cell)), tensors)
            row["difference"] = _difference(
                call(), [shard_sequence(x, mesh) for x in whole()], settings.device
            )
        if row["seconds"] <= _LONG_S:
            computing = clock(_rank_alone(cell, tensors, split, dist.get_rank() // split.ulysses))
            row["predicted"] = {"measured": _predicted(cell, split, computing, alone, *speeds.values())}
            row["overlap"] = overlap.of(call) if settings.on_gpu else {}
        yield row
    kinds: dict[str, AbstractContextManager[None]] = {
        "torch's ring": nullcontext(),
        "torch's ring, our kernels": _our_kernels(),
    }
    for how, kernels in kinds.items():
        with kernels:
            yield _torch_ring(how, cell, tensors, alone, settings, clock)


@lru_cache
def _mesh(split: Split, device: str) -> DeviceMesh:
    mesh = init_device_mesh(
        torch.device(device).type, (split.ring, split.ulysses), mesh_dim_names=(RING, ULYSSES)
    )
    if 1 in split:
        return mesh[RING] if split.ulysses == 1 else mesh[ULYSSES]
    return mesh


def _difference(found: Any, right: list[Tensor], device: str) -> float:
    """The largest norm of a difference over the norm of what one GPU computes, of all tensors and ranks."""
    pairs = zip(found, right, strict=True)
    largest = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
    largest = _slowest(largest, device)
    if not largest <= _TOLERANCE:
        raise RuntimeError(f"results of ranks differ from one GPU's by {largest:.3g} of their norm")
    return largest


@lru_cache
def _bandwidth(device: str) -> float:
    """Bytes per second from each rank to the next, all at once."""
    size = 1 << (28 if _is_gpu(device) else 20)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sent = torch.empty(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def pass_on() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return size / _seconds(pass_on, device)


@lru_cache
def _exchange(device: str) -> float:
    """Bytes per second of an exchange of heads for the sequence and back, in which packing counts."""
    from ..distributed import ulysses

    ranks = dist.get_world_size()
    axis = Axis(dist.group.WORLD.group_name, ranks, dist.get_rank())  # type: ignore[union-attr]
    Hq, Hk, D, rows = 8 * ranks, 2 * ranks, 128, 16384 if _is_gpu(device) else 16
    q, k, v = (torch.empty(1, rows, H, D, dtype=torch.bfloat16, device=device) for H in (Hq, Hk, Hk))

    def there_and_back() -> None:
        out, *_ = ulysses.to_heads(q, k, v, axis)
        ulysses.to_sequence(out, axis)

    sent = rows * 2 * (Hq + Hk) * D * _ITEMSIZE * (ranks - 1) / ranks
    return sent / _seconds(there_and_back, device)


@contextmanager
def _our_kernels() -> Iterator[None]:
    """torch's flash attention by our kernels, in its ring too."""
    torch_sdpa.register()
    activate_flash_attention_impl(torch_sdpa.NAME)
    try:
        yield
    finally:
        restore_flash_attention_impl()


def _torch_ring(
    how: str, cell: Cell, tensors: list[Tensor], alone: float, settings: Settings, clock: Clock
) -> Row:
    """torch's own ring, in the same run; a row without a time says why there is none."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ranks = dist.get_world_size()
    mesh = _mesh(Split(ranks, 1), settings.device)
    buffers = [x.transpose(1, 2).clone() for x in tensors]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    contexts: list[AbstractContextManager[Any]] = [
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)),
    ]
    try:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            seconds = clock(_step(cell, attend, buffers))
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return {"how": how, "ranks": ranks, "left_out": reason}
    return _row(how, ranks, seconds, alone)


def _line(row: Row) -> str:
    sizes = " ".join(f"{name}={row[name]}" for name in ("S", "Hq", "Hk", "D", "direction"))
    if "seconds" not in row:
        return f"{sizes} {row['how']}: left out, {row['left_out']}"
    return f"{sizes} {row['how']} of {row['ranks']}: {row['seconds'] * 1e3:.2f} ms, {row['efficiency']:.3f}"


def text(rows: list[Row]) -> str:
    head = ("S", "D", "direction", "how", "ranks", "ms", "efficiency", "predicted", "messages hidden")
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
                overlap.text(row.get("overlap", {})),
            )
            for row in rows
        ],
    )
