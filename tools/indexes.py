"""Write the list of docs/decisions.md.

    python tools/indexes.py

It names every entry of the pages in docs/decisions/, with its date, and its status unless it is in
force. The text in front of the list is written by hand and stays. `tests/test_readme.py` fails
where the list is not what this tool would write.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DECISIONS = ROOT / "docs" / "decisions.md"
MARK = "<!-- the list -->\n"


class Entry(NamedTuple):
    """One entry of a page in docs/decisions/."""

    title: str
    date: str
    status: str
    lines: int
    """Lines of its text, the one with the date included."""


def slug(title: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def entries(page: Path) -> list[Entry]:
    """The entries of a page. An entry without a date and a status raises ValueError."""
    found = []
    for part in re.split(r"^### ", page.read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        stated = re.match(r"\n\*(\d{4}-\d\d-\d\d); ([^*]+)\.\*\n", body)
        if not stated:
            raise ValueError(f"{page}: {title} has no line *DATE; STATUS.*")
        found.append(Entry(title, stated[1], stated[2], len(body.strip().splitlines())))
    return found


def decisions() -> str:
    """The text of docs/decisions.md, its list made anew."""
    lines = []
    for page in sorted((DECISIONS.parent / "decisions").glob("*.md")):
        link = f"decisions/{page.name}"
        lines += ["", f"## [{page.read_text().splitlines()[0].removeprefix('# ')}]({link})", ""]
        for entry in entries(page):
            said = "" if entry.status == "in force" else f"; {entry.status}"
            lines.append(f"- [{entry.title}]({link}#{slug(entry.title)}) ({entry.date}{said})")
    return DECISIONS.read_text().partition(MARK)[0] + MARK + "\n".join(lines) + "\n"


if __name__ == "__main__":
    DECISIONS.write_text(decisions())
