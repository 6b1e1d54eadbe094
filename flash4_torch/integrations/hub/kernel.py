"""flash4_torch's attention, with flash-attn's functions, as a kernel of the Hugging Face Hub."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("flash4_torch") is None:
    # The package lies beside this file where it is a kernel.
    sys.path.append(str(Path(__file__).parent))

from flash4_torch.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
