"""Counters from which the CTAs of a launch claim work indices.

A kernel finds its counter at 0 and leaves it at 0; launches that may overlap need different counters.
Launches on one stream do not overlap, so they share a counter. A captured launch may be replayed concurrently
with others on any stream, except those that the same stream captured in the same capture. These share
counters of a reserve that no other launch ever gets. Where the reserve is used up, or a device has none yet,
a captured launch has counters of its own in the graph's memory, which the graph sets to 0 before the launch.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from .. import forks

_STREAMS = 256
"""Counters allocated together; torch itself has 65 streams a device."""
_APART = 32
"""Words from one counter to the next, so that no two share a cache sector."""

_RESERVE = 1 << 18
"""Words that a device's reserve for captures has at first, and again when an eager call finds it short."""
_MOST_CAPTURES = 64
"""Captures whose counters are known; a launch of one that is forgotten gets others."""

DEFAULT_STREAM = 0
"""The only stream that CUDA cannot capture."""

_Key = TypeVar("_Key", bound=tuple[int, ...])

_of_stream: dict[tuple[int, int], Tensor] = {}
_many_of_stream: dict[tuple[int, int, int], Tensor] = {}
_unused: dict[int, list[Tensor]] = {}
_reserves: dict[int, Tensor] = {}
_of_capture: dict[tuple[int, int], Tensor] = {}
_retired: list[Tensor] = []
"""Counters that streams had before: launches under way may use them."""
_giving_out = forks.Lock()


def counter(index: int) -> Tensor:
    """The counter, int32 (1,) on CUDA device `index`, for a launch on its current stream."""
    stream = current_stream(index)
    if stream != DEFAULT_STREAM and is_capturing(index):
        return _of_captured(index, stream, 1)
    key = index, stream
    found = _of_stream.get(key)
    return _give_out(key) if found is None else found


def counters(index: int, number: int) -> Tensor:
    """`number` counters or more, int32, for a launch on the current stream of CUDA device `index`."""
    stream, bits = current_stream(index), (number - 1).bit_length()
    if stream != DEFAULT_STREAM and is_capturing(index):
        return _of_captured(index, stream, 1 << bits)
    key = index, stream, bits
    found = _many_of_stream.get(key)
    if found is None:
        with _giving_out.held():
            if key not in _many_of_stream:
                # Fewer ones stay where they are: launches under way may use them.
                _many_of_stream[key] = fresh(index, 1 << bits)
                _fill_reserve(index)
            found = _many_of_stream[key]
    return found


def _give_out(key: tuple[int, int]) -> Tensor:
    with _giving_out.held():
        if key not in _of_stream:
            if not _unused.get(key[0]):
                _unused[key[0]] = _block(key[0])
            _of_stream[key] = _unused[key[0]].pop()
            _fill_reserve(key[0])
        return _of_stream[key]


def _of_captured(index: int, stream: int, number: int) -> Tensor:
    """Counters for a launch that `stream` captures."""
    key = capture_of(stream), stream
    found = _of_capture.get(key)
    if found is not None and len(found) >= number:
        return found[:number]
    with _giving_out.held():
        reserve = _reserves.get(index)
        words = -(-number // _APART) * _APART
        if reserve is None or len(reserve) < words:
            found = None
        else:
            found, _reserves[index] = reserve[:words], reserve[words:]
            if len(_of_capture) >= _MOST_CAPTURES:
                _of_capture.pop(next(iter(_of_capture)))
            _of_capture[key] = found
        if reserve is None or len(_reserves[index]) < _RESERVE // 2:
            # The next eager call on each stream gets its counter anew, and fills the reserve.
            _retire(_of_stream, index)
            _retire(_many_of_stream, index)
    return _zeros(index, number) if found is None else found[:number]


def _retire(streams: dict[_Key, Tensor], index: int) -> None:
    own = [key for key in streams if key[0] == index]
    _retired.extend(streams.pop(key) for key in own)


def _fill_reserve(index: int) -> None:
    """Renews a reserve that is short; what is left of it is given up."""
    if index not in _reserves or len(_reserves[index]) < _RESERVE // 2:
        _reserves[index] = fresh(index, _RESERVE)


def _block(index: int) -> list[Tensor]:
    words = fresh(index, _STREAMS * _APART)
    return [words[i : i + 1] for i in range(0, len(words), _APART)]


def fresh(index: int, number: int) -> Tensor:
    """Fresh words, which every stream sees as 0.

    While torch.compile prepares a CUDA graph, this thread's allocations come from the graph's memory, where
    nothing may stay; another thread's allocations do not.
    """
    with ThreadPoolExecutor(max_workers=1) as other_thread:
        return other_thread.submit(_zeros, index, number, wait=True).result()


def _zeros(index: int, n: int, wait: bool = False) -> Tensor:
    words = torch.zeros(n, dtype=torch.int32, device=torch.device("cuda", index))
    if wait:
        torch.cuda.current_stream(index).synchronize()
    return words


def current_device() -> int:
    """The index of this thread's CUDA device."""
    return torch._C._cuda_getDevice()


def current_stream(index: int) -> int:
    """The handle of the current stream of device `index`."""
    return torch._C._cuda_getCurrentRawStream(index)


def capture_of(stream: int) -> int:
    """The number of the capture that the stream is in, which no other capture of the process has."""
    import cuda.bindings.driver as cuda

    error, _, number, *_ = cuda.cuStreamGetCaptureInfo(stream)
    if error != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuStreamGetCaptureInfo failed: {error}")
    return int(number)


def is_capturing(index: int) -> bool:
    """Whether the current stream of device `index`, which may be another device, is being captured."""
    if index == current_device():
        return torch._C._cuda_isCurrentStreamCapturing()
    with torch.cuda.device(index):
        return torch._C._cuda_isCurrentStreamCapturing()
