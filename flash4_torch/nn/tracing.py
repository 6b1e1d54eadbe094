"""torch.fx support: tracing records one call of the module, as it does for torch's own modules."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from ..errors import ArgumentError
from .contract import Call


def record(module: nn.Module, call: Call) -> Any:
    """Records a call_module of `module` in the traced graph, if the tracer has not made it a leaf.

    Tracers treat modules defined in torch.nn as leaves, and trace into all others.

    Raises:
        ArgumentError: the graph cannot have that call.
    """
    name, proxy = next((name, x) for name, x in call._asdict().items() if isinstance(x, fx.Proxy))
    tracer = proxy.tracer
    if not isinstance(tracer, fx.Tracer) or tracer.root is module:
        raise ArgumentError(name, "a torch.fx.Proxy", "only a model that holds this module can be traced")
    if module._forward_hooks or module._forward_pre_hooks:
        raise ArgumentError(
            name,
            "a torch.fx.Proxy",
            "this module has forward hooks, which would run twice: give the tracer "
            "flash4_torch.MultiheadAttention as a leaf module",
        )
    return tracer.create_proxy("call_module", tracer.path_of_module(module), *_as_written(call))


def _as_written(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments, and the keywords that differ from the defaults."""
    defaults = Call(call.query, call.key, call.value)
    changed = {
        name: given
        for name, given in call._asdict().items()
        if isinstance(given, fx.Proxy) or given is not getattr(defaults, name)
    }
    inputs = ("query", "key", "value")
    return tuple(call[:3]), {name: given for name, given in changed.items() if name not in inputs}
