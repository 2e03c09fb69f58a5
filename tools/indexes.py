"""Write the lists of docs/decisions.md and benchmarks/README.md.

    python tools/indexes.py

The first list names every entry of the pages in docs/decisions/ with its date, and its status
unless it is in force. The second list names everything in benchmarks/CARD/DATE/ with its command
and title. Text before a list is written by hand and stays. `tests/project/test_readme.py` fails if
a list differs from this tool's output.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DECISIONS = ROOT / "docs" / "decisions.md"
BENCHMARKS = ROOT / "benchmarks" / "README.md"
MARK = "<!-- the list -->\n"
GONE = "4f89c99e"  # a commit with the removed tools (tools/README.md)


class Entry(NamedTuple):
    """One entry of a page in docs/decisions/."""

    title: str
    date: str
    status: str
    lines: int
    """Lines of the text, including the one with the date."""


def slug(title: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def entries(page: Path) -> list[Entry]:
    """Return the entries of a page. ValueError for an entry without date and status."""
    found = []
    for part in re.split(r"^### ", page.read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        stated = re.match(r"\n\*(\d{4}-\d\d-\d\d); ([^*]+)\.\*\n", body)
        if not stated:
            raise ValueError(f"{page}: {title} has no line *DATE; STATUS.*")
        found.append(Entry(title, stated[1], stated[2], len(body.strip().splitlines())))
    return found


def decisions() -> str:
    """The text of docs/decisions.md with a new list."""
    lines = []
    for page in sorted((DECISIONS.parent / "decisions").glob("*.md")):
        link = f"decisions/{page.name}"
        lines += ["", f"## [{page.read_text().splitlines()[0].removeprefix('# ')}]({link})", ""]
        for entry in entries(page):
            said = "" if entry.status == "in force" else f"; {entry.status}"
            lines.append(f"- [{entry.title}]({link}#{slug(entry.title)}) ({entry.date}{said})")
    return _with_list(DECISIONS, lines)


def benchmarks() -> str:
    """The text of benchmarks/README.md with a new list."""
    lines = []
    for card in sorted(path for path in BENCHMARKS.parent.iterdir() if any(path.glob("20*"))):
        lines += ["", f"## {card.name}", "", "| date | results | made by | title |"]
        lines += ["| --- | --- | --- | --- |"]
        for day in sorted(card.glob("20*"), reverse=True):
            for stem in sorted({path.name.partition(".")[0] for path in day.iterdir()}):
                parts = sorted(day.glob(f"{stem}.*")) or [day / stem]
                links = ", ".join(f"[{p.name}]({card.name}/{day.name}/{p.name})" for p in parts)
                lines.append(f"| {day.name} | {links} | {' | '.join(_made(card, parts))} |")
    return _with_list(BENCHMARKS, lines)


def _made(card: Path, parts: list[Path]) -> tuple[str, str]:
    """Return the command that made these files, and their title.

    The title is that of the sweep file of the same name or in the command, else the heading of a
    page.
    """
    files = [file for part in parts for file in (part.rglob("*") if part.is_dir() else [part])]
    pages = [f for f in files if f.suffix in (".md", ".txt") and f.name != "predicted.md"]
    text = "\n".join(page.read_text() for page in sorted(pages))
    found = re.search(r"tools[./]\w+(\.\w+)?|llmq (bench|rig)", text)
    given = re.search(r"benchmarks/(\w+/\w+\.yaml)", text)
    sweeps = [card / f"{parts[0].stem}.yaml", *([card.parent / given[1]] if given else [])]
    sweep = next((file for file in sweeps if file.exists()), None)
    if sweep:
        comment = re.match(r"(# .*\n)+?(?=#   )", sweep.read_text())[0]
        title = " ".join(line.removeprefix("# ") for line in comment.splitlines())
        title += f" ([{sweep.name}]({sweep.parent.name}/{sweep.name}))"
    else:
        heads = [page.read_text().splitlines()[0] for page in sorted(pages) if page.suffix == ".md"]
        title = next((head.removeprefix("# ") for head in heads if head.startswith("# ")), "")
    made = f"`{found[0]}`" if found else ""
    if made.startswith("`tools/") and not (ROOT / found[0]).exists():
        made += f" at {GONE}"
    return made, title


def _with_list(page: Path, lines: list[str]) -> str:
    return page.read_text().partition(MARK)[0] + MARK + "\n".join(lines) + "\n"


if __name__ == "__main__":
    DECISIONS.write_text(decisions())
    BENCHMARKS.write_text(benchmarks())
