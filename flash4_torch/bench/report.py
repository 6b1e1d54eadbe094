"""Rows of results as aligned text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Row = dict[str, Any]
"""One measurement as plain data, ready for JSON."""


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table with columns as wide as their widest entry; numbers right-aligned, words left-aligned."""
    cells = [list(head), *([plain(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [all(_is_number(cell) for cell in column[1:]) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def plain(cell: object) -> str:
    """The text of a cell in a table."""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return str(cell)


def _is_number(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell[0] == "-"


def ratio(spread: Mapping[str, float]) -> str:
    """A ratio with its quartiles."""
    return f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
