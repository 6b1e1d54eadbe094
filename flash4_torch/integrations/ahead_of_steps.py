"""Kernels of a server's steps, compiled when its engine starts."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from ..ahead import Step, warmup_steps
from ..errors import Flash4Error


def prepare(steps: Iterable[Step], device: torch.device) -> None:
    """Compiles and loads what the steps may need, on a GPU; elsewhere they are not even described.

    Where this fails it logs why, and a step compiles what it needs, or says what is wrong with it.
    """
    if device.type != "cuda":
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        warmup_steps(list(steps), index)
    except Flash4Error as error:
        logging.getLogger(__name__).warning("kernels are compiled when a step needs them: %s", error)
