"""The instruction set extensions of this machine's CPU: what is compiled for it runs only where they are."""

from __future__ import annotations

import functools
import platform
import re

_DESCRIPTION = "/proc/cpuinfo"

# Those that compilers use of their own accord. The other flags come and go with the operating system, its
# settings and the hypervisor, or name instructions that only those use who ask for them. AMD's sse4a is left
# out: compilers use it for shuffles of bytes at most, which launches have none of, and with it no CPU of
# Intel's could run what was compiled on AMD's.
_X86 = re.compile(
    r"pni|ssse3|sse4_[12]|popcnt|cx16|lahf_lm|movbe|abm|adx|bmi[12]|tbm|f16c|fma4?|xop|rao_int|cmpccxadd|gfni"
    r"|v?aes|v?pclmulqdq|sha\w*|sm[34]|avx\w*|amx\w*|apx\w*"
)
_NO_INSTRUCTIONS_OF_ARM = {"evtstrm", "cpuid"}


@functools.cache
def extensions() -> tuple[str, ...]:
    """Their names as Linux has them, sorted: "avx2" or "sve". Elsewhere the name of the processor alone."""
    name, _, flags = _flags_of_the_first_core().partition(":")
    found = set(flags.split())
    if name.strip() == "flags":
        found = set(filter(_X86.fullmatch, found))
    return tuple(sorted(found - _NO_INSTRUCTIONS_OF_ARM)) or (platform.processor() or platform.machine(),)


def _flags_of_the_first_core() -> str:
    """Nothing behind them is read: it takes long to write where there are hundreds of cores."""
    try:
        with open(_DESCRIPTION) as lines:
            return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""
