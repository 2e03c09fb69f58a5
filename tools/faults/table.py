"""Tallies as JSON, to which later runs add, and as a table."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tools.faults.machine import CATEGORIES

_HEAD = """\
# Faults

`python -m tools.faults --report benchmarks/faults` has written this table; docs/checkpoints.md says
what must hold. Each machine tries one fault at a time, in a process of its own, on a model of a few
thousand weights on the CPU. bad counts the faults with a problem of any kind:

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
    path.with_suffix(".md").write_text(_HEAD + table([*known, record]))


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
