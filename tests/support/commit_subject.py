"""A commit-msg hook: the subject is an area tag and an imperative, at most 72 characters.

python tests/support/commit_subject.py FILE     the file that holds the message
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LONGEST = 72
_FORM = re.compile(r"[a-z0-9_]+([ ,/.-]+[a-z0-9_]+)*: [^\sA-Z].*[^.\s]")
_MADE_BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ")


def faults(subject: str) -> list[str]:
    """Sentences that say what is wrong with a subject."""
    if subject.startswith(_MADE_BY_GIT):
        return []
    found = []
    if len(subject) > LONGEST:
        found.append(f"it has {len(subject)} characters, and {LONGEST} are the most")
    if not _FORM.fullmatch(subject):
        found.append("it must be an area, a colon and an imperative: 'sm90 bwd: order dQ by semaphore'")
    return found


def main(file: str) -> int:
    lines = Path(file).read_text(encoding="utf-8").splitlines() or [""]
    found = faults(lines[0])
    for fault in found:
        print(f"commit subject: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
