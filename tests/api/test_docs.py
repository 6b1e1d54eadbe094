"""The documentation is true: its code runs and prints what it says, and no public name is missing."""

from __future__ import annotations

import doctest
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import flash4_torch
from flash4_torch import integrations, testing

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    """A block of code: `pycon` is a session with its output, `python` a program."""

    kind: str
    code: str
    line: int


def blocks(text: str) -> list[Block]:
    return [Block(m[1], m[2], text.count("\n", 0, m.start()) + 1) for m in _BLOCK.finditer(text)]


PAGES = {
    str(path.relative_to(DOCS)): found
    for path in (
        DOCS / "index.md",
        *sorted((DOCS / "guides").glob("*.md")),
        *sorted((DOCS / "api").glob("*.md")),
    )
    if (found := blocks(path.read_text(encoding="utf-8")))
}
EXAMPLES = "".join(path.read_text(encoding="utf-8") for path in (DOCS.parent / "examples").glob("*.py"))
CODE = EXAMPLES + "".join(block.code for found in PAGES.values() for block in found)
REFERENCE = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))


def run(page: str, found: list[Block]) -> None:
    """Runs the blocks of a page one after another, as one program."""
    names: dict[str, object] = {"__name__": "__main__"}
    runner = doctest.DocTestRunner(verbose=False, optionflags=_FLAGS)
    for block in found:
        if block.kind == "python":
            # The lines are the page's, in tracebacks.
            exec(compile("\n" * block.line + block.code, page, "exec"), names)
            continue
        session = doctest.DocTestParser().get_doctest(block.code, names, page, page, block.line)
        session.globs = names
        report: list[str] = []
        runner.run(session, out=report.append, clear_globs=False)
        assert not report, "".join(report)


@pytest.fixture
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("_environment")
@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page_runs(page: str) -> None:
    code = "".join(block.code for block in PAGES[page])
    if "import timm" in code:
        pytest.importorskip("timm", reason="not among the packages that tests need")
    run(page, PAGES[page])


def test_wrong_output_is_noticed() -> None:
    with pytest.raises(AssertionError, match="Expected"):
        run("page", blocks("```pycon\n>>> 1 + 1\n3\n```\n"))
    with pytest.raises(ZeroDivisionError):
        run("page", blocks("text\n```python\n1 / 0\n```\n"))


def public() -> Iterator[str]:
    """Names of functions and classes, as users write them."""
    for module in (flash4_torch, testing, testing.emulate):
        for name in module.__all__:
            if not isinstance(getattr(module, name), ModuleType):
                yield f"{module.__name__}.{name}"
    yield from (f"{integrations.__name__}.{name}.register" for name in integrations.__all__)
    yield "flash4_torch.ahead.export"


NAMES = list(public())


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_in_the_reference(name: str) -> None:
    """A directive documents it, or its module with it as a member."""
    module, _, own = name.rpartition(".")
    alone = rf"^\.\. auto\w+:: {re.escape(name)}\b(?!\.)"
    as_member = rf"^\.\. automodule:: {re.escape(module)}\n   :members:.*\b{own}\b"
    assert re.search(f"{alone}|{as_member}", REFERENCE, re.MULTILINE)


@pytest.mark.parametrize("name", [name for name in NAMES if name.rpartition(".")[2].islower()])
def test_a_public_function_has_an_example_that_runs(name: str) -> None:
    module, _, own = name.rpartition(".")
    called = f"{module.rpartition('.')[2]}.{own}(" if own in ("register", "device") else f"{own}("
    assert called in CODE


def test_pages_of_errors_and_variables_are_generated() -> None:
    assert ".. automodule:: flash4_torch.errors\n   :members:\n" in REFERENCE
    assert "```{environment-variables}" in REFERENCE
