"""What `warmup` and `export` must refuse in Python, before they compile anything."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import flash4_torch
from flash4_torch import ahead
from flash4_torch.errors import ArgumentError, ExportError, RangeError

from . import Case

# keyword: (value, words of the error), with an ArgumentError or a RangeError, which is one.
BAD: dict[str, list[tuple[Any, str]]] = {
    "arch": [
        *(
            (value, "must be one of sm_80, sm_86, sm_87, sm_89, sm_90a")
            for value in ("sm_75", "", "SM_90A", "sm_90", 90)
        ),
        *(
            (value, "must be one of sm_80, sm_86, sm_87, sm_89, sm_90a")
            for value in (b"sm_90a", ["sm_90a"], {}, 9.0, True)
        ),
    ],
    "head_dims": [
        *(
            (value, "head_dims is ")
            for value in (64, None, "64", b"64", 64.0, {64: 128}, iter([64]), torch.tensor(64))
        ),
        *(
            ([value], "each must be an int")
            for value in ("64", None, 64.0, True, [64, 64], b"64", np.float64(64))
        ),
        *(([value], "each must be D or a pair (D, Dv)") for value in ((64,), (64, 64, 64), ())),
        *(
            ([value], "each must be an int, or a pair")
            for value in (("64", 64), (64, None), (64, 64.0), (64, (64,)))
        ),
        *(
            ([value], "a multiple of 8 up to 512")
            for value in (0, -8, 4, 60, 520, 1 << 40, (64, 520), (0, 64))
        ),
        *((value, "at least one element") for value in ([], (), set())),
        ([64, "128"], "head_dims is '128'"),
    ],
    "dtypes": [
        *((value, "dtypes is ") for value in (None, "float16", torch.float16, 16, b"float16")),
        *(
            ([value], "one of bfloat16, float16")
            for value in ("float64", "half", "", None, 16, torch.bfloat16, ["x"])
        ),
        (["bfloat"], "did you mean bfloat16?"),
        (["BFLOAT16"], "did you mean bfloat16?"),
        ([], "at least one element"),
    ],
    "features": [
        *((value, "features is ") for value in (None, "causal", 1, True, b"causal")),
        *(([value], "each must be a str") for value in (1, None, b"causal", ("causal",), True)),
        *(
            ([value], "each must be one of plain, causal")
            for value in ("", "+", "causal+", "+causal", "causal,mask")
        ),
        *(
            ([value], "each must be one of plain, causal")
            for value in ("causal dropout", "nope", "gqa", "\0")
        ),
        (["casual"], "did you mean causal?"),
        (["causal+drop_out"], "did you mean dropout?"),
        (["Causal"], "did you mean causal?"),
        (["float_mask"], "did you mean float-mask?"),
        *(([value], "a call has one mask") for value in ("mask+float-mask", "float-mask+causal+mask")),
        ([], "at least one element"),
    ],
    "groups": [
        *((value, "groups is ") for value in (8, None, "8", 8.0, b"8", torch.tensor([8]), np.array([8]))),
        *(([value], "each must be an int") for value in ("8", 1.5, None, True, (8,), 8.0)),
        *(([value], "each must be from 1 to 1024") for value in (0, -1, 1025, 1000000, 1 << 70)),
        ([], "at least one element"),
    ],
    "gradients": [
        (value, "must be True or False") for value in ("no", None, 0, 1, 2.0, [], torch.tensor(True))
    ],
    "jobs": [
        *(
            (value, "must be an int of at least 1")
            for value in ("x", "2", 0.5, 2.0, True, [2], torch.tensor(2))
        ),
        *((value, "must be at least 1") for value in (0, -1, -(1 << 70))),
    ],
    "log": [(value, "must be a text file") for value in ("log.txt", 1, True, [], Path("log"))],
}
RUNTIMES = ("no", None, 0, 1, [])
FOLDERS = ("", None, 3, b"x", ["x"], True)
UNWRITABLE = {
    "/dev/null": "File exists",
    "/dev/null/x": "Not a directory",
    "/proc/x": "cannot be written to",
    "/proc": "cannot be written to",
    "a\0b": "embedded null",
    "x" * 300: "File name too long",
    "/" + "/".join(["x" * 200] * 30): "File name too long",
    __file__: "File exists",
    __file__ + "/x": "Not a directory",
}
SMALL: dict[str, Any] = {"head_dims": [64], "dtypes": ["float16"], "features": ["plain"], "gradients": False}


def _warmups() -> Iterator[Case]:
    number = itertools.count()
    for keyword, rows in BAD.items():
        for value, words in rows:
            keywords = {"arch": "sm_90a", **SMALL, keyword: value}
            name = f"warmup {keyword} {next(number)} {type(value).__name__}"
            yield Case(name, lambda k=keywords: flash4_torch.warmup(**k), ArgumentError, words)
    yield Case(
        "no GPU to ask", lambda: ahead.kernels("cpu", [64], ["float16"], ["plain"], [1]), RangeError, "'cpu'"
    )


def _exports() -> Iterator[Case]:
    def export(folder: Any, **more: Any) -> object:
        return ahead.export(folder, "sm_90a", **SMALL, **more)

    for value in FOLDERS:
        words = f"folder is {value!r}, but it must be the path"
        yield Case(f"export to {value!r}", lambda v=value: export(v), ArgumentError, words)
    for number, (name, words) in enumerate(UNWRITABLE.items()):
        yield Case(f"export to unwritable {number}", lambda n=name: export(n), ExportError, words)
    for value in RUNTIMES:
        words = f"runtime is {value!r}, but it must be True or False"
        call = lambda v=value: export("/dev/null/x", runtime=v)  # noqa: E731
        yield Case(f"export with runtime {value!r}", call, ArgumentError, words)
    for keyword, value in {"jobs": 0, "log": 3, "runtime": 1, "groups": [0]}.items():
        call = lambda more={keyword: value}: export("must not be made", **more)  # noqa: E731
        yield Case(f"export with {keyword} {value}", call, ArgumentError, f"{keyword} is ")
    call = lambda: ahead.export("/dev/null/x", "sm_90a", head_dims=[60])  # noqa: E731
    yield Case("export of a bad head size", call, RangeError, "head_dims is 60")
    yield Case("export to a full log", lambda: export(io.BytesIO()), ArgumentError, "folder is <_io.BytesIO")


CASES = [*_warmups(), *_exports()]
