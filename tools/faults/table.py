"""Tallies as JSON, to which later runs add, and as a table."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from tools.faults.machine import CATEGORIES

_HEAD = """\
# Faults

`python -m tools.faults --report PATH` has written this table; docs/checkpoints.md says
what must hold. Each machine tries one fault at a time, in a process of its own, on a model of a few
thousand weights on the CPU. These runs are in it:

"""
_KINDS = """
bad counts the faults with a problem of any kind:

| kind | what it is |
| --- | --- |
| traceback | an end that is no single line, or a status that is none of llmq's |
| hang | no end in a minute, or in 20 s of processor time |
| lost | a checkpoint or model that was complete is gone, or the next command does not go on |
| touched | a file of somebody else is gone or changed |
| changed | another result without a word |
| left | what is ours stays behind after a command that ended well |

"""


def add_to_report(path: Path, record: dict[str, Any]) -> None:
    """Add a tally to path.json, in place of one of the same machine and seed; write path.md."""
    kept = path.with_suffix(".json")
    known = json.loads(kept.read_text())["faults"] if kept.exists() else []
    same = ("title", "seed")
    known = [r for r in known if any(r[name] != record[name] for name in same)]
    kept.write_text(json.dumps({"faults": [*known, record]}, indent=1) + "\n")
    records = [*known, record]
    path.with_suffix(".md").write_text(_HEAD + _runs(records) + _KINDS + table(records))


def commit_of_tree() -> str:
    """The commit that is tried, with a plus sign where files were changed; "" outside of git."""
    here = Path(__file__).parents[2]

    def git(*args: str) -> str:
        ended = subprocess.run(["git", *args], cwd=here, capture_output=True, text=True)
        return ended.stdout.strip()

    changed = git("status", "--porcelain", "--", "llmq", "tools", "tests")
    return git("rev-parse", "--short=9", "HEAD") + "+" * bool(changed)


def _runs(records: list[dict[str, Any]]) -> str:
    lines = ["| machine | seed | commit | tried | bad | seconds |"]
    lines.append("| --- |" + " --- |" * 5)
    for r in records:
        tried = sum(r["tried"].values())
        bad = sum(counts.get("bad", 0) for counts in r["bad"].values())
        facts = (r["title"], r["seed"], r["commit"], f"{tried:,}", f"{bad:,}", f"{r['seconds']:,}")
        lines.append(f"| {' | '.join(map(str, facts))} |")
    return "\n".join(lines) + "\n"


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: a row for each machine and kind, and one for all of a machine."""
    lines = ["| machine | what | tried | bad | " + " | ".join(CATEGORIES) + " |"]
    lines.append("| --- | --- |" + " --- |" * (2 + len(CATEGORIES)))
    titles = dict.fromkeys(record["title"] for record in records)
    for title in titles:
        tried: Counter[str] = Counter()
        bad: dict[str, Counter[str]] = {}
        for record in records:
            if record["title"] != title:
                continue
            tried.update(record["tried"])
            for kind, counts in record["bad"].items():
                bad.setdefault(kind, Counter()).update(counts)
        total = sum(bad.values(), Counter())
        rows = [(kind, tried[kind], bad[kind]) for kind in sorted(tried)]
        for kind, count, of in [("all", tried.total(), total), *rows]:
            numbers = [count, of["bad"], *(of[category] for category in CATEGORIES)]
            name = f"**{title}**" if kind == "all" else ""
            lines.append(f"| {name} | {kind} | " + " | ".join(f"{n:,}" for n in numbers) + " |")
    return "\n".join(lines) + "\n"
