"""Links to files of the repository, from pages and from the Markdown that pages include.

A README links to its neighbours by relative paths, which work where it lies. On the site each of them becomes
the page that includes the neighbour, or else the file itself, offered for download.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

_DIRECTIVE = re.compile(r"^`{3,}\{(?:literal)?include\} (\S+)$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^()\s#:]+)(#[^()\s]*)?(?=\))")


def pages(docs: Path) -> dict[Path, Path]:
    """The page that includes a file, or the first of several, for each file that the site includes."""
    found: dict[Path, Path] = {}
    for page in sorted(docs.rglob("*.md")):
        for path in _DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            found.setdefault((page.parent / path).resolve(), page)
    return found


def relinked(text: str, folder: Path, docs: Path, including: dict[Path, Path]) -> str:
    """`text`, a file in `folder`, with links for a page anywhere below `docs`."""

    def link(match: re.Match[str]) -> str:
        target = (folder / match[1]).resolve()
        if not target.exists():
            return match[0]
        page = including.get(target) or including.get(target / "README.md", target)
        return f"/{os.path.relpath(page, docs)}{match[2] or ''}"

    return _LINK.sub(link, text)


def setup(app: Sphinx) -> dict[str, bool]:
    docs = Path(app.srcdir)
    including = pages(docs)

    def relink_page(_: Sphinx, name: str, content: list[str]) -> None:
        content[0] = relinked(content[0], (docs / name).parent, docs, including)

    def relink_included(_: Sphinx, path: Path, parent: str, content: list[str]) -> None:
        content[0] = relinked(content[0], (docs / path).parent, docs, including)

    app.connect("source-read", relink_page)
    app.connect("include-read", relink_included)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
