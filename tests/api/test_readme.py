"""The README is true: its snippets run, and its table agrees with the backends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flash4_torch import support_table

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SNIPPETS = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "import torch" in code]


def test_support_table_is_generated() -> None:
    table = re.search(
        r"<!-- python -m flash4_torch.support_table -->\n(.*?)\n<!-- end -->", README, re.DOTALL
    )
    assert table is not None
    assert table[1] == support_table.markdown()


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippets_run(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) == 6
