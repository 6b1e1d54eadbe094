"""The instruction set extensions of this machine's CPU; code compiled for it runs only on CPUs with them."""

from __future__ import annotations

import functools
import platform
import re

_DESCRIPTION = "/proc/cpuinfo"

# Extensions that compilers use on their own. The other flags depend on the operating system, its settings
# and the hypervisor, or name instructions that are only used on request. AMD's sse4a is left out: compilers
# use it for byte shuffles at most, which launch code does not have, and with it no Intel CPU could run code
# that was compiled on an AMD CPU.
_X86 = re.compile(
    r"pni|ssse3|sse4_[12]|popcnt|cx16|lahf_lm|movbe|abm|adx|bmi[12]|tbm|f16c|fma4?|xop|rao_int|cmpccxadd|gfni"
    r"|v?aes|v?pclmulqdq|sha\w*|sm[34]|avx\w*|amx\w*|apx\w*"
)
_NO_INSTRUCTIONS_OF_ARM = {"evtstrm", "cpuid"}


@functools.cache
def extensions() -> tuple[str, ...]:
    """Linux's names of the extensions ("avx2", "sve"), sorted; elsewhere only the processor's name."""
    name, _, flags = _flags_of_the_first_core().partition(":")
    found = set(flags.split())
    if name.strip() == "flags":
        found = set(filter(_X86.fullmatch, found))
    return tuple(sorted(found - _NO_INSTRUCTIONS_OF_ARM)) or (platform.processor() or platform.machine(),)


def _flags_of_the_first_core() -> str:
    """The first core's flags; nothing after them is read, as the file is slow with hundreds of cores."""
    try:
        with open(_DESCRIPTION) as lines:
            return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""
