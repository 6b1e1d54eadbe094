"""The words of docstrings, comments and documents: what of the project's vocabulary a test can hold."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path for folder in ("flash4_torch", "tests", "examples", "docs") for path in (ROOT / folder).rglob("*.py")
)
DOCUMENTS = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "flash4_torch").rglob("*.md"),
        *(ROOT / "csrc_stubs").rglob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
    )
)

_OPENINGS = """
After Against Among Around As At Before Behind Beside Between Beyond By During For From In Into Of On Over
Per Since That Through To Under Until Where Which Whose With Within Without
"""
OPENINGS = frozenset(_OPENINGS.split())
"""Words that a docstring does not begin with: its subject comes first."""

PRIVATE = {
    r"copy engine": "TMA",
    r"exponential unit|special function unit": "MUFU",
    r"machine code": "SASS",
    r"multiprocessors?": "SM",
    r"the assembler": "ptxas",
    r"tickets?": "work index",
    r"errands?": "store command",
    r"drawers?|drawing warps?": "RNG warp",
    r"storers?|storing warps?": "store warp",
    r"loading warps?": "load warp",
    r"key heads?": "KV head",
    r"filled up": "padded",
    r"heads apart|whole heads": "scope",
    r"gradients aside": "dkv_via_dq_smem",
    r"static stages": "unroll_stages",
    r"short way|long way": "fast path, slow path",
}
"""Words of our own where the field has one, which a dictionary would have to explain."""


class Text(NamedTuple):
    line: int
    words: str


def docstrings(source: str) -> Iterator[Text]:
    """Strings that stand as statements: docstrings, and what says the meaning of a field or a constant."""
    for node in ast.walk(ast.parse(source)):
        for statement in getattr(node, "body", ()) if not isinstance(node, (ast.Lambda, ast.IfExp)) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield Text(statement.lineno, value.value)


def comments(source: str) -> Iterator[Text]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(token.start[0], token.string)


def bad_openings(source: str) -> list[str]:
    return [f"{line}: {text[:60]}" for line, text in docstrings(source) if _first_word(text) in OPENINGS]


def _first_word(text: str) -> str:
    return re.split(r"\W", text.strip(), maxsplit=1)[0]


def private_words(texts: Iterator[Text]) -> list[str]:
    """A sentence for each private word outside of `code`."""
    found = []
    for line, text in texts:
        prose = re.sub(r"``?[^`]*``?", "", text)
        for pattern, instead in PRIVATE.items():
            found += [
                f"{line}: {m.group(0)!r} is {instead}" for m in re.finditer(rf"(?i)\b({pattern})\b", prose)
            ]
    return found


def prose_of(path: Path) -> Iterator[Text]:
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from (Text(i, line) for i, line in enumerate(source.splitlines(), 1))
    else:
        yield from docstrings(source)
        yield from comments(source)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_docstrings_open_with_their_subject(path: Path) -> None:
    assert not bad_openings(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", [*SOURCES, *DOCUMENTS], ids=name)
def test_words_are_the_fields(path: Path) -> None:
    if path == Path(__file__):
        pytest.skip("lists the words")
    assert not private_words(prose_of(path))


@pytest.mark.parametrize("opening", sorted(OPENINGS))
def test_an_opening_is_found(opening: str) -> None:
    assert bad_openings(f'def f():\n    """{opening} a tile."""') and bad_openings(
        f'x = 1\n"""{opening} x."""'
    )
    assert not bad_openings(f'def f():\n    """Tiles {opening.lower()} a head."""')


@pytest.mark.parametrize("word", ["the copy engine", "Tickets", "key heads", "static stages"])
def test_a_private_word_is_found(word: str) -> None:
    assert private_words(comments(f"x = 1  # {word}")) and private_words(docstrings(f'"""A {word}."""'))
    assert not private_words(docstrings(f'"""A `{word}`."""'))


@pytest.mark.parametrize(
    ("subject", "is_good"),
    [
        ("sm90 bwd: order dQ by semaphore", True),
        ("api, nn: name the argument", True),
        ("Fix things", False),
        ("sm90 bwd: Order dQ", False),
        ("sm90 bwd: " + "x" * 63, False),
        ("sm90 bwd: order dQ.", False),
        ("Merge branch 'x'", True),
        ("fixup! sm90 bwd: order dQ", True),
    ],
)
def test_commit_subjects(subject: str, is_good: bool, tmp_path: Path) -> None:
    """The hook that `pre-commit install` sets up for messages."""
    message = tmp_path / "message"
    message.write_text(f"{subject}\n\nDetails, of any length and form.\n")
    command = [sys.executable, str(ROOT / "tests" / "support" / "commit_subject.py"), str(message)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0) == is_good and bool(done.stderr) != is_good
