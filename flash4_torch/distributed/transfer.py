"""Messages between the ranks of a group: posted without waiting, and errors that say who waited for whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CommunicationError
from .groups import Axis, group_of

_connected: WeakSet[dist.ProcessGroup] = WeakSet()
"""Groups whose ranks have met. Names may come again after their group was destroyed, and so may ids."""


class Message(NamedTuple):
    """A contiguous tensor, and the rank in the group that it goes to or comes from."""

    tensor: Tensor
    peer: int


class Transfer:
    """Messages under way. Their tensors belong to the transfer until `wait` returns."""

    def __init__(self, axis: Axis, sends: list[Message], receives: list[Message], what: str):
        self._axis, self._what = axis, what
        self._peers = sorted({message.peer for message in (*sends, *receives)})
        self._sent = sends
        group = group_of(axis)
        operations = [
            *(dist.P2POp(dist.isend, x, group=group, group_peer=peer) for x, peer in sends if x.numel()),
            *(dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for x, peer in receives if x.numel()),
        ]
        with naming(axis, what, self._peers):
            self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Returns when the messages are here; on a GPU the current stream waits, not the host.

        Raises:
            CommunicationError: a peer failed, or did not answer within the group's timeout.
        """
        with naming(self._axis, self._what, self._peers):
            for work in self._works:
                work.wait()
        self._works, self._sent = [], []


def connect(axis: Axis, device: torch.device) -> None:
    """Brings all ranks of a group together once: messages between some of them cannot be NCCL's first."""
    if device.type != "cuda":
        return
    group = group_of(axis)
    if group in _connected:
        return
    with naming(axis, "the first call", None):
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    _connected.add(group)


def collective(axis: Axis, what: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    """A collective of torch.distributed over the group of an axis."""
    with naming(axis, what, None):
        function(*arguments, **keywords, group=group_of(axis))


@contextmanager
def naming(axis: Axis, what: str, peers: list[int] | None) -> Iterator[None]:
    """Makes torch.distributed's error one that says what was waited for, and for whom; None is everybody."""
    try:
        yield
    except RuntimeError as error:
        if peers is None or len(peers) > 1:
            whom = f"ranks {', '.join(map(str, peers))}" if peers else "the others"
        else:
            whom = f"rank {peers[0]}"
        raise CommunicationError(what, f"{axis.rank} of {axis.size}", whom, str(error)) from error
