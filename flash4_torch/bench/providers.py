"""The contenders: ours, FlashAttention-3 and -4 if installed, torch's SDPA. To add one, add a row."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import api, env, info
from ..errors import BackendError
from .cases import Cell
from .timing import Call

Forward = Callable[[Tensor, Tensor, Tensor, Cell], tuple[Tensor, Tensor | None]]
"""(q, k, v, cell) -> (out, lse); lse is None where only autograd has it."""

Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Cell], tuple[Tensor, ...]]
"""(dout, q, k, v, out, lse, cell) -> (dq, dk, dv)."""


@dataclass(frozen=True)
class Provider:
    """Attention on (B, S, H, D); without its own `backward` it goes through autograd."""

    forward: Forward
    backward: Backward | None = None

    def prepare(self, cell: Cell, direction: str, inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> Call:
        """The call to time on (q, k, v, dout); it returns out or the gradients, as a tuple."""
        q, k, v, dout = inputs
        if direction == "forward":
            return lambda: self.forward(q, k, v, cell)[:1]
        if self.backward is None:
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            recorded = self.forward(q, k, v, cell)[0]
            return lambda: torch.autograd.grad(recorded, (q, k, v), dout, retain_graph=True)
        out, lse = self.forward(q, k, v, cell)
        return partial(self.backward, dout, q, k, v, out, lse, cell)


def flash4() -> Provider:
    def forward(q: Tensor, k: Tensor, v: Tensor, cell: Cell) -> tuple[Tensor, None]:
        return api.attention(q, k, v, causal=cell.causal, window=(cell.window, None)), None

    return Provider(forward)


def sdpa() -> Provider:
    """torch's SDPA, with torch's own choice among its backends."""

    def forward(q: Tensor, k: Tensor, v: Tensor, cell: Cell) -> tuple[Tensor, None]:
        if cell.window is not None:
            raise NotImplementedError("SDPA has no window")
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=cell.causal, enable_gqa=cell.Hq != cell.Hk)
        return out.transpose(1, 2), None

    return Provider(forward)


def sdpa_by(backend: SDPBackend) -> Provider:
    chosen = sdpa()

    def forward(q: Tensor, k: Tensor, v: Tensor, cell: Cell) -> tuple[Tensor, Tensor | None]:
        with sdpa_kernel(backend):
            return chosen.forward(q, k, v, cell)

    return Provider(forward)


def fa3() -> Provider:
    """FlashAttention-3: the library that FLASH4_BENCH_FA3 names, else the package flash_attn_interface."""
    library = env.BENCH_FA3.get()
    if library:
        torch.ops.load_library(library)
    else:
        importlib.import_module("flash_attn_interface")
    fa3 = torch.ops.flash_attn_3

    def rules(cell: Cell) -> dict[str, object]:
        left = -1 if cell.window is None else cell.window
        return {"softmax_scale": cell.D**-0.5, "is_causal": cell.causal, "window_size_left": left}

    def forward(q: Tensor, k: Tensor, v: Tensor, cell: Cell) -> tuple[Tensor, Tensor]:
        out, lse, *_ = fa3.fwd(q, k, v, num_splits=1, **rules(cell))
        return out, lse

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, cell: Cell
    ) -> tuple[Tensor, ...]:
        grads = tuple(torch.empty_like(x) for x in (q, k, v))
        fa3.bwd(dout, q, k, v, out, lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True)), **rules(cell))
        return grads

    return Provider(forward, backward)


def has_fa4() -> bool:
    """Whether flash-attn-4 is installed."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:  # flash_attn is not there, or another one that cannot be loaded
        return False


def fa4() -> Provider:
    """FlashAttention-4's own kernels, below its autograd function."""
    interface = importlib.import_module("flash_attn.cute.interface")

    def rules(cell: Cell) -> dict[str, object]:
        return {"causal": cell.causal, "window_size_left": cell.window}

    def forward(q: Tensor, k: Tensor, v: Tensor, cell: Cell) -> tuple[Tensor, Tensor]:
        out, lse, *_ = interface._flash_attn_fwd(q, k, v, return_lse=True, **rules(cell))
        return out, lse

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, cell: Cell
    ) -> tuple[Tensor, ...]:
        return tuple(interface._flash_attn_bwd(q, k, v, out, dout, lse, **rules(cell))[:3])

    return Provider(forward, backward)


OURS = "flash4"
ON_CPU: dict[str, Callable[[], Provider]] = {OURS: flash4, "sdpa": sdpa}
ON_GPU: dict[str, Callable[[], Provider]] = {
    OURS: flash4,
    "fa3": fa3,
    "fa4": fa4,
    "cudnn": lambda: sdpa_by(SDPBackend.CUDNN_ATTENTION),
    "sdpa flash": lambda: sdpa_by(SDPBackend.FLASH_ATTENTION),
    "sdpa efficient": lambda: sdpa_by(SDPBackend.EFFICIENT_ATTENTION),
}


def available(device: str) -> tuple[dict[str, Provider], dict[str, str]]:
    """The providers of a device by name, and the reasons for those that could not be loaded."""
    providers, missing = {}, {}
    for name, load in (ON_GPU if device.startswith("cuda") else ON_CPU).items():
        try:
            providers[name] = load()
        except (ImportError, OSError, AttributeError) as error:
            missing[name] = sentence(error)
    return providers, missing


def sentence(error: Exception) -> str:
    """An error in one line of limited length."""
    if isinstance(error, BackendError):
        return "; ".join(f"{name}: {why}" for name, reasons in error.reasons.items() for why in reasons)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"


def versions() -> dict[str, str]:
    """Versions of the peers by name."""
    library = Path(env.BENCH_FA3.get())
    return {
        "cuDNN": str(torch.backends.cudnn.version() if torch.cuda.is_available() else "none"),
        "flash-attn-4": info.installed("flash-attn-4"),
        "FlashInfer": info.installed("flashinfer-python"),
        # Only the last two parts: the rest of the path concerns this machine alone.
        "FlashAttention-3": "/".join(library.parts[-2:]) or info.installed("flash_attn_3"),
    }
