"""docs/migrating.md is true: its code runs, its links lead somewhere, and it names what exists."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
TEXT = PAGE.read_text(encoding="utf-8")
SECTIONS = {section.partition("\n")[0]: section for section in TEXT.split("\n## ")[1:]}


@pytest.mark.parametrize("library", SECTIONS)
def test_each_library_has_code_that_runs(library: str) -> None:
    snippets = re.findall(r"```python\n(.*?)```", SECTIONS[library], re.DOTALL)
    assert snippets
    for code in snippets:
        exec(compile(code, PAGE.name, "exec"), {})


def test_links_lead_somewhere() -> None:
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in SECTIONS}
    targets = re.findall(r"\]\(([^)\s]+)\)", TEXT)
    assert targets
    for target in targets:
        assert target[1:] in anchors if target.startswith("#") else (PAGE.parent / target).exists(), target


def test_names_exist() -> None:
    names = re.findall(r"\bflash4_torch(?:\.[a-z_]\w*)+", TEXT)
    assert [name for name in names if pkgutil.resolve_name(name) is None] == []
