"""The README's table of features by backend, generated from the backends' own answers.

python -m flash4_torch.support_table
"""

from __future__ import annotations

from typing import Any

import torch

from . import backends
from .masks import Band
from .problem import Extent, Problem, Spec

# The device that each backend serves; a GPU is only described, not needed. The emulator serves only when
# FLASH4_BACKEND asks for it and is left out.
_DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    "sm90": {"device": "cuda", "capability": (9, 0)},
    "sm100": {"device": "cuda", "capability": (10, 0)},
    "sdpa": {"device": "cuda", "capability": (9, 0)},
    "sm80": {"device": "cuda", "capability": (8, 0)},
    "efficient": {"device": "cuda", "capability": (9, 0)},
    "tiled": {"device": "cpu"},
}

_PLAIN = Problem(
    Spec(
        device="cpu",
        dtype=torch.bfloat16,
        D=64,
        Dv=64,
        group=1,
        varlen=False,
        left=False,
        right=False,
        softcap=False,
        mask="",
        dropout=False,
        deterministic=False,
    ),
    Extent(B=2, Sq=512, Sk=512, Hq=8, Hk=8),
    scale=0.125,
    band=Band(),
    softcap=0.0,
    dropout_p=0.0,
)

_MORE_KEYS = _PLAIN.extent._replace(Sk=1024)
_CAUSAL = {"right": True, "band": Band(None, 0)}

# feature: the fields of Spec and Problem that it changes
FEATURES: dict[str, dict[str, Any]] = {
    "full attention": {},
    "causal, Sq = Sk": _CAUSAL,
    "causal, Sq ≠ Sk": {**_CAUSAL, "extent": _MORE_KEYS},
    "Sq ≠ Sk": {"extent": _MORE_KEYS},
    "empty batch or sequence": {"extent": _PLAIN.extent._replace(Sk=0)},
    "sliding window": {"left": True, "right": True, "band": Band(128, 0)},
    "softcap": {"softcap": 30.0},
    "attn_mask, bool": {"mask": "bool:.11."},
    "attn_mask, float32": {"mask": "float32:.11."},
    "attn_mask, in q's dtype": {"mask": "bfloat16:.11."},
    "gradient of a float32 attn_mask": {"mask": "float32:1...", "dmask": True},
    "gradient of one in q's dtype": {"mask": "bfloat16:1...", "dmask": True},
    "sinks": {"sinks": "bfloat16"},
    "dropout": {"dropout": True, "dropout_p": 0.1},
    "gradient of lse": {"dlse": True},
    "GQA, MQA": {"group": 4, "extent": _PLAIN.extent._replace(Hk=2)},
    "varlen (packed sequences)": {"varlen": True},
    "float16": {"dtype": torch.float16},
    "float32": {"dtype": torch.float32},
    "float64": {"dtype": torch.float64},
    "D not a multiple of 8": {"D": 60, "Dv": 60},
    "D ≠ Dv": {"Dv": 128},
    "D > 256": {"D": 320, "Dv": 320},
    "attention weights (`need_weights`)": {"weights": True},
    "deterministic gradients": {"deterministic": True},
}


def served(feature: str, backend: str) -> str:
    """'yes', 'forward' if only the forward is served, or 'no'."""
    problem = _problem({**_DEVICES[backend], **FEATURES[feature]})
    forward = problem.spec._replace(dlse=False, dmask=False)
    backward = problem.spec._replace(backward=True)
    # The backend's own answer: the table does not depend on FLASH4_BACKEND.
    why_not = next(b.why_not for b in backends.PRIORITY if b.name == backend)
    if why_not(problem._replace(spec=forward)):
        return "no"
    return "forward" if why_not(problem._replace(spec=backward)) else "yes"


def _problem(changes: dict[str, Any]) -> Problem:
    call = {name: value for name, value in changes.items() if name in Problem._fields}
    spec = {name: value for name, value in changes.items() if name in Spec._fields and name not in call}
    spec["softcap"] = "softcap" in changes
    return _PLAIN._replace(spec=_PLAIN.spec._replace(**spec), **call)


def markdown() -> str:
    """The table as markdown: one row per feature, one column per backend in order of priority."""
    names = [backend.name for backend in backends.PRIORITY if backend.name in _DEVICES]
    rows = [["feature", *names], ["---"] * (len(names) + 1)]
    rows += [[feature, *(served(feature, name) for name in names)] for feature in FEATURES]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(markdown())
