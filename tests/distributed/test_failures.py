"""Ranks that fail: an error that names them on every other rank, and no hang; bad arguments are named."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import flash4_torch
from everything import one_of
from flash4_torch import errors
from flash4_torch.distributed import (
    context_parallel_attention,
    ring_attention,
    shard_documents,
    shard_sequence,
    ulysses_attention,
    unshard_sequence,
)
from ranks import Ranks, ranks

TIMEOUT_S = 3.0


@pytest.fixture
def pair() -> Iterator[Ranks]:
    """Two ranks of their own, one of which is lost."""
    own = Ranks(2)
    yield own
    own.stop()


def rows(S: int = 8, H: int = 2, D: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(1, S, H, D, dtype=dtype, generator=torch.Generator().manual_seed(0))


def attend_but_one_raises(attend: Callable[..., Tensor]) -> float | str:
    """Seconds until the other rank has its error; and the error."""
    group = distributed.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT_S))
    started = time.monotonic()
    if distributed.get_rank() > 1:
        return 0.0
    if distributed.get_rank() == 1:
        with pytest.raises(errors.DtypeError) as raised:
            attend(rows(), rows(), rows().double(), group)
        return str(raised.value)
    with pytest.raises(errors.CommunicationError, match=r"on rank 0 of 2 waited for"):
        attend(rows(), rows(), rows(), group)
    return time.monotonic() - started


def die_in_the_backward() -> None:
    x = rows().requires_grad_()
    out = ring_attention(x, x, x, causal=True)
    if distributed.get_rank() == 1:
        os._exit(1)
    what = r"hop 1 of ring attention.* on rank 0 of 2 waited for rank 1"
    with pytest.raises(errors.CommunicationError, match=what):
        out.sum().backward()


@pytest.mark.parametrize("attend", one_of(2, [ring_attention, ulysses_attention]))
def test_an_error_on_one_rank_is_one_on_all(attend: Callable[..., Tensor]) -> None:
    seconds, text, *_ = ranks(4).run(attend_but_one_raises, attend)
    assert TIMEOUT_S <= seconds < 10 * TIMEOUT_S and "float64" in text


def test_a_rank_that_dies_is_noticed(pair: Ranks) -> None:
    (ok, text), (other, _) = pair.outcomes(die_in_the_backward)
    assert ok, text
    assert not other


def messages() -> list[str]:
    """Messages of bad calls, which all ranks see before they talk."""
    x, mesh = rows(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    cube = init_device_mesh("cpu", (2, 2, 1))
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "tp"))
    ends = torch.tensor([0, 3, 8])
    calls: list[Callable[[], Any]] = [
        lambda: context_parallel_attention(x, x, x, mesh, layout="zig-zag"),
        lambda: context_parallel_attention(x, x, x, cube),
        lambda: context_parallel_attention(x, x, x, named),
        lambda: context_parallel_attention(x, x, x, 3),
        lambda: ulysses_attention(x, x, x),
        lambda: ring_attention(x[:, :7], x[:, :7], x[:, :7]),
        lambda: ring_attention(x, x, x, mesh),
        lambda: ring_attention(x, x, x, attn_mask=torch.zeros(8, 8)),
        lambda: ring_attention(x[0], x[0, :4], x[0, :4], cu_seqlens=ends),
        lambda: ring_attention(x[0], x[0], x[0], cu_seqlens=ends),
        lambda: shard_sequence(x[:, :6], mesh),
        lambda: shard_sequence(x, mesh, dim=4),
        lambda: unshard_sequence(x, mesh, layout="none"),
        lambda: shard_sequence(x, mesh, layout="documents"),
        lambda: shard_documents(x[0], torch.tensor([0, 3, 7]), mesh),
        lambda: shard_documents(x[0, :7], torch.tensor([0, 3, 7]), mesh),
        lambda: ring_attention(x, x, x, layout="documents"),
        lambda: ring_attention(x, *[DTensor.from_local(x, mesh)] * 2),
    ]
    found = []
    for call in calls:
        with pytest.raises(errors.Flash4Error) as raised:
            call()
        found.append(f"{type(raised.value).__name__}: {raised.value}")
    return found


EXPECTED = """
ArgumentError: layout is 'zig-zag', but it must be one of contiguous, zigzag, documents; did you mean zigzag?
ArgumentError: mesh is of 3 dimensions, but it must have one or two dimensions: 'ring', 'ulysses' or both
ArgumentError: mesh is ('ring', 'tp'), but its two dimensions must be 'ring' and 'ulysses'
ArgumentError: mesh is int, but it must be a ProcessGroup, a DeviceMesh or None
ShapeError: q is of 2 heads, but its heads must be a multiple of the 4 ranks that divide them
ArgumentError: q's length on this rank is 7, but a zigzag layout has two equal chunks on each rank
ArgumentError: group is a mesh of 2 dimensions, but it must have one
KeywordError: ring_attention has no argument 'attn_mask'; use causal and window, or in
ShapeError: k is (4, 2, 8), but it must have q's length, 8, in packed sequences
RangeError: cu_seqlens is [0, 3, 8], but it must begin with 0 and end with the packed length, 32
ShapeError: x is (1, 6, 2, 8), but its length along dim=1 must be a multiple of
ArgumentError: dim is 4, but x has 4 dimensions
ArgumentError: layout is 'none', but it must be one of contiguous, zigzag
ArgumentError: layout is 'documents', but it depends on the documents' lengths: shard_documents and
RangeError: cu_seqlens is [0, 3, 7], but it must begin with 0 and end with the packed length, 8
ShapeError: x is (7, 2, 8), but its length along dim=0 must be a multiple of the 4 ranks
ArgumentError: layout is 'documents', but it is for packed documents: give cu_seqlens
ArgumentError: k is a DTensor, but it must be this rank's part of the sequence, which to_local() gives
"""


def test_bad_arguments_are_named() -> None:
    for found in ranks(4).run(messages):
        for message, wanted in zip(found, EXPECTED.strip().splitlines(), strict=True):
            assert message.startswith(wanted), message


def test_without_a_process_group() -> None:
    x = rows()
    with pytest.raises(errors.ArgumentError, match=r"call torch.distributed.init_process_group first"):
        flash4_torch.distributed.ring_attention(x, x, x)
