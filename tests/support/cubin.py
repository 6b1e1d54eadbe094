"""Properties of a kernel's SASS, read from a compiled file without a disassembler."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CUDA = 190
"""ELF's machine number of CUDA."""
_FRAME_SIZE, _REGISTER_COUNT = 0x11, 0x2F
"""Kinds of `.nv.info` entries: a kernel's symbol and the bytes of its stack, or its registers."""
_SIZED = 4
"""Format of an entry that states its own length."""
_INSTRUCTION = struct.Struct("<QQ")
# The lowest 12 bits of an instruction; bits 9 to 11 of them tell where its operands are.
_STORE_LOCAL, _LOAD_LOCAL = 0x387, 0x983
_WGMMA = 0x1F0
_KINDS = {
    **{"UTCHMMA": 0x1EA, "UTCBAR": 0x1E9, "UTCATOMSWS": 0x1E3, "LDTM": 0x1EE, "STTM": 0x1ED},
    **{"UTMALDG": 0x1B4, "UTMASTG": 0x1B5, "UBLKRED": 0x1BB},
    **{"FFMA2": 0x049, "FADD2": 0x04B, "FMUL2": 0x04A},
}
"""The lowest 9 bits of Blackwell's instructions, as nvdisasm names them: MMA, commit, allocation, load and
store of TMEM; TMA copies by tensor maps and bulk reductions; arithmetic on pairs."""
_SET_REGISTERS = 0x1C8
_UNSIGNALLED = 7
"""Value in the place of a scoreboard's number where there is none."""
_LOAD_SHARED, _LOAD_MATRIX, _FENCE_PROXY, _ARRIVE = 0x184, 0x03B, 0x1C6, 0x9A7
"""LDS, LDSM and FENCE.VIEW.ASYNC by their lowest 9 bits, SYNCS.ARRIVE by its lowest 12."""
_NEVER = 0xF
"""The predicate of what is never done, such as loads that fill a gap."""


_ABI, _LAST_ABI_OF_LOW_BYTE = 8, 7
"""Place of the ELF ABI's version, and the last one whose flags begin with the architecture's number."""


class Code(NamedTuple):
    """Properties of one kernel's SASS that tell how good it is."""

    stack: int
    """Bytes of a thread's stack."""
    spills: int
    """Instructions that store to or load from it."""
    wgmmas: int
    signalled: int
    """wgmmas that are waited for individually; all of them where ptxas serialises them."""
    kinds: dict[str, int]
    """Counts of Blackwell's instructions, by nvdisasm's names."""
    budgets: set[int]
    """Registers per thread that roles shrink to or ask for."""
    registers: int
    """Registers per thread at launch, of the kernel that has the most."""
    early_arrivals: int
    """Arrivals at barriers of shared memory while loads from it are in flight."""


def read(file: Path) -> list[Code]:
    """The code of each cubin in a compiled file, of one kernel or of several that are launched together."""
    return [_code(cubin) for cubin in _cubins(file.read_bytes())]


def compute_capability(file: Path) -> tuple[int, int]:
    """The compute capability that a compiled file's kernels are for."""
    cubin = next(_cubins(file.read_bytes()))
    (flags,) = struct.unpack_from("<I", cubin, 48)
    number = flags & 0xFF if cubin[_ABI] <= _LAST_ABI_OF_LOW_BYTE else flags >> 8 & 0xFF
    return divmod(number, 10)


def _cubins(data: bytes) -> Iterator[bytes]:
    """The ELF files for GPUs inside of `data`, each up to the end of its section headers."""
    at = data.find(b"\x7fELF\x02")
    while at >= 0:
        (machine,) = struct.unpack_from("<H", data, at + 18)
        if machine == _CUDA:
            yield data[at:]
        at = data.find(b"\x7fELF\x02", at + 1)


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    count, of_names = struct.unpack_from("<HH", cubin, 60)
    found = [struct.unpack_from("<IIQQQQ", cubin, headers + 64 * i) for i in range(count)]
    names = found[of_names][4]
    for name, _, _, _, start, size in found:
        first = names + name
        yield cubin[first : cubin.index(b"\0", first)].decode(), cubin[start : start + size]


def _code(cubin: bytes) -> Code:
    sections = dict(_sections(cubin))
    texts = [content for name, content in sections.items() if name.startswith(".text.")]
    instructions = [x for text in texts for x in _INSTRUCTION.iter_unpack(text)]
    wgmmas = [high for low, high in instructions if low & 0x1FF == _WGMMA]
    found = Counter(low & 0x1FF for low, _ in instructions)
    return Code(
        stack=sum(_numbers(_FRAME_SIZE, sections[".nv.info"])),
        spills=sum(low & 0xFFF in (_STORE_LOCAL, _LOAD_LOCAL) for low, _ in instructions),
        wgmmas=len(wgmmas),
        signalled=sum(high >> 20 & 7 != _UNSIGNALLED for high in wgmmas),
        kinds={name: found[low] for name, low in _KINDS.items()},
        budgets={low >> 32 & 0xFF for low, _ in instructions if low & 0x1FF == _SET_REGISTERS},
        registers=max(_numbers(_REGISTER_COUNT, sections[".nv.info"]), default=0),
        early_arrivals=sum(map(_early_arrivals, texts)),
    )


def _early_arrivals(text: bytes) -> int:
    """Arrivals that overtake loads from shared memory, which return in order, as the code lies in memory.

    A load signals a scoreboard when it has returned, or leaves that to a later one; an instruction waits for
    the scoreboards of its mask. A proxy fence waits for all.
    """
    in_flight: list[int] = []
    found = 0
    for low, high in _INSTRUCTION.iter_unpack(text):
        scoreboard, awaited = high >> 46 & 7, high >> 52 & 0x3F
        returned = [i for i, own in enumerate(in_flight) if own != _UNSIGNALLED and awaited >> own & 1]
        in_flight = in_flight[returned[-1] + 1 :] if returned else in_flight
        if low & 0x1FF in (_LOAD_SHARED, _LOAD_MATRIX) and low >> 12 & 0xF != _NEVER:
            in_flight.append(scoreboard)
        elif low & 0x1FF == _FENCE_PROXY:
            in_flight = []
        elif low & 0xFFF == _ARRIVE:
            found += bool(in_flight)
    return found


def _numbers(wanted: int, info: bytes) -> Iterator[int]:
    """The numbers in entries of the wanted kind, one for each kernel."""
    at = 0
    while at < len(info):
        form, kind, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            if kind == wanted:
                yield struct.unpack_from("<II", info, at)[1]
            at += value
