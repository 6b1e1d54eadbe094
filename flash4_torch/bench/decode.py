"""Section `decode`: a few new tokens over long KV caches, ours against peers; bytes of K and V over time."""

from __future__ import annotations

import functools
import importlib
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import env
from ..kvcache import attention_kvcache
from . import gpu
from .cases import measure_roof
from .providers import OURS, sentence
from .report import Row, dtype_name, table
from .settings import Settings, usual_dtype
from .timing import Call, compare

TITLE = "decoding over a KV cache: TB/s of keys and values, and the best peer's time over ours"

_PAGE_SIZES = (16, 256)
_SMALLEST_PAGE = _PAGE_SIZES[0]
"""What engines serve with; contenders with many variants are timed on it alone."""
_ROUNDS = 4
_MOST_BYTES = 12 << 30
_CACHED_BYTES = 300 << 20
"""Bytes through which calls rotate, so that the L2 cache holds nothing of the next call's."""
_FLOAT8 = torch.float8_e4m3fn
_TOLERANCE = 0.02
"""Norm of the difference of two results over the norm of one."""
_TOLERANCE_FLOAT8 = 0.1
"""The same if K and V were rounded to 8 bits, which takes half of it."""
_WORKSPACE_BYTES = 512 << 20


class Cell(NamedTuple):
    """Sequences of S keys each, and Sq new tokens of each."""

    Hq: int
    Hk: int
    D: int
    B: int
    S: int
    Sq: int = 1

    def bytes(self, itemsize: int) -> int:
        """Bytes of K and V."""
        return 2 * self.B * self.S * self.Hk * self.D * itemsize


_HEADS = ((32, 8, 128), (32, 4, 128), (64, 8, 64), (128, 1, 128), (16, 8, 256))
_BATCHES, _LENGTHS = (1, 8, 32, 128), (1024, 4096, 16384, 65536, 131072)


def cells(settings: Settings) -> list[Cell]:
    """The cells of this machine that `settings` selects; quick keeps those with few keys."""
    if settings.on_gpu:
        found = [
            Cell(*heads, B, S, Sq)
            for Sq, heads, B, S in itertools.product((1, 4), _HEADS, _BATCHES, _LENGTHS)
            if Sq == 1 or heads == _HEADS[0]
        ]
    else:
        found = [Cell(8, 2, 64, B, S, Sq) for Sq, B, S in itertools.product((1, 4), (1, 8), (256, 2048))]
    most = _MOST_BYTES if settings.on_gpu else _CACHED_BYTES
    return [
        cell
        for cell in found
        if cell.bytes(2) <= most
        and settings.selection.takes(cell._asdict())
        and not (settings.quick and cell.S > (4096 if settings.on_gpu else 256))
    ]


def measure(settings: Settings) -> Iterator[Row]:
    """One row per cell."""
    dtype = usual_dtype(settings.device)
    chosen = cells(settings)
    if not chosen:
        return
    copy = measure_roof(dtype_name(dtype), settings).copy
    for cell in chosen:
        row = _row(cell, dtype, settings)
        print(_line(row), file=sys.stderr, flush=True)
        yield row | {"copy_tbs": copy / 1e12, "gpu": gpu.state()}


def _row(cell: Cell, dtype: torch.dtype, settings: Settings) -> Row:
    contenders, left_out = _contenders(cell, dtype, settings)
    if settings.on_gpu and not settings.rounds:
        settings = replace(settings, rounds=_ROUNDS)
    with torch.no_grad():
        times = compare(contenders, settings)
    seconds = times.seconds
    # A cache of 8 bits has half the bytes: a peer with one is no measure of the others.
    peers = {
        name: spread.median
        for name, spread in seconds.items()
        if not name.startswith(OURS) and "float8" not in name
    }
    best = min(peers, key=peers.__getitem__, default="")
    ours = [name for name in seconds if name.startswith(OURS)]
    return {
        **cell._asdict(),
        "dtype": dtype_name(dtype),
        "seconds": {name: spread._asdict() for name, spread in seconds.items()},
        "tbs": {
            name: cell.bytes(1 if "float8" in name else dtype.itemsize) / spread.median / 1e12
            for name, spread in seconds.items()
        },
        "best_peer": best,
        "ratios": {name: times.ratio(best, name)._asdict() for name in ours if best},
        "left_out": left_out,
    }


class _Tensors(NamedTuple):
    """The tensors of one call: q (B, Sq, Hq, D), k and v (B, S, Hk, D), lengths (B,)."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor


Attend = Callable[[_Tensors], Tensor]


def _contenders(cell: Cell, dtype: torch.dtype, settings: Settings) -> tuple[dict[str, Call], dict[str, str]]:
    """Calls that all compute the cell, and the reasons for those that cannot or compute something else."""
    device = settings.device
    left_out: dict[str, str] = {}
    number = max(1, min(8, -(-_CACHED_BYTES // cell.bytes(dtype.itemsize)))) if settings.on_gpu else 1
    sets = [_tensors(cell, dtype, device) for _ in range(number)]
    tables = {page: _table(cell, page, device) for page in _PAGE_SIZES if cell.S % page == 0}
    float8 = functools.cache(lambda: [_float8(x) for x in sets])
    found: dict[str, list[Call]] = {}
    with torch.no_grad():
        kinds = {0: None, **tables}
        expected = {page: _sdpa(_gathered(sets[0], table)).float() for page, table in kinds.items()}
    offered = {"sdpa": _sdpa, **_ours(tables)}
    if settings.on_gpu:
        offered |= _fa3(tables, left_out) | _flashinfer(cell, tables, left_out)
    for name, attend in offered.items():
        own = float8() if "float8" in name else sets
        try:
            with torch.no_grad():
                result, right = attend(own[0]).float(), expected[_page_of(name)]
                difference = float((result - right).norm() / right.norm())
            # Written so that NaN is refused too.
            if not difference <= (_TOLERANCE_FLOAT8 if "float8" in name else _TOLERANCE):
                raise ArithmeticError(f"its result differs from the others' by {difference:.2g}")
        # Peers raise errors of any type.
        except Exception as error:
            left_out[name] = sentence(error)
        else:
            found[name] = [_call(attend, x) for x in own]
    return {name: _in_turn(calls) for name, calls in found.items()}, left_out


def _page_of(name: str) -> int:
    """The page size in a contender's name, 0 if its cache is dense."""
    _, is_paged, page = name.partition(" page ")
    return int(page) if is_paged else 0


def _gathered(x: _Tensors, table: Tensor | None) -> _Tensors:
    """The keys and values in the order that a table gives them."""
    if table is None:
        return x
    page = x.k.shape[1] // table.shape[1]
    k, v = (_paged(t, page)[table.long()].flatten(1, 2) for t in (x.k, x.v))
    return x._replace(k=k, v=v)


def _call(attend: Attend, tensors: _Tensors) -> Call:
    return lambda: attend(tensors)


def _in_turn(calls: list[Call]) -> Call:
    """A call that is another one of these each time."""
    rotating = itertools.cycle(calls)
    return lambda: next(rotating)()


def _tensors(cell: Cell, dtype: torch.dtype, device: str) -> _Tensors:
    Hq, Hk, D, B, S, Sq = cell
    q, k, v = (torch.randn(B, n, H, D, device=device, dtype=dtype) for n, H in ((Sq, Hq), (S, Hk), (S, Hk)))
    return _Tensors(q, k, v, torch.full((B,), S, device=device, dtype=torch.int32))


def _float8(x: _Tensors) -> _Tensors:
    return x._replace(k=x.k.to(_FLOAT8), v=x.v.to(_FLOAT8))


def _table(cell: Cell, page: int, device: str) -> Tensor:
    """A table of pages in random order."""
    return torch.randperm(cell.B * cell.S // page, device=device).view(cell.B, -1).int()


def _paged(x: Tensor, page: int) -> Tensor:
    return x.view(-1, page, *x.shape[2:])


def _ours(tables: dict[int, Tensor]) -> dict[str, Attend]:
    def dense(x: _Tensors, **options: Any) -> Tensor:
        return attention_kvcache(x.q, x.k, x.v, seqused_k=x.lengths, causal=True, **options)

    def paged(page: int) -> Attend:
        def attend(x: _Tensors) -> Tensor:
            caches = _paged(x.k, page), _paged(x.v, page)
            return attention_kvcache(x.q, *caches, seqused_k=x.lengths, block_table=tables[page], causal=True)

        return attend

    return {
        OURS: dense,
        **{f"{OURS} page {page}": paged(page) for page in tables},
        f"{OURS} invariant": lambda x: dense(x, batch_invariant=True),
        f"{OURS} float8": dense,
        **{f"{OURS} float8 page {page}": paged(page) for page in tables if page == _SMALLEST_PAGE},
    }


def _sdpa(x: _Tensors) -> Tensor:
    """torch's SDPA, with torch's own choice among its backends; causal aligned to the bottom right."""
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = (t.transpose(1, 2) for t in x[:3])
    Sq, S = q.shape[2], k.shape[2]
    gqa = q.shape[1] != k.shape[1]
    if Sq == 1:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa).transpose(1, 2)
    bias = causal_lower_right(Sq, S)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=gqa).transpose(1, 2)


def _fa3(tables: dict[int, Tensor], left_out: dict[str, str]) -> dict[str, Attend]:
    """FlashAttention-3, which chooses its number of splits."""
    try:
        library = env.BENCH_FA3.get()
        if library:
            torch.ops.load_library(library)
        else:
            importlib.import_module("flash_attn_interface")
        forward = torch.ops.flash_attn_3.fwd
    except (ImportError, OSError, AttributeError) as error:
        left_out["fa3"] = sentence(error)
        return {}

    def dense(x: _Tensors) -> Tensor:
        out: Tensor = forward(*x[:3], softmax_scale=x.q.shape[-1] ** -0.5, is_causal=True, num_splits=0)[0]
        return out

    def paged(page: int) -> Attend:
        def attend(x: _Tensors) -> Tensor:
            out: Tensor = forward(
                x.q,
                _paged(x.k, page),
                _paged(x.v, page),
                page_table=tables[page],
                seqused_k=x.lengths,
                max_seqlen_k=x.k.shape[1],
                softmax_scale=x.q.shape[-1] ** -0.5,
                is_causal=True,
                num_splits=0,
            )[0]
            return out

        return attend

    return {"fa3": dense, **{f"fa3 page {page}": paged(page) for page in tables}}


def _flashinfer(cell: Cell, tables: dict[int, Tensor], left_out: dict[str, str]) -> dict[str, Attend]:
    """FlashInfer's decode kernels on CUDA cores and on tensor cores, and XQA's for one token.

    The first two plan their splits on the host, as an engine does once a step; that is not timed.
    """
    try:
        library = importlib.import_module("flashinfer.decode")
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        left_out["flashinfer"] = sentence(error)
        return {}
    Hq, Hk, D, B, S, Sq = cell

    @functools.cache
    def workspace(owner: str, device: torch.device) -> Tensor:
        # XQA's semaphores are 0 between calls, the others write anything.
        return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def planned(page: int, tensor_cores: bool) -> Attend:
        @functools.cache
        def plan(device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype) -> Any:
            wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
                workspace("planned", device), "NHD", use_tensor_cores=tensor_cores, backend="fa2"
            )
            wrapper.plan(
                torch.arange(B + 1, dtype=torch.int32) * (S // page),
                tables[page].flatten(),
                torch.full((B,), page, dtype=torch.int32),
                Hq,
                Hk,
                D,
                page,
                q_data_type=dtype,
                kv_data_type=cache_dtype,
                q_len_per_req=Sq,
            )
            return wrapper

        def attend(x: _Tensors) -> Tensor:
            wrapper = plan(x.q.device, x.q.dtype, x.k.dtype)
            out: Tensor = wrapper.run(x.q.flatten(0, 1), (_paged(x.k, page), _paged(x.v, page)))
            return out.view(x.q.shape)

        return attend

    def xqa(page: int) -> Attend:
        def attend(x: _Tensors) -> Tensor:
            out: Tensor = library.xqa_batch_decode_with_kv_cache(
                x.q.flatten(0, 1),
                (_paged(x.k, page), _paged(x.v, page)),
                workspace("xqa", x.q.device),
                tables[page],
                x.lengths,
                max_seq_len=S,
                bmm1_scale=D**-0.5,
            )
            return out.view(x.q.shape)

        return attend

    page = _SMALLEST_PAGE
    if page not in tables:
        return {}
    kernels = {"flashinfer tensor cores": planned(page, True)}
    if Sq == 1:
        kernels |= {"flashinfer cuda cores": planned(page, False), "flashinfer xqa": xqa(page)}
    return {
        f"{name}{cache} page {page}": attend for name, attend in kernels.items() for cache in ("", " float8")
    }


def text(rows: list[Row]) -> str:
    """The table of microseconds, our TB/s, and the ratios with their means."""
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    head = ["Hq/Hk", "D", "B", "keys", "tokens", *names, f"{OURS} TB/s", "best peer", "ratio"]
    lines = [
        [
            *_case(row),
            *(_microseconds(row, name) for name in names),
            f"{row['tbs'][OURS]:.3f}" if OURS in row["tbs"] else "",
            row["best_peer"],
            f"{row['ratios'][OURS]['median']:.3f}" if OURS in row["ratios"] else "",
        ]
        for row in rows
    ]
    return "\n".join([table(head, lines), *_means(rows), *_remarks(rows)])


def _case(row: Row) -> list[Any]:
    return [f"{row['Hq']}/{row['Hk']}", row["D"], row["B"], row["S"], row["Sq"]]


def _microseconds(row: Row, name: str) -> str:
    return f"{1e6 * row['seconds'][name]['median']:.1f}" if name in row["seconds"] else ""


def _means(rows: list[Row]) -> list[str]:
    """Geometric means of the ratios of each of our contenders, and how many cells are at 1 or more."""
    names = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    ratios = {n: [row["ratios"][n]["median"] for row in rows if n in row["ratios"]] for n in names}
    return [
        f"best peer's time / {name}'s: geometric mean {statistics.geometric_mean(found):.3f}, "
        f"at least 1.00 in {sum(ratio >= 1 for ratio in found)} of {len(found)} cells"
        for name, found in ratios.items()
    ]


def _remarks(rows: list[Row]) -> list[str]:
    copies = {f"copy {row['copy_tbs']:.3g} TB/s, read and write" for row in rows}
    left_out = {f"left out {name}: {why}" for row in rows for name, why in row["left_out"].items()}
    return [*sorted(copies), *sorted(left_out)]


def _line(row: Row) -> str:
    """One row in one line, to follow a run."""
    case = " ".join(f"{name}={row[name]}" for name in Cell._fields)
    times = ", ".join(f"{name} {_microseconds(row, name)} us" for name in row["seconds"])
    return f"  {case}: {times}"
