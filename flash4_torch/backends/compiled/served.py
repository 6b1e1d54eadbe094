"""The GPUs that a backend of compiled kernels serves, and why it does not serve others."""

from __future__ import annotations

import importlib.util
from functools import cache

from ... import env
from .targets import Target

_TO_RUN = {"tvm_ffi": "apache-tvm-ffi"}
_TO_COMPILE = {**_TO_RUN, "nvidia_cutlass_dsl": "nvidia-cutlass-dsl"}

INSTALL = "pip install 'flash4_torch[kernels]'"


class OnTargets:
    """A backend that serves the GPUs of its targets.

    on_request: targets that it serves only where FLASH4_BACKEND asks for it.
    """

    def __init__(self, name: str, *targets: Target, on_request: tuple[Target, ...] = ()):
        self.name = name
        self._own = {target.capability: target for target in targets}
        self._targets = {**self._own, **{target.capability: target for target in on_request}}

    def is_made_for(self, capability: tuple[int, int]) -> bool:
        """Whether it has kernels that are made for GPUs of that compute capability."""
        return capability in self._own

    def can_serve(self, capability: tuple[int, int]) -> bool:
        """Whether it has kernels that GPUs of that compute capability can run."""
        return capability in self._targets

    def _any_target(self, capability: tuple[int, int]) -> Target:
        """The target for a GPU, or another one."""
        return self._targets.get(capability) or next(iter(self._targets.values()))

    def _why_not_here(self, capability: tuple[int, int], unasked: bool = False) -> list[str]:
        """The reasons why it serves no call on a GPU of that compute capability, on this machine.

        unasked: whether it serves the call on request, though nobody asks.
        """
        why, can_serve = [], self.can_serve(capability)
        is_asked_for = unasked or env.BACKEND.get() == self.name
        if not (self.is_made_for(capability) or (can_serve and is_asked_for)):
            served = " and ".join(map(str, self._own))
            if can_serve:
                served += f", and this one where {env.BACKEND.name}={self.name} asks for it"
            why.append(f"the GPU's compute capability is {capability}, and it serves {served}")
        return [*why, *why_missing(exported=bool(env.AOT_DIR.get()))]


def why_missing(exported: bool) -> list[str]:
    """The reason why kernels cannot run for want of packages."""
    missing = missing_packages(exported)
    return [f"{' and '.join(missing)} must be installed ({INSTALL})"] if missing else []


@cache
def missing_packages(exported: bool) -> tuple[str, ...]:
    """Required packages that are not installed; exported kernels need no compiler."""
    needed = _TO_RUN if exported else _TO_COMPILE
    return tuple(package for module, package in needed.items() if not importlib.util.find_spec(module))
