"""Modules whose attention spans ranks: a whole model is told once, and its layers keep it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from ..errors import ArgumentError
from ..nn import MultiheadAttention
from .attention import attention_of_ranks
from .groups import Ranks, ranks_of
from .layout import Layout, check_layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

ATTRIBUTE = "flash4_context_parallel"
"""The attribute of a module that holds its `ContextParallel`."""


class ContextParallel(NamedTuple):
    """The ranks that share a module's sequences. Layers call it in place of attention on whole ones."""

    ranks: Ranks
    layout: Layout

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor | None = None, **options: Any
    ) -> Tensor:
        """`context_parallel_attention` over these ranks; `options` are its own."""
        out: Tensor = attention_of_ranks(q, k, v, self.ranks, self.layout, cu_seqlens, **options)
        return out


def parallelize_attention(
    model: nn.Module,
    mesh: DeviceMesh | ProcessGroup | None = None,
    *,
    layout: Layout = "zigzag",
) -> list[str]:
    """Tells a model's attention that sequences are shared by ranks, for this and every later forward.

    The model's inputs are then this rank's parts of them, as `shard_sequence` makes them: token ids, labels,
    and positions. Everything but attention works on tokens one by one, and need not know. Parameters have the
    gradients of this rank's tokens: sum or average them over the ranks, as DistributedDataParallel and FSDP
    over a mesh that holds these ranks do.

    Args:
        model: has `flash4_torch.MultiheadAttention` modules, or is a model of transformers with our
            implementation of attention. Its modules stay the same objects.
        mesh, layout: as in `context_parallel_attention`.

    Returns:
        The names of the attention modules.

    Raises:
        ArgumentError: the model has no such attention, or some that would not know of other ranks.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", type(model).__name__, "it must be a torch.nn.Module")
    context = ContextParallel(ranks_of(mesh), check_layout(layout))
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and not isinstance(module, MultiheadAttention):
            limit = "it would attend to this rank's tokens alone: call replace_attention first"
            raise ArgumentError(f"model's {name or 'own class'}", type(module).__name__, limit)
        if isinstance(module, MultiheadAttention) or _is_of_transformers(name, module):
            found.append((name, module))
    if not found:
        limit = "it must have flash4_torch.MultiheadAttention modules, or be a transformers model with ours"
        raise ArgumentError("model", type(model).__name__, limit)
    for _, module in found:
        setattr(module, ATTRIBUTE, context)
    return [name for name, _ in found]


def context_parallel_style(layout: Layout = "zigzag") -> ParallelStyle:
    """`parallelize_attention` as a style for torch's `parallelize_module`, beside its other ones.

    Args:
        layout: as in `context_parallel_attention`. The mesh is that of `parallelize_module`.

    Returns:
        A style of modules that are, or contain, `flash4_torch.MultiheadAttention` or a Hugging Face model's
        attention of ours. Their inputs are this rank's parts of sequences.

    Raises:
        ArgumentError: there is no such layout; from `parallelize_module`: the module has no such attention.
    """
    # Importing it takes most of a second.
    from torch.distributed.tensor.parallel import ParallelStyle

    check_layout(layout)

    class ContextParallelStyle(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            parallelize_attention(module, device_mesh, layout=layout)
            return module

    return ContextParallelStyle()


def _is_of_transformers(name: str, module: nn.Module) -> bool:
    """Whether it is an attention layer of transformers that calls ours.

    Raises:
        ArgumentError: it is one that calls another.
    """
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if implementation is None or "transformers" not in sys.modules or not _is_layer(module):
        return False
    from ..integrations import transformers as ours

    if implementation not in ours.names():
        limit = f"it must be ours, such as {ours.NAME!r}: any other attends to this rank's tokens alone"
        raise ArgumentError(f"attn_implementation of model's {name}", repr(implementation), limit)
    return True


def _is_layer(module: nn.Module) -> bool:
    """Whether a module of transformers computes attention: those have a scale or are called so."""
    return hasattr(module, "is_causal") or type(module).__name__.endswith("Attention")
