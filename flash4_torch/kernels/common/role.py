"""Roles of warps, with the pipelines that each produces and consumes.

    @role(produces=("s_p", "o"), consumes=("tile", "load_q", "load_kv", "s_p", "late"))
    @cute.jit
    def mma(ctx: Context) -> None:

A role sees no other pipeline of the context: a kernel whose role uses one that it does not name fails to
compile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

from .ring import Ring

AnyContext = TypeVar("AnyContext")


def role(
    *, produces: tuple[str, ...] = (), consumes: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a function the context with these pipelines only.

    Pipelines are the rings of the context, and the barriers of its `signals`.
    """
    names = frozenset(produces + consumes)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(ctx: Any, *args: Any) -> None:
            function(with_pipelines(ctx, names), *args)

        return run

    return decorate


def with_pipelines(ctx: AnyContext, names: frozenset[str]) -> AnyContext:
    """The context without the pipelines that `names` leaves out.

    Raises:
        ValueError: the context has no pipeline of that name.
    """
    known = {field.name for field in fields(ctx)}
    rings = {name for name in known if isinstance(getattr(ctx, name), Ring)}
    kept: dict[str, Any] = dict.fromkeys(rings - names)
    signals = getattr(ctx, "signals", None)
    if signals is not None:
        known |= set(signals._fields)
        kept["signals"] = signals._replace(**{name: None for name in signals._fields if name not in names})
    if names - known:
        raise ValueError(f"the context has no pipeline {', '.join(sorted(names - known))}")
    return replace(ctx, **kept)
